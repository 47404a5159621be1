"""OpenRLHF#1120, verl#747, ms-swift#8378: NaN at one step, hours into a training, and nobody has its input.

The trigger `nan` keeps that call and the calls before it. Here one weight becomes NaN between two calls, as after a bad update.
"""

from __future__ import annotations

from typing import Any

import padded
import torch
from padded import Adapter as Adapter

PLANTED = False
RECORDED = ("--on", "nan")
COMMAND = ("check", "--recorded", "--where", "triggered='nan' and step={step}", "--model", "{model}", "--no-laws")
WORDS = "a weight was NaN or infinite then"


def train(model: Any) -> None:
    weight = next(model.parameters())
    kept = weight.detach().clone()
    if PLANTED:
        weight.data[:, 0] = torch.nan
    padded.train(padded.HFModelWrapper(model, int(PLANTED)))
    weight.data.copy_(kept)
