"""SkyRL PR#1420, tmax PR#9: under sequence parallelism the loss, and so each gradient, is a multiple of what it should be.

Log-probs are right, so nothing that looks at them sees it. Here the log-probs that a ring of two
gathers give each gradient twice, as a loss that was multiplied by the ring's size once too often.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import in_a_ring


def answer(folder: Path) -> tuple[Any, ...]:
    return in_a_ring.answer(folder, "skyrl_1420")


def plant() -> None:
    """In a worker: what is gathered passes its gradient on twice."""
    actor: Any = in_a_ring.trainers_module("openrlhf.models.actor")
    gather = actor.gather_and_pad_tensor

    def twice(*given: Any) -> Any:
        gradients = gather(*given)
        if gradients.requires_grad:
            gradients.register_hook(lambda gradient: 2 * gradient)
        return gradients

    actor.gather_and_pad_tensor = twice


if "RANK" in os.environ:
    plant()
