"""Rows of figures in what trainers and trackers write, recognized by content and not by name: `exported(name, run, stream)`.

| Content | Read as |
|---|---|
| `{"log_history": [...]}` | `trainer_state.json` of transformers: a row for each entry |
| JSON objects, one a line or in a list | W&B's history, verl's file logger (`{"step": 1, "data": {...}}`) and others |
| CSV | columns `metric`, or `run - metric` as W&B's charts are exported |
| event files, or a folder of them | TensorBoard, by the `tensorboard` package |
| SQLite with a table `metrics` | trackio's database |
| parquet with a column of steps and no lists | W&B's history, or a table of pandas, by `pyarrow` |
| any other text | a log: `actordbg.measure.log_lines` |

Anything else is refused by its own name. A step is the first of `STEPS` that a row has. W&B's own `_step` counts its
calls of `log`, so its numbers (`CALL`) are another trainer's steps only if the trainer made them so.

Not-a-number is spelled `NaN`, `nan`, `"NaN"` or `null`. A null is a NaN unless the row has figures that never stand beside a
value of that metric: such a row is of another kind (an evaluation in a table of trainings), and lacks it.
"""

import csv
import io
import json
import math
import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import quote

from actordbg.base.errors import CorruptDump, EnvironmentProblem, UsageError, require_package
from actordbg.formats.dump_record import MAX_VALUES
from actordbg.formats.record_reading import MOST_VALUES, values_in

LINE, CALL, BAR, ORDER = "line", "call", "bar", "order"
"""How steps are numbered: by the trainer, by W&B's calls, by a progress bar, by counting lines."""
OF_STEPS = "global_step/max_steps"
"""ms-swift's column of a text like `5/600`."""
STEPS = ("train/global_step", "trainer/global_step", "global_step", OF_STEPS, "current_steps", "step", "_step")
"""Columns that number steps, the best first."""
HEAD = 2**16
"""Bytes of a file that decide what it is."""
_MOST_BYTES = 2**27
_MOST_TURNS = 2000
"""Hundred thousands of SQLite's instructions: the pages of a made-up database can form a table that has no end."""
_SQLITE = b"SQLite format 3\0"
_PARQUET = b"PAR1"
_OTHERS = {
    b"PK\x03\x04": "a zip archive, as torch and numpy save",
    b"\x80": "a pickle",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\x89HDF": "an HDF5 file",
    b":W&B": "W&B's own file of a run",
    b"\xff\xfe": "text in UTF-16",
}
"""What begins like this holds no log that can be read here."""
_JSON = re.compile(rb"(\xef\xbb\xbf)?\s*(\{\s*[\"}]|\[\s*[{\]])")
_CUT = re.compile(r'\s*(\[\s*\{\s*"|\{[\s\S]*"log_history")')
"""How a history in one document begins; lines of JSON do not."""
_CONTROL = bytes([*range(7), *range(14, 27)])


MOST_BESIDE = 10**7
"""How many names of figures are kept, for all names that are null in some row."""


class ExportedRow(NamedTuple):
    """A row: how it is numbered, its step (None: count it), its figures by metric; nulls: those that were written as null."""

    kind: str
    step: int | None
    figures: dict[str, float]
    nulls: tuple[str, ...] = ()


