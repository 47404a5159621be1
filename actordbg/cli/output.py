"""How commands speak: one answer on standard output, as text or JSON; progress and notes on standard error.

A command builds its answer (a dataclass, or a list of them), and calls `emit(answer, render)`. With `--json` the
answer's own fields are printed, so every command's JSON is its output type; otherwise `render(answer)` prints text. Which of
the two it is, and whether there is a progress bar, stands in `wanted`: no command looks at these options itself.

Everything goes out through this module, and foreign text (`actordbg.base.foreign_text`) is cleaned here: a name or an error can
neither move the cursor nor begin a line of its own in what `say` and `note` print. Colors are put on after that.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from enum import Enum
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from actordbg.base.errors import ActordbgError, UsageError
from actordbg.base.foreign_text import in_json, in_line, in_lines
from actordbg.base.units import human_bytes as human_bytes
from actordbg.base.units import plural as plural
from actordbg.document.blocks import Block, Chart, Grid, as_data
from actordbg.document.renderings import as_markdown, as_text, grid

if TYPE_CHECKING:
    from actordbg.judge.token_charts import Texts

T = TypeVar("T")
PIPE_WIDTH = 200
"""Columns that a table may take when standard output is not a terminal."""
_NARROWEST = 20
CELL_WIDTH = 1000
"""Characters of a value that a table shows; folding a longer one takes seconds, and nobody reads it there."""
_QUOTED, _HELD = re.compile(r"`[^`]*`"), "\x00"
"""A command in a text, and what stands for its blanks while lines are broken: `in_line` leaves no such character."""
Format = Literal["text", "md", "json", "csv", "html"]
"""How an answer is written. A page of HTML goes into a file."""


@dataclasses.dataclass(frozen=True)
class OutputOptions:
    """How the user wants the answer of this command, as typed (`options.takes_outputs`). html, plot: files for it."""

    format: Format = "text"
    quiet: bool = False
    allow_empty: bool = False
    html: Path | None = None
    plot: Path | None = None

    @property
    def json(self) -> bool:
        return self.format == "json"

    @property
    def silent(self) -> bool:
        """Whether nothing but the answer is to be said."""
        return self.quiet or self.json


wanted = OutputOptions()
_answered = False
"""Whether JSON went to standard output already: an error then does not, which would be a second document."""


def emit(answer: T, render: Callable[[T], object]) -> None:
    """Print `answer` as JSON, or hand it to `render`."""
    if not as_json(answer):
        render(answer)


def as_json(answer: Any) -> bool:
    """Print `answer` as JSON where that is wanted. Returns whether it is: else the command says it in words."""
    if wanted.json:
        emit_json(answer)
    return wanted.json


def emit_json(answer: Any, indent: int | None = 2, *, err: bool = False) -> None:
    """Print `answer` as JSON; without `indent` as one line, one of several."""
    global _answered
    _answered = not err
    typer.echo(as_json_text(answer, indent), err=err)


def emit_each(rows: Iterable[Any]) -> int:
    """Print rows as they come, as the one JSON document that `emit` prints of a list. Returns how many there were."""
    global _answered
    count = 0
    for count, row in enumerate(rows, 1):
        _answered = True
        typer.echo(("," if count > 1 else "[") + "\n  " + as_json_text(row, 2).replace("\n", "\n  "), nl=False)
    typer.echo("\n]" if count else "[]")
    return count


def as_json_text(answer: Any, indent: int | None = None) -> str:
    """An answer as JSON."""
    return in_json(json.dumps(answer, default=_plain, indent=indent, ensure_ascii=False, allow_nan=False))


def say(text: str = "") -> None:
    """A line of the answer; a line break in it is written out."""
    typer.echo(in_line(text))


def say_lines(text: str, style: Callable[[str], str] | None = None) -> None:
    """Lines of the answer that are laid out already: a table, a document. `style`: puts colors on."""
    shown = in_lines(text.rstrip("\n"))
    typer.echo(style(shown) if style is not None else shown)


def say_wrapped(text: str, rest: str = "") -> None:
    """A paragraph of the answer: in a terminal broken between words, `rest` in front of what follows the first line."""
    typer.echo(_wrapped(in_line(text), sys.stdout, rest))


def say_fact(name: str, text: str, room: int = 14) -> None:
    """A fact of the answer: its name, and beside it what it is; in a terminal what continues stands below that."""
    head = f"{in_line(name):<{room}} "
    typer.echo(head + _wrapped(in_line(text), sys.stdout, " " * len(head), beside=len(head)))


def note(text: str) -> None:
    """A line about the answer, on standard error, so that a pipe gets only the answer."""
    typer.echo(_wrapped(in_line(text), sys.stderr), err=True)


def note_some(lines: Sequence[str], most: int) -> None:
    """The first lines about an answer, and how many more there are."""
    for line in lines[:most]:
        note(line)
    if len(lines) > most:
        note(f"... and {len(lines) - most:,} more; --json lists them all")


def _wrapped(text: str, stream: Any, rest: str = "  ", beside: int = 0) -> str:
    """`text` in lines of a terminal, broken between words; a command in backticks stays whole, so that it can be pasted.

    beside: so many columns of the first line are taken.
    """
    if not stream.isatty():
        return text
    held = _QUOTED.sub(lambda match: match[0].replace(" ", _HELD), text)
    width = max(_NARROWEST, shutil.get_terminal_size().columns - beside)
    lines = textwrap.wrap(held, width, subsequent_indent=rest[beside:], break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * beside}".join(lines).replace(_HELD, " ")


def can_ask() -> bool:
    """Whether a question can be seen and answered."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def agreed(text: str) -> bool:
    """Whether the user at the terminal continues with this; False where nobody can be asked."""
    return can_ask() and typer.confirm(f"{in_line(text)}. Continue?", err=True)


