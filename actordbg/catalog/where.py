"""`--where`: one SQL expression over documented columns, read by our own grammar and written anew.

The text never reaches SQLite. `expression` reads it: a column becomes its SQL, every literal a bound parameter, and anything that
the grammar does not have is refused with the reason. So the query is always one expression of this shape:

    ((d.seq_len > ?) AND (d.rank = ?))            parameters 4096, 0

Kinds are checked on the way (`tables`): SQLite reads `"typo" > 4096` as a text and, as every text is larger than
every number, selects *every* row; here it is an error that suggests the likely column. Depth, length and
number of operators are limited before the recursive rules read the text. `Sandbox` runs the result.

Times: `timestamp` compares with ISO texts ('2025-06-19', '2025-06-19 05:26', '2025-06-19T05:26:08Z', UTC unless they say
otherwise), and with `now()`, plus or minus a duration ('30m', '2h30m', '1d').

A missing value is unequal to everything: `status != 'passed'` and `status not in ('passed')` also select dumps that were never
replayed.

Only comparisons of known columns pass these checks. The sandbox is the second line of defense, in SQLite itself:

* the file is opened read-only (`mode=ro`, `query_only`), on a separate connection;
* an authorizer allows reading `dump`, `caller`, `result`, `replay`, `comparison` and `law_answer`, and the functions that
  `--where` has, and denies the rest;
* SQLite's limits are lowered (Python 3.11 and later have the call);
* a progress handler stops a query that runs for a second without returning a row. The clock restarts with each batch of
  rows, so listing a million rows is allowed; a filter that finds nothing for a second is stopped.

Example::

    condition = compile_where("seq_len>4096 and timestamp > now() - '2h'")
    with guarded(store.catalog_path) as box:
        box.rows(f"SELECT count(*) FROM dump AS d {condition.joins} WHERE {condition.sql}", condition.params)
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from actordbg.base.errors import WhereError
from actordbg.catalog import connections as engine
from actordbg.catalog import tables
from actordbg.catalog.expression import ExpressionReader, Part
from actordbg.catalog.tables import (
    BOOL,
    FUNCTIONS,
    refusal,
    shortened,
)

MAX_LENGTH = 20_000


def compile_where(text: str, *, now: datetime | None = None) -> Part:
    """Check and rewrite one expression. Raises WhereError, whose message names what is wrong. `now` is for tests."""
    if not text.strip():
        raise refusal("the expression is empty")
    if len(text) > MAX_LENGTH:
        raise refusal(f"the expression has {len(text)} characters, the limit is {MAX_LENGTH}")
    if bad := next((char for char in text if ord(char) < 32 and char not in "\t\n\r"), None):
        raise refusal(f"the expression has a control character, {bad!r}")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise refusal("the expression holds bytes that are not UTF-8")
    condition = ExpressionReader(text, now or datetime.now(timezone.utc)).read()
    if condition.kind != BOOL:
        raise refusal(f"{shortened(text)!r} is a {condition.kind}, not a condition", "compare it with something: seq_len > 4096")
    return condition


def all_of(conditions: list[str]) -> str:
    """Join conditions by `and`. Each is checked separately: WhereError quotes the invalid one."""
    for condition in conditions:
        try:
            compile_where(condition)
        except WhereError as error:
            raise WhereError(f"--where {shortened(condition)!r}: {error.message}", hint=error.hint) from None
    return " and ".join(f"({condition})" for condition in conditions)


def quoted(text: str) -> str:
    """Quote a text as a value of a condition."""
    return "'" + text.replace("'", "''") + "'"


TIME_LIMIT_S = 1.0
_TABLES = {"dump", "caller", "result", "replay", "comparison", "law_answer"}
_FUNCTIONS = (set(FUNCTIONS) - {"now"}) | {"like", "count", "min", "max", "group_concat", "micros", "moment", "substr", "rtrim"}
_READ, _OK = sqlite3.SQLITE_READ, sqlite3.SQLITE_OK
_STEPS = 20_000
_FETCH = 1000
_LIMITS = {
    "SQLITE_LIMIT_LENGTH": 64 * 2**20,
    "SQLITE_LIMIT_SQL_LENGTH": 200_000,
    "SQLITE_LIMIT_EXPR_DEPTH": 600,
    "SQLITE_LIMIT_COMPOUND_SELECT": 2,
    "SQLITE_LIMIT_VDBE_OP": 50_000,
    "SQLITE_LIMIT_FUNCTION_ARG": 64,
    "SQLITE_LIMIT_ATTACHED": 0,
    "SQLITE_LIMIT_LIKE_PATTERN_LENGTH": 200,
    "SQLITE_LIMIT_TRIGGER_DEPTH": 1,
    "SQLITE_LIMIT_WORKER_THREADS": 0,
}

_FAULTS = ("integer overflow", "expression tree is too large", "parser stack overflow", "too many", "too big", "too complex")
"""Parts of SQLite's messages about an expression; other errors concern the catalog."""


class Sandbox:
    """A guarded connection; `rows` runs one query on it."""

    def __init__(self, connection: sqlite3.Connection, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._connection = connection
        self._limit = time_limit_s
        self._deadline = 0.0
        if hasattr(connection, "setlimit"):
            for name, value in _LIMITS.items():
                connection.setlimit(getattr(sqlite3, name), value)
        tables.add_functions(connection)
        connection.execute("BEGIN")  # one snapshot for all queries of a sandbox
        connection.execute("SELECT 1 FROM dump LIMIT 0")  # reads schema and statistics, which the authorizer would deny
        connection.set_progress_handler(self._late, _STEPS)
        connection.set_authorizer(_authorize)

    def rows(self, sql: str, params: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query, fetched in batches; WhereError if a batch exceeds the time limit, or a value overflows."""
        try:
            self._deadline = time.monotonic() + self._limit
            cursor = self._connection.execute(sql, params)
            while batch := cursor.fetchmany(_FETCH):
                yield from batch
                self._deadline = time.monotonic() + self._limit
        except (sqlite3.OperationalError, sqlite3.DataError) as error:
            text = str(error)
            if "interrupted" in text:
                raise WhereError(
                    f"--where: the query was stopped after {self._limit:g} s",
                    hint="narrow it by rank, seq_len, timestamp, tokens, step or run, which have indexes",
                ) from None
            if any(fault in text.lower() for fault in _FAULTS):
                raise WhereError(f"--where: SQLite cannot compute it: {text}", hint="simplify the expression") from None
            raise

    def _late(self) -> int:
        return time.monotonic() > self._deadline


@contextlib.contextmanager
def guarded(path: Path, time_limit_s: float = TIME_LIMIT_S) -> Iterator[Sandbox]:
    """Open a sandbox on the catalog at `path`, closed at the end of the block."""
    with engine.connect_readonly(path, alone=True) as connection:
        yield Sandbox(connection, time_limit_s)


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action == _READ and first in _TABLES:  # first, since SQLite calls this for each column
        return _OK
    if action == sqlite3.SQLITE_SELECT:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY
