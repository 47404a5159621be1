"""The columns of the catalog's tables as plain data, without SQLModel, and the columns and functions that `--where` may use.

`columns.json` is written by `make docs` from the classes in `models`, where each column is declared. `--where` knows every column
of a dump, and some of its last result and comparison: its sandbox, its messages and the reference page follow from that list.

A column has a kind there, and only like kinds compare: a number with a number, a text with a text, a time with an ISO time or
`now() - '2h'`. SQLite itself would compare anything with anything (every text is larger than every number), and a
mistyped query would then match every row, or none, in silence.

Times are whole microseconds since 1970, UTC: as text a time takes four times the room, and in each index again. `micros` and
`moment` are SQL functions too, on the connections of a sandbox.

Example: `for name, column in COLUMNS["dump"].items(): print(name, column.type, column.comment)`
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from actordbg.base.errors import ActordbgError, CatalogProblem, StoreProblem, WhereError
from actordbg.formats.store_files import OddFile

ODD_FILE = "odd-file"
"""The code of what lies in a store and is not a file of ours: a link, a FIFO, a folder, a strange name."""


class Column(NamedTuple):
    """One column: its Python type by name (int, float, str, bool, dict), whether it is of the primary key, what it holds."""

    type: str
    primary: bool
    comment: str


COLUMNS: dict[str, dict[str, Column]] = {
    table: {name: Column(*spec) for name, spec in columns.items()}
    for table, columns in json.loads(Path(__file__).with_name("columns.json").read_text(encoding="utf-8")).items()
}
"""The columns of each table by name."""
_OWN = ("id", "caller", "last_result")
DUMP_COLUMNS = {name: column for name, column in (COLUMNS["dump"] | COLUMNS["caller"]).items() if name not in _OWN}
"""What is known of a dump: of its own, and of its caller."""
OF_A_RANK = "caller IN (SELECT id FROM caller WHERE run = ? AND rank = ?)"
"""Which dumps are those of a run's rank."""


@dataclass(frozen=True)
class Damaged:
    """A dump, pack or replay that cannot be used, as every command names it. path: below the store."""

    path: str
    code: str
    reason: str

    @staticmethod
    def by(path: str, error: ActordbgError | OSError, full: str = "") -> Damaged:
        """What an error says of a file. full: the file's name in messages, which need not repeat it."""
        if isinstance(error, OddFile):
            return Damaged(path, ODD_FILE, str(error.strerror))
        if isinstance(error, OSError):
            return Damaged(path, StoreProblem.code, f"cannot be read: {error.strerror}")
        return Damaged(path, error.code, error.message.removeprefix(f"{full}: "))


def odd_files(rejected: Mapping[str, str]) -> list[Damaged]:
    """What a listing of a folder of the store noted: names that no file of ours has, or that are not files."""
    return [Damaged(path, ODD_FILE, why) for path, why in sorted(rejected.items())]


def shared(record: Any, table: str) -> dict[str, Any]:
    """Return the fields of a record that are columns of a table by the same name."""
    return {name: getattr(record, name) for name in COLUMNS[table] if hasattr(record, name)}


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


CALLER = "JOIN caller AS k ON k.id = d.caller"
"""How the caller of a dump is joined."""
LAST_RESULT = "LEFT JOIN result AS r ON r.id = d.last_result"
"""How the last result of a dump is joined, if it has one."""

_TIMES = ("timestamp", "replayed_at")
_KINDS = {"int": NUMBER, "float": NUMBER, "str": TEXT, "bool": BOOL}
_OF_LAST_RESULT = {
    "status": "status", "error": "error_class", "signature": "signature", "forward_s": "forward_s", "backward_s": "backward_s",
    "tokens_per_s": "tokens_per_s", "peak_memory": "peak_memory_bytes", "logprob_mean": "logprob_mean", "nonfinite": "nonfinite",
    "golden_max_abs": "golden_max_abs", "golden_entropy_max_abs": "golden_entropy_max_abs", "rng_match": "rng_match",
    "replay": "replay_id",
}  # fmt: skip
"""Columns of the last result, by their names in `--where`."""
_MEANING = {
    "golden_max_abs": "largest absolute difference from the log-probs that the run recorded, nats",
    "golden_entropy_max_abs": "largest absolute difference from the entropies that the run recorded, nats",
}
"""What a column means that the table explains beside another one."""
_OF_LAST_COMPARISON = ("verdict", "against", "max_abs", "clip_share")
BOTH_THERE = (
    "EXISTS (SELECT 1 FROM replay AS p WHERE p.replay_id = c.replay_id) "
    "AND (c.against = 'golden' OR EXISTS (SELECT 1 FROM replay AS p WHERE p.replay_id = c.against))"
)
"""Whether the replays of a comparison are there."""
_COMPARISON_SQL = (
    f"(SELECT c.{{}} FROM comparison AS c WHERE c.dump_id = d.dump_id AND {BOTH_THERE} ORDER BY c.created_at DESC LIMIT 1)"
)
"""A column of the newest comparison that `compare` made of the dump, in whatever replay: a look-up in an index."""
_BROKEN_LAW = (
    "(SELECT l.law FROM law_answer AS l WHERE l.dump_id = d.dump_id AND l.verdict = 'broken' ORDER BY l.replay_id DESC LIMIT 1)"
)