def answered(question: str, usual: str) -> str | None:
    """What the user at the terminal answers, `usual` for Enter alone; None where nobody can be asked."""
    if not can_ask():
        return None
    return str(typer.prompt(in_line(question), default=in_line(usual), err=True))


def say_error(error: ActordbgError) -> None:
    """An error and what to do next. Lines behind the first (the end of a log) are indented: none of them looks like ours.

    Where JSON was requested and no answer was given, standard output has it as JSON.
    """
    first, *rest = in_lines(error.message).split("\n")
    lines = [_wrapped(f"error[{error.code}]: {first}", sys.stderr), *(f"  | {line}" for line in rest)]
    typer.echo("\n".join(lines), err=True)
    if error.hint:
        note(f"hint: {error.hint}")
    _answer_error(error.code, error.message, error.hint)


def say_usage(error: Any) -> None:
    """What click says of a command line that it does not understand; it quotes the line."""
    if type(error).__name__ != "NoArgsIsHelpError":  # whose message is the help
        error.message = in_line(error.message)
    error.show()
    _answer_error("usage", error.format_message(), f"`{error.ctx.command_path} --help` explains it" if error.ctx else "")


def _answer_error(code: str, message: str, hint: str | None) -> None:
    if _wants_json(sys.argv[1:]) and not _answered:
        typer.echo(as_json_text({"error": {"code": code, "message": message, "hint": hint or None}}, 2))


def _wants_json(words: Sequence[str]) -> bool:
    """Whether a command line asks for JSON. Words of a job that `run` starts are not ours."""
    mine = " ".join(itertools.takewhile(lambda word: word not in ("--", "run"), words))
    return re.search(r"(?<!\S)(--json|(--format|-f)[ =]json)(?!\S)", mine) is not None


