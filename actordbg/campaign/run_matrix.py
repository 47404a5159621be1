"""Run a matrix from its cells to the last verdict: one replay per cell, one load for all cells that can share it.

    record = MatrixRun(store, record, rows, Surroundings(defaults)).run()

A trial is a batch of cells that can share an Actor (`cells.batches`): they run on it in sequence, compiled cells last.
Each cell is an ordinary replay with its own folder, so a crash or a hang costs one input of one cell, and a cell is accepted
wherever a replay is. After a batch its processes exit, and its passed cells are compared with the truth. If the engine has room
for several groups, batches run in parallel (`runner.py`).

`store/matrices/<id>.json` is replaced after every step. So an interrupted or killed matrix can continue (run it with
the record from the file): finished cells stay, and a half-finished cell resumes its replay. All cells replay the same dumps, even
after `--resume`.
"""

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
from actordbg.campaign.cells import batches, unavailable
from actordbg.campaign.runner import Campaign, CellRunners, Trial, run_trials
from actordbg.catalog.query import get_dump, open_fresh
from actordbg.config.choices import Facts, gather_facts
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord, now_timestamp
from actordbg.records.journal import SPEC
from actordbg.records.matrix_record import PASSED, MatrixCell, MatrixRecord
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.group_engine import WarmGroups, engine_in_use
from actordbg.replay.plan import DEFAULT_SHUFFLE_SEED, make_plan
from actordbg.replay.selection import Row, defaults_of, rows_of, rows_of_files
from actordbg.replay.supervise import Progress, load_spec, run_replay
from actordbg.store.layout import Store, read_with_owner


@dataclass
class Surroundings:
    """The environment of a matrix: facts of this machine, the record that decides open settings, and the callbacks.

    on_progress: called with what a cell does, in words, and the steps done (`steps_left`).
    """

    defaults: DumpRecord | None
    facts: Facts = field(default_factory=gather_facts)
    on_progress: Callable[[str, int], None] = lambda words, steps: None
    on_tick: Callable[[], None] = lambda: None
    warm: WarmGroups = field(default_factory=WarmGroups)


def path_of(store: Store, matrix_id: str) -> Path:
    """Return the file of a matrix."""
    return store.matrices / f"{matrix_id}.json"


def names(store: Store) -> list[str]:
    """List the ids of all matrices of the store, oldest first."""
    return sorted(path.stem for path in store.matrices.glob("[!.]*.json"))


def load(store: Store, name: str) -> MatrixRecord:
    """Load a matrix by id, unique prefix or "last"; UsageError if there is none, CorruptDump if its file is damaged."""
    return load_with_owner(store, name)[0]


def load_with_owner(store: Store, name: str) -> tuple[MatrixRecord, Owner]:
    """Load a matrix like `load`, with the owner of its file: another user's matrix must be confirmed before it runs."""
    path = path_of(store, resolve(name, names(store), "matrix", made_by="matrix"))
    data, owner = read_with_owner(path)
    record = MatrixRecord.from_json(data, str(path))
    if record.matrix_id != path.stem:  # it is written where that says
        raise CorruptDump(f"{path} has another matrix's id", hint="remove the file")
    return record, owner


FILES = "input_files"
"""Option key under which the --input-file paths are kept for `--resume`."""


@dataclass(frozen=True)
class Selection:
    """The selected rows in order, the record that decides open settings, and the number of skipped rows per reason."""

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
    """Select the first `max_inputs` dumps, in `order`, that match `where` or are in the files."""
    rows = rows_of(store, where, files, order, max_inputs)
    plan = make_plan(rows, base, order=order, max_inputs=max_inputs, shuffle_seed=shuffle_seed)
    by_id = {row.dump_id: row for row in rows}
    kept = tuple(by_id[dump_id] for dump_id in dict.fromkeys(item.dump_id for item in plan.spec.inputs))
    return Selection(kept, defaults_of(store.root, plan.spec.inputs), plan.skipped)


