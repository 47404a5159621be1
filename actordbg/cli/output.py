"""Print a command's result on standard output, as text or JSON, and progress and notes on standard error.

A command returns a `CommandResult`, or calls `emit(answer, render)`, whose `render` prints text. `wanted` has the output options.
All output goes through this module, which cleans foreign text (`actordbg.base.foreign_text`): a name or an error can neither move
the cursor nor start a new line in what `say` and `note` print. Colors are added after cleaning.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from actordbg.base.fault import scrub
from actordbg.base.foreign_text import in_line, in_lines, in_shell
from actordbg.base.option import Option
from actordbg.base.units import human_bytes as human_bytes, plural as plural, with_handles

if TYPE_CHECKING:
    from actordbg.document.blocks import Block
    from actordbg.document.command_result import CommandResult

PIPE_WIDTH = 200
"""Maximum width of a table when standard output is not a terminal."""
_NARROWEST = 20
CELL_WIDTH = 1000
"""Maximum number of characters of a value in a table; wrapping a longer value takes seconds."""
_QUOTED, _HELD = re.compile(r"`[^`]*`"), "\x00"
"""A command in backticks, and the placeholder for its spaces while lines are wrapped: `in_line` removes that character."""
Format = Literal["text", "md", "json", "csv", "html"]
"""Output formats. HTML is only written to files."""
FORMS = {
    ".html": "html", ".htm": "html", ".md": "md", ".markdown": "md", ".txt": "text", ".json": "json", ".csv": "csv",
    ".svg": "plot", ".png": "plot", ".pdf": "plot",
}  # fmt: skip
"""What -o writes, by suffix."""


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """The output options of this command, as typed (`options.takes_outputs`).

    format: that of standard output. files: those to write. opened: open the page in a browser. store: named by next commands.
    """

    format: Format = "text"
    quiet: bool = False
    allow_empty: bool = False
    files: Mapping[Path, str] = dataclasses.field(default_factory=dict)
    opened: bool = False
    store: str | None = None

    @property
    def json(self) -> bool:
        return self.format == "json"

    @property
    def whole(self) -> bool:
        """Check whether to list every row by default, because a program or a file gets them."""
        return self.format in ("json", "csv", "html") or bool(self.files)

    @property
    def page(self) -> Path | None:
        """Return the page to write, if any."""
        return next((path for path, form in self.files.items() if form == "html"), None)

    @property
    def silent(self) -> bool:
        """Check whether to print only the result."""
        return self.quiet or self.json


def form_of(path: Path) -> Any:
    """Return what -o writes into this file; None if its suffix says nothing."""
    return FORMS.get(path.suffix.lower())


wanted = OutputOptions()
answered_json = False
"""Whether standard output already has JSON; an error is then not printed as JSON, which would be a second document."""
_facts: Any = None
"""The result that `finish` prints as JSON or writes to files, once the text has said its sentence and the next command."""
_said: dict[str, str] = {}
"""The sentence and the next command that the text of this result has said."""


def emit(answer: Any, render: Callable[[Any], object]) -> None:
    """Keep a result, and print it as text."""
    keep_answer(answer)
    render(answer)


def keep_answer(answer: Any) -> None:
    """Keep a result that is not a document, for `finish`. From now on --json hides all text but sentence and next command."""
    global _facts
    _facts = answer


def rows_as_json(rows: list[Any]) -> bool:
    """Write rows to the files of -o, and print them with --json. Returns whether that was all: else they are printed as text."""
    write_files(rows)
    if wanted.json:
        emit_json(rows)
    return wanted.json


def finish() -> None:
    """Print or write the result that was kept, with the sentence and the next command of its text."""
    global _facts
    if _facts is not None:
        from actordbg.document.command_result import as_json_text

        answer = {"verdict": "", "sentence": "", "next": "", **_said, **json.loads(as_json_text(_facts))}
        _facts = None
        write_files(answer)
        if wanted.json:
            emit_json(answer)
    _said.clear()


def emit_json(answer: Any, indent: int | None = 2, *, err: bool = False) -> None:
    """Print `answer` as JSON; with `indent` None, on a single line."""
    from actordbg.document.command_result import as_json_text

    global answered_json
    answered_json = not err
    typer.echo(as_json_text(answer, indent), err=err)


def emit_each(rows: Iterable[Any]) -> int:
    """Stream rows as a JSON list, as `emit` prints a list; write a list for `-o`. Returns the number of rows."""
    from actordbg.document.command_result import as_json_text

    global answered_json
    count = 0
    if wanted.files:
        rows = list(rows)
        write_files(rows)
        if not wanted.json:
            return len(rows)
    for count, row in enumerate(rows, 1):
        answered_json = True
        typer.echo(("," if count > 1 else "[") + "\n  " + as_json_text(row, 2).replace("\n", "\n  "), nl=False)
    typer.echo("\n]" if count else "[]")
    return count


def say(text: str = "", *, sums_up: bool = False) -> None:
    """Print a line of the result, with line breaks escaped. Its JSON has the first line, or the line that `sums_up`."""
    if text and (sums_up or "sentence" not in _said):
        _said["sentence"] = text
    _print(_line(text))


def say_lines(text: str) -> None:
    """Print formatted lines of the result, such as a table or a document."""
    _print(in_lines(text.rstrip("\n")))


def _line(text: str) -> str:
    """Escape a line of text, replace dump ids by handles, and name the typed store in its commands."""
    text = _QUOTED.sub(lambda quoted: on_typed_store(quoted[0]), text)
    return in_line(with_handles(text))


def on_typed_store(command: str) -> str:
    """Add the typed --store to a command of ours, so that it acts on the same store when it is pasted."""
    if wanted.store is None or "--store" in command:
        return command
    return command.replace("actordbg ", f"actordbg --store {in_shell(scrub(wanted.store))} ")


def say_wrapped(text: str, rest: str = "") -> None:
    """Print a paragraph of the result, wrapped in a terminal; `rest` indents the lines after the first."""
    _said.setdefault("sentence", text.strip())
    _print(wrapped(_line(text), sys.stdout, rest))


_COLORS = {"good": "green", "part": "yellow", "bad": "red"}


def _print(text: str) -> None:
    """Print cleaned text, with its verdict words in color: capitals anywhere, other words alone in a cell of a table."""
    if wanted.json and _facts is not None:
        return
    colored = sys.stdout.isatty() and not (os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb")
    if colored and wanted.format == "text":
        from actordbg.document.blocks import TONES

        loud, quiet = ("|".join(word for word in TONES if word.isupper() is capitals) for capitals in (True, False))
        pattern = re.compile(rf"\b({loud})\b|(?<=  )({quiet})(?=  |$)", re.MULTILINE)
        text = pattern.sub(lambda match: typer.style(match[0], fg=_COLORS[TONES[match[0]]]), text)
    typer.echo(text, color=colored)


def say_facts(facts: Mapping[str, object], room: int) -> None:
    """Print names and their values, wrapped and aligned in a terminal; None and "" are left out."""
    for name, value in facts.items():
        if value not in (None, ""):
            head = f"  {in_line(name):<{room}} "
            _print(head + wrapped(_line(str(value)), sys.stdout, " " * len(head), beside=len(head)))


def note(text: str) -> None:
    """Print a note about the result on standard error, so that a pipe gets only the result."""
    typer.echo(wrapped(_line(text), sys.stderr), err=True)


def say_next(command: str) -> None:
    """Note the command to run next, unless only the result is wanted."""
    _said["next"] = command = on_typed_store(command)
    if not wanted.silent:
        typer.echo(f"next: {in_line(command)}", err=True)


def note_some(lines: Sequence[str], most: int) -> None:
    """Print the first `most` notes, and how many more there are."""
    for line in lines[:most]:
        note(line)
    if len(lines) > most:
        note(f"... and {len(lines) - most:,} more; --json lists them all")


def wrapped(text: str, stream: Any, rest: str = "  ", beside: int = 0) -> str:
    """Wrap `text` to a terminal's width, but no command in backticks. beside: columns already used on the first line."""
    if not stream.isatty():
        return text
    held = _QUOTED.sub(lambda match: match[0].replace(" ", _HELD), text)
    width = max(_NARROWEST, shutil.get_terminal_size().columns - beside)
    lines = textwrap.wrap(held, width, subsequent_indent=rest[beside:], break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * beside}".join(lines).replace(_HELD, " ")


