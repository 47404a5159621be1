"""JSON out of files that nobody vouches for: what it gives back can be printed, stored and written as JSON again.

`json.loads` accepts more than JSON is, and than the rest of a program survives: NaN and infinity (which `json.dumps` refuses
later), lone surrogates (which no terminal and no database takes), other encodings than UTF-8, nesting that only just
fits (and no longer fits one call deeper), and 4 MB of `[],[],[]` that become 90 MB of lists. All of that is a ValueError here.

Example::

    strictjson.loads(b'{"temperature": 1e999}')      # ValueError: 1e999 is not a finite number
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 64
"""Most levels of lists and objects in each other."""
MAX_ITEMS = 2**16
"""Most commas and opening brackets, so that few bytes cannot become many objects."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(data: bytes) -> Any:
    """The value of a JSON text in UTF-8. Raises ValueError for anything else, and for what is too large or too deep."""
    text = str(data, "utf-8")
    brackets = text.count("[") + text.count("{")
    if brackets + text.count(",") > MAX_ITEMS:
        raise ValueError(f"it has more than {MAX_ITEMS} values")
    try:
        value = _decode(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    if brackets > MAX_DEPTH and _deeper_than(value, MAX_DEPTH):
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text:.20} is not a finite number")
    return value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_decode = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse).decode


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return any(isinstance(item, dict | list) for item in level)
