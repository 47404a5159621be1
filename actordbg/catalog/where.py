"""`--where`: one SQL expression over documented columns, parsed, checked, and rewritten from the parsed tree.

The text never reaches SQLite. Anything beyond plain comparisons is parsed (sqlglot, SQLite's dialect), and each node of the tree
that is on an allow list (`expression`) is written as new SQL, with every literal as a bound parameter. A node, an argument of a
node, a function or a name that is not on the list is refused with the reason. So the query is always one expression of
this shape:

    ((d.seq_len > ?) AND (d.rank = ?))            parameters 4096, 0

Kinds are checked on the way (`tables`): SQLite reads `"typo" > 4096` as a text and, as every text is larger than
every number, selects *every* row; here it is an error that suggests the likely column. Depth, length and
number of operators are limited before any recursive code reads the text. `Sandbox` runs the result.

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

import contextlib
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from actordbg.base.errors import WhereError
from actordbg.catalog import connections as engine, tables
from actordbg.catalog.expression import MAX_ITEMS, ExpressionWriter, check_nodes
from actordbg.catalog.tables import (
    BOOL,
    CALLER,
    FUNCTIONS,
    NUMBER,
    TEXT,
    TIME,
    WHERE_COLUMNS,
    WhereColumn,
    joins,
    micros_of,
    parse_moment,
    refusal,
    shortened,
)

MAX_LENGTH = 20_000
MAX_DEPTH = 16
MAX_OPERATORS = 200
MAX_SIMPLE = 20
_AND = re.compile(r"\sand\s", re.IGNORECASE | re.ASCII)
_COMPARED = re.compile(r"\s*([a-z]\w*)\s*([<>]=?|<>|!=|==?)\s*(?:(\d{1,15}(?:\.\d{1,9})?)|'([\w .:/+-]*)')\s*\Z", re.ASCII)
_CLAUSE = re.compile(r"\b(order\s+by|limit)\b", re.IGNORECASE)
_SIGNS = {"==": "=", "<>": "IS NOT", "!=": "IS NOT"}


@dataclass(frozen=True)
class Condition:
    """A checked expression: SQL over `dump AS d` and the tables of `joins`; its bound values; the columns it uses.

    of_callers: of the parts joined by `and`, those that use only columns of a caller: SQL over `caller AS k`, bound values.
    """

    sql: str
    params: tuple[Any, ...]
    columns: frozenset[str]
    of_callers: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    @property
    def joins(self) -> str:
        """The joins that must follow `dump AS d` for it: the caller, the last result, both or none."""
        return joins(self.columns)


def compile_where(text: str, *, now: datetime | None = None) -> Condition:
    """Check and rewrite one expression. Raises WhereError, whose message names what is wrong. `now` is for tests."""
    _bound(text)
    return _simple(text) or _parsed(text, now)


def all_of(conditions: list[str]) -> str:
    """Join conditions by `and`. Each is checked separately: WhereError quotes the invalid one."""
    for condition in conditions:
        try:
            compile_where(condition)
        except WhereError as error:
            raise WhereError(f"--where {shortened(condition)!r}: {error.message}", hint=error.hint) from None
    return " and ".join(f"({condition})" for condition in conditions)


def of_dumps(dump_ids: Iterable[str]) -> str:
    """Return the condition for just these dumps, one or more."""
    return f"dump_id in ({', '.join(map(quoted, dump_ids))})"


def quoted(text: str) -> str:
    """Quote a text as a value of a condition."""
    return "'" + text.replace("'", "''") + "'"


def _parsed(text: str, now: datetime | None) -> Condition:
    writer = ExpressionWriter(now := now or datetime.now(timezone.utc))
    try:
        with _silent_parser():
            tree = _parse(text)
            check_nodes(tree)
            part = writer.write(tree)
            of_callers = tuple(_of_callers(tree, now))
    except RecursionError:
        raise _too_deep() from None
    if part.kind != BOOL:
        raise refusal(f"{shortened(text)!r} is a {part.kind}, not a condition", "compare it with something: seq_len > 4096")
    return Condition(part.sql, tuple(part.params), frozenset(writer.columns), of_callers)


def _of_callers(tree: Any, now: datetime) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield SQL and values of those parts of a checked expression, joined by `and`, that use columns of callers only."""
    from sqlglot import exp

    if isinstance(plain := tree.unnest(), exp.And):
        for operand in plain.flatten():
            yield from _of_callers(operand, now)
        return
    part = (writer := ExpressionWriter(now)).write(plain)
    if {WHERE_COLUMNS[name].join for name in writer.columns} == {CALLER}:
        yield part.sql, tuple(part.params)


def _simple(text: str) -> Condition | None:
    """Compile comparisons of a column with a number, a text or a time, joined by `and`, without the parser, which takes 0.1 s to
    import; the result is the same. None for anything else, which is left to the parser.
    """
    parts: list[str] = []
    params: list[Any] = []
    names: list[str] = []
    for comparison in _AND.split(text, MAX_SIMPLE):
        match = _COMPARED.match(comparison)
        column = WHERE_COLUMNS.get(match[1]) if match else None
        value = _value(column, match[3], match[4]) if match is not None and column is not None else None
        if match is None or column is None or value is None:
            return None
        parts.append(f"({column.sql} {_SIGNS.get(match[2], match[2])} ?)")
        params.append(value)
        names.append(column.name)
    sql = parts[0] if len(parts) == 1 else f"({' AND '.join(parts)})"
    each = zip(parts, params, names, strict=True)
    of_callers = tuple((part, (value,)) for part, value, name in each if WHERE_COLUMNS[name].join == CALLER)
    return Condition(sql, tuple(params), frozenset(names), of_callers)


