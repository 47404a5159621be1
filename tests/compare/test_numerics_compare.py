"""Comparing replays dump by dump: what is compared, what is not and why, gradients, the truth, the noise, and memory."""

import json
import math
import os
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from casefiles import cases_of
from commandline import program
from comparecases import given, publish_golden, write_replay
from replaycases import publish
from replaylines import told, write_replays

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.compare import sides
from actordbg.compare.comparing import DETAILED, compare, save
from actordbg.document.renderings import as_text
from actordbg.judge.comparison_document import conclusion, document
from actordbg.records.comparison_record import (
    MATCH,
    MISMATCH,
    NOT_COMPARED,
    ComparisonRecord,
    DumpNoise,
    NoiseRecord,
)
from actordbg.store import payload

INPUTS = [given(index) for index in range(4)]
TRAINED = {"loss": 2.0, "grad_norm": 4.0, "backward_s": 0.5}
Settings = dict[str, Any]
PLAIN = {}


def pair(store, a=PLAIN, b=PLAIN, inputs=INPUTS, **asked):
    """The comparison of the replay `r-02`, made up as `a` says, with `r-01`, made up as `b` says."""
    write_replay(store, "r-01", inputs, **b)
    write_replay(store, "r-02", inputs, **a)
    return compare(store, "r-02", "r-01", **asked)


def lone(store, a=PLAIN, b=PLAIN):
    """The comparison of one input."""
    return pair(store, a, b, INPUTS[:1]).dumps[0]


def grads(**kept):
    return {"gradients": lambda index: kept}


def results(each):
    return {"result": lambda index: each}


def moved(by, row=1, position=2):
    """A change of one token of some inputs."""

    def change(index, made):
        made["log_probs"][row, position] += by.get(index, 0.0)
        return made

    return {"change": change}


def reasons_of(record):
    return {dump.dump_id: dump.not_compared["dump"] for dump in record.dumps if "dump" in dump.not_compared}


CASES = cases_of("comparisons")


def compared_lines(store, lines):
    """What lines of `comparisons.test` compare, told as lines."""
    count, rows = next((map(int, line.split()[1:]) for line in lines if line.startswith("inputs ")), (4, 2))
    inputs = [given(index, batch=rows) for index in range(count)]
    asked = {}
    measured = {}
    for line in write_replays(store, lines, inputs):
        name, number, *value = line.split(" ", 2)
        if name == "noise":
            measured |= {"replay_id": number} if value == ["measured"] else {"floor": json.loads(value[0])}
        elif name == "noise-of":
            measured["dumps"] = (DumpNoise(inputs[int(number)].dump_id, json.loads(value[0])),)
        elif name == "rounding":
            asked["rounding"] = number
        elif name == "only":
            asked["only"] = set()
        elif name == "thresholds":
            asked["thresholds"] = json.loads(line.partition(" ")[2])
    if measured:
        asked["noise"] = noise(**measured)
    return told(compare(store, "r-02", "r-01", **asked), inputs)


@pytest.mark.parametrize("case", CASES)
def test_a_comparison_says_what_differs_what_was_left_out_and_why(store, case):
    assert compared_lines(store, CASES[case].given) == CASES[case].expected


def test_a_record_says_who_was_compared_and_is_read_as_it_was_written(store):
    record = pair(store, moved({0: math.nan, 2: 0.5}))
    assert (record.a.replay_id, record.b.replay_id) == ("r-02", "r-01")
    assert record.a.label == "TOY MODEL (tiny) fp32 sdpa, not packed, plain"
    assert ComparisonRecord.from_json((path := save(store, record)).read_bytes()) == record
    assert path == store.comparisons / f"{record.comparison_id}.json"
    nan, far = record.dumps[:2]
    assert nan.worst_tokens[0].a is None, "finite on one side only is worst"
    (worst,) = far.worst_tokens
    assert (worst.row, worst.position) == (1, 6) and worst.difference == pytest.approx(0.5)
    assert [record.good, compare(store, "r-01", "r-02", only=set()).good] == [False, False], "nothing selected is no agreement"


def test_a_call_that_was_autocast_was_computed_in_that(store):
    """Weights in fp32, and a record that says autocast: the replay followed it, unless a dtype was requested."""
    inputs = publish(store, 2, length=16, autocast_dtype="torch.bfloat16")
    off = moved({0: 0.01})
    followed = pair(store, off | {"dtype": None, "resolved": {"dtype": "fp32"}}, inputs=inputs)
    write_replay(store, "r-03", inputs, **off)
    assert (followed.verdict, followed.a.dtype, followed.thresholds_from) == (MATCH, "bf16", "defaults for bf16")
    assert compare(store, "r-03", "r-01").verdict == MISMATCH


def test_what_only_b_got_through_is_a_failure_and_not_a_distance(store):
    record = pair(store, {"result": lambda index: {"status": "hung", "error_class": "RuntimeError"} if index == 1 else {}})
    said, further = conclusion(record)
    assert said == "A failed on 1 dump that B has results for" and "3 of 4 dumps within the thresholds" in further
    text = " ".join(as_text(document(record, 0)).split())
    assert (
        text.startswith("FAILED (TOY MODEL): A failed on 1 dump that B has results for A is r-02, B r-01")
        and text.count(record.dumps[0].reasons[0]) == 1
    )