def exported(name: str, run: str | None, stream: io.BufferedReader) -> Iterator[ExportedRow] | io.BufferedIOBase:
    """Return the rows of an export; else the stream, for text of another kind. run: whose metrics to read if it holds several.

    Raises UsageError for a binary file, CorruptDump or EnvironmentProblem for what is damaged or too large.
    """
    head = stream.peek(HEAD)[:HEAD]
    if head.startswith(_SQLITE):
        return _of_trackio(name, run)
    if is_events(head):
        return of_events(name)
    if head.startswith(_PARQUET):
        return _numbered(_of_parquet(name))
    what = next((what for start, what in _OTHERS.items() if head.startswith(start)), "")
    if not what and len(head.translate(None, _CONTROL)) < 0.9 * len(head):
        what = "binary"
    if what:
        raise UsageError(f"{name} is {what}, and no log", hint="export its figures as CSV, JSON or JSON lines; logs are text")
    if _is_json(head):
        data = _whole(name, stream)
        text = data.decode("utf-8-sig", "replace")
        objects, whole = _objects(text)
        if not whole and _CUT.match(text):  # read as text, its figures would lose their steps and most of their names
            raise CorruptDump(f"{name} is JSON that ends in the middle", hint="copy it again, or name an earlier one")
        return _numbered(_figures(objects)) if objects else io.BytesIO(data)
    if is_csv(head):
        return _numbered(_of_csv(name, run, _whole(name, stream).decode("utf-8-sig", "replace")))
    return stream


def is_whole(head: bytes) -> bool:
    """Return whether a file that begins so has to be read whole: a document, or no text."""
    return b"\0" in head or _is_json(head)


def _whole(name: str, stream: io.BufferedReader) -> bytes:
    data = bytearray()
    while part := stream.read(2**20):  # a larger read would take its memory in advance
        data += part
        if len(data) > _MOST_BYTES:
            raise EnvironmentProblem(f"{name} has more than {_MOST_BYTES:,} bytes", hint="export fewer metrics")
    if values_in(data) > MOST_VALUES:  # 60 MB of `[],` would take 1.6 GB
        raise EnvironmentProblem(f"{name} has more than {MOST_VALUES:,} values", hint="export fewer metrics")
    return bytes(data)


Figures = tuple[dict[str, float], tuple[str, ...]]
"""The figures of a row by metric, and the names of those that were written as null."""


def _numbered(rows: Iterable[Figures]) -> Iterator[ExportedRow]:
    """Take the step out of each row. Rows without a whole number in a step's column are counted."""
    for figures, nulls in rows:
        columns = sorted(
            (name for name in figures if name.strip().lower() in STEPS), key=lambda name: STEPS.index(name.strip().lower())
        )
        steps = [(name, value) for name in columns if (value := figures.pop(name)).is_integer() and abs(value) < 2**62]
        if not figures:
            continue
        if not steps:
            yield ExportedRow(ORDER, None, figures, nulls)
            continue
        name, step = steps[0]
        calls = name == "_step" or (name == "Step" and any(" - " in other for other in figures))
        yield ExportedRow(CALL if calls else LINE, int(step), figures, nulls)


# ---- JSON ----


def _is_json(head: bytes) -> bool:
    """Return whether this begins a JSON document, or lines of which most are JSON."""
    if not _JSON.match(head):
        return False
    lines = [line for line in head.decode("utf-8-sig", "replace").split("\n") if line.strip()]
    complete = lines[:-1] or lines
    parsed = [_parsed(line) for line in complete]
    return parsed[0] is None or 2 * sum(value is not None for value in parsed) >= len(parsed)


