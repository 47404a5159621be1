"""Plan a training check: cells from options, micro-batches from dumps, and runs of the trainer's own program.

Every cell runs the same `batch` micro-batches in each step. `batch` is a multiple of every cell's number of lanes; a cell with
fewer lanes accumulates more. Inputs are used in order, then again from the first.

Two cells are added. The *baseline* is the plain Actor in fp32, on the weights rounded to the dtype. *Noise* is the plain Actor
with each step's micro-batches in reverse order: it measures the effect of summation order.

`train-check --trainer sft` adds the trainer's own supervised training under the same configurations, judged by its log. That
program cannot read recorded calls: it trains on rows of text, from `--dataset` or synthetic, and prints a loss with three digits.
So it is compared with itself on one process, over the same rows in the same steps, by the test suite's three criteria: it
completes, its loss falls, and first, mean and last loss are within the threshold. It supports bf16 and fp16; an fp32 check runs
it in bf16. Every cell has the same rows in a step and the same number of micro-batches: with fewer lanes they are larger. A cell
that this release of the trainer cannot train says why (`sft_cells`, `run_sft`).
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

SUITE_CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {"backend": "plain"},
    {"backend": "deepspeed", "zero_stage": 2},
    {"backend": "fsdp2"},
    {"backend": "fsdp2", "tp": 2},
    {"backend": "fsdp2", "ring": 2},
    {"backend": "fsdp2", "tp": 2, "ring": 2},
)
"""The default configurations: the plain Actor, and the five of the trainer's backend test suite."""
_BASELINE_LOG, _NOISE_LOG = "baseline_fp32_test.log", "plain_reordered_test.log"


def configurations(
    base: ReplayConfig, axes: Axes, skip: Sequence[Skip] = (), sizes: Mapping[str, int] | None = None
) -> list[ReplayConfig]:
    """List the configurations to train, without those to `skip`. `sizes`: tp and ring if no axis is given."""
    if axes:
        configs = [combination.config for combination in combinations(base, axes)]
    else:
        sized = [{name: (sizes or {}).get(name, value) for name, value in settings.items()} for settings in SUITE_CONFIGURATIONS]
        configs = list(dict.fromkeys(replace(base, **settings) for settings in sized))
    return [
        config
        for config in map(_fitted, configs)
        if not any(
            config.backend == backend and tp in (None, config.tp > 1) and ring in (None, config.ring > 1)
            for backend, tp, ring in skip
        )
    ]


def _fitted(config: ReplayConfig) -> ReplayConfig:
    """Set what a configuration implies: plain runs one process, ring attention needs packing."""
    if LAUNCHERS[config.backend] == "python":
        config = replace(config, nproc=1)
    return replace(config, packing=True) if config.ring > 1 and config.packing is None else config


def batch_of(configs: Sequence[ReplayConfig], accumulation: int) -> int:
    """Return the micro-batches per step: `accumulation` times the least common multiple of the cells' lanes."""
    return math.lcm(*(config.lanes for config in configs if _has_whole_groups(config))) * accumulation


def _has_whole_groups(config: ReplayConfig) -> bool:
    """Return whether the processes divide into whole groups of tp x ring."""
    return config.nproc % (config.tp * config.ring) == 0


def require_whole_groups(configs: Sequence[ReplayConfig], axes: Axes) -> None:
    """Raise UsageError if tp x ring does not divide the processes of a default configuration, or of any configuration listed.

    If it divides them for some listed configurations, the cells of the others say so.
    """
    uneven = [config for config in configs if not _has_whole_groups(config)]
    if not uneven or (axes and len(uneven) < len(configs)):
        return
    groups = "; ".join(f"{name_of_cell(config)} needs groups of {config.tp * config.ring}" for config in uneven)
    whole = math.lcm(*(config.tp * config.ring for config in configs))
    raise UsageError(
        f"{uneven[0].nproc} processes do not divide into whole groups (tp x ring): {groups}",
        hint=f"use --nproc {whole} (NUM_GPUS={whole}) or a multiple of it, or other sizes (--tp, --ring); or skip these"
        " (SKIP_FSDP2_TP=1, SKIP_RING=1, SKIP_COMBINED=1)",
    )


