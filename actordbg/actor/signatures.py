"""A name for each kind of failure, so that a report can say "12 inputs failed alike, and this is why".

An exception's text differs from input to input (shapes, addresses, ranks, sizes). A *signature* does not: it is the
id of a known failure, with its explanation and workarounds. For an unknown failure it is the error class and its message, with
everything that varies replaced by `#`.

Known failures are matched in the order of `signatures.toml`, on the error class and the message. Some show only in the log (a
process that was killed, a compiler's message); those are matched on its text as well. Pure functions over text: no torch here.

Example:
    >>> signature_of("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 31.50 GiB. GPU 0 has ...")
    'cuda-out-of-memory'
    >>> signature_of("ValueError", "size 1861 at 0x7f3a does not fit 1024")
    'ValueError: size # at # does not fit #'
    >>> explain("cuda-out-of-memory")[1][0]
    '--packing: padding is not computed'
"""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

from actordbg.config.sources import parse_toml

MAX_LENGTH = 160
"""Longest signature of an unknown failure, in characters."""


@dataclass(frozen=True)
class Known:
    """A known failure. `pattern` is searched in "ErrorClass: message"; with `in_log`, in the log as well."""

    pattern: re.Pattern[str]
    explanation: str
    ways_out: tuple[str, ...]
    in_log: bool = False


@functools.cache
def known_failures() -> dict[str, Known]:
    """Return the failures of `signatures.toml` by name, in matching order."""
    table = parse_toml(Path(__file__).with_suffix(".toml").read_text())
    for entry in table.values():
        entry["pattern"] = re.compile(entry["pattern"], re.IGNORECASE | re.DOTALL)
        entry["ways_out"] = tuple(entry["ways_out"])
    return {name: Known(**entry) for name, entry in table.items()}


_LOG_TAIL = 20_000


def signature_of(error_class: str | None, error: str | None, log: str = "") -> str:
    """Return a stable id for a failure: a known failure's id, else "ErrorClass: message" with varying parts replaced by `#`.

    `log` is the failing input's part of the worker's log; only its end is searched, for the failures that show only there.
    """
    head, tail = ": ".join((error_class or "", error or "")), log[-_LOG_TAIL:]
    known = known_failures().items()
    match = next((name for name, failure in known if failure.pattern.search(head)), None)
    match = match or next((name for name, failure in known if failure.in_log and failure.pattern.search(tail)), None)
    return match or normalize(error_class, error)


def explain(signature: str) -> tuple[str, tuple[str, ...]] | None:
    """Return (explanation, workarounds) of a known failure's id; None for an unknown failure."""
    known = known_failures().get(signature)
    return (known.explanation, known.ways_out) if known else None


def normalize(error_class: str | None, error: str | None) -> str:
    """Return the class without its module, and the message's first line without varying parts: "ValueError: size # at #"."""
    kind = " ".join((error_class or "error").rsplit(".", 1)[-1].split())
    lines = [line.strip() for line in (error or "").splitlines()]
    message = next((line for line in lines if line), "")
    for pattern, replacement in _VARYING:
        message = pattern.sub(replacement, message)
    text = " ".join(f"{kind}: {message}".split()) if message else kind
    return text if len(text) <= MAX_LENGTH else text[: MAX_LENGTH - 1].rstrip() + "…"


_VARYING: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"0x[0-9a-fA-F]+"), "#"),
    (re.compile(r"(?<![\w.])(/[\w.+@-]+)+"), "#"),
    (re.compile(r"\b[0-9a-fA-F]{8,}\b"), "#"),
    (re.compile(r"[\[(]\s*-?\d+(\s*[,x]\s*-?\d+)*\s*,?\s*[\])]"), "#"),
    (re.compile(r"(?<![A-Za-z0-9_])[-+]?\d+(\.\d+)*(e[-+]?\d+)?"), "#"),
    (re.compile(r"#(\s*[,x]\s*#)+"), "#"),
)
