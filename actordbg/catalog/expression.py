"""The walk over a parsed `--where` expression: each node that is on the list is spelled out as SQL, the rest is refused.

`_HANDLERS` is the list: node kinds by name, the method that writes each, and the arguments that it may have. A node kind or
an argument that is not listed is an error, so what a newer sqlglot adds to its trees is refused until it is understood
(`not like` is such a case: newer versions say it with an argument `negate` that a writer could overlook).
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from actordbg.base.errors import UsageError, WhereError
from actordbg.base.units import parse_size
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
    times_beginning,
)
from actordbg.formats.dump_record import format_timestamp

if TYPE_CHECKING:
    from sqlglot.expressions import Expression

MAX_ITEMS = 1000
MAX_PATTERN = 100
MAX_WILDCARDS = 6


@dataclass
class Part:
    """A piece of the answer: its SQL, its kind ("duration" and "null" occur inside only), and its bound values."""

    sql: str
    kind: str
    params: list[Any]
    literal: Any = None
    bare: bool = False
    """A comparison without parentheses around it."""
    chain: str = ""
    """A sum's SQL without the outer parentheses, so that a longer sum does not nest them."""


def _made(sql: str, kind: str, parts: Iterable[Part], **more: Any) -> Part:
    """A part that is made of others: their bound values, in their order."""
    return Part(sql, kind, [value for part in parts for value in part.params], **more)


