"""Reads a `--where` expression and writes it as SQL: what the grammar below does not have is refused.

    or          and {OR and}
    and         not {AND not}
    not         NOT not | comparison
    comparison  sum [sign sum | IS [NOT] constant | [NOT] IN (sum, ...) | [NOT] BETWEEN sum AND sum | [NOT] LIKE text]
    sum         product {+ | - product}
    product     unary {* | / | % unary}
    unary       - unary | + unary | column | literal | function(or, ...) | (or)

One pass: each rule returns the SQL of what it read as a `Part`, with its kind, so that a wrong kind is refused where it stands. A
literal becomes a bound value; a name becomes the SQL of a known column. So no text of the user is part of the SQL.

Two comparisons in a row (`0 < rank < 4`) need parentheses: SQLite would compare the truth of the first with a value.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

from actordbg.base.errors import WhereError
from actordbg.catalog.tables import (
    BOOL,
    FUNCTIONS,
    HEADINGS,
    NUMBER,
    TEXT,
    TIME,
    WHERE_COLUMNS,
    joins,
    micros_of,
    parse_duration,
    parse_moment,
    refusal,
    shortened,
)
from actordbg.catalog.tokens import COMPARISONS, CONSTANTS, MAX_ITEMS, SIGNS, VALUES, Token, tokens_of
from actordbg.formats.dump_record import format_timestamp

MAX_PATTERN = 100
MAX_WILDCARDS = 6

_ALIASES = {"ifnull": "coalesce"}
_TAKES = {"now": (0, 0), "round": (1, 2), "coalesce": (2, MAX_ITEMS)}
"""How many values a function takes, if not one."""
_CLAUSE = re.compile(r"\b(order\s+by|limit)\b", re.IGNORECASE)
_PARENTHESES = "use parentheses, and `and`, `or`, `not`"


class Part(NamedTuple):
    """A piece of the SQL with its kind ("null" occurs inside only), bound values and the columns in it.

    text: what the user wrote. words: a column's values. listed: whether it is an `in` or a `like`, which no missing value meets.
    operands: the conditions that `and` joins, those in parentheses too; () for anything else.
    """

    sql: str
    kind: str
    text: str
    params: tuple[Any, ...] = ()
    columns: frozenset[str] = frozenset()
    literal: Any = None
    words: tuple[str, ...] = ()
    listed: bool = False
    operands: tuple[Part, ...] = ()

    @property
    def joins(self) -> str:
        """The joins that must follow `dump AS d` for it: the caller, the last result, both or none."""
        return joins(self.columns)

    @property
    def each(self) -> tuple[Part, ...]:
        """The conditions that `and` joins; itself if none."""
        return self.operands or (self,)


class ExpressionReader:
    """Reads one expression, by recursive descent: a method for each rule of the grammar."""

    def __init__(self, text: str, now: datetime) -> None:
        self._text, self._now = text, now
        self._tokens = list(tokens_of(text))
        self._at = 0

    def read(self) -> Part:
        """Return the part for the whole text; WhereError if it is not allowed or makes no sense."""
        part = self._or()
        self._expect("end")
        return part

    @property
    def _next(self) -> Token:
        return self._tokens[self._at]

    def _take(self, *kinds: str) -> Token | None:
        """Go past the next token if it is one of these."""
        token = self._next
        if token.kind not in kinds:
            return None
        self._at += 1
        return token

    def _expect(self, *kinds: str) -> Token:
        token = self._take(*kinds)
        if token is None:
            where = f"at {shortened(self._text[self._next.start :])!r}" if self._next.text else "something is missing at its end"
            hint = "remove it from the condition, and use --order, and --limit or --max-inputs"
            raise refusal(f"cannot be parsed: {where}", hint if _CLAUSE.search(self._text) else "")
        return token

    def _since(self, start: Token) -> str:
        """Return the text that was read since a token."""
        return self._text[start.start : self._tokens[self._at - 1].end]

    def _refused(self, start: Token, why: str, hint: str = "") -> WhereError:
        return refusal(f"{shortened(self._since(start))!r}{why}", hint)

    def _made(self, start: Token, sql: str, kind: str, *parts: Part, **facts: Any) -> Part:
        """Return a part made of others, with their bound values in order. start: where its text begins."""
        params = tuple(value for part in parts for value in part.params)
        columns = frozenset[str]().union(*(part.columns for part in parts))
        return Part(sql, kind, self._since(start), params, columns, **facts)

    def _or(self) -> Part:
        return self._connected("or", self._and)

    def _and(self) -> Part:
        return self._connected("and", self._not)

    def _connected(self, word: str, operand: Callable[[], Part]) -> Part:
        start = self._next
        parts = [operand()]
        while self._take(word):
            parts.append(operand())
        if len(parts) == 1:
            return parts[0]
        sql = f" {word.upper()} ".join(_condition(part, word).sql for part in parts)
        operands = tuple(each for part in parts for each in part.each)
        return self._made(start, f"({sql})", BOOL, *parts, operands=operands if word == "and" else ())

    def _not(self) -> Part:
        start = self._take("not")
        return self._negated(start, _condition(self._not(), "not")) if start else self._comparison()

    def _negated(self, start: Token, part: Part) -> Part:
        """Return the contrary of a condition. A missing value is in no list and like nothing: it meets the contrary of those."""
        return self._made(start, f"(NOT coalesce({part.sql}, 0))" if part.listed else f"(NOT {part.sql})", BOOL, part)

    def _comparison(self) -> Part:
        start, left = self._next, self._sum()
        sign = self._take(*SIGNS)
        if sign is None:
            return left
        negative = sign.kind == "not"
        if negative:
            sign = self._expect("in", "between", "like")
        if sign.kind == "is":
            negative = self._take("not") is not None
        rule = {"is": self._is, "in": self._in, "between": self._between, "like": self._like}.get(sign.kind, self._compared)
        part = rule(start, left, sign)
        if self._next.kind in SIGNS:
            raise self._refused(start, " is a condition, and is compared", _PARENTHESES)
        return self._negated(start, part) if negative else part

    def _compared(self, start: Token, left: Part, sign: Token) -> Part:
        left, right = self._alike(start, left, self._sum())
        spelled = COMPARISONS[sign.kind]
        if left.kind == BOOL and spelled not in ("=", "IS NOT"):
            raise self._refused(start, " compares a condition", _PARENTHESES)
        return self._made(start, f"({left.sql} {spelled} {right.sql})", BOOL, left, right)

    def _is(self, start: Token, left: Part, sign: Token) -> Part:
        constant = self._take(*CONSTANTS)
        if constant is None or (constant.kind != "null" and left.kind != BOOL):
            raise self._refused(start, ": `is` is followed by null, true or false")
        return self._made(start, f"({left.sql} IS {CONSTANTS[constant.kind][0]})", BOOL, left)

    def _in(self, start: Token, left: Part, sign: Token) -> Part:
        self._expect("(")
        items = self._list()
        if not 1 <= len(items) <= MAX_ITEMS:
            raise refusal(f"`in` needs a list of 1 to {MAX_ITEMS} values", "write rank in (0, 1)")
        left, *items = parts = self._alike(start, left, *items)
        return self._made(start, f"({left.sql} IN ({_joined(items)}))", BOOL, *parts, listed=True)

    def _between(self, start: Token, left: Part, sign: Token) -> Part:
        low = self._sum()
        self._expect("and")
        left, low, high = parts = self._alike(start, left, low, self._sum())
        if left.kind == BOOL:
            raise self._refused(start, " compares a condition")
        return self._made(start, f"({left.sql} BETWEEN {low.sql} AND {high.sql})", BOOL, *parts)

    def _like(self, start: Token, left: Part, sign: Token) -> Part:
        pattern = self._sum()
        if left.kind not in (TEXT, TIME) or pattern.kind != TEXT or pattern.literal is None:
            raise self._refused(start, ": `like` compares a text column with a quoted text", "write host like 'node-1%'")
        wildcards = pattern.literal.count("%") + pattern.literal.count("_")
        if len(pattern.literal) > MAX_PATTERN or wildcards > MAX_WILDCARDS:
            raise refusal(f"a `like` pattern may have {MAX_PATTERN} characters, {MAX_WILDCARDS} of them % or _")
        return self._made(start, f"({_text_of(left)} LIKE ?)", BOOL, left, pattern, listed=True)

    def _sum(self) -> Part:
        return self._computed(self._product, "+", "-")

    def _product(self) -> Part:
        return self._computed(self._unary, "*", "/", "%")

    def _computed(self, operand: Callable[[], Part], *signs: str) -> Part:
        start, left = self._next, operand()
        while sign := self._take(*signs):
            right = operand()
            if sign.kind in "+-" and right.kind == TEXT and (left.kind == TIME or parse_moment(left.literal) is not None):
                left = self._shifted(start, left, right, sign.kind)
                continue
            self._require_numbers(start, left, right)
            if sign.kind in "/%" and right.literal == 0:
                raise self._refused(start, " divides by zero")
            dividend = f"CAST({left.sql} AS REAL)" if sign.kind == "/" else left.sql
            left = self._made(start, f"({dividend} {sign.kind} {right.sql})", NUMBER, left, right)
        return left

    def _shifted(self, start: Token, left: Part, right: Part, sign: str) -> Part:
        moment = parse_moment(left.literal)
        if moment is None:
            raise self._refused(start, " computes with a column of times", "compute on the other side: timestamp > now() - '2h'")
        duration = parse_duration(right.literal)
        try:
            return _time(self._since(start), moment + duration if sign == "+" else moment - duration)
        except OverflowError:
            raise self._refused(start, " is out of range for a time") from None

    def _unary(self) -> Part:
        start = self._take("-", "+")
        if start is None:
            return self._primary()
        inner = self._unary()
        self._require_numbers(start, inner)
        if start.kind == "+":
            return inner
        return self._made(start, f"(- {inner.sql})", NUMBER, inner, literal=None if inner.literal is None else -inner.literal)

    def _primary(self) -> Part:
        token = self._expect("(", *VALUES, *CONSTANTS)
        if token.kind == "(":
            part = self._or()
            if self._next.kind == ",":
                raise refusal("a list of values is not allowed")
            self._expect(")")
            return part._replace(text=self._since(token), listed=False)
        if token.kind == "word" and self._take("("):
            return self._function(token)
        if self._next.kind in VALUES:  # two values in a row: the second is what is wrong
            self._expect("end")
        if token.kind in CONSTANTS:
            sql, kind, literal = CONSTANTS[token.kind]
            return Part(sql, kind, token.text, literal=literal)
        if token.kind == "number":
            number = _number(token.text)
            return Part("?", NUMBER, token.text, (number,), literal=number)
        plain = token.text[1:-1] if token.kind != "word" else token.text
        if token.kind == "string":
            text = plain.replace("''", "'")
            return Part("?", TEXT, token.text, (text,), literal=text)
        column = WHERE_COLUMNS.get(plain) or WHERE_COLUMNS.get(HEADINGS.get(plain) or plain.lower())
        if column is None:
            raise _unknown_column(plain, token.kind == "quoted")
        return Part(column.sql, column.kind, token.text, columns=frozenset({column.name}), words=column.words)

    def _list(self) -> list[Part]:
        """Read values up to the closing parenthesis."""
        if self._take(")"):
            return []
        items = [self._or()]
        while self._take(","):
            items.append(self._or())
        self._expect(")")
        return items

    def _function(self, start: Token) -> Part:
        name = _ALIASES.get(start.text.lower(), start.text.lower())
        if name not in FUNCTIONS:
            raise _unknown_function(name)
        parts = self._list()
        least, most = _TAKES.get(name, (1, 1))
        if not least <= len(parts) <= most:
            raise self._refused(start, f": {FUNCTIONS[name]}")
        if name == "now":
            return _time(self._since(start), self._now)
        if name == "coalesce":
            parts = self._alike(start, *parts)
            return self._made(start, f"coalesce({_joined(parts)})", parts[0].kind, *parts)
        if name in ("abs", "round"):
            self._require_numbers(start, *parts)
            if not all(isinstance(part.literal, int) for part in parts[1:]):
                raise refusal("round(number, digits): digits must be a whole number")
            return self._made(start, f"{name}({_joined(parts)})", NUMBER, *parts)
        if parts[0].kind not in (TEXT, TIME):
            raise self._refused(start, f": {name} takes a text")
        return self._made(start, f"{name}({_text_of(parts[0])})", NUMBER if name == "length" else TEXT, *parts)

    def _require_numbers(self, start: Token, *parts: Part) -> None:
        for part in parts:
            if part.kind != NUMBER:
                raise self._refused(start, f" computes with {shortened(part.text)!r}, which is a {part.kind}")

    def _alike(self, start: Token, *parts: Part) -> list[Part]:
        """Convert values that are compared to one kind, which any of them may determine; WhereError if that is not possible."""
        kinds = {part.kind for part in parts}
        if "null" in kinds:
            raise self._refused(start, " is never true", "use `is null` or `is not null`")
        words = next((part.words for part in parts if part.words), ())
        for part in parts:
            if words and isinstance(part.literal, str) and part.literal not in words:
                hint = f"write one of {', '.join(words)}; a comparison's own word is the column `compared`"
                raise self._refused(start, f": {shortened(part.literal)!r} is not a verdict of a dump", hint)
        alike = list(parts)
        if TIME in kinds:
            alike = list(map(_as_time, parts))
        elif BOOL in kinds:
            alike = list(map(_as_flag, parts))
        for part in alike:
            if part.kind != alike[0].kind:
                why = f" compares a {alike[0].kind} with a {part.kind}"
                raise self._refused(start, why, "text goes in 'single quotes', numbers do not")
        return alike


def _condition(part: Part, word: str) -> Part:
    if part.kind != BOOL:
        why = f"{shortened(part.text)!r} is a {part.kind}, `{word}` needs a condition"
        raise refusal(why, "compare it with something")
    return part


def _joined(parts: list[Part]) -> str:
    return ", ".join(part.sql for part in parts)


def _time(text: str, moment: datetime) -> Part:
    return Part("?", TIME, text, (micros_of(moment),), literal=format_timestamp(moment))


def _as_time(part: Part) -> Part:
    """Accept a text that is a time."""
    if part.kind != TEXT or part.literal is None:
        return part
    moment = parse_moment(part.literal)
    if moment is None:
        raise refusal(f"{shortened(part.literal)!r} is not a time", "write '2025-06-19', '2025-06-19 05:26' or now() - '2h'")
    return _time(part.text, moment)


def _as_flag(part: Part) -> Part:
    """Accept 0 and 1 for false and true."""
    if part.kind == NUMBER and part.literal in (0, 1):
        return Part(str(int(part.literal)), BOOL, part.text, literal=bool(part.literal))
    return part


def _text_of(part: Part) -> str:
    """Return a part's SQL as a text: a time as records spell it."""
    return f"moment({part.sql})" if part.kind == TIME else part.sql


def _number(text: str) -> int | float:
    try:
        value: int | float = int(text) if text.isdecimal() and len(text) < 20 else float(text.replace("_", "?"))
    except ValueError:
        raise refusal(f"{shortened(text)!r} is not a number") from None
    if (isinstance(value, int) and value >= 2**63) or not math.isfinite(value):
        raise refusal(f"{shortened(text)} is too large a number")
    return value


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
    meant = f"; did you mean {near[0]}?" if near else ""
    return refusal(f"the function {shortened(name)} is not allowed{meant}", f"use one of {'; '.join(FUNCTIONS.values())}")
