"""Records of the commands that run many replays: the cells of `actordbg matrix`, and those of `actordbg train-check`.

    store/matrices/<matrix_id>.json        one MatrixRecord
    store/trainchecks/<id>/check.json      one TrainCheckRecord; a cell's folder beside it is a replay's
                                           (`actordbg.records.replay_record`), with `training.json`

Both are replaced as cells finish (`actordbg.records.stored_record`). Verdicts of a training check are not
stored: they follow from the figures (`actordbg.campaign.train_document`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from actordbg.records.comparison_record import GOOD, NOT_COMPARED
from actordbg.records.stored_record import Real, StoredRecord

PASSED, FAILED, UNAVAILABLE, NOT_RUN = "passed", "failed", "unavailable", "not run"
"""Statuses of a cell."""


@dataclass(frozen=True)
class MatrixCell:
    """A combination of settings. status: passed, failed, unavailable, not run. `verdict`: against the truth (see `truth_id`),
    None if not compared.

    `settings`: by axis. `replay_id`: its replay, None if nothing was started. `reason`: why it is unavailable, was not run, is
    wrong, or was only partly checked. `signature`, `error`: the first failure. `counts`: inputs by result status. `max_abs`:
    largest difference of a log-prob from the truth, nats. `known`: ids of the rules that apply to it. `load_s`: seconds to build
    its Actor; 0 if another cell's was used (`shared_with` says which). `regressed`: what got worse than the baseline; empty if
    nothing did. `loads`: Actors built for it: one for each group of processes that starts together, again after a crash.
    `laws`: their verdicts, in a line. `violations`: laws that failed, and the first change; `broken`: their names. `unasked`:
    laws that could not be checked, and why. `excludes`: the smallest faults that would have made it wrong
    (`compare.measured_limits`).
    """

    index: int
    name: str
    settings: dict[str, Any]
    status: str
    config: dict[str, Any]
    replay_id: str | None = None
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    signature: str | None = None
    error: str | None = None
    log: str | None = None
    verdict: str | None = None
    comparison_id: str | None = None
    max_abs: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    peak_memory_bytes: int | None = None
    load_s: float | None = None
    shared_with: int | None = None
    known: tuple[str, ...] = ()
    regressed: tuple[str, ...] = ()
    loads: int = 0
    laws: str = ""
    violations: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    unasked: tuple[str, ...] = ()
    excludes: dict[str, float | None] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """Check whether it must still run."""
        return self.status == NOT_RUN and not self.reason

    @property
    def good(self) -> bool:
        """Check whether it passed, no law failed, and its numbers are not known to be wrong."""
        return self.status == PASSED and not self.violations and (self.verdict is None or self.verdict in GOOD)

    @property
    def wrong(self) -> bool:
        """Check whether it passed, but a law fails or its numbers differ from the truth."""
        return self.status == PASSED and not self.good and not self.unjudged

    @property
    def unjudged(self) -> bool:
        """Check whether it passed, and no law failed, but its numbers could not be compared with the truth: no success either."""
        return self.status == PASSED and not self.violations and self.verdict == NOT_COMPARED


@dataclass(frozen=True)
class MatrixRecord(StoredRecord):
    """`actordbg matrix`. status: running, complete, interrupted, failed. `axes`: values by axis. `dump_ids`: what each
    cell replays. `options`: what else was requested, for `--resume`; its `runner` is the pid and start time of its process.
    """

    what: ClassVar[str] = "matrix"

    matrix_id: str
    created_at: str
    status: str
    axes: dict[str, list[Any]]
    cells: tuple[MatrixCell, ...]
    dump_ids: tuple[str, ...]
    selection: str | None = None
    command: str = ""
    finished_at: str | None = None
    truth_id: str | None = None
    baseline: str | None = None
    loads: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Check whether something ran, nothing is left to run, and nothing is wrong, not checked, failed or regressed. With a
        baseline, failures alone do not count.
        """
        ran = [cell for cell in self.cells if cell.status in (PASSED, FAILED)]
        waits = any(self.waits(cell) for cell in ran)
        failed = not self.baseline and any(cell.status == FAILED for cell in ran)
        bad = any(cell.open or cell.wrong or cell.unjudged or cell.regressed for cell in self.cells)
        return bool(ran) and not failed and not bad and not waits

    def waits(self, cell: MatrixCell) -> bool:
        """Check whether a cell passed but was not yet compared with the truth, as after an interruption."""
        return bool(self.options.get("oracle")) and cell.status == PASSED and cell.verdict is None


BASELINE, NOISE, ASKED = "baseline", "noise", "asked"
"""Roles of a cell: what the others are compared with; the effect of rounding alone; what was requested."""
TRAINED, BROKEN, IMPOSSIBLE, OPEN = "trained", FAILED, UNAVAILABLE, NOT_RUN
"""Statuses of a training: all steps done, ended early, cannot run here, not run yet."""
STORAGE, OUTPUT, CONTINUED = "storage", "output_dir", "continued"
"""Keys of a training check's options: place and interval of checkpoints, folder of trained models, and by cell's index the steps
after which it continued from a checkpoint."""


@dataclass(frozen=True)
class TrainStep:
    """An optimizer step: mean loss of its micro-batches, gradient norm before clipping, norm of the update."""

    step: int
    loss: float | None
    grad_norm: float | None
    update_norm: float | None


@dataclass(frozen=True)
class TrainCell:
    """A configuration. `log_name`: name of its log. `reason`: why it failed or cannot run. `folder`: that of its last attempt."""

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
    """A training check. `dump_ids`: the inputs, in order. `batch`: micro-batches of each step, over all replicas. `training`:
    the optimizer's numbers. `names`: the test suite's variables that took effect, by name. `options`: what else `--resume` needs.
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
    threshold: Real
    training: dict[str, Any]
    log_dir: str
    selection: str | None = None
    command: str = ""
    finished_at: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
