"""`actordbg replays`: what was replayed, the newest first, with a short handle for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from actordbg.base.units import ago
from actordbg.cli import output
from actordbg.cli.options import AllowEmpty, Json, option, require_some, store_of

if TYPE_CHECKING:
    from actordbg.catalog.query import Catalog


_ROWS = 20


@dataclass
class ListedReplay:
    """A replay of the list. handle: `@1` for the newest; None for what another command ran. truth: the newest verdict there."""

    handle: str | None
    replay_id: str
    name: str | None
    created_at: str
    status: str
    inputs: int
    passed: int
    truth: str | None
    configuration: str
    command: str | None


def replays(
    ctx: typer.Context,
    everything: bool = option(False, "Truths, variations, cells of a matrix and other users' replays, too.", "--all"),
    limit: int | None = option(None, "At most this many; 0 for all (default: 20; with --json all).", min=0),
    allow_empty: AllowEmpty = False,
    as_json: Json = False,
) -> None:
    """List replays, the newest first, with a short handle.

    `actordbg replay ls` is the same.
    @1 is the newest, @2 the one before. Wherever a replay is named, a handle will do, or a name from `replay --name`, an id, or
    the beginning of one. Truths and cells of a matrix have no handle, because other commands ran them.
    Exit code 5 if there is none.

    Example: actordbg replays --limit 5
    """
    from actordbg.catalog.query import open_fresh

    catalog = open_fresh(store_of(ctx).require())
    rows = _listed(catalog, everything)
    shown = rows[: (0 if as_json else _ROWS) if limit is None else limit] or rows
    output.emit(shown, _render, as_json)
    if len(rows) > len(shown):
        output.note(f"{len(rows) - len(shown):,} more; --limit 0 shows all")
    require_some(len(rows), allow_empty)


def _listed(catalog: Catalog, everything: bool) -> list[ListedReplay]:
    from actordbg.catalog.query import comparisons, list_own_replays, list_replays
    from actordbg.config.as_ran import as_ran, label

    own = list_own_replays(catalog)
    handles = {row.replay_id: f"@{number}" for number, row in enumerate(own, 1)}
    verdicts = {row.replay_id: row.verdict for row in comparisons(catalog) if row.against_kind == "truth"}
    return [
        ListedReplay(
            handles.get(row.replay_id), row.replay_id, str(row.config.get("name") or "") or None, row.created_at, row.status,
            row.inputs, row.passed, verdicts.get(row.replay_id), label(as_ran(row.config, row.resolved)), row.command,
        )
        for row in (list_replays(catalog) if everything else own)
    ]  # fmt: skip


def _render(rows: list[ListedReplay]) -> None:
    if not rows:
        output.say("nothing was replayed yet: `actordbg check` replays a sample of your dumps")
        return
    named = any(row.name for row in rows)
    columns = ("", "replay", *(["name"] if named else []), "when", "passed", "truth", "configuration")
    cells = [
        (
            row.handle or "", row.replay_id, *([row.name or ""] if named else []), ago(row.created_at),
            f"{row.passed}/{row.inputs}" + ("" if row.status == "complete" else f" {row.status}"),
            row.truth or "-", row.configuration,
        )
        for row in rows
    ]  # fmt: skip
    output.table(columns, cells, tight=True)
