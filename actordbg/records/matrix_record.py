"""What the commands find that run many replays: the cells of `actordbg matrix`, and those of `actordbg train-check`.

    store/matrices/<matrix_id>.json        one MatrixRecord
    store/trainchecks/<id>/check.json      one TrainCheckRecord; a cell's folder beside it is a replay's
                                           (`actordbg.records.replay_record`), with `training.json`

Both are replaced as cells finish (`actordbg.records.comparison_record.StoredRecord`). Verdicts of a training check are not
stored: they follow from the figures (`actordbg.campaign.train_document`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from actordbg.records.comparison_record import GOOD, NOT_COMPARED, Real, StoredRecord

PASSED, FAILED, UNAVAILABLE, NOT_RUN = "passed", "failed", "unavailable", "not run"
"""What becomes of a cell."""


@dataclass(frozen=True)
class MatrixCell:
    """One combination. status: passed, failed, unavailable, not run. `verdict`: against the truth (see `truth_id`), None
    where not compared.

    `settings`: by axis. `replay_id`: its replay, None where nothing was started. `reason`: why it is unavailable, was
    not run, is wrong, or was judged in part only. `signature`,
    `error`: the first failure. `counts`: inputs by result status. `max_abs`: largest difference of a log-prob from the
    truth, nats. `known`: ids of the rules
    that speak about it. `load_s`: seconds that building its Actor took; 0 where it was there already (`shared_with` says
    from which cell).
    `regressed`: what got worse than the baseline; empty where nothing did. `loads`: Actors that were built for it: one for each
    group of processes that starts together, again after a crash. `laws`: what they said, in a line. `violations`: which are
    broken, and how it first showed. `unasked`: which could not be asked, and why. `excludes`: the smallest faults that would
    have made it wrong (`judge.measured_limits`).
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
    unasked: tuple[str, ...] = ()
    excludes: dict[str, float | None] = field(default_factory=dict)

    @property
    def open(self) -> bool:
        """It must still run."""
        return self.status == NOT_RUN and not self.reason

    @property
    def good(self) -> bool:
        """It passed, no law failed, and what it computed is not known to be wrong."""
        return self.status == PASSED and not self.violations and (self.verdict is None or self.verdict in GOOD)

    @property
    def wrong(self) -> bool:
        """It passed, and breaks a law, or its numbers are not the truth's."""
        return self.status == PASSED and not self.good and not self.unjudged

    @property
    def unjudged(self) -> bool:
        """It passed, breaks no law, and its numbers were to be compared with the truth and could not be: no success either."""
        return self.status == PASSED and not self.violations and self.verdict == NOT_COMPARED


@dataclass(frozen=True)
class MatrixRecord(StoredRecord):
    """`actordbg matrix`. status: running, complete, interrupted, failed. `axes`: values by axis. `dump_ids`: what each
    cell replays. `options`: what else was requested, for `--resume`; `runner` in it is the pid and start time of who runs it.
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
        """Something ran, nothing is left to run, and nothing is wrong, not checked, failed or regressed. What failed in the
        baseline may fail here.
        """
        ran = [cell for cell in self.cells if cell.status in (PASSED, FAILED)]
        waits = any(self.waits(cell) for cell in ran)
        failed = not self.baseline and any(cell.status == FAILED for cell in ran)
        bad = any(cell.open or cell.wrong or cell.unjudged or cell.regressed for cell in self.cells)
        return bool(ran) and not failed and not bad and not waits

    def waits(self, cell: MatrixCell) -> bool:
        """Whether it passed and is still to be compared with the truth, as an interruption leaves it."""
        return bool(self.options.get("oracle")) and cell.status == PASSED and cell.verdict is None


BASELINE, NOISE, ASKED, SFT_BASELINE, SFT = "baseline", "noise", "asked", "sft baseline", "sft"
"""What a cell is for: what the others are held against; what rounding alone does; what was requested. The trainer's own program,
too: on one process, and as asked for."""
TRAINED, BROKEN, IMPOSSIBLE, OPEN = "trained", FAILED, UNAVAILABLE, NOT_RUN
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
    threshold: Real
    training: dict[str, Any]
    log_dir: str
    selection: str | None = None
    command: str = ""
    finished_at: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
