"""Which dumps belong to one call: the same step of a data-parallel run, as each rank saw it (`--align rank`). Pure.

Dumps of one call agree in run, role, actor, training step, number of the call and kind (log-prob pass or training pass), and
come from different ranks. Imported dumps have neither step nor number, and a run that was started again counts anew. Among
such dumps, *times* decide: two dumps are of one call when each is the other rank's nearest. A missing dump leaves its own
call incomplete and does not shift later ones. Nearest dumps may still be of two calls, when a condition such as seq_len<1000 took
one dump of each. They then lie much further apart than usual (`TOO_FAR`).

A call is *whole* when it has every rank that the selection has of this actor, and these ranks fill the lanes evenly: lane
`r % lanes` runs rank r. Other dumps are left out and counted. No dump is ever paired with another call's.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from actordbg.replay.selection import Row

CAPTURED = "capture"
NOT_ON_EVERY_RANK = "their call was not captured, or not selected, on every rank"
APART = "their times are too far apart to be of one call"
TOO_FAR, JITTER_S = 5.0, 0.25
"""Ranks of one call are at most TOO_FAR times as far apart as they usually are, or JITTER_S seconds."""


@dataclass
class Calls:
    """`whole`: the dumps of each call by rank, the calls by time. `left_out`: reason to number of dumps.

    `spreads`: for calls matched by time, how many seconds the dumps of one call lie apart.
    """

    whole: list[list[Row]] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    spreads: list[float] = field(default_factory=list)

    def how_matched(self) -> str:
        """How reliable the matching is, in words; "" where numbers of calls decided."""
        if not self.spreads:
            return ""
        return (
            f"{len(self.spreads):,} calls were put together by their times, because the dumps have no numbers of calls: their "
            f"ranks are {statistics.median(self.spreads):.2f} s apart, at most {max(self.spreads):.2f} s"
        )


def find_calls(rows: Iterable[Row], lanes: int) -> Calls:
    """Find the whole calls among the rows, for `lanes` lanes."""
    calls: Calls = Calls()
    actors: dict[Hashable, list[Row]] = defaultdict(list)
    for row in rows:
        actors[row.run, row.role, _actor_number(row)].append(row)
    for own in actors.values():
        ranks = sorted({row.rank for row in own})
        if _even(ranks, lanes):
            _match(own, ranks, calls)
        else:
            _leave_out(calls, f"ranks {', '.join(map(str, ranks))} do not fill {lanes} processes evenly", len(own))
    calls.whole.sort(key=lambda call: min((row.timestamp, row.dump_id) for row in call))
    return calls


def in_slots(call: Sequence[Row], lanes: int) -> list[Row]:
    """A whole call's dumps in order of slots: the dump at place i runs in lane i % lanes."""
    queues = [[row for row in call if row.rank % lanes == lane] for lane in range(lanes)]
    return [row for slot in zip(*queues, strict=True) for row in slot]


def _actor_number(row: Row) -> str | None:
    """Which actor of its process it was: an instance is called actor0-<token of the process>."""
    return row.instance.partition("-")[0] if row.instance else None


def _even(ranks: Sequence[int], lanes: int) -> bool:
    shares = [sum(rank % lanes == lane for rank in ranks) for lane in range(lanes)]
    return len(set(shares)) == 1


def _match(rows: list[Row], ranks: Sequence[int], calls: Calls) -> None:
    alike: dict[Hashable, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        alike[_kind(row)][row.rank].append(row)
    matched = 0
    near: list[tuple[float, list[Row]]] = []
    for by_rank in alike.values():
        found = _nearest(by_rank, ranks)
        matched += sum(map(len, found))
        if any(len(own) > 1 for own in by_rank.values()):
            near += [(_spread(call), call) for call in found]
        else:
            calls.whole += found
    usual = statistics.median_low([spread for spread, _ in near]) if near else 0.0
    limit = max(TOO_FAR * usual, JITTER_S)
    calls.whole += [call for spread, call in near if spread <= limit]
    calls.spreads += [spread for spread, _ in near if spread <= limit]
    _leave_out(calls, NOT_ON_EVERY_RANK, len(rows) - matched)
    _leave_out(calls, APART, sum(len(call) for spread, call in near if spread > limit))


def _kind(row: Row) -> Hashable:
    batch_size = None if row.source == CAPTURED else row.batch_size
    return row.step, row.call_index, row.grad_enabled, row.return_output, batch_size


def _nearest(by_rank: dict[int, list[Row]], ranks: Sequence[int]) -> list[list[Row]]:
    """The calls of dumps that differ only in rank and time, each as a list by rank."""
    if set(by_rank) != set(ranks):
        return []
    lines = [sorted(by_rank[rank], key=lambda row: (row.timestamp, row.dump_id)) for rank in ranks]
    moments = [[_seconds(row) for row in line] for line in lines]
    found = []
    for place, row in enumerate(lines[0]):
        call = [row]
        for line, times in zip(lines[1:], moments[1:], strict=True):
            there = _closest(times, moments[0][place])
            if _closest(moments[0], times[there]) == place:
                call.append(line[there])
        if len(call) == len(lines):
            found.append(call)
    return found


def _spread(call: Sequence[Row]) -> float:
    """Seconds between the first and the last of a call's dumps."""
    moments = [_seconds(row) for row in call]
    return max(moments) - min(moments)


def _closest(times: Sequence[float], moment: float) -> int:
    """The place of the value in `times` (rising) that is nearest to `moment`; the earlier of two."""
    after = bisect.bisect_left(times, moment)
    places = [place for place in (after - 1, after) if 0 <= place < len(times)]
    return min(places, key=lambda place: abs(times[place] - moment))


def _seconds(row: Row) -> float:
    return datetime.fromisoformat(row.timestamp.replace("Z", "+00:00")).timestamp()


def _leave_out(calls: Calls, reason: str, count: int) -> None:
    if count:
        calls.left_out[reason] = calls.left_out.get(reason, 0) + count
