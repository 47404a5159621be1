"""Run a training check from its first cell to its last: each cell is supervised as a replay is, in a folder of its own.

    record = TrainRun(store, record, inputs).run()

    store/trainchecks/<id>/check.json          the record, replaced after every cell
    store/trainchecks/<id>/cell-3.1/           the first attempt at cell 3: what a replay's folder has, and training.json
    <log dir>/fsdp2_tp2_test.log               the cell's figures, as a training prints them

Cells of one launcher run in the same processes, one after another, each from its initial weights: imports are paid once. A
training that lost an input cannot continue, so the first that does not pass ends its cell. `--resume` runs what has not finished.

A cell whose group was lost continues in its next attempt: from its newest checkpoint (`checkpoints.py`) where there is
`--storage`,
else from its initial weights. An attempt has journals of its own, and the steps before it are kept in the record, so what an
attempt left half done is never counted.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from actordbg.base.errors import ActordbgError, GroupsLost, MachineFault, StoreProblem
from actordbg.base.owners import Owner
from actordbg.base.units import resolve
from actordbg.campaign import checkpoints
from actordbg.campaign.runner import Campaign, Trial, run_trials
from actordbg.campaign.train_document import OWN
from actordbg.campaign.train_engine import CHECKPOINTS, MODULE, STEP, TRAINING, step_of
from actordbg.campaign.train_plan import run_sft, schedule
from actordbg.config.choices import gather_facts
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import is_plain_name, now_timestamp
from actordbg.formats.store_files import atomic_write, make_folder
from actordbg.records.journal import SPEC, read_results
from actordbg.records.matrix_record import (
    BASELINE,
    BROKEN,
    NOISE,
    OPEN,
    SFT,
    TRAINED,
    TrainCell,
    TrainCheckRecord,
    TrainStep,
)
from actordbg.records.replay_record import CRASHED, PASSED, ReplayInput, ReplaySpec, ResultRecord
from actordbg.replay.group_engine import Losses, WarmGroups, engine_in_use, launch_group
from actordbg.replay.supervise import Progress, run_replay
from actordbg.store.layout import Store, read_with_owner

CHECK = "check.json"
STORAGE, WENT_ON = "storage", "continued"
"""Keys of the record's options: where checkpoints go, and how often; after which steps a cell continued from one."""
FAILURES_HERE = 3
"""How often a cell's group may be lost on this machine. On a cluster `--max-failures` is for all cells together."""
Hears = Callable[[TrainCell, str], None]
"""Told of a cell and what it did: "starts", "micro-batch", "done"."""


class GroupLost(Exception):
    """The ranks are gone with their weights, in the middle of a training; nobody is blamed."""


class CellEnded(Exception):
    """A micro-batch did not pass: the training is over. Its text says why."""


