"""TRL: GRPO and RLOO at the function that scores completions; DPO and SFT at the models that get a fused LM head.

GRPO, RLOO, DPO, SFT and KTO of 1.15 and 1.16 use `add_fused_lm_head(model)`: the model's forward returns fp32 log-probs. GRPO's
own function comes first. Losses are those of GRPO, RLOO, DPO and SFT; KTO's is not recorded.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from actordbg.base.fault import Unsupported
from actordbg.trainers.seam import (
    TRAINER_STEP,
    Arguments,
    LossCall,
    Rows,
    Scores,
    Seam,
    Unreadable,
    images,
    no_rows,
    own_positions,
    step_of,
    trainer_of,
)

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


_HEAD = "trl.trainer.utils:add_fused_lm_head"
_SCORED = tuple(
    f"trl.trainer.{kind.lower()}_trainer:{kind}Trainer._get_per_token_logps_and_entropies" for kind in ("GRPO", "RLOO")
)
_LOSS = ("model", "inputs", "num_items_in_batch")
_NEEDS = ("model", "input_ids", "attention_mask", "logits_to_keep")


def _completions(call: Arguments) -> Rows:
    trainer, mask = call["self"], call["attention_mask"]
    given: Any = {"entropy": bool(call.get("compute_entropy")), "step": trainer.state.global_step, "more": images(call)}
    return Rows(call["model"], call["input_ids"], mask, mask[:, -call["logits_to_keep"] :], trainer.temperature, **given)


def _labelled(call: Arguments) -> Rows | None:
    labels, mask, places = (call.get(name) for name in ("labels", "attention_mask", "position_ids"))
    if not call.get("fused_lm_head"):
        return None
    if labels is None or call.get("shift_labels") is not None or (mask is None and places is None):
        raise Unreadable("its rows are split over ranks, or packed without positions, which this adapter cannot read")
    entropy, positions = "entropy" in call["outputs"], own_positions(call["input_ids"], places)
    given: Any = {"entropy": entropy, "positions": positions, "step": step_of(call["self"]), "more": images(call)}
    given["context"], trainer = {"labels": labels}, trainer_of(call["self"])
    tempered = trainer is None or hasattr(trainer.args, "temperature")  # DPO, SFT and KTO score at 1
    temperature = call["temperature"] if tempered else 1.0
    return Rows(call["self"], call["input_ids"], mask, labels[:, 1:] != -100, temperature, **given)


def _again(where: str, model: Any, rows: Rows) -> Any:
    """Repeat a call of TRL's function: GRPO's with a stub trainer that has a temperature and an idle accelerator."""
    from actordbg.trainers import captured_call

    model.__dict__.pop("forward", None)  # the head from the previous call
    captured_call.function(_HEAD)(model, temperature=rows.temperature, outputs=("log_probs", "entropy"))
    if where == _HEAD:
        return model(**captured_call.labelled(rows), **rows.more, fused_lm_head=True)
    if rows.action_mask is None or rows.attention_mask is None:
        raise Unsupported(
            "the trainer's function scores actions of padded rows, and this call has none", hint="pass --through rows"
        )
    trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext), temperature=rows.temperature)
    given = (trainer, model, rows.sequences, rows.attention_mask, rows.action_mask.shape[1])
    return captured_call.function(where)(*given, compute_entropy=rows.entropy, **rows.more)


class Trl:
    """TRL 1.16."""

    name = package = "trl"
    tried = ("1.16.0",)
    seams = (
        *(Seam(at, _completions, lambda out: Scores(out[0], out[1]), _NEEDS, again=partial(_again, at)) for at in _SCORED),
        Seam(_HEAD, _labelled, lambda out: Scores(getattr(out, "log_probs", None), getattr(out, "entropy", None)),
             ("model", "temperature", "outputs"), makes_model="model", again=partial(_again, _HEAD)),
        TRAINER_STEP,
        Seam("trl.trainer.grpo_trainer:GRPOTrainer._compute_loss", no_rows, needs=("model", "inputs"), loss=grpo_loss),
        *(Seam(f"trl.trainer.{kind.lower()}_trainer:{kind}Trainer.compute_loss", no_rows, needs=_LOSS, loss=loss)
          for kind, loss in (("RLOO", rloo_loss), ("DPO", dpo_loss), ("SFT", sft_loss))),
        Seam("transformers.trainer:Trainer._get_grad_norm", no_rows, steps=lambda call: call["self"]),
    )  # fmt: skip
