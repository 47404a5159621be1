"""The trailer that `actordbg patch` appends to the trainer's actor.py: pure bytes to bytes, no file is touched here.

Nothing inside the file is edited. A few ASCII lines are added after its last line::

    # >>> actordbg trailer >>> appended by `actordbg patch`, cut off by `actordbg unpatch`: do not edit
    # {"format": 1, "length": 14040, "sha256": "4c95...", "store": "/data/store", ..., "check": "91d0..."}
    def _actordbg_install(): ...        imports actordbg.capture.hook and wraps Actor, whatever happens to it
    _actordbg_install()
    del _actordbg_install
    # <<< actordbg trailer <<<

Why a trailer: the file exists in at least 48 versions with 8 `forward` signatures, and in forks with more. The trailer
does not depend on any of that, and cutting it off restores the original to the byte; `length` and `sha256` prove it.

Invariants:
- `inspect(append(source, ...)).source == source` for every source that `append` accepts, with any newline convention, byte order
  mark, encoding, or a missing final newline. The new text parses to the old statements plus the trailer's own.
- The state of a file is a function of its bytes (`inspect`). Bytes before the trailer may be edited: they are the
  user's, and `inspect` returns them unchanged. A trailer that was edited (its `check` does not match), that has
  text after it, or that a newer actordbg wrote, is never cut by guesswork: Conflict.
- If actordbg is missing, broken, incompatible, or fails in any way, the training job continues, with a line on stderr.
  `ACTORDBG_DISABLE=1` skips the trailer altogether; `ACTORDBG_STORE` overrides the store that was chosen when patching.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from actordbg import __version__
from actordbg.base.errors import Conflict, Unsupported
from actordbg.trainers.trainer import TRAINER

FORMAT = 1
NEWLINES = ("\n", "\r\n", "\r")
INSTALLER = "_actordbg_install"
BEGIN = "# >>> actordbg trailer >>>"
END = "# <<< actordbg trailer <<<"

_TRACES = re.compile(rb"(?<![^\r\n])(" + b"|".join(re.escape(t).encode() for t in (BEGIN, END, f"def {INSTALLER}(")) + b")")
_CHECK = re.compile(rb'"check": "([0-9a-f]{64})"')
_NO_CHECK = "0" * 64

_TEXT = """\
{begin} appended by `actordbg patch`, cut off by `actordbg unpatch`: do not edit
# {header}
def {installer}():
    try:
        import os

        if os.environ.get("ACTORDBG_DISABLE", "") in ("", "0"):
            from actordbg.{recorder} import install

            install(Actor, store=os.environ.get("ACTORDBG_STORE") or {store})
    except BaseException as error:  # whatever it is: a debugger does not stop a training job
        try:
            from actordbg.base.fault import from_outside

            stops = from_outside(error, BaseException)
        except Exception:
            stops = False
        if stops or isinstance(error, KeyboardInterrupt):  # but the job's own signals do
            raise
        try:
            import sys

            print("actordbg: not capturing: %s: %s" % (type(error).__name__, error), file=sys.stderr)
        except Exception:
            pass


{installer}()
del {installer}
{end}
"""


class State(str, Enum):
    """State of an actor.py, from its bytes."""

    CLEAN = "clean"
    PATCHED = "patched"
    EDITED = "patched and edited since"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Trailer:
    """A trailer's header: the original it was appended to and the store it captures into.

    `length` (bytes), `sha256` and `mtime_ns` (or None) are the original's; `store` is an absolute path; `lead` counts
    the newlines (`newline`) between the original and the trailer's first line; `actordbg` is the version that wrote it;
    `adapter`, if not "", is named as the file's package, and records its calls.
    """

    format: int
    length: int
    sha256: str
    mtime_ns: int | None
    store: str
    newline: str
    lead: int
    actordbg: str
    adapter: str = ""


@dataclass(frozen=True)
class Inspection:
    """A file's state, the reason for it, its trailer if it has a readable one, and the file without it.

    `source` is the file without its trailer: the original (PATCHED), the user's edit of it (EDITED), the file itself
    (CLEAN), or None if cutting would be guesswork or there is nothing to patch.
    """

    state: State
    reason: str
    trailer: Trailer | None = None
    source: bytes | None = None


def append(source: bytes, store: str, *, mtime_ns: int | None = None, adapter: str = "") -> bytes:
    """Return `source` with a trailer that captures into `store` (an absolute path), through an adapter if one is named.

    Raises Unsupported if `source` has no top-level class Actor with a forward of token ids and their mask, does not parse, or
    would parse to something else with a trailer after it; Conflict if it already holds a trailer or part of a trailer.
    """
    inspection = inspect(source)
    if inspection.state is State.UNSUPPORTED:
        raise Unsupported(f"there is nothing to patch: {inspection.reason}")
    if inspection.state is not State.CLEAN:
        raise Conflict(f"the file already has an actordbg trailer: {inspection.reason}", hint="run `actordbg unpatch` first")
    crlf = source.count(b"\r\n")  # the newline that the file uses most; LF if it has none
    newline = max(NEWLINES, key=lambda newline: source.count(newline.encode()) - (crlf if len(newline) == 1 else 0))
    trailer = Trailer(
        format=FORMAT,
        length=len(source),
        sha256=sha256_of(source),
        mtime_ns=mtime_ns,
        store=store,
        newline=newline,
        lead=1 if source.endswith((b"\n", b"\r")) else 2,
        actordbg=__version__,
        adapter=adapter,
    )
    patched = source + (newline * trailer.lead).encode() + _render(trailer)
    _require_same_meaning(source, patched, _render(trailer))
    return patched


def inspect(data: bytes) -> Inspection:
    """Determine the state of a file from its bytes alone: CLEAN, PATCHED, EDITED or UNSUPPORTED (see State and Inspection)."""
    traces = list(_TRACES.finditer(data))
    if not traces:
        problem = _unsupported(data)
        return Inspection(State.UNSUPPORTED, problem) if problem else Inspection(State.CLEAN, "", source=data)
    begins = [trace.start() for trace in traces if trace[1] == BEGIN.encode()]
    if len(begins) != 1:
        return Inspection(State.EDITED, f"it has {len(begins)} first lines of a trailer instead of one")
    start = begins[0]
    trailer, damage = _parse(data[start:])
    if trailer is None or damage:
        return Inspection(State.EDITED, damage, trailer)
    source = _cut(data[:start], trailer)
    if len(source) == trailer.length and sha256_of(source) == trailer.sha256:
        return Inspection(State.PATCHED, "", trailer, source)
    return Inspection(State.EDITED, "the text before the trailer was edited after patching", trailer, source)


def remedy(data: bytes) -> str:
    """Say how to remove the damaged trailer in `data` by hand, with line numbers."""
    trace = next(_TRACES.finditer(data))
    first = len(data[: trace.start()].splitlines()) + 1
    return (
        f"line {first} to the end is the trailer: move your own lines above it, then delete it by hand; "
        f"what is above line {first} is the original; reinstalling {TRAINER.package} also brings it back"
    )


def sha256_of(data: bytes) -> str:
    """Return the SHA-256 of `data`, in hex."""
    return hashlib.sha256(data).hexdigest()


def _render(trailer: Trailer) -> bytes:
    header = {**trailer.__dict__, "check": _NO_CHECK}
    recorder = "trainers.importhook" if trailer.adapter else "capture.hook"
    if not trailer.adapter:
        del header["adapter"]
    named = {"header": json.dumps(header), "store": ascii(trailer.store), "recorder": recorder}
    text = _TEXT.format(begin=BEGIN, end=END, installer=INSTALLER, **named)
    blank = text.replace("\n", trailer.newline).encode("ascii")
    return _with_check(blank, sha256_of(blank))


def _with_check(text: bytes, check: str) -> bytes:
    """Replace the value of `check` in a trailer's text: the first match, since quotes inside the header are escaped."""
    return _CHECK.sub(f'"check": "{check}"'.encode(), text, count=1)


