"""Run a training check from its first cell to its last: each cell is supervised like a replay, in a separate folder.

    record = TrainRun(store, record, inputs).run()

    store/trainchecks/<id>/check.json          the record, replaced after every cell
    store/trainchecks/<id>/cell-3.1/           the first attempt at cell 3: the files of a replay, and training.json
    <log dir>/fsdp2_tp2_test.log               the cell's figures in the trainer's log format

Cells of one launcher run in the same processes, one after another, each from its initial weights: imports are paid once. A
training that lost an input cannot continue, so the first input that does not pass ends its cell. `--resume` runs the rest.

A cell whose group was lost begins again in its next attempt, from its initial weights; with `--storage` it continues from its
last checkpoint, and `cell.steps` has the figures up to it. Each attempt has separate journals, so what one attempt left half
done is never mixed into the next.
"""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from actordbg.actor.training_checkpoints import Checkpoints
from actordbg.base.errors import ActordbgError, GroupsLost, MachineFault, StoreProblem
from actordbg.base.owners import Owner
from actordbg.base.units import first_line, resolve
from actordbg.campaign.runner import Campaign, Trial, run_trials
from actordbg.campaign.train_engine import KEPT, MODULE, SAVED, STEP, TRAINING, step_of
from actordbg.campaign.train_plan import schedule
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import is_plain_name, now_timestamp
from actordbg.formats.store_files import atomic_write, make_folder
from actordbg.records.journal import SPEC, read_results
from actordbg.records.matrix_record import (
    ASKED,
    BASELINE,
    BROKEN,
    CONTINUED,
    NOISE,
    OPEN,
    OUTPUT,
    STORAGE,
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
FAILURES_HERE = 3
"""How often a cell's group may be lost on this machine. On a cluster `--max-failures` covers all cells together."""
OnEvent = Callable[[TrainCell, str], None]
"""Called with a cell and its event: "starts", "micro-batch", "done", or a line about what it waits for."""


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
        self._losses = engine_in_use().losses()
        self._died_in: set[tuple[int, str]] = set()

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
        self.put(cell)
        self.on_event(cell, "starts")
        cell = self._train(cell)
        cell = replace(cell, steps=self._known_steps(cell), seconds=time.monotonic() - began)
        if cell.status == TRAINED and len(cell.steps) < self.record.steps:
            reason = f"only {len(cell.steps)} of {self.record.steps} steps have figures"
            cell = replace(cell, status=BROKEN, reason=reason)
        self.put(cell)
        self.on_event(cell, "done")
        write_trainer_log(cell, self.record)

    def _train(self, cell: TrainCell) -> TrainCell:
        """Run attempts until the cell ends; return it after its last attempt, with status, reason and optimizer."""
        losses = self._losses or Losses(FAILURES_HERE)
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
        """Give the cell a new folder, and the steps up to the checkpoint that it continues from."""
        known, step = self._known_steps(cell), 0
        if known and (kept := self._kept(cell)):
            most = min(len(known), self.record.steps - 1)
            step = Checkpoints(kept["folder"]).newest(int(cell.config["nproc"]), most)
        if step:
            before: dict[str, list[int]] = self.record.options.get(CONTINUED, {})
            after = {str(cell.index): [*before.get(str(cell.index), []), step]}
            self.put(cell, options=self.record.options | {CONTINUED: before | after})
        names = (f"cell-{cell.index}.{attempt}" for attempt in itertools.count(1))
        return replace(
            cell, folder=next(name for name in names if not (self._folder / name).exists()), reason="", steps=known[:step]
        )

    def _known_steps(self, cell: TrainCell) -> tuple[TrainStep, ...]:
        """Return the figures of all steps so far: those before the last attempt, and its own."""
        return (*cell.steps, *(steps_of(self._folder / cell.folder, self.record.batch) if cell.folder else ()))

    def _kept(self, cell: TrainCell) -> dict[str, Any]:
        """Return where a cell keeps checkpoints, as in `training.json`; {} without --storage."""
        storage = self.record.options.get(STORAGE)
        if storage is None:
            return {}
        folder = f"{storage['folder'].rstrip('/')}/{self.record.check_id}/cell-{cell.index}"
        return {"folder": folder, "every": storage["every"], "from": len(cell.steps)}

    def _spec(self, cell: TrainCell) -> ReplaySpec:
        """Write the cell's training.json, and return the spec that its workers run."""
        config, folder = ReplayConfig.from_dict(cell.config), self._folder / str(cell.folder)
        make_folder(folder)
        training = self.record.training | {"accumulation": self.record.batch // config.lanes}
        training |= {"wide": True, "gradient_checkpointing": False} if cell.role == BASELINE else {}
        training |= {KEPT: kept} if (kept := self._kept(cell)) else {}
        if (output := self.record.options.get(OUTPUT)) and cell.role == ASKED:
            training |= {SAVED: {"folder": str(Path(output, Path(cell.log_name).stem)), "after": self.record.steps}}
        atomic_write(folder / TRAINING, json.dumps(training))
        work = schedule(self.inputs, self.record.steps, self.record.batch, reverse=cell.role == NOISE)
        work = work[len(cell.steps) * self.record.batch :]
        return ReplaySpec(f"{self.record.check_id}-{cell.folder}", now_timestamp(), config, work, command=self.record.command)

    def _hear(self, cell: TrainCell, event: Progress) -> None:
        if event.kind == "attempt" and event.text and read_results(self._folder / str(cell.folder)):
            raise GroupLost(event.text)
        if event.kind == "result" and (result := event.result) is not None:
            died = cell.index, result.dump_id
            if result.status == CRASHED and STORAGE in self.record.options and died not in self._died_in:
                self._died_in.add(died)  # the first time, its kill may have nothing to do with the input
                raise GroupLost(_why(result))
            if result.status != PASSED:
                raise CellEnded(_why(result))
            self.on_event(cell, "micro-batch")
        if event.kind == "line":
            self.on_event(cell, event.text)


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
    optimizer = cell.optimizer or "no optimizer ran"
    lines = [f"# actordbg train-check {record.check_id}: {cell.name}, {record.dtype}, {optimizer}"]
    for step in cell.steps:
        norms = {"grad_norm": step.grad_norm, "update_norm": step.update_norm, "lr": record.training.get("lr")}
        lines.append(f"Global step {step.step}: { ({'gpt_loss': step.loss} | norms) }")
    ended = " ".join([cell.status, *cell.reason.splitlines()[:1]])
    path = log_of(record, cell)
    try:
        make_folder(path.parent)
        atomic_write(path, "\n".join([*lines, f"# {ended}", ""]))
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
    first = first_line(record.error) or record.status
    known = f" ({record.signature})" if record.signature else ""
    what = f"{record.error_class} {first}" if record.error_class else first
    return f"step {step_of(record.dump_id)} {record.status}: {what}"[:400] + known
