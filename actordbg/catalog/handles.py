"""Short ways to name a replay: `@1` is the newest that `actordbg replays` lists, `@2` the one before it, `@last` the same as
`last`; and the name that it got from `--name`, of which the newest counts.

    replay_of(catalog, rows, "@2")      # "20261122T104500-9f3a2c"; None for what is no handle: an id, or the beginning of one
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from actordbg.base.errors import UsageError
from actordbg.base.ids import LAST
from actordbg.config.replay_config import NAME

_HANDLE = re.compile(r"@(\d{1,9}|last)\Z")


class Named(Protocol):
    """A replay as its handle needs it."""

    replay_id: str
    config: dict[str, object]


def is_handle(name: str) -> bool:
    """Whether it is written as `@1` or `@last` are."""
    return name.startswith("@")


def replay_of(rows: Sequence[Named], listed: Sequence[Named], name: str) -> str | None:
    """The id that a handle or a name means; None for what is neither. rows: all replays, listed: those with a number, the newest
    first. UsageError for a number that no replay has."""
    if is_handle(name):
        found = _HANDLE.match(name)
        number = 1 if name == f"@{LAST}" else int(found[1]) if found else 0
        if not 1 <= number <= len(listed):
            raise UsageError(f"no replay is {name:.40}", hint=f"there are @1 to @{len(listed)}: `actordbg replays`")
        return listed[number - 1].replay_id
    if NAME.match(name) is None or any(row.replay_id.startswith(name) for row in rows):
        return None
    return next((row.replay_id for row in rows if row.config.get("name") == name), None)
