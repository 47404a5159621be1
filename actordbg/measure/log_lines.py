"""Read the values of a metric from a training log, step by step: `read_log(path)`.

What trackers and trainers export is recognized by content (`actordbg.measure.log_exports`). Any other text is a log, which
numbers its steps in one of three ways, each read into a separate series:

* **bar**: a progress bar's postfix, `Train step of epoch 1:  8%|8  | 2/24 [00:01<00:11, 1.9it/s, gpt_loss=6.21, lr=1e-5]`.
  The step is epoch x total + count if the bar names its epoch (SFT, DPO and RM trainings). Otherwise (PPO: a bar per
  global step) a bar continues the count of the previous bar. A bar is printed repeatedly: the last figures at a count are that
  step's. A bar that shows figures at count 0 sets them before it counts: they belong to the next step, and its last state, a
  repeat, is skipped.
* **line**: a line that names its step: `Global step 12: {'policy_loss': 0.02, ...}`, `step=12 loss=2.1`.
* **order**: lines with a figure and no step (`gpt_loss: 5.78`, `{'gpt_loss': 5.78}`): each line is a step.

A step that occurs again later (a resumed run in the same log) counts with its later value, and is counted in `rerun`; from the
first step again, it is another run, and only the last run counts. NaN and
infinities are kept like other values. Steps of an evaluation bar are those that it names.

Standard library only. Memory grows with the number of steps kept, not with the size of a text log.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, cast

from actordbg.base.errors import EnvironmentProblem, UsageError, system_errors
from actordbg.measure.log_exports import BAR, CALL, HEAD, LINE, ORDER, ExportedRow, exported, is_events, of_events, plain_name
from actordbg.trainers.trainer import TRAINER

KINDS = (LINE, CALL, BAR, ORDER)
"""Kinds of step numbering, most reliable first."""

_MOST_NAMES = 1000
_MOST_SERIES = 256
_TITLE = 200
"""Characters before a bar that are read as its title."""
# No pattern may backtrack over digits or spaces: a segment can have 4 MB of them.
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|inf(?:inity)?|nan)"
_BAR = re.compile(r"(\d{1,3})%\|[^|]{0,300}\|\s{0,20}(\d{1,9})/(\d{1,9}) \[([^\]]*)(\]?)")
_EPOCH = re.compile(TRAINER.bar_epoch, re.IGNORECASE)
_EVALUATION = re.compile(TRAINER.bar_evaluation, re.IGNORECASE)
_STEP = re.compile(
    r"(?<!\w)(?:global[ _]?)?(?:step|iteration|iter)(?![a-z])['\"]?\s{0,20}[:=#]?\s{0,20}['\"]?(\d{1,15})(?![\d.])", re.IGNORECASE
)
_PAIR = re.compile(
    r"(?:'([^']{1,80})'|\"([^\"]{1,80})\"|(?<![\w/.-])([a-z_][\w./-]{0,80}))\s*[:=]\s*['\"]?(?:[a-z_][\w.]*\()?"
    rf"({_NUMBER})(?!\w)(?!\.\d)",
    re.IGNORECASE,
)
_LOSS = re.compile(r"loss(?:[_/ ](?:mean|avg))?$", re.IGNORECASE)
_VALUE = re.compile(rf"(?:[a-z_][\w.]*\()?({_NUMBER})\)?$", re.IGNORECASE)


@dataclass
class Series:
    """The values of a metric by step, ascending once read (`TrainLog.settled`); NaN and infinities included.

    rerun: number of repeated steps. totals: steps per round (epoch), as the bars print them, ascending.
    """

    kind: str
    points: dict[int, float] = field(default_factory=dict)
    rerun: int = 0
    totals: tuple[int, ...] = ()
    _last: int | None = None

    def add(self, step: int, value: float) -> None:
        """Add the next value of the log; a repeated step replaces its value, and a run that begins anew all values before it."""
        self.rerun += step in self.points and step != self._last
        if self.kind in (LINE, CALL) and step != self._last and step == next(iter(self.points), None):
            self.rerun += len(self.points) - 1
            self.points = {}
        self.points[step], self._last = value, step


@dataclass
class TrainLog:
    """A training log. `metrics`: how often each metric occurs; `series`: the kept values by metric and kind.

    metric: the metric to keep; "": every loss. every: keep all metrics. nulls: how many NaN of each metric were written as null.
    """

    path: str
    segments: int = 0
    metrics: dict[str, int] = field(default_factory=dict)
    series: dict[str, dict[str, Series]] = field(default_factory=dict)
    metric: str = ""
    every: bool = False
    nulls: dict[str, int] = field(default_factory=dict)
    bars: dict[tuple[str, str], _Bar] = field(default_factory=dict, repr=False)

    def wants(self, name: str) -> bool:
        """Return whether the values of a metric are kept."""
        return self.every or (name == self.metric if self.metric else is_loss(name))

    def add(self, name: str, kind: str, step: int | None, value: float) -> None:
        """Count a figure, and keep it if its metric is wanted; without a step it gets the next number of its kind."""
        if name in self.metrics or len(self.metrics) < _MOST_NAMES:
            self.metrics[name] = self.metrics.get(name, 0) + 1
        if self.wants(name) and (name in self.series or len(self.series) < _MOST_SERIES):
            series = self.series.setdefault(name, {}).setdefault(kind, Series(kind))
            series.add(len(series.points) + 1 if step is None else step, value)

    def settled(self) -> TrainLog:
        """Sort the steps of every series; return the log."""
        for kinds in self.series.values():
            for series in kinds.values():
                series.points = dict(sorted(series.points.items()))
        return self


def read_log(path: str, metric: str | None = None, *, every: bool = False) -> TrainLog:
    """Read a log (`-`: standard input; .gz is supported) or an export, keeping `metric`, or every loss if it is None.

    every: keep all metrics.

    Raises UsageError for a missing file or an invalid table, CorruptDump or EnvironmentProblem for an unreadable file,
    EnvironmentProblem for a missing `tensorboard` package. A log without figures gives a TrainLog without metrics.
    """
    log = TrainLog(path, metric=plain_name(metric or ""), every=every)
    name, run = (path, None) if path == STDIN or os.path.exists(path) else _split(path)
    with _readable(name):
        if os.path.isdir(name) and any("tfevents" in file for file in os.listdir(name)):
            _keep_rows(log, of_events(name))
            return log.settled()
    with _opened(name) as stream:
        _read(log, exported(name, run, stream))
    return log.settled()


def read_more(log: TrainLog, lines: bytes) -> None:
    """Read further whole lines of a log, a table's behind its heading, or records of an event file. Raises as `read_log`."""
    if is_events(lines):
        with NamedTemporaryFile() as file:
            file.write(lines)
            file.flush()
            _keep_rows(log, of_events(file.name))
    else:
        _read(log, exported(log.path, None, _buffered(io.BytesIO(lines))))
    log.settled()


