"""Named selections as `--where` expressions: failed in the last replay, the longest, a diverse sample.
Also explains why a condition selects no dump: which of its parts selects nothing alone, and which values exist instead. And
summarizes a store for `actordbg status`: its dumps, its replays, and how many failed last.

Example::

    longest(catalog, "rank=0", 3)                           # "dump_id in ('...', '...', '...')"
    reasons(catalog, "seq_len>4096 and role='policy'")
    # ["role = 'policy' selects none of 257: role is actor (200), reference (57)"]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from actordbg.base.units import plural, some
from actordbg.catalog.columns import DumpRow
from actordbg.catalog.query import (
    FORWARDS,
    SELECT_LOSSES,
    Catalog,
    answers,
    count_dumps,
    damaged_files,
    dump_bytes,
    list_own_replays,
    list_replays,
    select_dumps,
)
from actordbg.catalog.tables import CALLER, LAST_RESULT, NUMBER, TIME, WHERE_COLUMNS, WhereColumn, from_micros, joins, shortened
from actordbg.catalog.where import all_of, compile_where, guarded, of_dumps, parts_of
from actordbg.config.replay_config import TINY, TOY_MODEL
from actordbg.formats.dump_record import FORWARD, LOSS
from actordbg.formats.ringfile import is_held, place, ring_paths

_OF_LOSSES = f"point = '{LOSS}'"
BAD = "verdict in ('WRONG', 'FAILED')"
"""Dumps whose last verdict is bad."""


def verdict_of(row: Any) -> str | None:
    """Return a dump's last verdict for a list: "WRONG: neighbour", "RIGHT (TOY MODEL)", "theirs: RIGHT"; None if it has none."""
    word = row.verdict or (f"theirs: {row.theirs}" if row.theirs else None)
    if word and row.model == TINY:
        word += f" ({TOY_MODEL})"
    return f"{word}: {row.broken}" if row.broken else word


def joined(where: str | None, more: str) -> str:
    """Join two conditions by `and`."""
    return more if where is None else all_of([where, more])


def longest(catalog: Catalog, where: str | None, count: int) -> str | None:
    """Select the `count` dumps with the largest seq_len; returns `where` if it selects none, for the message that says so."""
    rows = select_dumps(catalog, where, order="longest", limit=count)
    return of_dumps(row.dump_id for row in rows) if rows else where


