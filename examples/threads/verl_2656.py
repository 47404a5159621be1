"""verl#2656: a fused kernel gave log-probs of up to +123.7, and the reward collapsed.

Its users logged minima and maxima of both kernels until they saw it. A trigger keeps every call with a log-prob above zero,
pinned, while the training runs. Here the fused step forgets the normalisation.
"""

from __future__ import annotations

from typing import Any

import padded
import torch
from padded import Adapter as Adapter

PLANTED = False
RECORDED = ("--on", "logprobs:-50:0")
COMMAND = ("check", "--recorded", "--where", "triggered='logprobs' and step={step}", "--model", "{model}", "--no-laws")
WORDS = "not normalized"


class Fused(padded.HFModelWrapper):
    def scored(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def train(model: Any) -> None:
    padded.train((Fused if PLANTED else padded.HFModelWrapper)(model, int(PLANTED)))
