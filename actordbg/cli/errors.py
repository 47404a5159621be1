"""Print errors: ours with their hints, those of the command line, and tracebacks. With --json, an error is JSON too."""

from __future__ import annotations

import itertools
import re
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import typer

from actordbg.base.errors import ActordbgError
from actordbg.base.foreign_text import in_line, in_lines
from actordbg.cli import output


def say_error(error: ActordbgError) -> None:
    """Print an error and its hint. Lines after the first (the end of a log) are indented, so that none looks like our output.

    If JSON was requested and nothing was printed yet, also prints the error as JSON on standard output.
    """
    first, *rest = in_lines(error.message).split("\n")
    lines = [output.wrapped(f"error[{error.code}]: {first}", sys.stderr), *(f"  | {line}" for line in rest)]
    typer.echo("\n".join(lines), err=True)
    if error.hint:
        output.note(f"hint: {error.hint}")
    _answer_error(error.code, error.message, error.hint)


def say_usage(error: Any, names: Sequence[str]) -> None:
    """Print click's error about a command line, with the quoted words cleaned. names: those of all commands."""
    if type(error).__name__ != "NoArgsIsHelpError":  # whose message is the help
        error.message = in_line(error.message).replace("Value error, ", "")  # pydantic's words
    near = getattr(error, "possibilities", None) or []
    if error.message.startswith(("No such command", "Got unexpected extra argument")):
        near = [f"actordbg {name}" for word in reversed(sys.argv) for name in names if name.split()[-1] == word] or near
    if near:
        error.message, error.possibilities = f"{error.message.rstrip('.')}. Did you mean {near[0]!r}?", None
    error.show()
    _answer_error("usage", error.format_message(), f"`{error.ctx.command_path} --help` explains it" if error.ctx else "")


def _answer_error(code: str, message: str, hint: str | None) -> None:
    if _wants_json(sys.argv[1:]) and not output.answered_json:
        output.emit_json({"error": {"code": code, "message": message, "hint": hint or None}})


def _wants_json(words: Sequence[str]) -> bool:
    """Check whether a command line requests JSON, ignoring the words of a job that `run` starts."""
    mine = " ".join(itertools.takewhile(lambda word: word not in ("--", "run"), words))
    return re.search(r"(?<!\S)(--json|(--format|-f)[ =]json)(?!\S)", mine) is not None


def say_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an unexpected error, cleaned (`sys.excepthook`)."""
    typer.echo(in_lines("".join(traceback.format_exception(kind, error, trace))), err=True, nl=False)