def test_tensors_that_cannot_be_read_and_inputs_of_one_side_have_their_reasons(store):
    write_replay(store, "r-01", INPUTS[:3])
    write_replay(store, "r-02", [*INPUTS[:2], INPUTS[3]])
    (store.replays / "r-02" / "tensors" / f"{INPUTS[0].dump_id}.safetensors").write_bytes(b"not a tensor")
    found = reasons_of(compare(store, "r-02", "r-01"))
    assert found[INPUTS[0].dump_id].startswith("A: its kept tensors cannot be read")
    assert (found[INPUTS[2].dump_id], found[INPUTS[3].dump_id]) == (
        "only B replayed it, A did not", "only A replayed it, B did not"
    )  # fmt: skip


def test_names_that_mean_nothing(store):
    write_replay(store, "r-01", INPUTS)
    for words in ("r-01 r-01", "last r-01", "golden r-01", "truth r-01", "r-01 truth", "r-01 zz"):
        with pytest.raises(UsageError) as raised:
            compare(store, *words.split())
        assert raised.value.hint
    (store.replays / "r-01" / "spec.json").unlink()
    with pytest.raises((StoreProblem, UsageError)):
        compare(store, "r-01", "golden")


def test_gradients_together_and_the_worst_parameters_first(store):
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


def test_a_sample_counts_by_the_size_of_the_whole(store):
    large, sampled = torch.full((10,), 2.0), {"numel": {"large": 1000}}
    dump = lone(
        store, grads(small=torch.ones(4), large=large) | sampled, grads(small=torch.full((4,), 3.0), large=large) | sampled
    )
    assert dump.gradients and dump.gradients.distance == pytest.approx(math.sqrt(4 * 4 / (4 * 9 + 1000 * 4)))
    assert [(item.name, item.sampled) for item in dump.parameters] == [("small", False)]


def recorded(store, change=0.0, outputs=True, **replayed):
    """Dumps with the run's own log-probs and entropies, and a replay `r-01` that got them, moved by `change` in one token."""
    inputs, made = publish_golden(store, 3, outputs)
    for tensors in made:
        tensors["log_probs"][1, 0] += change
    options = {"model": "/m", **results({"folded_ids": False})}
    write_replay(store, "r-01", inputs, change=lambda index, _: made[index], **(options | replayed))
    return inputs


def test_a_replay_that_got_what_the_run_got(store):
    inputs = recorded(store)
    record = compare(store, "r-01", "golden")
    assert (record.verdict, record.b.kind, record.b.replay_id, record.b.dtype) == (MATCH, "golden", None, "fp32")
    assert record.thresholds_from == "defaults for fp32"
    assert all(dump.entropy and dump.entropy.max_abs == 0 for dump in record.dumps)
    (store.root / inputs[0].path).unlink()
    record = compare(store, "r-01", "golden")
    assert record.verdict == MATCH and "the dump cannot be read" in reasons_of(record)[inputs[0].dump_id]


def test_it_needs_no_torch_and_answers_the_same(store):
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
    "replayed, why",
    [
        ({"outputs": False}, sides.NO_OUTPUTS),
        ({"model": "tiny"}, "the embedded tiny model is not the run's model"),
        ({"num_layers": 2}, "the first 2 layers only"),
        (results({"folded_ids": False, "extra": {"temperature": 0.7}}), "A's temperature is 0.7, B's 1"),
    ],
)
def test_what_cannot_be_compared_with_the_run(store, replayed, why):
    recorded(store, **replayed)
    record = compare(store, "r-01", "golden")
    assert record.verdict == NOT_COMPARED
    assert all(why in text for text in reasons_of(record).values())


def noise(**more):
    return NoiseRecord(**({"noise_id": "n-1", "created_at": "", "replay_id": "r-02", "config": {}, "label": "another one",
                           "dtype": "fp32", "variants": (), "dumps": ()} | more))  # fmt: skip


def test_a_real_difference_that_the_thresholds_allow_is_said(store):
    record = pair(store, moved({0: 5e-5}), noise=noise(floor={"max_abs": 1e-6}))
    assert "1 dump within the thresholds differs by more than the noise" in conclusion(record)[1][-1]


def test_only_the_worst_dumps_keep_their_details(store):
    inputs = [given(index) for index in range(DETAILED + 20)]
    dumps = pair(store, moved({index: 0.001 * (index + 1) for index in range(len(inputs))}), inputs=inputs).dumps
    assert [bool(dump.worst_tokens) for dump in dumps] == [True] * DETAILED + [False] * 20
    assert dumps[0].dump_id == inputs[-1].dump_id


@pytest.mark.slow
def test_a_hundred_dumps_take_no_more_memory_than_five(store):
    """Each side of each dump has 80 kB of tensors, 16 MB in all: links to one file, so that the disk has them once."""
    inputs = [given(index) for index in range(100)]
    big = {"log_probs": -torch.rand(4, 4096), "mask": torch.ones(4, 4096, dtype=torch.bool)}
    for name in ("r-01", "r-02"):
        write_replay(store, name, inputs, change=lambda index, _: big if index == 0 else None)
        folder = store.replays / name / "tensors"
        for item in inputs[1:]:
            os.link(folder / f"{inputs[0].dump_id}.safetensors", folder / f"{item.dump_id}.safetensors")

    def peak(count):
        tracemalloc.start()
        record = compare(store, "r-02", "r-01", only={item.dump_id for item in inputs[:count]})
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (record.verdict, len(record.dumps)) == (MATCH, count)
        return most

    compare(store, "r-02", "r-01", only={inputs[0].dump_id})  # imports, and the catalog
    assert peak(100) < 3 * peak(5)
