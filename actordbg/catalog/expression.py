"""Turns a parsed `--where` expression into SQL: each node on an allow list is spelled out, everything else is refused.

`_HANDLERS` is the list: node kinds by name, the method that writes each, and its allowed arguments. A node kind or an argument
that is not listed is an error, so additions of a newer sqlglot are refused until this module supports them (`not like` is such a
case: newer versions express it by an argument `negate` that a writer could overlook).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from actordbg.base.errors import WhereError
from actordbg.catalog.tables import (
    BOOL,
    FUNCTIONS,
    HEADINGS,
    NUMBER,
    TEXT,
    TIME,
    WHERE_COLUMNS,
    micros_of,
    parse_duration,
    parse_moment,
    refusal,
    shortened,
)
from actordbg.formats.dump_record import format_timestamp

if TYPE_CHECKING:
    from sqlglot.expressions import Expression

MAX_ITEMS = 1000
MAX_PATTERN = 100
MAX_WILDCARDS = 6


@dataclass
class Part:
    """A piece of the SQL with its kind ("duration" and "null" occur inside only) and bound values. words: a column's values."""

    sql: str
    kind: str
    params: list[Any]
    literal: Any = None
    words: tuple[str, ...] = ()


def _made(sql: str, kind: str, parts: Iterable[Part]) -> Part:
    """Return a part made of others, with their bound values in order."""
    return Part(sql, kind, [value for part in parts for value in part.params])