def _read(log: TrainLog, found: Iterable[ExportedRow] | io.BufferedIOBase) -> None:
    if isinstance(found, io.BufferedIOBase):
        _read_text(log, found)
    else:
        _keep_rows(log, found)


def _split(path: str) -> tuple[str, str | None]:
    """Split FILE#RUN."""
    name, mark, run = path.rpartition("#")
    return (name, run) if mark else (path, None)


def _keep_rows(log: TrainLog, rows: Iterable[ExportedRow]) -> None:
    for row in rows:
        log.segments += 1
        for raw, value in row.figures.items():
            log.add(plain_name(raw), row.kind, row.step, value)
        for raw in row.nulls:
            log.nulls[plain_name(raw)] = log.nulls.get(plain_name(raw), 0) + 1


def _read_text(log: TrainLog, stream: io.BufferedIOBase) -> None:
    for source, text in segments(stream):
        log.segments += 1
        if "%|" in text and (matches := list(_BAR.finditer(text))):
            begin = 0
            for match in matches:
                before = text[begin : match.start()]
                name = before[-_TITLE:].strip().rstrip(":")
                _read_bar(log, log.bars.setdefault((source, name), _Bar()), name, match)
                begin = match.end()
        elif log.every or "loss" in text or (log.metric and log.metric in text):
            _read_line(log, text)


@dataclass
class _Bar:
    """The state of a bar. `offset`: steps of its earlier rounds; `early`: it sets figures before it counts."""

    count: int = -1
    total: int = 0
    offset: int = 0
    early: bool = False


def _read_bar(log: TrainLog, bar: _Bar, name: str, match: re.Match[str]) -> None:
    """Keep the figures inside a bar's brackets."""
    count, total = int(match[2]), int(match[3])
    if count < bar.count:
        bar.offset += bar.total
    bar.count, bar.total = count, total
    parts = match[4].split(", ")
    if not match[5]:
        parts.pop()  # cut off at the terminal's width: the last figure is incomplete
    split = (part.partition("=") for part in parts)
    values = [(plain_name(raw), value) for raw, sign, text in split if sign and (value := _VALUE.match(text.strip()))]
    bar.early = bar.early or (count == 0 and bool(values))
    if bar.early and count >= total:
        return
    if evaluation := _EVALUATION.search(name):
        step = int(evaluation[1])
    else:
        epoch = _EPOCH.search(name)
        step = (int(epoch[1]) * total if epoch else bar.offset) + count + bar.early
    for metric, value in values:
        log.add(metric, BAR, step, float(value[1]))
        if series := log.series.get(metric, {}).get(BAR):
            series.totals = tuple(sorted({*series.totals, total}))


