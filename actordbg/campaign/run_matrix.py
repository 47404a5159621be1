"""Run a matrix from its cells to the last verdict: one replay for each cell, one load for all cells that can share it.

    record = run_matrix(store, record, rows, Surroundings(defaults))

A trial is a batch of cells that can share an Actor (`cells.batches`): they run on it one after the other, compiled ones last.
Each cell is an ordinary replay with its own folder, so a crash or a hang costs one input of one cell, and a cell is accepted
wherever a replay is. After a batch its processes leave, and its passed cells are compared with the truth. Where the engine has
room for several groups, batches run side by side (`runner.py`).

`store/matrices/<id>.json` is replaced after every step. So a matrix that was interrupted or killed can continue (`run_matrix`
again
with the record from the file): finished cells stay, and a half-finished cell resumes its replay. All cells replay the same dumps,
also after `--resume`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from actordbg.actor.hub_model import versions_of
from actordbg.base.errors import ActordbgError, CorruptDump, MachineFault, StoreProblem, UsageError
from actordbg.base.owners import Owner
from actordbg.base.units import new_replay_id, resolve
from actordbg.campaign.cell_outcomes import finished, judged, regressions
from actordbg.campaign.cells import batches, with_way_out
from actordbg.campaign.runner import Campaign, CellRunners, Trial, run_trials
from actordbg.catalog.query import get_dump, open_fresh
from actordbg.config.choices import Facts, gather_facts
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord, is_plain_name, now_timestamp
from actordbg.records.journal import SPEC
from actordbg.records.matrix_record import PASSED, UNAVAILABLE, MatrixCell, MatrixRecord
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.group_engine import WarmGroups, engine_in_use
from actordbg.replay.plan import DEFAULT_SHUFFLE_SEED, make_plan
from actordbg.replay.selection import Row, defaults_of, rows_of, rows_of_files
from actordbg.replay.supervise import Progress, load_spec, run_replay
from actordbg.store.layout import Store, read_with_owner


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


def path_of(store: Store, matrix_id: str) -> Path:
    """The file of a matrix."""
    return store.matrices / f"{matrix_id}.json"


def names(store: Store) -> list[str]:
    """Ids of all matrices of the store, the oldest first."""
    return sorted(path.stem for path in store.matrices.glob("[!.]*.json"))


def load(store: Store, name: str) -> MatrixRecord:
    """A matrix by its id, a prefix of it, or "last"; UsageError when there is none, CorruptDump for a damaged file."""
    return load_with_owner(store, name)[0]


def load_with_owner(store: Store, name: str) -> tuple[MatrixRecord, Owner]:
    """A matrix as `load` finds it, and the user who wrote its file: what another user wrote is confirmed before it runs."""
    path = path_of(store, resolve(name, names(store), "matrix", made_by="matrix"))
    data, owner = read_with_owner(path)
    record = MatrixRecord.from_json(data, str(path))
    folders = [cell.replay_id for cell in record.cells if cell.replay_id is not None]
    if record.matrix_id != path.stem or not all(map(is_plain_name, (path.stem, *folders))):  # it is written where these say
        raise CorruptDump(f"{path} is another matrix's file, or has replays as none is called", hint="remove the file")
    return record, owner


FILES = "input_files"
"""The option that keeps the named files for `--resume`."""


@dataclass(frozen=True)
class Selection:
    """The chosen rows, in their order, the record that decides open settings, and how many rows were left out for each reason."""

    rows: tuple[Row, ...]
    defaults: DumpRecord | None
    skipped: dict[str, int]


def select(
    store: Store,
    base: ReplayConfig,
    where: str | None = None,
    files: Sequence[Path] = (),
    order: str = "time",
    max_inputs: int | None = None,
    shuffle_seed: int = 0,
) -> Selection:
    """The first `max_inputs` dumps in `order` that `where` selects or the files hold."""
    rows = rows_of(store, where, files, order, max_inputs)
    plan = make_plan(rows, base, order=order, max_inputs=max_inputs, shuffle_seed=shuffle_seed)
    by_id = {row.dump_id: row for row in rows}
    kept = tuple(by_id[dump_id] for dump_id in dict.fromkeys(item.dump_id for item in plan.spec.inputs))
    return Selection(kept, defaults_of(store.root, plan.spec.inputs), plan.skipped)


def select_again(store: Store, record: MatrixRecord) -> Selection:
    """The dumps of a matrix that is resumed; StoreProblem if one of them is gone."""
    found: dict[str, Row]
    if files := record.options.get(FILES):
        found = {row.dump_id: row for row in rows_of_files(store, [Path(name) for name in files])}
    else:
        catalog = open_fresh(store)
        found = {dump_id: get_dump(catalog, dump_id) for dump_id in record.dump_ids}
    if gone := [dump_id for dump_id in record.dump_ids if dump_id not in found]:
        raise StoreProblem(
            f"{len(gone)} of the {len(record.dump_ids)} dumps of matrix {record.matrix_id} are gone: {gone[0]}",
            hint="start a new matrix",
        )
    kept = tuple(found[dump_id] for dump_id in record.dump_ids)
    inputs = make_plan(kept, ReplayConfig(), order=record.options.get("order", "time")).spec.inputs
    return Selection(kept, defaults_of(store.root, inputs), {})


def new_matrix(
    cells: Sequence[MatrixCell], axes: dict[str, list[Any]], rows: Sequence[Row], options: dict[str, Any], **about: Any
) -> MatrixRecord:
    """A matrix before its first cell. `about`: selection, command, baseline.

    `options`: order, shuffle_seed, slower, power, and oracle, the dtype of the truth (None: no truth).
    """
    dump_ids = tuple(row.dump_id for row in rows)
    return MatrixRecord(new_replay_id(), now_timestamp(), "running", axes, tuple(cells), dump_ids, options=options, **about)


def run_matrix(
    store: Store, record: MatrixRecord, rows: Sequence[Row], around: Surroundings, baseline: MatrixRecord | None = None
) -> MatrixRecord:
    """Run every cell that is not decided, and judge those that passed. `rows`: the dumps of `record.dump_ids`.

    Raises Conflict while another process runs it, and StoreProblem if the store cannot be written; a MachineFault leaves the cell
    open. KeyboardInterrupt passes through after every process has ended. A cell that cannot start counts as failed.
    """
    try:
        return MatrixRun(store, record, rows, around, baseline).run()
    finally:
        around.on_tick()


class MatrixRun(Campaign[MatrixRecord]):
    """One run of a matrix."""

    def __init__(
        self, store: Store, record: MatrixRecord, rows: Sequence[Row], around: Surroundings, baseline: MatrixRecord | None
    ) -> None:
        name = record.matrix_id
        super().__init__(store, record, path_of(store, name), f"matrix {name}", f"matrix --resume {name}")
        self.rows, self.around, self.baseline, self._judging = rows, around, baseline, threading.Lock()

    def save(self) -> None:
        self.record = replace(self.record, loads=sum(cell.loads for cell in self.record.cells))
        super().save()

    def work(self) -> None:
        around, cells = self.around, self.record.cells
        todo = batches(cells, around.facts, around.defaults)
        engines = engine_in_use().parts([ReplayConfig.from_dict(cells[batch[0]].config) for batch in todo.values()])
        if len(engines) > 1:
            self._side_by_side(todo, CellRunners(engines))
        else:
            run_trials(self._trials(todo, around), around.warm)
        self._judge(range(len(cells)), around)
        if self.baseline is not None:
            slower = self.record.options.get("slower")
            for cell in self.record.cells:
                self.put(replace(cell, regressed=regressions(self.store, cell, self.baseline, slower)))

    def close(self, complete: bool) -> None:
        if not (complete and self.around.warm.reopen):
            self.around.warm.close(at_once=True)

    def _trials(self, todo: dict[Hashable, list[int]], around: Surroundings) -> list[Trial]:
        def run(indices: list[int], warm: WarmGroups) -> None:
            here = replace(around, warm=warm)
            for index in indices:
                self._run_cell(index, here)
            warm.share(None)
            with self._judging:
                self._judge(indices, here)

        return [Trial(key, partial(run, indices)) for key, indices in todo.items()]

    def _side_by_side(self, todo: dict[Hashable, list[int]], runners: CellRunners) -> None:
        around = self.around

        def work(trial: Trial) -> None:
            with WarmGroups() as warm:
                run_trials([trial], warm)

        def tick() -> None:
            if self._judging.acquire(blocking=False):  # a comparison reads the catalog that a tick writes
                try:
                    around.on_tick()
                finally:
                    self._judging.release()

        tell = replace(around, on_event=lambda event: runners.tell(partial(around.on_event, event)), on_tick=runners.tick)
        runners.run(self._trials(todo, tell), work, tick)

    def _run_cell(self, index: int, around: Surroundings) -> None:
        cell, dumps = self.record.cells[index], len(self.record.dump_ids)
        try:
            spec = self._spec(cell)
        except UsageError as error:  # --align rank, and no call that is whole for this many processes
            cell = replace(cell, status=UNAVAILABLE, reason=with_way_out(error.message, (error.hint,)))
            self.put(cell)
            around.on_event(MatrixEvent("done", cell))
            return
        cell = replace(cell, replay_id=spec.replay_id)
        self.put(cell)
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
        if (left_out := dumps - len(spec.inputs)) and cell.status == PASSED:
            cell = replace(cell, reason=f"{left_out} of {dumps} dumps left out: not of a whole call")
        self.put(cell)
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
                    self.put(cell, truth_id=self.record.truth_id or truth)
                    around.on_event(MatrixEvent("judged", cell))


def _tell(around: Surroundings, cell: MatrixCell, kind: str, event: Progress) -> None:
    if event.kind == "result":
        around.on_event(MatrixEvent(kind, cell, event.text))
    elif event.kind == "attempt" and event.text:
        around.on_event(MatrixEvent("load", cell, f"starting again: {event.text}"))
    elif event.kind in ("start", "leaving"):
        computing = "the truth of " if kind == "truth input" and event.kind == "start" else ""
        around.on_event(MatrixEvent("doing", cell, computing + event.text))
