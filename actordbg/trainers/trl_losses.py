"""TRL's losses of GRPO, RLOO, DPO and SFT, as `LossCall`s: what a call of them has, under the names of records (TRL 1.16)."""

from __future__ import annotations

from typing import Any

import torch

from actordbg.trainers.seam import Arguments, LossCall

_AGGREGATED = {
    "dapo": "token-mean", "grpo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm", "luspo": "seq-mean-token-sum",
}  # fmt: skip
"""What the losses of a step add up to. bnpo's depends on the micro-batches, dapo's on a generation's, unless it is a step."""


def grpo_loss(call: Arguments, log_probs: Any, output: Any) -> LossCall | None:
    """Read GRPO's loss. Without old log-probs TRL takes the policy's own."""
    trainer, inputs = call["self"], call["inputs"]
    if log_probs is None:
        return None
    mask, wide, kind = inputs["completion_mask"], inputs["advantages"], trainer.loss_type
    tools = inputs.get("tool_mask")
    mask = mask if tools is None else mask * tools
    old, weights = inputs.get("old_per_token_logps"), inputs.get("importance_sampling_ratio")
    bonus, entropy = trainer._entropy_bonus_enabled, call.get("entropy")
    limits = trainer.args.delta, trainer.off_policy_mask_threshold
    more = trainer.aux_loss_enabled or (bonus and trainer.use_adaptive_entropy) or trainer.top_entropy_quantile < 1
    plain = kind in (*_AGGREGATED, "bnpo") and not more and limits == (None, None)
    formula = "ppo" if trainer.importance_sampling_level == "token" else "gspo"
    of_weights = {"weights_mode": "mode", "weights_low": "clip_min", "weights_high": "clip_max"}
    corrected = {
        name: getattr(trainer, f"vllm_importance_sampling_{setting}", None)
        for name, setting in of_weights.items()
        if weights is not None
    }
    summed = getattr(trainer, "multi_objective_aggregation", "") != "normalize_then_sum"
    scale = getattr(trainer, "scale_rewards", None) if summed else "batch"
    estimates = wide.dim() == 1 or type(trainer).__module__.startswith("trl.")  # a subclass may have advantages of its own
    window = getattr(trainer, "current_gradient_accumulation_steps", None)
    whole = kind != "dapo" or getattr(trainer.args, "steps_per_generation", None) == window
    return LossCall(
        log_probs, mask, (wide.unsqueeze(1) if wide.dim() == 1 else wide).expand(mask.shape),
        log_probs.detach() if old is None else old, inputs.get("sampling_per_token_logps"), output,
        batch_num_tokens=inputs.get("num_items_in_batch"), weights=weights,
        facts={
            "policy_loss_type": formula if plain else kind, "loss_type": kind, "dual_clip": None,
            "clip_eps_low": trainer.epsilon_low, "clip_eps_high": trainer.epsilon_high, "is_correction_level": "off",
            "is_corrected": weights is not None, "loss_agg_mode": _AGGREGATED.get(kind) if whole else None,
            "loss_scale_factor": trainer.max_completion_length, **corrected,
            "kl_coef": trainer.beta, "kl_estimator": "k3", "kl_by_ratio": getattr(trainer.args, "use_bias_correction_kl", False),
            "entropy_coef": trainer.entropy_coef if bonus else 0.0, "entropy_share": 1 / (window or 1),
        },
        settings=_sampling(trainer, multi_turn=tools is not None, estimator=f"grpo-{scale}" if scale and estimates else None),
        own={
            "base_action_log_probs": inputs.get("ref_per_token_logps"), "lr": _rate(trainer),
            "entropy": entropy if bonus else None,
        },
    )  # fmt: skip


def _sampling(trainer: Any, estimator: str | None, *, multi_turn: bool | None) -> dict[str, Any]:
    """Return the settings of completions, by the names that they have in records."""
    ends, samples = trainer.eos_token_ids, getattr(trainer.args, "generation_batch_size", None)
    return {
        "rollout.temperature": trainer.temperature, "rollout.top_p": trainer.top_p, "rollout.top_k": trainer.top_k,
        "rollout.min_p": trainer.min_p, "n_samples_per_prompt": trainer.num_generations, "multi_turn": multi_turn,
        "advantage.estimator": estimator, "rollout.batch_size": samples and samples // trainer.num_generations,
        "mask_truncated": getattr(trainer, "mask_truncated_completions", None),
        "eos_token_id": ends[0] if len(ends) == 1 else None,
        "pad_token_id": getattr(getattr(trainer, "_tokenizer", None), "pad_token_id", None),
    }  # fmt: skip


