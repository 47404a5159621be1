"""One thing that doctor looked at, and the words for how it stands."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(str, Enum):
    """ok: fine. warn: works, or only a part that you may not need does not. bad: something you asked for will fail."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it stands, what was seen, and (unless it is fine) what to do."""

    name: str
    status: Level
    detail: str
    remedy: str = ""


def ok(name: str, detail: str) -> Finding:
    """A finding that needs nothing done."""
    return Finding(name, Level.OK, detail)


def warn(name: str, detail: str, remedy: str) -> Finding:
    """A finding that may matter."""
    return Finding(name, Level.WARN, detail, remedy)


def bad(name: str, detail: str, remedy: str) -> Finding:
    """A finding that makes something fail."""
    return Finding(name, Level.BAD, detail, remedy)