class ExpressionWriter:
    """Writes a tree that passed `check_nodes` as SQL; `columns` collects the names that it uses."""

    def __init__(self, now: datetime) -> None:
        self._now = now
        self.columns: set[str] = set()

    def write(self, node: Any) -> Part:
        """Return the part for one node; WhereError if it is not allowed or makes no sense."""
        node = node.unnest()
        name = type(node).__name__
        if name not in _HANDLERS or not _HANDLERS[name][0]:
            raise _refused(node)
        part: Part = getattr(self, _HANDLERS[name][0])(node)
        return part

    def column(self, node: Any) -> Part:
        name = node.name
        column = WHERE_COLUMNS.get(name) or WHERE_COLUMNS.get(HEADINGS.get(name) or name.lower())
        if column is None:
            raise _unknown_column(name, bool(node.this.args.get("quoted")))
        self.columns.add(column.name)
        return Part(column.sql, column.kind, [], words=column.words)

    def literal(self, node: Any) -> Part:
        if node.args.get("is_string"):
            return Part("?", TEXT, [node.this], literal=node.this)
        value = _number(node.this)
        return Part("?", NUMBER, [value], literal=value)

    def boolean(self, node: Any) -> Part:
        return Part("1" if node.this else "0", BOOL, [], literal=bool(node.this))

    def null(self, node: Any) -> Part:
        return Part("NULL", "null", [])

    def connect(self, node: Any) -> Part:
        word = type(node).__name__.upper()
        parts = [self._condition(side, word.lower()) for side in node.flatten(unnest=False)]
        return _made(f"({f' {word} '.join(part.sql for part in parts)})", BOOL, parts)

    def negate(self, node: Any) -> Part:
        inner = self._condition(node.this, "not")
        absent = type(node.this).__name__ in ("In", "Like")  # NULL is in no list, and like nothing
        return Part(f"(NOT coalesce({inner.sql}, 0))" if absent else f"(NOT {inner.sql})", BOOL, inner.params)

    def compare(self, node: Any) -> Part:
        sign = _COMPARISONS[type(node).__name__]
        left, right = parts = self._all_alike(node, node.this, node.expression)
        bare = {type(node.this).__name__, type(node.expression).__name__} & _BARE
        if BOOL in (left.kind, right.kind) and (sign not in ("=", "IS NOT") or bare):
            raise refusal(f"{_sql(node)!r} compares a condition", "use parentheses, and `and`, `or`, `not`")
        return _made(f"({left.sql} {sign} {right.sql})", BOOL, parts)

    def is_(self, node: Any) -> Part:
        left, right = self.write(node.this), self.write(node.expression)
        if right.kind == "null" or (right.kind == left.kind == BOOL and isinstance(right.literal, bool)):
            return Part(f"({left.sql} IS {right.sql})", BOOL, left.params)
        raise refusal(f"{_sql(node)!r}: `is` is followed by null, true or false")

    def in_(self, node: Any) -> Part:
        items = node.expressions
        if not items or len(items) > MAX_ITEMS:
            raise refusal(f"`in` needs a list of 1 to {MAX_ITEMS} values", "write rank in (0, 1)")
        tested, *listed = parts = self._all_alike(node, node.this, *items)
        return _made(f"({tested.sql} IN ({', '.join(part.sql for part in listed)}))", BOOL, parts)

    def between(self, node: Any) -> Part:
        tested, low, high = parts = self._all_alike(node, node.this, node.args["low"], node.args["high"])
        if tested.kind == BOOL:
            raise refusal(f"{_sql(node)!r} compares a condition")
        return _made(f"({tested.sql} BETWEEN {low.sql} AND {high.sql})", BOOL, parts)

    def like(self, node: Any) -> Part:
        tested, pattern = self.write(node.this), self.write(node.expression)
        if tested.kind not in (TEXT, TIME) or not isinstance(pattern.literal, str):
            raise refusal(f"{_sql(node)!r}: `like` compares a text column with a quoted text", "write host like 'node-1%'")
        wildcards = sum(pattern.literal.count(char) for char in "%_")
        if len(pattern.literal) > MAX_PATTERN or wildcards > MAX_WILDCARDS:
            raise refusal(f"a `like` pattern may have {MAX_PATTERN} characters, {MAX_WILDCARDS} of them % or _")
        sql = f"({_text_of(tested)} LIKE ?)"
        return Part(f"(NOT coalesce({sql}, 0))" if node.args.get("negate") else sql, BOOL, [*tested.params, pattern.literal])

    def sign(self, node: Any) -> Part:
        inner = self._numeric(node.this, node)
        value = -inner.literal if inner.literal is not None else None
        return Part(f"(- {inner.sql})", NUMBER, inner.params, literal=value)

    def arithmetic(self, node: Any) -> Part:
        sign = _SIGNS[type(node).__name__]
        left, right = parts = [self.write(node.this), self.write(node.expression)]
        if sign in "+-" and right.kind == TEXT and (left.kind == TIME or parse_moment(left.literal) is not None):
            return self._shift(left, right, sign, node)
        _require_number(left, node.this, node)
        _require_number(right, node.expression, node)
        if sign in "/%" and right.literal == 0:
            raise refusal(f"{_sql(node)!r} divides by zero")
        divided = f"CAST({left.sql} AS REAL)" if sign == "/" else left.sql
        return _made(f"({divided} {sign} {right.sql})", NUMBER, parts)

    def function(self, node: Any) -> Part:
        raw_name = node.this if type(node).__name__ == "Anonymous" else type(node).__name__
        if not isinstance(raw_name, str):
            raise refusal(f"{_sql(node)!r}: a function's name must not be quoted")
        name = raw_name.lower()
        if name == "now" and not node.expressions:
            return self._moment(self._now)
        if name in ("abs", "round"):
            digits = node.args.get("decimals")
            parts = [self._numeric(side, node) for side in (node.this, digits) if side is not None]
            if not all(isinstance(part.literal, int) for part in parts[1:]):
                raise refusal("round(number, digits): digits must be a whole number")
            return _made(f"{name}({', '.join(part.sql for part in parts)})", NUMBER, parts)
        if name in ("length", "lower", "upper"):
            inner = self.write(node.this)
            if inner.kind not in (TEXT, TIME):
                raise refusal(f"{_sql(node)!r}: {name} takes a text")
            return Part(f"{name}({_text_of(inner)})", NUMBER if name == "length" else TEXT, inner.params)
        if name != "coalesce":
            raise _unknown_function(name)
        parts = self._all_alike(node, node.this, *node.expressions)
        if len(parts) < 2:
            raise refusal("coalesce takes two values or more", "write coalesce(step, 0) > 10")
        return _made(f"{name}({', '.join(part.sql for part in parts)})", parts[0].kind, parts)

    def _condition(self, node: Any, word: str) -> Part:
        part = self.write(node)
        if part.kind != BOOL:
            raise refusal(f"{_sql(node)!r} is a {part.kind}, `{word}` needs a condition", "compare it with something")
        return part

    def _numeric(self, node: Any, parent: Any) -> Part:
        part = self.write(node)
        _require_number(part, node, parent)
        return part

    def _alike(self, left: Part, right: Part, node: Any) -> tuple[Part, Part]:
        """Convert both sides of a comparison to one kind; WhereError if that is not possible."""
        if "null" in (left.kind, right.kind):
            raise refusal(f"{_sql(node)!r} is never true", "use `is null` or `is not null`")
        for kind, converted in ((TIME, self._as_time), (BOOL, _as_flag)):
            if kind in (left.kind, right.kind):
                left, right = converted(left), converted(right)
        for column, value in ((left, right), (right, left)):
            if column.words and isinstance(value.literal, str) and value.literal not in column.words:
                hint = f"write one of {', '.join(column.words)}; a comparison's own word is the column `compared`"
                raise refusal(f"{_sql(node)!r}: {shortened(value.literal)!r} is not a verdict of a dump", hint)
        if left.kind != right.kind:
            raise refusal(
                f"{_sql(node)!r} compares a {left.kind} with a {right.kind}", "text goes in 'single quotes', numbers do not"
            )
        return left, right

    def _all_alike(self, node: Any, *sides: Any) -> list[Part]:
        """Convert a value and those that it is compared with to one kind; any of them may determine it."""
        first, *others = map(self.write, sides)
        for other in others:
            first, _ = self._alike(first, other, node)
        return [first, *(self._alike(first, other, node)[1] for other in others)]

    def _as_time(self, part: Part) -> Part:
        if part.kind != TEXT or not isinstance(part.literal, str):
            return part
        moment = parse_moment(part.literal)
        if moment is None:
            raise refusal(f"{shortened(part.literal)!r} is not a time", "write '2025-06-19', '2025-06-19 05:26' or now() - '2h'")
        return self._moment(moment)

    def _moment(self, moment: datetime) -> Part:
        return Part("?", TIME, [micros_of(moment)], literal=format_timestamp(moment))

    def _shift(self, left: Part, right: Part, sign: str, node: Any) -> Part:
        moment = parse_moment(left.literal)
        if moment is None:
            raise refusal(
                f"{_sql(node)!r} computes with a column of times", "compute on the other side: timestamp > now() - '2h'"
            )
        duration = parse_duration(right.literal)
        try:
            return self._moment(moment + duration if sign == "+" else moment - duration)
        except OverflowError:
            raise refusal(f"{_sql(node)!r} is out of range for a time") from None


