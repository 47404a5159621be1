"""What a side of a replayed step does with its inputs: written into its folder, and read by its workers."""

from collections.abc import Sequence
from dataclasses import dataclass

PLAN, STEP, ENTROPY = "step.json", "step", "entropy"
"""The plan's file, the key of a micro-batch's figures in its result's `extra`, and that of its entropy among them."""


@dataclass(frozen=True)
class StepPlan:
    """The plan of a side. losses: the paths of the losses below the store, by the ids of their forwards.

    accumulation: micro-batches of a lane. scale: each recorded loss is multiplied by it, so that their mean is what the recorded
    engine applied. ranks: micro-batches of a place. tokens, rows: of the whole step. max_norm: where the gradient is clipped.
    frozen: names of parameters that are not trained.
    """

    losses: dict[str, str]
    accumulation: int
    scale: float
    ranks: int
    tokens: int
    rows: int
    max_norm: float
    frozen: Sequence[str] = ()