def _where_columns() -> Iterator[WhereColumn]:
    def described(name: str, table: str, stored: str, sql: str, of: str = "", join: str = "") -> WhereColumn:
        column = COLUMNS[table][stored]
        text = _MEANING.get(name, column.comment).replace("NULL", "null").removesuffix(", in microseconds since 1970")
        return WhereColumn(name, TIME if name in _TIMES else _KINDS[column.type], sql, of + text, join)

    for name in DUMP_COLUMNS:
        if name in COLUMNS["caller"]:
            yield described(name, "caller", name, f"k.{name}", join=CALLER)
        else:
            yield described(name, "dump", name, f"d.{name}")
    for name, stored in _OF_LAST_RESULT.items():
        yield described(name, "result", stored, f"r.{stored}", "last result: ", LAST_RESULT)
    yield described("replayed_at", "result", "finished_at", "micros(r.finished_at)", "last result: ", LAST_RESULT)
    for name in _OF_LAST_COMPARISON:
        yield described(name, "comparison", name, _COMPARISON_SQL.format(name), "last comparison: ")
    yield WhereColumn(
        "law_broken", TEXT, _BROKEN_LAW, "a law that the newest replay broke of those that broke one; null if none did"
    )


WHERE_COLUMNS: dict[str, WhereColumn] = {column.name: column for column in _where_columns()}
"""What `--where` knows, by name."""


def joins(names: Iterable[str]) -> str:
    """What must follow `dump AS d` for the SQL of these columns."""
    needed = {WHERE_COLUMNS[name].join for name in names}
    return " ".join(join for join in (CALLER, LAST_RESULT) if join in needed)


HEADINGS = {"S": "seq_len", "B": "batch_size", "last": "status"}
"""Headings of `dump ls` that are not names of columns, and what stands under them."""

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


def refusal(message: str, hint: str = "") -> WhereError:
    """The error for an expression that is not allowed."""
    return WhereError(message, hint=hint or _HINT)


def shortened(text: str) -> str:
    """At most 60 characters of a text, for a message."""
    return text if len(text) <= 60 else f"{text[:57]}..."


_EPOCH = datetime(1970, 1, 1)
_MICRO = timedelta(microseconds=1)


def to_micros(text: str) -> int:
    """The microseconds of a record's time, `2025-06-19T05:26:08.430740Z`. Raises ValueError for another text."""
    return (datetime.fromisoformat(text[:26]) - _EPOCH) // _MICRO


def micros_of(moment: datetime) -> int:
    """The microseconds of a time that knows its zone."""
    return (moment.astimezone(timezone.utc).replace(tzinfo=None) - _EPOCH) // _MICRO


def from_micros(micros: Any) -> str:
    """The text of a time as records have it. Raises CatalogProblem for what is not a time: somebody else wrote it."""
    try:
        return f"{_second(micros // 1_000_000)}.{micros % 1_000_000:06d}Z"
    except (OverflowError, TypeError, ValueError):
        raise CatalogProblem(
            f"the catalog has an invalid time: {micros!r:.80}",
            hint="`actordbg index --rebuild` makes it again from the dumps",
        ) from None


@lru_cache(maxsize=1024)
def _second(second: int) -> str:
    """`2025-06-19T05:26:08`. Calls follow each other closely: to spell each time anew takes twice the time."""
    return (_EPOCH + timedelta(seconds=second)).isoformat()


def add_functions(connection: sqlite3.Connection) -> None:
    """Let SQL on this connection say `micros(text)` and `moment(number)`; NULL of what is none."""
    connection.create_function("micros", 1, _micros_or_none, deterministic=True)
    connection.create_function("moment", 1, _moment_or_none, deterministic=True)


def _micros_or_none(text: object) -> int | None:
    """Of a journal's time, which nobody has checked: with another zone, or without its fraction, it is a time, too."""
    moment = parse_moment(text)
    return None if moment is None else micros_of(moment)


def _moment_or_none(micros: object) -> str | None:
    try:
        return from_micros(micros) if isinstance(micros, int) else None
    except CatalogProblem:
        return None


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
