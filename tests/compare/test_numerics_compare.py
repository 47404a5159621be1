"""Comparing replays dump by dump: what is compared, what is not and why, gradients, the truth, the noise, and memory."""

from __future__ import annotations

import math
import os
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from commandline import program
from comparecases import Tensors, given, publish_golden, write_replay
from replaycases import publish

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.compare import sides
from actordbg.compare.comparing import DETAILED, compare, save
from actordbg.compare.thresholds import MEASURES
from actordbg.document.renderings import as_text
from actordbg.judge.comparison_document import conclusion, document
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


def grads(**kept: torch.Tensor) -> Settings:
    return {"gradients": lambda index: kept}


def results(each: Settings) -> Settings:
    return {"result": lambda index: each}


def moved(by: dict[int, float], row: int = 1, position: int = 2) -> Settings:
    """A change of one token of some inputs."""

    def change(index: int, made: Tensors) -> Tensors:
        made["log_probs"][row, position] += by.get(index, 0.0)
        return made

    return {"change": change}


def reasons_of(record: ComparisonRecord) -> dict[str, str]:
    return {dump.dump_id: dump.not_compared["dump"] for dump in record.dumps if "dump" in dump.not_compared}


def without_entropy(index: int, made: Tensors) -> Tensors:
    return {name: tensor for name, tensor in made.items() if name != "entropy"}


def test_what_dropout_drew_is_not_compared_with_a_truth_that_drops_nothing(store: Store) -> None:
    both = lambda index: {"extra": {"training": index < 2, "temperature": 1.0}}  # noqa: E731
    write_replay(store, "r-01", INPUTS, result=both, **moved({0: 1.2, 1: -0.7}))
    write_replay(store, "r-02", INPUTS, truth="fp32", resolved={"undropped": 0.1})
    write_replay(store, "r-03", INPUTS, truth="fp32", resolved={"undropped": 0.0})
    record = compare(store, "r-01", "r-02")
    reason = "A ran in training mode, where its model drops 0.1 at random; the truth drops nothing"
    assert reasons_of(record) == dict.fromkeys((INPUTS[0].dump_id, INPUTS[1].dump_id), reason)
    assert {dump.verdict for dump in record.dumps if not dump.not_compared} == {MATCH}
    assert compare(store, "r-01", "r-03").verdict == MISMATCH, "a model that drops nothing has no such excuse"


def test_the_same_values_match_and_what_the_mask_leaves_out_does_not_count(store: Store) -> None:
    record = pair(store, moved({0: 100.0}, position=7))
    assert (record.verdict, record.good, len(record.dumps), record.reasons) == (MATCH, True, 4, ())
    assert record.thresholds_from == "defaults for fp32"
    assert {dump.log_probs and dump.log_probs.max_abs for dump in record.dumps} == {0.0}
    assert (record.a.replay_id, record.b.replay_id) == ("r-02", "r-01")
    assert record.a.label == "TOY MODEL (tiny) fp32 sdpa, not packed, plain"


def test_the_worst_dump_comes_first_with_its_worst_token(store: Store) -> None:
    record = pair(store, moved({1: 0.125, 2: 0.5, 3: 2e-5}))
    assert [dump.dump_id for dump in record.dumps[:2]] == [INPUTS[2].dump_id, INPUTS[1].dump_id]
    assert [record.verdict, *(dump.verdict for dump in record.dumps)] == [MISMATCH, MISMATCH, MISMATCH, MATCH, MATCH]
    (worst,) = record.dumps[0].worst_tokens
    assert (worst.row, worst.position) == (1, 6) and worst.difference == pytest.approx(0.5)
    assert record.dumps[0].sequences and record.dumps[0].sequences.max_abs == pytest.approx(0.5)
    assert record.dumps[0].reasons == ("p99_abs 0.445 is above 5e-05",), "the furthest"
    off = compare(store, "r-02", "r-01", thresholds=dict.fromkeys(MEASURES, math.inf))
    assert (off.verdict, off.good) == (NOT_COMPARED, False), "where no threshold judges anything nothing was compared"
    assert set(reasons_of(off).values()) == {"no measured value has a threshold"}