class ExpressionWriter:
    """Walks a tree and spells it out; `columns` collects the names that were used."""

    def __init__(self, now: datetime) -> None:
        self._now = now
        self.columns: set[str] = set()

    def write(self, node: Expression) -> Part:
        """The part for one node; WhereError if anything about it is not on the list."""
        _check_arguments(node)
        part: Part = getattr(self, _HANDLERS[type(node).__name__][0])(node)
        return part

    def column(self, node: Any) -> Part:
        name = node.name
        column = WHERE_COLUMNS.get(name) or WHERE_COLUMNS.get(HEADINGS.get(name) or name.lower())
        if column is None:
            raise _unknown_column(name, bool(node.this.args.get("quoted")))
        self.columns.add(column.name)
        return Part(column.sql, column.kind, [])

    def literal(self, node: Any) -> Part:
        if node.args.get("is_string"):
            return Part("?", TEXT, [node.this], literal=node.this)
        value = _number(node.this)
        return Part("?", NUMBER, [value], literal=value)

    def boolean(self, node: Any) -> Part:
        return Part("1" if node.this else "0", BOOL, [], literal=bool(node.this))

    def null(self, node: Any) -> Part:
        return Part("NULL", "null", [])

    def paren(self, node: Any) -> Part:
        part = self.write(node.this)
        return Part(part.sql, part.kind, part.params, part.literal)

    def connect(self, node: Any) -> Part:
        word = type(node).__name__.upper()
        first, others = _left_spine(node, (type(node).__name__,))
        parts = [self._condition(side, word.lower()) for side in (first, *(one.expression for one in others))]
        return _made(f"({f' {word} '.join(part.sql for part in parts)})", BOOL, parts)

    def negate(self, node: Any) -> Part:
        inner = self._condition(node.this, "not")
        absent = type(node.this).__name__ in ("In", "Like")  # what is not there is in no list and like nothing
        return Part(f"(NOT coalesce({inner.sql}, 0))" if absent else f"(NOT {inner.sql})", BOOL, inner.params)

    def compare(self, node: Any) -> Part:
        sign = {"EQ": "=", "NEQ": "<>", "GT": ">", "GTE": ">=", "LT": "<", "LTE": "<="}[type(node).__name__]
        left, right = self._alike(self.write(node.this), self.write(node.expression), node)
        if BOOL in (left.kind, right.kind) and (sign not in ("=", "<>") or left.bare or right.bare):
            raise refusal(f"{_sql(node)!r} compares a condition", "use parentheses, and `and`, `or`, `not`")
        if sign == "<>":
            sign = "IS NOT"  # what is not there is unequal, too
        return _made(f"({left.sql} {sign} {right.sql})", BOOL, (left, right), bare=True)

    def is_(self, node: Any) -> Part:
        left, right = self.write(node.this), self.write(node.expression)
        if right.kind == "null":
            return Part(f"({left.sql} IS NULL)", BOOL, left.params, bare=True)
        if right.kind == BOOL and isinstance(right.literal, bool) and left.kind == BOOL:
            return Part(f"({left.sql} IS {right.sql})", BOOL, left.params, bare=True)
        raise refusal(f"{_sql(node)!r}: `is` is followed by null, true or false")

    def in_(self, node: Any) -> Part:
        items = node.expressions
        if not items or len(items) > MAX_ITEMS:
            raise refusal(f"`in` needs a list of 1 to {MAX_ITEMS} values", "rank in (0, 1)")
        tested, *listed = parts = self._all_alike([node.this, *items], node)
        marks = ", ".join(part.sql for part in listed)
        return _made(f"({tested.sql} IN ({marks}))", BOOL, parts, bare=True)

    def between(self, node: Any) -> Part:
        tested, low, high = parts = self._all_alike([node.this, node.args["low"], node.args["high"]], node)
        if BOOL in (tested.kind, low.kind, high.kind):
            raise refusal(f"{_sql(node)!r} compares a condition")
        return _made(f"({tested.sql} BETWEEN {low.sql} AND {high.sql})", BOOL, parts, bare=True)

    def like(self, node: Any) -> Part:
        tested, pattern = self.write(node.this), self.write(node.expression)
        if tested.kind not in (TEXT, TIME) or not isinstance(pattern.literal, str):
            raise refusal(f"{_sql(node)!r}: `like` compares a text column with a text", "host like 'node-1%'")
        wildcards = sum(pattern.literal.count(char) for char in "%_")
        if len(pattern.literal) > MAX_PATTERN or wildcards > MAX_WILDCARDS:
            raise refusal(f"a `like` pattern may have {MAX_PATTERN} characters, {MAX_WILDCARDS} of them % or _")
        spelled = f"({_text_of(tested)} LIKE ?)", [*tested.params, pattern.literal]
        sql, params = _alike_in_time(tested, pattern.literal) or spelled
        if node.args.get("negate"):
            sql = f"(NOT coalesce({sql}, 0))"
        return Part(sql, BOOL, params, bare=True)

    def sign(self, node: Any) -> Part:
        inner = self._numeric(node.this, node)
        value = -inner.literal if inner.literal is not None else None
        return Part(f"(- {inner.sql})", NUMBER, inner.params, literal=value)

    def arithmetic(self, node: Any) -> Part:
        first, others = _left_spine(node, tuple(_SIGNS))
        part = self.write(first)
        for one in others:
            part = self._compute(part, self.write(one.expression), one)
        return part

    def _compute(self, left: Part, right: Part, node: Any) -> Part:
        """Two parts that are already written, under one sign; each node is written once, however long a sum is."""
        sign = _SIGNS[type(node).__name__]
        if sign in "+-" and right.kind == TEXT and (left.kind == TIME or parse_moment(left.literal) is not None):
            return self._shift(left, right, sign, node)
        _require_number(left, node.this, node)
        _require_number(right, node.expression, node)
        if sign in "/%" and right.literal == 0:
            raise refusal(f"{_sql(node)!r} divides by zero")
        if sign in "+-":
            chain = f"{left.chain or left.sql} {sign} {right.sql}"
            return _made(f"({chain})", NUMBER, (left, right), chain=chain)
        divided = f"CAST({left.sql} AS REAL)" if sign == "/" else left.sql
        return _made(f"({divided} {sign} {right.sql})", NUMBER, (left, right))

    def function(self, node: Any) -> Part:
        said = node.this if type(node).__name__ == "Anonymous" else type(node).__name__
        if not isinstance(said, str):
            raise refusal(f"{_sql(node)!r}: a function's name is not quoted")
        name = said.lower()
        if name == "now" and not node.expressions:
            return self._moment(self._now)
        if name in ("abs", "round"):
            digits = node.args.get("decimals")
            parts = [self._numeric(one, node) for one in (node.this, digits) if one is not None]
            if not all(isinstance(part.literal, int) for part in parts[1:]):
                raise refusal("round(number, digits): digits is a whole number")
            return _made(f"{name}({', '.join(part.sql for part in parts)})", NUMBER, parts)
        if name in ("length", "lower", "upper"):
            inner = self.write(node.this)
            if inner.kind not in (TEXT, TIME):
                raise refusal(f"{_sql(node)!r}: {name} takes a text")
            return Part(f"{name}({_text_of(inner)})", NUMBER if name == "length" else TEXT, inner.params)
        if name != "coalesce":
            raise _unknown_function(name)
        parts = self._all_alike([node.this, *node.expressions], node)
        if len(parts) < 2:
            raise refusal("coalesce takes two values or more", "coalesce(step, 0) > 10")
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
        """Both sides of a comparison, brought to one kind; WhereError if they have different ones."""
        if "null" in (left.kind, right.kind):
            raise refusal(f"{_sql(node)!r} is never true", "use `is null` or `is not null`")
        if TIME in (left.kind, right.kind):
            left, right = self._as_time(left), self._as_time(right)
        if BOOL in (left.kind, right.kind):
            left, right = _as_flag(left), _as_flag(right)
        if left.kind == NUMBER or right.kind == NUMBER:
            left, right = _as_number(left), _as_number(right)
        if left.kind != right.kind:
            raise refusal(
                f"{_sql(node)!r} compares a {left.kind} with a {right.kind}", "text goes in 'single quotes', numbers do not"
            )
        return left, right

    def _all_alike(self, nodes: list[Any], node: Any) -> list[Part]:
        """Several values that one is compared with, and that one, the first, brought to one kind, whichever of them says it."""
        first, *others = map(self.write, nodes)
        for one in others:
            first, _ = self._alike(first, one, node)
        return [first, *(self._alike(first, one, node)[1] for one in others)]

    def _as_time(self, part: Part) -> Part:
        if part.kind == TEXT and isinstance(part.literal, str):
            moment = parse_moment(part.literal) or self._day(part.literal)
            if moment is None:
                raise refusal(
                    f"{shortened(part.literal)!r} is not a time", "'2025-06-19', '2025-06-19 05:26:08', or now() - '2h'"
                )
            return self._moment(moment)
        return part

    def _day(self, word: str) -> datetime | None:
        """The beginning of today or yesterday, UTC."""
        days = {"today": 0, "yesterday": 1}.get(word.lower())
        midnight = self._now.astimezone(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
        return None if days is None else midnight - timedelta(days=days)

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
            raise refusal(f"{_sql(node)!r} is outside of the calendar") from None


_SIGNS = {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "Mod": "%"}
_BINARY = ("this", "expression")
_HANDLERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Column": ("column", ("this",)),
    "Literal": ("literal", ("this", "is_string")),
    "Boolean": ("boolean", ("this",)),
    "Null": ("null", ()),
    "Paren": ("paren", ("this",)),
    "And": ("connect", _BINARY),
    "Or": ("connect", _BINARY),
    "Not": ("negate", ("this",)),
    "Is": ("is_", _BINARY),
    "In": ("in_", ("this", "expressions")),
    "Between": ("between", ("this", "low", "high")),
    **dict.fromkeys(("Like", "ILike"), ("like", ("this", "expression", "negate"))),
    "Neg": ("sign", ("this",)),
    "Anonymous": ("function", ("this", "expressions")),
    **dict.fromkeys(("EQ", "NEQ", "GT", "GTE", "LT", "LTE"), ("compare", _BINARY)),
    **dict.fromkeys(_SIGNS, ("arithmetic", _BINARY)),
    "Div": ("arithmetic", (*_BINARY, "typed", "safe")),
    **dict.fromkeys(("Abs", "Length", "Lower", "Upper"), ("function", ("this",))),
    "Coalesce": ("function", ("this", "expressions", "is_nvl", "is_null")),
    "Round": ("function", ("this", "decimals")),
}
"""Every kind of node that may occur: the method that spells it out, and the arguments that it may have."""

