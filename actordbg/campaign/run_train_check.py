"""Run a training check from its first cell to its last: each cell is supervised as a replay is, in a folder of its own.

    record = TrainRun(store, record, inputs).run()

    store/trainchecks/<id>/check.json          the record, replaced after every cell
    store/trainchecks/<id>/cell-3.1/           the first attempt at cell 3: what a replay's folder has, and training.json
    <log dir>/fsdp2_tp2_test.log               the cell's figures, as a training prints them

Cells of one launcher run in the same processes, one after another, each from its initial weights: imports are paid once. A
training that lost an input cannot go on, so the first that does not pass ends its cell. `--resume` runs what has not finished.

A cell whose group was lost goes on in its next attempt: from its newest checkpoint (`checkpoints.py`) where there is `--storage`,
else from its initial weights. An attempt has journals of its own, and the steps before it are kept in the record, so what an
attempt left half done is never counted.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from actordbg.base.errors import ActordbgError, Conflict, GroupsLost, MachineFault, StoreProblem
from actordbg.base.owners import Owner
from actordbg.base.processes import ALIVE, STOPPED, start_ticks, state_of
from actordbg.base.units import resolve
from actordbg.campaign import checkpoints
from actordbg.campaign.sft_cells import run_sft
from actordbg.campaign.train_engine import CHECKPOINTS, MODULE, STEP, TRAINING, step_of
from actordbg.campaign.train_plan import schedule
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
    SFT_BASELINE,
    TRAINED,
    TrainCell,
    TrainCheckRecord,
    TrainStep,
)
from actordbg.records.replay_record import CRASHED, PASSED, ReplayInput, ReplaySpec, ResultRecord
from actordbg.replay.group_engine import Losses, WarmGroups, engine_in_use, launch_group
from actordbg.replay.supervise import (
    COMPLETE,
    INTERRUPTED,
    STOPPED_EARLY,
    Progress,
    ReplayOutcome,
    interruptible,
    run_replay,
    undisturbed,
)
from actordbg.store.layout import Store, read_with_owner

CHECK = "check.json"
RUNNER, STORAGE, WENT_ON = "runner", "storage", "went on"
"""Keys of the record's options: who runs it; where checkpoints go, and how often; after which steps a cell went on from one."""
FAILURES_HERE = 3
"""How often a cell's group may be lost on this machine. On a cluster `--max-failures` is for all cells together."""
Hears = Callable[[TrainCell, str], None]
"""Told of a cell and what it did: "starts", "micro-batch", "done"."""


class GroupLost(Exception):
    """The ranks are gone with their weights, in the middle of a training; nobody is blamed."""


class CellEnded(Exception):
    """A micro-batch did not pass: the training is over."""

    def __init__(self, record: ResultRecord) -> None:
        super().__init__(record.error or record.status)
        self.record = record


