"""`actordbg report`: what was replayed, under which configuration, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from actordbg.base.errors import EnvironmentProblem, UsageError
from actordbg.cli.options import Explain, Format, Where, chosen_format, complete_replays, option, store_of
from actordbg.cli.output import note, say, say_lines
from actordbg.cli.page_file import TokenizerFile, open_page, texts_of, write_file

if TYPE_CHECKING:
    from actordbg.judge.load_replays import Material
    from actordbg.judge.token_charts import Texts
    from actordbg.store.layout import Store


_BY_SUFFIX: dict[str, Format] = {
    ".txt": "text",
    ".md": "md",
    ".markdown": "md",
    ".json": "json",
    ".csv": "csv",
    ".html": "html",
    ".htm": "html",
}


def report(
    ctx: typer.Context,
    replays: list[str] | None = typer.Argument(
        None, metavar="[REPLAY...|last|all]", help="Replays by id, name or @1 (default: last).", autocompletion=complete_replays
    ),
    everything: bool = option(False, "The whole store: every replay, the oldest first.", "--all"),
    format: Format | None = option(None, "Default: by --output's suffix, else text. CSV: a row per result.", "--format", "-f"),
    output: Path | None = option(None, "Write the report there instead of printing it.", "--output", "-o", metavar="FILE"),
    where: Where = None,
    tokenizer: TokenizerFile = None,
    opened: bool = option(False, "Show the page in the browser (without --output a temporary file).", "--open"),
    explain_figures: Explain = False,
    as_json: bool = option(False, "The same as --format json.", "--json"),
) -> None:
    """Report what passed, what failed and why, time and memory.

    Without a replay it is about the last one. Several are set side by side; the first is the baseline. The exit code is 0 also
    if results failed.

    Example: actordbg report last --format md --output report.md
    """
    import tempfile

    from actordbg.document.renderings import as_text
    from actordbg.judge.load_replays import load
    from actordbg.judge.replay_document import explanations

    if explain_figures:
        return say_lines(as_text(explanations()))
    by_suffix = _by_suffix(output, format is not None or as_json) if output else None
    chosen = chosen_format(format, as_json, by_suffix or ("html" if opened else "text"))
    if opened and chosen != "html":
        raise UsageError(f"--open shows a page, and this is {chosen}", hint="end --output in .html, or leave --format out")
    names = [*(replays or []), *(["all"] if everything else [])]
    store = store_of(ctx)
    material = load(store, names, where)
    text = _written(store, material, chosen, texts_of(tokenizer))
    if output is None and not opened:
        say_lines(text)
    elif output is None:  # in a folder that only this user can look into; the browser reads it after this command ended
        output = Path(tempfile.mkdtemp(prefix="actordbg-")) / "report.html"
    if output is not None:
        write_file(output, text)
    if output is not None and opened:
        open_page(output)


def _written(store: Store, material: Material, chosen: Format, texts: Texts | None) -> str:
    from actordbg.document.page import as_html
    from actordbg.document.renderings import as_markdown, as_text
    from actordbg.judge import exports
    from actordbg.judge.load_replays import report_blocks
    from actordbg.judge.replay_document import brief_document, document

    if chosen == "csv":
        return exports.render_csv(material.replays)
    if chosen == "json":
        return exports.render_json(material.summary(), report_blocks(store, material, texts))
    if chosen == "html":
        return as_html(report_blocks(store, material, texts))
    summary = material.summary()
    return as_markdown(document(summary)) if chosen == "md" else as_text(brief_document(summary))


def _by_suffix(path: Path, said: bool) -> Format | None:
    """The format that a file's name asks for. `said`: --format says it, so the name need not."""
    if not path.parent.is_dir():
        raise EnvironmentProblem(f"cannot write {path}: {path.parent} is no folder", hint="make it first, or name another one")
    if path.suffix.lower() not in _BY_SUFFIX and not said:
        raise UsageError(
            f"--output {path.name}: {path.suffix or 'a name without suffix'} says no format",
            hint=f"end it in {', '.join(sorted(_BY_SUFFIX))}, or add --format",
        )
    return _BY_SUFFIX.get(path.suffix.lower())


def ui(
    ctx: typer.Context,
    port: int = option(0, "The port to listen on (default: a free one).", min=0, max=65535),
    opened: bool = option(True, "Show it in the browser.", "--open/--no-open"),
) -> None:
    """Look at the store in a browser on this machine.

    Shows runs, dumps with facets and the command that selects them, replays, matrices and comparisons. Listens on 127.0.0.1 alone
    and answers only who has the printed address, which holds a token. It changes nothing. From another machine:
    ssh -L 8700:127.0.0.1:8700 HOST, and --port 8700 there. Ctrl-C ends it.

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
                note("no browser here: open that address")
            server.serve()
    except KeyboardInterrupt:
        note("ended")
