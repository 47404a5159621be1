"""The options of `train-check` that say how to train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from actordbg.base.errors import UsageError
from actordbg.cli.options import option_field


@dataclass(frozen=True)
class HowToTrain:
    """The optimizer's numbers, and what else is trained, as typed."""

    panel: ClassVar[str] = "The training"

    steps: int = option_field(10, "Optimizer steps (default 10).", min=1)
    lr: float = option_field(5e-6, "Learning rate, constant (default 5e-6, the test suite's).")
    gradient_accumulation: int = option_field(
        1, "Micro-batches in each step of the configuration with most lanes; others take as many in all (default 1).", min=1
    )
    max_norm: float = option_field(1.0, "Clip gradients to this norm; 0: never (default 1).", min=0)
    weight_decay: float = option_field(0.0, "AdamW's (default 0).", min=0)
    gradient_checkpointing: bool = option_field(False, "Compute layers again in the backward (not in the baseline).")
    threshold: float = option_field(0.05, "First, mean and last loss must be nearer (default 0.05).", metavar="X")
    log_dir: Path | None = option_field(None, "Where each configuration's log goes (default: in the store).", metavar="DIR")
    trainer: str | None = option_field(None, "Run the trainer's own train_sft as well, over rows of text.", metavar="sft")
    dataset: Path | None = option_field(None, "Rows for --trainer sft, JSONL (default: made-up ones).", metavar="FILE")

    storage: str | None = option_field(None, "Where ranks write checkpoints, to go on from after a death.", metavar="DIR")
    checkpoint_every: int | None = option_field(
        None, "Steps from one checkpoint to the next (default: a tenth of --steps).", min=1, metavar="N"
    )

    def stored(self, store: Path) -> dict[str, Any]:
        """Where checkpoints go and how often, as the record's options have it."""
        from actordbg.campaign.checkpoints import checked_storage, every_by_default
        from actordbg.campaign.run_train_check import STORAGE

        if self.storage is None:
            if self.checkpoint_every is not None:
                raise UsageError("--checkpoint-every says nothing without --storage", hint="--storage DIR, or leave it out")
            return {}
        every = self.checkpoint_every or every_by_default(self.steps)
        return {STORAGE: {"folder": str(checked_storage(self.storage, store)), "every": every}}

    def training(self) -> dict[str, Any]:
        """The optimizer's numbers, as `training.json` has them."""
        if not 0 < self.lr < 10:
            raise UsageError(f"--lr {self.lr:g} is no learning rate", hint="for example 5e-6")
        if not 0 < self.threshold < 1:
            raise UsageError(f"--threshold {self.threshold:g} is no share", hint="0.05 allows 5 % of difference")
        numbers = {"lr": self.lr, "max_norm": self.max_norm, "weight_decay": self.weight_decay}
        more = {"gradient_checkpointing": True} if self.gradient_checkpointing else {}
        return {"betas": [0.9, 0.95], "eps": 1e-8} | numbers | more
