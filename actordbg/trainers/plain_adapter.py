"""A loop of one's own, and `Trainer` of transformers: each `model(**batch)` of a causal language model of transformers.

Such a model is met when it has been made (`post_init`). Calls with `labels` count the tokens that have one, others all but the
first behind padding on the left. Not recorded: calls inside of `generate`, with a cache, or with embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actordbg.trainers import seam
from actordbg.trainers.seam import Rows, Scores, Seam, counted_tokens, own_positions

_READ = ("input_ids", "attention_mask", "labels", "position_ids", "cache_position", "logits_to_keep")


def _rows(call: Mapping[str, Any]) -> Rows | None:
    ids, mask, labels, model = call.get("input_ids"), call.get("attention_mask"), call.get("labels"), call["self"]
    if ids is None or call.get("past_key_values") is not None:
        return None
    seam.require_policy(model)
    seam.require_rows(model, ids, mask)
    positions = own_positions(ids, call.get("position_ids"))
    return Rows(
        model=model,
        sequences=ids,
        attention_mask=mask,
        positions=positions,
        context={} if positions is None else {"rows_leak": seam.rows_leak(call)},
        action_mask=counted_tokens(labels, mask),
        step=seam.step_of(model),
        more={name: one for name, one in call.items() if hasattr(one, "dim") and one.dim() and name not in _READ},
    )


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
        seam.TRAINER_STEP,
        Seam(where="transformers.generation.utils:GenerationMixin.generate", rows=lambda call: None, silent=True),
    )
