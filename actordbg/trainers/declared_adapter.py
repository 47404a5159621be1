"""NeMo-RL, prime-rl, AReaL, miles and slime: their functions were run, nobody has trained with them here.

Read: NeMo-RL 0.6.0 (7ea279a), prime-rl 0.8.0 (559b447), AReaL 1.0.4 (4aef98d), its FSDP engine; miles 0.1.0 (31f1ca9), its FSDP
backend; slime 0.3.1 (624b824), on Megatron. The last three score logits apart from the model. Losses: `declared_losses`. Not
recorded: rows that are split over ranks (context or sequence parallelism), images, critics, log-probs of a nucleus; of slime,
passes of a reference or a teacher, whose weights take the policy's place.
"""

from __future__ import annotations

from typing import Any

import torch

from actordbg.trainers.declared_losses import areal_loss, behind, listed_loss, nemo_loss, prime_loss
from actordbg.trainers.seam import Arguments, NoPolicy, Rows, Scores, Seam, Unreadable, no_rows, real_tokens, updates_of

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
