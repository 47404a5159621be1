"""`--where`: any text is a WhereError, or SQL that SQLite runs, that reads the documented columns, and that ends."""

import re
import sqlite3
from datetime import datetime, timezone

from fuzzing import refused

from actordbg.base.errors import WhereError
from actordbg.catalog import where
from actordbg.catalog.columns import Caller, Dump
from actordbg.catalog.lab_columns import Comparison, Result
from actordbg.catalog.tables import FUNCTIONS, OPERATORS, WHERE_COLUMNS, parse_duration, parse_moment
from actordbg.catalog.where import compile_where

PARSERS = (compile_where, parse_duration, parse_moment)
NOW = datetime(2025, 6, 20, tzinfo=timezone.utc)
WORDS = tuple(
    word.encode()
    for word in (*WHERE_COLUMNS, *(f"{name}(" for name in FUNCTIONS), *OPERATORS.split(), "'2h'", "'2025-06-19'", "d.", "select")
)
_JOIN = (
    "SELECT d.dump_id FROM dump AS d JOIN caller AS k ON k.dump_id IS d.dump_id "
    "LEFT JOIN result AS r ON r.dump_id = d.dump_id WHERE"
)
LAW_COLUMNS = ("law", "dump_id", "verdict", "replay_id")
_read = set()


def _tables():
    """A catalog's seven tables in memory, with values of every kind in three dumps."""
    found = sqlite3.connect(":memory:", isolation_level=None)
    made = {row.table: tuple(row.columns) for row in (Dump, Caller, Result, Comparison)} | {"law_answer": LAW_COLUMNS}
    for table, columns in made.items():
        names = {*columns, "dump_id", "created_at"}
        found.execute(f"CREATE TABLE {table} ({', '.join(sorted(names))})")
        for value in (None, 1, "2025-06-19T05:26:08.430740Z"):
            found.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(names))})", [value] * len(names))
    found.execute("CREATE TABLE run (x)")
    found.execute("CREATE TABLE replay (replay_id)")
    return found


_CONNECTION = _tables()
_SANDBOX = where.Sandbox(_CONNECTION)


def _watch(action, first, second, *rest):
    if action == sqlite3.SQLITE_READ and first is not None:
        _read.add((first, second or ""))
    return where._authorize(action, first, second, *rest)


_CONNECTION.set_authorizer(_watch)


def seeds():
    texts = (
        "seq_len>4096 and rank=0", "timestamp > now() - '2h' or not (role like 'pol%' and status is not null)",
        "coalesce(step, 0) in (1, 2, -3) and abs(round(tokens_per_s, 1)) / 2 % 3 >= 1.5e3", "verdict = 'mismatch' and max_abs > 0.1",
        "timestamp between '2025-06-19' and '2025-06-19 05:26:08Z'", "batch_size*seq_len < 1500 + 2 - tokens", "pinned and replayable is true",
        "length(upper(host)) <> 3", "rank not in (0) and seq_len not between 1 and 2", "host not like '%x_'",
    )  # fmt: skip
    return {f"text-{number}": text.encode() for number, text in enumerate(texts)}


def one_input(data):
    text = data.decode("utf-8", "surrogateescape")
    with refused(WhereError):
        found = compile_where(text, now=NOW)
        assert compile_where(text, now=NOW) == found
        assert found.columns <= WHERE_COLUMNS.keys() and found.sql.count("?") == len(found.params)
        _read.clear()
        rows = list(_SANDBOX.rows(f"{_JOIN} {found.sql}", found.params))
        assert _columns_allowed() >= _read, f"it reads {_read}"
        assert len(rows) <= 3
        negated = list(_SANDBOX.rows(f"{_JOIN} NOT ({found.sql})", found.params))
        assert len(rows) + len(negated) <= 3, "a condition and its contrary"
        _in_parentheses(text, found.columns, rows)


def _in_parentheses(text, columns, rows):
    """The same expression in parentheses, and as one side of a conjunction, gives the same rows."""
    for other in (f"({text})", f"({text}) and 1=1"):
        with refused(WhereError):
            again = compile_where(other, now=NOW)
            assert again.columns == columns
            assert list(_SANDBOX.rows(f"{_JOIN} {again.sql}", again.params)) == rows


def _columns_allowed():
    joins = {
        ("dump", "dump_id"),
        ("result", "dump_id"),
        ("caller", "dump_id"),
        ("replay", "replay_id"),
        *(("comparison", name) for name in ("dump_id", "created_at", "replay_id", "against")),
        *(("law_answer", name) for name in LAW_COLUMNS),
    }
    results = {("result", found[1]) for column in WHERE_COLUMNS.values() if (found := re.search(r"\br\.(\w+)", column.sql))}
    return joins | results | {(table, name) for table in ("dump", "caller", "comparison") for name in WHERE_COLUMNS}


def mutate(data, chance, havoc):
    """Words change places, go, come, or stand in parentheses."""
    words = data.split(b" ")
    at = chance.randrange(len(words))
    kind = chance.randrange(5)
    if kind == 0:
        words[at] = havoc(words[at])
    elif kind == 1:
        words[at : at + 1] = []
    elif kind == 2:
        words[at] = chance.choice(WORDS)
    elif kind == 3:
        words[at:at] = [chance.choice(WORDS), chance.choice((b"1", b"'x'", b"and", b"-", b"not", b"=", *words))]
    else:
        end = chance.randrange(at, len(words)) + 1
        words[at:end] = [chance.choice((b"(", b"not (", b"abs(", b"-(")) + b" ".join(words[at:end]) + b")"]
    return b" ".join(words)
