"""Reads the values of a metric out of a training log, step by step: `read_log(path)`.

| Given | Read as | A step is |
|---|---|---|
| a file with `tfevents` in its name, or a folder that holds some | TensorBoard, by the `tensorboard` package | its step |
| `*.csv` | columns `metric`, or `run - metric` as W&B's charts are exported | the column Step, `_step` or `global_step` |
| `*.jsonl` | an object in each line, as W&B's history | `_step`, `step` or `global_step` |
| any other file, a pipe, `-` | lines of text | one of the three below |

Three ways in which a log numbers its steps, each a series of its own:

* **bar**: a progress bar's postfix, `Train step of epoch 1:  8%|8  | 2/24 [00:01<00:11, 1.9it/s, gpt_loss=6.21, lr=1e-5]`.
  The step is epoch x total + count where the bar names its epoch (SFT, DPO and RM trainings). A bar that does not (PPO: one for
  each global step) continues counting where the one before it ended. A bar is printed again and again: the last figures at a
  count are that step's. A bar that shows figures at count 0 sets them before it counts: they are the next step's, and its
  last state, a repeat, is left out.
* **line**: a line that says its step: `Global step 12: {'policy_loss': 0.02, ...}`, `step=12 loss=2.1`.
* **order**: lines that name a figure and no step (`gpt_loss: 5.78`, `{'gpt_loss': 5.78}`): each line is a step.

A step that comes again later (a resumed run in one log) counts with its later value, and is counted in `rerun`. NaN and
infinities are values like others here. Steps of an evaluation bar are those that it names.

Standard library only, but for event files. Memory grows with the steps of what is kept, not with a log of lines.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import IO, cast

from actordbg.base.errors import EnvironmentProblem, UsageError, require_package
from actordbg.trainers.trainer import TRAINER

BAR, LINE, ORDER = "bar", "line", "order"
KINDS = (LINE, BAR, ORDER)
"""How steps are numbered, the most trustworthy first."""

_MOST_NAMES = 1000
_MOST_SERIES = 64
_TITLE = 200
"""Characters before a bar that are looked at."""
# No pattern tries the same digits or spaces twice: a segment may have 4 MB of them.
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?|inf(?:inity)?|nan)"
_BAR = re.compile(r"(\d{1,3})%\|[^|]{0,300}\|\s{0,20}(\d{1,9})/(\d{1,9}) \[([^\]]*)(\]?)")
_EPOCH = re.compile(TRAINER.bar_epoch, re.IGNORECASE)
_EVALUATION = re.compile(TRAINER.bar_evaluation, re.IGNORECASE)
_STEP = re.compile(
    r"(?<!\w)(?:global[ _]?)?(?:step|iteration|iter)(?![a-z])['\"]?\s{0,20}[:=#]?\s{0,20}(\d{1,15})(?![\d.])", re.IGNORECASE
)
_PAIR = re.compile(
    r"(?:'([^']{1,80})'|\"([^\"]{1,80})\"|(?<![\w/.-])([a-z_][\w./-]{0,80}))\s*[:=]\s*(?:[a-z_][\w.]*\()?"
    rf"({_NUMBER})(?!\w)(?!\.\d)",
    re.IGNORECASE,
)
_LOSS = re.compile(r"loss(?:[_/ ](?:mean|avg))?$", re.IGNORECASE)
_VALUE = re.compile(rf"(?:[a-z_][\w.]*\()?({_NUMBER})\)?$", re.IGNORECASE)


@dataclass
class Series:
    """A metric: the value of each step, ascending where it was read (`TrainLog.settled`); NaN and infinities included.

    rerun: steps that the log came back to. totals: steps of a bar's round (an epoch), as the bars said, ascending.
    """

    kind: str
    points: dict[int, float] = field(default_factory=dict)
    rerun: int = 0
    totals: tuple[int, ...] = ()
    _last: int | None = None

    def add(self, step: int, value: float) -> None:
        """The next value as the log has it; a repeated step replaces its value."""
        self.rerun += step in self.points and step != self._last
        self.points[step], self._last = value, step


@dataclass
class TrainLog:
    """One log. `metrics`: how often each name with figures was seen; `series`: by metric and kind, of what was kept.

    metric: the one to keep; "": every one that is a loss.
    """

    path: str
    segments: int = 0
    metrics: dict[str, int] = field(default_factory=dict)
    series: dict[str, dict[str, Series]] = field(default_factory=dict)
    metric: str = ""

    def wants(self, name: str) -> bool:
        """Whether the values of a metric are kept."""
        return name == self.metric if self.metric else is_loss(name)

    def add(self, name: str, kind: str, step: int | None, value: float) -> None:
        """Count a figure, and keep it where it is wanted; one without a step is the next of its kind."""
        if name in self.metrics or len(self.metrics) < _MOST_NAMES:
            self.metrics[name] = self.metrics.get(name, 0) + 1
        if self.wants(name) and (name in self.series or len(self.series) < _MOST_SERIES):
            series = self.series.setdefault(name, {}).setdefault(kind, Series(kind))
            series.add(len(series.points) + 1 if step is None else step, value)

    def settled(self) -> TrainLog:
        """The log, its steps in order."""
        for kinds in self.series.values():
            for series in kinds.values():
                series.points = dict(sorted(series.points.items()))
        return self


def read_log(path: str, metric: str | None = None) -> TrainLog:
    """Read a log (`-`: standard input, .gz too) or an export, keeping one metric, or, without one, every metric that is a loss.

    Raises UsageError for what is not there or is not a table, EnvironmentProblem for a file that cannot be read, or a missing
    `tensorboard`. A log that says nothing is a TrainLog without metrics.
    """
    log = TrainLog(path, metric=plain_name(metric or ""))
    if (rows := _exported(path)) is not None:
        for step, figures in rows:
            log.segments += 1
            for raw, value in figures.items():
                log.add(plain_name(raw), ORDER if step is None else LINE, step, value)
        return log.settled()
    bars: dict[tuple[str, str], _Bar] = {}
    for source, text in segments(path):
        log.segments += 1
        if "%|" in text and (matches := list(_BAR.finditer(text))):
            begin = 0
            for match in matches:
                name = text[begin : match.start()][-_TITLE:].strip().rstrip(":")
                _read_bar(log, bars.setdefault((source, name), _Bar()), name, match)
                begin = match.end()
        elif "loss" in text or (log.metric and log.metric in text):
            _read_line(log, text)
    return log.settled()


@dataclass
class _Bar:
    """Where a bar is: `offset` of its round among those before it; `early`: it sets figures before it counts."""

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
        parts.pop()  # a bar that was cut off at the terminal's width lost the end of its last figure
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
    step = _STEP.search(text)
    for name, value in (pairs if step else losses) if losses else ():
        log.add(name, LINE if step else ORDER, int(step[1]) if step else None, value)


@lru_cache(_MOST_NAMES)
def is_loss(name: str) -> bool:
    """Whether a metric's name says that it is a loss: gpt_loss, loss_mean, eval gpt_loss; not aux_loss_coef."""
    return _LOSS.search(name) is not None


