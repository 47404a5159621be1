"""The hook on a live actor: what is recorded, and that the actor cannot tell."""

import copy
import gc
import inspect
import logging
import os
import pickle
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from capturekit import (
    AdaptedRecording,
    LaterDevice,
    Recording,
    SignatureA,
    SignatureH,
    StuckStore,
    TinyActor,
    balanced,
    ids,
    padded_mask,
)
from commandline import invoke
from deathcases import SINCE, switch

from actordbg.capture import hook, recorder
from actordbg.capture.control import Control
from actordbg.capture.hook import MARK, SLOT, install
from actordbg.capture.snapshot import Copier
from actordbg.capture.switch_file import write_control
from actordbg.capture.writer import ITEM_BYTES
from actordbg.store.layout import Store
from actordbg.trainers import recorded_model
from actordbg.trainers.seam import Rows, Seam


@pytest.fixture
def recording(store):
    made = Recording(store)
    yield made
    made.close()


@pytest.fixture
def fresh(monkeypatch):
    """A class of its own to install into, and no slots or variables left from other tests."""
    for name in ("ACTORDBG_DISABLE", "ACTORDBG_STORE", "ACTORDBG_RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hook, "_slots", {})
    made = type("Actor", (TinyActor,), {"forward": TinyActor.forward})
    yield made
    if hasattr(made.forward, SLOT):
        recorder_of(made).close()


def recorder_of(actor):
    return getattr(actor.forward, SLOT).recorder


def runs_in(store):
    """The run of each dump."""
    return [path.parent.parent.name for path in store.iter_dumps()]


# --- what is recorded ---------------------------------------------------------------------------------------------------


def test_a_call_is_recorded_whole(recording):
    before = time.monotonic_ns()
    actor, sequences, attention = TinyActor().eval(), ids(), padded_mask()
    action = torch.ones(2, 5, dtype=torch.bool)
    with torch.no_grad():
        recording.forward(actor, sequences, action, attention_mask=attention, return_output=True)
    assert recording.recorder.last is None  # only a loss needs the call before it
    dump = recording.dump()
    record = dump.record
    assert torch.equal(dump.tensors["sequences"], sequences) and dump.tensors["sequences"].dtype is torch.int64
    assert torch.equal(dump.tensors["action_mask"], action)
    assert torch.equal(dump.tensors["attention_mask"], attention)
    assert (record.batch_size, record.seq_len, record.action_len, record.tokens) == (2, 12, 5, int(attention.sum()))
    assert (record.run, record.rank, record.pid, record.call_index) == ("r", 0, os.getpid(), 0)
    assert record.arguments["return_output"] is True and record.arguments["packed_seq_lens"] is None
    assert (record.training, record.grad_enabled, record.autocast_dtype) == (False, False, None)
    assert (record.packing_samples, record.temperature, record.model_dtype) == (False, 0.7, "float32")
    assert record.process_groups == {"ring_attn_group": None}
    assert record.replayable and record.extra == {} and record.source == "capture"
    assert record.versions["torch"] and before <= record.monotonic_ns <= time.monotonic_ns()
    assert record.actor["actor_class"] == "TinyActor"


def test_what_a_call_had_is_in_its_record_and_what_changes_later_is_not(recording):
    class Odd(SignatureH):
        @property
        def model(self):
            raise RuntimeError("not now")

    whole, changed, actor = ids(4, 40), ids(), SignatureH()
    recording.forward(SignatureA(), ids(), 4, padded_mask())
    recording.forward(actor, ids(3, 7))
    recording.forward(actor, ids(), visual=object(), images=["x" * 4000] * 2000, return_output=True)
    recording.forward(actor, whole[:2, 3:15], whole[:1, :5].expand(2, 5))
    recording.forward(actor, changed)
    changed.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        recording.forward(TinyActor(), ids(), return_logprobs=True)
    with torch.inference_mode():
        recording.forward(Odd(), ids())
    old, bare, odd, sliced, before, cast, _ = recording.dumps()
    assert old.record.arguments["num_actions"] == 4 and old.record.action_len is None
    assert bare.record.tokens == 21, "without a mask every position is a token"
    assert not odd.record.replayable and "object" in odd.record.extra["visual"] and "too large" in odd.record.extra["images"]
    assert odd.record.arguments["return_output"] is True and "images" not in odd.record.arguments
    assert sliced.tensors["sequences"].stride() == (40, 1) and torch.equal(sliced.tensors["sequences"], whole[:2, 3:15])
    assert sliced.tensors["action_mask"].stride() == (0, 1)
    assert torch.equal(before.tensors["sequences"], ids())
    assert (cast.record.autocast_dtype, cast.record.grad_enabled, cast.record.training) == ("bfloat16", True, True)


def test_step_zero_stage_and_model_come_from_the_engine(recording):
    class Engine(torch.nn.Module):
        config, global_steps, zero_optimization_stage = {"zero_optimization": {"stage": 3}}, None, staticmethod(lambda: 3)

    actor = SignatureH()
    actor.model = Engine()
    actor.model.global_steps, actor.model.module = 17, torch.nn.Linear(1, 1, dtype=torch.bfloat16)
    told = {"model_type": "llama", "_attn_implementation": "sdpa", "_name_or_path": "meta/llama", "use_cache": False}
    actor.model.module.config = SimpleNamespace(**told, secret="not asked for")
    recording.forward(actor, ids())
    record = recording.dump().record
    assert (record.step, record.model_name, record.model_dtype) == (17, "meta/llama", "bfloat16")
    facts = record.actor
    assert (facts["model_type"], facts["attn_implementation"], facts["zero_stage"]) == ("llama", "sdpa", 3)
    assert (facts["wrapper_class"], facts["model_class"], facts["use_cache"]) == ("Engine", "Linear", False)
    assert "secret" not in facts


def test_two_actors_of_one_process_are_told_apart_and_the_trained_one_is_the_policy(recording):
    policy, reference = TinyActor(), TinyActor().eval()
    for _ in range(2):
        recording.forward(policy, ids(), return_logprobs=True)
        with torch.no_grad():
            recording.forward(reference, ids(), return_logprobs=True)
    records = [dump.record for dump in recording.dumps()]
    assert [record.role for record in records] == ["policy", None, "policy", None]
    assert len({record.instance for record in records}) == 2
    assert [record.call_index for record in records] == [0, 0, 1, 1]


def test_outputs_are_stored_beside_inputs(store):
    recording = Recording(store, with_outputs=True)
    actor = TinyActor().eval()
    action = torch.ones(2, 5, dtype=torch.int64)
    wanted = recording.forward(actor, ids(), action, return_output=True, return_entropy=True)
    log_probs = recording.forward(actor, ids(), return_logprobs=True)
    recording.forward(actor, ids(), return_output=True)
    first, second, third = recording.dumps()
    assert torch.equal(first.outputs["action_log_probs"], wanted[0])
    assert torch.equal(first.outputs["entropy"], wanted[1].entropy)
    assert torch.equal(second.outputs["log_probs"], log_probs)
    assert third.outputs == {}
    assert not any("logits" in name for dump in (first, second, third) for name in dump.tensors)


@pytest.mark.parametrize("with_outputs", [True, False])
def test_an_argument_of_unknown_type_needs_log_probs_beside_it_for_a_replay(store, with_outputs):
    recording, actor = Recording(store, with_outputs=with_outputs), TinyActor().eval()
    for returns in ({"return_logprobs": True}, {"return_output": True}):
        recording.forward(actor, ids(), stack=object(), **returns)
    dumps = recording.dumps()
    assert [dump.record.replayable for dump in dumps] == [with_outputs, False]
    told = invoke(store, "dump show", dumps[1].record.dump_id)
    assert "no: stack (an argument of type builtins.object); record --with-outputs to replay without it" in told.stdout


# --- the actor cannot tell ----------------------------------------------------------------------------------------------


def train(forward, actor, steps=4):
    """A few steps with dropout and random masks; the outputs, gradients and weights, and the generator's last state."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        mask = torch.rand(2, 5) > 0.3
        log_probs, _ = forward(actor, ids(seed=step), mask, attention_mask=padded_mask(), return_output=True)
        optimizer.zero_grad()
        (-log_probs.mean()).backward()
        seen += [log_probs.detach().clone()] + [p.grad.clone() for p in actor.parameters()]
        optimizer.step()
    return seen + [p.detach().clone() for p in actor.parameters()], torch.get_rng_state()


EVERYTHING = {
    "with_outputs": True, "with_rng": True, "before": 2, "keep_bytes": 10**9,
    "triggers": ("nan", "exception", "slow:3x", "logprobs:-40:0"),
}  # fmt: skip


@pytest.mark.parametrize(
    "way, limits",
    [(Recording, one) for one in ({}, {"with_outputs": True}, EVERYTHING, {"ring": 0}, EVERYTHING | {"every": 0})]
    + [(AdaptedRecording, EVERYTHING)],
)
def test_outputs_gradients_weights_and_random_state_are_bit_identical(store, way, limits):
    plain, plain_state = train(TinyActor.forward, TinyActor())
    recording = way(store, **limits)
    hooked, hooked_state = train(recording.forward, TinyActor())
    assert recording.close() and recording.ledger.calls == 4 and balanced(recording.ledger)
    assert recording.ledger.captured == (4 if limits.get("every", 1) else 0)
    assert all(torch.equal(a, b) for a, b in zip(plain, hooked, strict=True))
    assert torch.equal(plain_state, hooked_state)


def test_the_output_object_is_returned_and_actors_copy_pickle_and_end_as_before(recording):
    class Same(SignatureH):
        value = object()

        def forward(self, sequences):
            return self.value

    actor, same = TinyActor(), Same()
    assert recording.forward(same, ids()) is Same.value
    recording.forward(actor, ids(), return_logprobs=True)
    assert pickle.loads(pickle.dumps(copy.deepcopy(actor))).temperature == 0.7
    assert "actordbg" not in repr(actor.__dict__)
    gone = weakref.ref(same)
    del same
    recording.close()
    gc.collect()
    assert gone() is None


# --- install ------------------------------------------------------------------------------------------------------------


def test_install_wraps_once_and_keeps_the_signature_and_a_reloaded_class_shares_the_recorder(store, fresh):
    switch(store)
    original, again = fresh.forward, type("Actor", (TinyActor,), {"forward": TinyActor.forward})
    assert install(fresh, store=str(store.root)) and install(again, store=str(store.root))
    wrapped = fresh.forward
    assert install(fresh, store=str(store.root)) and fresh.forward is wrapped and getattr(wrapped, MARK) is original
    assert inspect.signature(wrapped) == inspect.signature(original) and wrapped.__doc__ == original.__doc__
    for actor in (fresh, again):
        actor()(ids(), return_logprobs=True)
    assert recorder_of(fresh) is recorder_of(again) and recorder_of(fresh).close()
    assert len(list(store.iter_dumps())) == 2


def test_some_classes_and_environments_are_left_alone(store, fresh, monkeypatch):
    original, inherits = fresh.forward, type("Inherits", (TinyActor,), {})
    assert not install(type("NoForward", (), {}), store=str(store.root)) and not install(inherits, store=str(store.root))
    assert "forward" not in inherits.__dict__ and not install(fresh, store=None)
    for value in ("1", "true"):
        monkeypatch.setenv("ACTORDBG_DISABLE", value)
        assert not install(fresh, store=str(store.root)) and fresh.forward is original


@pytest.mark.parametrize("name, run", [("night-7", "night-7"), ("../../etc", "r")], ids=["plain", "could leave the store"])
def test_the_environment_overrides_store_and_run(tmp_path, store, fresh, monkeypatch, name, run):
    switch(store)
    monkeypatch.setenv("ACTORDBG_STORE", str(store.root))
    monkeypatch.setenv("ACTORDBG_RUN", name)
    install(fresh, store=str(tmp_path / "unused"))
    fresh()(ids(), return_logprobs=True)
    assert recorder_of(fresh).close() and runs_in(store) == [run] and not (tmp_path / "unused").exists()


def test_a_running_process_writes_nothing_while_off_and_follows_enable_and_disable(tmp_path, fresh):
    store = Store(tmp_path / "later")
    install(fresh, store=str(store.root))
    actor, recorder_ = fresh(), recorder_of(fresh)
    actor(ids(), return_logprobs=True)
    assert not store.root.exists()
    for generation, on in ((1, True), (2, False)):
        write_control(store.create(), Control(on, "r", SINCE, generation, free_floor_bytes=0))
        time.sleep(1)
        actor(ids(), return_logprobs=True)
    assert recorder_.close()
    (ledger,) = recorder_.writer.watched()
    assert ledger.calls == 1 == len(runs_in(store))


# --- faults -------------------------------------------------------------------------------------------------------------


def test_a_recorder_that_fails_is_swallowed_counted_and_reported_once(recording, monkeypatch, caplog):
    monkeypatch.setattr(recorder.facts, "facts_of_call", lambda actor: 1 / 0)
    with caplog.at_level(logging.WARNING, "actordbg"):
        for _ in range(5):
            assert torch.equal(recording.forward(SignatureH(), ids()), ids().float())
        assert recording.recorder.faults == 5
        recording.close()
    assert recording.recorder.faults == 5
    assert len([r for r in caplog.records if "ZeroDivisionError" in r.getMessage()]) == 1
    assert all(balanced(ledger) and ledger.dropped == {"error": 1} for ledger in recording.ledgers)


def test_an_interrupt_goes_through_and_the_books_are_right(recording, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(recorder, "memmove", interrupt)
    with pytest.raises(KeyboardInterrupt):
        recording.forward(SignatureH(), ids())
    assert recording.close() and balanced(recording.ledger)


class Wordy(torch.nn.Module):
    def forward(self, sequences, images=None):
        return None


@pytest.mark.parametrize(
    "given, capacity, most",
    [((ids(2, 100),), 20_000, 1), ((None,), 4 * ITEM_BYTES, 4), ((None, ["x" * 4000] * 10), 4 * ITEM_BYTES, 1)],
    ids=["tensors", "nothing", "arguments"],
)
def test_a_stuck_disk_does_not_hold_up_training_and_nothing_queues_up_for_ever(tmp_path, given, capacity, most):
    store = StuckStore(tmp_path / "store")
    store.create()
    recording, actor = Recording(store, capacity=capacity), Wordy()
    for _ in range(50):
        recording.forward(actor, *given)
    assert store.entered.wait(60) and not store.free.is_set()
    ledger = recording.ledger
    assert (ledger.pending, ledger.dropped["queue_full"]) == (most, 50 - most)
    store.free.set()
    assert recording.close()
    assert balanced(ledger) and ledger.captured == most == len(list(store.iter_dumps()))
    assert recording.recorder.writer._bytes == 0


def no_record_fits(monkeypatch, recording):
    monkeypatch.setattr("actordbg.formats.encoding.MAX_RECORD", 200)


def a_graph_is_captured(monkeypatch, recording):
    monkeypatch.setattr(recording.recorder._copier, "may_copy", lambda tensors: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))


def the_disk_is_nearly_full(monkeypatch, recording):
    recording.set(free_floor_bytes=2**62)


@pytest.mark.parametrize(
    "trouble, reason, said",
    [
        (no_record_fits, "error", "over the limit"),
        (a_graph_is_captured, "cuda_graph", "dropping dumps (cuda graph)"),
        (the_disk_is_nearly_full, "disk_floor", "bytes: dropping dumps"),
    ],
)
def test_a_call_that_cannot_be_kept_is_a_counted_drop_and_said(recording, monkeypatch, caplog, trouble, reason, said):
    trouble(monkeypatch, recording)
    recording.forward(SignatureH(), ids())
    assert recording.close() and recording.ledger.dropped == {reason: 1} and balanced(recording.ledger)
    assert len(caplog.records) == 1 and said in caplog.text and list(recording.store.iter_dumps()) == []


def test_outputs_that_do_not_fit_are_left_out_and_counted(store):
    recording = Recording(store, with_outputs=True, capacity=ITEM_BYTES)
    recording.forward(TinyActor(), ids(), return_logprobs=True)
    dump = recording.dump()
    assert dump.outputs == {} and recording.ledger.outputs_dropped == 1
    assert recording.recorder.writer._bytes == 0


@pytest.mark.parametrize("number, reason", [(28, "disk_full"), (5, "write_error")])
def test_a_failing_disk_is_a_counted_drop_with_one_warning(store, monkeypatch, number, reason, caplog):
    publish, errors = store.publish_dump, iter([None, None, *[OSError(number, "no")] * 3])

    def published(*dump):
        if error := next(errors, None):
            raise error
        return publish(*dump)

    monkeypatch.setattr(store, "publish_dump", published)
    recording, actor = Recording(store), SignatureH()
    with caplog.at_level(logging.WARNING, "actordbg"):
        for _ in range(10):
            recording.forward(actor, ids())
        assert recording.close()
    ledger = recording.ledger
    assert ledger.captured == 7 and ledger.dropped == {reason: 3} and balanced(ledger) and len(caplog.records) == 1
    assert not [path for path in store.dumps.rglob("*") if path.name.startswith(".")]


def test_max_bytes_holds_for_the_files(store):
    recording, actor = Recording(store, max_bytes=5_000), SignatureH()
    for seed in range(8):
        recording.forward(actor, ids(seed=seed))
    recording.close()
    sizes, ledger = [path.stat().st_size for path in store.iter_dumps()], recording.ledger
    assert sum(sizes) == ledger.bytes <= 5_000 < ledger.bytes + max(sizes)
    assert ledger.captured == len(sizes) > 1 and balanced(ledger)


def test_a_new_run_name_starts_new_books_and_closes_the_old_and_after_the_end_nothing_is_counted(recording):
    actor = SignatureH()
    recording.forward(actor, ids())
    recording.set(run="s")
    recording.forward(actor, ids())
    recording.forward(actor, ids())
    recording.close()
    recording.forward(actor, ids())
    books = [(ledger.identity.run, ledger.calls, ledger.captured, ledger.closed) for ledger in recording.ledgers]
    assert books == [("r", 1, 1, True), ("s", 2, 2, True)] and set(runs_in(recording.store)) == {"r", "s"}


def test_inputs_on_a_device_reach_the_ring_when_the_writer_has_seen_them(store, monkeypatch):
    """The CUDA path, on a device made of CPU tensors: queued for the writer even where the call is sampled out."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    device = LaterDevice()
    recording = Recording(store, copier=Copier(lambda _: device), every=2, ring=8)
    actor = SignatureH()
    for seed in range(4):
        recording.forward(actor, ids(2, 9, seed))
    monkeypatch.undo()
    assert recording.close()
    ring = recording.ring
    assert [dump.tensors["sequences"].equal(ids(2, 9, 2 * n)) for n, dump in enumerate(recording.dumps())] == [True] * 2
    assert ring.running == []
    assert all(entry.whole for entry in ring._recent)


# --- torch.compile ------------------------------------------------------------------------------------------------------


def breaks(forward):
    import torch._dynamo as dynamo

    dynamo.reset()
    return dynamo.explain(forward)(ids(), return_logprobs=True).graph_break_count


def test_compiling_the_model_records_and_changes_nothing(store, fresh):
    switch(store)
    expected = TinyActor().eval()(ids(), return_logprobs=True)
    install(fresh, store=str(store.root))
    actor = fresh().eval()
    actor.model.compile(backend="eager")
    assert torch.equal(actor(ids(), return_logprobs=True), expected)
    recorder_of(fresh).close()
    assert len(list(store.iter_dumps())) == 1


def test_compiling_the_whole_actor_adds_no_graph_break_and_log_and_status_say_that_no_call_is_seen(store, fresh, caplog):
    switch(store)
    plain = TinyActor().eval()
    expected, plain_breaks = plain(ids(), return_logprobs=True), breaks(plain)
    install(fresh, store=str(store.root))
    assert breaks(fresh().eval()) == plain_breaks == 0
    torch._dynamo.reset()
    actor = torch.compile(fresh().eval(), backend="eager", fullgraph=True)
    assert torch.equal(actor(ids(), return_logprobs=True), expected) and torch.equal(actor(ids(), return_logprobs=True), expected)
    assert recorder_of(fresh).close() and list(store.iter_dumps()) == []
    assert [one.message for one in caplog.records if one.name == "actordbg"] == [f"actordbg: {recorder.COMPILED}"]
    shown = invoke(store, "dump status").output
    assert "1 recording actor: 0 calls" in shown and f"recorded nothing: {recorder.COMPILED}" in shown.replace("\n", " ")


def test_a_compiled_model_of_an_adapter_is_named_like_a_compiled_actor(store, fresh, caplog):
    switch(store)
    seam = Seam("any:score", lambda call: Rows(call["self"], call["sequences"]))
    adapter = SimpleNamespace(name="mine", package="mine")
    fresh.forward = recorded_model.recorded(TinyActor.forward, seam, adapter, str(store.root), {})  # type: ignore[attr-defined]
    torch.compile(fresh().eval(), backend="eager", fullgraph=True)(ids(), return_logprobs=True)
    assert [one.message for one in caplog.records if one.name == "actordbg"] == [f"actordbg: {recorder.COMPILED}"]
    fresh().eval()(ids(), return_logprobs=True)
    next(iter(hook._slots.values())).recorder.close()
    assert len(list(store.iter_dumps())) == 1, "what is not compiled is recorded beside it"
