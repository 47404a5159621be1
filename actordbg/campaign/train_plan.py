"""From options to the cells of a training check, from dumps to the micro-batches of its steps, and the trainer's own program.

Every cell takes the same micro-batches in each step, whatever its number of lanes: `batch` of them, a multiple of the lanes of
each. A cell with fewer lanes accumulates more. Inputs are taken in order, and from the beginning again.

Two cells are added. The *baseline* is the plain Actor on the weights as the dtype has them, computed in fp32. *Noise* is the
plain Actor with each step's micro-batches in reverse: what the order of a sum does.

`train-check --trainer sft` adds the trainer's own supervised training under the same configurations, judged by its log. That
program knows nothing of recorded calls: it takes rows of text, `--dataset` or made-up ones, and prints a loss of three digits.
So it is held against itself on one process, over the same rows in the same steps, by the test suite's three criteria: it
completes, its loss falls, and first, mean and last loss are within the threshold. It takes bf16 and fp16: beside a check in fp32
it runs in bf16. Every cell sees the same rows in a step, in as many micro-batches: a cell with fewer lanes has larger ones. A
cell that this release of the trainer cannot train says so (`sft_cells`, `run_sft`).
"""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actordbg.base.errors import LaunchProblem, StoreProblem, UsageError, machine_fault
from actordbg.campaign.cells import Axes, Combination, combinations, make_cells
from actordbg.campaign.train_document import ROUND, steps_of_round
from actordbg.campaign.train_engine import input_id
from actordbg.config.choices import Facts
from actordbg.config.replay_config import LAUNCHERS, TINY, ReplayConfig
from actordbg.config.sources import FSDP_OFF
from actordbg.demo.demo_training import build_assets, start_job
from actordbg.formats.dump_record import DumpRecord
from actordbg.formats.store_files import make_folder, read_regular
from actordbg.measure.log_lines import BAR, read_log
from actordbg.records.matrix_record import (
    ASKED,
    BASELINE,
    BROKEN,
    IMPOSSIBLE,
    NOISE,
    OPEN,
    SFT,
    SFT_BASELINE,
    TRAINED,
    TrainCell,
    TrainCheckRecord,
    TrainStep,
)
from actordbg.records.replay_record import ReplayInput
from actordbg.replay.launch import free_port
from actordbg.trainers.trainer import TRAINER, SftOrder

ANCESTORS: tuple[dict[str, Any], ...] = (
    {"backend": "plain"},
    {"backend": "deepspeed", "zero_stage": 2},
    {"backend": "fsdp2"},
    {"backend": "fsdp2", "tp": 2},
    {"backend": "fsdp2", "ring": 2},
    {"backend": "fsdp2", "tp": 2, "ring": 2},
)
"""What runs where no axis is given: the plain Actor, and the five configurations of the trainer's backend test suite."""
_BASELINE_LOG, _NOISE_LOG = "baseline_fp32_test.log", "plain_reordered_test.log"


def configurations(
    base: ReplayConfig, axes: Axes, skip: Sequence[Skip] = (), sizes: Mapping[str, int] | None = None
) -> list[ReplayConfig]:
    """The configurations to train under, but those to `skip`. `sizes`: tp and ring where no axis is given."""
    if axes:
        found = [combination.config for combination in combinations(base, axes)]
    else:
        sized = [{name: (sizes or {}).get(name, value) for name, value in settings.items()} for settings in ANCESTORS]
        found = list(dict.fromkeys(replace(base, **settings) for settings in sized))
    return [
        config
        for config in map(_fitted, found)
        if not any(
            config.backend == backend and tp in (None, config.tp > 1) and ring in (None, config.ring > 1)
            for backend, tp, ring in skip
        )
    ]


def _fitted(config: ReplayConfig) -> ReplayConfig:
    """Plain is one process; a ring needs packing."""
    if LAUNCHERS[config.backend] == "python":
        config = replace(config, nproc=1)
    return replace(config, packing=True) if config.ring > 1 and config.packing is None else config


