"""verl#6280, and #2996: another size of the micro-batch gives other log-probs, so an on-policy step clips.

Rounding does that a little, and its users asked for months whether it is that or a fault. The verdict tells: rounding is within
what the dtype allows. Here a micro-batch of more than one row loses its mask, and left-padded rows see their padding.
"""

from __future__ import annotations

from typing import Any

import padded
import stand_in
import torch
from padded import Adapter as Adapter

PLANTED = False


class Alone(padded.HFModelWrapper):
    def mask_of(self, attention_mask: torch.Tensor, num_actions: int) -> torch.Tensor:
        return attention_mask if len(attention_mask) == 1 else torch.ones_like(attention_mask)


def train(model: Any) -> None:
    wrapper = (Alone if PLANTED else padded.HFModelWrapper)(model, int(PLANTED))
    padded.train(wrapper)
    ids, mask = stand_in.batch()
    wrapper.forward(ids[:1], stand_in.ANSWER, mask[:1])
