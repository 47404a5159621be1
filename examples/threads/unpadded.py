"""A stand-in of verl's `DataParallelPPOActor._forward_micro_batch`: rows without their padding in one, then padded again.

Three threads are about such a function. A demonstration replaces one of its steps by the faulty one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import stand_in
import torch

from actordbg.trainers.seam import Rows, Scores, Seam


class DataParallelPPOActor:
    """labels, places, seen: the steps that a fault is planted into."""

    def __init__(self, model: Any, step: int = 0) -> None:
        self.actor_module, self.step = model, step

    def _forward_micro_batch(self, micro_batch: Mapping[str, torch.Tensor], temperature: float) -> torch.Tensor:
        ids, mask, counted = (micro_batch[name] for name in ("input_ids", "attention_mask", "response_mask"))
        kept = mask.bool()
        given = {"input_ids": ids[kept][None], "position_ids": self.places(mask)[kept][None], "attention_mask": self.seen(mask)}
        logits = self.actor_module(**given, use_cache=False).logits[0] / temperature
        padded = torch.zeros(ids.shape)
        padded[kept] = stand_in.log_probs(logits, self.labels(ids, kept))
        return padded[:, -counted.shape[1] - 1 : -1] * counted

    def places(self, mask: torch.Tensor) -> torch.Tensor:
        return stand_in.positions(mask)

    def seen(self, mask: torch.Tensor) -> torch.Tensor | None:
        return None

    def labels(self, ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return torch.roll(ids, -1, 1)[kept]


def rows(call: Mapping[str, Any]) -> Rows:
    micro_batch, actor = call["micro_batch"], call["self"]
    ids, mask, counted = (micro_batch[name] for name in ("input_ids", "attention_mask", "response_mask"))
    return Rows(actor.actor_module, ids, mask, counted, call["temperature"], step=actor.step)


class Adapter:
    name = package = "unpadded"
    tried = ()
    seams = (Seam("unpadded:DataParallelPPOActor._forward_micro_batch", rows, Scores),)


def train(actor: DataParallelPPOActor, ends: int = 0) -> None:
    """Run a micro-batch. ends: how many positions after each row's last real token also count."""
    ids, mask = stand_in.batch()
    counted = mask.clone()
    for _ in range(ends):
        counted |= torch.roll(counted, 1, 1) * (torch.arange(ids.shape[1]) > stand_in.ANSWER)
    actor._forward_micro_batch(
        {"input_ids": ids, "attention_mask": mask, "response_mask": counted[:, -stand_in.ANSWER :]}, temperature=1.0
    )
