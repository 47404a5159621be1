"""Samples of memory as a CSV file: one line for each process and moment, written while the processes run.

Each round is written and flushed at once, so what was sampled stays, however the watching ends. A line that was cut, or whose
figures nothing can have, is left out.

    time      UTC                               rss, uss        bytes: resident, and of it what no other process shares
    seconds   since the watching began          cuda_used       bytes on GPUs, as nvidia-smi says
    node      host                              cuda_reserved   bytes that torch's allocator held after the last input
    pid       of the process                    step            inputs, calls or lines so far; empty if nobody counts them
    rank      of the replay or the run          dump_id         the input that was running; empty between inputs
    name      role, or class of the Ray actor
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.base.foreign_text import in_csv
from actordbg.formats.store_files import open_regular, read_regular

QUANTITIES = {"rss": "RSS", "uss": "USS", "cuda_used": "CUDA used", "cuda_reserved": "CUDA reserved"}
"""What is sampled, and how it is called in answers."""


@dataclass(frozen=True)
class Sample:
    """One process at one moment. Sizes in bytes; None for what is not known."""

    time: str
    seconds: float
    node: str
    pid: int
    rank: int | None
    name: str
    rss: int | None
    uss: int | None
    cuda_used: int | None
    cuda_reserved: int | None
    step: int | None
    dump_id: str

    @property
    def process(self) -> str:
        """The process by the name that stays when it is started again: its rank if it has one."""
        kind = f"{self.name} " if self.name else ""
        return f"{kind}rank {self.rank}" if self.rank is not None else f"{kind}{self.pid} on {self.node}"


COLUMNS = tuple(one.name for one in fields(Sample))
_WHOLE = frozenset(["pid", "rank", "rss", "uss", "cuda_used", "cuda_reserved", "step"])
_MOST = 2**63


class SampleFile:
    """The writer's end: a new file, with its heading; each `write` is on disk before it returns."""

    def __init__(self, path: Path) -> None:
        try:
            descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise UsageError(f"{path} is there already", hint="name another file, or remove it first") from None
        except OSError as error:
            raise StoreProblem(
                f"cannot write {path}: {error.strerror}", hint="name a file in a folder that you may write"
            ) from None
        self._file = open(descriptor, "w", newline="")  # noqa: SIM115  closed by __exit__
        self._rows = csv.writer(self._file)
        self._rows.writerow(COLUMNS)
        self._file.flush()

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def write(self, samples: Iterable[Sample]) -> None:
        """Append a round."""
        for one in samples:
            values = (getattr(one, name) for name in COLUMNS)
            self._rows.writerow([in_csv(value) if isinstance(value, str) else value for value in values])
        self._file.flush()


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file, in its order. UsageError for one that has other columns."""
    try:
        text = read_regular(path).decode(errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="`actordbg memory watch` writes such a file") from None
    try:
        rows = list(csv.reader(io.StringIO(text.replace("\0", ""))))
    except csv.Error as error:
        raise UsageError(f"{path} is no table of samples: {error}", hint="`actordbg memory watch` writes one") from None
    if not rows or tuple(rows[0]) != COLUMNS:
        raise UsageError(f"{path} has no samples of memory", hint="its first line would be " + ",".join(COLUMNS))
    return [one for row in rows[1:] if (one := _parsed(row)) is not None]


def _parsed(row: Sequence[str]) -> Sample | None:
    if len(row) != len(COLUMNS):
        return None
    values: dict[str, Any] = dict(zip(COLUMNS, row, strict=True))
    try:
        values |= {name: int(values[name]) if values[name] != "" else None for name in _WHOLE}
        values["seconds"] = float(values["seconds"])
    except ValueError:
        return None
    whole = [values[name] for name in _WHOLE if values[name] is not None]
    if values["pid"] is None or not math.isfinite(values["seconds"]) or not all(0 <= value < _MOST for value in whole):
        return None
    return Sample(**values)
