"""Triggers: what makes a call worth keeping after it ran, what is kept with it, and that the books stay exact."""

import contextlib
import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import zstandard
from capturekit import AdaptedRecording, Recording, balanced, ids
from roots import ROOT
from victims import wait_for

from actordbg.capture.control import EXCEPTION, FORMS, LOGPROBS, NAN, OOM, SLOW, Triggers, parse
from actordbg.capture.snapshot import LOGITS_SUM


class Steered(torch.nn.Module):
    """An Actor whose next result the test decides: `result` is returned, or raised; `seconds`: how far it moves its `clock`, in ns."""

    def __init__(self):
        super().__init__()
        self.result = None
        self.seconds = 0.0
        self.clock = 0

    def forward(self, sequences, action_mask=None, return_output=False):
        self.clock += round(self.seconds * 1e9)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result if self.result is not None else torch.zeros(sequences.shape[0], sequences.shape[1] - 1)


def armed(store, *words, way=Recording, **limits):
    """Recording that keeps only what triggers say."""
    return way(store, **({"every": 0, "triggers": words, "ring": 8} | limits))


def call(recording, actor, result=None, seed=0, seconds=0.0, seq=9, **more):
    actor.result, actor.seconds = result, seconds
    return recording.forward(actor, ids(2, seq, seed), **more)


# --- the words ------------------------------------------------------------------------------------------------------------


def test_the_words_are_parsed():
    assert parse(()) == Triggers()
    assert parse(("nan", " Exception ", "oom")) == Triggers(nan=True, exception=True, oom=True)
    assert parse(("slow:3x",)).slow == parse(("slow:3",)).slow == 3.0
    assert parse(("logprobs:-40:0.5",)).logprobs == parse(("logprobs:-40..0.5",)).logprobs == (-40.0, 0.5)
    assert parse(("logprobs:-inf:0",)).logprobs == (float("-inf"), 0.0)


@pytest.mark.parametrize(
    "word", ["", "often", "slow", "slow:x", "slow:1x", "slow:0.5x", "logprobs", "logprobs:0:-40", "logprobs:1", "nan:3"]
)
def test_other_words_are_refused_with_what_there_is(word):
    with pytest.raises(ValueError):
        parse((word,))


# --- what fires -----------------------------------------------------------------------------------------------------------


def bad(value):
    tensor = torch.zeros(2, 8)
    tensor[1, 3] = value
    return tensor


def logits(value):
    tensor = torch.zeros(2, 8, 50)
    tensor[0, 0, 7] = value
    return SimpleNamespace(logits=tensor)