def test_a_nan_on_one_side_is_a_mismatch_and_on_both_is_none(store: Store) -> None:
    record = pair(store, moved({0: math.nan, 1: math.nan}), moved({0: math.nan}), thresholds={"max_abs": 1e9})
    assert [dump.verdict for dump in record.dumps] == [MISMATCH, MATCH, MATCH, MATCH]
    assert record.dumps[0].dump_id == INPUTS[1].dump_id
    assert record.dumps[0].reasons == ("1 of 12 log-probs are not finite on one side only",)
    assert record.dumps[0].worst_tokens[0].a is None
    assert ComparisonRecord.from_json((path := save(store, record)).read_bytes()) == record
    assert path == store.comparisons / f"{record.comparison_id}.json"


def test_entropies_loss_and_gradient_norm(store: Store) -> None:
    def change(index: int, made: Tensors) -> Tensors:
        return made | {"entropy": made["entropy"] + 0.25 * (index == 0)}

    def result(index: int) -> Settings:
        return TRAINED | ({"loss": 2.5} if index == 1 else {"grad_norm": 5.0} if index == 2 else {})

    dumps = pair(store, {"change": change, "result": result}, results(TRAINED)).dumps
    by_id = sorted(dumps, key=lambda dump: dump.dump_id)
    assert by_id[0].entropy and by_id[0].entropy.max_abs == pytest.approx(0.25)
    assert [(dump.loss_abs, dump.grad_norm_rel) for dump in by_id] == [(0, 0), (0.5, 0), (0, 0.25), (0, 0)]
    assert [dump.verdict for dump in by_id] == [MISMATCH, MISMATCH, MISMATCH, MATCH]


@pytest.mark.parametrize(
    ("a", "b", "verdict", "reasons", "left"),
    [
        (results(TRAINED), {"change": without_entropy}, MATCH, (),
         {"entropy": "only A has entropies", "loss": "only A has the loss", "gradient norm": "only A has the gradient norm"}),
        # a journal has null for a NaN too
        (results(TRAINED | {"loss": None}), results(TRAINED), MISMATCH, ("the loss is not finite on one side only",), {}),
        *((grads(w=torch.full((3,), a)), grads(w=torch.full((3,), b)), MISMATCH, (reason,), {}) for a, b, reason in (
            (math.nan, 1.0, "gradients are not finite on one side only: w"),
            (1.0, math.inf, "gradients are not finite on one side only: w"),
            (1.0, 0.0, "B's gradients are all zero, A's are not"))),
        (grads(w=torch.ones(3)), PLAIN, MATCH, (), {"gradients": "only A has gradients"}),
        (grads(a=torch.ones(4), b=torch.ones(4), c=torch.ones(5)),
         grads(a=torch.ones(4), c=torch.ones(4), d=torch.ones(4), e=torch.ones(4)), MISMATCH, ("A has no gradient of d, e",),
         {"gradient of b": "only A has it", "gradient of d, e": "only B has it",
          "gradient of c": "different sizes"}),
        *((moved({0: value}, position=-1), PLAIN, MISMATCH,
           ("1 log-probs outside the mask are not finite on one side only: multiplying by the mask keeps them",), {})
          for value in (math.nan, math.inf)),
        # an input that finished with a NaN on both sides is compared
        (*[moved({0: math.nan}) | results({"status": "failed", "signature": "non-finite-output"})] * 2, MATCH, (), {}),
    ],
)  # fmt: skip
def test_what_one_side_lacks_is_said_and_what_is_broken_on_one_is_a_mismatch(
    store: Store, a: Settings, b: Settings, verdict: str, reasons: tuple[str, ...], left: dict[str, str]
) -> None:
    dump = lone(store, a, b)
    assert (dump.verdict, dump.reasons, dump.not_compared) == (verdict, reasons, left)


