"""Run a training check from its first cell to its last: each cell is supervised like a replay, in a separate folder.

    record = TrainRun(store, record, inputs).run()

    store/trainchecks/<id>/check.json          the record, replaced after every cell
    store/trainchecks/<id>/cell-3.1/           the first attempt at cell 3: the files of a replay, and training.json
    <log dir>/fsdp2_tp2_test.log               the cell's figures in the trainer's log format

Cells of one launcher run in the same processes, one after another, each from its initial weights: imports are paid once. A
training that lost an input cannot continue, so the first input that does not pass ends its cell. `--resume` runs the rest.

A cell whose group was lost continues in its next attempt: with `--storage` from its newest checkpoint (`checkpoints.py`), else
from its initial weights. Each attempt has separate journals, and the record keeps the steps of earlier attempts, so an unfinished
step is never counted.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from actordbg.base.errors import ActordbgError, GroupsLost, MachineFault, StoreProblem, Unsupported
from actordbg.base.owners import Owner
from actordbg.base.units import resolve
from actordbg.campaign import checkpoints
from actordbg.campaign.runner import Campaign, Trial, run_trials
from actordbg.campaign.train_engine import CHECKPOINTS, MODULE, STEP, TRAINING, step_of
from actordbg.campaign.train_plan import schedule
from actordbg.config.choices import installed_versions
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import is_plain_name, now_timestamp
from actordbg.formats.store_files import atomic_write, make_folder
from actordbg.records.journal import SPEC, read_results
from actordbg.records.matrix_record import (
    BASELINE,
    BROKEN,
    NOISE,
    OPEN,
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
"""Keys of the record's options: folder, interval and package versions of the checkpoints; and, by cell, the steps after which it
continued from one."""
FAILURES_HERE = 3
"""How often a cell's group may be lost on this machine. On a cluster `--max-failures` covers all cells together."""
OnEvent = Callable[[TrainCell, str], None]
"""Called with a cell and its event: "starts", "micro-batch" or "done"."""


class GroupLost(Exception):
    """The ranks died in the middle of a training and their weights are lost; no input is blamed."""


class CellEnded(Exception):
    """A micro-batch did not pass, which ends the training. The message says why."""


