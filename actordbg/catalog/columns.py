"""The columns, functions and times that `--where` may use: every column of a dump, and some of its last result and comparison.

The sandbox, the messages and the reference page are made from this list. Names, kinds and meanings are those of `tables`.

A column has a kind, and only like kinds compare: a number with a number, a text with a text, a time with an ISO time or
`now() - '2h'`. SQLite itself would compare anything with anything (every text is larger than every number), and a
mistyped query would then match every row, or none, in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from actordbg.base.errors import WhereError
from actordbg.catalog.moments import from_micros
from actordbg.catalog.tables import Column, ComparedDump, DumpColumns, Result, columns_of

NUMBER, TEXT, TIME, BOOL = "number", "text", "time", "yes/no"


@dataclass(frozen=True)
class WhereColumn:
    """One column: its name in `--where`, its kind, the SQL for it, what it means, and which table must be joined for it.

    A time is a number in SQL, microseconds since 1970.
    """

    name: str
    kind: str
    sql: str
    doc: str
    join: str = ""

    def shown(self, value: Any) -> Any:
        """A value that its SQL gave, as people read it."""
        return from_micros(value) if self.kind == TIME and value is not None else value


CALLER = "JOIN caller AS k ON k.id = d.caller"
"""How the caller of a dump is joined."""
LAST_RESULT = "LEFT JOIN result AS r ON r.id = d.last_result"
"""How the last result of a dump is joined, if it has one."""


_KINDS = {"int": NUMBER, "float": NUMBER, "str": TEXT, "bool": BOOL}
_LAST_RESULT = {
    "status": "status", "error": "error_class", "signature": "signature", "forward_s": "forward_s", "backward_s": "backward_s",
    "tokens_per_s": "tokens_per_s", "peak_memory": "peak_memory_bytes", "logprob_mean": "logprob_mean", "nonfinite": "nonfinite",
    "golden_max_abs": "golden_max_abs", "golden_entropy_max_abs": "golden_entropy_max_abs", "rng_match": "rng_match",
    "replay": "replay_id", "replayed_at": "finished_at",
}  # fmt: skip
"""Columns of the last result, by their names in `--where`."""
_MEANING = {
    "golden_max_abs": "largest absolute difference from the log-probs that the run recorded, nats",
    "golden_entropy_max_abs": "largest absolute difference from the entropies that the run recorded, nats",
}
"""What a column means that the table explains beside another one."""
_LAST_COMPARISON = ("verdict", "against", "max_abs", "clip_share")
_COMPARISON_SQL = (
    "(SELECT c.{} FROM comparison AS c WHERE c.dump_id = d.dump_id AND c.comparison_id IS NOT NULL "
    "ORDER BY c.created_at DESC LIMIT 1)"
)
"""A column of the newest comparison that `compare` made of the dump, in whatever replay: a look-up in an index."""


_BROKEN_LAW = (
    "(SELECT l.law FROM law_answer AS l WHERE l.dump_id = d.dump_id AND l.verdict = 'broken' ORDER BY l.replay_id DESC LIMIT 1)"
)


def _where(name: str, sql: str, column: Column, of: str = "", join: str = "") -> WhereColumn:
    kind = TIME if column.moment else _KINDS[column.kind]
    number = f"micros({sql})" if column.moment and not column.micros else sql
    return WhereColumn(name, kind, number, of + _MEANING.get(name, column.comment).replace("NULL", "null"), join)


def _all() -> Iterator[WhereColumn]:
    result, compared = columns_of(Result), columns_of(ComparedDump)
    for name, column in columns_of(DumpColumns).items():
        yield _where(name, f"k.{name}", column, join=CALLER) if column.caller else _where(name, f"d.{name}", column)
    for name, spelled in _LAST_RESULT.items():
        yield _where(name, f"r.{spelled}", result[spelled], "last result: ", LAST_RESULT)
    for name in _LAST_COMPARISON:
        yield _where(name, _COMPARISON_SQL.format(name), compared[name], "last comparison: ")
    yield WhereColumn(
        "law_broken", TEXT, _BROKEN_LAW, "a law that the newest replay broke of those that broke one; null if none did"
    )


COLUMNS: dict[str, WhereColumn] = {column.name: column for column in _all()}
"""What `--where` knows, by name."""


def joins(names: Iterable[str]) -> str:
    """What must follow `dump AS d` for the SQL of these columns."""
    needed = {COLUMNS[name].join for name in names}
    return " ".join(one for one in (CALLER, LAST_RESULT) if one in needed)


HEADINGS = {"S": "seq_len", "B": "batch_size", "last": "status"}
"""Headings of `dump ls` that are no names of columns, and what stands under them."""

FUNCTIONS: dict[str, str] = {
    "abs": "abs(number): its absolute value",
    "coalesce": "coalesce(a, b, ...): the first that is not null (also ifnull)",
    "length": "length(text): its number of characters",
    "lower": "lower(text): in lower case (ASCII)",
    "now": "now(): this moment; now() - '2h' is two hours ago (units w, d, h, m, s)",
    "round": "round(number, digits): rounded; without digits to a whole number",
    "upper": "upper(text): in upper case (ASCII)",
}
"""The functions that `--where` knows, with their form."""

OPERATORS = "= == <> != < <= > >=  and or not  is [not] null  [not] in (...)  [not] between  [not] like  + - * / %"

_HINT = 'an expression like "seq_len>4096 and rank=0" or "timestamp > now() - \'2h\'"; `actordbg dump columns` lists the columns'
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[wdhms])+\Z")
_PIECE = re.compile(r"(\d+(?:\.\d+)?)([wdhms])")
_UNITS = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DATE = re.compile(r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d)(?::(\d\d)(?:\.(\d{1,6}))?)?)?(Z|[+-]\d\d:?\d\d)?\Z")


def parse_moment(text: Any) -> datetime | None:
    """An ISO date or time as a moment; UTC unless it says otherwise; None for anything else."""
    match = _DATE.match(text) if isinstance(text, str) else None
    if match is None:
        return None
    date, minutes, seconds, fraction, zone = match.groups()
    zone = "+00:00" if zone in (None, "Z") else zone if ":" in zone else f"{zone[:3]}:{zone[3:]}"
    try:
        moment = datetime.fromisoformat(f"{date}T{minutes or '00:00'}:{seconds or '00'}.{fraction or '0':0<6}{zone}")
        return moment.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def parse_duration(text: Any) -> timedelta:
    """'7d', '2h30m' as a timedelta; WhereError otherwise."""
    compact = text.replace(" ", "") if isinstance(text, str) else ""
    if not _DURATION.match(compact) or len(compact) > 40:
        raise refusal(f"{shortened(str(text))!r} is not a duration", "like '30m', '2h', '2h30m', '1d' (units w, d, h, m, s)")
    try:
        return timedelta(seconds=sum(float(count) * _UNITS[unit] for count, unit in _PIECE.findall(compact)))
    except OverflowError:
        raise refusal(f"{shortened(compact)!r} is too long a duration") from None


def refusal(message: str, hint: str = "") -> WhereError:
    """The error for an expression that is not allowed."""
    return WhereError(message, hint=hint or _HINT)


def shortened(text: str) -> str:
    """At most 60 characters of a text, for a message."""
    return text if len(text) <= 60 else f"{text[:57]}..."