@lru_cache(_MOST_NAMES)
def plain_name(name: str) -> str:
    """A metric's name without what loggers put before it: "train/gpt_loss" is "gpt_loss"."""
    return name.strip().removeprefix("train/")


# A training log as segments of text: what a terminal would have shown after each line break or carriage return.
#
# Progress bars write over themselves with carriage returns, so one "line" of a log may hold a hundred states of a bar. Escape
# sequences are taken out. A Ray worker's prefix, `(PolicyModelActor pid=7022)`, becomes the segment's source and holds until the
# line ends, since Ray puts it once before a line of many states.
#
# Memory does not grow with the file. A file that begins like gzip is read as gzip.


STDIN = "-"
_LONGEST = 2**22
"""Characters without any line break after which a segment is cut: no log, but it must not fill the memory."""
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_PIPE = re.compile(r"/dev/(stdin|fd/\d+)\Z")
"""What a shell names a pipe that it holds open. Any other FIFO is refused: nobody may be at its other end."""
_RAY = re.compile(r"\s*\((\w[\w.:-]*) (?:pid|rank)=\d+[^)]{0,80}\) ?")
_TORCHRUN = re.compile(r"\s*\[[A-Za-z]+\d+\]:\s?")


def segments(path: str) -> Iterator[tuple[str, str]]:
    """(source, text) of every segment that is not empty; `-` is standard input. Source: a Ray actor's name, or "".

    Raises UsageError for what is not a file, EnvironmentProblem for one that cannot be read.
    """
    source, begins_line = "", True
    with _opened(path) as stream:
        lines = io.TextIOWrapper(stream, "utf-8", "replace", newline="")  # each with the break that ended it, \r or \n
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
def _opened(path: str) -> Iterator[IO[bytes]]:
    if path == STDIN:
        if sys.stdin is None:
            raise EnvironmentProblem("standard input is closed", hint="name a file, or give it a log")
        yield sys.stdin.buffer
        return
    if not _PIPE.match(path):
        _require_file(path)
    try:
        with _readable(path), open(path, "rb") as stream:
            packed = stream.peek(2)[:2] == b"\x1f\x8b"
            yield cast(IO[bytes], gzip.GzipFile(fileobj=stream)) if packed else stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise EnvironmentProblem(f"{path} is damaged: {error}", hint="`gzip -t` says the same") from None


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """EnvironmentProblem for what the block cannot read; what gzip finds damaged passes through."""
    try:
        yield
    except gzip.BadGzipFile:
        raise
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {path}: {error.strerror}", hint="check the path and its permissions") from None