_QUERIES = ("Subquery", "Select", "Exists", "Union")


def _check_arguments(node: Any) -> None:
    """Refuse a node that has an argument which is not on the list."""
    if type(node).__name__ not in _HANDLERS:
        raise _refused(node)
    arguments = _HANDLERS[type(node).__name__][1]
    for key, value in node.args.items():
        if key not in arguments and value not in (None, False, [], ""):
            query = type(value).__name__ in _QUERIES
            raise _refused(value) if query else refusal(f"{_sql(node)!r} is not allowed here ({key})")


def _left_spine(node: Any, names: tuple[str, ...]) -> tuple[Any, list[Any]]:
    """`a + b + c`, parsed as `(a + b) + c`, as a and the nodes [a + b, (a + b) + c]: without recursion, all checked."""
    spine = []
    while type(node).__name__ in names:
        _check_arguments(node)
        spine.append(node)
        node = node.this
    return node, spine[::-1]


def _text_of(part: Part) -> str:
    """The SQL of a part that functions of texts take: a time as records spell it."""
    return f"moment({part.sql})" if part.kind == TIME else part.sql


def _alike_in_time(tested: Part, pattern: str) -> tuple[str, list[Any]] | None:
    """`like` for a column of times by the times that begin with the pattern's text: a look-up in its index, where spelling each
    time takes most of a microsecond. None for another column, and a pattern that begins with no year."""
    span = times_beginning(pattern) if tested.kind == TIME and re.fullmatch(r"\w\.\w+", tested.sql) else None
    if span is None:
        return None
    said, *ends = span
    between = f"{tested.sql} BETWEEN ? AND ?"
    if len(pattern) > len(said) and not pattern[len(said) :].strip("%"):
        return f"({between})", ends
    return f"({between} AND {_text_of(tested)} LIKE ?)", [*ends, pattern]


