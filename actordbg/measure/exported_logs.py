"""Trainings' figures that another program wrote down: TensorBoard's event files, and W&B's exports as CSV or history JSONL.

| Given | Read as | A step is |
|---|---|---|
| a file with `tfevents` in its name, or a folder that holds some | TensorBoard, by the `tensorboard` package | its step |
| `*.csv` | columns `metric`, or `run - metric` as W&B's charts are exported | the column Step, `_step` or `global_step` |
| `*.jsonl` | an object in each line, as W&B's history | `_step`, `step` or `global_step` |

Where no column says the step, lines are counted. `__MIN` and `__MAX` columns are left out. A CSV of several runs needs a name:
`chart.csv#run-a`.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from actordbg.base.errors import EnvironmentProblem, UsageError, require_package
from actordbg.measure.log_lines import LINE, ORDER, TrainLog, plain_name

EVENTS = "tfevents"
MOST_BYTES = 2**30
_STEPS = ("_step", "step", "global_step", "trainer/global_step", "train/global_step")
_DERIVED = ("__MIN", "__MAX")
_BETWEEN = " - "


def is_exported(path: str) -> bool:
    """Whether the name says that this is no log of lines."""
    name, _, _ = path.partition("#")
    return name.lower().endswith((".csv", ".jsonl")) or _has_events(name)


def read_exported(path: str, metric: str | None = None) -> TrainLog:
    """One metric, or without one every loss. UsageError for what is not there or has no figures, EnvironmentProblem for a file
    that cannot be read, or a missing `tensorboard`.
    """
    log = TrainLog(path, metric=plain_name(metric or ""))
    name = path.partition("#")[0] if ".csv#" in path.lower() else path
    for step, found in _events(name) if _has_events(name) else _table(path, name):
        log.segments += 1
        for raw, value in found.items():
            log.add(plain_name(raw), ORDER if step is None else LINE, step, value)
    return log.settled()


def _table(path: str, name: str) -> Iterator[tuple[int | None, dict[str, float]]]:
    """Each row's step, if a column says it, and its figures."""
    text = _text(name)
    for row in _of_csv(path, text) if name.lower().endswith(".csv") else _of_json_lines(text):
        steps = [row.pop(column) for column in list(row) if column.strip().lower() in _STEPS]
        if row:
            whole = steps and abs(steps[0]) < 2**62 and steps[0].is_integer()
            yield int(steps[0]) if whole else None, row


def _text(name: str) -> str:
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"the log {name} is {'a folder' if path.is_dir() else 'not there'}", hint="name a file")
    try:
        if path.stat().st_size > MOST_BYTES:
            raise EnvironmentProblem(f"{name} has more than {MOST_BYTES:,} bytes", hint="export fewer metrics")
        return path.read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise EnvironmentProblem(f"cannot read {name}: {error.strerror}", hint="check its permissions") from None


def _of_csv(path: str, text: str) -> Iterator[dict[str, float]]:
    """The figures of each row of one run, by metric. UsageError where several runs have the same metric."""
    run = path.rpartition("#")[2] if ".csv#" in path.lower() else None
    try:
        heads, *rows = list(csv.reader(io.StringIO(text.replace("\0", ""), newline=""))) or [[]]
    except csv.Error as error:
        raise UsageError(f"{path} is no CSV: {error}", hint="export the chart again") from None
    columns: dict[int, str] = {}
    for index, head in enumerate(heads):
        whose, between, metric = head.rpartition(_BETWEEN)
        if not head.endswith(_DERIVED) and (run is None or not between or whose == run):
            columns[index] = metric
    if len(set(map(plain_name, columns.values()))) < len(columns):
        runs = sorted({head.rpartition(_BETWEEN)[0] for head in heads if _BETWEEN in head})
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


def _has_events(name: str) -> bool:
    inside = os.listdir(name) if os.path.isdir(name) else []
    return any(EVENTS in file for file in (os.path.basename(name), *inside))


def _events(name: str) -> Iterator[tuple[int | None, dict[str, float]]]:
    """Every scalar of an event file, or of a folder's."""
    require_package(f"{name} is TensorBoard's, and", "tensorboard")
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    if not os.path.exists(name):
        raise UsageError(f"the log {name} is not there", hint="name an event file, or the folder that holds it")
    reader = module.EventAccumulator(name, size_guidance={"scalars": 0})
    try:
        reader.Reload()
    except Exception as error:  # noqa: BLE001 - tensorboard and protobuf raise what they like for a damaged file
        raise EnvironmentProblem(f"{name} is damaged: {error}"[:300], hint="`tensorboard --inspect` says the same") from None
    for tag in reader.Tags()["scalars"]:
        for scalar in reader.Scalars(tag):
            yield scalar.step, {tag: scalar.value}