# What another program wrote down: TensorBoard's event files, and W&B's exports as CSV or history JSONL.
#
# Where no column says the step, lines are counted. `__MIN` and `__MAX` columns are left out. A CSV of several runs needs a name:
# `chart.csv#run-a`.


_MOST_BYTES = 2**30
_STEPS = ("_step", "step", "global_step", "trainer/global_step", "train/global_step")
Rows = Iterator[tuple[int | None, dict[str, float]]]
"""The step of each row, None if no column says it, and its figures by metric."""


def _exported(path: str) -> Rows | None:
    """The rows of what is not a log of lines; None for what is one, by its name."""
    name = path.rpartition("#")[0] if ".csv#" in path.lower() else path
    with _readable(name):
        inside = os.listdir(name) if os.path.isdir(name) else []
    if any("tfevents" in file for file in (os.path.basename(name), *inside)):
        return _events(name)
    return _table(path, name) if name.lower().endswith((".csv", ".jsonl")) else None


def _table(path: str, name: str) -> Rows:
    file = _require_file(name)
    with _readable(name):
        if file.stat().st_size > _MOST_BYTES:
            raise EnvironmentProblem(f"{name} has more than {_MOST_BYTES:,} bytes", hint="export fewer metrics")
        text = file.read_text(encoding="utf-8-sig", errors="replace")
    for row in _of_csv(path, text) if name.lower().endswith(".csv") else _of_json_lines(text):
        steps = [row.pop(column) for column in list(row) if column.strip().lower() in _STEPS]
        if row:
            whole = steps and abs(steps[0]) < 2**62 and steps[0].is_integer()
            yield int(steps[0]) if whole else None, row


def _of_csv(path: str, text: str) -> Iterator[dict[str, float]]:
    """The figures of each row of one run, by metric. UsageError where several runs have the same metric."""
    run = path.rpartition("#")[2] if ".csv#" in path.lower() else None
    try:
        heads, *rows = list(csv.reader(io.StringIO(text.replace("\0", ""), newline=""))) or [[]]
    except csv.Error as error:
        raise UsageError(f"{path} is not a CSV: {error}", hint="export the chart again") from None
    split = [(index, *head.rpartition(" - ")) for index, head in enumerate(heads) if not head.endswith(("__MIN", "__MAX"))]
    columns = {index: metric for index, whose, between, metric in split if run is None or not between or whose == run}
    if len(set(map(plain_name, columns.values()))) < len(columns):
        runs = sorted({whose for _, whose, between, _ in split if between})
        raise UsageError(f"{path} holds several runs: {', '.join(runs)[:300]}", hint=f"name one: {path}#{(runs or ['RUN'])[0]}")
    for row in rows:
        figures = {}
        for index, name in columns.items():
            with contextlib.suppress(ValueError, IndexError):
                figures[name] = float(row[index])
        yield figures


def _of_json_lines(text: str) -> Iterator[dict[str, float]]:
    for line in text.split("\n"):  # a text in a row may hold what splitlines() takes for an end
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            numbers = {name: value for name, value in json.loads(line).items() if type(value) in (int, float)}
            yield {name: float(value) for name, value in numbers.items() if type(value) is float or abs(value) < 2**63}


def _events(name: str) -> Rows:
    """Every scalar of an event file, or of a folder's."""
    require_package(f"{name} is TensorBoard's, and", "tensorboard")
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    if not os.path.exists(name):
        _require_file(name)
    reader = module.EventAccumulator(name, size_guidance={"scalars": 0})
    try:
        reader.Reload()
    except Exception as error:  # noqa: BLE001 - tensorboard and protobuf raise what they like for a damaged file
        raise EnvironmentProblem(f"{name} is damaged: {error}"[:300], hint="`tensorboard --inspect` says the same") from None
    for tag in reader.Tags()["scalars"]:
        for scalar in reader.Scalars(tag):
            yield scalar.step, {tag: scalar.value}


def _require_file(path: str) -> Path:
    file = Path(path)
    if not file.is_file():
        what = "a folder" if file.is_dir() else "no file" if file.exists() else "not there"
        raise UsageError(f"the log {path} is {what}", hint="name two files, or - for standard input")
    return file