def say_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What Python says of an error that nobody expected (`sys.excepthook`)."""
    typer.echo(in_lines("".join(traceback.format_exception(kind, error, trace))), err=True, nl=False)


def clear_screen() -> None:
    """An empty terminal; nothing where output is piped."""
    if sys.stdout.isatty():
        typer.echo("\x1b[H\x1b[2J", nl=False)


def table_width() -> int:
    """Columns that a table may take."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, tight: bool = False) -> None:
    """Print rows under headings; numbers are aligned to the right. Wide, not cut, when piped. `tight`: one space between."""
    numeric = {
        name
        for name, *values in zip(columns, *rows, strict=True)
        if values and all(isinstance(value, int | float | None) for value in values)
    }
    cells = tuple(tuple(map(cell, row)) for row in rows)
    say_lines(grid(Grid(tuple(columns), cells, frozenset(columns) - numeric), table_width(), tight=tight, fold=True, indent=""))


def cell(value: Any) -> str:
    """A value as a table shows it."""
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
    """A progress bar on standard error while the block runs; yields `advance(n=1, note="", total=None, drawn=None)`, where a
    total that is given replaces the one that the bar began with, and `drawn` hides or shows it. A no-op with `quiet`, --quiet
    and --json. A bar of which no step was made goes away."""
    if quiet or wanted.silent:
        yield lambda *_, **__: None
        return
    from actordbg.cli.progress_bar import Bar

    bar = Bar(in_line(label), total)
    with bar.drawn:
        yield bar.advance
        bar.end()


def _plain(value: Any) -> Any:
    if isinstance(value, SimpleNamespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


_TOKENIZER = "tokenizer.json"

TokenizerFile = Annotated[
    Path | None,
    typer.Option("--tokenizer", metavar="PATH", help="A model's folder, or its name in the hub's cache: token charts get text."),
]


def texts_of(path: Path | None) -> Texts | None:
    """The text of token ids by a tokenizer on this machine; None without one. Nothing is fetched, no code of a model is run."""
    from actordbg.actor.hub_model import cached_file

    if path is None:
        return None
    from tokenizers import Tokenizer

    file = path / _TOKENIZER if path.is_dir() else path if path.is_file() else cached_file(str(path), _TOKENIZER)
    if file is None or not file.is_file():
        hint = f"name a folder with a {_TOKENIZER}, or that file; of a hub's model: `hf download NAME {_TOKENIZER}` first"
        raise UsageError(f"--tokenizer {path}: there is no such folder or file, and nothing is fetched from a hub", hint=hint)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  the library raises Exception itself
        raise UsageError(f"--tokenizer {path}: {error}", hint="name a tokenizer.json of the tokenizers library") from None

    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))


def say_document(
    blocks: Sequence[Block],
    *,
    data: Mapping[str, Any],
    brief: Iterable[Block] = (),
    style: Callable[[str], str] | None = None,
) -> None:
    """Print an answer in the format that is wanted, and write its page and its picture where they were requested.

    data: the answer as JSON, beside the blocks. brief: what a terminal gets, where that is not the whole; style: colors it.
    """
    from actordbg.document import page as pages

    how = wanted
    if how.html is not None:
        write_file(how.html, pages.as_html(blocks))
    if how.json:
        emit_json({**data, **as_data(blocks)})
    elif how.format == "md":
        say_lines(as_markdown(blocks))
    else:
        say_lines(as_text(brief or blocks), style)
    if how.plot is not None and pages.save([block for block in blocks if isinstance(block, Chart)], how.plot):
        note(f"wrote {how.plot}")


def write_file(path: Path, text: str) -> None:
    """Write a file that the user named, whole or not at all, and say so."""
    from actordbg.document.page import write_named

    write_named(path, text.encode())
    note(f"wrote {path}")


def open_page(path: Path) -> None:
    """Show a file in the browser of this machine; if there is none, say where it lies."""
    import webbrowser

    address = path.resolve().as_uri()
    try:
        opened = webbrowser.open_new_tab(address)
    except (webbrowser.Error, OSError):
        opened = False
    if not opened:
        note(f"no browser here; open {address}")
