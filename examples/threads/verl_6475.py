"""verl#6475: at the end of each packed row, the label is the first token of the next row.

Found by reading: `torch.roll` over the packed ids. In verl the response mask leaves that place out, unless the end of a text
counts where its id is the padding's, as in the faulty step here: then that log-prob is of a token of somebody else's prompt.
"""

from __future__ import annotations

from typing import Any

import torch
import unpadded
from unpadded import Adapter as Adapter

PLANTED = False


class Rolled(unpadded.DataParallelPPOActor):
    def labels(self, ids: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return torch.roll(ids[kept], -1, 0)


def train(model: Any) -> None:
    unpadded.train((Rolled if PLANTED else unpadded.DataParallelPPOActor)(model, int(PLANTED)), ends=int(PLANTED))
