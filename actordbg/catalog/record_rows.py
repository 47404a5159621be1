"""From the files of comparisons, noise floors, matrices, memory, patch events and replays to rows of the catalog.

A column that is a field of the record by the same name is taken over as it is; what is computed stands here.

A replay's `spec.json` makes a row of `replay`, lines of its journals make rows of `result`. A journal grows while its replay
runs, so it is read from where the last refresh stopped, whole lines only. Which result of a dump counts does not depend on the
order of reading: the one that finished last."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from actordbg.base.errors import CorruptDump
from actordbg.catalog.tables import COLUMNS, shared
from actordbg.config.replay_config import SETTINGS
from actordbg.formats.dump_record import is_plain_name
from actordbg.formats.store_files import OddFile, read_regular
from actordbg.records.comparison_record import (
    MISMATCH,
    NOT_COMPARED,
    WITHIN_NOISE,
    ComparisonRecord,
    DumpComparison,
    Figures,
    MemoryRecord,
    NoiseRecord,
)
from actordbg.records.journal import SPEC, Event, read_chunk, result_of
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.records.replay_record import ReplaySpec
from actordbg.store.layout import Store

Row = dict[str, Any]
EVENT_FORMAT = 1
UNFINISHED = "unfinished"
RESULT_COLUMNS = tuple(name for name in COLUMNS["result"] if name != "id")
_STATUSES = ("complete", "interrupted", "failed")
RECORDS: dict[str, Any] = {
    "comparisons": ComparisonRecord, "noise": NoiseRecord, "matrices": MatrixRecord, "memory": MemoryRecord,
}  # fmt: skip
"""What the files of a folder hold."""
ID = {"comparisons": "comparison_id", "noise": "noise_id", "matrices": "matrix_id", "memory": "memory_id"}
"""By folder the field of its records that names the file."""


def rows_of(record: ComparisonRecord | NoiseRecord | MatrixRecord | MemoryRecord) -> dict[str, list[Row]]:
    """The rows that a file's record makes, by table. Those of a comparison's dumps are wanted once it is current (`dumps_of`)."""
    if isinstance(record, ComparisonRecord):
        return {"comparison_run": [_comparison_run(record)]}
    if isinstance(record, NoiseRecord):
        figures = {name: record.floor.get(name) for name in ("max_abs", "p99_abs", "mean_abs", "grad_norm_rel")}
        return {"noise_floor": [shared(record, "noise_floor") | figures | {"inputs": len(record.dumps)}]}
    if isinstance(record, MemoryRecord):
        return {"memory_watch": [_watching(record)]}
    matrix = shared(record, "matrix") | {"inputs": len(record.dump_ids)}
    return {"matrix": [matrix], "matrix_cell": [_cell(record.matrix_id, cell) for cell in record.cells]}


def _comparison_run(record: ComparisonRecord) -> Row:
    """The row of `comparison_run`; whether it is current is decided elsewhere."""
    compared = [one for one in record.dumps if one.log_probs is not None and one.verdict != NOT_COMPARED]
    tokens = [one.log_probs for one in compared if one.log_probs is not None]
    count = sum(one.count for one in tokens)
    return shared(record, "comparison_run") | {
        "replay_id": record.a.replay_id or "",
        "against": _against(record),
        "against_kind": record.b.kind,
        "current": 0,
        "dumps": len(record.dumps),
        "compared": len(compared),
        "mismatches": sum(one.verdict == MISMATCH for one in record.dumps),
        "within_noise": sum(one.verdict == WITHIN_NOISE for one in record.dumps),
        "worst_dump": compared[0].dump_id if compared else None,
        "max_abs": _largest(one.max_abs for one in tokens),
        "mean_abs": _weighted(tokens, "mean_abs", count),
        "clip_share": _weighted(tokens, "clip_share", count),
        "grad_norm_rel": max((one.grad_norm_rel for one in compared if one.grad_norm_rel is not None), default=None),
        "label": record.a.label,
        "against_label": record.b.label,
        "reasons": "; ".join(record.reasons) or None,
    }


def dumps_of(record: ComparisonRecord) -> list[Row]:
    """The rows of `comparison`, one for each dump."""
    return [_compared_dump(record, dump) for dump in record.dumps]


def _compared_dump(record: ComparisonRecord, dump: DumpComparison) -> Row:
    reasons = [*dump.reasons, *(f"{what} not compared: {why}" for what, why in dump.not_compared.items())]
    return (
        shared(dump.log_probs or Figures(0), "comparison")
        | shared(dump, "comparison")
        | {
            "replay_id": record.a.replay_id,
            "against": _against(record),
            "comparison_id": record.comparison_id,
            "created_at": record.created_at,
            "sequence_max_abs": dump.sequences.max_abs if dump.sequences else None,
            "entropy_max_abs": dump.entropy.max_abs if dump.entropy else None,
            "gradient_cosine": dump.gradients.cosine if dump.gradients else None,
            "gradient_distance": dump.gradients.distance if dump.gradients else None,
            "reasons": "; ".join(reasons) or None,
        }
    )


def _against(record: ComparisonRecord) -> str:
    """What B is called: golden, or its replay id."""
    return record.b.replay_id or record.b.kind


def _cell(matrix_id: str, cell: MatrixCell) -> Row:
    made = {"reason": cell.reason or None, "regressed": "; ".join(cell.regressed) or None}
    made |= {"laws": cell.laws or None, "violations": "; ".join(cell.violations) or None}
    return shared(cell, "matrix_cell") | made | {"matrix_id": matrix_id, "cell": cell.index}


def _watching(record: MemoryRecord) -> Row:
    """A watching of memory: the largest peaks over its processes, and the fastest growth of one that grows."""
    sizes = [(name, one) for process in record.processes for name, one in process.sizes.items()]
    row = shared(record, "memory_watch") | {
        "processes": len(record.processes),
        "samples": sum(one.samples for one in record.processes),
        "steps": max((one.steps for one in record.processes), default=0),
        "notes": "; ".join(record.notes) or None,
    }
    for name in ("rss", "uss", "cuda_used"):
        row[f"peak_{name}"] = max((one.peak for at, one in sizes if at == name), default=None)
    growths = [one.growth for _, one in sizes if one.growth is not None and one.growth.grows]
    for unit in ("step", "second"):
        row[f"growth_per_{unit}"] = max((growth.slope for growth in growths if growth.unit == unit), default=None)
    return row


def _largest(values: Iterable[float | None]) -> float | None:
    """The largest; None where one is not finite (so that a NaN is not hidden by the others), or there is none."""
    known = list(values)
    return max((value for value in known if value is not None), default=None) if None not in known else None


def _weighted(tokens: list[Figures], name: str, count: int) -> float | None:
    values = [getattr(one, name) for one in tokens]
    if not count or None in values:
        return None
    return float(sum(value * one.count for value, one in zip(values, tokens, strict=True)) / count)


def event_row(path: Path) -> Row | None:
    """The row of a patch event's file; None for a file that is not one. OSError if it cannot be read."""
    try:
        data = json.loads(read_regular(path))
        if data["format"] != EVENT_FORMAT or not isinstance(data["event"], str):
            return None
        said = {name: data.get(name) for name in COLUMNS["patch_event"]}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return {name: None if value is None else str(value) for name, value in said.items()} | {"name": path.name}