def test_the_weaker_dtype_decides_and_units_of_last_place_are_of_equal_ones(store: Store) -> None:
    record = pair(store, {"dtype": "bf16"}, {"dtype": "fp32"}, INPUTS[:1])
    write_replay(store, "r-03", INPUTS[:1], dtype="bf16", **moved({0: 0.001}))
    assert record.dumps[0].log_probs and record.dumps[0].log_probs.max_ulp is None
    assert record.thresholds_from == "defaults for bf16"
    same = compare(store, "r-03", "r-02").dumps[0].log_probs
    assert same and same.max_ulp in (0, 1)
    rounded = pair(Store(store.root / "other").create(), {"dtype": "bf16"}, {"truth": "fp64", "dtype": "fp32"})
    assert rounded.verdict == MATCH and "their rounding is part of the difference" in rounded.reasons[0]


def test_a_call_that_was_autocast_was_computed_in_that(store: Store) -> None:
    """Weights in fp32, and a record that says autocast: the replay followed it, unless a dtype was requested."""
    inputs = publish(store, 2, length=16, autocast_dtype="torch.bfloat16")
    off = moved({0: 0.01})
    followed = pair(store, off | {"dtype": None, "resolved": {"dtype": "fp32"}}, inputs=inputs)
    write_replay(store, "r-03", inputs, **off)
    assert (followed.verdict, followed.a.dtype, followed.thresholds_from) == (MATCH, "bf16", "defaults for bf16")
    assert compare(store, "r-03", "r-01").verdict == MISMATCH


def test_each_dump_that_is_not_compared_has_its_reason(store: Store) -> None:
    inputs = [given(index) for index in range(10)]

    def change(index: int, made: Tensors) -> Tensors | None:
        if index == 3:
            made["mask"][0, 0] = False
        if index == 4:
            made = {name: tensor[:, 1:] for name, tensor in made.items()}
        return None if index == 2 else made

    ours: dict[int, Settings] = {5: {"folded_ids": False}, 6: {"extra": {"temperature": 0.5}}}
    write_replay(store, "r-01", inputs[:8], result=lambda index: {"status": "hung"} if index in (1, 7) else {})
    write_replay(store, "r-02", [*inputs[:8], inputs[9]], change=change, result=lambda index: ours.get(index, {}))
    (store.replays / "r-02" / "tensors" / f"{inputs[0].dump_id}.safetensors").write_bytes(b"not a tensor")
    record = compare(store, "r-02", "r-01")
    found = reasons_of(record)
    assert found[inputs[0].dump_id].startswith("A: its kept tensors cannot be read")
    assert {index: found[inputs[index].dump_id] for index in (1, 2, 3, 4, 5, 6, 7, 9)} == {
        1: "B: it hung",
        2: "A: its tensors are gone",
        3: "the masks differ in 1 tokens",
        4: "A's log-probs are [2, 7], B's [2, 8]",
        5: "token ids were wrapped (modulo the vocabulary) on side B only",
        6: "A's temperature is 0.5, B's 1",
        7: "B: it hung",
        9: "only A replayed it, B did not",
    }
    assert (record.verdict, record.good) == (NOT_COMPARED, False), "nothing is left: that is not an agreement"


