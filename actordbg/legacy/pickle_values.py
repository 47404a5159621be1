"""What a pickle is turned into: plain data, and four kinds of note about what it asked for. None of them does anything.

They compare by identity and print nothing of what they hold, because a hostile file may make them contain themselves.
Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

UNSAFE_HINT = "nothing of it was executed; do not open this file with pickle or torch.load"
CORRUPT_HINT = "copy the file again from where it was written; it is not complete or not an actor dump"


@dataclass(frozen=True, eq=False, repr=False)
class Span:
    """A bytes object of the pickle, as its place `[start, end)` in the file."""

    start: int
    end: int


@dataclass(frozen=True, eq=False, repr=False)
class Name:
    """A global that the pickle mentions. Two strings; it is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """A call that the pickle asks for. It is never made."""

    function: Name
    arguments: tuple[object, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Persistent:
    """A persistent id: how a storage header names its storage."""

    identity: object