class TrainRun(Campaign[TrainCheckRecord]):
    """Runs or continues a training check."""

    def __init__(
        self,
        store: Store,
        record: TrainCheckRecord,
        inputs: Sequence[ReplayInput],
        on_event: OnEvent = lambda cell, what: None,
        warm: WarmGroups | None = None,
    ) -> None:
        name, self._folder = record.check_id, folder_of(store, record.check_id)
        super().__init__(store, record, self._folder / CHECK, f"training check {name}", f"train-check --resume {name}")
        self.inputs, self.on_event = inputs, on_event
        self.warm = warm or WarmGroups(partial(launch_group, module=MODULE))
        self._resumes: dict[int, str | None] = {}
        self._died_in: set[str] = set()
        self._losses = engine_in_use().losses()
        self._storage_root = Path(storage["folder"]) if (storage := record.options.get(STORAGE)) else None

    def run(self) -> TrainCheckRecord:
        if (storage := self._storage_root) is not None:
            if self.record.status == OPEN:
                checkpoints.open_folder(storage)
            elif not storage.is_dir():
                raise StoreProblem(f"the checkpoint folder {storage} does not exist", hint="mount it, or start a new check")
        return super().run()

    def work(self) -> None:
        """Run the open cells, grouped by launcher."""
        cells = [cell for cell in self.record.cells if cell.status == OPEN]
        first = {_home(cell): cell.index for cell in reversed(cells)}
        cells.sort(key=lambda cell: (first[_home(cell)], cell.index))
        run_trials([Trial(_home(cell), partial(self._run_cell, cell)) for cell in cells], self.warm)

    def close(self, complete: bool) -> None:
        self.warm.close(at_once=not complete)

    def _run_cell(self, cell: TrainCell, warm: WarmGroups) -> None:
        began, cell = time.monotonic(), self._next_attempt(cell)
        for _ in range(len(cell.steps) * self.record.batch):
            self.on_event(cell, "micro-batch")
        self.put(cell)
        self.on_event(cell, "starts")
        cell = self._train(cell)
        cell = replace(cell, steps=self._steps_so_far(cell), seconds=time.monotonic() - began)
        if cell.status == TRAINED and len(cell.steps) < self.record.steps:
            reason = f"only {len(cell.steps)} of {self.record.steps} steps have figures"
            cell = replace(cell, status=BROKEN, reason=reason)
        self.put(cell)
        self.on_event(cell, "done")
        write_trainer_log(cell, self.record)
        if (storage := self._storage(cell)) is not None:
            checkpoints.remove_all(storage)

    def _train(self, cell: TrainCell) -> TrainCell:
        """Run attempts until the cell ends; return it after its last attempt, with status, reason and optimizer."""
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
                if losses.reasons[before:][-1:] != [str(lost)]:  # its supervisor has not counted this loss
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
        """Give the cell a new folder and the steps up to its newest checkpoint. Unsupported if that belongs to another check."""
        storage, steps = self._storage(cell), self._steps_so_far(cell)
        checkpoint = None
        if storage is not None:
            checkpoint = checkpoints.newest(storage, len(steps))
            if checkpoint is not None:
                self._require_same_versions(checkpoint.folder)
            checkpoints.clear(storage, checkpoint)
        self._resumes[cell.index] = str(checkpoint.folder) if checkpoint else None
        names = (f"cell-{cell.index}.{attempt}" for attempt in itertools.count(1))
        folder = next(name for name in names if not (self._folder / name).exists())
        cell = replace(cell, folder=folder, reason="", steps=steps[: checkpoint.step] if checkpoint else ())
        if checkpoint is not None:
            continued, name = self.record.options.get(WENT_ON) or {}, str(cell.index)
            continued = continued | {name: [*continued.get(name, []), checkpoint.step]}
            self.record = replace(self.record, options=self.record.options | {WENT_ON: continued})
        return cell

    def _steps_so_far(self, cell: TrainCell) -> tuple[TrainStep, ...]:
        """Return the steps of earlier attempts, from the record, and those of the last attempt, from its journals."""
        return (*cell.steps, *(steps_of(self._folder / cell.folder, self.record.batch) if cell.folder else ()))

    def _storage(self, cell: TrainCell) -> Path | None:
        """Return the folder of the cell's checkpoints; None without --storage."""
        return self._storage_root and self._storage_root / self.record.check_id / f"cell-{cell.index}"

    def _require_same_versions(self, checkpoint: Path) -> None:
        """Raise Unsupported if other versions of the packages wrote the checkpoint: the figures would not be one training's."""
        was, are = self.record.options[STORAGE]["versions"], installed_versions()
        changed = sorted(name for name in {*was, *are} if was.get(name) != are.get(name))
        if changed:
            told = "; ".join(f"{name} was {was.get(name, 'none')}, and is {are.get(name, 'none')}" for name in changed)
            hint = f"use the same installation as before, or remove {checkpoint.parent} to start the configuration from step 1"
            raise Unsupported(f"cannot resume from checkpoint {checkpoint}: {told}", hint=hint)

    def _spec(self, cell: TrainCell) -> ReplaySpec:
        """Write the cell's training.json, and return the spec that its workers run."""
        spec, folder = self._work(cell), self._folder / str(cell.folder)
        make_folder(folder)
        training = self.record.training | {"accumulation": self.record.batch // spec.config.lanes}
        training |= {"wide": True, "gradient_checkpointing": False} if cell.role == BASELINE else {}
        if (storage := self._storage(cell)) is not None:
            checkpoints.open_folder(storage)
            training[CHECKPOINTS] = {
                "folder": str(storage),
                "every": self.record.options[STORAGE]["every"],
                "steps": self.record.steps,
                "attempt": int(folder.suffix[1:]),
                "resume": self._resumes.get(cell.index),
            }
        atomic_write(folder / TRAINING, json.dumps(training).encode())
        return spec

    def _work(self, cell: TrainCell) -> ReplaySpec:
        """Return the spec of the micro-batches that the cell has not run yet."""
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
                # with checkpoints, the first crash in a micro-batch may be unrelated to it; the second is blamed on it
                self._died_in.add(result.dump_id)
                raise GroupLost(_why(result))
            if result.status != PASSED:
                raise CellEnded(_why(result))
            if storage is not None and result.extra.get(STEP):
                checkpoints.prune(storage)  # between steps no rank writes a checkpoint
            self.on_event(cell, "micro-batch")


def folder_of(store: Store, check_id: str) -> Path:
    """Return the folder of a training check."""
    return store.root / "trainchecks" / check_id


def log_of(record: TrainCheckRecord, cell: TrainCell) -> Path:
    """Return the path of a cell's log."""
    return Path(record.log_dir) / cell.log_name


def write_trainer_log(cell: TrainCell, record: TrainCheckRecord) -> None:
    """Write or replace the log of a cell in the trainer's format: `Global step 3: {'gpt_loss': 5.78, ...}`.

    `compare-logs` reads it, and so does the test suite's `compare_backends.py`. Raises StoreProblem if the folder cannot be
    written.
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
    """Load a training check by id, unique prefix or "last", with its owner: another user's check must be confirmed.

    Raises StoreProblem or CorruptDump if its file cannot be read.
    """
    ids = sorted(path.parent.name for path in (store.root / "trainchecks").glob(f"*/{CHECK}"))
    chosen = resolve(name, ids, "training check", made_by="train-check")
    path = folder_of(store, chosen) / CHECK
    data, owner = read_with_owner(path)
    record = TrainCheckRecord.from_json(data, str(path))
    if record.check_id != chosen or not all(is_plain_name(cell.log_name) for cell in record.cells):
        raise StoreProblem(f"{chosen}/{CHECK} has another check's id, or invalid log names", hint="remove its folder")
    return record, owner


def steps_of(folder: Path, batch: int) -> list[TrainStep]:
    """Read the figures of each step whose micro-batches all finished, in order, from a cell's journals."""
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
    """Return the key of cells that can share processes."""
    return cell.config["backend"], cell.config["nproc"], cell.config["dist_backend"]


def _why(record: ResultRecord) -> str:
    first = next((line.strip() for line in (record.error or record.status).splitlines() if line.strip()), record.status)
    known = f" ({record.signature})" if record.signature else ""
    return f"step {step_of(record.dump_id)} {record.status}: {record.error_class or ''} {first}"[:400].replace("  ", " ") + known
