"""What `actordbg train-check` ran and what came of each step: `store/trainchecks/<id>/check.json`, replaced as cells finish.

A cell's folder beside it is a replay's (`actordbg.records.replay_record`), with `training.json`. Verdicts are not stored: they
follow from the figures (`actordbg.campaign.train_document`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from actordbg.records.stored_record import StoredRecord

BASELINE, NOISE, ASKED, SFT_BASELINE, SFT = "baseline", "noise", "asked", "sft baseline", "sft"
"""What a cell is for: what the others are held against; what rounding alone does; what was asked for. The trainer's own program,
too: on one process, and as asked for."""
TRAINED, BROKEN, IMPOSSIBLE, OPEN = "trained", "failed", "unavailable", "not run"
"""What becomes of a training: all steps done, ended before, cannot run here, not yet."""


@dataclass(frozen=True)
class TrainStep:
    """One optimizer step: the mean loss of its micro-batches, the gradient's norm before clipping, the norm of the update."""

    step: int
    loss: float | None
    grad_norm: float | None
    update_norm: float | None


@dataclass(frozen=True)
class TrainCell:
    """One configuration. `log`: its log's path. `reason`: why it failed or cannot run. `folder`: of its last attempt."""

    index: int
    name: str
    role: str
    config: dict[str, Any]
    log_name: str
    status: str = OPEN
    reason: str = ""
    folder: str | None = None
    optimizer: str = ""
    seconds: float | None = None
    steps: tuple[TrainStep, ...] = ()


@dataclass(frozen=True)
class TrainCheckRecord(StoredRecord):
    """A training check. `dump_ids`: the inputs, in order. `batch`: micro-batches of each step, over all lanes. `training`: the
    optimizer's numbers. `names`: variables of the ancestor that took effect, by name. `options`: what else `--resume` needs.
    """

    what: ClassVar[str] = "training check"

    check_id: str
    created_at: str
    status: str
    cells: tuple[TrainCell, ...]
    dump_ids: tuple[str, ...]
    steps: int
    batch: int
    dtype: str
    threshold: float
    training: dict[str, Any]
    log_dir: str
    selection: str | None = None
    command: str = ""
    finished_at: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
