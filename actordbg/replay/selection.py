"""Select the inputs of a replay, by a condition or by file name, and the record that decides open settings.

**Which dumps belong to one call** (`find_calls`, pure): the same step of a data-parallel run, as each rank saw it (`--align
rank`). Dumps of one call agree in run, role, actor, training step, number of the call and kind (log-prob pass or training pass),
and come from different ranks. Imported dumps have neither step nor number, and a restarted run counts from zero. Among
such dumps, *times* decide: two dumps are of one call if each is the other rank's nearest. A missing dump leaves only its call
incomplete and does not shift later calls. Nearest dumps may still be of two calls, if a condition such as seq_len<1000 selected
one dump of each. They are then much further apart than usual (`TOO_FAR`).

A call is *whole* if it has every rank that the selection has of this actor, and these ranks fill the lanes evenly: lane
`r % lanes` runs rank r. Other dumps are left out and counted. No dump is ever paired with another call's.
"""

from __future__ import annotations

import bisect
import contextlib
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

from actordbg.base.errors import StoreProblem, Unsupported, UsageError
from actordbg.config.choices import adapter_of
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import SUFFIX, DumpRecord
from actordbg.records.replay_record import ReplayInput
from actordbg.store.layout import Store
from actordbg.store.pack_bytes import PACK_SUFFIX
from actordbg.store.places import open_pack, packed_place, read_record, split_place

if TYPE_CHECKING:
    from actordbg.catalog.columns import DumpRow

PICKLES = (".pkl", ".pickle")
"""Suffixes of files that the commands import before selecting."""


Row: TypeAlias = "DumpRow"
"""A dump as planning sees it: selected from the catalog, or named as a file."""


def defaults_of(root: Path, inputs: Sequence[ReplayInput | Row]) -> DumpRecord | None:
    """Return the record that decides open settings: that of the first input with a readable header, in every process."""
    for item in inputs:
        with contextlib.suppress(StoreProblem):
            return read_record(root / item.path)
    return None


def require_one_trainer(rows: Iterable[Row], configs: Iterable[ReplayConfig]) -> None:
    """Refuse rows that several trainers recorded, unless every configuration replays through rows.

    A replay runs one trainer's code.
    """
    counts = Counter(row.adapter for row in rows)
    through = {config.through for config in configs if not config.truth}
    if len(counts) < 2 or not ("trainer" in through or (None in through and None in counts)):
        return
    recorded = sorted(counts.items(), key=lambda pair: (pair[0] or "", pair[1]))
    whose = ", ".join(f"{count:,} by adapter {name}" if name else f"{count:,} without an adapter" for name, count in recorded)
    narrower = " or ".join(f"\"adapter='{name}'\"" if name else '"adapter is null"' for name, _ in recorded)
    raise Unsupported(
        f"these inputs were recorded by several trainers ({whose}), and a replay runs one trainer's code",
        hint=f"replay one trainer's at a time (--where {narrower}), or pass --through rows, which needs no trainer",
    )


def rows_of_files(store: Store, files: Sequence[Path]) -> list[Row]:
    """Return the named dumps, each once: dump files, dumps of a pack (`FILE.pack#ID`), or all dumps of a pack.

    A row's `path` is relative to the store if the dump is in it, else absolute. UsageError for any other file, CorruptDump
    for a damaged one.
    """
    rows: dict[str, Any] = {}
    root = store.root.resolve()
    for place in (place for file in files for place in _places(file)):
        record = read_record(place)
        return_output = record.arguments.get("return_output")
        path = place.parent.resolve() / place.name
        inside = path.relative_to(root).as_posix() if path.is_relative_to(root) else str(place)
        columns: dict[str, Any] = {"path": inside, "adapter": adapter_of(record.actor)}
        columns["return_output"] = return_output if isinstance(return_output, bool) else None
        rows.setdefault(record.dump_id, SimpleNamespace(**vars(record) | columns))
    return list(rows.values())


def _places(file: Path) -> list[Path]:
    """Return the dumps that a file name refers to."""
    packed = split_place(file)
    path = (Path(packed[0]) if packed else file).absolute()
    path = path.resolve() if path.is_symlink() else path  # a link stands for its target
    if not path.is_file():
        raise UsageError(f"--input-file {file} is not a file", hint="run `actordbg dump ls --json` for every dump's path")
    if packed:
        return [Path(packed_place(str(path), packed[1]))]
    if path.name.endswith(PACK_SUFFIX):
        return [Path(packed_place(str(path), dump_id)) for dump_id in open_pack(path).dump_ids]
    if not path.name.endswith(SUFFIX):
        raise UsageError(
            f"--input-file {file} is neither a dump file (*{SUFFIX}) nor a pack (*{PACK_SUFFIX})",
            hint="name files below store/dumps or store/packs",
        )
    return [path]