def _value(column: WhereColumn, number: str | None, text: str | None) -> Any:
    """Return the bound value for a plain number or text compared with this column; None if that is left to the parser."""
    if column.kind == NUMBER and number is not None:
        return float(number) if "." in number else int(number)
    if column.kind == TIME and text is not None:
        moment = parse_moment(text)
        return micros_of(moment) if moment is not None else None
    return text if column.kind == TEXT and (not column.words or text in column.words) else None


def parts_of(text: str) -> list[str]:
    """Split an expression into the conditions that `and` joins; any other expression is a single part."""
    from sqlglot import exp

    compile_where(text)
    with _silent_parser():
        tree = _parse(text)
        parts = tree.flatten() if isinstance(tree, exp.And) else [tree]
        return [part.sql(dialect="sqlite") for part in parts]


@contextlib.contextmanager
def _silent_parser() -> Iterator[None]:
    """Silence sqlglot's logger: WhereError alone says what is wrong with an expression."""
    import logging

    log = logging.getLogger("sqlglot")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _bound(text: str) -> None:
    """Refuse texts that must not reach a parser. One pass over the characters, no recursion."""
    if not text.strip():
        raise refusal("the expression is empty")
    if len(text) > MAX_LENGTH:
        raise refusal(f"the expression has {len(text)} characters, the limit is {MAX_LENGTH}")
    if bad := next((char for char in text if ord(char) < 32 and char not in "\t\n\r"), None):
        raise refusal(f"the expression has a control character, {bad!r}")
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise refusal("the expression holds bytes that are not UTF-8")
    depth, quote = 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
            if depth > MAX_DEPTH:
                raise refusal(f"parentheses are nested more than {MAX_DEPTH} deep")
        elif char in ")]}":
            depth -= 1
            if depth < 0:
                raise refusal(f"unmatched {char!r}", "balance the parentheses")
    if quote or depth:
        what = quote or "("
        raise refusal(f"a {what} is not closed")


def _parse(text: str) -> Any:
    import sqlglot
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

    dialect = sqlglot.Dialect.get_or_raise("sqlite")
    try:
        tokens = dialect.tokenize(text)
        _check_tokens(tokens, text)
        trees = dialect.parser(error_level=sqlglot.ErrorLevel.RAISE).parse_into(exp.Condition, tokens, text)
    except RecursionError:
        raise _too_deep() from None
    except (SqlglotError, AttributeError) as error:  # its parser raises the latter for `'a'{{=}}`
        hint = "remove it from the condition, and use --order, and --limit or --max-inputs" if _CLAUSE.search(text) else ""
        raise refusal(f"syntax error: {_reason(error, text)}", hint) from None
    if len(trees) != 1 or trees[0] is None:
        raise refusal("only one expression is allowed")
    return trees[0]


def _too_deep() -> WhereError:
    return refusal("the expression is nested too deep")


def _check_tokens(tokens: list[Any], text: str) -> None:
    """Refuse, by tokens, statements, comments, and chains long enough to make a parser recurse."""
    from sqlglot.tokens import TokenType  # type: ignore[attr-defined]

    operators, prefixes = 0, 0
    prefix_types = {TokenType.NOT, TokenType.DASH, TokenType.PLUS, TokenType.TILDE}
    quiet = {TokenType.STRING, TokenType.NUMBER, TokenType.COMMA, TokenType.L_PAREN, TokenType.R_PAREN}
    if not tokens:
        raise refusal("the expression is only a comment" if "-" in text or "/" in text else "the expression is empty")
    for token in tokens:
        if token.comments:
            raise refusal("comments are not allowed")
        if token.token_type is TokenType.SEMICOLON:
            raise refusal("';' is not allowed: write one expression, not statements")
        prefixes = prefixes + 1 if token.token_type in prefix_types else 0
        operators += token.token_type not in quiet
        if prefixes > MAX_DEPTH:
            raise refusal(f"more than {MAX_DEPTH} signs or `not` in a row")
    if operators > 3 * MAX_OPERATORS:
        raise refusal(f"the expression has more than {MAX_OPERATORS} terms")
    if len(tokens) > 3 * MAX_OPERATORS + 2 * MAX_ITEMS:
        raise refusal(f"the expression has {len(tokens)} words; lists may have {MAX_ITEMS} items")


def _reason(error: Exception, text: str) -> str:
    details: list[dict[str, Any]] = getattr(error, "errors", None) or [{}]
    detail = next((item for item in details if item.get("highlight")), {})
    if detail.get("highlight"):
        return f"at {shortened(str(detail['highlight']))!r}"
    return f"{shortened(text)!r} is not one SQL expression"


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
