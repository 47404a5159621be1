"""Losses of other trainers are recorded under one set of names, joined to their forwards, and change nothing.

The stand-ins have the signatures and values of verl 0.9.1, whose loss is inside of the forward, and SkyRL 0.3.0, whose loss is
around it. `test_own_classes` runs TRL itself, and the others where they are installed.
"""

import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from adaptercases import dumps_of, record_here
from recordedfields import linted, unlisted_of
from torch import nn

from actordbg.recorded.recorded_calls import RecordedCall
from actordbg.trainers import trl_adapter, verl_adapter
from actordbg.trainers.recorded_losses import _Recorder
from actordbg.trainers.recorded_model import attach, inside

PROMPT, ANSWER = 3, 4
IDS = torch.tensor([[0, 5, 9, 11, 2, 7, 3], [4, 8, 4, 1, 6, 0, 0]])
REAL = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
ADVANTAGES = torch.tensor([0.5, -1.0])
MASK = REAL[:, PROMPT:]


class Policy(nn.Module):
    """Log-probs that depend on a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7))

    def scores(self, ids):
        return -(self.weight * ids.float() / 10).exp()


def ppo(new, old, advantages, mask, by):
    ratio = (new - old).exp()
    terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (terms * mask).sum() / by


NORM = 2.5


def skyrl(model):
    class HFModelWrapper:
        model: Any

        def forward(self, sequences, num_actions, attention_mask = None, temperature = 1.0,
                    return_output = False, compute_entropy = False, entropy_requires_grad = True,
                    pixel_values = None, image_grid_thw = None):  # fmt: skip
            return self.model.scores(sequences[:, -num_actions:]), {"entropy": 1 / (1.0 + sequences)}

    class PolicyWorkerBase:
        algorithm = SimpleNamespace(policy_loss_type="regular", eps_clip_low=0.2, eps_clip_high=0.2, clip_ratio_c=3.0,
                                    use_kl_loss=True, kl_loss_coef=0.1, kl_estimator_type="abs", use_entropy_loss=True,
                                    entropy_loss_coef=0.05)  # fmt: skip
        algorithm.off_policy_correction = SimpleNamespace(tis_ratio_type=None, token_tis_ratio_clip_high=2.0)
        cfg, mesh_rank = SimpleNamespace(algorithm=algorithm), SimpleNamespace(dp_size=1)

        def optim_step(self):
            return NORM

        def _forward_backward_micro(self, experience, microbatch_weight, loss_fn=None, loss_fn_config=None):
            new, more = self.model.forward(experience.sequences, ANSWER, attention_mask=experience.attention_mask)  # type: ignore[attr-defined]
            loss = ppo(new, experience.action_log_probs, experience.advantages, experience.loss_mask, by=1)
            mask, entropy = experience.loss_mask, more["entropy"][:, -ANSWER - 1 : -1]
            kl = (((new - experience.base_action_log_probs).abs() * mask).sum(1) / mask.sum(1)).mean()
            final = loss + (0.1 * kl - 0.05 * (entropy * mask).sum() / mask.sum()) * microbatch_weight
            return {"policy_loss": float(loss.detach()), "final_loss": float(final.detach())}

    wrapper, worker = HFModelWrapper(), PolicyWorkerBase()
    wrapper.model, worker.model = model, wrapper  # type: ignore[attr-defined]
    scores = model.scores(IDS[:, PROMPT:]).detach()
    experience = SimpleNamespace(sequences=IDS, attention_mask=REAL, loss_mask=MASK, action_log_probs=scores * 1.1,
                                 advantages=ADVANTAGES[:, None].expand(MASK.shape) / 6, rollout_logprobs=scores * 1.2,
                                 base_action_log_probs=scores * 0.9)  # fmt: skip
    modules = {
        "a": ModuleType("skyrl.backends.skyrl_train.workers.model_wrapper"),
        "b": ModuleType("skyrl.backends.skyrl_train.workers.worker"),
    }
    modules["a"].HFModelWrapper, modules["b"].PolicyWorkerBase = HFModelWrapper, PolicyWorkerBase  # type: ignore[attr-defined]
    return modules, lambda: worker._forward_backward_micro(experience, 0.5)["final_loss"], lambda: worker.optim_step()


def verl(model):
    losses, engines = ModuleType("verl.workers.utils.losses"), ModuleType("verl.workers.engine.fsdp.transformer_impl")

    def jagged(rows):
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    real = [ids[mask > 0] for ids, mask in zip(IDS, REAL, strict=True)]
    counts = MASK.sum(1).tolist()

    def ppo_loss(config, model_output, data, dp_group=None):
        rows = zip(model_output["log_probs"].unbind(), counts, strict=True)
        new = torch.nn.utils.rnn.pad_sequence([values[-count - 1 : -1] for values, count in rows], batch_first=True)
        old = torch.nn.utils.rnn.pad_sequence(list(data["old_log_probs"].unbind()), batch_first=True)
        base = torch.nn.utils.rnn.pad_sequence(list(data["ref_log_prob"].unbind()), batch_first=True)
        penalties = 0.1 * ((base - new).exp() - (base - new) - 1) - 0.05
        loss = ppo(new, old, data["advantages"], MASK, by=data["batch_num_tokens"])
        return loss + (penalties * MASK).sum() / data["batch_num_tokens"], {}

    class FSDPEngine:
        def optimizer_step(self):
            return NORM

    class FSDPEngineWithLMHead(FSDPEngine):
        module, model_config, lr_scheduler = model, SimpleNamespace(model_type="language_model"), SimpleNamespace()

        def forward_step(self, micro_batch, loss_function, forward_only):
            rows = [torch.cat((model.scores(ids)[1:], torch.zeros(1))) for ids in real]
            output = {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
            output["entropy"] = torch.nested.as_nested_tensor([torch.ones_like(row) for row in rows], layout=torch.jagged)
            data = {name: micro_batch[name] for name in micro_batch if name not in ("input_ids", "prompts", "responses")}
            loss, _ = losses.ppo_loss(config=config, model_output=output, data=data)  # lengths: of the rows on the CPU
            return loss, {"model_output": output}

    scores = [model.scores(ids[-count:]).detach() for ids, count in zip(real, counts, strict=True)]
    config = SimpleNamespace(policy_loss={}, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl+", entropy_coeff=0.05, clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2,
                             clip_ratio_c=None, loss_agg_mode="token-mean")  # fmt: skip
    batch = {"input_ids": jagged(real), "temperature": 1.0, "prompts": jagged([ids[:-count] for ids, count in zip(real, counts, strict=True)]),
             "responses": jagged([ids[-count:] for ids, count in zip(real, counts, strict=True)]),
             "response_mask": jagged([torch.ones(count) for count in counts]), "old_log_probs": jagged([s * 1.1 for s in scores]),
             "advantages": ADVANTAGES[:, None] * MASK, "dp_size": 1, "batch_num_tokens": 6, "global_batch_size": 2,
             "rollout_log_probs": jagged([s * 1.2 for s in scores]), "ref_log_prob": jagged([s * 0.9 for s in scores])}  # fmt: skip
    losses.ppo_loss, engines.FSDPEngineWithLMHead = ppo_loss, FSDPEngineWithLMHead  # type: ignore[attr-defined]
    engines.FSDPEngine, engine = FSDPEngine, FSDPEngineWithLMHead()  # type: ignore[attr-defined]
    return {"a": losses, "b": engines}, lambda: engine.forward_step(batch, None, False)[0], lambda: engine.optimizer_step()


def ran(store, name, monkeypatch, calls_of_loss=1, **control):
    """The loss, its gradient, and what was recorded."""
    monkeypatch.setattr(inside, "micro_batch", 0)  # what another test of this process trained has left
    model = Policy()
    modules, step, update = {"skyrl": skyrl, "verl": verl}[name](model)
    if store is not None:
        folder = record_here(store, **control)
        for module in modules.values():
            monkeypatch.setitem(sys.modules, module.__name__, module)
            attach(module, name, folder)
    for _ in range(calls_of_loss):
        loss = step()
    assert update() == NORM
    if isinstance(loss, torch.Tensor):
        loss.backward()
    return float(loss), float(model.weight.grad or 0.0), dumps_of(store) if store is not None else []


@pytest.mark.parametrize("name", ["skyrl", "verl"])
def test_a_loss_is_recorded_under_one_set_of_names_beside_its_forward(store, monkeypatch, name):
    loss, gradient, dumps = ran(store, name, monkeypatch, calls=["forward", "loss"])
    assert (loss, gradient) == ran(None, name, monkeypatch)[:2]
    forward, recorded = sorted(dumps, key=lambda dump: dump.record.point)
    assert (forward.record.point, recorded.record.point) == ("forward", "loss") and forward.record.replayable
    call = RecordedCall.read(str(store.dump_path(recorded.record)))
    assert call.forward_id == forward.record.dump_id and call.fact("loss") == pytest.approx(loss)
    named, mask = call.log_probs(), call.active
    assert (
        set(named) == {"log_probs", "old_log_probs", "rollout_log_probs", "base_action_log_probs"}
        and mask is not None
        and mask.sum() == 6
    )
    for of, factor in (("old_log_probs", 1.1), ("rollout_log_probs", 1.2)):
        assert named[of][mask] == pytest.approx(named["log_probs"][mask] * factor, rel=1e-5)
    assert call.actions is not None and call.actions[mask].tolist() == IDS[:, PROMPT:][MASK > 0].tolist()
    assert (call.fact("micro_batch"), call.fact("grad_norm")) == (0, NORM)
    findings = linted(store)
    assert not findings.broken, findings.in_words()
    assert findings["normalization"].looked_at == 1, "the losses are the whole step's"
    assert not unlisted_of(store.iter_dumps()), "docs/reference/recorded-fields.md says who reads each recorded field"


def test_no_tensor_of_a_loss_is_held_after_it(store, monkeypatch):
    own, held = verl_adapter.LossCall, []

    def weighted(*given, **named):
        weights = torch.ones(MASK.shape)
        held.append(weakref.ref(weights))
        return own(*given, **named | {"weights": weights})

    monkeypatch.setattr(verl_adapter, "LossCall", weighted)
    _, _, dumps = ran(store, "verl", monkeypatch, calls=["forward", "loss"])
    assert len(held) == 1 and held[0]() is None and any("context.term_weights" in dump.tensors for dump in dumps)


def test_a_loss_over_the_tokens_of_a_generation_of_several_steps_is_no_mean_of_a_step():
    """TRL divides by the tokens of a generation, which is rescaled to a step by the number of micro-batches alone."""
    trainer = MagicMock(loss_type="dapo", current_gradient_accumulation_steps=2, top_entropy_quantile=1.0, eos_token_ids=[2])
    modes = []
    for steps in (2, 4):
        trainer.args = SimpleNamespace(delta=None, steps_per_generation=steps)
        call = {"self": trainer, "inputs": {"completion_mask": MASK, "advantages": ADVANTAGES}}
        made = trl_adapter.grpo_loss(call, torch.zeros(MASK.shape), None)
        modes.append(made and made.facts["loss_agg_mode"])
    assert modes == ["token-mean", None]


@pytest.mark.parametrize("name", ["skyrl", "verl"])
def test_without_the_loss_only_the_forward_is_recorded(store, monkeypatch, name):
    assert [dump.record.point for dump in ran(store, name, monkeypatch)[2]] == ["forward"]


def test_a_loss_that_cannot_be_read_is_told_once_and_is_a_loss_all_the_same(store, monkeypatch, capsys):
    before = ran(None, "verl", monkeypatch)[0]
    monkeypatch.setattr(verl_adapter, "LossCall", lambda *_, **__: 1 / 0)
    loss, _, dumps = ran(store, "verl", monkeypatch, calls=["forward", "loss"])
    assert loss == before and [dump.record.point for dump in dumps] == ["forward"]
    assert "a loss was not recorded" in capsys.readouterr().err


@pytest.mark.parametrize("name, ring", [("skyrl", 0), ("skyrl", 8), ("verl", 8)])
def test_only_the_losses_of_recorded_forwards_are_read(store, monkeypatch, name, ring):
    reads, record = [], _Recorder.record
    monkeypatch.setattr(_Recorder, "record", lambda *given: (reads.append(1), record(*given)))
    _, _, dumps = ran(store, name, monkeypatch, 7, calls=["forward", "loss"], every=3, ring=ring)
    forwards = {dump.record.dump_id for dump in dumps if dump.record.point == "forward"}
    recorded = [RecordedCall.read(str(store.dump_path(dump.record))).forward_id for dump in dumps if dump.record.point == "loss"]
    assert len(forwards) == len(recorded) == len(reads) == 3 and set(recorded) == forwards
