"""Losses are recorded beside forwards: OpenRLHF's own PolicyLoss on small tensors, called as its training step calls it."""

from types import SimpleNamespace

import pytest
import torch
from adaptercases import dumps_of, record_here
from capturekit import Recording
from commandline import invoke
from losscases import MICRO, Engine, experiences, normalization, stand_in_for_openrlhf
from recordedfields import linted, unlisted_of

from actordbg.base.errors import UsageError
from actordbg.base.imports import is_there
from actordbg.capture import facts, hook, loss_record, losses
from actordbg.capture.switch_file import read_control
from actordbg.recorded.recorded_calls import RecordedCall
from actordbg.store.layout import Store

pytestmark = pytest.mark.skipif(not is_there("openrlhf"), reason="needs openrlhf")


@pytest.fixture
def openrlhf(monkeypatch):
    yield from stand_in_for_openrlhf(monkeypatch)


def train(openrlhf, recording, steps=4):
    """Train: the old log-probs of all micro-batches, then a step for each. Returns each loss with its results and gradients."""
    if recording is not None:
        recording.slot.packages.add("openrlhf")
        openrlhf.Actor.forward = hook.wrap(vars(openrlhf.Actor)["forward"], recording.slot)
    actor = openrlhf.Actor()
    loss = openrlhf.PolicyLoss(is_correction_level="token")
    trainer, batches = openrlhf.Trainer(actor, loss), experiences(actor, steps)
    results = []
    for number, batch in enumerate(batches):
        actor.zero_grad()
        result = trainer.training_step(batch, 0.01, number, normalization(batches, number))
        results.append({"result": result, "gradient": actor.model.weight.grad.clone(), "experience": batch})
    return results


def losses_of(recording):
    """The recorded forwards, and the recorded losses."""
    dumps = recording.dumps()
    return [d for d in dumps if d.record.point == "forward"], [d for d in dumps if d.record.point == "loss"]


def test_a_loss_is_recorded_with_its_experience_and_joined_to_its_forward(openrlhf, store):
    recording = Recording(store, calls=("forward", "loss"), with_outputs=True)
    results = train(openrlhf, recording)
    forwards, recorded = losses_of(recording)
    by_id = {forward.record.dump_id: forward for forward in forwards}
    assert len(forwards) == 2 * len(recorded) == 2 * len(results)
    for number, (dump, told) in enumerate(zip(recorded, results, strict=True)):
        facts, experience = dump.record.arguments, told["experience"]
        call = RecordedCall.read(str(store.dump_path(dump.record)))
        forward = by_id[str(call.forward_id)]
        assert torch.equal(forward.outputs["action_log_probs"], dump.tensors["log_probs"]) and forward.record.grad_enabled
        assert torch.equal(dump.tensors["sequences"], experience.sequences)
        for name, value in zip(("loss", "clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio"), told["result"], strict=True):
            assert torch.equal(dump.outputs[name], value.detach()), name
        for name in ("rewards", "response_length", "truncated"):
            assert torch.equal(dump.tensors[f"context.{name}"], getattr(experience, name))
        assert facts["context.loss.clip_eps_high"] == 0.2 and call.fact("micro_batch") == number and facts["dp_size"] == 1
        last = number % MICRO == MICRO - 1
        assert facts["context.engine_accumulation"] == MICRO and call.fact("boundary") == last
        assert call.fact("backward_loss") == 2 * float(told["result"][0].detach())
        assert call.fact("grad_norm") == (float(number) if last else None)
        assert forward.record.replayable and not dump.record.replayable, "only forwards are replayed"
        assert dump.record.step == forward.record.step == 7 + number // MICRO and dump.record.role == "policy loss"
        terms = call.terms
        assert terms is not None
        tokens = float(dump.tensors["batch_num_tokens"])
        assert terms.by_token / tokens == pytest.approx(float(told["result"][0].detach()), rel=1e-5)
    findings = linted(store)
    held = {law.name for law in findings.held}
    assert not unlisted_of(store.iter_dumps()), "docs/reference/recorded-fields.md says who reads each recorded field"
    assert not findings.broken and {"normalization", "placeholder", "truncation", "response length"} <= held, findings.in_words()


