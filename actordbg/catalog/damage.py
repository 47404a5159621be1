"""What cannot be used in a store, as every command names it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Damaged:
    """One dump, pack or replay that cannot be used: its path below the store, the code of the error it gives, what is wrong.

    code: "corrupt-dump" for what is broken itself, "newer-format" for what a newer actordbg wrote, "store" for what cannot
    be read or lies in the wrong place.
    """

    path: str
    code: str
    reason: str
