"""`train-check --trainer sft`: the trainer's own supervised training under the same configurations, judged by its log.

That program knows nothing of recorded calls: it takes rows of text, `--dataset` or made-up ones, and prints a loss of three
digits. So it is held against itself on one process, over the same rows in the same steps, by the test suite's
three criteria: it completes, its loss falls, and first, mean and last loss are within the threshold. It takes bf16 and
fp16: beside a check in fp32 it runs in bf16.

    cells = sft_cells(configs, base, first=8)
    cell = run_sft(cell, record, log, on_step)

Every cell sees the same rows in a step, in as many micro-batches: a cell with fewer lanes has larger ones. A cell that this
release of the trainer cannot train says so.
"""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from actordbg.base.errors import LaunchProblem, StoreProblem, UsageError, machine_fault
from actordbg.campaign.train_document import ROUND
from actordbg.campaign.train_plan import log_name, name_of_cell
from actordbg.config.replay_config import TINY, ReplayConfig
from actordbg.demo.demo_training import build_assets, start_job
from actordbg.formats.store_files import make_folder, read_regular
from actordbg.measure.log_lines import BAR, read_log
from actordbg.records.matrix_record import (
    BROKEN,
    IMPOSSIBLE,
    OPEN,
    SFT,
    SFT_BASELINE,
    TRAINED,
    TrainCell,
    TrainCheckRecord,
    TrainStep,
)
from actordbg.replay.launch import free_port
from actordbg.trainers.trainer import TRAINER, SftOrder

ROWS = 2
"""Rows of a micro-batch, in the cell with most lanes."""
KEYS = (("prompt", "answer"), ("question", "response"), ("instruction", "output"), ("input", "output"))
_PROGRAM = "sft"
_MADE_UP_LENGTH, _LENGTH = 256, 2048


def sft_cells(configs: Sequence[ReplayConfig], base: ReplayConfig, first: int) -> list[TrainCell]:
    """A cell for each configuration that shards, behind the one that they are held against; `first` is its index."""
    alone = replace(base, backend="deepspeed", zero_stage=2, nproc=1, tp=1, ring=1, packing=None, dist_backend=None)
    asked = [config for config in configs if config.backend != "plain"]
    stages = {config.zero_stage for config in asked if config.backend == "deepspeed"}
    missing = [name for name in TRAINER.programs[_PROGRAM].needs if importlib.util.find_spec(name) is None]
    cells: list[TrainCell] = []
    for config in (alone, *asked):
        role = SFT_BASELINE if config is alone else SFT
        name = f"train_sft, {'1 process' if config is alone else name_of_cell(config)}"
        log = "one_process_test.log" if config is alone else log_name(config, stages)
        lacks = TRAINER.sft_lacks(config.backend)
        if config.nproc % (config.tp * config.ring):
            lacks = f"{config.nproc} processes are no groups of {config.tp * config.ring}"
        lacks = lacks or (f"train_sft needs {', '.join(missing)}" if missing else "")
        status = IMPOSSIBLE if lacks else OPEN
        cells.append(TrainCell(first + len(cells), name, role, config.to_dict(), log, status, lacks))
    if not any(cell.status == OPEN for cell in cells[1:]):
        cells[0] = replace(cells[0], status=IMPOSSIBLE, reason="no configuration is there that it could be compared with")
    return cells


def run_sft(cell: TrainCell, record: TrainCheckRecord, log: Path, on_step: Callable[[], None]) -> TrainCell:
    """Train; the cell with its status, reason, and the loss of each step. Afterwards no process and no checkpoint is left."""
    program = TRAINER.programs[_PROGRAM]
    try:
        make_folder(log.parent)
    except OSError as error:
        raise StoreProblem(f"cannot write {log}: {error.strerror}", hint="name another folder with --log-dir") from None
    reason = ""
    with tempfile.TemporaryDirectory(prefix="actordbg-sft-") as name:
        order = _order(cell, record, Path(name))
        command = TRAINER.sft_command(order, Path(name) / "checkpoint", free_port())
        try:
            with start_job(program, command, Path(name), log) as job:
                limit = 600 + record.steps * float(cell.config["timeout_s"])
                job.wait(lambda progress: on_step() if progress.phase == "step" else None, timeout=limit)
        except LaunchProblem as error:
            reason = f"{error.message}{_last_error(log)}"
            if fault := machine_fault(LaunchProblem(reason), log.parent):
                raise fault from None
    steps = steps_of_log(log, record.steps)
    if not reason and len(steps) < record.steps:
        reason = f"its log has {len(steps)} of {record.steps} steps"
    return replace(cell, status=BROKEN if reason else TRAINED, reason=reason, steps=steps)