def _require_number(part: Part, node: Any, parent: Any) -> None:
    if part.kind != NUMBER:
        raise refusal(f"{_sql(parent)!r} computes with {_sql(node)!r}, which is a {part.kind}")


def _as_flag(part: Part) -> Part:
    """0 and 1 may stand for no and yes."""
    if part.kind == NUMBER and part.literal in (0, 1):
        return Part(str(int(part.literal)), BOOL, [], literal=bool(part.literal))
    return part


def _as_number(part: Part) -> Part:
    """A text that is a number or a size ('0', '10MB') may stand for it."""
    if part.kind == TEXT and isinstance(part.literal, str):
        with contextlib.suppress(UsageError):
            value = parse_size("--where", part.literal)
            return Part("?", NUMBER, [value], literal=value)
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
        return refusal("None is not a value of SQL", "what is not there is null: role is null")
    near = difflib.get_close_matches(name.lower(), WHERE_COLUMNS, n=1)
    meant = f'; did you mean "{near[0]}"?' if near else ""
    hint = "`actordbg dump columns` lists the columns"
    if quoted or not near:
        hint = f"text goes in 'single quotes'; {hint}"
    return refusal(f"there is no column {shortened(name)!r}{meant}", hint)


def _unknown_function(name: str) -> WhereError:
    near = difflib.get_close_matches(name, FUNCTIONS, n=1)
    meant = f"; did you mean {near[0]}?" if near and near[0] != name else ""
    return refusal(f"the function {shortened(name)} is not allowed{meant}", f"functions: {'; '.join(FUNCTIONS.values())}")


def _sql(node: Any) -> str:
    return shortened(str(node.sql(dialect="sqlite")))
