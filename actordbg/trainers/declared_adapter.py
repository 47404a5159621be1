"""NeMo-RL, prime-rl, AReaL, miles and slime: their functions were run, nobody has trained with them here.

Read: NeMo-RL 0.6.0 (7ea279a), prime-rl 0.8.0 (559b447), AReaL 1.0.4 (4aef98d), its FSDP engine; miles 0.1.0 (31f1ca9), its FSDP
backend; slime 0.3.1 (624b824), on Megatron. The last three score logits apart from the model.

Not recorded: rows that are split over ranks (context or sequence parallelism), images, critics, log-probs of a nucleus; of slime,
passes of a reference or a teacher, whose weights take the policy's place.

Losses are `LossCall`s, whose facts are those of their formulas. Each is the sum over the terms of one micro-batch, or over the
means of its rows, divided by a count that the trainer gives. So a loss is recomputed from its own call. What has another formula
is recorded as "other": REINFORCE and approximate KL of NeMo-RL, IPO and own losses of prime-rl, SAPO, M2PO, row ratios and
distillation of AReaL, OPSM and own functions of slime and miles.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from actordbg.trainers.seam import Arguments, LossCall, NoPolicy, Rows, Scores, Seam, Unreadable, no_rows, real_tokens, updates_of

_BY_TOKEN, _BY_ROW = "step-token-sum", "call-row-means"
_UNLIMITED = 1e9


def _within(weights: Any, low: float | None, high: float | None, *, clips: bool) -> Any:
    """Return importance weights limited to [low, high], or 0 where they are outside."""
    low, high = low or 0.0, _UNLIMITED if high is None else high
    return weights.clamp(low, high) if clips else torch.where((weights >= low) & (weights <= high), weights, 0.0)


def nemo_loss(call: Arguments, log_probs: Any, output: Any) -> LossCall | None:
    """Read a loss of NeMo-RL, which gets log-probs [B, S-1]; under sequence packing of one row after another."""
    new, data, loss = call["next_token_logprobs"], call["data"], call["self"]
    names = {"advantages": "advantages", "old_log_probs": "prev_logprobs", "rollout_log_probs": "generation_logprobs"}
    known = {name: data[key][:, 1:] for name, key in names.items() if key in data}
    base, counted = data.get("reference_policy_logprobs"), data["token_mask"][:, 1:]
    mask = counted * data["sample_mask"][:, None]
    if mask.shape != new.shape or call.get("dpo_loss"):
        return None  # split over ranks, or a part of another loss
    facts, weights = {"policy_loss_type": "other", "loss_type": type(loss).__name__}, None
    if hasattr(loss, "ratio_clip_min"):
        if loss.force_on_policy_ratio:
            known["old_log_probs"] = new.detach()
        weights = _nemo_weights(loss, known, counted, mask)
        facts |= _nemo_facts(loss, data)
    return LossCall(
        new, mask, **known, loss=output[0], batch_num_tokens=call.get("global_valid_toks"), facts=facts, weights=weights,
        global_batch_size=call.get("global_valid_seqs"), sequences=data["input_ids"],
        attention_mask=real_tokens(data["input_lengths"], data["input_ids"]),
        own={"base_action_log_probs": None if base is None else base[:, 1:]},
    )  # fmt: skip


def _nemo_facts(loss: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a `ClippedPGLossFn`."""
    other = loss.disable_ppo_ratio or "curr_logprobs_unfiltered" in data
    other = (
        other
        or (loss.positive_example_nll_weight and "rewards" in data)
        or (loss.use_on_policy_kl_approximation and loss.reference_policy_kl_penalty)
    )
    kind = "cispo" if loss.use_cispo else "gspo" if loss.sequence_level_importance_ratios else "ppo"
    limits = [_UNLIMITED if limit is None else limit for limit in (loss.kl_input_clamp_value, loss.kl_output_clamp_value)]
    return {
        "policy_loss_type": "other" if other else kind, "clip_eps_low": loss.ratio_clip_min, "clip_eps_high": loss.ratio_clip_max,
        "dual_clip": loss.ratio_clip_c, "is_correction_level": "off", "is_corrected": loss.use_importance_sampling_correction,
        "kl_coef": loss.reference_policy_kl_penalty, "kl_estimator": loss.reference_policy_kl_type, "kl_limits": limits,
        "loss_agg_mode": _BY_TOKEN if loss.loss_type.name == "TOKEN_LEVEL" else _BY_ROW,
    }  # fmt: skip