def can_ask() -> bool:
    """Check whether the user can see and answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def agreed(text: str) -> bool:
    """Ask the user at the terminal whether to continue; False without a terminal."""
    return can_ask() and typer.confirm(f"{in_line(text)}. Continue?", err=True)


def answered(question: str, usual: str) -> str | None:
    """Ask the user at the terminal, with `usual` as the default; None without a terminal."""
    if not can_ask():
        return None
    return str(typer.prompt(in_line(question), default=in_line(usual), err=True))


def clear_screen() -> None:
    """Clear the terminal; do nothing if output is piped."""
    if sys.stdout.isatty():
        typer.echo("\x1b[H\x1b[2J", nl=False)


def table_width() -> int:
    """Return the maximum width of a table."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, tight: bool = False) -> None:
    """Print rows under headings, with numbers right-aligned; not truncated if piped. `tight`: one space between columns."""
    from actordbg.document.blocks import Grid
    from actordbg.document.renderings import grid

    numeric = {
        name
        for name, *values in zip(columns, *rows, strict=True)
        if values and all(isinstance(value, int | float | None) for value in values)
    }
    cells = tuple(tuple(map(cell, row)) for row in rows)
    say_lines(grid(Grid(tuple(columns), cells, frozenset(columns) - numeric), table_width(), tight=tight, fold=True, indent=""))


