"""Plan a training check: cells from options, and micro-batches from dumps.

Every cell runs the same `batch` micro-batches in each step. `batch` is a multiple of every cell's number of lanes; a cell with
fewer lanes accumulates more. Inputs are used in order, then again from the first.

Two cells are added. The *baseline* is the plain Actor in fp32, on the weights rounded to the dtype. *Noise* is the plain Actor
with each step's micro-batches in reverse order: it measures the effect of summation order.

Samples of a data set become dumps, one for each, of a run that is named by what is in it, `sft-<digest>`: the same samples of the
same tokenizer are written once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actordbg.base.errors import UsageError
from actordbg.campaign.cells import Axes, Combination, combinations, make_cells
from actordbg.campaign.train_document import steps_of_round
from actordbg.campaign.train_engine import input_id
from actordbg.catalog.query import count_dumps
from actordbg.config.choices import Facts
from actordbg.config.replay_config import LAUNCHERS, TINY, ReplayConfig
from actordbg.config.sources import FSDP_OFF
from actordbg.dumps.create import dump_of_inputs
from actordbg.formats.dump_record import DumpRecord
from actordbg.records.matrix_record import ASKED, BASELINE, NOISE, TrainCell
from actordbg.records.replay_record import ReplayInput
from actordbg.store.layout import Store
from actordbg.store.payload import encode_plain
from actordbg.trainers.trainer import TRAINER

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
        TrainCell(cell.index, cell.name, role=role, config=cell.config, log_name=log, status=cell.status, reason=cell.reason)
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
TEXTS = {"MODEL": "model", "LOG_DIR": "log_dir", "DATASET": "dataset", "OUTPUT_DIR": "output_dir"}
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


@dataclass(frozen=True)
class AncestorNames:
    """What the environment variables of the trainer's test suite request.

    values: by option name. skips: cells to skip. took: variables with an effect. idle: variables without effect, and why.
    """

    values: dict[str, Any]
    skips: list[Skip]
    took: dict[str, str]
    idle: dict[str, str]


def read_names(environment: Mapping[str, str], given: set[str]) -> AncestorNames:
    """Read the test suite's variables; the options in `given` take precedence. UsageError for an invalid number."""
    result = AncestorNames({}, [], {}, {})
    for name in (*NUMBERS, *TEXTS, *SKIPS):
        ours, text = NUMBERS.get(name) or TEXTS.get(name), environment.get(name)
        if not text:
            continue
        if ours in given:
            result.idle[name] = f"--{str(ours).replace('_', '-')} was given"
        elif ours == "dataset" and not Path(text).exists():
            result.idle[name] = f"there is no file or folder {text:.80}, so inputs come from the store (--store, --where)"
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
                raise UsageError(f"{name}={text!r:.40} is not a whole number above 0", hint=f"unset {name}, or use the flag")
    return result


MAX_LEN = 2048


def run_of_dataset(store: Store, source: Path, model: str, max_len: int | None, most: int) -> str:
    """Write up to `most` samples of a data set as dumps, unless they are there; return their run. Raises as `sft_rows` does."""
    if model == TINY:
        raise UsageError(
            "the built-in tiny model has no tokenizer for a data set", hint="pass --model PATH of a folder with a tokenizer"
        )
    TRAINER.prepare_process()
    longest = max_len or MAX_LEN
    rows = [{name: values.numpy() for name, values in row.items()} for row in TRAINER.sft_rows(source, model, longest, most)]
    if not rows:
        raise UsageError(f"{source} has no sample of at most {longest} tokens", hint="raise MAX_LEN")
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([values.tolist() for values in row.values()]).encode())
    run = f"sft-{digest.hexdigest()[:12]}"
    there = count_dumps(store.create(), f"run='{run}'")  # packed ones too
    for at, row in enumerate(rows[there:], there):
        made = dump_of_inputs(row, run, call_index=at, training=True, grad_enabled=True, origin={"dataset": source.name})
        store.put_dump(*encode_plain(*made), hint="make room, or name another store")
    return run