class TrainRun(Campaign[TrainCheckRecord]):
    """One run of a training check."""

    def __init__(
        self,
        store: Store,
        record: TrainCheckRecord,
        inputs: Sequence[ReplayInput],
        on_event: Hears = lambda cell, what: None,
        warm: WarmGroups | None = None,
    ) -> None:
        name, self._folder = record.check_id, folder_of(store, record.check_id)
        super().__init__(store, record, self._folder / CHECK, f"training check {name}", f"train-check --resume {name}")
        self.inputs, self.on_event = inputs, on_event
        self.warm = warm or WarmGroups(partial(launch_group, module=MODULE))
        self._resumes: dict[int, str | None] = {}
        self._died_in: set[str] = set()
        self._losses = engine_in_use().losses()
        self._storage_root = Path(told["folder"]) if (told := record.options.get(STORAGE)) else None

    def run(self) -> TrainCheckRecord:
        if (storage := self._storage_root) is not None:
            if self.record.status == OPEN:
                checkpoints.open_folder(storage)
            elif not storage.is_dir():
                raise StoreProblem(f"the checkpoints' folder {storage} is not there", hint="mount it, or start a new check")
        return super().run()

    def work(self) -> None:
        """Run the open cells, those of one launcher together."""
        cells = [cell for cell in self.record.cells if cell.status == OPEN]
        first = {_home(cell): cell.index for cell in reversed(cells)}
        cells.sort(key=lambda cell: (first[_home(cell)], cell.index))
        run_trials([Trial(_home(cell), partial(self._run_cell, cell)) for cell in cells], self.warm)

    def close(self, complete: bool) -> None:
        self.warm.close(at_once=not complete)

    def _run_cell(self, cell: TrainCell, warm: WarmGroups) -> None:
        own, began = cell.role in OWN, time.monotonic()
        cell = replace(cell, folder=None, reason="") if own else self._next_attempt(cell)
        for _ in range(len(cell.steps) * self.record.batch):
            self.on_event(cell, "micro-batch")
        self.put(cell)
        self.on_event(cell, "starts")
        if own:
            cell = run_sft(cell, self.record, log_of(self.record, cell), partial(self.on_event, cell, "micro-batch"))
        else:
            cell = self._train(cell)
            cell = replace(cell, steps=self._steps_so_far(cell))
            if cell.status == TRAINED and len(cell.steps) < self.record.steps:
                reason = f"only {len(cell.steps)} of {self.record.steps} steps have figures"
                cell = replace(cell, status=BROKEN, reason=reason)
        cell = replace(cell, seconds=time.monotonic() - began)
        self.put(cell)
        self.on_event(cell, "done")
        if not own:
            write_trainer_log(cell, self.record)
            if (storage := self._storage(cell)) is not None:
                checkpoints.remove_all(storage)

    def _train(self, cell: TrainCell) -> TrainCell:
        """Attempt the cell until it ends: the cell in its last attempt, with its status, reason and optimizer."""
        losses, self._died_in = self._losses or Losses(FAILURES_HERE), set()
        while True:
            before = len(losses.reasons)
            try:
                hear, folder = partial(self._hear, cell), self._folder / str(cell.folder)
                outcome = run_replay(
                    self.store, self._spec(cell), hear, warm=self.warm, folder=folder, deal=False, losses=self._losses
                )
                return replace(cell, status=TRAINED, optimizer=str(outcome.resolved.get("stepped_by", "")))
            except GroupLost as lost:
                self.warm.close(at_once=True)
                if losses.reasons[before:][-1:] != [str(lost)]:  # what its supervisor has not counted
                    losses.count(str(lost))
                cell = self._next_attempt(cell)
                self.put(cell)
            except CellEnded as ended:
                self.warm.close(at_once=True)
                return replace(cell, status=BROKEN, reason=str(ended))
            except (GroupsLost, MachineFault):
                raise
            except ActordbgError as error:
                return replace(cell, status=BROKEN, reason=error.message)

    def _next_attempt(self, cell: TrainCell) -> TrainCell:
        """The cell with a new folder, and with the steps before the newest checkpoint. Unsupported for a checkpoint of others."""
        storage, steps = self._storage(cell), self._steps_so_far(cell)
        found = None
        if storage is not None:
            found = checkpoints.newest(storage, self._belongs(cell), len(steps))
            checkpoints.clear(storage, found)
        self._resumes[cell.index] = str(found.folder) if found else None
        names = (f"cell-{cell.index}.{attempt}" for attempt in itertools.count(1))
        folder = next(name for name in names if not (self._folder / name).exists())
        cell = replace(cell, folder=folder, reason="", steps=steps[: found.step] if found else ())
        if found is not None:
            told, name = self.record.options.get(WENT_ON) or {}, str(cell.index)
            told = told | {name: [*told.get(name, []), found.step]}
            self.record = replace(self.record, options=self.record.options | {WENT_ON: told})
        return cell

    def _steps_so_far(self, cell: TrainCell) -> tuple[TrainStep, ...]:
        """Those that earlier attempts left in the record, and those in the journals of the last."""
        return (*cell.steps, *(steps_of(self._folder / cell.folder, self.record.batch) if cell.folder else ()))

    def _storage(self, cell: TrainCell) -> Path | None:
        """Where the cell's checkpoints are."""
        return self._storage_root and self._storage_root / self.record.check_id / f"cell-{cell.index}"

    def _belongs(self, cell: TrainCell) -> dict[str, Any]:
        whole = self._work(replace(cell, steps=()))
        return checkpoints.belongs_to(self.record.check_id, cell.index, whole, self.record.training, gather_facts().versions)

    def _spec(self, cell: TrainCell) -> ReplaySpec:
        """What the cell's workers run; it is written beside how they step."""
        spec, folder = self._work(cell), self._folder / str(cell.folder)
        make_folder(folder)
        told = self.record.training | {"accumulation": self.record.batch // spec.config.lanes}
        told |= {"wide": True, "gradient_checkpointing": False} if cell.role == BASELINE else {}
        if (storage := self._storage(cell)) is not None:
            checkpoints.open_folder(storage)
            told[CHECKPOINTS] = {
                "folder": str(storage),
                "every": self.record.options[STORAGE]["every"],
                "steps": self.record.steps,
                "attempt": int(folder.suffix[1:]),
                "resume": self._resumes.get(cell.index),
                "belongs": self._belongs(cell),
            }
        atomic_write(folder / TRAINING, json.dumps(told).encode())
        return spec

    def _work(self, cell: TrainCell) -> ReplaySpec:
        """The micro-batches behind the steps that the cell has."""
        work = schedule(self.inputs, self.record.steps, self.record.batch, reverse=cell.role == NOISE)
        left = work[len(cell.steps) * self.record.batch :]
        config = ReplayConfig.from_dict(cell.config)
        return ReplaySpec(f"{self.record.check_id}-{cell.folder}", now_timestamp(), config, left, command=self.record.command)

    def _hear(self, cell: TrainCell, event: Progress) -> None:
        if event.kind == "attempt" and event.text and read_results(self._folder / str(cell.folder)):
            raise GroupLost(event.text)
        if event.kind == "result" and (result := event.result) is not None:
            storage = self._storage(cell)
            if result.status == CRASHED and storage is not None and result.dump_id not in self._died_in:
                # with checkpoints, ranks may die in a micro-batch once: of it, or of something else; twice is of it
                self._died_in.add(result.dump_id)
                raise GroupLost(_why(result))
            if result.status != PASSED:
                raise CellEnded(_why(result))
            if storage is not None and result.extra.get(STEP):
                checkpoints.prune(storage)  # after a step no rank writes one
            self.on_event(cell, "micro-batch")


def folder_of(store: Store, check_id: str) -> Path:
    """The folder of a training check."""
    return store.root / "trainchecks" / check_id


def log_of(record: TrainCheckRecord, cell: TrainCell) -> Path:
    """Where a cell's log is; those of the trainer's own program have a folder of their own, since names are the same."""
    return Path(record.log_dir) / ("sft" if cell.role in OWN else "") / cell.log_name


def write_trainer_log(cell: TrainCell, record: TrainCheckRecord) -> None:
    """Write or replace the log of a cell, as a training prints it: `Global step 3: {'gpt_loss': 5.78, ...}`.

    `compare-logs` reads it, and the ancestor's `compare_backends.py` finds its losses in it, too. StoreProblem where the folder
    cannot be written.
    """
    lines = [f"# actordbg train-check {record.check_id}: {cell.name}, {record.dtype}, {cell.optimizer or 'no optimizer ran'}"]
    for step in cell.steps:
        norms = {"grad_norm": step.grad_norm, "update_norm": step.update_norm, "lr": record.training.get("lr")}
        lines.append(f"Global step {step.step}: { ({'gpt_loss': step.loss} | norms) }")
    ended = " ".join([cell.status, *cell.reason.splitlines()[:1]])
    path = log_of(record, cell)
    try:
        make_folder(path.parent)
        atomic_write(path, "\n".join([*lines, f"# {ended}", ""]).encode())
    except OSError as error:
        raise StoreProblem(f"cannot write {path}: {error.strerror}", hint="name another folder with --log-dir") from None


def load_train_check(store: Store, name: str) -> tuple[TrainCheckRecord, Owner]:
    """A training check by its id, a prefix of it, or "last"; and the user who wrote it: what another user wrote is confirmed.

    StoreProblem or CorruptDump for a file that cannot be read.
    """
    ids = sorted(path.parent.name for path in (store.root / "trainchecks").glob(f"*/{CHECK}"))
    chosen = resolve(name, ids, "training check", made_by="train-check")
    path = folder_of(store, chosen) / CHECK
    data, owner = read_with_owner(path)
    record = TrainCheckRecord.from_json(data, str(path))
    if record.check_id != chosen or not all(is_plain_name(cell.log_name) for cell in record.cells):
        raise StoreProblem(f"{chosen}/{CHECK} is another check's, or names no logs", hint="remove its folder")
    return record, owner


def steps_of(folder: Path, batch: int) -> list[TrainStep]:
    """The figures of each step that all of its micro-batches finished, in order, out of a cell's journals."""
    losses: dict[int, list[float]] = {}
    norms: dict[int, dict[str, float]] = {}
    for name, record in read_results(folder).items() if (folder / SPEC).exists() else ():
        step = step_of(name)
        if record.loss is not None:
            losses.setdefault(step, []).append(record.loss)
        if figures := record.extra.get(STEP):
            norms[step] = figures
    whole = sorted(step for step in norms if len(losses.get(step, ())) == batch)
    return [TrainStep(s, sum(losses[s]) / batch, norms[s].get("grad_norm"), norms[s].get("update_norm")) for s in whole]


def _home(cell: TrainCell) -> tuple[object, ...]:
    """Cells of one home can run in the same processes; the trainer's own program is in none of them, and last."""
    if cell.role in OWN:
        return (SFT,)
    return cell.config["backend"], cell.config["nproc"], cell.config["dist_backend"]


def _why(record: ResultRecord) -> str:
    first = next((line.strip() for line in (record.error or record.status).splitlines() if line.strip()), record.status)
    known = f" ({record.signature})" if record.signature else ""
    return f"step {step_of(record.dump_id)} {record.status}: {record.error_class or ''} {first}"[:400].replace("  ", " ") + known