def cell(value: Any) -> str:
    """Format a value for a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = in_line(str(value))
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 1] + "…"


@contextmanager
def progress(label: str, total: int | None, *, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Show a progress bar while the block runs, unless it is quiet; yields `advance(n=1, note="", total=None, drawn=None)`, whose
    total replaces the bar's, and whose drawn shows or hides the bar.
    """
    if quiet or wanted.silent:
        yield lambda *_, **__: None
        return
    from actordbg.cli.progress_bar import Bar

    bar = Bar(in_line(label), total)
    with bar.drawn:
        yield bar.advance
        bar.end()


TokenizerFile = Annotated[
    Path | None, Option(metavar="PATH", help="Model folder, or hub name in the local cache: adds text to token charts.")
]


def say_answer(answer: CommandResult, written: Path | None = None) -> None:
    """Print a result in the requested format, and write the requested files. --quiet leaves only the first line of a verdict.
    written: the page, if it has been written already; text names it, and --open opens it.
    """
    from actordbg.document.blocks import verdict_in

    answer = answer.with_commands(on_typed_store)
    write_files(answer)
    if wanted.json:
        emit_json(answer.record, None if "looks" in answer.data else 2)  # a line, behind lines of what was found at each look
    elif wanted.format != "text":
        say_lines(rendered(answer, wanted.format, answer.blocks))
    else:
        first, line_break, rest = str(answer).partition("\n")
        brief = wanted.quiet and verdict_in(answer.blocks) is not None
        say_lines(wrapped(first, sys.stdout, "") + ("" if brief else line_break + rest))
        if written is not None and not brief:
            say(f"page: {written}")
    if wanted.opened:
        page = written or wanted.page or temporary_page()
        if written is None and wanted.page is None:
            write_file(page, answer.to_html())
        open_page(page)


def write_files(answer: Any) -> None:
    """Write the result to the files of -o, and print a note for each: rows as CSV, a document's charts as a picture."""
    for path, form in wanted.files.items():
        if form != "plot":
            write_file(path, rendered(answer, form))
            continue
        from actordbg.document import page
        from actordbg.document.blocks import Chart

        if page.save([block for block in answer.on_page if isinstance(block, Chart)], path):
            note(f"wrote {path}")


def rendered(answer: Any, form: str, blocks: Sequence[Block] | None = None) -> str:
    """Return a document, or rows, in a format. blocks: those to show of the document (default: all of its page)."""
    from actordbg.document import page, renderings
    from actordbg.document.command_result import CommandResult, as_json_text

    if form == "json":
        return as_json_text(answer.record if isinstance(answer, CommandResult) else answer, 2) + "\n"
    if form == "csv" and hasattr(answer, "to_csv"):
        return str(answer.to_csv())
    if form == "csv":
        rows = json.loads(as_json_text(answer))
        for row in rows:
            row.update(row.pop("not_finite", {}))
        return renderings.as_csv(list(rows[0]) if rows else (), rows)
    ways = {"html": page.as_html, "text": renderings.as_text, "md": renderings.as_markdown}
    return ways[form](answer.on_page if blocks is None else blocks)


def temporary_page() -> Path:
    """Return the path of a page in a folder that only this user can read; the browser reads it after the command ends."""
    import tempfile

    return Path(tempfile.mkdtemp(prefix="actordbg-")) / "report.html"


def write_file(path: Path, text: str) -> None:
    """Write a file that the user named, completely or not at all, and print a note."""
    from actordbg.document.page import write_named

    write_named(path, text.encode())
    note(f"wrote {path}")


def open_page(path: Path) -> None:
    """Open a file in the local browser; without a browser, print its address."""
    import webbrowser

    address = path.resolve().as_uri()
    try:
        opened = webbrowser.open_new_tab(address)
    except (webbrowser.Error, OSError):
        opened = False
    if not opened:
        note(f"no browser here; open {address}")