def _nemo_weights(loss: Any, known: Mapping[str, Any], counted: Any, mask: Any) -> Any:
    """Return the factors by which terms are corrected for the engine's log-probs, [B, S-1] or [B, 1]; None for none."""
    if not loss.use_importance_sampling_correction:
        return None
    apart, how = known["old_log_probs"] - known["rollout_log_probs"], loss.truncated_importance_sampling_type
    weights = (apart * mask).sum(1, keepdim=True).exp() if loss.sequence_level_importance_ratios else apart.exp()
    weights = weights.detach().nan_to_num(0.0, 0.0, 0.0)
    low, high = loss.truncated_importance_sampling_ratio_min, loss.truncated_importance_sampling_ratio
    if how == "seq-mask-tis":
        sums = (apart.nan_to_num(0.0, 0.0, 0.0) * counted).sum(1, keepdim=True)
        means = (sums / counted.sum(1, keepdim=True)).exp()
        return weights * (_within(means, low, high, clips=False) > 0)
    return weights if how is None else _within(weights, low, high, clips=how == "tis")


def prime_loss(call: Arguments, log_probs: Any, output: Any) -> LossCall:
    """Read prime-rl's loss, which comes behind its forward, as one long row: each value is that of the token at its place."""

    def long(name: str) -> Any:
        return None if call.get(name) is None else torch.cat(tuple(call[name]))[None, 1:]

    weights, mask, facts = long("rl_weights"), long("loss_mask"), {"policy_loss_type": "other"}
    mask = mask if weights is None else mask & (weights != 0)  # `rl_scale` counts no token of weight 0
    config = inspect.getclosurevars(of).nonlocals.get("loss_config") if inspect.isfunction(of := call.get("rl_loss_fn")) else None
    alone = call.get("ce_weights") is None and call.get("ref_kl_weights") is None
    if alone and hasattr(config, "dppo_mask_high"):
        names = ("dppo_mask_low", "dppo_mask_high", "adv_tau", "kl_tau")
        facts = {"policy_loss_type": "dppo", "loss_agg_mode": _BY_TOKEN, **{name: getattr(config, name) for name in names}}
    rollout = long("inference_logprobs")
    return LossCall(
        long("trainer_logprobs"), mask, long("advantages"), rollout, rollout, output[0],
        batch_num_tokens=call["rl_scale"], facts=facts, weights=weights, own={"base_action_log_probs": long("ref_logprobs")},
    )  # fmt: skip


def areal_loss(call: Arguments, log_probs: Any, output: Any) -> LossCall:
    """Read AReaL's GRPO: values of the token behind each, of packed rows without padding. The ratio is to the proximal policy."""
    data, near, filtered = call["input_data"], call["input_data"].get("prox_logp"), call.get("rejection_sampling")

    def long(values: Any) -> Any:
        return None if values is None else values.reshape(1, -1)[:, :-1]

    old, rollout = (data["logprobs"], None) if near is None else (near, data["logprobs"])
    by_token = filtered is None or (filtered.level, filtered.metric) == ("token", "ratio")
    plain = near is not None and by_token and call.get("importance_sampling_level") == "token" and "teacher_logp" not in data
    facts: dict[str, Any] = {"policy_loss_type": "other"}
    weights = None
    if plain and call.get("m2_threshold") is None and not call["use_sapo_loss"]:
        high = call["eps_clip_higher"]
        facts = {
            "policy_loss_type": "ppo", "clip_eps_low": call["eps_clip"], "dual_clip": call["c_clip"],
            "clip_eps_high": call["eps_clip"] if high is None else high, "is_correction_level": "off",
            "is_corrected": filtered is not None, "loss_agg_mode": "call-token-sum",
        }  # fmt: skip
        if filtered is not None:
            weights = _within((near - rollout).exp(), filtered.lower, filtered.upper, clips=filtered.action == "clamp")
    return LossCall(
        long(call["logprobs"]), long(data["loss_mask"]), long(data["advantages"]), long(old), long(rollout), output,
        batch_num_tokens=data["loss_mask"].count_nonzero(), facts=facts, weights=long(weights),
        sequences=data["input_ids"].reshape(1, -1),
    )  # fmt: skip