_SIGNS = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "Mod": "%"}
_COMPARISONS = {"EQ": "=", "NEQ": "IS NOT", "GT": ">", "GTE": ">=", "LT": "<", "LTE": "<="}
"""Comparisons in SQLite's spelling: NULL counts as unequal."""
_BARE = {*_COMPARISONS, "Is", "In", "Between", "Like"}
"""Conditions that need parentheses to be compared with another condition."""
_BINARY = ("this", "expression")
_HANDLERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Column": ("column", ("this",)),
    "Identifier": ("", ("this", "quoted")),
    "Literal": ("literal", ("this", "is_string")),
    "Boolean": ("boolean", ("this",)),
    "Null": ("null", ()),
    "Paren": ("", ("this",)),
    "And": ("connect", _BINARY),
    "Or": ("connect", _BINARY),
    "Not": ("negate", ("this",)),
    "Is": ("is_", _BINARY),
    "In": ("in_", ("this", "expressions")),
    "Between": ("between", ("this", "low", "high")),
    "Like": ("like", ("this", "expression", "negate")),
    "Neg": ("sign", ("this",)),
    "Anonymous": ("function", ("this", "expressions")),
    **dict.fromkeys(_COMPARISONS, ("compare", _BINARY)),
    **dict.fromkeys(_SIGNS, ("arithmetic", _BINARY)),
    "Div": ("arithmetic", (*_BINARY, "typed", "safe")),
    **dict.fromkeys(("Abs", "Length", "Lower", "Upper"), ("function", ("this",))),
    "Coalesce": ("function", ("this", "expressions", "is_nvl", "is_null")),
    "Round": ("function", ("this", "decimals")),
}
"""Every allowed kind of node: the method that writes it, and its allowed arguments."""