def taken_twice(inputs: int, steps: int, batch: int) -> int:
    """Return how many inputs to train on: the most, up to `inputs`, for which the steps hold two whole rounds.

    After a round the same micro-batches repeat, so the losses of two rounds can be compared. Return `inputs` if no number fits.
    """
    return next((count for count in range(inputs, 0, -1) if 2 * steps_of_round(count, batch) <= steps), inputs)


def make_train_cells(
    configs: Sequence[ReplayConfig], base: ReplayConfig, facts: Facts, defaults: DumpRecord | None
) -> list[TrainCell]:
    """Make the baseline, noise and configuration cells; a cell that cannot run here says why."""
    plain = _fitted(replace(base, backend="plain", zero_stage=0, tp=1, ring=1, dist_backend=None))
    planned = [
        ("baseline, fp32", BASELINE, plain, _BASELINE_LOG),
        ("plain, reordered", NOISE, plain, _NOISE_LOG),
        *((name_of_cell(config), ASKED, config, log_name(config, configs)) for config in configs),
    ]
    requested = [Combination(name, {}, config) for name, _, config, _ in planned]
    return [
        TrainCell(cell.index, cell.name, role, cell.config, log, cell.status, cell.reason)
        for cell, (_, role, _, log) in zip(make_cells(requested, facts, defaults), planned, strict=True)
    ]


def name_of_cell(config: ReplayConfig) -> str:
    """Name a configuration: "ZeRO 2", "fsdp2, tp 2, ring 2"."""
    backend = f"ZeRO {config.zero_stage}" if config.backend == "deepspeed" else config.backend
    return ", ".join([backend, *(f"{name} {value}" for name, value in _sizes(config))])


def log_name(config: ReplayConfig, configs: Sequence[ReplayConfig]) -> str:
    """Return the test suite's name for a configuration's log: "deepspeed_test.log", "fsdp2_tp2_ring2_test.log"."""
    stages = {other.zero_stage for other in configs if other.backend == config.backend == "deepspeed"}
    stage = [f"zero{config.zero_stage}"] if len(stages) > 1 else []
    return "_".join([config.backend, *stage, *(f"{name}{value}" for name, value in _sizes(config)), "test.log"])


def _sizes(config: ReplayConfig) -> list[tuple[str, int]]:
    return [(name, value) for name, value in (("tp", config.tp), ("ring", config.ring)) if value > 1]


def schedule(inputs: Sequence[ReplayInput], steps: int, batch: int, *, reverse: bool = False) -> tuple[ReplayInput, ...]:
    """List the micro-batches of all steps, in order. reverse: reverse the order within each step."""
    work = []
    for step in range(steps):
        chosen = [inputs[(step * batch + micro) % len(inputs)] for micro in range(batch)]
        for micro, item in enumerate(reversed(chosen) if reverse else chosen):
            work.append(replace(item, dump_id=input_id(step + 1, micro + 1, item.dump_id)))
    return tuple(work)


# Environment variables of the trainer's backend test suite, which `read_names` reads
NUMBERS = {"NUM_GPUS": "nproc", "MAX_SAMPLES": "max_inputs", "TP_SIZE": "tp", "RING_SIZE": "ring", "MAX_LEN": "max_len"}
TEXTS = {"MODEL": "model", "LOG_DIR": "log_dir", "DATASET": "dataset"}
Skip = tuple[str, bool | None, bool | None]
"""A backend, and whether tp and ring exceed 1; None: either."""
SKIPS: dict[str, Skip] = {
    "SKIP_DEEPSPEED": ("deepspeed", None, None),
    "SKIP_FSDP2": ("fsdp2", False, False),
    "SKIP_FSDP2_TP": ("fsdp2", True, False),
    "SKIP_RING": ("fsdp2", False, True),
    "SKIP_COMBINED": ("fsdp2", True, True),
    FSDP_OFF: ("fsdp2", None, None),
}
"""What each variable skips, if it is 1."""
IDLE = {"OUTPUT_DIR": "no checkpoint outlives a check (--log-dir is for logs)"}
"""Variables that are accepted and have no effect, and why."""
WITHOUT_ROWS = {"DATASET": "inputs come from the store (--store, --where); --trainer sft takes it"}
"""Further such variables, unless the trainer's own program runs on rows of text."""


