"""Runs a user's condition on a connection that can read seven tables, for a second, and do nothing else.

`where` already lets nothing through but comparisons of known columns. This is the second wall, in SQLite itself:

* the file is opened read-only (`mode=ro`, `query_only`), on a connection of its own;
* an authorizer allows reading `dump`, `caller`, `result`, `run`, `replay`, `comparison` and `law_answer`, and the functions that
  `--where` has, and denies the rest;
* SQLite's limits are lowered (Python 3.11 and later have the call);
* a progress handler stops a query that has been at work for a second without giving a row. The clock starts again with
  each batch of rows, so listing a million rows is no offence; a filter that finds nothing in a second is.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from actordbg.base.errors import WhereError
from actordbg.catalog import connections as engine
from actordbg.catalog import moments
from actordbg.catalog.columns import FUNCTIONS

TIME_LIMIT_S = 1.0
_TABLES = {"dump", "caller", "result", "run", "replay", "comparison", "law_answer"}
_FUNCTIONS = (set(FUNCTIONS) - {"now"}) | {"like", "count", "min", "max", "group_concat", *moments.FUNCTIONS}
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
"""Parts of SQLite's messages about an expression; any other error is one of the catalog."""


class Sandbox:
    """A guarded connection; `rows` runs one query on it."""

    def __init__(self, connection: sqlite3.Connection, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._connection = connection
        self._limit = time_limit_s
        self._deadline = 0.0
        if hasattr(connection, "setlimit"):
            for name, value in _LIMITS.items():
                connection.setlimit(getattr(sqlite3, name), value)
        moments.add_functions(connection)
        connection.execute("BEGIN")  # one snapshot for all queries of a sandbox
        connection.execute("SELECT 1 FROM dump LIMIT 0")  # reads schema and statistics, which the authorizer would deny
        connection.set_progress_handler(self._late, _STEPS)
        connection.set_authorizer(_authorize)

    def rows(self, sql: str, params: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """The rows of one query, fetched in batches; WhereError if it takes longer than the limit to give any, or overflows."""
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
                raise WhereError(f"--where: SQLite cannot compute it: {text}", hint="make it simpler") from None
            raise

    def _late(self) -> int:
        return time.monotonic() > self._deadline


@contextlib.contextmanager
def guarded(path: Path, time_limit_s: float = TIME_LIMIT_S) -> Iterator[Sandbox]:
    """A sandbox on the catalog at `path`, closed at the end of the block."""
    with engine.connect_readonly(path, alone=True) as connection:
        yield Sandbox(connection, time_limit_s)


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action == _READ and first in _TABLES:  # first, since it is asked for each column
        return _OK
    if action == sqlite3.SQLITE_SELECT:
        return sqlite3.SQLITE_OK
    if action == sqlite3.SQLITE_FUNCTION and second in _FUNCTIONS:
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY
