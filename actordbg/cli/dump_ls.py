"""`actordbg dump ls`: the dumps of a store that a condition selects; and `dump columns`: what it can ask for."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from actordbg.base.units import ago
from actordbg.cli import output
from actordbg.cli.options import AllowEmpty, Json, Where, require_some, store_of

if TYPE_CHECKING:
    from actordbg.catalog.query import Catalog, DumpRow


_SHORT = 30
_ROWS = 50
_WIDE, _WIDEST = 100, 140
"""Columns of a terminal from which when a dump was recorded and its run are shown, and from which ids are whole."""


def ls(
    ctx: typer.Context,
    where: Where = None,
    order: Annotated[
        str, typer.Option("--order", help="newest (first), time (oldest first), length, or longest (first).")
    ] = "newest",
    limit: Annotated[
        int | None, typer.Option("--limit", min=0, help="At most this many rows; 0 for all (default: 50; with --json all).")
    ] = None,
    allow_empty: AllowEmpty = False,
    as_json: Json = False,
) -> None:
    """List dumps, the newest first.

    Columns for --where: rank, seq_len, timestamp, batch_size, tokens, padding, action_len, run, step, role, training,
    source, bytes, ... and of the last result: status, error, signature, forward_s, backward_s, peak_memory, replay.
    `actordbg dump columns` has them all. Exit code 5 if there is none.

    Example: actordbg dump ls --where "seq_len>4096 and timestamp > now() - '2h'"
    """
    from actordbg.catalog.query import count_dumps, each_dump, open_fresh, select_dumps
    from actordbg.cli.index import warn_damaged

    catalog = open_fresh(store_of(ctx), where)
    limit = (0 if as_json else _ROWS) if limit is None else limit
    warn_damaged(catalog.summary)
    if as_json:
        shown = output.emit_each(each_dump(catalog, where, order=order, limit=limit or None))
    else:
        rows = select_dumps(catalog, where, order=order, limit=limit or None)
        _render(rows, catalog, where)
        shown = len(rows)
    total = count_dumps(catalog, where) if limit and shown == limit else shown
    if total > shown:
        output.note(f"{total - shown:,} more; --limit 0 shows all")
    require_some(shown, allow_empty)


def columns(as_json: Json = False) -> None:
    """List the columns, functions and operators of --where.

    Only like kinds compare. What is no SQL but plain (4k, 10MB, last 2h, 'yesterday', &&) is understood too.

    Example: actordbg dump columns
    """
    from actordbg.catalog.tables import HEADINGS, WHERE_COLUMNS

    headings = {name: heading for heading, name in HEADINGS.items()}
    answer = [
        {"name": column.name, "kind": column.kind, "heading": headings.get(column.name), "meaning": column.doc}
        for column in WHERE_COLUMNS.values()
    ]
    output.emit(answer, lambda _: _render_columns(), as_json)


def _render_columns() -> None:
    from actordbg.catalog.tables import FUNCTIONS, OPERATORS, WHERE_COLUMNS

    rows = [(column.name, column.kind, column.doc) for column in WHERE_COLUMNS.values()]
    output.table(("column", "kind", "meaning"), rows, tight=True)
    output.say()
    output.say(f"operators: {OPERATORS}")
    for form in FUNCTIONS.values():
        output.say(form)


def _render(rows: list[DumpRow], catalog: Catalog, where: str | None) -> None:
    from actordbg.catalog.selections import reasons

    if not rows:
        output.say(f"no dump matches {where}" if where else "there are no dumps in this store yet")
        for reason in reasons(catalog, where) if where else ():
            output.note(reason)
        return
    width = _width()
    ids = shown_ids([row.dump_id for row in rows], width)
    more = ("when", "run") if width >= _WIDE else ()
    whose = ("trainer",) if len({row.trainer for row in rows}) > 1 else ()
    output.table(
        ("dump", *whose, "rank", "role", "B", "S", "tokens", "mark", "last", *more),
        [
            (dump_id, *((row.trainer,) if whose else ()), row.rank, row.role, row.batch_size, row.seq_len, row.tokens, _mark(row))
            + (row.status, *((ago(row.timestamp), row.run) if more else ()))
            for dump_id, row in zip(ids, rows, strict=True)
        ],
        tight=True,
    )


def _mark(row: DumpRow) -> str | None:
    """Why a dump is a special one: the trigger that kept it, or the ring that it came out of."""
    return row.triggered or row.recovered or ("pinned" if row.pinned else None)


def shown_ids(dump_ids: list[str], width: int) -> list[str]:
    """The ids, cut to time and call number on a narrow terminal if they still differ; every command takes such a beginning."""
    short = [dump_id[:_SHORT] for dump_id in dump_ids]
    return short if width < _WIDEST and len(set(short)) == len(dump_ids) else dump_ids


def _width() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else output.PIPE_WIDTH
