"""From options to the cells of a training check, and from dumps to the micro-batches of its steps. Pure.

Every cell takes the same micro-batches in each step, whatever its number of lanes: `batch` of them, a multiple of the lanes of
each. A cell with fewer lanes accumulates more. Inputs are taken in order, and from the beginning again.

Two cells are added. The *baseline* is the plain Actor on the weights as the dtype has them, computed in fp32. *Noise* is the
plain Actor with each step's micro-batches in reverse: what the order of a sum does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actordbg.actor.known_failures import check_config
from actordbg.actor.rules import REFUSE
from actordbg.base.errors import UsageError
from actordbg.campaign.cells import Axes, combinations, with_way_out
from actordbg.campaign.train_document import steps_of_round
from actordbg.campaign.train_engine import input_id
from actordbg.config.choices import Facts
from actordbg.config.replay_config import LAUNCHERS, ReplayConfig
from actordbg.config.sources import FSDP_OFF
from actordbg.formats.dump_record import DumpRecord
from actordbg.records.matrix_record import ASKED, BASELINE, IMPOSSIBLE, NOISE, OPEN, TrainCell
from actordbg.records.replay_record import ReplayInput

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
    stages = {config.zero_stage for config in configs if config.backend == "deepspeed"}
    planned = [
        ("baseline, fp32", BASELINE, plain, _BASELINE_LOG),
        ("plain, reordered", NOISE, plain, _NOISE_LOG),
        *((name_of_cell(config), ASKED, config, log_name(config, stages)) for config in configs),
    ]
    cells = []
    for index, (name, role, config, log) in enumerate(planned):
        try:
            stops = [hit for hit in check_config(config, facts, defaults) if hit.severity == REFUSE]
            reason = with_way_out("; ".join(hit.message for hit in stops), stops[0].ways_out) if stops else ""
        except UsageError as error:
            reason = with_way_out(error.message, (error.hint,))
        cells.append(TrainCell(index, name, role, config.to_dict(), log, IMPOSSIBLE if reason else OPEN, reason))
    return cells


def name_of_cell(config: ReplayConfig) -> str:
    """ "ZeRO 2", "fsdp2, tp 2, ring 2"."""
    backend = f"ZeRO {config.zero_stage}" if config.backend == "deepspeed" else config.backend
    return ", ".join([backend, *(f"{name} {value}" for name, value in _sizes(config))])


def log_name(config: ReplayConfig, stages: set[int]) -> str:
    """What the ancestor called the log of this configuration: "deepspeed_test.log", "fsdp2_tp2_ring2_test.log"."""
    stage = [f"zero{config.zero_stage}"] if config.backend == "deepspeed" and len(stages) > 1 else []
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
                raise UsageError(f"{name}={text!r:.40} is no number of 1 or more", hint=f"unset {name}, or give the flag")
    return found
