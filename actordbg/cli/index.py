"""`actordbg index` and `dump verify`: read the store's files, into the catalog or whole, and name those that are damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from actordbg.base.errors import CorruptDump
from actordbg.cli import output
from actordbg.cli.options import AllowEmpty, Json, Quiet, Where, option, require_some, store_of

if TYPE_CHECKING:
    from actordbg.catalog.indexer import IndexSummary
    from actordbg.catalog.tables import Damaged


def index(
    ctx: typer.Context,
    rebuild: bool = option(False, "Forget the catalog and make it again from the files.", "--rebuild"),
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
    output.emit(summary, _say_indexed, as_json)


def verify(
    ctx: typer.Context,
    where: Where = None,
    jobs: int = option(0, "Threads; 0 for one for each processor.", "--jobs", "-j", min=0),
    allow_empty: AllowEmpty = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check dump files for damage.

    Reads each dump whole: header, decompression, SHA-256, safetensors, tensor specs. Without --where it checks every file,
    those that could not be indexed too. Exit code 1 if a dump is damaged, 5 if there is none.

    Example: actordbg dump verify --where "run='ppo-1'"
    """
    from actordbg.catalog.query import open_fresh
    from actordbg.dumps.verify import paths_to_verify, verify_files

    catalog = open_fresh(store_of(ctx), where)
    paths = paths_to_verify(catalog, where)
    damaged: list[Damaged] = []
    size = 0
    with output.progress("verifying", len(paths), quiet=quiet or as_json) as advance:
        for _, count, problem in verify_files(catalog.store, paths, jobs):
            advance(1)
            size += count
            damaged += [problem] if problem else []
    damaged.sort(key=lambda item: item.path)
    answer = {"checked": len(paths), "bytes": size, "damaged": damaged}
    output.emit(answer, lambda _: _say_verified(len(paths), size, damaged), as_json)
    if damaged:
        raise typer.Exit(1)
    require_some(len(paths), allow_empty)


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


def _say_indexed(summary: IndexSummary) -> None:
    output.say_wrapped(
        f"{output.plural(summary.dumps, 'dump')} in the catalog: {summary.added:,} added, {summary.removed:,} removed; "
        f"{output.plural(summary.results, 'new result')} of {output.plural(summary.replays, 'replay')} "
        f"({summary.seconds:.2f} s)",
        "  ",
    )
    if summary.skipped_lines:
        output.say(f"{output.plural(summary.skipped_lines, 'journal line')} could not be read and were skipped")
    for item in summary.damaged:
        output.say(damage_line(item))


def _say_verified(checked: int, size: int, damaged: list[Damaged]) -> None:
    for item in damaged:
        output.say(damage_line(item))
    output.say(
        f"{output.plural(checked, 'dump')} checked ({output.human_bytes(size)}): "
        f"{checked - len(damaged):,} good, {len(damaged):,} damaged"
    )
    if any(item.code == CorruptDump.code for item in damaged):
        output.note("`actordbg dump prune --damaged` removes those whose header is broken")
