"""SkyRL: its model wrapper's forward, whose arguments are nearly those of an Actor. Steps count from the start of the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actordbg.trainers.seam import Arguments, LossCall, Rows, Scores, Seam, Unreadable, no_rows, updates_of


def _rows(call: Arguments) -> Rows:
    actions, mask = call["num_actions"], call["attention_mask"]
    if isinstance(actions, list) and len(actions) == 1:
        (actions,) = actions
    if not isinstance(actions, int) or call["pixel_values"] is not None:
        raise Unreadable("num_actions is a list, or there are images, which this adapter cannot read")
    return Rows(
        model=call["self"].model,
        sequences=call["sequences"],
        attention_mask=mask,
        action_mask=mask[:, -actions:],
        temperature=call["temperature"],
        entropy=bool(call["compute_entropy"]),
        step=updates_of(call["self"]),
    )


def _scores(output: Any) -> Scores:
    """Read log-probs of the actions; entropies cover all positions, and are cut to the actions."""
    if not isinstance(output, tuple):
        return Scores(output)
    log_probs, inner = output
    entropy = inner.get("entropy")
    if entropy is not None:
        entropy = entropy[:, -log_probs.shape[1] - 1 : -1]
    return Scores(log_probs, entropy)


_CORRECTIONS = (
    "tis_ratio_type", "sequence_mask_metric", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
)  # fmt: skip
"""Settings that, if any has a value, change terms or mask of a loss."""


def _policy_loss(call: Arguments, log_probs: Any, output: Any) -> LossCall | None:
    """Read the loss of a micro-batch, after its backward: metrics have its value. Advantages are divided by the step's tokens or
    rows before, so the losses of a step add up.
    """
    worker, experience = call["self"], call["experience"]
    if log_probs is None:
        return None
    algorithm = worker.cfg.algorithm
    kind, own = call.get("loss_fn") or algorithm.policy_loss_type, call.get("loss_fn_config")
    correction = algorithm.off_policy_correction
    corrected = any(getattr(correction, name, None) is not None for name in _CORRECTIONS)
    facts = {
        "policy_loss_type": "ppo" if kind in ("regular", "dual_clip") and not corrected and not own else kind, "loss_type": kind,
        "dual_clip": algorithm.clip_ratio_c if kind == "dual_clip" else None, "is_correction_level": "off",
        "clip_eps_low": algorithm.eps_clip_low, "clip_eps_high": algorithm.eps_clip_high, "is_corrected": corrected,
        "loss_reduction": getattr(algorithm, "loss_reduction", None), "loss_agg_mode": "token-sum",
    }  # fmt: skip
    for name in ("kl", "entropy"):  # penalties are means of the micro-batch, by its weight
        used = getattr(algorithm, f"use_{name}_loss", False)
        facts |= {f"{name}_coef": getattr(algorithm, f"{name}_loss_coef") if used else 0.0,
                  f"{name}_share": call.get("microbatch_weight", 1.0)}  # fmt: skip
    by = getattr(algorithm, "kl_estimator_type", "")
    facts |= {"kl_estimator": by, "kl_limits": [20.0, 10.0] if by == "k3" else None}
    own = {"base_action_log_probs": experience.base_action_log_probs if facts["kl_coef"] else None,
           "entropy": call.get("entropy") if facts["entropy_coef"] else None}  # fmt: skip
    value = output.get("final_loss", output.get("policy_loss")) if isinstance(output, Mapping) else None
    ranks = worker.mesh_rank.dp_size
    loss = None if value is None else log_probs.new_tensor(value) * ranks
    return LossCall(
        log_probs, experience.loss_mask, experience.advantages, experience.action_log_probs, experience.rollout_logprobs,
        loss=loss, dp_size=ranks, facts=facts, own=own,
    )  # fmt: skip


class SkyRl:
    """SkyRL 0.3, its backends on transformers. Tested with its wrapper and policy worker, not in a SkyRL training run."""

    name = "skyrl"
    package = "skyrl"
    tried = ()  # only wrapper and worker of 0.3.0, without a training run
    seams = (
        Seam(
            where="skyrl.backends.skyrl_train.workers.model_wrapper:HFModelWrapper.forward",
            needs=("sequences", "num_actions", "attention_mask", "temperature", "compute_entropy", "pixel_values"),
            rows=_rows,
            result=_scores,
        ),
        Seam(
            where="skyrl.backends.skyrl_train.workers.worker:PolicyWorkerBase._forward_backward_micro",
            rows=no_rows,
            needs=("experience", "loss_fn"),
            loss=_policy_loss,
        ),
        Seam(
            where="skyrl.backends.skyrl_train.workers.worker:PolicyWorkerBase.optim_step",
            rows=no_rows,
            steps=lambda call: call["self"].model,
        ),
    )