@dataclass
class TrainRun:
    """One run of a training check. `record` always equals the file."""

    store: Store
    record: TrainCheckRecord
    inputs: Sequence[ReplayInput]
    on_event: Hears = lambda cell, what: None
    warm: WarmGroups = field(default_factory=lambda: WarmGroups(partial(launch_group, module=MODULE)))

    _resumes: dict[int, str | None] = field(default_factory=dict)
    _died_in: set[str] = field(default_factory=set)
    _losses: Losses | None = None

    def run(self) -> TrainCheckRecord:
        """Run every cell that has not finished. KeyboardInterrupt passes through after every process has ended."""
        self._claim()
        self._losses = engine_in_use().losses()
        status = STOPPED_EARLY
        try:
            with interruptible():
                for index in self._order():
                    self._run_cell(index)
            status = COMPLETE
        except KeyboardInterrupt:
            status = INTERRUPTED
            raise
        except (GroupsLost, MachineFault) as error:
            error.hint = f"`actordbg train-check --resume {self.record.check_id}` goes on"
            raise
        finally:
            with undisturbed():
                self.warm.close(at_once=status != COMPLETE)
                options = self.record.options | {RUNNER: None}
                self.record = replace(self.record, status=status, finished_at=now_timestamp(), options=options)
                self._save()
        return self.record

    def _order(self) -> list[int]:
        """The open cells, those of one launcher together."""
        cells = [cell for cell in self.record.cells if cell.status == OPEN]
        first = {_home(cell): cell.index for cell in reversed(cells)}
        return [cell.index for cell in sorted(cells, key=lambda cell: (first[_home(cell)], cell.index))]

    def _run_cell(self, index: int) -> None:
        cell = self.record.cells[index]
        self.warm.share(_home(cell))
        own = cell.role in (SFT, SFT_BASELINE)
        cell = replace(cell, folder=None, reason="") if own else self._next_attempt(cell)
        for _ in range(len(cell.steps) * self.record.batch):
            self.on_event(cell, "micro-batch")
        self._put(cell)
        self.on_event(cell, "starts")
        began = time.monotonic()
        if own:
            self._finish(
                cell, began, *run_sft(cell, self.record, log_of(self.record, cell), lambda: self.on_event(cell, "micro-batch"))
            )
        else:
            self._train(cell, began)

    def _train(self, cell: TrainCell, began: float) -> None:
        status, reason, optimizer = TRAINED, "", ""
        losses, self._died_in = self._losses or Losses(FAILURES_HERE), set()
        while True:
            before = len(losses.reasons)
            try:
                optimizer = str(self._attempt(cell).resolved.get("stepped_by", ""))
            except GroupLost as lost:
                self.warm.close(at_once=True)
                if losses.reasons[before:][-1:] != [str(lost)]:  # what its supervisor has not counted
                    losses.count(str(lost))
                cell = self._next_attempt(cell)
                self._put(cell)
                continue
            except CellEnded as ended:
                status, reason = BROKEN, _why(ended.record)
                self.warm.close(at_once=True)
            except (GroupsLost, MachineFault):
                raise
            except ActordbgError as error:
                status, reason = BROKEN, error.message
            break
        steps = self._steps_so_far(cell)
        if status == TRAINED and len(steps) < self.record.steps:
            status, reason = BROKEN, f"only {len(steps)} of {self.record.steps} steps have figures"
        cell = self._finish(cell, began, status, reason, steps, optimizer)
        write_trainer_log(cell, self.record)
        if (storage := self._storage(cell)) is not None:
            checkpoints.remove_all(storage)

    def _attempt(self, cell: TrainCell) -> ReplayOutcome:
        """Run what the cell's record has no steps of, in its folder."""
        return run_replay(
            self.store,
            self._spec(cell),
            partial(self._hear, cell),
            warm=self.warm,
            folder=self._folder / str(cell.folder),
            deal=False,
            losses=self._losses,
        )

    def _next_attempt(self, cell: TrainCell) -> TrainCell:
        """The cell with a new folder, and with the steps before the newest checkpoint. Unsupported for a checkpoint of others."""
        storage, steps = self._storage(cell), self._steps_so_far(cell)
        found = None
        if storage is not None:
            found = checkpoints.newest(storage, self._belongs(cell), len(steps))
            checkpoints.clear(storage, found)
        self._resumes[cell.index] = str(found.folder) if found else None
        cell = replace(cell, folder=self._next_folder(cell.index), reason="", steps=steps[: found.step] if found else ())
        if found is not None:
            told = dict(self.record.options.get(WENT_ON) or {})
            told[str(cell.index)] = [*told.get(str(cell.index), []), found.step]
            self.record = replace(self.record, options=self.record.options | {WENT_ON: told})
        return cell

    def _steps_so_far(self, cell: TrainCell) -> tuple[TrainStep, ...]:
        """Those that earlier attempts left in the record, and those in the journals of the last."""
        last = steps_of(self._folder / cell.folder, self.record.batch) if cell.folder else []
        return (*cell.steps, *last)

    def _storage(self, cell: TrainCell) -> Path | None:
        """Where the cell's checkpoints are."""
        told = self.record.options.get(STORAGE)
        return Path(told["folder"]) / self.record.check_id / f"cell-{cell.index}" if told else None

    def _belongs(self, cell: TrainCell) -> dict[str, Any]:
        whole = self._work(replace(cell, steps=()))
        return checkpoints.belongs_to(self.record.check_id, cell.index, whole, self.record.training, gather_facts().versions)

    def _finish(
        self, cell: TrainCell, began: float, status: str, reason: str, steps: tuple[TrainStep, ...], optimizer: str = ""
    ) -> TrainCell:
        """Write down what became of a cell."""
        seconds = time.monotonic() - began
        cell = replace(cell, status=status, reason=reason, seconds=seconds, steps=steps, optimizer=optimizer)
        self._put(cell)
        self.on_event(cell, "done")
        return cell

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
                "attempt": int(str(cell.folder).rpartition(".")[2]),
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
        if event.kind == "result" and event.result is not None:
            if event.result.status != PASSED:
                self._judge(cell, event.result)
            storage = self._storage(cell)
            if storage is not None and event.result.extra.get(STEP):
                checkpoints.prune(storage)  # after a step no rank writes one
            self.on_event(cell, "micro-batch")

    def _judge(self, cell: TrainCell, result: ResultRecord) -> None:
        """With checkpoints, ranks may die in a micro-batch once: of it, or of something else. Twice is of it."""
        if result.status == CRASHED and self._storage(cell) is not None and result.dump_id not in self._died_in:
            self._died_in.add(result.dump_id)
            raise GroupLost(_why(result))
        raise CellEnded(result)

    @property
    def _folder(self) -> Path:
        return folder_of(self.store, self.record.check_id)

    def _next_folder(self, index: int) -> str:
        names = (f"cell-{index}.{attempt}" for attempt in itertools.count(1))
        return next(name for name in names if not (self._folder / name).exists())

    def _claim(self) -> None:
        """Conflict while another process runs it."""
        runner, me = self.record.options.get(RUNNER), [os.getpid(), start_ticks(os.getpid())]
        if runner and runner != me and state_of(runner[0], runner[1])[0] in (ALIVE, STOPPED):
            raise Conflict(f"training check {self.record.check_id} is being run by process {runner[0]}", hint="wait for it")
        told = self.record.options.get(STORAGE)
        if told and self.record.status == OPEN:
            checkpoints.open_folder(Path(told["folder"]))
        elif told and not Path(told["folder"]).is_dir():
            raise StoreProblem(f"the checkpoints' folder {told['folder']} is not there", hint="mount it, or start a new check")
        self.record = replace(self.record, status="running", options=self.record.options | {RUNNER: me})
        self._save()

    def _put(self, cell: TrainCell) -> None:
        cells = tuple(cell if one.index == cell.index else one for one in self.record.cells)
        self.record = replace(self.record, cells=cells)
        self._save()

    def _save(self) -> None:
        self.store.publish_text(self._folder / CHECK, self.record.to_json())


