"""Which one a user means: by its id, by the beginning of one, or by `last`.

Dumps, replays, matrices and noise floors are all named so, and a wrong name is answered in the same words.

    resolve("20250619T05", ids, "replay", made_by="replay")     # the only id that begins so
    resolve("last", ids, "matrix", made_by="matrix")            # the newest

Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from actordbg.base.errors import ActordbgError, UsageError

LAST = "last"
MOST_NAMED = 200
"""Ids that an expression may name: it has a longest length."""
_SHOWN = 5


def resolve(name: str, ids: Sequence[str], what: str, *, made_by: str, error: type[ActordbgError] = UsageError) -> str:
    """The id among `ids` (the newest last) that `name` means.

    what: "replay", for messages. made_by: the command that makes one. Raises `error` where there is none, or more than one.
    """
    found = list(ids[-1:]) if name == LAST else [one for one in ids if name and one.startswith(name)]
    if len(found) == 1 or name in found:
        return name if name in found else found[0]
    if not ids:
        raise error(f"there is no {what} yet", hint=f"`actordbg {made_by}` makes one")
    if found:
        raise error(f"several ids begin with {name!r:.80}: {_some(found)}", hint="write more of the id")
    raise error(f"no {what} has the id {name!r:.80}", hint=f"the newest: {_some(ids)}, or `{LAST}`")


def is_own(path: Path) -> bool:
    """Whether this user made what lies there: a store may be shared, and `last` should not be somebody else's."""
    try:
        return path.stat().st_uid == os.geteuid()
    except OSError:
        return False


def _some(ids: Sequence[str]) -> str:
    return f"{'..., ' if len(ids) > _SHOWN else ''}{', '.join(ids[-_SHOWN:])}"


def new_replay_id(moment: datetime | None = None) -> str:
    """`20250619T052608-9f3a2c`: sorts by time, unique without asking anybody."""
    moment = moment or datetime.now(timezone.utc)
    return f"{moment.astimezone(timezone.utc):%Y%m%dT%H%M%S}-{os.urandom(3).hex()}"


def letter_of(index: int) -> str:
    """0, 1, ... 25, 26 as A, B, ... Z, AA."""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters
