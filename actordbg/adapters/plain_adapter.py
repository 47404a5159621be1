"""A loop of one's own, and `Trainer` of transformers: each `model(**batch)` of a transformers model with a language head.

Such a model is met when it has been made (`post_init`). Calls with `labels` count the tokens that have one, others all;
the first token behind padding on the left counts in neither, since no model predicts it. A call with a cache (`generate`) is
none of a training, nor is one that gets embeddings. Positions without a mask tell packed rows apart, unless all rows share them.
`Trainer` is asked for its step.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from actordbg.adapters.seam import Rows, Scores, Seam, Unreadable
from actordbg.capture.facts import unwrap

_trainers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_READ = ("input_ids", "attention_mask", "labels", "position_ids", "cache_position", "logits_to_keep")


def _rows(call: Mapping[str, Any]) -> Rows | None:
    ids, mask, labels, model = call.get("input_ids"), call.get("attention_mask"), call.get("labels"), call["self"]
    head = getattr(model, "get_output_embeddings", lambda: True)
    if ids is None or call.get("past_key_values") is not None or head() is None:
        return None
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise Unreadable("an encoder and a decoder have rows of their own")
    if mask is not None and getattr(mask, "shape", None) != ids.shape:
        raise Unreadable("its attention mask does not say of each token whether it is real")
    trainer = _trainers.get(model, lambda: None)()
    counted: Any = None if labels is None else labels[:, 1:] != -100
    if labels is not None and mask is not None:
        counted = counted & (mask[:, :-1] != 0)  # what stands behind padding is predicted by no model
    positions = call.get("position_ids") if mask is None else None
    if positions is not None and positions.shape[0] < ids.shape[0]:
        positions = None
    return Rows(
        model=model,
        sequences=ids,
        attention_mask=mask,
        positions=positions,
        action_mask=counted,
        step=None if trainer is None else trainer.state.global_step,
        more={name: one for name, one in call.items() if hasattr(one, "dim") and one.dim() and name not in _READ},
    )


def _note_trainer(call: Mapping[str, Any]) -> None:
    _trainers[unwrap(call["model"])] = weakref.ref(call["self"])


class Plain:
    """Models of transformers, and its Trainer."""

    name = "plain"
    package = "transformers"
    tried = ("5.15.0",)
    seams = (
        Seam(
            where="transformers.modeling_utils:PreTrainedModel.post_init",
            rows=_rows,
            result=lambda output: Scores(logits=getattr(output, "logits", None)),
            makes_model="self",
            takes=("input_ids", "labels"),
        ),
        Seam(where="transformers.trainer:Trainer.training_step", needs=("model",), rows=_note_trainer),
    )