def behind(batch: Mapping[str, Any], values: Sequence[Any] | None) -> Any:
    """Return values of responses, a list of [R], as [B, S-1]; None for None."""
    if values is None:
        return None
    longest, rows = max(batch["total_lengths"]), zip(values, batch["total_lengths"], batch["response_lengths"], strict=True)
    padded = [torch.nn.functional.pad(of, (total - count - 1, longest - total)) for of, total, count in rows]
    return torch.stack(padded)


def listed_loss(call: Arguments, log_probs: Any, output: Any) -> LossCall | None:
    """Read a policy loss of miles or slime: sums, or rows' means, of a micro-batch. What weights it afterwards is not read.

    slime 0.3.1 and miles 0.1.0 also weight the loss by importance with `--get-mismatch-metrics`, not only with `--use-tis`.
    """
    args, batch = call["args"], call["batch"]
    if log_probs is None:
        return None
    rollout, own_values = batch.get("rollout_log_probs"), [values.detach() for values in log_probs]
    scored = None if getattr(args, "skip_actor_forward_only", False) else batch.get("log_probs")
    old = rollout if args.use_rollout_logprobs else scored or own_values
    entropy = call.get("entropy")
    named: dict[str, Any] = {
        "log_probs": log_probs, "action_mask": batch["loss_masks"], "advantages": batch["advantages"], "old_log_probs": old,
        "rollout_log_probs": rollout,
    }  # fmt: skip
    weights = None
    facts = _listed_facts(args, batch) if hasattr(args, "advantage_estimator") else {"policy_loss_type": "other"}
    if facts.get("is_corrected") and rollout is not None:
        ratios = [(mine - engine).exp() for mine, engine in zip(scored or own_values, rollout, strict=True)]
        weights = behind(batch, [_within(of, args.tis_clip_low, args.tis_clip, clips=True) for of in ratios])
    return LossCall(
        **{name: behind(batch, values) for name, values in named.items()}, loss=output[0], facts=facts, weights=weights,
        own={
            "base_action_log_probs": behind(batch, batch.get("ref_log_probs")),
            "entropy": behind(batch, entropy) if facts.get("entropy_coef") else None,
        },
    )  # fmt: skip


