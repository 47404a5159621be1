"""The columns and functions that `--where` may use, and what every part of the catalog knows of its tables.

`--where` knows every column of a dump and of its caller, and those of its last result and comparison that stand below
(`_SOURCES`): its sandbox, its messages and the reference page follow from that list.

Each of these columns has a kind, and only equal kinds compare: a number with a number, a text with a text, a time with an ISO
time or `now() - '2h'`. SQLite itself would compare anything with anything (every text is larger than every number), and a
mistyped query would then silently match every row, or none.

Times are whole microseconds since 1970, UTC: as text, a time takes four times the space, and again in each index. `micros` and
`moment` are also SQL functions, on the connections of a sandbox.

Example: `for name, column in WHERE_COLUMNS.items(): print(name, column.kind, column.doc)`
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import Any

from actordbg.base.errors import ActordbgError, CatalogProblem, StoreProblem, UnreadableFile, WhereError
from actordbg.catalog.columns import JUDGED, CallerColumns, DumpColumns, Row
from actordbg.catalog.lab_columns import Comparison, Replay, Result
from actordbg.document.blocks import FAILED, RIGHT, UNCHECKED, WRONG
from actordbg.formats.store_files import OddFile

ODD_FILE = "odd-file"
"""The code of an entry in a store that is not a file of ours: a link, a FIFO, a folder, an invalid name."""


DUMP_COLUMNS = {name: column for name, column in (DumpColumns.columns | CallerColumns.columns).items() if column.of != JUDGED}
"""The columns of a dump and of its caller that were recorded."""
OF_A_RANK = "caller IN (SELECT id FROM caller WHERE run = ? AND rank = ?)"
"""Condition that selects the dumps of a run's rank."""


@dataclass(frozen=True)
class Damaged:
    """An unusable dump, pack or replay, as every command names it. path: below the store. hint: what to do, if known."""

    path: str
    code: str
    reason: str
    hint: str = ""

    @property
    def told(self) -> str:
        """The reason, and in brackets what to do."""
        return f"{self.reason} ({self.hint})" if self.hint else self.reason

    @staticmethod
    def by(path: str, error: ActordbgError | OSError, full: str = "") -> Damaged:
        """Describe a file by its error. full: the file's name in the message, which is removed."""
        if isinstance(error, OddFile):
            return Damaged(path, ODD_FILE, str(error.strerror))
        if isinstance(error, OSError):
            return NotRead(path, StoreProblem.code, f"cannot be read: {error.strerror}")
        kind = NotRead if isinstance(error, UnreadableFile) else Damaged
        return kind(path, error.code, error.message.removeprefix(f"{full}: "))


class NotRead(Damaged):
    """A file that cannot be read, whatever is in it."""


def odd_files(rejected: Mapping[str, str]) -> list[Damaged]:
    """Return entries that a listing rejected (path: reason) as damaged files."""
    return [Damaged(path, ODD_FILE, why) for path, why in sorted(rejected.items())]


def shared(record: Any, row: type[Row]) -> dict[str, Any]:
    """Return the fields of a record that are also columns of a table."""
    return {name: getattr(record, name) for name in row.columns if hasattr(record, name)}


NUMBER, TEXT, TIME, BOOL = "number", "text", "time", "yes/no"
VERDICTS = (RIGHT, WRONG, FAILED, UNCHECKED)


@dataclass(frozen=True)
class WhereColumn:
    """A column of `--where`: its name, kind, SQL, the join that it needs, and all its values if they are few.

    row, stored: where it is declared. whose: how its description begins. A time is a number in SQL, microseconds since 1970.
    """

    name: str
    kind: str
    sql: str
    row: type[Row]
    stored: str
    whose: str
    join: str = ""
    words: tuple[str, ...] = ()

    @property
    def doc(self) -> str:
        """Return what it holds, in words."""
        text = self.row.meanings()[self.stored].replace("NULL", "null").removesuffix(", in microseconds since 1970")
        return self.whose + text


CALLER = "JOIN caller AS k ON k.id = d.caller"
"""Join of a dump's caller."""
LAST_RESULT = "LEFT JOIN result AS r ON r.id = d.last_result"
"""Join of a dump's last result, if it has one."""

