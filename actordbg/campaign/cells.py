"""Turn combinations of settings into the cells of a matrix before anything runs, and decide which cells can run here.

A cell is `unavailable` if a rule refuses it (`actordbg.actor.rules`), its settings conflict, or its
trainer is not installed. It starts nothing, and its reason names a workaround. A cell that is known to *fail* does run,
because the table should show what happens here; `skip_known` skips it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from actordbg.actor.rules import REFUSE, WARN, check_config, missing_trainer
from actordbg.actor.sharing import host_key
from actordbg.actor.signatures import explain
from actordbg.base.errors import ActordbgError, UsageError
from actordbg.base.units import grouped
from actordbg.config.choices import Facts, choose
from actordbg.config.replay_config import AXES, ReplayConfig, has
from actordbg.config.sources import FSDP_OFF, fsdp_is_off
from actordbg.formats.dump_record import DumpRecord
from actordbg.records.matrix_record import NOT_RUN, UNAVAILABLE, MatrixCell


def make_cells(
    combined: Sequence[Combination], facts: Facts, defaults: DumpRecord | None, *, skip_known: bool = False
) -> list[MatrixCell]:
    """Make one cell per combination. A cell that will run is `not run` without a reason; any other is already decided.

    `defaults`: the record of the first dump, which decides open settings.
    """
    cells = []
    for index, combination in enumerate(combined):
        cell = MatrixCell(index, combination.name, combination.settings, NOT_RUN, combination.config.to_dict())
        cells.append(_decided(cell, combination.config, facts, defaults, skip_known))
    return cells


def _decided(cell: MatrixCell, config: ReplayConfig, facts: Facts, defaults: DumpRecord | None, skip_known: bool) -> MatrixCell:
    """Return the cell with the rules that apply to it, and with the reason if it does not run."""
    try:
        findings = check_config(config, facts, defaults)
    except UsageError as problem:
        return unavailable(cell, problem)
    cell = replace(cell, known=tuple(finding.id for finding in findings if finding.severity != "info"))
    if refusals := [finding for finding in findings if finding.severity == REFUSE]:
        message = "; ".join(refusal.message for refusal in refusals)
        return replace(cell, status=UNAVAILABLE, reason=with_way_out(message, refusals[0].ways_out))
    if absent := missing_trainer(config, defaults):
        return unavailable(cell, absent)
    # a warning predicts a failure if its id is also a failure signature
    failing = [finding for finding in findings if finding.severity == WARN and explain(finding.id) is not None]
    if failing and skip_known:
        return replace(cell, reason=with_way_out(f"known to fail: {failing[0].message}", failing[0].ways_out))
    return cell


def batches(cells: Sequence[MatrixCell], facts: Facts, defaults: DumpRecord | None) -> dict[Hashable, list[int]]:
    """Group the indices of the cells that must still run by the Actor that they load. Compiling cells run last in a batch."""
    todo = [(cell.index, ReplayConfig.from_dict(cell.config)) for cell in cells if cell.open]
    todo.sort(key=lambda cell: (cell[1].compiles, cell[0]))  # compiling cells last: little has to be undone
    by_key = grouped((host_key(config, choose(config, defaults, facts)), index) for index, config in todo)
    return dict(sorted(by_key.items(), key=lambda batch: min(batch[1])))


def unavailable(cell: MatrixCell, error: ActordbgError) -> MatrixCell:
    """Return the cell that this error keeps from running here."""
    return replace(cell, status=UNAVAILABLE, reason=with_way_out(error.message, (error.hint,)))


def with_way_out(message: str, ways: Sequence[str]) -> str:
    """Join a cell's reason and its workarounds into one line."""
    ways = [way for way in ways if way]
    return f"{message}; try: {'; or '.join(ways)}" if ways else message


Axes = dict[str, list[Any]]
"""Values by name of the setting, in the order of AXES."""


@dataclass(frozen=True)
class Combination:
    """A cell before it runs. `settings`: value per axis, None if the axis does not apply. `name`: the settings in words."""

    name: str
    settings: dict[str, Any]
    config: ReplayConfig


def parse_axes(given: Mapping[str, str | None]) -> Axes:
    """Parse the axis options (None: not given). If no option lists several values, add the default axes."""
    axes = {name: setting.list_of(text) for name, setting in AXES.items() if (text := given.get(name)) is not None}
    if all(len(values) == 1 for values in axes.values()):
        usual = {name: list(setting.axis_values) for name, setting in AXES.items() if setting.axis_values}
        axes = usual | axes
    return {name: axes[name] for name in AXES if name in axes}


def combinations(base: ReplayConfig, axes: Axes) -> list[Combination]:
    """Return the product of the axes over `base`, in order, without duplicate configurations.

    Raises UsageError for an axis that applies to no combination: the table would not answer the user's question.
    """
    if fsdp_is_off() and "fsdp2" in axes.get("backend", ()):
        raise UsageError(f"{FSDP_OFF} is set, and --backend lists fsdp2", hint=f"unset {FSDP_OFF}, or drop fsdp2 from --backend")
    by_config: dict[ReplayConfig, Combination] = {}
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        config = replace(base, **chosen)
        idle: dict[str, Any] = {name: axis.idle for name, axis in AXES.items() if not has(axis, config.backend, config.compile)}
        config = replace(config, **idle)  # reset settings that the backend ignores
        if "nproc" not in chosen and config.nproc < config.tp * config.ring:
            config = replace(config, nproc=config.tp * config.ring)
        settings = {name: value if has(AXES[name], config.backend, config.compile) else None for name, value in chosen.items()}
        by_config.setdefault(config, Combination(name_of(settings, axes), settings, config))
    for name, requested in axes.items():
        axis = AXES[name]
        if requested != [axis.idle] and all(combination.settings[name] is None for combination in by_config.values()):
            listed = ",".join(axis.typed(value) for value in requested)
            raise UsageError(
                f"{axis.flag} {listed} applies to none of these cells",
                hint=f"add {axis.needs}; or drop {axis.flag}",
            )
    return list(by_config.values())


def name_of(settings: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> str:
    """Name the settings in which this combination differs from the others; briefly, since a table column has 24 characters.

    Groups of one rank are omitted, and so is `deepspeed` beside a ZeRO stage.
    """
    known = {name: value for name, value in settings.items() if value is not None}
    brief = {name: value for name, value in known.items() if len(axes.get(name, ())) > 1}
    brief = {name: value for name, value in brief.items() if not (name in ("tp", "ring") and value == 1)}
    if "zero_stage" in brief:
        brief.pop("backend", None)
    return ", ".join(AXES[name].in_words(value, brief=True) for name, value in (brief or known).items())