@pytest.mark.parametrize("status", ["failed", "crashed", "hung"])
def test_what_only_b_got_through_is_a_mismatch_whatever_else_agrees(store: Store, status: str) -> None:
    lost = {"result": lambda index: {"status": status, "error_class": "RuntimeError"} if index == 1 else {}}
    record = pair(store, lost)
    assert (record.verdict, record.good, record.dumps[0].dump_id) == (MISMATCH, False, INPUTS[1].dump_id)
    assert record.dumps[0].reasons == (f"A: it {status} (RuntimeError), and B has its results",)
    assert [dump.verdict for dump in record.dumps[1:]] == [MATCH] * (len(INPUTS) - 1)
    said = conclusion(record)
    assert ": A failed on 1 dump that B has results for; 3 dumps" in said and "outside" not in said
    assert "further from the truth" not in said
    text = " ".join(as_text(document(record, 0)).split())
    assert text.startswith("FAILED (TOY MODEL): A, r-02, against B, r-01") and text.count(record.dumps[0].reasons[0]) == 1
    assert compare(store, "r-01", "r-02").verdict == MATCH, "B's failure says nothing about A"
    write_replay(store, "r-03", INPUTS, **lost)
    both = compare(store, "r-02", "r-03")
    assert both.verdict == MATCH and reasons_of(both) == {INPUTS[1].dump_id: f"A: it {status} (RuntimeError)"}


def test_nothing_selected_is_no_agreement(store: Store) -> None:
    nothing = pair(store, only=set())
    assert (nothing.verdict, nothing.dumps, nothing.good) == (NOT_COMPARED, (), False)
    assert nothing.reasons == ("the selection matches none of their dumps",)


KEPT_NOTHING: Settings = {"change": lambda index, made: None, "keep_tensors": False}
ALL_MASKED: Settings = {"change": lambda index, made: made | {"mask": torch.zeros_like(made["mask"])}}


@pytest.mark.parametrize(
    ("a", "b", "why", "of_all"),
    [
        (KEPT_NOTHING, KEPT_NOTHING, "A: it kept no tensors (--no-keep-tensors)", False),
        (ALL_MASKED, ALL_MASKED, "its mask selects no token", False),
        (PLAIN, {"model": "/m"}, "A ran the model tiny, B /m", True),
        (PLAIN, {"resolved": {"num_layers": 4}}, "A ran 2 layers, B 4", True),
    ],
)
def test_what_has_nothing_to_compare_is_no_agreement(store: Store, a: Settings, b: Settings, why: str, of_all: bool) -> None:
    record = pair(store, a, b)
    assert set(reasons_of(record).values()) == {why} and (record.verdict, record.good) == (NOT_COMPARED, False)
    assert record.reasons == ((why,) if of_all else ())


def test_names_that_mean_nothing(store: Store) -> None:
    write_replay(store, "r-01", INPUTS)
    for words in ("r-01 r-01", "last r-01", "golden r-01", "truth r-01", "r-01 truth", "r-01 zz"):
        with pytest.raises(UsageError) as raised:
            compare(store, *words.split())
        assert raised.value.hint
    (store.replays / "r-01" / "spec.json").unlink()
    with pytest.raises((StoreProblem, UsageError)):
        compare(store, "r-01", "golden")


def test_gradients_together_and_the_worst_parameters_first(store: Store) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = {"model.norm.weight": 16, "lm_head.weight": 64, "bias": 8}
    theirs = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    ours = theirs | {"bias": theirs["bias"] * 1.5, "lm_head.weight": theirs["lm_head.weight"] * 1.25}
    dump = lone(store, grads(**ours) | results(TRAINED), grads(**theirs) | results(TRAINED))
    assert [item.name for item in dump.parameters] == ["bias", "lm_head.weight"], "an equal one is not a bad one"
    assert dump.parameters[0].figures.distance == pytest.approx(0.5)
    assert dump.parameters[0].figures.cosine == pytest.approx(1.0)
    assert dump.distances == {"bias": 0.5, "lm_head.weight": 0.25, "model.norm.weight": 0.0}, "every one is drawn"
    a, b = (np.concatenate([side[name].double().numpy() for name in sizes]) for side in (ours, theirs))
    whole = dump.gradients
    assert whole and whole.count == 88
    assert whole.distance == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b))
    assert whole.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert whole.p99_abs == pytest.approx(np.percentile(np.abs(a - b), 99), rel=1e-5)
    assert dump.verdict == MISMATCH
    assert dump.reasons == (f"gradient_distance {whole.distance:.4g} is above 0.001 (bias)",)