def keys_of(data: Path) -> tuple[str, str]:
    """What is asked and what is answered in the rows of a JSONL file. UsageError for another file."""
    try:
        with data.open(encoding="utf-8") as file:
            row = json.loads(file.readline())
    except (OSError, ValueError) as error:
        raise UsageError(f"--dataset {data} is no JSONL file: {error}", hint="a file with a JSON object in each line") from None
    found = [pair for pair in KEYS if isinstance(row, dict) and all(isinstance(row.get(key), str) for key in pair)]
    if not found:
        known = "; ".join(" and ".join(pair) for pair in KEYS)
        raise UsageError(f"--dataset {data}: its first row has no known pair of texts", hint=f"one of: {known}")
    return found[0]


def _order(cell: TrainCell, record: TrainCheckRecord, folder: Path) -> SftOrder:
    """Rows, sizes and numbers, so that every cell of the check has the same rows in each step."""
    config, told, training = ReplayConfig.from_dict(cell.config), record.options[SFT], record.training
    sharing = [ReplayConfig.from_dict(other.config) for other in record.cells if other.role == SFT and other.status != IMPOSSIBLE]
    together = ROWS * math.lcm(*(shared.lanes for shared in sharing))
    batch = together * int(told["accumulation"])
    if told["data"] is None:
        made_up = batch * (told.get(ROUND) or record.steps)
        assets = build_assets(folder, prompts=1, conversations=made_up)
        data, rows, longest, keys = assets.conversations, made_up, _MADE_UP_LENGTH, KEYS[0]
        model = assets.model if config.model == TINY else Path(config.model)
    else:
        data, model, longest = Path(told["data"]), Path(config.model), _LENGTH
        keys, rows = keys_of(data), min(batch * record.steps, _lines(data))
        model = build_assets(folder, prompts=1, conversations=1).model if config.model == TINY else model
    return SftOrder(
        model, data, keys, config.nproc, config.zero_stage, config.tp, config.ring, told["dtype"], told["attn"], batch,
        together // config.lanes, rows, math.ceil(batch * record.steps / rows), told["max_len"] or longest,
        training["lr"], training["weight_decay"], training["max_norm"], seed=42,
        gradient_checkpointing=bool(training.get("gradient_checkpointing")),
    )  # fmt: skip


def _last_error(log: Path) -> str:
    """What a program said last about an error of its own; the launcher's lines begin with their time."""
    lines = read_regular(log).decode(errors="replace").splitlines()
    said = [line.strip() for line in lines if "rror" in line and not line.startswith("[")]
    return f": {said[-1]}"[:400] if said else ""


def _lines(data: Path) -> int:
    with data.open("rb") as file:
        return sum(1 for line in file if line.strip())


def steps_of_log(log: Path, count: int) -> tuple[TrainStep, ...]:
    """The loss of each step. Releases that print one for each micro-batch: the mean of a step's."""
    found = read_log(str(log)).series.get(TRAINER.losses[0], {}).get(BAR)
    values = list(found.points.values()) if found else []
    each = max(1, len(values) // count)
    whole = [values[at : at + each] for at in range(0, len(values) - each + 1, each)]
    losses = [math.fsum(step) / each if all(map(math.isfinite, step)) else None for step in whole[:count]]
    return tuple(TrainStep(step, loss, None, None) for step, loss in enumerate(losses, 1))