def test_recording_changes_no_loss_and_no_gradient(openrlhf, store):
    before = train(openrlhf, None)
    after = train(openrlhf, Recording(store, calls=("forward", "loss")))
    for ours, theirs in zip(after, before, strict=True):
        assert torch.equal(ours["gradient"], theirs["gradient"])
        assert all(map(torch.equal, ours["result"], theirs["result"]))


@pytest.mark.parametrize("triggers", [(), ("nan",)])
def test_losses_follow_their_forwards_whatever_limits_chose_these(openrlhf, store, triggers):
    recording = Recording(store, calls=("forward", "loss"), every=3, triggers=triggers)
    train(openrlhf, recording, steps=6)
    forwards, recorded = losses_of(recording)
    trained = {forward.record.dump_id for forward in forwards if forward.record.grad_enabled}
    read = (RecordedCall.read(str(recording.store.dump_path(dump.record))) for dump in recorded)
    assert trained and {call.forward_id for call in read} == trained


def test_who_records_forwards_alone_has_nothing_attached(openrlhf, store):
    original = openrlhf.PolicyLoss.forward
    recording = Recording(store)
    train(openrlhf, recording)
    assert openrlhf.PolicyLoss.forward is original and not losses._attached
    assert all(dump.record.point == "forward" for dump in recording.dumps())


@pytest.mark.parametrize("broken", ["_context", "_switches"])
def test_a_fault_of_the_recorder_loses_the_record_and_never_the_loss(openrlhf, store, monkeypatch, broken):
    def fails(*_, **__):
        raise RuntimeError("planted")

    monkeypatch.setattr(loss_record.LossSlot if broken == "_context" else loss_record, broken, fails)
    recording = Recording(store, calls=("forward", "loss"))
    assert len(train(openrlhf, recording)) == 4
    forwards, recorded = losses_of(recording)
    assert len(forwards) == 8 and not recorded and recording.recorder.stray == 4


def test_a_loss_without_its_rows_or_its_actors_facts_is_a_loss_all_the_same(openrlhf, store):
    def fails(self):
        raise RuntimeError("planted")

    forward = openrlhf.Actor.forward
    openrlhf.Actor.forward = lambda self, sequences, *args, **kwargs: forward(self, sequences.clone(), *args, **kwargs)
    recording = Recording(store, calls=("forward", "loss"))
    Engine.zero_optimization_stage, kept = fails, Engine.zero_optimization_stage
    try:
        train(openrlhf, recording)
    finally:
        Engine.zero_optimization_stage = kept
    forwards, recorded = losses_of(recording)
    assert len(forwards) == 2 * len(recorded) == 8 and not any(dump.record.replayable for dump in recorded)


def test_a_call_that_does_not_exist_is_refused(tmp_path):
    for typed in ("loss", "forward,lost"):
        with pytest.raises(UsageError, match="--calls"):
            invoke(Store(tmp_path), "dump enable --calls", typed)


def test_the_losses_of_preferences_are_recorded_from_the_first_forward_on_with_what_their_sums_were_made_of(
    openrlhf, store, monkeypatch
):
    from openrlhf.models.loss import DPOLoss

    hook.install(openrlhf.Actor, store=record_here(store, calls=("forward", "loss")))
    rows, real = torch.arange(24).view(4, 6), torch.ones(4, 6).long()
    rows[2:, :3], real[1, 5] = rows[:2, :3], 0
    given = SimpleNamespace(models=(openrlhf.Actor(), openrlhf.Actor()), loss=DPOLoss(0.1), ids=rows, real=real)
    monkeypatch.setattr(loss_record.here, "strategy", None)
    openrlhf.Preferences.fit.__wrapped__(openrlhf.Preferences(), given)
    openrlhf.Preferences().fit(given)
    unknown, known, first, _ = (dump for dump in dumps_of(store) if dump.record.point == "loss")
    in_fit = [dump.record.arguments.get("context.accumulation") for dump in (unknown, known)]
    assert in_fit == [None, MICRO], "a fit that runs when recording begins has no settings before its first backward"
    assert torch.equal(first.tensors["sequences"], rows) and first.record.arguments["context.multi_turn"] is False
    assert first.tensors["action_mask"].sum(1).tolist() == [3, 2, 3, 3]
    findings = linted(store)
    assert not findings.broken and {"formula", "alignment", "mask"} <= {law.name for law in findings.held}, findings.in_words()


