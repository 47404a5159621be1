"""From options to the cells of a training check, and from dumps to the micro-batches of its steps. Pure.

Every cell takes the same micro-batches in each step, whatever its number of lanes: `batch` of them, a multiple of the lanes of
each. A cell with fewer lanes accumulates more. Inputs are taken in order, and from the beginning again.

Two cells are added. The *baseline* is the plain Actor on the weights as the dtype has them, computed in fp32. *Noise* is the
plain Actor with each step's micro-batches in reverse: what the order of a sum does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from actordbg.actor.known_failures import check_config
from actordbg.actor.rule import REFUSE
from actordbg.base.errors import UsageError
from actordbg.campaign.ancestor_names import Skip
from actordbg.campaign.axes import Axes, combinations
from actordbg.campaign.train_engine import input_id
from actordbg.campaign.train_verdicts import steps_of_round
from actordbg.config.choices import Facts
from actordbg.config.replay_config import LAUNCHERS, ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.records.matrix_record import ASKED, BASELINE, IMPOSSIBLE, NOISE, TrainCell
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
        found = [one.config for one in combinations(base, axes)]
    else:
        sized = [{name: (sizes or {}).get(name, value) for name, value in one.items()} for one in ANCESTORS]
        found = list(dict.fromkeys(replace(base, **one) for one in sized))
    return [one for one in map(_fitted, found) if not any(_is_left_out(one, what) for what in skip)]


def _fitted(config: ReplayConfig) -> ReplayConfig:
    """Plain is one process; a ring needs packing."""
    if LAUNCHERS[config.backend] == "python":
        config = replace(config, nproc=1)
    return replace(config, packing=True) if config.ring > 1 and config.packing is None else config


def _is_left_out(config: ReplayConfig, skip: Skip) -> bool:
    backend, tp, ring = skip
    return config.backend == backend and tp in (None, config.tp > 1) and ring in (None, config.ring > 1)


def batch_of(configs: Sequence[ReplayConfig], accumulation: int) -> int:
    """Micro-batches of a step: `accumulation` for each lane of the cell that has most, and a multiple of the lanes of all."""
    lanes = [_lanes(one) for one in configs if _lanes(one)]
    return math.lcm(*lanes) * accumulation if lanes else accumulation


def _lanes(config: ReplayConfig) -> int:
    """0 for processes that no groups of tp x ring divide."""
    return 0 if config.nproc % (config.tp * config.ring) else config.lanes


def require_whole_groups(configs: Sequence[ReplayConfig], axes: Axes) -> None:
    """UsageError where tp x ring does not divide the processes of a configuration that is there by default, or of all that lists
    name. Of some that lists name, their cells say so.
    """
    broken = [one for one in configs if not _lanes(one)]
    if not broken or (axes and len(broken) < len(configs)):
        return
    groups = "; ".join(f"{name_of_cell(one)} takes groups of {one.tp * one.ring}" for one in broken)
    whole = math.lcm(*(one.tp * one.ring for one in configs))
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
    cells = [
        _cell(0, "baseline, fp32", BASELINE, plain, _BASELINE_LOG, facts, defaults),
        _cell(1, "plain, reordered", NOISE, plain, _NOISE_LOG, facts, defaults),
    ]
    stages = {one.zero_stage for one in configs if one.backend == "deepspeed"}
    for config in configs:
        cells.append(_cell(len(cells), name_of_cell(config), ASKED, config, log_name(config, stages), facts, defaults))
    return cells


def _cell(
    index: int, name: str, role: str, config: ReplayConfig, log: str, facts: Facts, defaults: DumpRecord | None
) -> TrainCell:
    cell = TrainCell(index, name, role, config.to_dict(), log)
    try:
        stops = [hit for hit in check_config(config, facts, defaults) if hit.severity == REFUSE]
    except UsageError as error:
        return replace(cell, status=IMPOSSIBLE, reason=f"{error.message}; way out: {error.hint}")
    if not stops:
        return cell
    told = "; ".join(hit.message for hit in stops)
    return replace(cell, status=IMPOSSIBLE, reason=f"{told}; way out: {'; or '.join(stops[0].ways_out)}")


def name_of_cell(config: ReplayConfig) -> str:
    """ "ZeRO 2", "fsdp2, tp 2, ring 2"."""
    parts = [f"ZeRO {config.zero_stage}" if config.backend == "deepspeed" else config.backend]
    parts += [f"{name} {value}" for name, value in (("tp", config.tp), ("ring", config.ring)) if value > 1]
    return ", ".join(parts)


def log_name(config: ReplayConfig, stages: set[int]) -> str:
    """What the ancestor called the log of this configuration: "deepspeed_test.log", "fsdp2_tp2_ring2_test.log"."""
    parts = [config.backend]
    if config.backend == "deepspeed" and (len(stages) > 1):
        parts.append(f"zero{config.zero_stage}")
    parts += [f"{name}{value}" for name, value in (("tp", config.tp), ("ring", config.ring)) if value > 1]
    return "_".join([*parts, "test.log"])


def schedule(inputs: Sequence[ReplayInput], steps: int, batch: int, *, reverse: bool = False) -> tuple[ReplayInput, ...]:
    """The micro-batches of all steps, in order. reverse: each step's from its last to its first."""
    work = []
    for step in range(steps):
        chosen = [inputs[(step * batch + micro) % len(inputs)] for micro in range(batch)]
        for micro, item in enumerate(reversed(chosen) if reverse else chosen):
            work.append(replace(item, dump_id=input_id(step + 1, micro + 1, item.dump_id)))
    return tuple(work)