def diverse(catalog: Catalog, where: str | None, count: int) -> str | None:
    """Select the `count` dumps that differ most in run, function, role, padding, mode, trigger, last result, rows and length.

    Begins with the longest dump, of the fewest rows, and then takes the dump that is farthest from all taken so far (Gonzalez's
    traversal, 1985, https://doi.org/10.1016/0304-3975(85)90224-5), so most rows come with another length, and laws, which look at
    most rows, take less time. If there are fewer kinds than `count`, adds others evenly over time.
    """
    kinds: dict[tuple[object, ...], DumpRow] = {}
    rows = select_dumps(catalog, where)
    for row in sorted(rows, key=lambda row: (-row.seq_len, row.batch_size, row.dump_id)):
        kinds.setdefault((*_words(row), row.batch_size, row.seq_len), row)
    left = list(kinds.values())
    taken: list[DumpRow] = []
    far = [math.inf] * len(left)
    while left and len(taken) < count:
        best = max(range(len(left)), key=far.__getitem__)
        if far[best] == 0:
            break
        taken.append(left[best])
        far = [min(known, _distance(row, left[best])) for known, row in zip(far, left, strict=True)]
    ids = {row.dump_id for row in taken}
    others = [row for row in rows if row.dump_id not in ids]
    more = min(count - len(taken), len(others))
    taken += [others[(2 * at + 1) * len(others) // (2 * more)] for at in range(more)]
    return of_dumps(row.dump_id for row in taken) if taken else where


def _words(row: DumpRow) -> tuple[object, ...]:
    kept = row.triggered or row.recovered
    return row.run, row.function, row.role, row.padding, row.training, kept, row.verdict, row.action_len == 0


def _distance(row: DumpRow, other: DumpRow) -> float:
    """Return 0 for dumps of one kind; else 1 for each word that differs, plus log2 of the ratios of length and of rows."""
    words = sum(a != b for a, b in zip(_words(row), _words(other), strict=True))
    return words + _ratio(row.seq_len, other.seq_len) + _ratio(row.batch_size, other.batch_size) / 2


def _ratio(size: int, other: int) -> float:
    """Return |log2| of the ratio of two sizes; 0 counts as 1."""
    return abs(math.log2(max(1, size) / max(1, other)))


_SHOWN = 5


def no_match(catalog: Catalog, where: str) -> str:
    """Return the message for a condition that selects no dump, with the reasons."""
    return f"no dump matches {where}; {'; '.join(reasons(catalog, where))}"


def reasons(catalog: Catalog, where: str) -> list[str]:
    """Return a line for each part of the expression (joined by `and`) that no dump meets; one line if all have some."""
    total = count_dumps(catalog)
    counts = {part: count_dumps(catalog, part) for part in parts_of(where)}
    if nothing := [part for part, count in counts.items() if not count]:
        return [f"{shortened(part)} selects none of {total:,}{_instead(catalog, part)}" for part in nothing]
    return [f"each part alone selects some: {', '.join(f'{shortened(part)} ({count:,})' for part, count in counts.items())}"]


def _instead(catalog: Catalog, part: str) -> str:
    """Describe what there is instead: losses, or the values of a part's columns."""
    if losses := count_dumps(catalog, all_of([part, _OF_LOSSES])):
        return f" forwards, and {plural(losses, 'loss')}: add point='{LOSS}'"
    contents = [
        "`actordbg dump ls` lists the ids" if name == "dump_id" else _held(catalog, name)
        for name in sorted(compile_where(part).columns)
    ]
    return f": {'; '.join(contents)}" if contents else ""


def without_dumps(catalog: Catalog) -> tuple[str, str]:
    """Return what a store holds in which no forward was recorded, and the command that reads it; "" if it holds nothing."""
    from actordbg.formats.turn_record import TURNS  # here, since `status` would wait for them
    from actordbg.formats.weight_syncs import SYNCS

    root = catalog.store.root
    ((losses,),) = answers(catalog, f"SELECT count(*) FROM dump AS d {CALLER} WHERE k.{_OF_LOSSES}")
    if losses:
        return plural(losses, "loss"), "actordbg lint"
    for folder, what, command in ((TURNS, "turns", "turns"), (SYNCS, "transfers of weights", "weights")):
        if any((root / folder).glob("*/[!.]*.json")):
            return what, f"actordbg {command}"
    dead = [ring for ring in ring_paths(place(catalog.store)) if not is_held(ring)]
    return (f"{plural(len(dead), 'flight recorder file')} of dead processes", "actordbg dump recover") if dead else ("", "")


def frequent_values(catalog: Catalog, name: str, most: int = 50) -> list[tuple[Any, int]]:
    """Return the values of a column of `--where`, the most frequent first, with their numbers of dumps that `dump ls` lists."""
    column = WHERE_COLUMNS[name]
    listed = f"dump AS d {joins([name, 'point'])}" + ("" if name in SELECT_LOSSES else f" WHERE {FORWARDS}")
    with guarded(catalog.store.catalog_path) as box:
        rows = box.rows(f"SELECT {column.sql}, count(*) FROM {listed} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT {most}")
        return [(shown(column, value), int(count)) for value, count in rows]


def shown(column: WhereColumn, value: Any) -> Any:
    """Format a value of a column's SQL for people: a time as text."""
    return from_micros(value) if column.kind == TIME and value is not None else value


def _held(catalog: Catalog, name: str) -> str:
    """Describe the values of a column: its range, or its most frequent values with their numbers of dumps."""
    column = WHERE_COLUMNS[name]
    if column.kind in (NUMBER, TIME):
        with guarded(catalog.store.catalog_path) as box:
            ((least, largest),) = box.rows(f"SELECT min({column.sql}), max({column.sql}) FROM dump AS d {joins([name])}")
        return f"{name} is null everywhere" if least is None else f"{name} is {shown(column, least)} to {shown(column, largest)}"
    rows = frequent_values(catalog, name, _SHOWN + 1)
    named = (("null" if value is None else value, count) for value, count in rows)
    return f"{name} is {some([f'{value} ({count:,})' for value, count in named], _SHOWN)}"


_LAST = {"last": "replay_id", "last_status": "status", "last_at": "created_at", "last_inputs": "inputs", "last_passed": "passed"}
"""What is shown of the last replay, and the columns that hold it."""


@dataclass(frozen=True)
class Holdings:
    """Contents of a store. dumps: their number, without losses; in_packs: those that lie in packs. newest: UTC time of the newest
    dump. never_replayed, bad: dumps by last result and verdict; bad_losses: those of the bad that are losses. damaged: unreadable
    files. replays: those of this user; other_replays: those that other commands started. last: id of the newest replay, with its
    status, inputs and passed inputs. trainers: dumps of each trainer. only, reader: see `without_dumps`.
    """

    store: str
    dumps: int
    bytes: int
    in_packs: int
    newest: str | None
    never_replayed: int
    bad: int
    bad_losses: int
    damaged: int
    replays: int
    other_replays: int
    trainers: dict[str, int]
    last: str | None = None
    last_status: str = ""
    last_at: str | None = None
    last_inputs: int = 0
    last_passed: int = 0
    only: str = ""
    reader: str = ""


def holdings(catalog: Catalog) -> Holdings:
    """Summarize the store of this catalog."""
    newest = select_dumps(catalog, order="newest", limit=1)
    own = list_own_replays(catalog)
    counts = f"count(*), count(d.pack), count(*) - count(r.status), coalesce(sum({BAD}), 0)"
    kinds = f"SELECT k.point = '{FORWARD}', {counts} FROM dump AS d {CALLER} {LAST_RESULT} GROUP BY 1"
    by_kind = {kind: figures for kind, *figures in answers(catalog, kinds)}
    dumps, packed, fresh, bad = by_kind.get(1, [0] * 4)
    *_, bad_losses = by_kind.get(0, [0])
    only, reader = ("", "") if dumps else without_dumps(catalog)
    trainers = f"SELECT k.trainer, count(*) FROM dump AS d {CALLER} WHERE k.trainer IS NOT NULL GROUP BY 1 ORDER BY 2 DESC, 1"
    return Holdings(
        store=str(catalog.store.root),
        dumps=dumps,
        bytes=dump_bytes(catalog),
        in_packs=packed,
        newest=newest[0].timestamp if newest else None,
        never_replayed=fresh,
        bad=bad + bad_losses,
        bad_losses=bad_losses,
        damaged=len(damaged_files(catalog)),
        replays=len(own),
        other_replays=len(list_replays(catalog)) - len(own),
        trainers=dict(answers(catalog, trainers)),
        only=only,
        reader=reader,
        **{name: getattr(each, field) for each in own[:1] for name, field in _LAST.items()},
    )
