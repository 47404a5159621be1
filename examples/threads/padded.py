"""A stand-in of a trainer's padded forward: `HFModelWrapper.forward` of SkyRL has these arguments, verl's and TRL's do the same.

Demonstrations replace the mask that the model gets, or the step from logits to log-probs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import stand_in
import torch

from actordbg.trainers.seam import Rows, Scores, Seam


class HFModelWrapper:
    """mask_of, scored: the steps that a fault is planted into."""

    def __init__(self, model: Any, step: int = 0) -> None:
        self.model, self.step = model, step

    def forward(self, sequences: torch.Tensor, num_actions: int, attention_mask: torch.Tensor) -> torch.Tensor:
        places = stand_in.positions(attention_mask)
        mask = self.mask_of(attention_mask, num_actions)
        logits = self.model(input_ids=sequences, attention_mask=mask, position_ids=places).logits[:, :-1]
        return self.scored(logits[:, -num_actions:], sequences[:, -num_actions:]) * attention_mask[:, -num_actions:]

    def mask_of(self, attention_mask: torch.Tensor, num_actions: int) -> torch.Tensor:
        return attention_mask

    def scored(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return stand_in.log_probs(logits, labels)


def rows(call: Mapping[str, Any]) -> Rows:
    mask, wrapper = call["attention_mask"], call["self"]
    return Rows(wrapper.model, call["sequences"], mask, mask[:, -call["num_actions"] :], step=wrapper.step)


class Adapter:
    name = package = "padded"
    tried = ()
    seams = (Seam("padded:HFModelWrapper.forward", rows, Scores),)


def train(wrapper: HFModelWrapper) -> None:
    """Run a micro-batch."""
    ids, mask = stand_in.batch()
    wrapper.forward(ids, stand_in.ANSWER, mask)