@pytest.mark.parametrize("kind", ["PairWiseLoss", "LogExpLoss"])
def test_the_losses_of_a_reward_model_are_recorded_with_their_pairs_and_recomputed(openrlhf, store, kind):
    import openrlhf.models.loss as kinds

    hook.install(openrlhf.Actor, store=record_here(store, calls=("forward", "loss")))
    trainer = openrlhf.Rewards(getattr(kinds, kind)())
    trainer.fit(torch.arange(12).view(2, 6), torch.arange(12, 24).view(2, 6), torch.tensor([0.5, 2.0]))
    (first, *_), findings = dumps_of(store), linted(store)
    assert first.record.role == "reward loss" and first.tensors["sequences"].shape == (4, 6)
    assert not findings.broken and {"formula", "normalization"} <= {law.name for law in findings.held}, findings.in_words()
    call = RecordedCall.read(str(store.dump_path(first.record)))
    swapped, no_margin = (call.others[words].by_row for words in ("chosen and rejected swapped", "no margin"))
    assert swapped != call.terms.by_row and (no_margin != call.terms.by_row) == (kind == "PairWiseLoss")


def test_whole_steps_are_recorded_and_nothing_else(openrlhf, store):
    recording = Recording(store, calls=("forward", "loss"), steps=(8, 9))
    train(openrlhf, recording, steps=8)
    ledgers = recording.recorder.writer.watched()
    forwards, recorded = losses_of(recording)
    assert [dump.record.step for dump in recorded] == [8, 8, 9, 9]
    assert all(dump.record.step in (8, 9) for dump in forwards) and len(forwards) == 4
    (ledger,) = [ledger for ledger in ledgers if ledger.role == "policy"]
    assert ledger.calls == 16 and sum(ledger.sampled_out.values()) == 12
    assert invoke(store, "dump enable --step 3..5").exit_code == 0
    assert read_control(store).steps == (3, 5)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="range of steps"):
        invoke(store, "dump enable --step 5..3")


def stepping(openrlhf, recording):
    """An actor to train, a reference that never steps, and what calls one of them."""
    openrlhf.Actor.forward = hook.wrap(vars(openrlhf.Actor)["forward"], recording.slot)
    policy, reference = openrlhf.Actor(), openrlhf.Actor()
    reference.eval().model.global_steps = 0

    def call(actor):
        rows = torch.arange(12).view(2, 6)
        with torch.set_grad_enabled(actor.training):
            actor(rows, torch.ones(2, 5).bool(), attention_mask=torch.ones_like(rows))

    return policy, reference, call


def test_a_new_switch_without_steps_records_every_call(openrlhf, store):
    recording = Recording(store, steps=(3, 4))
    policy, _, call = stepping(openrlhf, recording)
    call(policy)
    recording.set(run="later")
    call(policy)
    assert [dump.record.run for dump in recording.dumps()] == ["later"]


@pytest.mark.parametrize("steps, expected", [((7, 7), ["policy", "reference"]), ((0, 0), [])])
def test_a_reference_is_recorded_in_the_steps_of_the_policy_beside_it(openrlhf, store, steps, expected):
    recording = Recording(store, steps=steps)
    policy, reference, call = stepping(openrlhf, recording)
    call(policy)
    call(reference)
    assert sorted("policy" if dump.record.step else "reference" for dump in recording.dumps()) == expected


@pytest.mark.parametrize("unknown", ["a reference alone", "no step"])
def test_calls_of_an_unknown_step_are_not_recorded_and_that_is_said_once(openrlhf, store, monkeypatch, caplog, unknown):
    recording = Recording(store, steps=(0, 9))
    policy, reference, call = stepping(openrlhf, recording)
    if unknown == "no step":
        policy.model.global_steps = None
    else:
        monkeypatch.setattr(facts, "role_from_ray", lambda: "reference")
    for _ in range(2):
        call(policy if unknown == "no step" else reference)
    assert not recording.dumps() and caplog.text.count("--step selects no call") == 1


@pytest.mark.parametrize("hashes", [False, True])
def test_weights_are_recorded_in_the_chosen_steps(openrlhf, store, hashes):
    recording = Recording(store, steps=(7, 7))
    recording.recorder.hashes = hashes
    policy, _, call = stepping(openrlhf, recording)
    for _ in range(2):
        call(policy)
        policy.model.global_steps += 1
    assert len(recording.dumps()) == len(list((store.root / "weights" / "r").iterdir())) == 1
