"""What people write in `--where` that is no SQL, written as SQL; texts in quotes are left alone.

    seq_len > 4k && rank = 0            seq_len > 4000 and rank = 0
    bytes > 10MB                        bytes > 10000000
    timestamp > now() - 1h              timestamp > now() - '1h'
    last 2h, last day                   timestamp > now() - '2h', timestamp > now() - '1d'

The answer is checked like anything else (`where`), so nothing is allowed here that is not allowed there.
"""

from __future__ import annotations

import re

from actordbg.base.units import parse_size

_QUOTED = re.compile(r"('(?:[^']|'')*'|\"(?:[^\"]|\"\")*\")")
_DURATION = r"(?:\d{1,9}(?:\.\d{1,9})?[wdhms])+"
_SHIFTED = re.compile(rf"(\bnow\s*\(\s*\)\s*[-+]\s*)({_DURATION})\b", re.IGNORECASE)
_WORDS = {"week": "w", "day": "d", "hour": "h", "minute": "m", "min": "m", "second": "s"}
_LAST = re.compile(
    rf"\blast\s+(?:({_DURATION})\b|(?:(\d{{1,9}}(?:\.\d{{1,9}})?)\s*)?({'|'.join(_WORDS)})s?\b)(?!\s*[(=<>!])", re.IGNORECASE
)
_SIZE = re.compile(r"(?<![\w.'])(\d{1,19}(?:\.\d{1,9})?(?:k|[kmgt]i?b))\b", re.IGNORECASE)


def as_sql(text: str) -> str:
    """The expression with its shorthands written out. One pass over the text for each of them, no recursion."""
    pieces = _QUOTED.split(text)
    return "".join(piece if index % 2 else _written_out(piece) for index, piece in enumerate(pieces))


def _written_out(piece: str) -> str:
    piece = piece.replace("&&", " and ")
    piece = _SHIFTED.sub(r"\1'\2'", piece)
    piece = _LAST.sub(_since, piece)
    return _SIZE.sub(lambda found: str(parse_size("--where", found[1])), piece)


def _since(found: re.Match[str]) -> str:
    duration = found[1] or f"{found[2] or 1}{_WORDS[found[3].lower()]}"
    return f"timestamp > now() - '{duration}'"
