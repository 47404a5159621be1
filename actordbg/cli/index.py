"""`actordbg index`: make the catalog agree with the store's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from actordbg.cli import output
from actordbg.cli.options import Json, Quiet, store_of

if TYPE_CHECKING:
    from actordbg.catalog.index import IndexSummary


def index(
    ctx: typer.Context,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Forget the catalog and make it again from the files.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Index what is new in the store: dumps, results of replays, patches.

    Every command that reads does this by itself; use it to see what is damaged, or after a catalog was lost or damaged.

    Example: actordbg index --rebuild
    """
    from actordbg.catalog.index import refresh

    with output.progress("reading headers", None, quiet=quiet or as_json) as advance:
        seen = 0

        def report(done: int, total: int) -> None:
            nonlocal seen
            advance(done - seen, f"of {total:,}")
            seen = done

        summary = refresh(store_of(ctx), rebuild=rebuild, on_progress=report)
    output.emit(summary, _render, as_json)


def warn_damaged(summary: IndexSummary) -> None:
    """Say on standard error that there are damaged dumps; commands that read the catalog call this."""
    if summary.damaged:
        output.note(f"warning: {output.plural(len(summary.damaged), 'damaged file')}; `actordbg index` lists them")


def _render(summary: IndexSummary) -> None:
    output.say(
        f"{output.plural(summary.dumps, 'dump')} in the catalog: {summary.added:,} added, {summary.removed:,} removed; "
        f"{output.plural(summary.results, 'new result')} of {output.plural(summary.replays, 'replay')} "
        f"({summary.seconds:.2f} s)"
    )
    if summary.skipped_lines:
        output.say(f"{output.plural(summary.skipped_lines, 'journal line')} could not be read and were skipped")
    for path, reason in summary.damaged:
        output.say(f"damaged: {path}: {reason}")
