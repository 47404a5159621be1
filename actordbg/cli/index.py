"""`actordbg index`: make the catalog agree with the store's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from actordbg.base.errors import CorruptDump
from actordbg.cli import output
from actordbg.cli.options import Json, Quiet, store_of

if TYPE_CHECKING:
    from actordbg.catalog.damage import Damaged
    from actordbg.catalog.indexer import IndexSummary


def index(
    ctx: typer.Context,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Forget the catalog and make it again from the files.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Index what is new in the store.

    The catalog then agrees with the files: dumps, results of replays, patches. Every command that reads it does the same
    first. Use this to see which files are damaged, or after the catalog was lost or damaged.

    Example: actordbg index --rebuild
    """
    from actordbg.catalog.indexer import refresh

    with output.progress("reading headers", None, quiet=quiet or as_json) as advance:
        seen = 0

        def report(done: int, total: int) -> None:
            nonlocal seen
            advance(done - seen, total=total)
            seen = done

        summary = refresh(store_of(ctx), rebuild=rebuild, on_progress=report)
    output.emit(summary, _render, as_json)


def warn_damaged(summary: IndexSummary) -> None:
    """Say on standard error what could not be indexed; commands that read the catalog call this."""
    broken = sum(item.code == CorruptDump.code for item in summary.damaged)
    others = len(summary.damaged) - broken
    found = [output.plural(broken, "damaged file")] if broken else []
    found += [f"{output.plural(others, 'file')} that cannot be used"] if others else []
    if found:
        output.note(f"warning: {' and '.join(found)}; `actordbg index` lists them")


def damage_line(item: Damaged) -> str:
    """One line about a file that cannot be used; "damaged" only if it is broken itself."""
    return f"{'damaged' if item.code == CorruptDump.code else 'not usable'}: {item.path}: {item.reason}"


def _render(summary: IndexSummary) -> None:
    output.say(
        f"{output.plural(summary.dumps, 'dump')} in the catalog: {summary.added:,} added, {summary.removed:,} removed; "
        f"{output.plural(summary.results, 'new result')} of {output.plural(summary.replays, 'replay')} "
        f"({summary.seconds:.2f} s)"
    )
    if summary.skipped_lines:
        output.say(f"{output.plural(summary.skipped_lines, 'journal line')} could not be read and were skipped")
    for item in summary.damaged:
        output.say(damage_line(item))
