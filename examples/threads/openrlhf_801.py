"""OpenRLHF#801, #564, ring-flash-attention#67: does ring attention give what one process gives?

One user asked, and was answered with two curves. Here the ring is told where the first row begins and the last one ends, and none
of the borders between, so rows see each other. OpenRLHF's own Actor runs it; the kernel is a stand-in on a CPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import in_a_ring


def answer(folder: Path) -> tuple[Any, ...]:
    return in_a_ring.answer(folder, "openrlhf_801")


def plant() -> None:
    """In a worker: forget the borders."""
    slicing: Any = in_a_ring.trainers_module("openrlhf.models.ring_attn_utils")
    announce = slicing.update_ring_attn_params
    slicing.update_ring_attn_params = lambda borders: announce(borders[[0, -1]])


if "RANK" in os.environ:
    plant()
