"""What a shell completes behind an option or a command: ids of dumps and of replays, names, and the values of a setting.

Completing reads the store and never fails: where nothing can be read, nothing is offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer

from actordbg.base.errors import ActordbgError
from actordbg.base.units import LAST
from actordbg.cli.options import store_of

MOST = 50
"""Ids that are offered, the newest."""


def complete_replays(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids and names of replays, the newest first, and `last`."""
    from actordbg.catalog.query import list_own_replays, list_replays, open_fresh

    try:
        catalog = open_fresh(store_of(ctx).require())
        rows = list_replays(catalog)
        handles = [f"@{number}" for number in range(1, min(len(list_own_replays(catalog)), 9) + 1)] if incomplete else []
    except (ActordbgError, OSError):
        return []
    names = (str(name) for row in rows if (name := row.config.get("name")))
    return _beginning(incomplete, (LAST, *names, *handles, *(row.replay_id for row in rows)))


def complete_others(ctx: typer.Context, incomplete: str) -> list[str]:
    """What a replay is compared with."""
    return [*_beginning(incomplete, ("truth", "golden")), *complete_replays(ctx, incomplete)]


def complete_dumps(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of dumps, the newest first."""
    from actordbg.catalog.query import open_fresh, select_dumps

    asked = incomplete.replace("'", "")
    where = f"dump_id >= '{asked}' and dump_id <= '{asked}z'" if asked else None
    try:
        rows = select_dumps(open_fresh(store_of(ctx).require()), where, order="newest", limit=MOST)
    except (ActordbgError, OSError):
        return []
    return _beginning(incomplete, (row.dump_id for row in rows))


def of_values(values: Iterable[object]) -> Callable[[str], list[str]]:
    """A completion of these values, and of comma lists of them."""
    words = tuple(map(str, values))

    def complete(incomplete: str) -> list[str]:
        before, comma, begun = incomplete.rpartition(",")
        return [f"{before}{comma}{word}" for word in words if word.startswith(begun)]

    return complete


def _beginning(incomplete: str, words: Iterable[str]) -> list[str]:
    from actordbg.base.foreign_text import in_line

    fitting = (word for word in dict.fromkeys(words) if word.startswith(incomplete) and in_line(word) == word)
    return [word for _, word in zip(range(MOST), fitting, strict=False)]