@dataclass(frozen=True)
class AncestorNames:
    """What the environment variables of the trainer's test suite request.

    values: by option name. skips: cells to skip. took: variables with an effect. idle: variables without effect, and why.
    """

    values: dict[str, Any]
    skips: list[Skip]
    took: dict[str, str]
    idle: dict[str, str]


def read_names(environment: Mapping[str, str], given: set[str], *, trains_on_rows: bool = False) -> AncestorNames:
    """Read the test suite's variables; the options in `given` take precedence. UsageError for an invalid number.

    trains_on_rows: whether the trainer's own program also runs.
    """
    ignored = IDLE if trains_on_rows else IDLE | WITHOUT_ROWS
    result = AncestorNames({}, [], {}, {})
    for name in (*NUMBERS, *TEXTS, *SKIPS, *IDLE):
        ours, text = NUMBERS.get(name) or TEXTS.get(name), environment.get(name)
        if not text:
            continue
        if name in ignored:
            result.idle[name] = ignored[name]
        elif ours in given:
            result.idle[name] = f"--{str(ours).replace('_', '-')} was given"
        elif ours is None and text != "1":
            result.idle[name] = "only 1 skips, as in the test suite"
        else:
            result.took[name] = text
            if ours is None:
                result.skips.append(SKIPS[name])
            elif name in TEXTS:
                result.values[ours] = text
            elif text.isascii() and text.isdigit() and 1 <= int(text) < 10**9:
                result.values[ours] = int(text)
            else:
                raise UsageError(f"{name}={text!r:.40} is not a number of 1 or more", hint=f"unset {name}, or use the flag")
    return result


ROWS = 2
"""Rows per micro-batch, in the cell with the most lanes."""
KEYS = (("prompt", "answer"), ("question", "response"), ("instruction", "output"), ("input", "output"))
"""Pairs of columns, prompt and answer, that a data set may have."""
_PROGRAM = "sft"
_SYNTHETIC_LENGTH, _DATASET_LENGTH = 256, 2048


def sft_cells(configs: Sequence[ReplayConfig], base: ReplayConfig, first: int) -> list[TrainCell]:
    """Make a cell per sharding configuration, after their one-process baseline, whose index is `first`."""
    alone = replace(base, backend="deepspeed", zero_stage=2, nproc=1, tp=1, ring=1, packing=None, dist_backend=None)
    sharded = [config for config in configs if config.backend != "plain"]
    missing = [name for name in TRAINER.programs[_PROGRAM].needs if importlib.util.find_spec(name) is None]
    cells: list[TrainCell] = []
    for config in (alone, *sharded):
        role = SFT_BASELINE if config is alone else SFT
        name = f"train_sft, {'1 process' if config is alone else name_of_cell(config)}"
        log = "one_process_test.log" if config is alone else log_name(config, sharded)
        lacks = TRAINER.sft_lacks(config.backend)
        if not _has_whole_groups(config):
            lacks = f"{config.nproc} processes do not divide into groups of {config.tp * config.ring}"
        lacks = lacks or (f"train_sft needs {', '.join(missing)}" if missing else "")
        status = IMPOSSIBLE if lacks else OPEN
        cells.append(TrainCell(first + len(cells), name, role, config.to_dict(), log, status, lacks))
    if not any(cell.status == OPEN for cell in cells[1:]):
        cells[0] = replace(cells[0], status=IMPOSSIBLE, reason="there is no configuration to compare it with")
    return cells


def run_sft(cell: TrainCell, record: TrainCheckRecord, log: Path, on_step: Callable[[], None]) -> TrainCell:
    """Train the cell; return it with status, reason and the loss of each step. `on_step` is called after each step.

    No process and no checkpoint is left behind.
    """
    program = TRAINER.programs[_PROGRAM]
    try:
        make_folder(log.parent)
    except OSError as error:
        raise StoreProblem(f"cannot write {log}: {error.strerror}", hint="name another folder with --log-dir") from None
    reason = ""
    with tempfile.TemporaryDirectory(prefix="actordbg-sft-") as name:
        order = _sft_order(cell, record, Path(name))
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
    """Return the names of the prompt and answer columns of a JSONL file. Raises UsageError for any other file."""
    try:
        with data.open(encoding="utf-8") as file:
            row = json.loads(file.readline())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--dataset {data} is not a JSONL file: {error}", hint="use a file with a JSON object in each line"
        ) from None
    matches = [pair for pair in KEYS if isinstance(row, dict) and all(isinstance(row.get(key), str) for key in pair)]
    if not matches:
        known = "; ".join(" and ".join(pair) for pair in KEYS)
        raise UsageError(f"--dataset {data}: its first row has no known pair of texts", hint=f"use one of: {known}")
    return matches[0]


def _sft_order(cell: TrainCell, record: TrainCheckRecord, folder: Path) -> SftOrder:
    """Choose rows and sizes such that every cell of the check has the same rows in each step."""
    config, options, training = ReplayConfig.from_dict(cell.config), record.options[SFT], record.training
    sharded = [ReplayConfig.from_dict(other.config) for other in record.cells if other.role == SFT and other.status != IMPOSSIBLE]
    rows_at_once = ROWS * math.lcm(*(shared.lanes for shared in sharded))
    batch = rows_at_once * int(options["accumulation"])
    if options["data"] is None:
        synthetic_rows = batch * (options.get(ROUND) or record.steps)
        assets = build_assets(folder, prompts=1, conversations=synthetic_rows)
        data, rows, longest, keys = assets.conversations, synthetic_rows, _SYNTHETIC_LENGTH, KEYS[0]
        model = assets.model if config.model == TINY else Path(config.model)
    else:
        data, model, longest = Path(options["data"]), Path(config.model), _DATASET_LENGTH
        keys, rows = keys_of(data), min(batch * record.steps, _lines(data))
        model = build_assets(folder, prompts=1, conversations=1).model if config.model == TINY else model
    return SftOrder(
        model, data, keys, config.nproc, config.zero_stage, config.tp, config.ring, options["dtype"], options["attn"], batch,
        rows_at_once // config.lanes, rows, math.ceil(batch * record.steps / rows), options["max_len"] or longest,
        training["lr"], training["weight_decay"], training["max_norm"], seed=42,
        gradient_checkpointing=bool(training.get("gradient_checkpointing")),
    )  # fmt: skip


def _last_error(log: Path) -> str:
    """Return the last error line of the program's log, skipping the launcher's lines, which begin with a timestamp."""
    lines = read_regular(log).decode(errors="replace").splitlines()
    errors = [line.strip() for line in lines if "rror" in line and not line.startswith("[")]
    return f": {errors[-1]}"[:400] if errors else ""


def _lines(data: Path) -> int:
    with data.open("rb") as file:
        return sum(1 for line in file if line.strip())


def steps_of_log(log: Path, count: int) -> tuple[TrainStep, ...]:
    """Read the loss of each step: the mean over its micro-batches, for releases that print a loss per micro-batch."""
    series = read_log(str(log)).series.get(TRAINER.losses[0], {}).get(BAR)
    values = list(series.points.values()) if series else []
    each = max(1, len(values) // count)
    whole = [values[at : at + each] for at in range(0, len(values) - each + 1, each)]
    losses = [math.fsum(step) / each if all(map(math.isfinite, step)) else None for step in whole[:count]]
    return tuple(TrainStep(step, loss, None, None) for step, loss in enumerate(losses, 1))