_TIMES = ("timestamp", "replayed_at")
_KINDS = {int: NUMBER, float: NUMBER, str: TEXT, bool: BOOL}
BOTH_THERE = (
    "EXISTS (SELECT 1 FROM replay AS p WHERE p.replay_id = c.replay_id) "
    "AND (c.against = 'golden' OR EXISTS (SELECT 1 FROM replay AS p WHERE p.replay_id = c.against))"
)
"""Condition that the replays of a comparison exist."""
_COMPARISON_SQL = (
    f"(SELECT c.{{}} FROM comparison AS c WHERE c.dump_id = d.dump_id AND {BOTH_THERE} ORDER BY c.created_at DESC LIMIT 1)"
)
"""A column of the dump's newest comparison, of any replay: a look-up in an index."""


class Handle(Row):
    """What `--where` knows of a dump besides its columns."""

    dump: str
    """short handle, as tables show it: the beginning of the id's last part"""


DUMP_TAIL = (
    "CASE WHEN d.dump_id LIKE '________T______.______Z-______%-%-________%' "
    "THEN substr(d.dump_id, length(rtrim(d.dump_id, '0123456789abcdef')) + 1) ELSE d.dump_id END"
)
"""The last part of a dump's id, whose beginning is its handle; an id of another form as a whole."""


_WORDS = dict.fromkeys(("verdict", "theirs"), VERDICTS)
_LAST = (
    "replay_id", "status", "finished_at", "error_class", "signature", "forward_s", "backward_s", "tokens_per_s",
    "peak_memory_bytes", "logprob_mean", "nonfinite", "golden_max_abs", "golden_entropy_max_abs", "rng_match",
)  # fmt: skip
"""The columns of the last result that `--where` knows."""
_LAST_MODEL = "(SELECT p.{} FROM replay AS p WHERE p.replay_id = r.replay_id)"
_SOURCES: tuple[tuple[type[Row], Iterable[str], str, str, str], ...] = (
    (DumpColumns, DumpColumns.columns, "d.{}", "", ""),
    (CallerColumns, CallerColumns.columns, "k.{}", CALLER, ""),
    (Result, _LAST, "r.{}", LAST_RESULT, "last result: "),
    (Replay, ("model",), _LAST_MODEL, LAST_RESULT, "last result: "),
    (Comparison, ("verdict", "against", "max_abs", "clip_share"), _COMPARISON_SQL, "", "last comparison: "),
    (Handle, ("dump",), f"substr({DUMP_TAIL}, 1, 8)", "", ""),
)
"""Where columns come from: names, SQL, the join that it needs, and whose they are."""
_CALLED = {
    "result.replay_id": "replay", "result.finished_at": "replayed_at", "result.error_class": "error",
    "result.peak_memory_bytes": "peak_memory", "comparison.verdict": "compared",
}  # fmt: skip
"""Names in `--where` of columns that have another one there."""


def _where_columns() -> Iterator[WhereColumn]:
    for row, names, sql, join, whose in _SOURCES:
        for stored in names:
            name = _CALLED.get(f"{row.table}.{stored}", stored)
            kind = TIME if name in _TIMES else _KINDS[row.columns[stored].type]
            plain = f"micros({sql})" if name == "replayed_at" else sql
            yield WhereColumn(name, kind, plain.format(stored), row, stored, whose, join=join, words=_WORDS.get(name, ()))


WHERE_COLUMNS: dict[str, WhereColumn] = {column.name: column for column in _where_columns()}
"""The columns that `--where` knows, by name."""


def joins(names: Iterable[str]) -> str:
    """Return the joins that must follow `dump AS d` for the SQL of these columns."""
    needed = {WHERE_COLUMNS[name].join for name in names}
    return " ".join(join for join in (CALLER, LAST_RESULT) if join in needed)


HEADINGS = {"S": "seq_len", "B": "batch_size"}
"""Headings of `dump ls` that are not names of columns, and their columns."""