def _listed_facts(args: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a policy loss of miles or slime."""
    kind = args.advantage_estimator if args.advantage_estimator in ("gspo", "cispo") else "ppo"
    own = ("custom_tis_function_path", "custom_pg_loss_reducer_function_path", "use_opsm")
    corrected, penalty = args.use_tis or args.get_mismatch_metrics, args.kl_loss_type
    other = any(getattr(args, name, None) for name in own) or (args.use_unbiased_kl and kind != "ppo")
    sums, by_token = batch.get("rollout_mask_sums"), args.calculate_per_token_loss
    if sums is not None and not by_token:
        counts = torch.stack([mask.sum() for mask in batch["loss_masks"]])
        other = other or not torch.equal(torch.as_tensor(sums).to(counts), counts)  # of several rows of one rollout together
    return {
        "policy_loss_type": "other" if other else kind, "clip_eps_low": args.eps_clip, "clip_eps_high": args.eps_clip_high,
        "dual_clip": getattr(args, "eps_clip_c", None), "is_correction_level": "off", "is_corrected": bool(corrected),
        "kl_coef": args.kl_loss_coef if args.use_kl_loss else 0.0, "kl_by_ratio": bool(args.use_unbiased_kl),
        "kl_estimator": "k3" if penalty == "low_var_kl" else penalty,
        "kl_limits": [_UNLIMITED, 10.0 if penalty == "low_var_kl" else _UNLIMITED], "entropy_coef": args.entropy_coef,
        "loss_agg_mode": _BY_TOKEN if by_token else _BY_ROW,
    }  # fmt: skip


_LOGITS = "nemo_rl.models.automodel.train"
_LOSSES = "nemo_rl.algorithms.loss.loss_functions"


def _nemo_rows(call: Arguments) -> Rows:
    """Read NeMo-RL's call, which gets a mask of ones: rows are padded on the right. Sampling settings are around it."""
    inputs, model, around = call["processed_inputs"], call["model"], call["around"]
    if call["is_reward_model"]:
        raise NoPolicy("a reward model")
    if inputs.cp_buffers or inputs.vlm_kwargs:
        raise Unreadable("its rows are split over ranks, or have images")
    ids, sampling, data = inputs.input_ids, around.get("sampling_params"), around["processed_mb"].data_dict
    given: Any = {"temperature": 1.0 if sampling is None else sampling.temperature, "step": updates_of(NemoRl)}
    if inputs.flash_attn_kwargs:
        return Rows(model, ids, offsets=inputs.flash_attn_kwargs.cu_seqlens_q, **given)
    counted = data["token_mask"][:, 1:] * data["sample_mask"][:, None] if "token_mask" in data else None
    return Rows(model, ids, real_tokens(data["input_lengths"], ids), counted, **given)


def _prime_rows(call: Arguments) -> Rows:
    """Read prime-rl's call. Its temperatures, one for each token, were just copied from pageable memory: reading two is free."""
    heat, lengths, routed = call["temperature"], call["seq_lens"], call["routed_experts"]
    if call["mm_kwargs"] is not None or call["seq_lens_are_pre_shard"]:
        raise Unreadable("its rows are split over ranks, or have images")
    low, high = (1.0, 1.0) if heat is None else torch.stack(heat.aminmax()).tolist()
    if low != high:
        raise Unreadable("its tokens have different temperatures")
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    context = {} if routed is None else {"routed_experts": routed}
    step = updates_of(call["model"])
    return Rows(call["model"], call["input_ids"], offsets=offsets, temperature=low, step=step, context=context)


def _prime_scores(output: Any) -> Scores:
    """Read the fused head's log-probs, of the token behind each; the other head returns logits, which are not divided yet."""
    return Scores(output.get("logprobs"), output.get("entropy"), None if output.get("logprobs") is not None else output["logits"])


class NemoRl:
    name, package, tried = "nemo-rl", "nemo-rl", ()
    seams = (
        Seam(f"{_LOGITS}:model_forward", _nemo_rows, lambda output: Scores(logits=getattr(output, "logits", output)),
             needs=("model", "processed_inputs", "is_reward_model")),
        Seam(f"{_LOGITS}:forward_with_post_processing_fn", no_rows, needs=("processed_mb", "sampling_params"), around=True),
        Seam(f"{_LOSSES}:ClippedPGLossFn.__call__", no_rows, needs=("next_token_logprobs", "data"), loss=nemo_loss),
        Seam(f"{_LOSSES}:NLLLossFn.__call__", no_rows, needs=("next_token_logprobs", "data"), loss=nemo_loss),
        Seam("nemo_automodel.components.training.utils:scale_grads_and_clip_grad_norm", no_rows, steps=lambda call: NemoRl),
    )  # fmt: skip


class PrimeRl:
    name, package, tried = "prime-rl", "prime-rl", ()
    seams = (
        Seam("prime_rl.trainer.model:forward", _prime_rows, _prime_scores, kept=True,
             needs=("model", "input_ids", "seq_lens", "temperature", "routed_experts", "mm_kwargs", "seq_lens_are_pre_shard")),
        Seam("prime_rl.trainer.rl.loss:compute_loss", no_rows, needs=("trainer_logprobs", "rl_scale"), loss=prime_loss),
        Seam("prime_rl.trainer.utils:clip_grad_norm_", no_rows, needs=("model",), steps=lambda call: call["model"]),
    )  # fmt: skip


_FSDP = "areal.engine.fsdp_engine:FSDPEngine"
_MILES, _HUB = "miles.backends.fsdp_utils.actor:FSDPTrainRayActor", "miles.backends.training_utils.loss_hub"
_SLIME = "slime.backends.megatron_utils"


def _areal_rows(call: Arguments) -> Rows:
    """Read AReaL's call, whose model ran before: packed rows, in which every token counts, and padding behind them."""
    engine, inputs = call["self"], call["inputs"]
    if engine.parallel_helper.sp_size > 1 or engine.config.is_critic or "cu_seqlens" not in inputs:
        raise Unreadable("its rows are split over ranks, or are a tree")
    ids, offsets, padding = inputs["input_ids"].reshape(1, -1), inputs["cu_seqlens"], call["around"]["ctx"].pad_length
    if padding:  # to the engine it is one more row
        ids, offsets = ids[:, :-padding], offsets[:-1]
    return Rows(engine.model, ids, offsets=offsets, temperature=engine.config.temperature, step=updates_of(engine))


def _listed_rows(call: Arguments) -> Rows | None:
    """Read a call of miles or slime: lists of rows, and of their responses' lengths. The model is around it."""
    around, args, owner = call["around"], call["args"], call["around"].get("self")
    if owner is None and around.get("store_prefix"):
        return None
    if getattr(args, "context_parallel_size", 1) > 1 or args.allgather_cp or call.get("top_p_token_ids"):
        raise Unreadable("its rows are split over ranks, or its log-probs are those of a nucleus")
    reference = None if owner is None or around.get("model_tag") != "ref" else owner.ref_model
    model = around["model"][0] if owner is None else owner.model if reference is None else reference
    ids = torch.nn.utils.rnn.pad_sequence(list(call["unconcat_tokens"]), batch_first=True)
    counted = behind(call, [torch.ones(count, dtype=torch.long) for count in call["response_lengths"]])
    step = updates_of(model if owner is None else Miles)  # a reference has no updates of its own
    given: Any = {"temperature": args.rollout_temperature, "step": step, "entropy": call["with_entropy"]}
    return Rows(model, ids, real_tokens(torch.tensor(call["total_lengths"]), ids), counted, **given)


def _listed(output: Any) -> Scores:
    found = output[-1] if isinstance(output, tuple) else output
    return Scores(found["log_probs"], found.get("entropy"))


_LISTED = ("args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy")
_OF_BATCH = ("args", "batch", "logits")


class AReaL:
    name, package, tried = "areal", "areal", ()
    seams = (
        Seam(f"{_FSDP}._compute_logprobs_entropy", _areal_rows, lambda output: Scores(*output), ("inputs",)),
        Seam(f"{_FSDP}._compute_logprobs", _areal_rows, Scores, ("inputs",)),
        Seam(f"{_FSDP}._compute_logprobs_and_loss", no_rows, needs=("ctx",), around=True),
        Seam(f"{_FSDP}._compute_forward_result", no_rows, needs=("ctx",), around=True),
        Seam("areal.trainer.ppo.actor:grpo_loss_fn", no_rows, needs=("logprobs", "input_data"), loss=areal_loss),
        Seam(f"{_FSDP}.optimizer_step", no_rows, steps=lambda call: call["self"]),
    )


class Miles:
    name, package, tried = "miles", "miles", ()
    seams = (
        Seam(f"{_HUB}.logit_processors:get_log_probs_and_entropy", _listed_rows, _listed, _LISTED),
        Seam(f"{_HUB}.losses:policy_loss_function", no_rows, needs=_OF_BATCH, loss=listed_loss),
        Seam(f"{_MILES}._train_step", no_rows, around=True),
        Seam(f"{_MILES}._compute_log_prob", no_rows, needs=("model_tag",), around=True),
        Seam("miles.backends.training_utils.log_utils:log_train_step", no_rows, needs=("grad_norm",), steps=lambda call: Miles),
    )  # fmt: skip


class Slime:
    name, package, tried = "slime", "slime", ()
    seams = (
        Seam(f"{_SLIME}.loss:get_log_probs_and_entropy", _listed_rows, _listed, _LISTED),
        Seam(f"{_SLIME}.loss:policy_loss_function", no_rows, needs=_OF_BATCH, loss=listed_loss),
        Seam(f"{_SLIME}.model:forward_only", no_rows, needs=("model", "store_prefix"), around=True),
        Seam(f"{_SLIME}.model:train_one_step", no_rows, needs=("model",), around=True, steps=lambda call: call["model"][0]),
    )
