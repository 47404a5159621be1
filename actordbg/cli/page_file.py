"""The page of an answer as a file: looked at before the work, written after it, opened where somebody asks for that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from actordbg.base.errors import EnvironmentProblem, UsageError
from actordbg.cli import output
from actordbg.cli.output import emit_json, note, say_lines

if TYPE_CHECKING:
    from actordbg.document.blocks import Block
    from actordbg.judge.token_charts import Texts


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


def check_outputs() -> None:
    """Whether the files that --html and --plot name could be written. Asked before the work, which may take minutes."""
    from actordbg.document import page as pages

    check_page(output.wanted.html)
    pages.check("--plot", output.wanted.plot)


def check_page(path: Path | None) -> None:
    """Whether a page could be written there. Asked before the work, which may take minutes."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise EnvironmentProblem(f"cannot write {path}: {path.parent} is no folder", hint="make it first, or name another one")
    if path.is_dir():
        raise EnvironmentProblem(f"cannot write {path}: it is a folder", hint="name a file in it")


def say_document(
    blocks: Sequence[Block],
    *,
    data: Mapping[str, Any],
    brief: Iterable[Block] = (),
    style: Callable[[str], str] | None = None,
    csv: Callable[[], str] = str,
) -> None:
    """Print an answer in the format that is wanted, and write its page and its picture where they were asked for.

    data: the answer as JSON, beside the blocks. brief: what a terminal gets, where that is not the whole; style: colours it.
    csv: the answer as CSV, of a command that has it.
    """
    from actordbg.document import page as pages
    from actordbg.document.blocks import Chart, as_data
    from actordbg.document.renderings import as_markdown, as_text

    how = output.wanted
    if how.html is not None:
        write_file(how.html, pages.as_html(blocks))
    if how.json:
        emit_json({**data, **as_data(blocks)})
    elif how.format == "md":
        say_lines(as_markdown(blocks))
    elif how.format == "csv":
        say_lines(csv())
    else:
        say_lines(as_text(brief or blocks), style)
    if how.plot is not None and pages.save([block for block in blocks if isinstance(block, Chart)], how.plot):
        note(f"wrote {how.plot}")


def write_file(path: Path, text: str) -> None:
    """Write a file that the user named, whole or not at all, and say so."""
    from actordbg.document.page import write_named

    try:
        write_named(path, text.encode())
    except OSError as error:
        raise EnvironmentProblem(
            f"cannot write {path}: {error.strerror}", hint="name a file in a folder that you may write"
        ) from None
    note(f"wrote {path}")


def open_page(path: Path) -> None:
    """Show a file in the browser of this machine; where there is none, say where it lies."""
    import webbrowser

    address = path.resolve().as_uri()
    try:
        opened = webbrowser.open_new_tab(address)
    except (webbrowser.Error, OSError):
        opened = False
    if not opened:
        note(f"no browser here; open {address}")
