"""verl#1381: with the padding removed, log-probs differ from those of the padded batch.

Its user compared both by hand, with code of his own in the trainer, and was left with "minor calculation error of flash
attention". Here positions run on over the whole packed row, instead of beginning anew with each: then attention takes all rows
for one.
"""

from __future__ import annotations

from typing import Any

import torch
import unpadded
from unpadded import Adapter as Adapter

PLANTED = False


class RunningOn(unpadded.DataParallelPPOActor):
    def places(self, mask: torch.Tensor) -> torch.Tensor:
        return (mask.flatten().cumsum(0) - 1).clamp(min=0).view_as(mask)


def train(model: Any) -> None:
    unpadded.train((RunningOn if PLANTED else unpadded.DataParallelPPOActor)(model, int(PLANTED)))
