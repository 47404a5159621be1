"""Turns files of comparisons, lints and replays into rows of the catalog.

A column with the name of a record's field is copied; this module computes the others.

A replay's `spec.json` makes a row of `replay`, lines of its journals make rows of `result`. While
journals only grow, reading continues where the last refresh stopped, whole lines only; else all of the replay is read again.
The result of a dump that finished last counts, whatever the order of reading."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.base.errors import CorruptDump
from actordbg.base.owners import origin_of
from actordbg.catalog import columns, lab_columns
from actordbg.catalog.lab_columns import Comparison, ComparisonRun, LintAnswer, ReplayColumns
from actordbg.catalog.tables import shared
from actordbg.config.as_ran import as_ran, deciding
from actordbg.config.replay_config import SETTINGS
from actordbg.formats.dump_record import is_plain_name
from actordbg.formats.store_files import OddFile, open_regular, read_regular
from actordbg.records.comparison_record import (
    NOT_COMPARED,
    WITHIN_NOISE,
    ComparisonRecord,
    DumpComparison,
    Figures,
    LintRecord,
)
from actordbg.records.finding import BROKEN, KEPT, RAISED
from actordbg.records.journal import SPEC, Event, last_results, read_chunks, result_of
from actordbg.records.locate_record import local_answers
from actordbg.records.replay_record import LawAnswer, ReplaySpec, ResultRecord, answers_of
from actordbg.store.layout import Store

Row = dict[str, Any]
UNFINISHED = "unfinished"
_STATUSES = ("complete", "interrupted", "failed")


def comparison_rows(root: Path, path: str) -> dict[type[columns.Row], list[Row]]:
    """Return the rows of a comparison's file, by table. StoreProblem or OSError if it cannot be read, or is another's."""
    record = ComparisonRecord.from_json(read_regular(root / path))
    if f"comparisons/{record.comparison_id}.json" != path:
        raise CorruptDump(f"the file belongs to {record.comparison_id!s:.80}")
    dumps = [_compared_dump(record, dump) for dump in record.dumps]
    run = _comparison_run(record) | {"origin": origin_of(root / path)}
    return {ComparisonRun: [run], Comparison: dumps}


def lint_rows(root: Path, path: str) -> dict[type[columns.Row], list[Row]]:
    """Return the rows of a lint's file, by table, none if it was made elsewhere; errors as of `comparison_rows`."""
    record = LintRecord.from_json(read_regular(root / path))
    if f"lints/{record.lint_id}.json" != path:
        raise CorruptDump(f"the file belongs to {record.lint_id!s:.80}")
    if origin_of(root / path):
        return {LintAnswer: []}
    about = {"lint_id": record.lint_id, "created_at": record.created_at}
    rows = [
        {**about, "dump_id": dump_id, "law": law, "verdict": verdict, "looked_at": record.looked_at.get(law, 0)}
        for verdict, by_law in ((BROKEN, record.broken), (KEPT, record.kept))
        for law, dumps in by_law.items()
        for dump_id in dumps
    ]
    return {LintAnswer: rows}


def _comparison_run(record: ComparisonRecord) -> Row:
    compared = [dump for dump in record.dumps if dump.log_probs is not None and dump.verdict != NOT_COMPARED]
    tokens = [dump.log_probs for dump in compared if dump.log_probs is not None]
    count = sum(figures.count for figures in tokens)
    sizes: list[Any] = [figures.max_abs for figures in tokens]
    return shared(record, ComparisonRun) | {
        "replay_id": record.a.replay_id or "",
        "against": _against(record),
        "against_kind": record.b.kind,
        "dumps": len(record.dumps),
        "compared": len(compared),
        "mismatches": len(record.mismatches),
        "within_noise": sum(dump.verdict == WITHIN_NOISE for dump in record.dumps),
        "worst_dump": compared[0].dump_id if compared else None,
        "max_abs": None if None in sizes else max(sizes, default=None),  # a NaN is not hidden by the others
        "mean_abs": _weighted(tokens, "mean_abs", count),
        "clip_share": _weighted(tokens, "clip_share", count),
        "grad_norm_rel": max((dump.grad_norm_rel for dump in compared if dump.grad_norm_rel is not None), default=None),
        "label": record.a.label,
        "against_label": record.b.label,
        "reasons": "; ".join(record.reasons) or None,
    }


def _compared_dump(record: ComparisonRecord, dump: DumpComparison) -> Row:
    reasons = [*dump.reasons, *(f"{what} not compared: {why}" for what, why in dump.not_compared.items())]
    return (
        shared(dump.log_probs or Figures(0), Comparison)
        | shared(dump, Comparison)
        | {
            "replay_id": record.a.replay_id or "",
            "against": _against(record),
            "comparison_id": record.comparison_id,
            "created_at": record.created_at,
            "reasons": "; ".join(reasons) or None,
        }
    )


def _against(record: ComparisonRecord) -> str:
    """Return the name of B: its replay id, else golden."""
    return record.b.replay_id or record.b.kind


def _weighted(tokens: list[Figures], name: str, count: int) -> float | None:
    values = [getattr(figures, name) for figures in tokens]
    if not count or None in values:
        return None
    return float(sum(value * figures.count for value, figures in zip(values, tokens, strict=True)) / count)


Marks = dict[str, tuple[int, int, int]]
"""State of files when they were read: by path, size, modification time, and the offset up to which they were read."""