def rows_of(store: Store, where: str | None, files: Sequence[Path], order: str, max_inputs: int | None) -> Sequence[Row]:
    """Return the dumps that --where selects or --input-file names; UsageError if both are given.

    If the catalog sorts as the plan does, return only as many as the plan needs for `max_inputs`.
    """
    from actordbg.catalog.query import open_fresh, select_dumps

    if files and where is not None:
        raise UsageError("--where and --input-file cannot be combined", hint="use only one")
    if files:
        return rows_of_files(store, files)
    catalog = open_fresh(store, where)
    if max_inputs is not None and order != "shuffle":
        limit = 2 * max_inputs + 100
        rows = select_dumps(catalog, where, order=order, limit=limit)
        if len(rows) < limit or sum(row.replayable for row in rows) >= max_inputs:
            return rows
    return select_dumps(catalog, where)


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
    left_out: Counter[str] = field(default_factory=Counter)
    spreads: list[float] = field(default_factory=list)

    def how_matched(self) -> str:
        """Describe how reliable the matching is; "" if call numbers decided."""
        if not self.spreads:
            return ""
        return (
            f"{len(self.spreads):,} calls were matched by time, because the dumps have no call numbers: their "
            f"ranks are {statistics.median(self.spreads):.2f} s apart, at most {max(self.spreads):.2f} s"
        )


def find_calls(rows: Iterable[Row], lanes: int) -> Calls:
    """Find the whole calls among the rows for `lanes` lanes, and count the dumps left out."""
    calls: Calls = Calls()
    actors: dict[Hashable, list[Row]] = defaultdict(list)
    for row in rows:  # an instance is called actor0-<token of the process>
        name = row.instance.partition("-")[0] if row.instance else None
        actors[row.run, row.role, name].append(row)
    for own in actors.values():
        ranks = sorted({row.rank for row in own})
        if len({sum(rank % lanes == lane for rank in ranks) for lane in range(lanes)}) == 1:
            _match(own, ranks, calls)
        else:
            calls.left_out[f"ranks {', '.join(map(str, ranks))} do not fill {lanes} processes evenly"] += len(own)
    calls.left_out = +calls.left_out  # without reasons that left out nothing
    calls.whole.sort(key=lambda call: min((row.timestamp, row.dump_id) for row in call))
    return calls


def _match(rows: list[Row], ranks: Sequence[int], calls: Calls) -> None:
    alike: dict[Hashable, dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        batch_size = None if row.source == CAPTURED else row.batch_size
        kind = row.step, row.call_index, row.grad_enabled, row.return_output, batch_size
        alike[kind][row.rank].append(row)
    matched = 0
    near: list[tuple[float, list[Row]]] = []
    for by_rank in alike.values():
        matches = _nearest(by_rank, ranks)
        matched += sum(map(len, matches))
        if any(len(own) > 1 for own in by_rank.values()):
            near += [(_spread(call), call) for call in matches]
        else:
            calls.whole += matches
    usual = statistics.median_low([spread for spread, _ in near]) if near else 0.0
    limit = max(TOO_FAR * usual, JITTER_S)
    calls.whole += [call for spread, call in near if spread <= limit]
    calls.spreads += [spread for spread, _ in near if spread <= limit]
    calls.left_out[NOT_ON_EVERY_RANK] += len(rows) - matched
    calls.left_out[APART] += sum(len(call) for spread, call in near if spread > limit)


def _nearest(by_rank: dict[int, list[Row]], ranks: Sequence[int]) -> list[list[Row]]:
    """Match dumps that differ only in rank and time into calls, each a list by rank."""
    if set(by_rank) != set(ranks):
        return []
    lines = [sorted(by_rank[rank], key=lambda row: (row.timestamp, row.dump_id)) for rank in ranks]
    moments = [[_seconds(row) for row in line] for line in lines]
    matches = []
    for place, row in enumerate(lines[0]):
        call = [row]
        for line, times in zip(lines[1:], moments[1:], strict=True):
            there = _closest(times, moments[0][place])
            if _closest(moments[0], times[there]) == place:
                call.append(line[there])
        if len(call) == len(lines):
            matches.append(call)
    return matches


def _spread(call: Sequence[Row]) -> float:
    """Return the seconds between the first and the last dump of a call."""
    moments = [_seconds(row) for row in call]
    return max(moments) - min(moments)


def _closest(times: Sequence[float], moment: float) -> int:
    """Return the index of the value in `times` (ascending) nearest to `moment`; on a tie, the earlier."""
    after = bisect.bisect_left(times, moment)
    places = [place for place in (after - 1, after) if 0 <= place < len(times)]
    return min(places, key=lambda place: abs(times[place] - moment))


def _seconds(row: Row) -> float:
    return datetime.fromisoformat(row.timestamp.replace("Z", "+00:00")).timestamp()
