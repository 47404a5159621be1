"""`actordbg replays`: what was replayed, the newest first, with a short handle for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.base.units import LAST, ago
from actordbg.cli import output
from actordbg.cli.options import complete_replays, option, require_some, store_of
from actordbg.cli.output import emit, note, say, table

_ROWS = 20


def replays(
    ctx: typer.Context,
    everything: bool = option(False, "Truths, variations, cells of a matrix and other users' replays, too.", "--all"),
    limit: int | None = option(None, "At most this many; 0 for all (default: 20; with --json all).", min=0),
) -> None:
    """List replays, the newest first, with a short handle.

    `actordbg replay ls` is the same.
    @1 is the newest, @2 the one before. Wherever a replay is named, a handle will do, or a name from `replay --name`, an id, or
    the beginning of one. Truths and cells of a matrix have no handle, because other commands ran them.
    Exit code 5 if there is none.

    Example: actordbg replays --limit 5
    """
    from actordbg.catalog.query import comparisons, list_own_replays, list_replays, open_fresh
    from actordbg.config.as_ran import as_ran, label

    catalog = open_fresh(store_of(ctx).require())
    own = list_own_replays(catalog)
    handles = {row.replay_id: f"@{number}" for number, row in enumerate(own, 1)}
    verdicts = {row.replay_id: row.verdict for row in comparisons(catalog) if row.against_kind == "truth"}
    rows = [
        {
            "handle": handles.get(row.replay_id),  # None for what another command ran
            "name": str(row.config.get("name") or "") or None,
            "truth": verdicts.get(row.replay_id),  # the newest verdict there
            "configuration": label(as_ran(row.config, row.resolved)),
            **{name: getattr(row, name) for name in ("replay_id", "created_at", "status", "inputs", "passed", "command")},
        }
        for row in (list_replays(catalog) if everything else own)
    ]
    shown = rows[: (0 if output.wanted.json else _ROWS) if limit is None else limit] or rows
    emit(shown, _say_replays)
    if len(rows) > len(shown):
        note(f"{len(rows) - len(shown):,} more; --limit 0 shows all")
    require_some(len(rows))


def _say_replays(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return say("nothing was replayed yet: `actordbg check` replays a sample of your dumps")
    named = ["name"] if any(row["name"] for row in rows) else []
    cells = []
    for row in rows:
        passed = f"{row['passed']}/{row['inputs']}" + ("" if row["status"] == "complete" else f" {row['status']}")
        names = [row[name] or "" for name in ("handle", "replay_id", *named)]
        cells.append((*names, ago(row["created_at"]), passed, row["truth"], row["configuration"]))
    return table(("", "replay", *named, "when", "passed", "truth", "configuration"), cells, tight=True)


def attach(
    ctx: typer.Context,
    name: str = typer.Argument(
        LAST, metavar="[REPLAY|RUN]", help="A replay's id, `last`, or the name of a run.", autocompletion=complete_replays
    ),
) -> None:
    """Take the prompt of a rank that stopped.

    For replays under --break-wait, and for training code with `actordbg.debug.breakpoint()` (or any breakpoint() under `actordbg
    run --break`), from another terminal of the machine where the rank runs. Waits for the next stop. Ends with the replay, or
    with Ctrl-C.

    Example: actordbg attach ppo-7b
    """
    from actordbg.debug import stops
    from actordbg.debug.meeting import attend
    from actordbg.replay.supervise import load_spec

    store, run = store_of(ctx), stops.root() / name
    if run.is_dir():
        note(f"waiting for the stops of run {name}; Ctrl-C leaves")
        mark = run / "attach"  # tells the run's ranks that somebody waits
        mark.touch(mode=0o600)
        try:
            attend(lambda: sorted(path for path in run.iterdir() if path.is_dir()), lambda: True, note)
        finally:
            mark.unlink(missing_ok=True)
        return
    try:
        folder = store.replays / load_spec(store.require(), name).replay_id
    except StoreProblem as error:
        runs = sorted(path.name for path in stops.root().glob("*"))
        known = f"; runs on this machine that stopped before: {', '.join(runs[:8])}" if runs else ""
        raise UsageError(f"{name} is no replay here, and no run that stops on this machine{known}", hint=error.hint) from None
    if not _runs(folder):
        raise UsageError(
            f"replay {folder.name} is over", hint="`actordbg replay --break before --break-wait 600` waits at each input"
        )
    note(f"waiting for the stops of replay {folder.name}; Ctrl-C leaves")
    attend(lambda: [folder], lambda: _runs(folder), note)


def _runs(folder: Path) -> bool:
    """Whether the replay is running: its supervisor has not said that it finished."""
    from actordbg.records.journal import SUPERVISOR, read_events

    said = [event["event"] for event in read_events(folder / SUPERVISOR) if event["event"] in ("supervisor", "finished")]
    return said[-1:] == ["supervisor"]
