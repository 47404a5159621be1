"""What a pickle is turned into: plain data, and notes of what it asks for, and the errors of a refused file.

Standard library only: it runs in a child process that has nothing else (see `actordbg.dumps.decode_child`).
"""

from __future__ import annotations

from dataclasses import dataclass

from actordbg.base.errors import CorruptDump, UnsafeInput


def unsafe(message: str) -> UnsafeInput:
    """Make the error for a file that asks for something that no dump needs."""
    return UnsafeInput(message, hint="nothing in it was executed; do not open this file with pickle or torch.load")


def corrupt(message: str) -> CorruptDump:
    """Make the error for a file that is not a dump of the old recorder."""
    return CorruptDump(message, hint="copy the file again from where it was written; it is not complete or not an actor dump")


# None of the notes does anything. They compare by identity and print nothing of what they hold, because a hostile file may make
# them contain themselves.


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
class PickleCall:
    """A call that the pickle asks for. It is never made."""

    function: Name
    arguments: tuple[object, ...]


@dataclass(frozen=True, eq=False, repr=False)
class Persistent:
    """A persistent id: how a storage header names its storage."""

    identity: object


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """Numbers that were appended to a list at once, as the place of their opcodes."""

    kind: str
    start: int
    end: int

    @property
    def place(self) -> list[object]:
        """It as JSON has it."""
        return [self.kind, self.start, self.end]