def batch_of(configs: Sequence[ReplayConfig], accumulation: int) -> int:
    """Micro-batches of a step: `accumulation` for each lane of the cell that has most, and a multiple of the lanes of all."""
    return math.lcm(*(config.lanes for config in configs if _is_whole(config))) * accumulation


def _is_whole(config: ReplayConfig) -> bool:
    """Whether groups of tp x ring divide the processes."""
    return config.nproc % (config.tp * config.ring) == 0


def require_whole_groups(configs: Sequence[ReplayConfig], axes: Axes) -> None:
    """UsageError where tp x ring does not divide the processes of a configuration that is there by default, or of all that lists
    name. Of some that lists name, their cells say so.
    """
    broken = [config for config in configs if not _is_whole(config)]
    if not broken or (axes and len(broken) < len(configs)):
        return
    groups = "; ".join(f"{name_of_cell(config)} takes groups of {config.tp * config.ring}" for config in broken)
    whole = math.lcm(*(config.tp * config.ring for config in configs))
    raise UsageError(
        f"{broken[0].nproc} processes do not divide into whole groups (tp x ring): {groups}",
        hint=f"use --nproc {whole} (NUM_GPUS={whole}) or a multiple of it, or other sizes (--tp, --ring); or leave these out"
        " (SKIP_FSDP2_TP=1, SKIP_RING=1, SKIP_COMBINED=1)",
    )


def taken_twice(inputs: int, steps: int, batch: int) -> int:
    """How many of so many inputs the steps take at least twice in whole rounds, so that one round's loss can be compared with the
    next one's; all where they take none twice.
    """
    return next((count for count in range(inputs, 0, -1) if 2 * steps_of_round(count, batch) <= steps), inputs)


def make_train_cells(
    configs: Sequence[ReplayConfig], base: ReplayConfig, facts: Facts, defaults: DumpRecord | None
) -> list[TrainCell]:
    """The baseline, the noise, and a cell for each configuration; one that cannot run here says why."""
    plain = _fitted(replace(base, backend="plain", zero_stage=0, tp=1, ring=1, dist_backend=None))
    planned = [
        ("baseline, fp32", BASELINE, plain, _BASELINE_LOG),
        ("plain, reordered", NOISE, plain, _NOISE_LOG),
        *((name_of_cell(config), ASKED, config, log_name(config, configs)) for config in configs),
    ]
    asked = [Combination(name, {}, config) for name, _, config, _ in planned]
    return [
        TrainCell(cell.index, cell.name, role, cell.config, log, cell.status, cell.reason)
        for cell, (_, role, _, log) in zip(make_cells(asked, facts, defaults), planned, strict=True)
    ]


def name_of_cell(config: ReplayConfig) -> str:
    """ "ZeRO 2", "fsdp2, tp 2, ring 2"."""
    backend = f"ZeRO {config.zero_stage}" if config.backend == "deepspeed" else config.backend
    return ", ".join([backend, *(f"{name} {value}" for name, value in _sizes(config))])


def log_name(config: ReplayConfig, configs: Sequence[ReplayConfig]) -> str:
    """What the ancestor called the log of one of these: "deepspeed_test.log", "fsdp2_tp2_ring2_test.log"."""
    stages = {one.zero_stage for one in configs if one.backend == config.backend == "deepspeed"}
    stage = [f"zero{config.zero_stage}"] if len(stages) > 1 else []
    return "_".join([config.backend, *stage, *(f"{name}{value}" for name, value in _sizes(config)), "test.log"])


def _sizes(config: ReplayConfig) -> list[tuple[str, int]]:
    return [(name, value) for name, value in (("tp", config.tp), ("ring", config.ring)) if value > 1]


def schedule(inputs: Sequence[ReplayInput], steps: int, batch: int, *, reverse: bool = False) -> tuple[ReplayInput, ...]:
    """The micro-batches of all steps, in order. reverse: each step's from its last to its first."""
    work = []
    for step in range(steps):
        chosen = [inputs[(step * batch + micro) % len(inputs)] for micro in range(batch)]
        for micro, item in enumerate(reversed(chosen) if reverse else chosen):
            work.append(replace(item, dump_id=input_id(step + 1, micro + 1, item.dump_id)))
    return tuple(work)