def _parse(text: bytes) -> tuple[Trailer | None, str]:
    """Parse the trailer at the start of `text`; return it and what is wrong with it ("" if nothing is)."""
    try:
        header = json.loads(text.splitlines()[1].removeprefix(b"# "))
        check = header.pop("check")
        if header["format"] != FORMAT:
            return None, f"its trailer has format {header['format']}, this actordbg knows format {FORMAT}"
        trailer = Trailer(**header)
        if trailer.newline not in NEWLINES or trailer.lead not in (1, 2):
            raise ValueError(trailer.newline)
    except (IndexError, ValueError, KeyError, TypeError, AttributeError):
        return None, "the trailer's second line was edited"
    if sha256_of(_with_check(text, _NO_CHECK)) == check:
        return trailer, ""
    end = text.find(END.encode() + trailer.newline.encode())
    whole = text[: end + len(END) + len(trailer.newline)] if end >= 0 else b""
    if whole and whole == _render(trailer):
        return trailer, "there is text after the trailer"
    return trailer, "the trailer itself was edited"


def _cut(before: bytes, trailer: Trailer) -> bytes:
    """Return the text before the trailer, without those of the trailer's own newlines that are still there.

    A file that ended with a newline (`lead` 1) still does when lines were added right before the trailer.
    """
    newline = trailer.newline.encode()
    if trailer.lead == 1:
        shorter = before.removesuffix(newline)
        return shorter if shorter.endswith((b"\n", b"\r")) else before
    return before.removesuffix(newline).removesuffix(newline)


def _parse_python(source: bytes) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source, "actor.py")


def _unsupported(source: bytes) -> str:
    """Return why this source cannot be patched; "" if it can."""
    try:
        tree = _parse_python(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"this is not Python source that can be read ({error})"
    actors = [node for node in _top_level(tree.body) if isinstance(node, ast.ClassDef) and node.name == "Actor"]
    if not actors:
        return "there is no class Actor at the top level"
    forwards = [node.args for node in actors[-1].body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    if not forwards:
        return "class Actor has no method forward of its own"
    takes = [argument.arg for argument in (*forwards[-1].posonlyargs, *forwards[-1].args, *forwards[-1].kwonlyargs)]
    if {"sequences", "attention_mask"} <= {*takes}:
        return ""
    return (
        f"this is another Actor: its forward takes ({', '.join(takes)}), and {TRAINER.name}'s takes sequences and attention_mask"
    )


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run when the module is imported, those under top-level `if` and `try` included."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _top_level([*node.body, *node.orelse, *getattr(node, "finalbody", ())])


def _require_same_meaning(source: bytes, patched: bytes, added: bytes) -> None:
    """Check that all old statements are still there, on the same lines, with only the trailer's after them.

    Raises Unsupported otherwise.
    """
    try:
        before, after, own = (_parse_python(text).body for text in (source, patched, added))
        kept, rest = after[: len(before)], after[len(before) :]
        same = _dump(kept, places=True) == _dump(before, places=True) and _dump(rest) == _dump(own)
    except (SyntaxError, ValueError, RecursionError):
        same = False
    if not same:
        raise Unsupported(
            "a trailer would not work in this file, or would change what the file means",
            hint="end the file with a complete statement and a newline, and keep it in UTF-8 (coding comment)",
        )


def _dump(nodes: list[ast.stmt], *, places: bool = False) -> list[str]:
    return [ast.dump(node, include_attributes=places) for node in nodes]