def select_again(store: Store, record: MatrixRecord) -> Selection:
    """Select the dumps of a matrix again to resume it; StoreProblem if any of them is gone."""
    by_id: dict[str, Row]
    if files := record.options.get(FILES):
        by_id = {row.dump_id: row for row in rows_of_files(store, [Path(name) for name in files])}
    else:
        catalog = open_fresh(store)
        by_id = {dump_id: get_dump(catalog, dump_id) for dump_id in record.dump_ids}
    if gone := [dump_id for dump_id in record.dump_ids if dump_id not in by_id]:
        raise StoreProblem(
            f"{len(gone)} of the {len(record.dump_ids)} dumps of matrix {record.matrix_id} are gone: {gone[0]}",
            hint="start a new matrix",
        )
    kept = tuple(by_id[dump_id] for dump_id in record.dump_ids)
    inputs = make_plan(kept, ReplayConfig(), order=record.options.get("order", "time")).spec.inputs
    return Selection(kept, defaults_of(store.root, inputs), {})


def new_matrix(
    cells: Sequence[MatrixCell], axes: dict[str, list[Any]], rows: Sequence[Row], options: dict[str, Any], **about: Any
) -> MatrixRecord:
    """Create the record of a matrix before its first cell runs. `about`: selection, command, baseline.

    `options`: order, shuffle_seed, slower, power, and oracle (dtype of the truth, or ANY_WIDER; None: no truth).
    """
    dump_ids = tuple(row.dump_id for row in rows)
    return MatrixRecord(new_replay_id(), now_timestamp(), "running", axes, tuple(cells), dump_ids, options=options, **about)


def steps_left(record: MatrixRecord) -> int:
    """Count the steps that running the matrix takes: each open cell's inputs, plus its comparison with the truth."""
    return (len(record.dump_ids) + bool(record.options.get("oracle"))) * sum(cell.open for cell in record.cells)