def _rate(trainer: Any) -> float | None:
    schedule = getattr(trainer, "lr_scheduler", None)
    return schedule and float(schedule.get_last_lr()[0])


def rloo_loss(call: Arguments, log_probs: Any, output: Any) -> LossCall | None:
    """Read RLOO's loss: the ratio is a row's, its old log-probs a sum. The Trainer divides the loss by the micro-batches."""
    trainer, inputs = call["self"], call["inputs"]
    if log_probs is None:
        return None
    mask, kind = inputs["completion_mask"], "other" if trainer.aux_loss_enabled else "rloo"
    clips = {"clip_eps_low": trainer.epsilon_low, "clip_eps_high": trainer.epsilon_high, "dual_clip": None}
    return LossCall(
        log_probs, mask, inputs["advantages"].unsqueeze(1).expand(mask.shape),
        loss=output / trainer.current_gradient_accumulation_steps,
        facts={"policy_loss_type": kind, **clips, "is_correction_level": "off", "loss_agg_mode": "seq-mean-token-mean"},
        settings=_sampling(trainer, None if trainer.normalize_advantages else "rloo", multi_turn=None),
        own={"old_row_log_probs": inputs["old_logps"], "lr": _rate(trainer)},
    )  # fmt: skip


def dpo_loss(call: Arguments, log_probs: Any, output: Any) -> LossCall | None:
    """Read DPO's loss, of rows of which the first half was chosen. The reference's forward came last, or its sums are inputs."""
    trainer, inputs = call["self"], call["inputs"]
    if log_probs is None:
        return None
    args, sums = trainer.args, [inputs[name] for name in ("ref_chosen_logps", "ref_rejected_logps") if name in inputs]
    more = args.loss_weights or args.ld_alpha or args.use_weighting or trainer.aux_loss_enabled
    plain = len(args.loss_type) == 1 and args.f_divergence_type == "reverse_kl" and not more
    own_mask = type(trainer.data_collator).__module__.startswith("trl.") and args.truncation_mode == "keep_start"
    return LossCall(
        log_probs, inputs["completion_mask"][:, 1:],
        loss=(output[0] if isinstance(output, tuple) else output) / trainer.current_gradient_accumulation_steps,
        facts={
            "policy_loss_type": "dpo" if plain else "other", "loss_type": ",".join(args.loss_type), "beta": args.beta,
            "loss_agg_mode": "seq-mean-token-mean",
        },
        settings={"multi_turn": False if own_mask else None},
        own={
            "base_action_log_probs": call["reference"] if not sums else None, "lr": _rate(trainer),
            "base_row_log_probs": torch.cat(sums) if sums else None,
        },
    )  # fmt: skip


def sft_loss(call: Arguments, log_probs: Any, output: Any) -> LossCall | None:
    """Read SFT's loss: the sum over a micro-batch's tokens, divided by those of the step, or by its own in a model that does not
    take that number. DFT's terms are weighted by p.
    """
    trainer, labels, tokens = call["self"], call["inputs"].get("labels"), call["num_items_in_batch"]
    if log_probs is None or labels is None:
        return None
    kind = trainer.args.loss_type
    other = trainer.compute_loss_func or trainer.label_smoother or trainer.aux_loss_enabled or kind not in ("nll", "dft")
    loss = output[0] if isinstance(output, tuple) else output
    return LossCall(
        log_probs, labels[:, 1:] != -100, batch_num_tokens=tokens,
        loss=loss if tokens is not None else loss / trainer.current_gradient_accumulation_steps,  # by the Trainer, behind it
        weights=log_probs.detach().exp() if kind == "dft" else None, own={"lr": _rate(trainer)},
        settings={"eos_token_id": getattr(getattr(trainer, "_tokenizer", None), "eos_token_id", None)},
        facts={"policy_loss_type": "other" if other else "sft", "loss_type": kind, "loss_agg_mode": "token-mean"},
    )  # fmt: skip