def _read_line(log: TrainLog, text: str) -> None:
    parsed = ((plain_name(a or b or c), float(number)) for a, b, c, number in _PAIR.findall(text))
    pairs = [(name, value) for name, value in parsed if not name.endswith(".py")]  # logging's file.py:45
    losses = [(name, value) for name, value in pairs if log.wants(name) or is_loss(name)]
    if losses and (step := _STEP.search(text)):
        for name, value in pairs:
            log.add(name, LINE, int(step[1]), value)
    elif not log.every or any(
        is_loss(name) for name, _ in losses
    ):  # of all figures in a log only those beside a loss are metrics
        for name, value in losses:
            log.add(name, ORDER, None, value)


@lru_cache(_MOST_NAMES)
def is_loss(name: str) -> bool:
    """Return whether a metric's name is that of a loss: gpt_loss, loss_mean, eval gpt_loss; not aux_loss_coef."""
    return _LOSS.search(name) is not None


# A training log as segments of text: what a terminal would show after each line break or carriage return.
#
# Progress bars overwrite themselves with carriage returns, so one "line" of a log may hold a hundred states of a bar. Escape
# sequences are removed. A Ray worker's prefix, `(PolicyModelActor pid=7022)`, becomes the segment's source until the line
# ends, since Ray prints it once before a line of many states.
#
# Memory does not grow with the file. A file that begins like gzip is read as gzip.


STDIN = "-"
_LONGEST = 2**22
"""Characters without a line break after which a segment is cut, so that a file that is not a log cannot fill memory."""
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_PIPE = re.compile(r"/dev/(stdin|fd/\d+)\Z")
"""How a shell names a pipe that it holds open. Any other FIFO is refused: it may have no writer."""
_RAY = re.compile(r"\s*\((\w[\w.:-]*) (?:pid|rank)=\d+[^)]{0,80}\) ?")
_TORCHRUN = re.compile(r"\s*\[[A-Za-z]+\d+\]:\s?")


def segments(stream: io.BufferedIOBase) -> Iterator[tuple[str, str]]:
    """Yield (source, text) of every segment that is not empty. Source: a Ray actor's name, or ""."""
    source, begins_line = "", True
    lines = io.TextIOWrapper(cast(IO[bytes], stream), "utf-8", "replace", newline="")  # each line keeps its terminator, \r or \n
    try:
        while line := lines.readline(_LONGEST):
            if begins_line:
                source = ""
            begins_line = line.endswith("\n")
            text = _ESCAPE.sub("", line.rstrip("\r\n"))
            if match := _RAY.match(text):
                source, text = match[1], text[match.end() :]
            elif match := _TORCHRUN.match(text):
                text = text[match.end() :]
            if text and not text.isspace():
                yield source, text
    finally:
        lines.detach()  # standard input stays open


@contextlib.contextmanager
def _opened(path: str) -> Iterator[io.BufferedReader]:
    """Open a log, unpacked if it is gzip. UsageError if the path is not a file, EnvironmentProblem if it cannot be read."""
    if path == STDIN:
        if sys.stdin is None:
            raise EnvironmentProblem("standard input is closed", hint="name a file, or pipe a log in")
        standard = _buffered(sys.stdin.buffer)
        yield standard
        standard.detach()
        return
    if not _PIPE.match(path):
        _require_file(path)
    with _readable(path), open(path, "rb") as file:
        stream = _buffered(file)
        packed = stream.peek(2)[:2] == b"\x1f\x8b"
        try:
            yield _buffered(gzip.GzipFile(fileobj=stream)) if packed else stream
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise EnvironmentProblem(f"{path} is damaged: {error}", hint="check it with `gzip -t`") from None


def _buffered(stream: Any) -> io.BufferedReader:
    """Return a reader of the stream that can look ahead far enough to recognize what it is."""
    return io.BufferedReader(stream, HEAD)


def _readable(path: str) -> AbstractContextManager[None]:
    """Raise EnvironmentProblem if the block cannot read the path."""
    return system_errors(EnvironmentProblem, f"cannot read {path}", "check the path and its permissions")


def _require_file(path: str) -> Path:
    file = Path(path)
    if not file.is_file():
        what = "a folder" if file.is_dir() else "not a file" if file.exists() else "missing"
        raise UsageError(f"the log {path} is {what}", hint="name a file, or - for standard input")
    return file