ALL = torch.ones(2, 8, dtype=torch.bool)
NOT_THE_BAD = ALL & (bad(1.0) == 0)
NAMED = {"error": "RuntimeError", "message": "RuntimeError: shapes do not fit", "out_of_memory": False}
FIRES = {
    "not finite": ("nan", [None, bad(float("nan")), None, bad(float("inf")), bad(float("-inf"))], {
        n: ("nan", {"output": "log_probs", "nan": n == 1, "inf": n != 1, "of": 16, "first": [1, 3]}) for n in (1, 3, 4)
    }),
    "entropy and logits": ("nan", [SimpleNamespace(entropy=bad(float("nan")), **vars(logits(0))), logits(0), logits(float("inf"))], {
        0: ("nan", {"output": "entropy"}), 2: ("nan", {"output": LOGITS_SUM}),
    }),
    "an exception": ("exception", [None, RuntimeError("shapes do not fit"), MemoryError()], {
        1: ("exception", NAMED), 2: ("oom", {"out_of_memory": True}),
    }),
    "out of memory": ("oom", [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError(), ValueError("x"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory"),
    ], {n: ("oom", {"out_of_memory": True}) for n in (0, 1, 3)}),
    "out of range, where the mask counts": ("logprobs:-20:0", [(bad(-50.0), NOT_THE_BAD), (bad(-50.0), ALL), bad(0.25)], {
        1: ("logprobs", {"outside": 1, "lowest": -50.0}), 2: ("logprobs", {"outside": 1, "lowest": 0.0, "highest": 0.25}),
    }),
}  # fmt: skip
"""The trigger, what calls return or raise (perhaps beside an action mask), and of the calls that are kept what fired and its facts."""


@pytest.mark.parametrize(
    "name, way",
    [*((name, Recording) for name in FIRES), ("not finite", AdaptedRecording), ("an exception", AdaptedRecording)],
)
def test_what_fires_keeps_its_call_and_says_what_it_saw(store, name, way):
    word, results, expected = FIRES[name]
    recording, actor = armed(store, word, way=way), Steered()
    for seed, result in enumerate(results):
        result, mask = result if isinstance(result, tuple) else (result, None)
        with pytest.raises(type(result)) if isinstance(result, BaseException) else contextlib.nullcontext():
            call(recording, actor, result, seed=seed, action_mask=mask)
    dumps = {dump.record.call_index: dump for dump in recording.dumps()}
    assert {number: dump.record.triggered for number, dump in dumps.items()} == {n: fired for n, (fired, _) in expected.items()}
    for number, (fired, told) in expected.items():
        dump, facts = dumps[number], dumps[number].record.trigger_facts
        assert told.items() <= facts.items() and dump.record.pinned and dump.outputs == {}, "outputs were only looked at"
        assert torch.equal(dump.tensors["sequences"], ids(2, 9, number))
        if fired == "oom":
            assert 2**20 < facts["allocated_bytes"] <= facts["peak_resident_bytes"] + 2**26 and facts["reserved_bytes"] > 2**20
    ledger = recording.ledger
    assert balanced(ledger) and (ledger.captured, ledger.sampled_out) == (len(expected), {"armed": len(results) - len(expected)})


def test_a_slow_call_is_kept_once_there_is_a_median_of_calls_of_its_length_and_gradient_mode(store, monkeypatch):
    recording, actor = armed(store, "slow:5x"), Steered()
    monkeypatch.setattr("actordbg.capture.recorder.monotonic_ns", lambda: actor.clock)
    call(recording, actor, seconds=0.2)  # the first call is always slow, and nothing to compare with
    for seed in range(8):
        call(recording, actor, seed=seed, seconds=0.005)
        call(recording, actor, seed=seed, seconds=1.0, seq=900)
    call(recording, actor, seed=99, seconds=0.3)
    call(recording, actor, seconds=2.0, seq=600)
    with torch.no_grad():
        call(recording, actor, seconds=9.0)  # the first one of its kind
    dump = recording.dump()
    assert torch.equal(dump.tensors["sequences"], ids(2, 9, 99))
    facts = dump.record.trigger_facts
    assert dump.record.triggered == "slow" and facts["seconds"] >= 0.3 and facts["seconds"] >= 5 * facts["median"]
    assert facts["times"] == pytest.approx(facts["seconds"] / facts["median"])


# --- what is kept with it ---------------------------------------------------------------------------------------------------


def test_the_calls_before_are_kept_too_with_what_is_asked_for_and_every_call_is_in_one_book(store):
    recording, actor = armed(store, "nan", before=2, with_outputs=True, with_rng=True), Steered()
    for seed in range(6):
        call(recording, actor, seed=seed)
    call(recording, actor, bad(float("nan")), seed=6)
    call(recording, actor, bad(float("nan")), seed=7)
    dumps = recording.dumps()
    assert [dump.record.triggered for dump in dumps] == ["before", "before", "nan", "nan"]
    for seed, dump in zip((4, 5, 6, 7), dumps, strict=True):
        assert torch.equal(dump.tensors["sequences"], ids(2, 9, seed)) and dump.record.pinned
        assert [values.isnan().sum() for values in dump.outputs.values()] == [1] * (seed > 5), "log-probs, and no sum of logits"
        assert dump.rng["cpu"].dtype == torch.uint8 and len(dump.record.rng["cpu"]) == 64
    assert dumps[0].record.trigger_facts == {"before": dumps[2].record.dump_id}
    ledger = recording.ledger
    assert balanced(ledger)
    assert (ledger.captured, ledger.sampled_out) == (4, {"armed": 4})
    assert ledger.triggered == {"before": 2, "nan": 2}


def test_calls_before_a_trigger_leave_the_ring_though_the_end_comes_between_two_looks(store):
    recording, actor = armed(store, "nan", before=2), Steered()
    writer, ring = recording.recorder.writer, recording.ring
    tick, looked, ending = writer._tick, threading.Event(), threading.Event()

    def ends_meanwhile():
        """The first look at an empty queue follows the call; after the second one, the thread asks whether it is the end."""
        if writer._last and not writer._queue and not looked.is_set():
            looked.set()
        elif writer._last and not ending.is_set():
            ending.set()
            while writer._deadline is None:
                time.sleep(0.001)
        tick()

    writer._tick = ends_meanwhile  # type: ignore[method-assign]
    call(recording, actor)
    assert ending.wait(60) and recording.close()
    assert (list(writer._last), ring.arena._extents) == ([], []), "nothing is left to recover"
    assert not ring.path.exists()


def test_there_is_a_limit_for_each_trigger_that_starts_anew_with_enable(store):
    recording, actor = armed(store, "nan", "exception", max_triggered=2), Steered()
    for seed in range(5):
        call(recording, actor, bad(float("nan")), seed=seed)
    with pytest.raises(ValueError):
        call(recording, actor, ValueError())
    wait_for(lambda: not recording.recorder.writer._bytes)
    recording.set(every=0, triggers=("nan",), max_triggered=2, ring=8)
    call(recording, actor, bad(float("nan")), seed=9)
    assert [dump.record.triggered for dump in recording.dumps()] == ["nan", "nan", "exception", "nan"]
    ledger = recording.ledger
    assert balanced(ledger) and ledger.sampled_out == {"armed": 3}


def test_an_output_of_few_bytes_and_very_many_values_costs_neither_the_dump_nor_memory(store):
    recording, actor = Recording(store, triggers=("nan",), with_outputs=True), Steered()
    call(recording, actor, torch.zeros(1).expand(2**20, 2**20))
    dump = recording.dump()
    ledger = recording.ledger
    assert dump.outputs == {} and balanced(ledger) and (ledger.captured, ledger.outputs_dropped) == (1, 1)


class Chatty(torch.nn.Module):
    """Takes anything by name, and quotes it when it fails."""

    def __init__(self, name):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.config = type("Config", (), {"_name_or_path": name, "model_type": name})()

    def forward(self, sequences, **told):
        if "fail" in told:
            raise type(told["fail"], (RuntimeError,), {})("x" * 170 + told["fail"])
        return sequences.float()


def test_a_secret_is_hidden_wherever_a_call_can_hold_it(store, monkeypatch):
    secret, longer = "hf_PLANTEDSECRET", "hf_PLANTEDSECRETANDMORE"
    monkeypatch.setenv("SOME_TOKEN", secret)
    monkeypatch.setenv("OTHER_KEY", longer)
    recording = armed(store, "exception", every=1, with_outputs=True, with_rng=True, ring_dir="store")
    actor = Chatty(f"https://me:{longer}@hub")
    named = {secret: 1, longer: 2, "plain": [{f"of {secret}": {secret: secret}}, (longer,)]}
    of_object = type(secret, (), {"__repr__": lambda self: secret})()
    odd = {"of_all": os.environ, "of_bytes": secret.encode(), "of_set": {secret}, "of_object": of_object}
    recording.forward(actor, ids(), named=named, **odd, **{secret: True, longer: 3, f"t_{secret}": torch.ones(2)})
    with pytest.raises(RuntimeError):
        recording.forward(actor, ids(), fail=longer)
    first, last = (dump.record for dump in recording.dumps())
    hidden = "[hidden]"
    assert first.arguments["named"] == {hidden: 1, f"{hidden} 2": 2, "plain": [{f"of {hidden}": {hidden: hidden}}, [hidden]]}
    assert (first.arguments[hidden], first.arguments[f"{hidden} 7"]) == (True, 3) and f"t_{hidden}" in first.tensors
    assert first.model_name == f"https://me:{hidden}@hub" and set(first.extra) == set(odd)
    assert last.trigger_facts["error"] == hidden and last.arguments["fail"] == hidden
    assert recording.close()
    files = [path for path in store.root.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".ring", ".json", ".zst"}
    for path in files:
        data = path.read_bytes()
        if path.suffix == ".zst":
            data += zstandard.ZstdDecompressor().decompressobj(read_across_frames=True).decompress(data)
            assert b'"run":"r"' in data
        assert b"PLANTED" not in data and b"hf_PLA" not in data, path


def test_an_exception_keeps_no_frame_and_no_tensor_alive(store):
    import gc
    import weakref

    recording = armed(store, "exception")
    gc.disable()
    try:
        big = torch.zeros(10)
        alive = weakref.ref(big)
        with pytest.raises(ValueError):
            recording.forward(_Failing(), big)
        assert recording.close()
        del big
        assert alive() is None, "a reference cycle would hold the tensors of a failed call until the next collection"
    finally:
        gc.enable()


class _Failing(torch.nn.Module):
    def forward(self, sequences):
        raise ValueError


def test_every_trigger_has_a_form_and_a_row_in_the_table():
    table = (ROOT / "docs" / "how-to" / "catch-a-failure.md").read_text()
    for word in (NAN, EXCEPTION, OOM, SLOW, LOGPROBS):
        assert word in FORMS and f"| `{word}" in table