NUMBERS = {"NUM_GPUS": "nproc", "MAX_SAMPLES": "max_inputs", "TP_SIZE": "tp", "RING_SIZE": "ring", "MAX_LEN": "max_len"}
TEXTS = {"MODEL": "model", "LOG_DIR": "log_dir", "DATASET": "dataset"}
Skip = tuple[str, bool | None, bool | None]
"""A backend, and whether it has several ranks in tp and in a ring; None: either."""
SKIPS: dict[str, Skip] = {
    "SKIP_DEEPSPEED": ("deepspeed", None, None),
    "SKIP_FSDP2": ("fsdp2", False, False),
    "SKIP_FSDP2_TP": ("fsdp2", True, False),
    "SKIP_RING": ("fsdp2", False, True),
    "SKIP_COMBINED": ("fsdp2", True, True),
    FSDP_OFF: ("fsdp2", None, None),
}
IDLE = {"OUTPUT_DIR": "no checkpoint outlives a check (--log-dir is for logs)"}
WITHOUT_ROWS = {"DATASET": "inputs come from the store (--store, --where); --trainer sft takes it"}


@dataclass(frozen=True)
class AncestorNames:
    """values: by our names. skips: cells to leave out. took: variables with an effect. idle: the others, and why."""

    values: dict[str, Any]
    skips: list[Skip]
    took: dict[str, str]
    idle: dict[str, str]


def read_names(environment: Mapping[str, str], given: set[str], *, trains_on_rows: bool = False) -> AncestorNames:
    """What they come to, where `given` are the names that flags gave. UsageError for a number that is none.

    trains_on_rows: the trainer's own program runs too.
    """
    without = IDLE if trains_on_rows else IDLE | WITHOUT_ROWS
    found = AncestorNames({}, [], {}, {})
    for name in (*NUMBERS, *TEXTS, *SKIPS, *IDLE):
        ours, text = NUMBERS.get(name) or TEXTS.get(name), environment.get(name)
        if not text:
            continue
        if name in without:
            found.idle[name] = without[name]
        elif ours in given:
            found.idle[name] = f"--{str(ours).replace('_', '-')} was given"
        elif ours is None and text != "1":
            found.idle[name] = "only 1 skips, as in the test suite"
        else:
            found.took[name] = text
            if ours is None:
                found.skips.append(SKIPS[name])
            elif name in TEXTS:
                found.values[ours] = text
            elif text.isascii() and text.isdigit() and 1 <= int(text) < 10**9:
                found.values[ours] = int(text)
            else:
                raise UsageError(f"{name}={text!r:.40} is not a number of 1 or more", hint=f"unset {name}, or give the flag")
    return found


ROWS = 2
"""Rows of a micro-batch, in the cell with most lanes."""
KEYS = (("prompt", "answer"), ("question", "response"), ("instruction", "output"), ("input", "output"))
_PROGRAM = "sft"
_MADE_UP_LENGTH, _LENGTH = 256, 2048


def sft_cells(configs: Sequence[ReplayConfig], base: ReplayConfig, first: int) -> list[TrainCell]:
    """A cell for each configuration that shards, behind the one that they are held against; `first` is its index."""
    alone = replace(base, backend="deepspeed", zero_stage=2, nproc=1, tp=1, ring=1, packing=None, dist_backend=None)
    asked = [config for config in configs if config.backend != "plain"]
    missing = [name for name in TRAINER.programs[_PROGRAM].needs if importlib.util.find_spec(name) is None]
    cells: list[TrainCell] = []
    for config in (alone, *asked):
        role = SFT_BASELINE if config is alone else SFT
        name = f"train_sft, {'1 process' if config is alone else name_of_cell(config)}"
        log = "one_process_test.log" if config is alone else log_name(config, asked)
        lacks = TRAINER.sft_lacks(config.backend)
        if not _is_whole(config):
            lacks = f"{config.nproc} processes are not groups of {config.tp * config.ring}"
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
        raise UsageError(
            f"--dataset {data} is not a JSONL file: {error}", hint="a file with a JSON object in each line"
        ) from None
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