@dataclass
class News:
    """Changes of a replay: its row, the effective new results by dump, and the marks of its files. skipped: skipped lines.

    anew: all of the replay was read, and old results are forgotten. odd: journals that were not read, and why.
    """

    row: Row
    anew: bool
    results: dict[str, ResultRecord] = field(default_factory=dict)
    files: Marks = field(default_factory=dict)
    skipped: int = 0
    odd: dict[str, str] = field(default_factory=dict)


def changed_replays(store: Store, known: dict[str, Marks], rejected: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (replay id, its files) for each replay with a file that differs from `known`. Paths are below the store.

    `rejected` gets what lies there but is not a replay, spec or journal, and why.
    """
    for replay_id in filter(is_plain_name, store.folder_names("replays", rejected)):
        files = store.files(f"replays/{replay_id}", (SPEC, ".jsonl"), rejected)
        before = known.get(replay_id, {})
        if any(before.get(path, ())[:2] != (state.st_size, state.st_mtime_ns) for path, state in files.items()):
            yield replay_id, [*files]


def read_news(root: Path, replay_id: str, paths: list[str], known: Marks, row: Row | None) -> News:
    """Read what is new in a replay's files since the marks `known`. row: the replay's row so far.

    Raises CorruptDump or NewerFormat for an invalid spec.
    """
    path = f"replays/{replay_id}/{SPEC}"
    try:
        state = os.lstat(root / path)
    except FileNotFoundError:
        raise CorruptDump("the replay has no spec.json") from None
    mark = (state.st_size, state.st_mtime_ns, 0)
    grew = all(name in paths and _has_line_before(root / name, offset) for name, (_, _, offset) in known.items())
    if row and grew and known.get(path) == mark:
        news = News(row, anew=False)
    else:
        spec, known = ReplaySpec.from_json(read_regular(root / path)), {}
        if spec.replay_id != replay_id:
            raise CorruptDump(f"its spec.json belongs to {spec.replay_id}")
        begun = {"status": UNFINISHED, "finished_at": None, "resolved": None, "origin": origin_of(root / path)}
        news = News(spec_columns(spec) | begun, anew=True)
        news.files[path] = mark
    for path in (path for path in paths if path.endswith(".jsonl")):
        try:
            for chunk in read_chunks(root / path, known[path][2] if path in known else 0):
                news.files[path] = (chunk.size, chunk.mtime_ns, chunk.offset)
                news.skipped += chunk.skipped
                for event in chunk.events:  # not kept: a journal may have any size
                    news.row |= _event_columns(event, news.row["resolved"])
                ended = (result_of(event) for event in chunk.events if event["event"] == "end")
                news.results = last_results((*news.results.values(), *ended))
        except OddFile as error:
            news.odd[path] = str(error.strerror)
    return news


def _has_line_before(path: Path, offset: int) -> bool:
    """Check whether a line ends at the offset up to which a file was read; false if it shrank, and mostly if it was replaced."""
    if not offset:
        return True
    try:
        with open(open_regular(path), "rb") as file:
            file.seek(offset - 1)
            return file.read(1) == b"\n"
    except OddFile:  # the reader names it
        return False


def _event_columns(event: Event, resolved: Row | None) -> Row:
    """Return the columns of `replay` that an event changes: its start, resolved configuration or end."""
    kind, reported = event["event"], event.get("resolved")
    if kind == "supervisor":
        return {"status": UNFINISHED, "finished_at": None}
    if reported and isinstance(reported, dict) and (kind == "resolved" or (kind == "ready" and resolved is None)):
        return {"resolved": reported}
    if kind != "finished":
        return {}
    moment = event.get("finished_at")
    return {
        "status": event["status"] if event.get("status") in _STATUSES else UNFINISHED,
        "finished_at": moment if isinstance(moment, str) else None,
    }


def spec_columns(spec: ReplaySpec) -> Row:
    """Return the columns of `replay` that come from its specification; `setting_columns` returns those of its settings."""
    computed = {"inputs": len(spec.inputs), "selection": spec.where, "ordering": spec.order, "config": spec.config.to_dict()}
    return shared(spec, ReplayColumns) | computed


def setting_columns(requested: dict[str, Any], resolved: dict[str, Any] | None) -> Row:
    """Return the columns of `replay` for each setting, as the workers resolved it, else as requested, and `configuration`."""
    values = requested | {name: value for name, value in (resolved or {}).items() if isinstance(value, str | int | float)}
    ran = as_ran(requested, resolved)
    judges = not (ran["truth"] or ran["vary"])
    text = json.dumps(deciding(ran), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16] if judges else None
    return {setting.stored: values.get(setting.stored) for setting in SETTINGS.values()} | {"configuration": digest}


def answers_in(record: ResultRecord, config: dict[str, Any]) -> Iterator[Row]:
    """Yield the columns of `law_answer` for what a result says: of laws, the model, its modules, and ranks that have to agree."""
    answers = [*answers_of(record.extra), *local_answers(record.extra)]
    lane = record.extra.get("lane")
    if config.get("align") == "same" and isinstance(lane, dict):
        answers.append(LawAnswer("ranks", BROKEN if lane.get("differ") else KEPT))
    for answer in answers:
        yield shared(answer, lab_columns.LawAnswer) | ({"verdict": RAISED} if answer.raised else {})
