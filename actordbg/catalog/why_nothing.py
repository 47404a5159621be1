"""Why a condition selects no dump: which of its parts selects nothing by itself, and what there is instead.

Example::

    reasons(catalog, "seq_len>4096 and role='policy'")
    # ["role = 'policy' selects none of 257: role is actor (200), reference (57)"]
"""

from __future__ import annotations

from actordbg.catalog import sandbox
from actordbg.catalog.columns import COLUMNS, NUMBER, TIME, joins, shortened
from actordbg.catalog.query import Catalog, count_dumps, frequent_values
from actordbg.catalog.where import compile_where, parts_of

_SHOWN = 5


def reasons(catalog: Catalog, where: str) -> list[str]:
    """A line for each part of the expression (joined by `and`) that no dump meets; one line if each part alone has some."""
    total = count_dumps(catalog)
    counts = {part: count_dumps(catalog, part) for part in parts_of(where)}
    if nothing := [part for part, count in counts.items() if not count]:
        return [f"{shortened(part)} selects none of {total:,}{_instead(catalog, part)}" for part in nothing]
    return [f"each part alone selects some: {', '.join(f'{shortened(part)} ({count:,})' for part, count in counts.items())}"]


def _instead(catalog: Catalog, part: str) -> str:
    """What the columns of a part hold, in words."""
    told = [_held(catalog, name) for name in sorted(compile_where(part).columns)]
    return f": {'; '.join(told)}" if told else ""


def _held(catalog: Catalog, name: str) -> str:
    """The values of a column: from the least to the largest, or the most frequent ones with their numbers of dumps."""
    column = COLUMNS[name]
    if column.kind in (NUMBER, TIME):
        with sandbox.guarded(catalog.store.catalog_path) as box:
            ((least, largest),) = box.rows(f"SELECT min({column.sql}), max({column.sql}) FROM dump AS d {joins([name])}")
        return f"{name} is null everywhere" if least is None else f"{name} is {column.shown(least)} to {column.shown(largest)}"
    rows = frequent_values(catalog, name, _SHOWN + 1)
    values = [f"{'null' if value is None else value} ({count:,})" for value, count in rows[:_SHOWN]]
    return f"{name} is {', '.join(values)}{', ...' if len(rows) > _SHOWN else ''}"
