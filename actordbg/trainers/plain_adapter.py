"""Custom training loops, and transformers' `Trainer`: each `model(**batch)` of a causal language model of transformers.

A model is found when it has been constructed (`post_init`). Calls with `labels` count the labelled tokens, others all but the
first behind left padding. Not recorded: calls inside `generate`, with a cache, or with embeddings.
"""

from __future__ import annotations

from actordbg.trainers.seam import TRAINER_STEP, Arguments, NoPolicy, Rows, Scores, Seam, Unreadable, own_positions, step_of

_READ = ("input_ids", "attention_mask", "labels", "position_ids", "cache_position", "logits_to_keep")
_CACHES = ("past_key_values", "cache_params", "cache")  # all are `cache` in transformers 5.24


def _rows(call: Arguments) -> Rows | None:
    ids, mask, labels, model = call.get("input_ids"), call.get("attention_mask"), call.get("labels"), call["self"]
    if ids is None or any(call.get(name) is not None for name in _CACHES):
        return None
    if getattr(model, "get_output_embeddings", lambda: True)() is None:
        raise NoPolicy(f"{type(model).__name__} has no language head")
    if not getattr(model, "can_generate", lambda: True)():
        raise NoPolicy(f"{type(model).__name__} cannot generate: it is not a causal language model")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise Unreadable("it is an encoder-decoder model, with separate rows for each half")
    if mask is not None and getattr(mask, "shape", None) != ids.shape:
        raise Unreadable("its attention mask is not one value per token")
    positions, context, counted = own_positions(ids, call.get("position_ids")), {}, None
    if positions is not None:  # transformers keeps packed rows apart only without a mask and without a cache
        cached = call.get("use_cache")
        if cached is None:
            cached = model.config.use_cache and not (model.training and model.is_gradient_checkpointing)
        context["rows_leak"] = bool(cached) or mask is not None
    if labels is not None:  # labelled tokens behind the first of each row that do not follow padding: [B, S-1]
        counted, context["labels"] = labels[:, 1:] != -100, labels
        counted = counted if mask is None else counted & (mask[:, :-1] != 0)
    return Rows(
        model=model,
        sequences=ids,
        attention_mask=mask,
        positions=positions,
        context=context,
        action_mask=counted,
        step=step_of(model),
        more={name: value for name, value in call.items() if hasattr(value, "dim") and value.dim() and name not in _READ},
    )


class Plain:
    """Models of transformers, and its Trainer."""

    name = "plain"
    package = "transformers"
    tried = ("5.15.0", "5.24.0")
    seams = (
        Seam(
            where="transformers.modeling_utils:PreTrainedModel.post_init",
            rows=_rows,
            result=lambda output: Scores(logits=getattr(output, "logits", None)),
            makes_model="self",
            takes=("input_ids", "labels"),
        ),
        TRAINER_STEP,
        Seam(where="transformers.generation.utils:GenerationMixin.generate", rows=lambda call: None, silent=True),
    )
