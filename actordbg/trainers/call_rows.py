"""What a call of a model alone says of its rows: whether they can be read, which tokens count, whether positions are theirs.

It does not say the step: transformers' `Trainer` is asked for that (`TRAINER_STEP`, `step_of`).

Example: `require_rows(model, ids, mask)` before `Rows(..., positions=own_positions(ids, positions))`
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from actordbg.capture.facts import unwrap
from actordbg.trainers.seam import NoPolicy, Seam, Unreadable

_trainers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _note_trainer(call: Mapping[str, Any]) -> None:
    trainer = call["self"]
    for model in map(unwrap, (call["model"], getattr(trainer, "ref_model", None) or call["model"])):
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft's model
        _trainers[model] = _trainers[inner] = weakref.ref(trainer)


TRAINER_STEP = Seam(where="transformers.trainer:Trainer.training_step", needs=("model",), rows=_note_trainer)


def step_of(model: Any) -> int | None:
    """The step of the Trainer that trains this model, or has it as its reference; None outside of any."""
    trainer = _trainers.get(model, lambda: None)()
    return None if trainer is None else trainer.state.global_step


def require_policy(model: Any) -> None:
    """NoPolicy for a model of transformers that is not a causal language model."""
    if getattr(model, "get_output_embeddings", lambda: True)() is None:
        raise NoPolicy(f"{type(model).__name__} has no language head")
    if not getattr(model, "can_generate", lambda: True)():
        raise NoPolicy(f"{type(model).__name__} cannot generate: it is not a causal language model")


def require_rows(model: Any, ids: Any, mask: Any) -> None:
    """Unreadable for a call that no replay of rows can make again. ids: [B, S]; mask: of the same shape, or None."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise Unreadable("an encoder and a decoder have rows of their own")
    if mask is not None and getattr(mask, "shape", None) != ids.shape:
        raise Unreadable("its attention mask does not say of each token whether it is real")


def own_positions(ids: Any, positions: Any) -> Any:
    """Return the positions [B, S], which may tell packed rows apart: those [1, S] are every row's. None for others."""
    return positions.expand(ids.shape) if positions is not None and positions.shape in (ids.shape, (1, *ids.shape[1:])) else None


def rows_leak(call: Mapping[str, Any]) -> bool:
    """Whether packed rows of this call see each other: transformers keeps them apart only without a mask and without a cache."""
    model, cached = call["self"], call.get("use_cache")
    if cached is None:
        cached = model.config.use_cache and not (model.training and model.is_gradient_checkpointing)
    return bool(cached) or call.get("attention_mask") is not None


def counted_tokens(labels: Any, mask: Any) -> Any:
    """The tokens behind the first of each row that have a label and no padding before them: [B, S-1]. None without labels."""
    if labels is None:
        return None
    counted = labels[:, 1:] != -100
    return counted if mask is None else counted & (mask[:, :-1] != 0)
