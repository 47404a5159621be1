"""Choose the Actor that replays a call: the trainer's own, or a plain model on the rows. The choice follows the dump's adapter.

| Recorded from | `--through` left open, or rows | `--through trainer` |
|---|---|---|
| the home trainer's Actor | left open: that Actor; rows: an Actor of ours | that Actor |
| another trainer, by an adapter | an Actor of ours, no trainer imported | the trainer's function, if its adapter can call it |

A replay's `resolved` has the choice as `through`. An adapter is looked up by its recorded name, among the built-in adapters and
those that installed packages announce: nothing that a store names is imported.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from actordbg.base.errors import Unsupported
from actordbg.config.choices import Choices
from actordbg.formats.nested_values import nested
from actordbg.store.payload import Dump
from actordbg.trainers.captured_call import ReplayedCall
from actordbg.trainers.find_adapter import callable_again
from actordbg.trainers.recorded_rows import read_scores
from actordbg.trainers.rows_actor import ROWS, RowsActor, RowsActors, in_one_row, unpacked_values
from actordbg.trainers.seam import Rows, Seam, Unreadable
from actordbg.trainers.trainer import TRAINER, Actors


def actors_of(choices: Choices) -> Actors:
    """Return the object that builds and calls the Actors of this configuration."""
    if choices.through == "rows":
        return ROWS
    return TRAINER if choices.adapter is None else FunctionActors(choices.adapter)


class FunctionActor(RowsActor):
    """The trainer's own function around a transformers model, called with rows. seams: its capture points, by function."""

    seams: Mapping[str, Seam]

    def forward(  # type: ignore[override]
        self,
        sequences: Tensor,
        action_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_entropy: bool = False,
        function: str = "",
        **more: Any,
    ) -> Any:
        """Call the trainer's function `function`; return what `RowsActor.forward` returns."""
        real = torch.ones_like(sequences) if attention_mask is None else attention_mask
        of_model = nested({name: value for name, value in more.items() if isinstance(value, Tensor)})
        rows, kept = Rows(self.model, sequences, real, action_mask, self.temperature, return_entropy, more=of_model), None
        if self.packing_samples:
            ids, places, kept = in_one_row(sequences, real)
            counts = (places > 0).long()
            if action_mask is not None:
                marked = torch.zeros_like(sequences)
                marked[:, -action_mask.shape[1] :] = action_mask.long()
                counts = counts * marked.flatten()[kept].unsqueeze(0)
            rows = replace(rows, sequences=ids, attention_mask=None, action_mask=counts[:, 1:], positions=places)
        try:
            scores = read_scores(seam := self.seams[function], rows, seam.again(self.model, rows))  # type: ignore[misc]
        except Unreadable as why:
            raise Unsupported(f"{function}: {why}", hint="use --through rows") from None
        log_probs, entropy = (_placed(value, kept, sequences.shape) for value in (scores.log_probs, scores.entropy))
        if log_probs is not None and action_mask is not None:
            log_probs = log_probs[:, -action_mask.shape[1] :] * action_mask.float()
        return log_probs, SimpleNamespace(entropy=entropy)


def _placed(values: Tensor | None, kept: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Put packed values [1, T-1] at their places in [B, S-1]; return other values unchanged."""
    if values is None or kept is None:
        return values
    return unpacked_values(torch.nn.functional.pad(values, (0, 1)), kept, shape)[:, :-1]


class FunctionActors(RowsActors):
    """Builds and calls `FunctionActor`s, for one adapter."""

    actor_class = FunctionActor

    def __init__(self, adapter: str) -> None:
        self._seams = {seam.where: seam for seam in callable_again(adapter)}

    def build_actor(self, path: str, choices: Choices, ds_config: Mapping[str, Any] | None = None) -> RowsActor:
        actor = super().build_actor(path, choices, ds_config)
        actor.__dict__["seams"] = self._seams
        return actor

    def make_call(self, actor: Any, dump: Dump, vocab_size: int, device: torch.device, ring_group: Any = None) -> ReplayedCall:
        where = dump.record.actor.get("function")
        if where not in self._seams:
            what = where or "what recorded this dump"
            raise Unsupported(f"the adapter cannot call {what} on its own", hint="use --through rows")
        call = super().make_call(actor, dump, vocab_size, device)
        call.arguments["function"] = where
        return replace(call, notes=(*call.notes, f"computed by {where}"))