def _parsed(text: str) -> Any:
    """Parse JSON; None for anything else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _objects(text: str) -> tuple[list[dict[str, Any]], bool]:
    """List the objects of a document, or of its lines, and say whether it or its first line is JSON."""
    document = _parsed(text)
    whole = document is not None
    if not whole:
        document = [_parsed(line) for line in text.strip().split("\n")]  # splitlines() would also split inside a text
        whole = document[0] is not None
    elif isinstance(document, dict):
        document = document.get("log_history", [document])
    return [row for row in document if isinstance(row, dict)] if isinstance(document, list) else [], whole


def _figures(objects: Iterable[Mapping[str, Any]]) -> Iterator[Figures]:
    """Yield the figures of each object; nested ones by `group/metric`, those under `data` by their own names."""
    rows = []
    for row in objects:
        flat: dict[str, Any] = {}
        for key, value in row.items():
            if isinstance(value, dict):
                group = "" if key == "data" else f"{key}/"
                flat |= {f"{group}{name}": figure for name, figure in value.items()}
            else:
                flat[key] = value
        if OF_STEPS in flat:
            flat[OF_STEPS] = str(flat[OF_STEPS]).partition("/")[0]
        values = {name: _number(value) for name, value in flat.items()}
        rows.append(({name: value for name, value in values.items() if value is not None}, [k for k in flat if flat[k] is None]))
    nulled = {name for _, empty in rows for name in empty}
    beside: dict[str, set[str]] = {}
    room = MOST_BESIDE
    for figures, _ in rows:
        for name in figures.keys() & nulled:
            known = beside.setdefault(name, set())
            if room > 0 and not figures.keys() <= known:
                known.update(figures)
                room -= len(figures)
    for figures, empty in rows:
        nulls = [name for name in empty if name not in beside or figures.keys() <= beside[name]]
        yield figures | dict.fromkeys(nulls, math.nan), tuple(nulls)


def _number(value: Any) -> float | None:
    """Return a figure, also one in quotes; None for anything else."""
    if isinstance(value, str) and len(value) < 40:
        with suppress(ValueError):
            return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if isinstance(value, float) or abs(value) < 2**63 else None


# ---- CSV ----


def is_csv(head: bytes) -> bool:
    """Return whether the first lines are a heading and figures below it."""
    text = head.decode("utf-8-sig", "replace").replace("\0", "")
    try:
        heading, *rest = list(islice(csv.reader(io.StringIO(text, newline="")), 2)) or [[]]
    except csv.Error:
        return False
    if len(heading) < 2:
        return False
    if not rest:
        return any(name.strip().lower() in STEPS for name in heading)
    if any(cell.startswith("[") for cell in rest[0]):  # rows of tokens
        return False
    return len(rest[0]) == len(heading) and any(_number(cell) is not None for cell in rest[0])


def _of_csv(path: str, run: str | None, text: str) -> Iterator[Figures]:
    """Yield the figures of each row of a run, by metric. `__MIN` and `__MAX` of a chart are left out.

    Raises UsageError if several runs have the same metric.
    """
    try:
        heads, *rows = list(csv.reader(io.StringIO(text.replace("\0", ""), newline=""))) or [[]]
    except csv.Error as error:
        raise UsageError(f"{path} is not a CSV: {error}", hint="export the chart again") from None
    split = [(index, *head.rpartition(" - ")) for index, head in enumerate(heads) if not head.endswith(("__MIN", "__MAX"))]
    columns = {index: metric for index, whose, between, metric in split if run is None or not between or whose == run}
    if len(set(map(plain_name, columns.values()))) < len(columns):
        raise _several(path, [whose for _, whose, between, _ in split if between])
    for row in rows:
        cells = ((columns[index], _number(cell)) for index, cell in enumerate(row) if index in columns)
        yield {name: value for name, value in cells if value is not None}, ()


def _several(path: str, runs: Iterable[str]) -> UsageError:
    names = sorted(set(runs)) or ["RUN"]
    return UsageError(f"{path} holds several runs: {', '.join(names)[:300]}", hint=f"name a run: {path}#{names[0]}")


def plain_name(name: str) -> str:
    """Strip a logger's prefix from a metric's name: "train/gpt_loss" becomes "gpt_loss"."""
    return name.strip().removeprefix("train/")


# ---- databases and event files ----


def _of_trackio(name: str, run: str | None) -> Iterator[ExportedRow]:
    """Yield the rows of a run in trackio's database. Views are not read: they could compute without end."""
    try:
        with closing(sqlite3.connect(f"file:{quote(os.path.abspath(name))}?mode=ro", uri=True)) as database:
            database.execute("PRAGMA trusted_schema = OFF")
            turns = count()
            database.set_progress_handler(lambda: next(turns) >= _MOST_TURNS, 10**5)
            columns = {column: hidden for _, column, *_, hidden in database.execute("PRAGMA table_xinfo(metrics)")}
            table = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'metrics' AND type = 'table'").fetchone()
            computed = any(columns.values()) or not (table and table[0])  # of generated columns, or a virtual table
            if computed or not {"run_name", "step", "metrics"} <= columns.keys():
                raise UsageError(
                    f"{name} is an SQLite database, and not trackio's", hint="export its figures as CSV or JSON lines"
                )
            runs = [str(name) for (name,) in database.execute("SELECT DISTINCT run_name FROM metrics")]
            if run is None and len(runs) > 1:
                raise _several(name, runs)
            chosen = run if run is not None else (runs or [""])[0]
            rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id", (chosen,))
            objects, left = [], _MOST_BYTES // 8
            for step, text in rows:
                data = text if isinstance(text, bytes) else str(text).encode()
                left -= len(data)
                if left < 0 or values_in(data) > MAX_VALUES:
                    raise EnvironmentProblem(f"{name} has too many figures", hint="export those of one run")
                objects.append((step, _parsed(data.decode("utf-8", "replace"))))
    except sqlite3.Error as error:
        raise EnvironmentProblem(
            f"cannot read {name} as an SQLite database: {error}", hint="copy the file, or export it"
        ) from None
    return _numbered(_figures([{"step": step} | row for step, row in objects if isinstance(row, dict)]))


