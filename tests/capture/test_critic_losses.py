"""A critic's losses are recorded, in a process that calls no Actor: OpenRLHF's own ValueLoss, called as its training step does."""

import threading

import pytest
import torch
from adaptercases import dumps_of, record_here
from capturekit import Recording
from losscases import MICRO, experiences, normalization, stand_in_for_openrlhf
from recordedfields import linted

from actordbg.base.imports import is_there
from actordbg.capture import hook
from actordbg.recorded.recorded_calls import RecordedCall

pytestmark = pytest.mark.skipif(not is_there("openrlhf"), reason="needs openrlhf")


@pytest.fixture
def openrlhf(monkeypatch):
    yield from stand_in_for_openrlhf(monkeypatch)


def train(openrlhf, store, *, tokens=1.0, calls=("forward", "loss"), **control):
    """Train a critic under `install`; tokens: a factor of what its losses are divided by. Returns experiences and losses."""
    batches = experiences(openrlhf.Actor(), 4)
    hook.install(openrlhf.Actor, store=record_here(store, calls=calls, **control))
    trainer, results = openrlhf.Critic(), []
    for number, batch in enumerate(batches):
        info = normalization(batches, number)
        info["batch_num_tokens"] = info["batch_num_tokens"] * tokens
        results.append((batch, trainer.training_step(batch, number, info).detach()))
    return results


def test_a_critics_losses_are_recorded_with_their_experiences(openrlhf, store):
    results = train(openrlhf, store)
    recorded = sorted(dumps_of(store), key=lambda dump: dump.record.monotonic_ns)
    assert len(recorded) == len(results) == 4
    for number, (dump, (experience, loss)) in enumerate(zip(recorded, results, strict=True)):
        call = RecordedCall.read(str(store.dump_path(dump.record)))
        assert dump.record.role == "critic loss" and dump.record.step == 7 + number // MICRO
        given = {"old_values": "values", "returns": "returns", "action_mask": "action_mask", "sequences": "sequences"}
        for name, own in given.items() | {(f"context.{name}", name) for name in ("rewards", "truncated")}:
            assert torch.equal(dump.tensors[name], getattr(experience, own)), name
        assert dump.tensors["values"].shape == experience.values.shape and call.fact("micro_batch") == number
        assert call.fact("loss") == call.fact("backward_loss") == float(loss)
        assert call.fact("grad_norm") == (float(number) if number % MICRO == MICRO - 1 else None)
        assert call.terms is not None
        assert call.terms.by_token / float(dump.tensors["batch_num_tokens"]) == pytest.approx(float(loss), rel=1e-5)
    findings = linted(store)
    assert not findings.broken and findings["normalization"].looked_at == 2, findings.in_words()


def test_a_critics_loss_that_is_divided_by_too_many_tokens_is_found(openrlhf, store):
    train(openrlhf, store, tokens=2.0)
    dumps_of(store)
    findings = linted(store)
    assert [law.name for law in findings.broken] == ["normalization"]
    assert "of the critic: its losses add up to" in findings.in_words() and "0.5 times it" in findings.in_words()


def test_a_step_of_policy_and_critic_trains_on_each_row_once(openrlhf, store):
    results = train(openrlhf, store)
    actor = openrlhf.Actor()
    trainer = openrlhf.Trainer(actor, openrlhf.PolicyLoss())
    batches = [batch for batch, _ in results]
    for number, batch in enumerate(batches):
        trainer.training_step(batch, 0.01, number, normalization(batches, number))
    assert {dump.record.role for dump in dumps_of(store)} == {"policy", "policy loss", "critic loss"}
    findings = linted(store)
    assert not findings.broken and findings["normalization"].looked_at == 4, findings.in_words()


def test_the_limits_choose_a_critics_losses(openrlhf, store):
    train(openrlhf, store, steps=[8, 8])
    assert [dump.record.step for dump in dumps_of(store)] == [8, 8]


def test_a_critics_process_has_no_ring_while_forwards_alone_are_recorded(openrlhf, store):
    train(openrlhf, store, calls=["forward"])
    slot = hook._slots[str(store.root.resolve())]
    assert slot.recorder.ring is None and not slot.recorder.writer.watched()
    rows = torch.arange(12).view(2, 6)
    openrlhf.Actor()(rows, torch.ones(2, 5).bool(), attention_mask=torch.ones_like(rows))
    assert [dump.record.point for dump in dumps_of(store)] == ["forward"]


def test_threads_with_different_switches_share_a_wrapped_forward(openrlhf, store):
    """Two policies train in two threads; only one of them is at a step that is recorded."""
    recording, both = Recording(store, steps=(7, 7)), threading.Barrier(2)
    openrlhf.Actor.forward = hook.wrap(vars(openrlhf.Actor)["forward"], recording.slot)
    actors = [openrlhf.Actor(), openrlhf.Actor()]
    actors[1].model.global_steps = 3
    rows, own = torch.arange(12).view(2, 6), recording.recorder.enter

    def enter(*call):
        both.wait()
        return own(*call)

    recording.slot._follow()
    recording.recorder.enter = enter  # type: ignore[method-assign]
    threads = [threading.Thread(target=actor, args=(rows, torch.ones(2, 5).bool())) for actor in actors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [dump.record.step for dump in recording.dumps()] == [7]
