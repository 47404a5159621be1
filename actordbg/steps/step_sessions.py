"""The two sides of a step on loaded models: the trainer's own loss under a configuration, and the formula in fp32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actordbg.actor.backends.training import Training, freeze
from actordbg.actor.training_session import TrainingSession
from actordbg.actor.truth_session import TruthSession
from actordbg.base.errors import Unsupported
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.formats.nested_values import CONTEXT
from actordbg.formats.weight_hashes import bare_name
from actordbg.recorded.loss_terms import kl_terms, loss_terms
from actordbg.recorded.recorded_calls import RecordedCall
from actordbg.steps.step_plan import ENTROPY, StepPlan
from actordbg.store.payload import Dump
from actordbg.trainers.captured_call import text_call
from actordbg.trainers.rows_actor import follow_adapters
from actordbg.trainers.trainer import TRAINER

_KL_WEIGHT = 10.0
"""Largest importance weight in the gradient of an unbiased KL penalty (the trainer's KL_IS_WEIGHT_CLIP)."""
_FOLDED, _AT_ONCE = 1 << 24, 1 << 20
"""Elements of a folded gradient: as many gradients as a step has places do not fit in memory. Those of products at once."""


class StepSession(TrainingSession):
    """The Actor in its backend, with the trainer's own loss. together: micro-batches of a lane, after which norms are known."""

    def __init__(self, config: ReplayConfig, defaults: DumpRecord | None, model_cache: Path, plan: StepPlan) -> None:
        self.together, self._plan = plan.accumulation, plan
        training = Training(lr=0.0, max_norm=plan.max_norm, accumulation=plan.accumulation, frozen=plan.frozen)
        super().__init__(config, defaults, model_cache, training)

    def one_of_step(self, forward: Dump, loss: Dump) -> tuple[Tensor, dict[str, float], float]:
        """Run forward, loss and backward of a micro-batch; return its log-probs [B, A], its figures, and its seconds."""
        self._loss = loss
        _, seconds = self.micro_batch(forward)
        return self._log_probs, self._figures, seconds

    def objective(self, log_probs: Tensor, entropy: Tensor | None, mask: Tensor) -> Tensor:
        self._log_probs = log_probs.detach().float().cpu()
        total: Tensor
        total, self._figures = TRAINER.total_loss(self._loss, log_probs, entropy)
        return total * self._plan.scale

    def norms(self, *, last: bool) -> dict[str, float]:
        """Return the norm of the step's gradient. Collective."""
        return {"grad_norm": self.step()[0]}


class ReferenceSession(TruthSession):
    """The truth's model, with the formula over the whole step."""

    together = 1

    def __init__(self, config: ReplayConfig, defaults: DumpRecord | None, model_cache: Path, plan: StepPlan) -> None:
        super().__init__(config, defaults, model_cache)
        freeze(self.model, plan.frozen)
        self._plan = plan
        self._total: dict[str, Tensor] = {}
        self._before: Tensor | float = 0.0
        self._folded: list[Tensor] = []

    def one_of_step(self, forward: Dump, loss: Dump) -> tuple[Tensor, dict[str, float], float]:
        """Add a micro-batch's gradient; return its log-probs [B, A], its part of the step's loss, and its seconds."""
        call = text_call(forward, self.resolved["vocab_size"], self._device)
        self.model.train(bool(forward.record.training) and not self._dropout)
        follow_adapters(self.model, forward.record.actor)
        objective = _Objective(loss, self._plan, self._wide, self._device)
        outcome = self._rows(call, forward, True, objective=objective)
        return outcome.log_probs, {"loss": objective.loss, ENTROPY: objective.entropy}, outcome.forward_s

    def norms(self, *, last: bool) -> dict[str, Any]:
        """Return the norm of each place's gradient, `alone`, with its last rank, and, with the last place, of the whole step.

        Beside the latter, `products` of any two micro-batches' gradients, and `squares` of parameters' gradients.
        """
        folded = _folded(self.model)
        self._folded.append(folded - self._before)
        self._before = folded
        if len(self._folded) % self._plan.ranks:
            return {}
        own = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        for name, gradient in own.items():
            self._total[name] = self._total[name].add_(gradient) if name in self._total else gradient.clone()
        figures: dict[str, Any] = {"alone": _norm(own)}
        if last:
            cut = (torch.split(own, _AT_ONCE) for own in self._folded)  # [micro-batches, elements] at once
            pieces = (torch.stack(each).double() for each in zip(*cut, strict=True))
            products: Any = sum(each @ each.T for each in pieces)
            squares = {bare_name(name): _norm({name: gradient}) ** 2 for name, gradient in self._total.items()}
            figures |= {"grad_norm": _norm(self._total), "products": products.tolist(), "squares": squares}
        self.model.zero_grad(set_to_none=True)
        self._before = 0.0
        return figures


def _norm(gradients: dict[str, Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in gradients.values()))


def _folded(model: torch.nn.Module) -> Tensor:
    """Return a model's gradient as at most `_FOLDED` elements, float32 on the CPU. Products of two are those of the gradients:
    exactly if nothing is folded, else to about 1/4000 of their norms, as each fold adds with random signs (a count sketch).
    """
    whole, at = sum(each.numel() for each in model.parameters()), 0
    size, device = min(_FOLDED, whole), next(model.parameters()).device
    signs = torch.randint(2, (size + whole // size,), generator=torch.Generator().manual_seed(0)).to(device) * 2.0 - 1
    folded = torch.zeros(size, device=device)
    for parameter in model.parameters():
        left = torch.empty(0, device=device) if parameter.grad is None else parameter.grad.flatten()
        end = at + parameter.numel()
        while len(left):
            fold, place = divmod(at, size)
            part, left = left[: size - place], left[size - place :]
            folded[place : place + len(part)] += part * signs[fold + place :][: len(part)]
            at += len(part)
        at = end
    return folded.cpu()


class _Objective:
    """A row's part of the step's loss: the recorded one, whose gradient goes to the row's own log-probs.

    loss: so far, without KL and entropy terms. entropy: sum over the actions so far, if the loss has an entropy term.
    """

    def __init__(self, loss: Dump, plan: StepPlan, dtype: torch.dtype, device: torch.device) -> None:
        call = RecordedCall(loss.record, {})
        self._plan, self.loss, self.entropy = plan, 0.0, 0.0
        self._attributes, self._fact = call.loss_attributes, call.fact
        self._named = {
            name.removeprefix(CONTEXT): tensor.to(device, dtype)
            for name, tensor in loss.tensors.items()
            if tensor.is_floating_point()
        }
        self._mask = loss.tensors["action_mask"].to(device) != 0

    def __call__(self, row: int, places: Tensor, scores: Tensor, logits: Tensor) -> Tensor:
        named = {name: each for name, each in self._named.items() if each.dim() == 2}
        mask = self._mask
        own = torch.zeros_like(named["log_probs"]).index_put((places.new_tensor(row), places), scores)
        recorded = named["log_probs"].where(mask, own.detach())  # which say what is clipped, and how much each action counts
        named["log_probs"] = recorded + own - own.detach()
        terms = loss_terms(torch, self._attributes, named, mask)
        if terms is None or self._attributes.get("kl_coef") or self._attributes.get("entropy_coef"):
            raise Unsupported("the formula of this loss is not known", hint="replay a step of PPO, GSPO, DPO or SFT")
        by_token, tokens = self._attributes.get("token_level_loss") is not False, self._plan.tokens
        means = terms.where(mask, 0.0).sum(1) / (tokens if by_token else mask.sum(1).clamp(min=1) * self._plan.rows)
        total: Tensor = means.sum()
        self.loss += float(means[row].detach())
        if self._fact("kl.use_loss") and self._fact("kl.init_coef"):
            kl = self._kl(named).where(mask, 0.0).sum() / tokens
            total = total + float(self._named["kl_ctl"]) * kl
        if coefficient := self._fact("entropy_coef"):
            log_softmax = torch.log_softmax(logits, -1)
            each = (log_softmax.exp() * log_softmax).sum(-1)
            negated = each.where(mask[row, places], 0.0).sum()
            self.entropy -= float(negated.detach())
            total = total + coefficient * negated / tokens
        return total

    def _kl(self, named: dict[str, Tensor]) -> Tensor:
        new, base = named["log_probs"], named.get("base_action_log_probs")
        terms: Tensor | None = None if base is None else kl_terms(torch, self._fact("kl.estimator"), new, base)
        if terms is None or base is None:
            raise Unsupported("the KL term cannot be computed from what was recorded", hint="record the step again")
        if not self._fact("kl.unbiased_gradient"):
            return terms
        weight = (new - named["old_log_probs"]).exp().clamp(max=_KL_WEIGHT).detach()
        gradient: Tensor = weight * (new - base) ** 2 / 2
        return terms.detach() + gradient - gradient.detach()