FUNCTIONS: dict[str, str] = {
    "abs": "abs(number): absolute value",
    "coalesce": "coalesce(a, b, ...): the first value that is not null (also ifnull)",
    "length": "length(text): number of characters",
    "lower": "lower(text): in lower case (ASCII)",
    "now": "now(): the current time; now() - '2h' is two hours ago (units w, d, h, m, s)",
    "round": "round(number, digits): rounded; without digits to a whole number",
    "upper": "upper(text): in upper case (ASCII)",
}
"""The functions that `--where` knows, with their signatures."""

OPERATORS = "= == <> != < <= > >=  and or not  is [not] null  [not] in (...)  [not] between  [not] like  + - * / %"

_HINT = 'write, for example, "seq_len>4096 and rank=0" or "timestamp > now() - \'2h\'"; `actordbg dump columns` lists the columns'


def refusal(message: str, hint: str = "") -> WhereError:
    """Return the error for an expression that is not allowed."""
    return WhereError(message, hint=hint or _HINT)


def shortened(text: str) -> str:
    """Shorten a text to at most 60 characters, for a message."""
    return text if len(text) <= 60 else f"{text[:57]}..."


_EPOCH = datetime(1970, 1, 1)
_MICRO = timedelta(microseconds=1)


def to_micros(text: str) -> int:
    """Convert a record's time, `2025-06-19T05:26:08.430740Z`, to microseconds since 1970. Raises ValueError for other texts."""
    return (datetime.fromisoformat(text[:26]) - _EPOCH) // _MICRO


def micros_of(moment: datetime) -> int:
    """Convert a time with a zone to microseconds since 1970."""
    return (moment.astimezone(timezone.utc).replace(tzinfo=None) - _EPOCH) // _MICRO


def from_micros(micros: Any) -> str:
    """Format microseconds since 1970 as in records. Raises CatalogProblem for an invalid time, which no actordbg wrote."""
    try:
        return f"{_second(micros // 1_000_000)}.{micros % 1_000_000:06d}Z"
    except (OverflowError, TypeError, ValueError):
        raise CatalogProblem(
            f"the catalog has an invalid time: {micros!r:.80}",
            hint="run `actordbg index --rebuild` to rebuild it from the dumps",
        ) from None


@lru_cache(maxsize=1024)
def _second(second: int) -> str:
    """Format a second as `2025-06-19T05:26:08`. Cached: calls follow each other closely, and this halves the time."""
    return (_EPOCH + timedelta(seconds=second)).isoformat()


def add_functions(connection: sqlite3.Connection) -> None:
    """Add `micros(text)` and `moment(number)` to SQL on this connection; NULL for invalid arguments."""
    connection.create_function("micros", 1, _micros_or_none, deterministic=True)
    connection.create_function("moment", 1, _moment_or_none, deterministic=True)


def _micros_or_none(text: object) -> int | None:
    """Convert a journal's time, which may have another zone or no fraction; None if it is not a time."""
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
    """Parse an ISO date or time, UTC unless it has a zone; None for anything else."""
    match = _DATE.match(text) if isinstance(text, str) else None
    if match is None:
        return None
    date, minutes, seconds, fraction, zone = match.groups("")
    zone = "+00:00" if zone in ("", "Z") else zone if ":" in zone else f"{zone[:3]}:{zone[3:]}"
    try:
        clock = f"{minutes}:{seconds:0<2}.{fraction:0<6}" if minutes else "00:00"
        moment = datetime.fromisoformat(f"{date}T{clock}{zone}")
        return moment.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None


def parse_duration(text: Any) -> timedelta:
    """Parse a duration like '7d' or '2h30m'; WhereError for anything else."""
    compact = text.replace(" ", "") if isinstance(text, str) else ""
    if not _DURATION.match(compact) or len(compact) > 40:
        raise refusal(f"{shortened(str(text))!r} is not a duration", "write '30m', '2h', '2h30m' or '1d' (units w, d, h, m, s)")
    try:
        return timedelta(seconds=sum(float(count) * _UNITS[unit] for count, unit in _PIECE.findall(compact)))
    except OverflowError:
        raise refusal(f"the duration {shortened(compact)!r} is too long") from None
