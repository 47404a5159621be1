"""From combinations to the cells of a matrix, before anything runs: which cells can run here.

A cell is `unavailable` if a rule refuses it (`actordbg.actor.known_failures`), its settings contradict each other, or its
trainer is not installed. Nothing starts for it, and its reason names the way out. A cell that is known to *fail* does run,
because a table should show what happens here; `skip_known` leaves it out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from actordbg.actor.find_trainer import missing_trainer
from actordbg.actor.known_failures import check_config
from actordbg.actor.rule import REFUSE, WARN
from actordbg.actor.sharing import compiles, host_key
from actordbg.actor.signatures import explain
from actordbg.base.errors import UsageError
from actordbg.config.choices import Facts, choose
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.formats.matrix_record import NOT_RUN, UNAVAILABLE, MatrixCell
from actordbg.matrix.axes import Combination


def make_cells(
    combined: Sequence[Combination], facts: Facts, defaults: DumpRecord | None, *, skip_known: bool = False
) -> list[MatrixCell]:
    """A cell for each combination. A cell that will run is `not run` and has no reason; any other is decided already.

    `defaults`: the record of the first dump, which decides open settings.
    """
    return [_cell(index, one, facts, defaults, skip_known) for index, one in enumerate(combined)]


@dataclass(frozen=True)
class Batch:
    """Cells that share a loaded Actor, by index, in order of running."""

    key: Hashable
    cells: tuple[int, ...]


def batches(cells: Sequence[MatrixCell], facts: Facts, defaults: DumpRecord | None) -> list[Batch]:
    """The cells that must still run, grouped by the Actor that they load. Within a group, compiling cells run last."""
    found: dict[Hashable, list[tuple[int, ReplayConfig]]] = {}
    for cell in cells:
        if cell.open:
            config = ReplayConfig.from_dict(cell.config)
            found.setdefault(host_key(config, choose(config, defaults, facts)), []).append((cell.index, config))
    return [
        Batch(key, tuple(index for index, config in sorted(members, key=lambda one: compiles(one[1]))))
        for key, members in found.items()
    ]


def _cell(index: int, one: Combination, facts: Facts, defaults: DumpRecord | None, skip_known: bool) -> MatrixCell:
    status, reason = NOT_RUN, ""
    known: tuple[str, ...] = ()
    try:
        findings = check_config(one.config, facts, defaults)
    except UsageError as problem:
        status, reason = UNAVAILABLE, with_way_out(problem.message, (problem.hint,))
    else:
        refusals = [finding for finding in findings if finding.severity == REFUSE]
        # a warning predicts a failure if its id is the signature of one
        failing = next((one for one in findings if one.severity == WARN and explain(one.id) is not None), None)
        known = tuple(finding.id for finding in findings if finding.severity != "info")
        if refusals:
            status, reason = UNAVAILABLE, with_way_out(refusals[0].message, refusals[0].ways_out)
        elif absent := missing_trainer(one.config, defaults):
            status, reason = UNAVAILABLE, with_way_out(absent.message, (absent.hint,))
        elif failing is not None and skip_known:
            reason = with_way_out(f"known to fail: {failing.message}", failing.ways_out)
    return MatrixCell(index, one.name, one.settings, status, one.config.to_dict(), reason=reason, known=known)


def with_way_out(message: str, ways: Sequence[str]) -> str:
    """A cell's reason and its ways out, in one line."""
    ways = [way for way in ways if way]
    return f"{message}; way out: {'; or '.join(ways)}" if ways else message
