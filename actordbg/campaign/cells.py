"""From combinations to the cells of a matrix, before anything runs: which cells can run here.

A cell is `unavailable` if a rule refuses it (`actordbg.actor.known_failures`), its settings contradict each other, or its
trainer is not installed. Nothing starts for it, and its reason names the way out. A cell that is known to *fail* does run,
because a table should show what happens here; `skip_known` leaves it out.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from actordbg.actor.known_failures import check_config, missing_trainer
from actordbg.actor.rules import REFUSE, WARN
from actordbg.actor.sharing import compiles, host_key
from actordbg.actor.signatures import explain
from actordbg.base.errors import UsageError
from actordbg.campaign.axes import Combination
from actordbg.config.choices import Facts, choose
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.records.matrix_record import NOT_RUN, UNAVAILABLE, MatrixCell


def make_cells(
    combined: Sequence[Combination], facts: Facts, defaults: DumpRecord | None, *, skip_known: bool = False
) -> list[MatrixCell]:
    """Make a cell of each combination. A cell that will run is `not run` and has no reason; any other is decided already.

    `defaults`: the record of the first dump, which decides open settings.
    """
    cells = []
    for index, combination in enumerate(combined):
        status, reason, known = UNAVAILABLE, "", tuple[str, ...]()
        config = combination.config
        try:
            findings = check_config(config, facts, defaults)
        except UsageError as problem:
            reason = with_way_out(problem.message, (problem.hint,))
        else:
            known = tuple(finding.id for finding in findings if finding.severity != "info")
            # a warning predicts a failure if its id is the signature of one
            failing = [finding for finding in findings if finding.severity == WARN and explain(finding.id) is not None]
            if refusal := next((finding for finding in findings if finding.severity == REFUSE), None):
                reason = with_way_out(refusal.message, refusal.ways_out)
            elif absent := missing_trainer(config, defaults):
                reason = with_way_out(absent.message, (absent.hint,))
            else:
                status = NOT_RUN
                if failing and skip_known:
                    reason = with_way_out(f"known to fail: {failing[0].message}", failing[0].ways_out)
        settings = combination.settings
        cells.append(MatrixCell(index, combination.name, settings, status, config.to_dict(), reason=reason, known=known))
    return cells


@dataclass(frozen=True)
class Batch:
    """Cells that share a loaded Actor, by index, in order of running."""

    key: Hashable
    cells: tuple[int, ...]


def batches(cells: Sequence[MatrixCell], facts: Facts, defaults: DumpRecord | None) -> list[Batch]:
    """The cells that must still run, grouped by the Actor that they load. Within a group, compiling cells run last."""
    by_key: dict[Hashable, list[int]] = {}
    open_cells = [(cell.index, ReplayConfig.from_dict(cell.config)) for cell in cells if cell.open]
    for index, config in sorted(open_cells, key=lambda cell: (compiles(cell[1]), cell[0])):
        by_key.setdefault(host_key(config, choose(config, defaults, facts)), []).append(index)
    return sorted((Batch(key, tuple(indices)) for key, indices in by_key.items()), key=lambda batch: min(batch.cells))


def with_way_out(message: str, ways: Sequence[str]) -> str:
    """A cell's reason and its ways out, in one line."""
    ways = [way for way in ways if way]
    return f"{message}; way out: {'; or '.join(ways)}" if ways else message
