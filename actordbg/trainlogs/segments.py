"""A training log as segments of text: what a terminal would have shown after each line break or carriage return.

Progress bars write over themselves with carriage returns, so one "line" of a log may hold a hundred states of a bar. Escape
sequences are taken out. A Ray worker's prefix, `(PolicyModelActor pid=7022)`, becomes the segment's source and holds until the
line ends, since Ray puts it once before a line of many states.

Memory does not grow with the file: it is read in pieces of 1 MiB. A file that begins like gzip is read as gzip.
"""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from actordbg.base.errors import EnvironmentProblem, UsageError

STDIN = "-"
_PIECE = 2**20
_LONGEST = 2**22
"""Bytes without any line break after which a segment is cut: no log, but it must not fill the memory."""
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_PIPE = re.compile(r"/dev/(stdin|fd/\d+)\Z")
"""What a shell names a pipe that it holds open. Any other FIFO is refused: nobody may be at its other end."""
_BREAK = re.compile(r"([\r\n])")
_RAY = re.compile(r"\s*\((\w[\w.:-]*) (?:pid|rank)=\d+[^)]{0,80}\) ?")
_TORCHRUN = re.compile(r"\s*\[[A-Za-z]+\d+\]:\s?")


def segments(path: str) -> Iterator[tuple[str, str]]:
    """(source, text) of every segment that is not empty; `-` is standard input. Source: a Ray actor's name, or "".

    Raises UsageError for what is not a file, EnvironmentProblem for one that cannot be read.
    """
    source = ""
    for text, begins_line in _pieces(path):
        clean = _ESCAPE.sub("", text) if "\x1b" in text else text
        if begins_line:
            source = ""
        if "(" in clean[:3] and (found := _RAY.match(clean)):
            source, clean = found[1], clean[found.end() :]
        elif "[" in clean[:3] and (found := _TORCHRUN.match(clean)):
            clean = clean[found.end() :]
        if clean and not clean.isspace():
            yield source, clean


def _pieces(path: str) -> Iterator[tuple[str, bool]]:
    """Each segment as it stands in the file, and whether a line begins with it."""
    rest, begins_line = b"", True
    with _opened(path) as stream:
        while block := stream.read(_PIECE):
            block = rest + block
            end = max(block.rfind(b"\n"), block.rfind(b"\r")) + 1
            if not end and len(block) > _LONGEST:
                end = len(block)
            whole, rest = block[:end], block[end:]
            for text, stop in _split(whole.decode("utf-8", "replace")):
                yield text, begins_line
                begins_line = stop == "\n"
    if rest:
        yield rest.decode("utf-8", "replace"), begins_line


def _split(text: str) -> Iterator[tuple[str, str]]:
    """Segments and what ended each: "\\n", "\\r", or "" for a cut."""
    parts = _BREAK.split(text)
    for index in range(0, len(parts) - 1, 2):
        yield parts[index], parts[index + 1]
    if parts[-1]:
        yield parts[-1], ""


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    if path == STDIN:
        if sys.stdin is None:
            raise EnvironmentProblem("standard input is closed", hint="name a file, or give it a log")
        yield sys.stdin.buffer
        return
    if not Path(path).is_file() and not _PIPE.match(path):
        what = "a folder" if Path(path).is_dir() else "no file" if Path(path).exists() else "not there"
        raise UsageError(f"the log {path} is {what}", hint="name two files, or - for standard input")
    try:
        with open(path, "rb") as stream:
            packed = stream.peek(2)[:2] == b"\x1f\x8b"
            yield cast(IO[bytes], gzip.GzipFile(fileobj=stream)) if packed else stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise EnvironmentProblem(f"{path} is damaged: {error}", hint="`gzip -t` says the same") from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from None
