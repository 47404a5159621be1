"""OpenRLHF's own losses, built from what was recorded of them: the loss of a micro-batch, as its training step adds it up.

Known classes only: a record names which of them it was, and nothing that a record says is imported.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from actordbg.base.errors import Unsupported
from actordbg.capture.loss_points import CapturePoints
from actordbg.formats.nested_values import CONTEXT
from actordbg.store.payload import Dump
from actordbg.trainers.openrlhf.cpu import stand_in_for_flash_attn


def total_loss(recorded: Dump, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, dict[str, float]]:
    """Return the loss that OpenRLHF passes to backward, with the KL and entropy terms, and the results of its loss class.

    recorded: the dump of the loss. log_probs: [B, A], differentiable; entropy: [B, A] if the run has an entropy term. Raises
    Unsupported for a loss of another trainer, and if a term's values were not recorded.
    """
    stand_in_for_flash_attn()
    from openrlhf.models import loss as losses
    from openrlhf.models.utils import compute_approx_kl

    arguments, declared = recorded.record.arguments, CapturePoints.of("openrlhf")
    where, of = recorded.record.actor.get("function"), arguments.get(f"{CONTEXT}loss.formula_of")
    where = f"openrlhf.models.loss:{of}.forward" if of else where
    point = next((each for each in declared.losses if where == f"{each.where}.forward" and not each.model), None)
    if point is None:
        raise Unsupported(f"{where} is not a loss of OpenRLHF", hint="only OpenRLHF's losses are computed again")
    tensors = {name: tensor.to(log_probs.device) for name, tensor in recorded.tensors.items()}
    known: dict[str, Any] = {**arguments, **tensors, "log_probs": log_probs}
    kind = getattr(losses, point.where.partition(":")[2])
    options = {name: f"{CONTEXT}loss.{name}" for name in inspect.signature(kind.__init__).parameters}
    module = kind(**{name: arguments[key] for name, key in options.items() if key in arguments})
    names = {name: point.names.get(name, name) for name in inspect.signature(module.forward).parameters}
    if point.scores:
        rows = (log_probs * known["action_mask"]).sum(-1)
        known |= zip(names, torch.cat((rows, known["context.base_row_log_probs"])).chunk(4), strict=True)
    result = module(**{name: known[own] for name, own in names.items() if own in known})
    results = dict(zip(point.returns, result if isinstance(result, tuple) else (result,), strict=False))
    total = results["loss"]
    norm = {name: known[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size") if known.get(name) is not None}
    fact: dict[str, Any] = {
        name: known.get(f"{CONTEXT}{name}") for name in ("kl.use_loss", "kl.init_coef", "kl_ctl", "entropy_coef")
    }
    if fact["kl.use_loss"] and fact["kl.init_coef"]:
        base = known.get(f"{CONTEXT}base_action_log_probs")
        if base is None:
            raise Unsupported("the base log-probs of the KL term were not recorded", hint="record the step again")
        kl = compute_approx_kl(
            log_probs, base, log_probs_old=known["old_log_probs"], kl_estimator=known[f"{CONTEXT}kl.estimator"],
            unbiased_gradient=bool(known.get(f"{CONTEXT}kl.unbiased_gradient")),
        )  # fmt: skip
        total = total + losses.aggregate_loss(kl, known["action_mask"], **norm) * float(fact["kl_ctl"])
    if fact["entropy_coef"]:
        if entropy is None:
            raise Unsupported("the Actor returned no entropies for the entropy term", hint="record the step again")
        total = total - losses.aggregate_loss(entropy, known["action_mask"], **norm) * fact["entropy_coef"]
    figures = {name: float(value.detach()) for name, value in results.items() if isinstance(value, torch.Tensor)}
    return total, figures
