"""Units: parse the sizes and times that a user writes, and format counts and sizes.

    500        bytes                        10GB, 10 gb, 10G      10 * 1000**3
    1.5k       1500                         10GiB, 10 gib, 10Gi   10 * 1024**3

Only the standard library is used here, so any zone may import it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

from actordbg.base.errors import ActordbgError, UsageError

Key = TypeVar("Key")
Value = TypeVar("Value")
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*")
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_size(option: str, text: str) -> int:
    """Parse `10GB` (10**9), `10GiB` (2**30) or a plain number, as bytes. Raises a UsageError that names `option`."""
    size = _amount(text, {unit + end: count for unit, count in _BYTES.items() for end in ("", "b")})
    if not 0 <= size < 2**63:
        raise UsageError(f"{option} {text!r:.40} is not a size, or too large", hint="write it like 500MB, 10GB or 5GiB")
    if 0 < size < 1024 and text[-1].isdecimal():
        raise UsageError(f"{option} {text} would be {text} bytes", hint=f"write the unit: {text}GB, {text}MB or {text}B")
    return int(size)


def parse_seconds(option: str, text: str) -> float:
    """Parse `2s`, `500ms`, `1.5` (seconds), `2m` or `1h`, as seconds above 0. Raises a UsageError that names `option`."""
    seconds = _amount(text, _SECONDS)
    if not 0 < seconds < 1e9:
        raise UsageError(f"{option} {text!r:.40} is not a time", hint="write it like 500ms, 2s or 1.5m")
    return seconds


def _amount(text: str, units: Mapping[str, float]) -> float:
    """Parse a number with one of these units; -1 for anything else. Whole numbers stay exact."""
    match = _AMOUNT.fullmatch(text.lower())
    if not match or match[2] not in units:
        return -1
    return (int(match[1]) if match[1].isdecimal() and len(match[1]) < 20 else float(match[1])) * units[match[2]]


def human_bytes(count: float | None) -> str:
    """Format 12345 as "12.1 KiB"; None (not measured) as "-"."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def ago(moment: str) -> str:
    """Say how long ago a UTC time was: "12 s ago", "3 h ago", "5 d ago"; "-" if it is not a time."""
    try:
        then = datetime.fromisoformat(moment.replace("Z", "+00:00"))
        seconds = (datetime.now(timezone.utc) - then).total_seconds()
    except (ValueError, TypeError):
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def plural(count: int, noun: str) -> str:
    """Format 3, "dump" as "3 dumps"; 2, "process" as "2 processes"; 2, "batch" as "2 batches"."""
    ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{ending}"


def some(names: Collection[object], most: int = 3) -> str:
    """List at most so many, and ", ..." for the others."""
    return listed(list(names)[:most]) + (", ..." if len(names) > most else "")


def listed(names: Iterable[object]) -> str:
    """Return "a, b, c"."""
    return ", ".join(map(str, names))


def first_line(text: object) -> str:
    """Return the first line of a message or an error, without space around it; "" for None."""
    return "" if text is None else str(text).strip().partition("\n")[0]


def release(version: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version: "2.13.0+cpu" as (2, 13, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Group the values by key, both in order of appearance."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


LAST = "last"
LEAST_OF_HANDLE = 6
"""Characters of a handle that must be typed at least."""
MOST_NAMED = 200
"""Most ids that an expression may name: its length is limited."""
_SHOWN = 5


def resolve(name: str, ids: Sequence[str], what: str, *, made_by: str, error: type[ActordbgError] = UsageError) -> str:
    """Resolve `name`, an id, the beginning of an id, a handle or "last", among `ids` (the newest last).

    what: "replay", for messages. made_by: the command that makes such a record. Raises `error` unless exactly one id matches.
    """
    matches = list(ids[-1:]) if name == LAST else [candidate for candidate in ids if name and candidate.startswith(name)]
    if not matches and len(name) >= LEAST_OF_HANDLE:
        matches = [candidate for candidate in ids if candidate.rpartition("-")[2].startswith(name)]
    if len(matches) == 1 or name in matches:
        return name if name in matches else matches[0]
    if not ids:
        raise error(f"there is no {what} yet", hint=f"`actordbg {made_by}` creates one")
    if matches:
        raise error(f"{name!r:.80} means several ids: {some(matches[::-1], _SHOWN)}", hint="write the whole id")
    raise error(f"no {what} has the id {name!r:.80}", hint=f"the newest: {some(ids[::-1], _SHOWN)}, or `{LAST}`")


def new_replay_id() -> str:
    """Return a new id like `20250619T052608-9f3a2c`: it sorts by time, and is unique without coordination."""
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}-{os.urandom(3).hex()}"


_DUMP_ID = re.compile(r"(?<![\w/#'\"`;])\d{8}T\d{6}\.\d{6}Z-\d{6,}-\d+-([0-9a-f]{8})[0-9a-f]*(?![\w'\"`&]|\.\w)")
"""A dump id in a text, except in quotes and in a path, which must stay usable."""


def with_handles(text: str, shown: str = "{1}") -> str:
    """Replace each dump id in `text` by its handle, the beginning of the last part of the id.

    shown: how, with {0} for the id and {1} for the handle.
    """
    return _DUMP_ID.sub(lambda match: shown.format(match[0], match[1]), text)


def letter_of(index: int) -> str:
    """Format 0, 1, ... 25, 26 as A, B, ... Z, AA."""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters


def passed_of(replay: Mapping[str, Any]) -> str:
    """Return how many inputs of a replay passed, and the status unless the replay is complete: "3/8 interrupted"."""
    state = "" if replay["status"] == "complete" else f" {replay['status']}"
    return f"{replay['passed']}/{replay['inputs']}{state}"
