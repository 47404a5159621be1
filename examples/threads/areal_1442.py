"""AReaL#1442: `attn_impl=sdpa` with packed sequences is wrong, and nothing says so.

The borders of packed rows were given for flash attention. sdpa does not read them, so each row saw those before it. The
training ran to its end with wrong log-probs. Here a mask of ones goes with the packed row: transformers then looks for no
borders.
"""

from __future__ import annotations

from typing import Any

import torch
import unpadded
from unpadded import Adapter as Adapter

PLANTED = False


class SeesAll(unpadded.DataParallelPPOActor):
    def seen(self, mask: torch.Tensor) -> torch.Tensor:
        return torch.ones(1, int(mask.sum()), dtype=torch.long)


def train(model: Any) -> None:
    unpadded.train((SeesAll if PLANTED else unpadded.DataParallelPPOActor)(model, int(PLANTED)))
