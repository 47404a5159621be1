"""`actordbg report`: what was replayed, under which configuration, and the results; `replays` lists replays, `ui` shows them.

`attach`: the prompt of a rank at a breakpoint.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.base.units import LAST, ago
from actordbg.cli import output
from actordbg.cli.options import Where, chosen_format, option, require_some, store_of, stored
from actordbg.cli.output import (
    Format,
    TokenizerFile,
    as_json,
    note,
    open_page,
    say,
    say_lines,
    say_next,
    table,
    temporary_page,
    texts_of,
    write_file,
)

if TYPE_CHECKING:
    from actordbg.judge.load_replays import Material
    from actordbg.judge.token_charts import Texts
    from actordbg.store.layout import Store


def report(
    ctx: typer.Context,
    replays: list[str] | None = typer.Argument(
        None,
        metavar="REPLAY",
        help="Replays by id, name, @1, last or all (default: last).",
        autocompletion=stored("replay"),
    ),
    everything: bool = option(False, "List your replays with their verdicts, newest first (csv: every result).", "--all"),
    format: Format | None = option(
        None, "Output format (default: by the suffix of -o, else text).", "--format", "-f", hidden=True
    ),
    where: Where = None,
    tokenizer: TokenizerFile = None,
) -> None:
    """Report passes, failures and causes, time and memory.

    Reports the last replay by default. Shows several replays side by side, with the first as the baseline; with --all, lists
    them with their verdicts. Exits with 0 even if results failed.

    Example: actordbg report last -o report.md
    """
    from actordbg.judge.load_replays import load

    wanted = output.wanted
    files = wanted.files or (temporary_page(),) * wanted.opened
    chosen = {file: chosen_format(format, wanted.json, output.form_of(file) or "text") for file in files}
    page = next((file for file, form in chosen.items() if form == "html"), None)
    if wanted.opened and page is None:
        raise UsageError("--open needs HTML", hint="end -o in .html, or drop --format")
    usual = chosen_format(format, wanted.json)
    output.wanted = replace(wanted, format=usual)
    names = [*(replays or []), *(["all"] if everything else [])]
    store = store_of(ctx)
    index = names == ["all"] and where is None
    material = None if index else load(store, names, where)
    texts = texts_of(tokenizer)

    def rendered(form: Format) -> str:
        if index and form != "csv":
            return _index(store, form)
        return _written(store, material or load(store, names, where), form, texts)

    for file, form in chosen.items():
        write_file(file, rendered(form))
    if not files:
        say_lines(rendered(usual))
    if wanted.opened and page:
        open_page(page)


def _index(store: Store, chosen: Format) -> str:
    from actordbg.catalog.query import open_fresh
    from actordbg.document.command_result import CommandResult
    from actordbg.document.page import as_html
    from actordbg.document.renderings import as_markdown, as_text
    from actordbg.judge.replay_list import index_document, listed

    catalog = open_fresh(store)
    blocks = index_document(catalog, commands=chosen == "html")
    if chosen == "json":
        return CommandResult(True, {"replays": listed(catalog)}, blocks).to_json(2) + "\n"
    return {"html": as_html, "md": as_markdown, "text": as_text}[chosen](blocks)


def _written(store: Store, material: Material, chosen: Format, texts: Texts | None) -> str:
    from actordbg.document.page import as_html
    from actordbg.document.renderings import as_markdown, as_text
    from actordbg.judge import exports
    from actordbg.judge.load_replays import report_blocks
    from actordbg.judge.replay_document import document

    if chosen == "csv":
        return exports.render_csv(material.replays)
    if chosen == "json":
        return exports.render_json(material.summary(), report_blocks(store, material, texts))
    if chosen == "html":
        return as_html(report_blocks(store, material, texts))
    summary = material.summary()
    return (as_markdown if chosen == "md" else as_text)(document(summary))


def ui(
    ctx: typer.Context,
    port: int = option(0, "Port to listen on (default: a free port).", min=0, max=65535),
    opened: bool = option(True, "Open the page in a browser.", "--open/--no-open"),
) -> None:
    """Browse the store in a local web page.

    Shows runs, dumps with filters and the command that selects them, replays, matrices and comparisons. Listens on 127.0.0.1
    only, and answers only requests with the token in the printed address. Read-only. From another machine:
    ssh -L 8700:127.0.0.1:8700 HOST, and --port 8700 there. Stop it with Ctrl-C.

    Example: actordbg ui --port 8700 --no-open
    """
    import webbrowser

    from actordbg.replay.supervise import interruptible
    from actordbg.ui.ui_server import UiServer

    server = UiServer(store_of(ctx).require(), port)
    say(server.address)
    try:
        with interruptible(), server.redirect_file() as page:  # any user can read a browser's command line
            if opened and not webbrowser.open_new_tab(page.as_uri()):
                note("no browser here: open the address above")
            server.serve()
    except KeyboardInterrupt:
        note("stopped")


_ROWS = 20


def replays(
    ctx: typer.Context,
    everything: bool = option(False, "Also list truths, variations, matrix cells and other users' replays.", "--all"),
    limit: int | None = option(None, "At most N replays; 0 for all (default: 20; with --json all).", min=0),
) -> None:
    """List replays, newest first, with short handles.

    @1 is the newest replay, @2 the next one. Commands accept a handle, a name from `replay --name`, an id, or a unique prefix of
    an id. Truths and matrix cells have no handle, because other commands ran them. `actordbg replay ls` is an alias.

    Exit code: 5 if there are no replays.

    Example: actordbg replays --limit 5
    """
    from actordbg.catalog.query import open_fresh
    from actordbg.judge.replay_list import listed, passed_of

    rows = listed(open_fresh(store_of(ctx).require()), everything=everything)
    shown = rows[: (0 if output.wanted.whole else _ROWS) if limit is None else limit] or rows
    if not as_json(shown):
        named = ["name"] if any(replay["name"] for replay in shown) else []
        cells = [
            (replay["handle"] or "", *[replay[name] or "" for name in ("replay_id", *named)], ago(replay["created_at"]),
             passed_of(replay), replay["verdict"], replay["configuration"])
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


def attach(
    ctx: typer.Context,
    name: str = typer.Argument(
        LAST,
        metavar="REPLAY|RUN",
        help="Replay id, `last`, or name of a run.",
        autocompletion=stored("replay"),
    ),
) -> None:
    """Attach to a rank at a breakpoint.

    Works for replays under --break-wait, and for training code with `actordbg.debug.breakpoint()` (or any breakpoint() under
    `actordbg run --break`). Run it in another terminal of the machine where the rank runs. Waits for the next breakpoint. Ends
    with the replay, or on Ctrl-C.

    Example: actordbg attach ppo-7b
    """
    from actordbg.debug import stops
    from actordbg.debug.meeting import attend
    from actordbg.replay.supervise import load_spec

    store, run = store_of(ctx), stops.root() / name
    if run.is_dir():
        note(f"waiting for a breakpoint in run {name}; Ctrl-C leaves")
        mark = run / "attach"  # tells the run's ranks that a terminal waits
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
        known = f"; runs with breakpoints here: {', '.join(runs[:8])}" if runs else ""
        raise UsageError(f"{name} is neither a replay nor a run with breakpoints here{known}", hint=error.hint) from None
    if not _runs(folder):
        raise UsageError(
            f"replay {folder.name} has ended", hint="run `actordbg replay --break before --break-wait 600` to wait at each input"
        )
    note(f"waiting for a breakpoint in replay {folder.name}; Ctrl-C leaves")
    attend(lambda: [folder], lambda: _runs(folder), note)


def _runs(folder: Path) -> bool:
    """Check whether the replay is running: its supervisor has not reported its end."""
    from actordbg.records.journal import SUPERVISOR, read_events

    events = [event["event"] for event in read_events(folder / SUPERVISOR) if event["event"] in ("supervisor", "finished")]
    return events[-1:] == ["supervisor"]