_QUERIES = ("Subquery", "Select", "Exists", "Union")


def check_nodes(tree: Expression) -> None:
    """Raise WhereError for a tree with a node, or an argument of a node, that is not on the list."""
    for node in tree.walk():
        if type(node).__name__ not in _HANDLERS:
            raise _refused(node)
        for key, value in node.args.items():
            if key not in _HANDLERS[type(node).__name__][1] and value not in (None, False, [], ""):
                query = type(value).__name__ in _QUERIES
                raise _refused(value) if query else refusal(f"{_sql(node)!r} is not allowed here ({key})")


def _text_of(part: Part) -> str:
    """Return a part's SQL as a text: a time as records spell it."""
    return f"moment({part.sql})" if part.kind == TIME else part.sql


def _require_number(part: Part, node: Any, parent: Any) -> None:
    if part.kind != NUMBER:
        raise refusal(f"{_sql(parent)!r} computes with {_sql(node)!r}, which is a {part.kind}")


def _as_flag(part: Part) -> Part:
    """Accept 0 and 1 for false and true."""
    if part.kind == NUMBER and part.literal in (0, 1):
        return Part(str(int(part.literal)), BOOL, [], literal=bool(part.literal))
    return part


def _number(text: str) -> int | float:
    try:
        value: int | float = int(text) if text.isdecimal() and len(text) < 20 else float(text)
    except ValueError:
        raise refusal(f"{shortened(text)!r} is not a number") from None
    if (isinstance(value, int) and value >= 2**63) or not math.isfinite(value):
        raise refusal(f"{shortened(text)} is too large a number")
    return value


def _refused(node: Any) -> WhereError:
    name = type(node).__name__
    if name in _QUERIES:
        return refusal("queries inside the expression are not allowed")
    from sqlglot import exp

    if isinstance(node, exp.Func) and name not in ("And", "Or", "Case", "Cast"):
        return _unknown_function(str(node.sql_name()).lower())
    words = {"Glob": "glob", "RegexpLike": "regexp", "Escape": "escape", "Tuple": "a list of values"}
    return refusal(f"{words.get(name, _sql(node))!r} is not allowed")


def _unknown_column(name: str, quoted: bool) -> WhereError:
    if name == "None":
        return refusal("None is not an SQL value", "use null for a missing value: role is null")
    near = difflib.get_close_matches(name.lower(), WHERE_COLUMNS, n=1)
    meant = f'; did you mean "{near[0]}"?' if near else ""
    hint = "`actordbg dump columns` lists the columns"
    if quoted or not near:
        hint = f"text goes in 'single quotes'; {hint}"
    return refusal(f"there is no column {shortened(name)!r}{meant}", hint)


def _unknown_function(name: str) -> WhereError:
    near = difflib.get_close_matches(name, FUNCTIONS, n=1)
    meant = f"; did you mean {near[0]}?" if near and near[0] != name else ""
    return refusal(f"the function {shortened(name)} is not allowed{meant}", f"use one of {'; '.join(FUNCTIONS.values())}")


def _sql(node: Any) -> str:
    return shortened(str(node.sql(dialect="sqlite")))