class FileMark(NamedTuple):
    """How far a file had been read, and what it was then."""

    size: int
    mtime_ns: int
    offset: int


@dataclass
class News:
    """What changed in one replay: columns of its row, rows of `result`, and by path how far its files were read.

    `active` says that workers were at it, `reset` asks to forget old results first. `odd` has the journals that were not read,
    and why.
    """

    replay_id: str
    columns: Row = field(default_factory=dict)
    results: list[Row] = field(default_factory=list)
    files: dict[str, FileMark] = field(default_factory=dict)
    active: bool = False
    reset: bool = False
    skipped: int = 0
    odd: dict[str, str] = field(default_factory=dict)


def changed_replays(store: Store, known: dict[str, FileMark], odd: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """(replay id, its files that differ from `known`) for each replay with something new. Paths are below the store.

    `odd` gets what lies there and is no replay, spec or journal.
    """
    for replay_id in filter(is_plain_name, store.folder_names("replays", odd)):
        files = store.files(f"replays/{replay_id}", (SPEC, ".jsonl"), odd)
        stamps = {path: (state.st_size, state.st_mtime_ns) for path, state in files.items()}
        if differing := [path for path, stamp in stamps.items() if known.get(path, ())[:2] != stamp]:
            yield replay_id, differing


def read_news(root: Path, replay_id: str, paths: list[str], known: dict[str, FileMark]) -> News:
    """Read what is new in these files. Raises CorruptDump or NewerFormat for a spec that cannot be read."""
    news = News(replay_id)
    spec = f"replays/{replay_id}/{SPEC}"
    if spec in paths or spec not in known:
        _read_spec(root, spec, news)
    journals = [path for path in paths if path.endswith(".jsonl")]
    if any(path in known and (root / path).lstat().st_size < known[path].offset for path in journals):
        news.reset = True
        journals = sorted(f"replays/{replay_id}/{path.name}" for path in (root / "replays" / replay_id).glob("*.jsonl"))
    for path in journals:
        start = 0 if news.reset or path not in known else known[path].offset
        try:
            chunk = read_chunk(root / path, start)
        except OddFile as error:
            news.odd[path] = str(error.strerror)
            continue
        news.files[path] = FileMark(chunk.size, chunk.mtime_ns, chunk.offset)
        news.skipped += chunk.skipped
        for event in chunk.events:
            _take(event, news)
    return news


def spec_columns(spec: ReplaySpec) -> Row:
    """The columns of `replay` that come from its specification; those of its settings come from `setting_columns`."""
    return {
        "replay_id": spec.replay_id,
        "created_at": spec.created_at,
        "inputs": len(spec.inputs),
        "selection": spec.where,
        "ordering": spec.order,
        "command": spec.command,
        "config": spec.config.to_dict(),
        "versions": spec.versions,
    }


def setting_columns(asked: dict[str, Any], resolved: dict[str, Any] | None) -> Row:
    """The columns of `replay` for each setting: as resolved by the workers where they said so, else as asked for."""
    said = asked | {name: value for name, value in (resolved or {}).items() if isinstance(value, str | int | float)}
    return {setting.stored: said.get(setting.stored) for setting in SETTINGS.values()}


def _read_spec(root: Path, path: str, news: News) -> None:
    try:
        state = os.lstat(root / path)
        spec = ReplaySpec.from_json(read_regular(root / path))
    except FileNotFoundError:
        raise CorruptDump("the replay has no spec.json") from None
    if spec.replay_id != news.replay_id:
        raise CorruptDump(f"its spec.json is that of {spec.replay_id}")
    news.files[path] = FileMark(state.st_size, state.st_mtime_ns, state.st_size)
    news.columns |= spec_columns(spec)


def _take(event: Event, news: News) -> None:
    """What one event says of the replay."""
    kind = event["event"]
    if kind == "end":
        record = result_of(event)
        news.results.append({name: getattr(record, name) for name in RESULT_COLUMNS} | {"replay_id": news.replay_id})
    elif kind in ("ready", "resolved"):
        news.active = news.active or kind == "ready"
        resolved = event.get("resolved")
        if resolved and isinstance(resolved, dict) and ("resolved" not in news.columns or kind == "resolved"):
            news.columns["resolved"] = resolved
    elif kind == "finished":
        moment = event.get("finished_at") or event.get("timestamp") or event.get("at")
        news.columns["status"] = event["status"] if event.get("status") in _STATUSES else UNFINISHED
        news.columns["finished_at"] = moment if isinstance(moment, str) else None