def test_a_sample_counts_by_the_size_of_the_whole(store: Store) -> None:
    large, sampled = torch.full((10,), 2.0), {"numel": {"large": 1000}}
    dump = lone(
        store, grads(small=torch.ones(4), large=large) | sampled, grads(small=torch.full((4,), 3.0), large=large) | sampled
    )
    assert dump.gradients and dump.gradients.distance == pytest.approx(math.sqrt(4 * 4 / (4 * 9 + 1000 * 4)))
    assert [(item.name, item.sampled) for item in dump.parameters] == [("small", False)]


def recorded(store: Store, change: float = 0.0, outputs: bool = True, **replayed: Any) -> list[ReplayInput]:
    """Dumps with the run's own log-probs and entropies, and a replay `r-01` that got them, moved by `change` in one token."""
    inputs, made = publish_golden(store, 3, outputs)
    for tensors in made:
        tensors["log_probs"][1, 0] += change
    options: Settings = {"model": "/m", **results({"folded_ids": False})}
    write_replay(store, "r-01", inputs, change=lambda index, _: made[index], **(options | replayed))
    return inputs


def test_a_replay_that_got_what_the_run_got(store: Store) -> None:
    inputs = recorded(store)
    record = compare(store, "r-01", "golden")
    assert (record.verdict, record.b.kind, record.b.replay_id, record.b.dtype) == (MATCH, "golden", None, "fp32")
    assert record.thresholds_from == "defaults for fp32"
    assert all(dump.entropy and dump.entropy.max_abs == 0 for dump in record.dumps)
    (store.root / inputs[0].path).unlink()
    record = compare(store, "r-01", "golden")
    assert record.verdict == MATCH and "the dump cannot be read" in reasons_of(record)[inputs[0].dump_id]


def test_it_needs_no_torch_and_answers_the_same(store: Store) -> None:
    """Golden in bf16, ids of the worst tokens, gradients beside: the record of a process that can import neither torch nor
    SQLAlchemy."""
    inputs = recorded(store, change=0.5)
    for item in inputs:
        dump = payload.load(store.root / item.path)
        golden = {name: tensor.bfloat16() for name, tensor in dump.tensors.items() if name.startswith("output.")}
        store.publish_dump(*payload.encode(dump.record, dump.tensors | golden))
    write_replay(store, "r-02", inputs, gradients=lambda index: {"w": torch.arange(5.0) + index})
    write_replay(store, "r-03", inputs, gradients=lambda index: {"w": torch.arange(5.0)})
    for a, b in (("r-01", "golden"), ("r-02", "r-03")):
        without = "import sys; sys.modules |= dict.fromkeys(('torch', 'sqlalchemy'))"
        done = program("--store", str(store.root), "compare", a, b, "--json", code=without)
        assert done.returncode == 1, done.stderr
        (kept,) = store.comparisons.glob("*.json")
        said, here = ComparisonRecord.from_file(kept), compare(store, a, b)
        assert [dump.log_probs for dump in said.dumps] == [dump.log_probs for dump in here.dumps]
        assert said.verdict == (NOT_COMPARED if b == "golden" else MISMATCH), "whose weights the run had is not known"
        worst = said.dumps[0]
        assert bool(worst.worst_tokens) == (b == "golden")
        for token in worst.worst_tokens:
            path = next(item.path for item in inputs if item.dump_id == worst.dump_id)
            ids = payload.load(store.root / path).tensors["sequences"]
            assert token.token_id == int(ids[token.row, token.position]), "positions count from the beginning of the padded row"
        kept.unlink()


