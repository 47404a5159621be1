"""Comparing replays dump by dump: what is compared, what is not and why, gradients, the truth, the noise, and memory."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from comparecases import Tensors, given, publish_golden, write_replay
from replaycases import publish

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.document.renderings import as_text
from actordbg.judge import sides
from actordbg.judge.comparing import DETAILED, NAMED, compare, save
from actordbg.judge.comparison_document import conclusion, document
from actordbg.judge.thresholds import MEASURES, Thresholds
from actordbg.records.comparison_record import (
    MATCH,
    MISMATCH,
    NOT_COMPARED,
    WITHIN_NOISE,
    ComparisonRecord,
    DumpComparison,
    DumpNoise,
    NoiseRecord,
)
from actordbg.records.replay_record import ReplayInput
from actordbg.store import payload
from actordbg.store.layout import Store

INPUTS = [given(index) for index in range(4)]
TRAINED = {"loss": 2.0, "grad_norm": 4.0, "backward_s": 0.5}
Settings = dict[str, Any]
PLAIN: Settings = {}


def pair(
    store: Store, a: Settings = PLAIN, b: Settings = PLAIN, inputs: list[ReplayInput] = INPUTS, **asked: Any
) -> ComparisonRecord:
    """The comparison of the replay `r-02`, made up as `a` says, with `r-01`, made up as `b` says."""
    write_replay(store, "r-01", inputs, **b)
    write_replay(store, "r-02", inputs, **a)
    return compare(store, "r-02", "r-01", **asked)


def lone(store: Store, a: Settings = PLAIN, b: Settings = PLAIN) -> DumpComparison:
    """The comparison of one input."""
    return pair(store, a, b, INPUTS[:1]).dumps[0]


def grads(kept: dict[str, torch.Tensor], **more: Any) -> Settings:
    return {"gradients": lambda index: kept, **more}


def moved(by: dict[int, float], row: int = 1, position: int = 2) -> Any:
    """A change of one token of some inputs."""

    def change(index: int, made: Tensors) -> Tensors:
        made["log_probs"][row, position] += by.get(index, 0.0)
        return made

    return change


def reasons_of(record: ComparisonRecord) -> dict[str, str]:
    return {one.dump_id: one.not_compared["dump"] for one in record.dumps if "dump" in one.not_compared}


def test_what_dropout_drew_is_not_compared_with_a_truth_that_drops_nothing(store: Store) -> None:
    both = lambda index: {"extra": {"training": index < 2, "temperature": 1.0}}  # noqa: E731
    write_replay(store, "r-01", INPUTS, result=both, change=moved({0: 1.2, 1: -0.7}))
    write_replay(store, "r-02", INPUTS, truth="fp32", resolved={"undropped": 0.1})
    write_replay(store, "r-03", INPUTS, truth="fp32", resolved={"undropped": 0.0})
    record = compare(store, "r-01", "r-02")
    reason = "A ran in training mode, where its model drops 0.1 at random; the truth drops nothing"
    assert reasons_of(record) == dict.fromkeys((INPUTS[0].dump_id, INPUTS[1].dump_id), reason)
    assert {one.verdict for one in record.dumps if not one.not_compared} == {MATCH}
    assert compare(store, "r-01", "r-03").verdict == MISMATCH, "a model that drops nothing has no such excuse"


class TestTwoReplays:
    def test_the_same_values_match(self, store: Store) -> None:
        record = pair(store)
        assert (record.verdict, record.good, len(record.dumps), record.reasons) == (MATCH, True, 4, ())
        assert record.thresholds_from == "defaults for fp32"
        assert {one.log_probs and one.log_probs.max_abs for one in record.dumps} == {0.0}
        assert (record.a.replay_id, record.b.replay_id) == ("r-02", "r-01")
        assert record.a.label == "TOY MODEL (tiny) fp32 sdpa, not packed, plain"

    def test_where_no_threshold_judges_anything_nothing_was_compared(self, store: Store) -> None:
        off = Thresholds().override(dict.fromkeys(MEASURES, math.inf), "flags")
        record = pair(store, {"change": moved({0: 5.0})}, thresholds=off)
        assert (record.verdict, record.good) == (NOT_COMPARED, False)
        assert set(reasons_of(record).values()) == {"nothing that was measured has a threshold"}

    def test_the_worst_dump_comes_first_with_its_worst_token(self, store: Store) -> None:
        record = pair(store, {"change": moved({1: 0.125, 2: 0.5, 3: 2e-5})})
        assert [one.dump_id for one in record.dumps[:2]] == [INPUTS[2].dump_id, INPUTS[1].dump_id]
        assert [record.verdict, *(one.verdict for one in record.dumps)] == [MISMATCH, MISMATCH, MISMATCH, MATCH, MATCH]
        (worst,) = record.dumps[0].worst_tokens
        assert (worst.row, worst.position) == (1, 2) and worst.difference == pytest.approx(0.5)
        assert record.dumps[0].sequences and record.dumps[0].sequences.max_abs == pytest.approx(0.5)
        assert record.dumps[0].reasons[0] == "max_abs 0.5 is above 0.0001"

    def test_what_the_mask_leaves_out_does_not_count(self, store: Store) -> None:
        assert pair(store, {"change": moved({0: 100.0}, position=7)}).verdict == MATCH

    def test_a_nan_on_one_side_is_a_mismatch_and_on_both_is_none(self, store: Store) -> None:
        loose = Thresholds().override({"max_abs": 1e9}, "test")
        spoiled = moved({0: math.nan, 1: math.nan})
        record = pair(store, {"change": spoiled}, {"change": moved({0: math.nan})}, thresholds=loose)
        assert [one.verdict for one in record.dumps] == [MISMATCH, MATCH, MATCH, MATCH]
        assert record.dumps[0].dump_id == INPUTS[1].dump_id
        assert record.dumps[0].reasons == ("1 of 12 log-probs are not finite on one side only",)
        assert record.dumps[0].worst_tokens[0].a is None

    def test_entropies_loss_and_gradient_norm(self, store: Store) -> None:
        def change(index: int, made: Tensors) -> Tensors:
            return made | {"entropy": made["entropy"] + 0.25 * (index == 0)}

        def result(index: int) -> Settings:
            return TRAINED | ({"loss": 2.5} if index == 1 else {"grad_norm": 5.0} if index == 2 else {})

        record = pair(store, {"change": change, "result": result}, {"result": lambda index: TRAINED})
        dumps = sorted(record.dumps, key=lambda one: one.dump_id)
        assert dumps[0].entropy and dumps[0].entropy.max_abs == pytest.approx(0.25)
        assert [(one.loss_abs, one.grad_norm_rel) for one in dumps] == [(0, 0), (0.5, 0), (0, 0.25), (0, 0)]
        assert [one.verdict for one in dumps] == [MISMATCH, MISMATCH, MISMATCH, MATCH]

    def test_what_only_one_side_has_is_said(self, store: Store) -> None:
        def without(index: int, made: Tensors) -> Tensors:
            return {name: tensor for name, tensor in made.items() if name != "entropy"}

        one = lone(store, {"result": lambda index: TRAINED}, {"change": without})
        assert one.verdict == MATCH
        assert one.not_compared == {
            "entropy": "only A has entropies", "loss": "only A has the loss", "gradient norm": "only A has the gradient norm",
        }  # fmt: skip

    def test_a_loss_that_is_not_a_number_is_no_missing_one(self, store: Store) -> None:
        """A journal has null for both."""
        one = lone(store, {"result": lambda index: TRAINED | {"loss": None}}, {"result": lambda index: TRAINED})
        assert (one.verdict, one.reasons) == (MISMATCH, ("the loss is not finite on one side only",))

    def test_ulp_only_for_equal_dtypes(self, store: Store) -> None:
        record = pair(store, {"dtype": "bf16"}, {"dtype": "fp32"}, INPUTS[:1])
        write_replay(store, "r-03", INPUTS[:1], dtype="bf16", change=moved({0: 0.001}))
        assert record.dumps[0].log_probs and record.dumps[0].log_probs.max_ulp is None
        assert record.thresholds_from == "defaults for bf16", "the weaker dtype decides"
        same = compare(store, "r-03", "r-02").dumps[0].log_probs
        assert same and same.max_ulp in (0, 1)

    def test_a_call_that_was_autocast_was_computed_in_that(self, store: Store) -> None:
        """Weights in fp32, and a record that says autocast: the replay followed it, unless a dtype was asked for."""
        inputs = publish(store, 2, length=16, autocast_dtype="torch.bfloat16")
        off = {"change": moved({0: 0.01})}
        followed = pair(store, off | {"dtype": None, "resolved": {"dtype": "fp32"}}, inputs=inputs)
        write_replay(store, "r-03", inputs, **off)
        assert (followed.verdict, followed.a.dtype, followed.thresholds_from) == (MATCH, "bf16", "defaults for bf16")
        assert compare(store, "r-03", "r-01").verdict == MISMATCH


class TestWhatIsNotCompared:
    def test_each_dump_has_its_reason(self, store: Store) -> None:
        inputs = [given(index) for index in range(10)]

        def change(index: int, made: Tensors) -> Tensors | None:
            if index == 3:
                made["mask"][0, 0] = False
            if index == 4:
                made = {name: tensor[:, 1:] for name, tensor in made.items()}
            return None if index == 2 else made

        results = {5: {"folded_ids": False}, 6: {"extra": {"temperature": 0.5}}}
        write_replay(store, "r-01", inputs[:8], result=lambda index: {"status": "hung"} if index in (1, 7) else {})
        write_replay(store, "r-02", [*inputs[:8], inputs[9]], change=change, result=lambda index: results.get(index, {}))
        (store.replays / "r-02" / "tensors" / f"{inputs[0].dump_id}.safetensors").write_bytes(b"not a tensor")
        record = compare(store, "r-02", "r-01")
        found = reasons_of(record)
        assert found[inputs[0].dump_id].startswith("A: its kept tensors cannot be read")
        assert {index: found[inputs[index].dump_id] for index in (1, 2, 3, 4, 5, 6, 7, 9)} == {
            1: "B: it hung",
            2: "A: its tensors are gone",
            3: "the masks differ in 1 tokens",
            4: "A's log-probs are [2, 7], B's [2, 8]",
            5: "token ids were folded into the vocabulary on side B only",
            6: "A's temperature is 0.5, B's 1",
            7: "B: it hung",
            9: "only A replayed it, B did not",
        }
        assert (record.verdict, record.good) == (NOT_COMPARED, False), "nothing is left: that is no agreement"

    @pytest.mark.parametrize("status", ["failed", "crashed", "hung"])
    def test_what_only_b_got_through_is_a_mismatch_whatever_else_agrees(self, store: Store, status: str) -> None:
        def lost(index: int) -> dict[str, Any]:
            return {"status": status, "error_class": "RuntimeError"} if index == 1 else {}

        record = pair(store, {"result": lost})
        assert (record.verdict, record.good, record.dumps[0].dump_id) == (MISMATCH, False, INPUTS[1].dump_id)
        assert record.dumps[0].reasons == (f"A: it {status} (RuntimeError), and B has its results",)
        assert [one.verdict for one in record.dumps[1:]] == [MATCH] * (len(INPUTS) - 1)
        said = conclusion(record)
        assert said.startswith("A failed on 1 dump that B has the results of.") and "outside" not in said
        assert "further from the truth" not in said
        text = " ".join(as_text(document(record, 0)).split())
        assert text.startswith("failed: A failed where B did not") and text.count(record.dumps[0].reasons[0]) == 1
        assert compare(store, "r-01", "r-02").verdict == MATCH, "B's failure says nothing about A"

    def test_what_failed_on_both_sides_is_no_difference(self, store: Store) -> None:
        lost = {"result": lambda index: {"status": "failed", "error_class": "RuntimeError"} if index == 1 else {}}
        record = pair(store, lost, lost)
        assert record.verdict == MATCH and reasons_of(record) == {INPUTS[1].dump_id: "A: it failed (RuntimeError)"}

    def test_nothing_in_common_and_nothing_selected(self, store: Store) -> None:
        write_replay(store, "r-01", INPUTS[:2])
        write_replay(store, "r-02", INPUTS[2:])
        apart = compare(store, "r-02", "r-01")
        assert (apart.verdict, len(apart.dumps)) == (NOT_COMPARED, 4)
        nothing = compare(store, "r-02", "r-01", only=set())
        assert (nothing.verdict, nothing.dumps, nothing.good) == (NOT_COMPARED, (), False)
        assert nothing.reasons == ("the selection has none of their dumps",)

    @pytest.mark.parametrize(
        ("settings", "why"),
        [
            ({"change": lambda index, made: None, "keep_tensors": False}, "A: it kept no tensors (--no-keep-tensors)"),
            ({"change": lambda index, made: made | {"mask": torch.zeros_like(made["mask"])}}, "its mask selects no token"),
        ],
    )
    def test_what_has_nothing_to_compare_is_no_agreement(self, store: Store, settings: Settings, why: str) -> None:
        record = pair(store, settings, settings)
        assert set(reasons_of(record).values()) == {why} and not record.good

    @pytest.mark.parametrize(
        ("other", "why"),
        [({"model": "/m"}, "A ran the model tiny, B /m"), ({"resolved": {"num_layers": 4}}, "A ran 2 layers, B 4")],
    )
    def test_other_weights(self, store: Store, other: dict[str, Any], why: str) -> None:
        record = pair(store, b=other)
        assert (record.verdict, record.reasons) == (NOT_COMPARED, (why,))
        assert set(reasons_of(record).values()) == {why}

    def test_an_input_that_finished_with_a_nan_on_both_sides_is_compared(self, store: Store) -> None:
        failed = {"change": moved({0: math.nan}), "result": lambda index: {"status": "failed", "signature": "non-finite-output"}}
        assert lone(store, failed, failed).verdict == MATCH

    def test_names_that_mean_nothing(self, store: Store) -> None:
        write_replay(store, "r-01", INPUTS)
        for a, b in (
            ("r-01", "r-01"),
            ("last", "r-01"),
            ("golden", "r-01"),
            ("truth", "r-01"),
            ("r-01", "truth"),
            ("r-01", "zz"),
        ):
            with pytest.raises(UsageError) as raised:
                compare(store, a, b)
            assert raised.value.hint
        (store.replays / "r-01" / "spec.json").unlink()
        with pytest.raises((StoreProblem, UsageError)):
            compare(store, "r-01", "golden")


class TestGradients:
    NAMES = {"model.norm.weight": 16, "lm_head.weight": 64, "bias": 8}

    def gradients(self, seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(size, generator=generator) for name, size in self.NAMES.items()}

    def test_together_and_the_worst_parameters_first(self, store: Store) -> None:
        ours = self.gradients(1)
        theirs = {name: tensor.clone() for name, tensor in ours.items()}
        ours["bias"] = ours["bias"] * 1.5
        ours["lm_head.weight"] = ours["lm_head.weight"] * 1.25
        trained = {"result": lambda index: TRAINED}
        one = lone(store, grads(ours, **trained), grads(theirs, **trained))
        assert [item.name for item in one.parameters] == ["bias", "lm_head.weight"], "an equal one is no bad one"
        assert one.parameters[0].figures.distance == pytest.approx(0.5)
        assert one.parameters[0].figures.cosine == pytest.approx(1.0)
        assert one.distances == {"bias": 0.5, "lm_head.weight": 0.25, "model.norm.weight": 0.0}, (
            "every one has its place in a picture"
        )
        a, b = (np.concatenate([side[name].double().numpy() for name in self.NAMES]) for side in (ours, theirs))
        whole = one.gradients
        assert whole and whole.count == 88
        assert whole.distance == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b))
        assert whole.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
        assert whole.max_abs == pytest.approx(np.abs(a - b).max(), rel=1e-6)
        assert whole.p99_abs == pytest.approx(np.percentile(np.abs(a - b), 99), rel=1e-5)
        assert whole.mean_rel == pytest.approx(np.mean(np.abs((a - b) / b)), rel=1e-5)
        assert one.verdict == MISMATCH
        assert one.reasons == (
            f"gradient_distance {whole.distance:.4g} is above 0.001",
            "parameter_distance 0.5 is above 0.01 (bias)",
        )

    def test_a_sample_counts_by_the_size_of_the_whole(self, store: Store) -> None:
        ours = {"small": torch.ones(4), "large": torch.full((10,), 2.0)}
        theirs = {"small": torch.full((4,), 3.0), "large": torch.full((10,), 2.0)}
        one = lone(store, grads(ours, numel={"large": 1000}), grads(theirs, numel={"large": 1000}))
        assert one.gradients and one.gradients.distance == pytest.approx(math.sqrt(4 * 4 / (4 * 9 + 1000 * 4)))
        assert [(item.name, item.sampled) for item in one.parameters] == [("small", False)]

    def test_what_cannot_be_compared_is_named(self, store: Store) -> None:
        ours = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(5)}
        theirs = {"a": torch.ones(4), "c": torch.ones(4), "d": torch.ones(4), "e": torch.ones(4)}
        one = lone(store, grads(ours), grads(theirs))
        assert one.not_compared == {
            "gradient of b": "only A has it",
            "gradients of 2 parameters, e.g. d": "only B has it",
            "gradient of c": "another size on each side",
        }
        assert one.gradients and (one.gradients.count, one.gradients.distance) == (4, 0.0)

    @pytest.mark.parametrize(
        ("a", "b", "reason"),
        [
            (math.nan, 1.0, "gradients are not finite on one side only: w"),
            (1.0, math.inf, "gradients are not finite on one side only: w"),
            (1.0, 0.0, "B's gradients are all zero, A's are not"),
        ],
    )
    def test_broken_ones_are_a_mismatch(self, store: Store, a: float, b: float, reason: str) -> None:
        one = lone(store, grads({"w": torch.full((3,), a)}), grads({"w": torch.full((3,), b)}))
        assert (one.verdict, one.reasons) == (MISMATCH, (reason,))

    def test_only_one_side_kept_them(self, store: Store) -> None:
        assert lone(store, grads({"w": torch.ones(3)})).not_compared == {"gradients": "only A has gradients"}

    def test_gradients_over_other_inputs_are_not_compared(self, store: Store) -> None:
        """Two ranks that average their gradients over two inputs: only the average is there, for both."""
        both = sorted(one.dump_id for one in INPUTS[:2])

        def averaged(index: int) -> dict[str, Any]:
            return TRAINED | {"grad_norm": 9.0, "extra": {"gradient_over": both[::-1], "temperature": 1.0}}

        record = pair(store, {"result": averaged}, {"result": lambda index: TRAINED}, INPUTS[:2])
        write_replay(store, "r-03", INPUTS[:2], result=averaged)
        assert record.verdict == MATCH
        assert {one.not_compared["gradients"] for one in record.dumps} == {"A's gradient is over 2 inputs, B's over 1"}
        assert {one.grad_norm_rel for one in record.dumps} == {None}
        assert {one.grad_norm_rel for one in compare(store, "r-03", "r-02").dumps} == {0.0}


class TestGolden:
    def recorded(self, store: Store, change: float = 0.0, outputs: bool = True, **replayed: Any) -> list[ReplayInput]:
        """Dumps with the run's own log-probs and entropies, and a replay `r-01` that got them, moved by `change` in one token."""
        inputs, made = publish_golden(store, 3, outputs)
        for tensors in made:
            tensors["log_probs"][1, 0] += change
        options: Settings = {"model": "/m", "result": lambda index: {"folded_ids": False}}
        write_replay(store, "r-01", inputs, change=lambda index, _: made[index], **(options | replayed))
        return inputs

    def test_a_replay_that_got_what_the_run_got(self, store: Store) -> None:
        self.recorded(store)
        record = compare(store, "r-01", "golden")
        assert (record.verdict, record.b.kind, record.b.replay_id, record.b.dtype) == (MATCH, "golden", None, "fp32")
        assert record.thresholds_from == "defaults for fp32"
        assert all(one.entropy and one.entropy.max_abs == 0 for one in record.dumps)

    def test_it_needs_no_torch_and_answers_the_same(self, store: Store) -> None:
        """Golden in bf16, ids of the worst tokens, gradients beside: the record of a process that can import neither torch nor
        SQLAlchemy."""
        inputs = self.recorded(store, change=0.5)
        for item in inputs:
            dump = payload.load(store.root / item.path)
            golden = {name: one.bfloat16() for name, one in dump.tensors.items() if name.startswith("output.")}
            store.publish_dump(*payload.encode(dump.record, dump.tensors | golden))
        write_replay(store, "r-02", inputs, gradients=lambda index: {"w": torch.arange(5.0) + index})
        write_replay(store, "r-03", inputs, gradients=lambda index: {"w": torch.arange(5.0)})
        program = (
            "import sys; sys.argv[0] = 'actordbg'\n"
            "sys.modules |= dict.fromkeys(('torch', 'sqlalchemy'))\n"
            "from actordbg.cli.app import main; main()"
        )
        for a, b in (("r-01", "golden"), ("r-02", "r-03")):
            command = [sys.executable, "-c", program, "--store", str(store.root), "compare", a, b, "--json"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 1, done.stderr
            (kept,) = store.comparisons.glob("*.json")
            said, here = ComparisonRecord.from_file(kept), compare(store, a, b)
            assert (said.dumps, said.verdict) == (here.dumps, MISMATCH)
            assert {one.token_id is not None for one in said.dumps[0].worst_tokens} == ({True} if b == "golden" else set())
            kept.unlink()

    def test_the_worst_tokens_have_their_ids(self, store: Store) -> None:
        inputs = self.recorded(store, change=0.5)
        record = compare(store, "r-01", "golden")
        assert record.verdict == MISMATCH
        assert record.dumps[0].log_probs and record.dumps[0].log_probs.max_abs == pytest.approx(0.5)
        token = record.dumps[0].worst_tokens[0]
        dump = payload.load(store.root / next(i.path for i in inputs if i.dump_id == record.dumps[0].dump_id))
        assert token.token_id == int(dump.tensors["sequences"][1, 8]), "of 16 ids, 8 are actions: the first is the ninth"

    def test_what_cannot_be_compared_with_the_run(self, store: Store) -> None:
        self.recorded(store, outputs=False)
        assert set(reasons_of(compare(store, "r-01", "golden")).values()) == {sides.NO_OUTPUTS}

    @pytest.mark.parametrize(
        ("replayed", "why"),
        [
            ({"model": "tiny"}, "the embedded tiny model is not the run's"),
            ({"num_layers": 2}, "the first 2 layers only"),
            ({"result": lambda index: {"folded_ids": True}}, "folded into the vocabulary on side A only"),
            (
                {"result": lambda index: {"folded_ids": False, "extra": {"temperature": 0.7}}},
                "A's temperature is 0.7, B's 1",
            ),
        ],
    )
    def test_another_model_is_refused(self, store: Store, replayed: dict[str, Any], why: str) -> None:
        self.recorded(store, **replayed)
        record = compare(store, "r-01", "golden")
        assert record.verdict == NOT_COMPARED
        assert all(why in text for text in reasons_of(record).values())

    def test_dumps_that_are_gone(self, store: Store) -> None:
        inputs = self.recorded(store)
        (store.root / inputs[0].path).unlink()
        record = compare(store, "r-01", "golden")
        assert record.verdict == MATCH
        assert "the dump cannot be read" in reasons_of(record)[inputs[0].dump_id]


def test_weights_that_were_rounded_otherwise_are_mentioned(store: Store) -> None:
    record = pair(store, {"dtype": "bf16"}, {"truth": "fp64", "dtype": "fp32"})
    assert record.verdict == MATCH
    assert "their rounding is part of the difference" in record.reasons[0]


def test_the_noise_floor_decides_what_is_real(store: Store) -> None:
    floor = {"max_abs": 0.3, "p99_abs": 0.3, "mean_abs": 0.3, "clip_share": 0.5}
    strict = (DumpNoise(INPUTS[1].dump_id, dict.fromkeys(floor, 1e-6)),)
    noise = NoiseRecord("n-1", "", "r-02", {}, "label", "fp32", (), (), floor)
    record = pair(store, {"change": moved({0: 0.25, 1: 0.25})}, noise=noise)
    assert (record.verdict, record.good, record.noise_id, record.reasons) == (WITHIN_NOISE, True, "n-1", ())
    own = NoiseRecord("n-2", "", "other", {}, "another one", "fp32", (), strict, floor)
    record = compare(store, "r-02", "r-01", noise=own)
    assert [one.verdict for one in record.dumps] == [MISMATCH, WITHIN_NOISE, MATCH, MATCH]
    assert record.reasons == ("the noise floor was measured with another replay, other (another one)",)


def test_what_noise_does_not_explain_is_named_also_where_the_thresholds_allow_it(store: Store) -> None:
    floor = {"max_abs": 0.005, "p99_abs": 0.5, "mean_abs": 0.5}
    noise = NoiseRecord("n-1", "", "r-02", {}, "label", "bf16", (), (), floor)
    record = pair(store, {"dtype": "bf16", "change": moved({0: 0.02})}, {"dtype": "bf16"}, noise=noise)
    assert record.verdict == MATCH
    beyond = {one.dump_id: one.beyond_noise for one in record.dumps}
    assert beyond == {INPUTS[0].dump_id: ("max_abs 0.02 (noise 0.005)",)} | {one.dump_id: () for one in INPUTS[1:]}
    assert "1 dump within the thresholds differs by more than the noise" in conclusion(record)
    assert "noise" not in conclusion(compare(store, "r-02", "r-01"))


def test_the_record_survives_its_file(store: Store) -> None:
    ours = grads({"w": torch.zeros(3)}, change=moved({0: math.nan, 1: 0.5}))
    record = pair(store, ours, grads({"w": torch.ones(3)}))
    path = save(store, record)
    assert path == store.comparisons / f"{record.comparison_id}.json"
    assert ComparisonRecord.from_json(path.read_bytes()) == record


def test_only_the_worst_dumps_keep_their_details(store: Store) -> None:
    inputs = [given(index) for index in range(DETAILED + 20)]
    each = moved({index: 0.001 * (index + 1) for index in range(len(inputs))})
    dumps = pair(store, {"change": each}, inputs=inputs).dumps
    assert [bool(one.worst_tokens) for one in dumps] == [True] * DETAILED + [False] * 20
    assert dumps[0].dump_id == inputs[-1].dump_id
    assert NAMED < DETAILED


_MEMORY = """
import resource, sys
from actordbg.judge.comparing import compare
from actordbg.store.layout import Store

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

store = Store(sys.argv[1])
only = set(sys.argv[2].split(","))
assert compare(store, "r-02", "r-01", only=only).verdict == "match"
few = peak()
record = compare(store, "r-02", "r-01")
assert record.verdict == "match" and len(record.dumps) == 400
print(peak() - few)
"""


@pytest.mark.slow
def test_hundreds_of_dumps_take_no_more_memory_than_ten(store: Store) -> None:
    """Each side of each dump has 80 kB of tensors, 64 MB in all: links to one file, so that the disk has them once."""
    inputs = [given(index) for index in range(400)]
    big = {"log_probs": -torch.rand(4, 4096), "mask": torch.ones(4, 4096, dtype=torch.bool)}
    for name in ("r-01", "r-02"):
        write_replay(store, name, inputs, change=lambda index, _: big if index == 0 else None)
        folder = store.replays / name / "tensors"
        first = folder / f"{inputs[0].dump_id}.safetensors"
        for item in inputs[1:]:
            os.link(first, folder / f"{item.dump_id}.safetensors")
    ten = ",".join(one.dump_id for one in inputs[:10])
    command = [sys.executable, "-c", _MEMORY, str(store.root), ten]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 25_000, "kilobytes"
    shutil.rmtree(store.root)
