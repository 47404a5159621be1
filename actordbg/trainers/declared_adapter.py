"""NeMo-RL and prime-rl: their functions were run, nobody has trained with them here.

Read: NeMo-RL 0.6.0 (7ea279a), prime-rl 0.8.0 (559b447). Losses: `declared_losses`. Not recorded: rows that are split over ranks
(context or sequence parallelism), images, critics.
"""

from __future__ import annotations

from typing import Any

import torch

from actordbg.trainers.declared_losses import nemo_loss, prime_loss
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
