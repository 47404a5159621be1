"""What a training check takes beside settings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from actordbg.base.option import Option

File = Annotated[str | os.PathLike[str] | None, Option(kind=Path)]


@dataclass(frozen=True)
class TrainingOptions:
    """Hyperparameters and outputs of a training check.

    Args:
        dataset (FILE|DIR): Train on this data set's samples, as the trainer's own SFT makes them, instead of on recorded inputs.
        steps: Optimizer steps.
        lr: Constant learning rate (the default is that of the trainer's backend test suite).
        gradient_accumulation: Accumulation steps of the configuration with the most replicas; all have its global batch.
        max_norm: Clip gradients to this norm; 0: no clipping.
        gradient_checkpointing: Recompute layers in the backward (except in the baseline).
        threshold: Limit for the relative difference of first, mean and last loss.
        log_dir (DIR): Folder for the configurations' logs (default: in the store).
        output_dir (DIR): Save each trained model there, as a checkpoint that --model takes.
        storage (DIR|URL): Keep checkpoints there: a training that lost its processes continues from its last one.
        checkpoint_every: Steps between checkpoints (default: a tenth of --steps).
    """

    panel: ClassVar[str] = "Training"
    rank: ClassVar[int] = 20

    steps: Annotated[int, Option(min=1, rank=2)] = 10
    lr: float = 5e-6
    gradient_accumulation: Annotated[int, Option(min=1)] = 1
    max_norm: Annotated[float, Option(min=0)] = 1.0
    gradient_checkpointing: bool = False
    threshold: float = 0.05
    dataset: File = None
    log_dir: File = None
    output_dir: File = None
    storage: str | None = None
    checkpoint_every: Annotated[int | None, Option(min=1)] = None