class MatrixRun(Campaign[MatrixRecord]):
    """Runs every undecided cell, and judges the cells that passed. `rows`: the dumps of `record.dump_ids`.

    `run` raises Conflict while another process runs it, and StoreProblem if the store cannot be written; a MachineFault leaves
    the cell open. KeyboardInterrupt passes through after every process has ended. A cell that cannot start counts as failed.
    """

    def __init__(
        self, store: Store, record: MatrixRecord, rows: Sequence[Row], env: Surroundings, baseline: MatrixRecord | None = None
    ) -> None:
        name = record.matrix_id
        super().__init__(store, record, path_of(store, name), f"matrix {name}", f"matrix --resume {name}")
        self.rows, self.env, self.baseline, self._judging = rows, env, baseline, threading.Lock()

    def save(self) -> None:
        self.record = replace(self.record, loads=sum(cell.loads for cell in self.record.cells))
        super().save()

    def work(self) -> None:
        env, cells = self.env, self.record.cells
        todo = batches(cells, env.facts, env.defaults)
        engines = engine_in_use().parts([ReplayConfig.from_dict(cells[batch[0]].config) for batch in todo.values()])
        if len(engines) > 1:
            self._side_by_side(todo, CellRunners(engines))
        else:
            run_trials(self._trials(todo, env), env.warm)
        self._judge(range(len(cells)), env)
        if self.baseline is not None:
            slower = self.record.options.get("slower")
            for cell in self.record.cells:
                self.put(replace(cell, regressed=regressions(self.store, cell, self.baseline, slower)))

    def close(self, complete: bool) -> None:
        if not (complete and self.env.warm.reopen):
            self.env.warm.close(at_once=True)

    def _trials(self, todo: dict[Hashable, list[int]], env: Surroundings) -> list[Trial]:
        def run(indices: list[int], warm: WarmGroups) -> None:
            here = replace(env, warm=warm)
            for index in indices:
                self._run_cell(index, here)
            warm.share(None)
            with self._judging:
                self._judge(indices, here)

        return [Trial(key, partial(run, indices)) for key, indices in todo.items()]

    def _side_by_side(self, todo: dict[Hashable, list[int]], runners: CellRunners) -> None:
        env = self.env

        def work(trial: Trial) -> None:
            with WarmGroups() as warm:
                run_trials([trial], warm)

        tell = replace(env, on_progress=lambda *progress: runners.tell(partial(env.on_progress, *progress)), on_tick=runners.tick)
        runners.run(self._trials(todo, tell), work)

    def _run_cell(self, index: int, env: Surroundings) -> None:
        cell, dumps = self.record.cells[index], len(self.record.dump_ids)
        try:
            spec = self._spec(cell)
        except UsageError as error:  # --align rank, and no call has a dump of each of this many ranks
            return self._close_cell(unavailable(cell, error), env, dumps)
        cell = replace(cell, replay_id=spec.replay_id)
        self.put(cell)
        _tell(env, cell, "")
        problem: ActordbgError | None = None
        told: list[str] = []

        def hear(event: Progress) -> None:
            if event.kind == "result":
                told.append(event.text)
                _tell(env, cell, "" if event.text == PASSED else event.text, 1)
            elif event.kind != "attempt" or event.text:
                _tell(env, cell, f"restarting: {event.text}" if event.kind == "attempt" else event.text)

        try:
            run_replay(self.store, spec, hear, on_tick=env.on_tick, warm=env.warm)
        except MachineFault:
            raise
        except ActordbgError as error:
            problem = error
        by_replay = {other.replay_id: other.index for other in self.record.cells if other.replay_id is not None}
        cell = finished(self.store, cell, spec, by_replay, problem)
        if (left_out := dumps - len(spec.inputs)) and cell.status == PASSED:
            cell = replace(cell, reason=f"{left_out} of {dumps} dumps skipped: incomplete calls")
        self._close_cell(cell, env, dumps - len(told))

    def _close_cell(self, cell: MatrixCell, env: Surroundings, unheard: int) -> None:
        """Keep a cell that has run. unheard: its inputs without a result, whose steps are skipped."""
        self.put(cell)
        _tell(env, cell, cell.status, unheard + (bool(self.record.options.get("oracle")) and cell.status != PASSED))

    def _spec(self, cell: MatrixCell) -> ReplaySpec:
        """Load the spec of the cell's replay if it has begun, else plan a new replay."""
        if cell.replay_id is not None and (self.store.replays / cell.replay_id / SPEC).is_file():
            return load_spec(self.store, cell.replay_id)
        options = self.record.options
        plan = make_plan(
            self.rows,
            ReplayConfig.from_dict(cell.config),
            order=options.get("order", "time"),
            shuffle_seed=options.get("shuffle_seed", DEFAULT_SHUFFLE_SEED),
            where=self.record.selection,
            command=f"matrix {self.record.matrix_id}, cell {cell.index}: {cell.name}",
            versions=versions_of(str(cell.config.get("model"))),
        )
        return replace(plan.spec, locate=min(1, plan.spec.config.laws))  # as `check` does

    def _judge(self, indices: Sequence[int], env: Surroundings) -> None:
        """Judge cells without a verdict. The truth loads the model too, so the cells' processes must have released theirs."""
        dtype, power = self.record.options.get("oracle"), bool(self.record.options.get("power"))
        with contextlib.nullcontext(env.warm) if env.warm.reopen else WarmGroups() as warm:
            for cell in (self.record.cells[index] for index in indices):
                if dtype and cell.status == PASSED and cell.verdict is None:
                    hear = partial(_tell, env, cell, "comparing with the truth")
                    hear()
                    callbacks = {"on_event": lambda event, hear=hear: hear(), "on_tick": env.on_tick, "warm": warm}
                    cell, truth = judged(self.store, cell, dtype, power, **callbacks)
                    self.put(cell, truth_id=self.record.truth_id or truth)
                    _tell(env, cell, str(cell.verdict), 1)


def _tell(env: Surroundings, cell: MatrixCell, words: str, steps: int = 0) -> None:
    name = f"#{cell.index} {cell.name}"
    env.on_progress(f"{name}: {words[:80]}" if words else name, steps)
