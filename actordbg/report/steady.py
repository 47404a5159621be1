"""Which inputs are warm-up, and so no part of steady timing.

Two kinds, told apart: the first measured input of each worker start (a worker that was started again after a crash warms
up again), and every later input during which torch.compile built a graph (a new shape may mean a new graph).
"""

from __future__ import annotations

from collections.abc import Iterable

from actordbg.formats.replay_record import ResultRecord


def warm_up_of(results: Iterable[ResultRecord]) -> tuple[set[str], set[str]]:
    """Dump ids of the first measured input of each worker start, and of the other inputs that built a graph."""
    first: dict[tuple[int, int], ResultRecord] = {}
    compiling: set[str] = set()
    for one in sorted(results, key=lambda r: (r.started_at, r.slot)):
        if one.forward_s is None:
            continue
        if first.setdefault((one.worker, one.attempt), one) is not one and one.graphs:
            compiling.add(one.dump_id)
    return {one.dump_id for one in first.values()}, compiling
