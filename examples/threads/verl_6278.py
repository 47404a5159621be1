"""verl#6278: the attention mask is built from the loss mask, so no answer sees its prompt.

Here the mask that the model gets is 1 where the loss counts, and 0 on all prompts.
"""

from __future__ import annotations

from typing import Any

import padded
import torch
from padded import Adapter as Adapter

PLANTED = False


class OfTheLoss(padded.HFModelWrapper):
    def mask_of(self, attention_mask: torch.Tensor, num_actions: int) -> torch.Tensor:
        counted = torch.arange(attention_mask.shape[1]) >= attention_mask.shape[1] - num_actions
        return attention_mask * counted


def train(model: Any) -> None:
    padded.train((OfTheLoss if PLANTED else padded.HFModelWrapper)(model, int(PLANTED)))
