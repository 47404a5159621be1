"""Run a matrix from its cells to the last verdict: one replay for each cell, one load for all cells that can share it.

    record = run_matrix(store, record, rows, Surroundings(defaults))

Cells run batch by batch (`cells.batches`). Cells that can share an Actor run on it one after the other, compiled ones last. Each
cell is an ordinary replay with its own folder, so a crash or a hang costs one input of one cell, and a cell is accepted
wherever a replay is. After a batch its processes leave, and its passed cells are compared with the truth. Where the engine has
room for several groups, batches run side by side (`cells_in_parallel.py`).

`store/matrices/<id>.json` is replaced after every step. So a matrix that was interrupted or killed can go on (`run_matrix` again
with the record from the file): finished cells stay, and a half-finished cell resumes its replay.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from actordbg.actor.hub_model import versions_of
from actordbg.base.errors import ActordbgError, MachineFault, UsageError
from actordbg.base.units import new_replay_id
from actordbg.campaign import matrix_files as matrices
from actordbg.campaign.cell_outcomes import finished, write_log
from actordbg.campaign.cell_verdicts import Baseline, judged, regressions
from actordbg.campaign.cells import Batch, batches, with_way_out
from actordbg.campaign.cells_in_parallel import CellRunners
from actordbg.config.choices import Facts, gather_facts
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord, now_timestamp
from actordbg.records.journal import SPEC
from actordbg.records.matrix_record import PASSED, UNAVAILABLE, MatrixCell, MatrixRecord
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.group_engine import WarmGroups, engine_in_use
from actordbg.replay.plan import DEFAULT_SHUFFLE_SEED, make_plan
from actordbg.replay.selection import Row
from actordbg.replay.supervise import (
    COMPLETE,
    INTERRUPTED,
    STOPPED_EARLY,
    Progress,
    interruptible,
    load_spec,
    run_replay,
    undisturbed,
)
from actordbg.store.layout import Store


@dataclass(frozen=True)
class MatrixEvent:
    """News of a cell. kind: "cell" (it starts), "input" (an input has a result), "load" (its workers start again), "done";
    "truth" (its comparison starts), "truth input", "judged"; "doing", what it does now. `text`: in words.
    """

    kind: str
    cell: MatrixCell
    text: str = ""


@dataclass
class Surroundings:
    """Where a matrix runs: the facts of this machine, the record that decides open settings, who hears of news."""

    defaults: DumpRecord | None
    facts: Facts = field(default_factory=gather_facts)
    on_event: Callable[[MatrixEvent], None] = lambda event: None
    on_tick: Callable[[], None] = lambda: None
    warm: WarmGroups = field(default_factory=WarmGroups)


def new_matrix(
    cells: Sequence[MatrixCell], axes: dict[str, list[Any]], rows: Sequence[Row], options: dict[str, Any], **about: Any
) -> MatrixRecord:
    """A matrix before its first cell. `about`: selection, command, baseline.

    `options`: order, shuffle_seed, slower, power, and oracle, the dtype of the truth (None: no truth).
    """
    order = make_plan(rows, ReplayConfig(), order=options.get("order", "time")).spec.inputs
    return MatrixRecord(
        matrix_id=new_replay_id(),
        created_at=now_timestamp(),
        status="running",
        axes=axes,
        cells=tuple(cells),
        dump_ids=tuple(item.dump_id for item in order),
        options=options,
        **about,
    )


def run_matrix(
    store: Store,
    record: MatrixRecord,
    rows: Sequence[Row],
    around: Surroundings,
    baseline: Baseline | None = None,
) -> MatrixRecord:
    """Run every cell that is not decided, and judge those that passed. `rows`: the dumps of `record.dump_ids`.

    Raises Conflict while another process runs it, and StoreProblem if the store cannot be written; a MachineFault leaves the cell
    open. KeyboardInterrupt passes through after every process has ended. A cell that cannot start counts as failed.
    """
    run = MatrixRun(store, rows, around, baseline, matrices.claimed(record))
    matrices.save(store, run.record)
    with interruptible():
        run.run()
    return run.record


@dataclass
class MatrixRun:
    """One run of a matrix. `record` always equals the file."""

    store: Store
    rows: Sequence[Row]
    around: Surroundings
    baseline: Baseline | None
    record: MatrixRecord
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _judging: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> None:
        """Run until every cell is decided, or until an interruption or an error of the store."""
        status = STOPPED_EARLY
        try:
            todo = batches(self.record.cells, self.around.facts, self.around.defaults)
            parts = engine_in_use().parts([ReplayConfig.from_dict(self.record.cells[batch.cells[0]].config) for batch in todo])
            if len(parts) > 1:
                self._side_by_side(todo, CellRunners(parts))
            else:
                for batch in todo:
                    self._run_batch(batch, self.around)
            self._judge(range(len(self.record.cells)), self.around)
            if self.baseline is not None:
                for cell in self.record.cells:
                    self._put(replace(cell, regressed=regressions(self.store, cell, self.baseline)))
            status = COMPLETE
        except KeyboardInterrupt:
            status = INTERRUPTED
            raise
        except MachineFault as fault:
            fault.hint = f"fix that, then `actordbg matrix --resume {self.record.matrix_id}` goes on"
            raise
        finally:
            with undisturbed():
                if status != COMPLETE or not self.around.warm.reopen:
                    self.around.warm.close(at_once=True)
                self.record = matrices.released(self.record, status, now_timestamp())
                matrices.save(self.store, self.record)
                self.around.on_tick()

    def _side_by_side(self, todo: Sequence[Batch], runners: CellRunners) -> None:
        around = self.around

        def on_event(event: MatrixEvent) -> None:
            runners.tell(partial(around.on_event, event))

        def work(batch: Batch) -> None:
            with WarmGroups() as warm:
                self._run_batch(batch, replace(around, on_event=on_event, on_tick=runners.tick, warm=warm))

        def tick() -> None:
            if self._judging.acquire(blocking=False):  # a comparison reads the catalog that a tick writes
                try:
                    around.on_tick()
                finally:
                    self._judging.release()

        runners.run(todo, work, tick)

    def _run_batch(self, batch: Batch, around: Surroundings) -> None:
        around.warm.share(batch.key)
        for index in batch.cells:
            self._run_cell(index, around)
        around.warm.share(None)
        with self._judging:
            self._judge(batch.cells, around)

    def _run_cell(self, index: int, around: Surroundings) -> None:
        cell = self.record.cells[index]
        try:
            spec = self._spec(cell)
        except UsageError as error:  # --align rank, and no call that is whole for this many processes
            cell = replace(cell, status=UNAVAILABLE, reason=with_way_out(error.message, (error.hint,)))
            self._put(cell)
            around.on_event(MatrixEvent("done", cell))
            return
        cell = replace(cell, replay_id=spec.replay_id)
        self._put(cell)
        around.on_event(MatrixEvent("cell", cell))
        problem: ActordbgError | None = None
        try:
            run_replay(self.store, spec, partial(_tell, around, cell, "input"), on_tick=around.on_tick, warm=around.warm)
        except MachineFault:
            raise
        except ActordbgError as error:
            problem = error
        by_replay = {other.replay_id: other.index for other in self.record.cells if other.replay_id is not None}
        cell = finished(self.store, cell, spec, by_replay, problem)
        left_out = len(self.record.dump_ids) - len(spec.inputs)
        if left_out and cell.status == PASSED:
            cell = replace(cell, reason=f"{left_out} of {len(self.record.dump_ids)} dumps left out: not of a whole call")
        self._put(cell)
        write_log(self.store, self.record.matrix_id, cell)
        around.on_event(MatrixEvent("done", cell))

    def _spec(self, cell: MatrixCell) -> ReplaySpec:
        """The cell's replay: the one that began, else a new one."""
        if cell.replay_id is not None and (self.store.replays / cell.replay_id / SPEC).is_file():
            return load_spec(self.store, cell.replay_id)
        options = self.record.options
        return make_plan(
            self.rows,
            ReplayConfig.from_dict(cell.config),
            order=options.get("order", "time"),
            shuffle_seed=options.get("shuffle_seed", DEFAULT_SHUFFLE_SEED),
            where=self.record.selection,
            command=f"matrix {self.record.matrix_id}, cell {cell.index}: {cell.name}",
            versions=versions_of(str(cell.config.get("model"))),
        ).spec

    def _judge(self, indices: Sequence[int], around: Surroundings) -> None:
        """Judge cells without a verdict. The truth loads the model too, so the cells' own processes have left or let go of it."""
        dtype, power = self.record.options.get("oracle"), bool(self.record.options.get("power"))
        with contextlib.nullcontext(around.warm) if around.warm.reopen else WarmGroups() as warm:
            for cell in (self.record.cells[index] for index in indices):
                if dtype and cell.status == PASSED and cell.verdict is None:
                    around.on_event(MatrixEvent("truth", cell))
                    on_event = partial(_tell, around, cell, "truth input")
                    cell, truth = judged(self.store, cell, dtype, power, on_event=on_event, on_tick=around.on_tick, warm=warm)
                    self._put(cell, truth_id=self.record.truth_id or truth)
                    around.on_event(MatrixEvent("judged", cell))

    def _put(self, cell: MatrixCell, **changed: Any) -> None:
        with self._writing:
            cells = tuple(cell if other.index == cell.index else other for other in self.record.cells)
            self.record = replace(self.record, cells=cells, loads=sum(other.loads for other in cells), **changed)
            matrices.save(self.store, self.record)


def _tell(around: Surroundings, cell: MatrixCell, kind: str, event: Progress) -> None:
    if event.kind == "result":
        around.on_event(MatrixEvent(kind, cell, event.text))
    elif event.kind == "attempt" and event.text:
        around.on_event(MatrixEvent("load", cell, f"starting again: {event.text}"))
    elif event.kind in ("start", "leaving"):
        computing = "the truth of " if kind == "truth input" and event.kind == "start" else ""
        around.on_event(MatrixEvent("doing", cell, computing + event.text))
