"""`actordbg report`: what was replayed, under which configuration, and the results; `replays` lists replays."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from actordbg.base.errors import UsageError
from actordbg.base.option import Option
from actordbg.base.units import ago, passed_of
from actordbg.cli import output
from actordbg.cli.options import Where, chosen_format, require_some
from actordbg.cli.output import (
    Format,
    TokenizerFile,
    note,
    open_page,
    rows_as_json,
    say,
    say_lines,
    say_next,
    table,
    temporary_page,
    write_file,
)


def report(
    ctx: typer.Context,
    replays: list[str] | None = None,
    *,
    everything: Annotated[bool, Option("--all")] = False,
    format: Annotated[Format | None, Option("-f", hidden=True)] = None,
    where: Where = None,
    tokenizer: TokenizerFile = None,
) -> None:
    """Report passes, failures and causes, time and memory.

    Reports the last replay by default. Shows several replays side by side, with the first as the baseline; with --all, lists
    them with their verdicts. Exits with 0 even if results failed.

    Example: actordbg report last -o report.md

    Args:
        replays (REPLAY): Replays by id, name, @1, last or all (default: last).
        everything: List your replays with their verdicts, newest first (csv: every result).
        format: Output format (default: by the suffix of -o, else text).
    """
    from actordbg.cli.terminal import opened

    wanted = output.wanted
    files = wanted.files or (temporary_page(),) * wanted.opened
    chosen = {file: chosen_format(format, wanted.json, output.form_of(file) or "text") for file in files}
    page = next((file for file, form in chosen.items() if form == "html"), None)
    if wanted.opened and page is None:
        raise UsageError("--open needs HTML", hint="end -o in .html, or drop --format")
    usual = chosen_format(format, wanted.json)
    output.wanted = replace(wanted, format=usual)
    charts = not {"html", "json"}.isdisjoint(chosen.values() if files else [usual])
    names = [*(replays or []), *(["all"] if everything else [])]
    answer = opened(ctx).report(*names, where=where, tokenizer=tokenizer, charts=charts)

    def rendered(form: Format) -> str:
        ways = {"html": answer.to_html, "md": answer.to_markdown, "csv": answer.to_csv, "text": answer.__str__}
        return answer.to_json(2) + "\n" if form == "json" else ways[form]()

    for file, form in chosen.items():
        write_file(file, rendered(form))
    if not files:
        say_lines(rendered(usual))
    if wanted.opened and page:
        open_page(page)


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
    if not rows_as_json(shown):
        named = ["name"] if any(replay["name"] for replay in shown) else []
        cells = [
            (replay["handle"] or "", *[replay[name] or "" for name in ("replay_id", *named)], ago(replay["created_at"]),
             passed_of(replay), "theirs: " * bool(replay["whose"]) + replay["verdict"], replay["configuration"])
            for replay in shown
        ]  # fmt: skip
        if shown:
            table(("", "replay", *named, "when", "passed", "verdict", "configuration"), cells, tight=True)
            say_next(f"actordbg report {shown[0]['handle'] or shown[0]['replay_id']}")
        else:
            say("nothing was replayed yet: `actordbg check` replays a sample of your dumps")
    if len(rows) > len(shown):
        note(f"{len(rows) - len(shown):,} more; pass --limit 0 to list all")
    require_some(len(rows))
