"""`actordbg report`: what was replayed, under which configuration, and the results; `replays` lists replays."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from actordbg.base.option import Option
from actordbg.base.owners import marked
from actordbg.base.units import ago, passed_of
from actordbg.cli import output
from actordbg.cli.options import Where, require_some
from actordbg.cli.output import TokenizerFile, note, rows_as_json, say, say_next, table


def report(
    ctx: typer.Context,
    replays: list[str] | None = None,
    *,
    everything: Annotated[bool, Option("--all")] = False,
    where: Where = None,
    tokenizer: TokenizerFile = None,
) -> object:
    """Report passes, failures and causes, time and memory.

    Reports the last replay by default. Shows several replays side by side, with the first as the baseline; with --all, lists
    them with their verdicts. Exits with 0 even if results failed.

    Example: actordbg report last -o report.md

    Args:
        replays (REPLAY): Replays by id, name, @1, last or all (default: last).
        everything: List your replays with their verdicts, newest first (csv: every result).
    """
    from actordbg.cli.terminal import opened

    charts = output.wanted.whole or output.wanted.opened
    if output.wanted.files or output.wanted.opened:
        output.wanted = replace(output.wanted, quiet=True)  # whoever has the report in a file needs its first line here
    names = [*(replays or []), *(["all"] if everything else [])]
    return opened(ctx).report(*names, where=where, tokenizer=tokenizer, charts=charts)


_ROWS = 20


def replays(
    ctx: typer.Context,
    *,
    everything: Annotated[bool, Option("--all")] = False,
    limit: Annotated[int | None, Option(min=0)] = None,
) -> None:
    """List replays, newest first, with short handles.

    @1 is the newest replay, @2 the next one. Commands accept a handle, a name from `replay --name`, an id, or a unique prefix of
    an id. Truths and matrix cells have no handle, because other commands ran them. `actordbg replay ls` is an alias.

    Exit code: 5 if there are no replays.

    Example: actordbg replay ls --limit 5

    Args:
        everything: Also list truths, variations, matrix cells and other users' replays.
        limit: At most N replays; 0 for all (default: 20; with --json all).
    """
    from actordbg.cli.terminal import opened

    rows = opened(ctx).replays(everything=everything)
    shown = rows[: (0 if output.wanted.whole else _ROWS) if limit is None else limit] or rows
    as_text = not rows_as_json(shown)
    if as_text:
        named = ["name"] if any(replay["name"] for replay in shown) else []
        cells = [
            (replay["handle"] or "", *[replay[name] or "" for name in ("replay_id", *named)], ago(replay["created_at"]),
             passed_of(replay), marked(replay["verdict"], replay["whose"]), replay["configuration"])
            for replay in shown
        ]  # fmt: skip
        if shown:
            table(("", "replay", *named, "when", "passed", "verdict", "configuration"), cells, tight=True)
        else:
            say("nothing was replayed yet: `actordbg check` replays a sample of your dumps")
    if len(rows) > len(shown):
        note(f"{len(rows) - len(shown):,} more; pass --limit 0 to list all")
    if shown and as_text:
        handles = (replay["handle"] for replay in shown if replay["handle"])
        say_next(f"actordbg report {next(handles, shown[0]['replay_id'])}")
    require_some(len(rows))