@pytest.mark.parametrize(
    ("replayed", "why"),
    [
        ({"outputs": False}, sides.NO_OUTPUTS),
        ({"model": "tiny"}, "the embedded tiny model is not the run's model"),
        ({"num_layers": 2}, "the first 2 layers only"),
        (results({"folded_ids": False, "extra": {"temperature": 0.7}}), "A's temperature is 0.7, B's 1"),
    ],
)
def test_what_cannot_be_compared_with_the_run(store: Store, replayed: dict[str, Any], why: str) -> None:
    recorded(store, **replayed)
    record = compare(store, "r-01", "golden")
    assert record.verdict == NOT_COMPARED
    assert all(why in text for text in reasons_of(record).values())


def noise(floor: dict[str, float], **more: Any) -> NoiseRecord:
    return NoiseRecord(**({"noise_id": "n-1", "created_at": "", "replay_id": "r-02", "config": {}, "label": "another one",
                           "dtype": "fp32", "variants": (), "dumps": ()} | more), floor=floor)  # fmt: skip


def test_the_noise_floor_decides_what_is_real(store: Store) -> None:
    floor = {"max_abs": 0.3, "p99_abs": 0.3, "mean_abs": 0.3, "clip_share": 0.5}
    record = pair(store, moved({0: 0.25, 1: 0.25}), noise=noise(floor))
    assert (record.verdict, record.good, record.noise_id, record.reasons) == (WITHIN_NOISE, True, "n-1", ())
    strict = (DumpNoise(INPUTS[1].dump_id, dict.fromkeys(floor, 1e-6)),)
    record = compare(store, "r-02", "r-01", noise=noise(floor, replay_id="other", dumps=strict))
    assert [dump.verdict for dump in record.dumps] == [MISMATCH, WITHIN_NOISE, MATCH, MATCH]
    assert record.reasons == ("the noise floor was measured with another replay, other (another one)",)


def test_what_noise_does_not_explain_is_named_also_where_the_thresholds_allow_it(store: Store) -> None:
    floor = noise({"max_abs": 0.005, "p99_abs": 0.5, "mean_abs": 0.5}, dtype="bf16")
    record = pair(store, {"dtype": "bf16", **moved({0: 0.02})}, {"dtype": "bf16"}, noise=floor)
    assert record.verdict == MATCH
    assert {dump.beyond_noise for dump in record.dumps} == {("max_abs 0.02 (noise 0.005)",), ()}
    assert "1 dump within the thresholds differs by more than the noise" in conclusion(record)


def test_only_the_worst_dumps_keep_their_details(store: Store) -> None:
    inputs = [given(index) for index in range(DETAILED + 20)]
    dumps = pair(store, moved({index: 0.001 * (index + 1) for index in range(len(inputs))}), inputs=inputs).dumps
    assert [bool(dump.worst_tokens) for dump in dumps] == [True] * DETAILED + [False] * 20
    assert dumps[0].dump_id == inputs[-1].dump_id


@pytest.mark.slow
def test_a_hundred_dumps_take_no_more_memory_than_five(store: Store) -> None:
    """Each side of each dump has 80 kB of tensors, 16 MB in all: links to one file, so that the disk has them once."""
    inputs = [given(index) for index in range(100)]
    big = {"log_probs": -torch.rand(4, 4096), "mask": torch.ones(4, 4096, dtype=torch.bool)}
    for name in ("r-01", "r-02"):
        write_replay(store, name, inputs, change=lambda index, _: big if index == 0 else None)
        folder = store.replays / name / "tensors"
        for item in inputs[1:]:
            os.link(folder / f"{inputs[0].dump_id}.safetensors", folder / f"{item.dump_id}.safetensors")

    def peak(count: int) -> int:
        tracemalloc.start()
        record = compare(store, "r-02", "r-01", only={item.dump_id for item in inputs[:count]})
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (record.verdict, len(record.dumps)) == (MATCH, count)
        return most

    compare(store, "r-02", "r-01", only={inputs[0].dump_id})  # imports, and the catalog
    assert peak(100) < 3 * peak(5)
