"""From a replay's folder to rows: `spec.json` to a row of `replay`, lines of its journals to rows of `result`.

A journal grows while its replay runs, so it is read from where the last refresh stopped, whole lines only. Which result
of a dump counts does not depend on the order of reading: the one that finished last (see `index`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from actordbg.base.errors import CorruptDump
from actordbg.config.replay_config import SETTINGS
from actordbg.formats.dump_record import is_plain_name
from actordbg.formats.store_files import OddFile, read_regular
from actordbg.records.journal import SPEC, Event, read_chunk, result_of
from actordbg.records.replay_record import ReplaySpec, ResultRecord
from actordbg.store.layout import Store

UNFINISHED = "unfinished"
RESULT_COLUMNS = tuple(f.name for f in fields(ResultRecord))
_STATUSES = ("complete", "interrupted", "failed")


@dataclass(frozen=True)
class FileMark:
    """How far a file had been read, and what it was then."""

    size: int
    mtime_ns: int
    offset: int


@dataclass
class News:
    """What changed in one replay: rows to write, and the new bookkeeping.

    `spec` is None if it did not change, `active` says that workers were at it, `reset` asks to forget old results first. `odd`
    has the journals that were not read, and why.
    """

    replay_id: str
    spec: ReplaySpec | None = None
    results: list[dict[str, Any]] = field(default_factory=list)
    resolved: dict[str, Any] | None = None
    status: str | None = None
    finished_at: str | None = None
    files: dict[str, FileMark] = field(default_factory=dict)
    active: bool = False
    reset: bool = False
    skipped: int = 0
    odd: dict[str, str] = field(default_factory=dict)


def changed(store: Store, known: dict[str, FileMark], odd: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """(replay id, its files that differ from `known`) for each replay with something new. Paths are below the store.

    `odd` gets what lies there and is no replay, spec or journal.
    """
    for replay_id in filter(is_plain_name, store.folder_names("replays", odd)):
        differing = []
        for path, state in store.files(f"replays/{replay_id}", (SPEC, ".jsonl"), odd).items():
            mark = known.get(path)
            if mark is None or (mark.size, mark.mtime_ns) != (state.st_size, state.st_mtime_ns):
                differing.append(path)
        if differing:
            yield replay_id, differing


def read_news(root: Path, replay_id: str, paths: list[str], known: dict[str, FileMark]) -> News:
    """Read what is new in these files. Raises CorruptDump or NewerFormat for a spec that cannot be read."""
    news = News(replay_id)
    spec = f"replays/{replay_id}/{SPEC}"
    if spec in paths or spec not in known:
        news.spec = _read_spec(root, spec, news)
    journals = [path for path in paths if path.endswith(".jsonl")]
    if any(path in known and (root / path).lstat().st_size < known[path].offset for path in journals):
        news.reset = True
        journals = sorted(f"replays/{replay_id}/{p.name}" for p in (root / "replays" / replay_id).glob("*.jsonl"))
    for path in journals:
        start = 0 if news.reset or path not in known else known[path].offset
        _read_journal(root, path, start, news)
    return news


def spec_columns(spec: ReplaySpec) -> dict[str, Any]:
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


def setting_columns(asked: dict[str, Any], resolved: dict[str, Any] | None) -> dict[str, Any]:
    """The columns of `replay` for each setting: as resolved by the workers where they said so, else as asked for."""
    said = {name: value for name, value in (resolved or {}).items() if isinstance(value, str | int | float)}
    return {one.stored: (asked | said).get(one.stored) for one in SETTINGS.values()}


def _read_spec(root: Path, path: str, news: News) -> ReplaySpec:
    try:
        state = os.lstat(root / path)
        spec = ReplaySpec.from_json(read_regular(root / path))
    except FileNotFoundError:
        raise CorruptDump("the replay has no spec.json") from None
    if spec.replay_id != news.replay_id:
        raise CorruptDump(f"its spec.json is that of {spec.replay_id}")
    news.files[path] = FileMark(state.st_size, state.st_mtime_ns, state.st_size)
    return spec


def _read_journal(root: Path, path: str, start: int, news: News) -> None:
    try:
        chunk = read_chunk(root / path, start)
    except OddFile as error:
        news.odd[path] = str(error.strerror)
        return
    news.files[path] = FileMark(chunk.size, chunk.mtime_ns, chunk.offset)
    news.skipped += chunk.skipped
    for event in chunk.events:
        _take(event, news)


def _take(event: Event, news: News) -> None:
    """What one event says of the replay."""
    kind = event["event"]
    if kind == "end":
        record = result_of(event)
        news.results.append(vars(record) | {"extra": json.dumps(record.extra), "replay_id": news.replay_id})
    elif kind in ("ready", "resolved"):
        news.active = news.active or kind == "ready"
        resolved = event.get("resolved")
        if isinstance(resolved, dict) and (news.resolved is None or kind == "resolved"):
            news.resolved = resolved
    elif kind == "finished":
        news.status = event["status"] if event.get("status") in _STATUSES else UNFINISHED
        moment = event.get("finished_at") or event.get("timestamp") or event.get("at")
        news.finished_at = moment if isinstance(moment, str) else None
