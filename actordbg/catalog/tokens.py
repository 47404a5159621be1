"""The pieces of a `--where` expression: names, values, keywords and signs. Anything else is refused here, by name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from actordbg.catalog.tables import BOOL, refusal, shortened

MAX_DEPTH = 16
MAX_OPERATORS = 200
MAX_ITEMS = 1000

_TOKEN = re.compile(
    r"""(?P<string>'(?:[^']|'')*')|(?P<quoted>"(?:[^"]|"")*")|(?P<number>(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?\w*)|(?P<word>[a-z_]\w*)
    |(?P<other>--|/\*|->>?|\|\|)|(?P<sign>[<>!=]=|<>|[-+*/%=<>(),])|(?P<space>\s+)|(?P<unknown>.\w*)""",
    re.VERBOSE | re.DOTALL | re.ASCII | re.IGNORECASE,
)
COMPARISONS = {"=": "=", "==": "=", "!=": "IS NOT", "<>": "IS NOT", "<": "<", "<=": "<=", ">": ">", ">=": ">="}
"""Signs in SQLite's spelling: NULL counts as unequal."""
SIGNS = (*COMPARISONS, "is", "in", "between", "like", "not")
"""What stands between the sides of a comparison, or begins that."""
CONSTANTS = {"null": ("NULL", "null", None), "true": ("1", BOOL, True), "false": ("0", BOOL, False)}
"""SQL, kind and value of words that stand for a value."""
VALUES = ("word", "quoted", "string", "number")
_KEYWORDS = {"and", "or", *SIGNS, *CONSTANTS}
_REFUSED = {
    "--": "comments are not allowed", "/*": "comments are not allowed",
    ";": "';' is not allowed: write one expression, not statements",
    "select": "queries inside the expression are not allowed", "exists": "queries inside the expression are not allowed",
    "case": "'case' is not allowed", "cast": "'cast' is not allowed",
}  # fmt: skip


class Token(NamedTuple):
    """A piece of the text. kind: word, quoted, string, number or end; of a keyword or a sign itself."""

    kind: str
    text: str
    start: int
    end: int


def tokens_of(text: str) -> Iterator[Token]:
    """Yield the pieces of a text. Refuses what no expression has, and chains that are long enough to make a reader recurse."""
    operators = prefixes = count = depth = 0
    for match in _TOKEN.finditer(text):
        kind, word = str(match.lastgroup), match[0]
        if kind == "space":
            continue
        if kind == "unknown" and word[0] in "'\"":
            raise refusal(f"a {word[0]} is not closed")
        lower = word.lower()
        if kind in ("other", "unknown") or (kind == "word" and lower in _REFUSED):
            raise refusal(_REFUSED.get(lower, f"{shortened(word)!r} is not allowed"))
        if kind == "sign" or (kind == "word" and lower in _KEYWORDS):
            kind = lower
        count += 1
        operators += kind not in ("string", "number", ",", "(", ")")
        prefixes = prefixes + 1 if kind in ("not", "-", "+") else 0
        depth += (kind == "(") - (kind == ")")
        if depth > MAX_DEPTH:
            raise refusal(f"parentheses are nested more than {MAX_DEPTH} deep")
        if depth < 0:
            raise refusal("unmatched ')'", "balance the parentheses")
        if prefixes > MAX_DEPTH:
            raise refusal(f"more than {MAX_DEPTH} signs or `not` in a row")
        if operators > 3 * MAX_OPERATORS:
            raise refusal(f"the expression has more than {MAX_OPERATORS} terms")
        if count > 3 * MAX_OPERATORS + 2 * MAX_ITEMS:
            raise refusal(f"the expression has more than {count} words; lists may have {MAX_ITEMS} items")
        yield Token(kind, word, match.start(), match.end())
    if depth:
        raise refusal("a ( is not closed")
    yield Token("end", "", len(text), len(text))