def folder_of(store: Store, check_id: str) -> Path:
    """The folder of a training check."""
    return store.root / "trainchecks" / check_id


def log_of(record: TrainCheckRecord, cell: TrainCell) -> Path:
    """Where a cell's log is; those of the trainer's own program have a folder of their own, since names are the same."""
    return Path(record.log_dir) / ("sft" if cell.role in (SFT, SFT_BASELINE) else "") / cell.log_name


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
        norms[step] = record.extra.get(STEP) or norms.get(step) or {}
    whole = sorted(step for step, found in losses.items() if len(found) == batch and norms.get(step))
    return [
        TrainStep(step, sum(losses[step]) / batch, norms[step].get("grad_norm"), norms[step].get("update_norm")) for step in whole
    ]


def _home(cell: TrainCell) -> tuple[object, ...]:
    """Cells of one home can run in the same processes; the trainer's own program is in none of them, and last."""
    if cell.role in (SFT, SFT_BASELINE):
        return (SFT,)
    return cell.config["backend"], cell.config["nproc"], cell.config["dist_backend"]


def _why(record: ResultRecord) -> str:
    first = next((line.strip() for line in (record.error or record.status).splitlines() if line.strip()), record.status)
    known = f" ({record.signature})" if record.signature else ""
    return f"step {step_of(record.dump_id)} {record.status}: {record.error_class or ''} {first}"[:400].replace("  ", " ") + known
