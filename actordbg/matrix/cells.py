"""From combinations to the cells of a matrix, before anything runs: which can run here, which are known not to. Pure.

A cell that a rule refuses (`actordbg.actor.known_failures`), or whose settings contradict each other, is
`unavailable`: nothing is started for it, and its reason names the way out. A cell that is known to *fail* is run: a
table should say what happens here, not what somebody else saw; with `skip_known` it is left out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from actordbg.actor.known_failures import check_config
from actordbg.actor.rule import REFUSE, WARN, RuleHit
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
    """A cell for each combination: `not run` without a reason where it is to be run, else decided already.

    `defaults`: the record that open settings follow, of the first dump.
    """
    return [_cell(index, one, facts, defaults, skip_known) for index, one in enumerate(combined)]


def is_open(cell: MatrixCell) -> bool:
    """Whether it still has to be run."""
    return cell.status == NOT_RUN and not cell.reason


def known_to_fail(findings: Iterable[RuleHit]) -> RuleHit | None:
    """The warning that names a failure, by the id that the failure's signature has; None if there is none."""
    return next((one for one in findings if one.severity == WARN and explain(one.id) is not None), None)


@dataclass(frozen=True)
class Batch:
    """Cells that share a loaded Actor, by index, in the order in which they run."""

    key: Hashable
    cells: tuple[int, ...]


def batches(cells: Sequence[MatrixCell], facts: Facts, defaults: DumpRecord | None) -> list[Batch]:
    """The cells that are still to be run, put together by what they load; within one, those that do not compile first."""
    found: dict[Hashable, list[tuple[int, ReplayConfig]]] = {}
    for cell in cells:
        if is_open(cell):
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
        failing = known_to_fail(findings)
        known = tuple(finding.id for finding in findings if finding.severity != "info")
        if refusals:
            status, reason = UNAVAILABLE, with_way_out(refusals[0].message, refusals[0].ways_out)
        elif failing is not None and skip_known:
            reason = with_way_out(f"known to fail: {failing.message}", failing.ways_out)
    return MatrixCell(index, one.name, one.settings, status, one.config.to_dict(), reason=reason, known=known)


def with_way_out(message: str, ways: Sequence[str]) -> str:
    """The reason of a cell in one line."""
    ways = [way for way in ways if way]
    return f"{message}; way out: {'; or '.join(ways)}" if ways else message