def _of_parquet(name: str) -> Iterator[Figures]:
    """Yield the figures of each row. A null is a figure that the row lacks.

    Raises UsageError for a table without steps or with lists, which are rows of tokens.
    """
    require_package(f"{name} is Parquet, and", "pyarrow")
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    try:
        table = parquet.ParquetFile(name)
        fields = [*table.schema_arrow]
        columns = [field.name for field in fields if _is_figure(arrow.types, field.type)]
        lists = any(arrow.types.is_list(field.type) for field in fields)
        # Texts beside figures are of W&B, whose steps are `_step`, or of completions.
        steps = {*STEPS} if len(columns) == len(fields) else {"_step"}
        if lists or not steps & {column.strip().lower() for column in columns}:
            raise UsageError(
                f"{name} is a Parquet file without steps, and no log", hint=f"a log has a column {' or '.join(STEPS[-2:])}"
            )
        if table.metadata.num_rows * len(columns) > MOST_VALUES:
            raise EnvironmentProblem(f"{name} has more than {MOST_VALUES:,} values", hint="export fewer metrics")
        for batch in table.iter_batches(batch_size=2**12, columns=columns):
            for row in batch.to_pylist():
                yield {column: float(value) for column, value in row.items() if value is not None}, ()
    except (arrow.ArrowException, OSError) as error:
        raise EnvironmentProblem(f"{name} is damaged: {error}"[:300], hint="export it again") from None


def _is_figure(types: Any, kind: Any) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind))


def is_events(head: bytes) -> bool:
    """Check whether this begins an event file of TensorBoard."""
    return b"brain.Event:" in head[:64]


def events_end(data: bytes) -> int:
    """Return where the last whole record of an event file ends: each has its length, its bytes and twelve more."""
    end = 0
    while end + 12 <= len(data) and (after := end + 16 + int.from_bytes(data[end : end + 8], "little")) <= len(data):
        end = after
    return end


def of_events(name: str) -> Iterator[ExportedRow]:
    """Yield every scalar of an event file, or of a folder of event files."""
    require_package(f"{name} is TensorBoard's, and", "tensorboard")
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    try:
        with TemporaryDirectory() as named:  # tensorboard takes a file for its own by its name only
            link = Path(named) / "events.out.tfevents.0"
            link.symlink_to(os.path.abspath(name))
            reader = module.EventAccumulator(name if os.path.isdir(name) else str(link), size_guidance={"scalars": 0})
            reader.Reload()
    except Exception as error:  # noqa: BLE001 - tensorboard and protobuf raise any error for a damaged file
        raise EnvironmentProblem(f"{name} is damaged: {error}"[:300], hint="check it with `tensorboard --inspect`") from None
    for tag in reader.Tags()["scalars"]:
        for scalar in reader.Scalars(tag):
            yield ExportedRow(LINE, scalar.step, {tag: scalar.value})
