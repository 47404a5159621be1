"""Why a condition selects no dump: which of its parts selects nothing by itself, and what there is instead.

Example::

    reasons(catalog, "seq_len>4096 and role='policy'")
    # ["role = 'policy' selects none of 257: role is actor (200), reference (57)"]
"""

from __future__ import annotations

import re

from actordbg.catalog import sandbox
from actordbg.catalog.columns import COLUMNS, NUMBER, TIME, joins, shortened
from actordbg.catalog.query import Catalog, count_dumps, frequent_values
from actordbg.catalog.where import compile_where, parts_of

_SHOWN = 5
_LIKE_IT = 2
"""Ids that are shown: one is as long as half a line."""
_SECOND = len("20250619T052608")
"""What ids of one second have in common."""
_SHORTEST, _LONGEST = 3, 100
_IDS = f"SELECT dump_id FROM dump WHERE dump_id LIKE ? ORDER BY dump_id LIMIT {_LIKE_IT + 1}"
_TEXT = re.compile(r"'([^']+)'")


def no_match(catalog: Catalog, where: str) -> str:
    """What to say where a condition selects no dump: that, and why."""
    return f"no dump matches {where}; {'; '.join(reasons(catalog, where))}"


def reasons(catalog: Catalog, where: str) -> list[str]:
    """A line for each part of the expression (joined by `and`) that no dump meets; one line if each part alone has some."""
    total = count_dumps(catalog)
    counts = {part: count_dumps(catalog, part) for part in parts_of(where)}
    if nothing := [part for part, count in counts.items() if not count]:
        return [f"{shortened(part)} selects none of {total:,}{_instead(catalog, part)}" for part in nothing]
    return [f"each part alone selects some: {', '.join(f'{shortened(part)} ({count:,})' for part, count in counts.items())}"]


def _instead(catalog: Catalog, part: str) -> str:
    """What the columns of a part hold, in words."""
    told = [_ids(catalog, part) if name == "dump_id" else _held(catalog, name) for name in sorted(compile_where(part).columns)]
    return f": {'; '.join(told)}" if told else ""


def _ids(catalog: Catalog, part: str) -> str:
    """The ids that have a text of the part in them, or its beginning: each dump has its own, so the most frequent say nothing."""
    with sandbox.guarded(catalog.store.catalog_path) as box:
        for text in _TEXT.findall(part)[:_SHOWN]:
            for like in dict.fromkeys((text, text[:_SECOND])):
                if len(like.strip("%_")) < _SHORTEST:
                    continue
                rows = box.rows(_IDS, [f"%{like[:_LONGEST]}%"])
                if found := [dump_id for (dump_id,) in rows]:
                    more = ", ..." * (len(found) > _LIKE_IT)
                    return f"dump_id is like it in {', '.join(found[:_LIKE_IT])}{more}"
    return "no dump_id is like it; `actordbg dump ls` lists them"


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
