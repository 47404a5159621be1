"""SkyRL: its model wrapper's forward, whose arguments are nearly those of an Actor. The step is unknown there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actordbg.trainers.seam import Rows, Scores, Seam, Unreadable


def _rows(call: Mapping[str, Any]) -> Rows:
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
    )


def _scores(output: Any) -> Scores:
    """Read log-probs of the actions; entropies cover all positions, and are cut to the actions."""
    if not isinstance(output, tuple):
        return Scores(output)
    log_probs, inner = output
    entropy = inner.get("entropy")
    return Scores(log_probs, None if entropy is None else entropy[:, -log_probs.shape[1] - 1 : -1])


class SkyRl:
    """SkyRL 0.3, its backends on transformers. Tested with its wrapper class alone, not in a SkyRL training run."""

    name = "skyrl"
    package = "skyrl"
    tried = ()  # only the wrapper of 0.3.0 alone, without a training run
    seams = (
        Seam(
            where="skyrl.backends.skyrl_train.workers.model_wrapper:HFModelWrapper.forward",
            needs=("sequences", "num_actions", "attention_mask", "temperature", "compute_entropy", "pixel_values"),
            rows=_rows,
            result=_scores,
        ),
    )
