"""What became of one cell: read from its replay's folder, whoever ran it and however often it was resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actordbg.actor.signatures import signature_of
from actordbg.base.errors import ActordbgError, Refused
from actordbg.formats.journal import SUPERVISOR, Event, rank_log, read_events, read_results
from actordbg.formats.matrix_record import MatrixCell
from actordbg.formats.replay_record import PASSED as INPUT_PASSED
from actordbg.formats.replay_record import ReplaySpec, ResultRecord
from actordbg.matrix.cells import FAILED, NOT_RUN, PASSED, UNAVAILABLE
from actordbg.matrix.loads import loads_of
from actordbg.replay.worker_logs import LAUNCHER_LOG
from actordbg.report.agreement import agreement_of, ranks_in_words
from actordbg.report.report_model import ReplayData
from actordbg.report.summary import summarise
from actordbg.store.layout import Store

RANKS_DIFFER = "ranks-differ"
"""The signature of a cell whose inputs all passed, on ranks that came to different results."""


def data_of(store: Store, spec: ReplaySpec) -> ReplayData:
    """The replay as reports take it, from its own files."""
    folder = store.replays / spec.replay_id
    events = read_events(folder / SUPERVISOR)
    resolved: dict[str, Any] = next((one["resolved"] for one in reversed(events) if one["event"] == "resolved"), {})
    status = next((one["status"] for one in reversed(events) if one["event"] == "finished"), "unfinished")
    results = read_results(folder)
    return ReplayData(spec, resolved, status, tuple(results[i.dump_id] for i in spec.inputs if i.dump_id in results))


def finished(
    store: Store, cell: MatrixCell, spec: ReplaySpec, by_replay: Mapping[str, int], problem: ActordbgError | None = None
) -> MatrixCell:
    """The cell after its replay ended. `problem`: what ended it before every input had a result; `by_replay`: cells by replay."""
    folder = store.replays / spec.replay_id
    data = data_of(store, spec)
    summary = summarise([data], selection=spec.replay_id, now=spec.created_at).replays[0]
    loads = loads_of(folder, spec.config)
    counts = dict(Counter(record.status for record in data.results))
    missing = len(spec.inputs) - len(data.results)
    cell = replace(
        cell,
        status=PASSED if set(counts) == {INPUT_PASSED} and not missing else FAILED,
        replay_id=spec.replay_id,
        counts=counts | ({NOT_RUN: missing} if missing else {}),
        forward_s=summary.forward.median,
        backward_s=summary.backward.median,
        peak_memory_bytes=summary.peak_memory_bytes,
        loads=loads.count,
        load_s=loads.seconds,
        shared_with=by_replay.get(loads.shared_with or ""),
        **_first_failure(store, folder, data.results),
    )
    cell = _with_ranks(store, cell, spec, data.results)
    return cell if problem is None else _ended_by(store, cell, folder, problem)


def _with_ranks(store: Store, cell: MatrixCell, spec: ReplaySpec, results: Sequence[ResultRecord]) -> MatrixCell:
    """Where all ranks were to do the same (`--align same`) and did not, the cell failed, as the replay alone would have."""
    agreement = agreement_of(results, spec.config) if spec.config.align == "same" else None
    if cell.status != PASSED or agreement is None or not agreement.differ:
        return cell
    first = ranks_in_words(agreement)[1]
    inputs = f"{agreement.checked - agreement.agree} of {agreement.checked} inputs"
    log = store.relative(rank_log(store.replays / spec.replay_id, agreement.differ[0].rank))
    return replace(cell, status=FAILED, signature=RANKS_DIFFER, error=f"on {inputs}; {first}", log=log)


def _first_failure(store: Store, folder: Path, results: Sequence[ResultRecord]) -> dict[str, Any]:
    """The fields of a cell that name its first failure, in the order in which the inputs ran."""
    bad = sorted((one for one in results if one.status != INPUT_PASSED), key=lambda one: (one.started_at, one.slot))
    if not bad:
        return {"signature": None, "error": None, "log": None}
    first = bad[0]
    return {
        "signature": first.signature or first.error_class or first.status,
        "error": _first_line(first.error or first.status),
        "log": store.relative(rank_log(folder, first.worker)),
    }


def _ended_by(store: Store, cell: MatrixCell, folder: Path, problem: ActordbgError) -> MatrixCell:
    """The Actor could not be built, or kept dying. What a worker *refused* cannot run here: unavailable, not failed."""
    if isinstance(problem, Refused) and not cell.counts.get(INPUT_PASSED):
        way = f"; way out: {problem.hint}" if problem.hint else ""
        return replace(cell, status=UNAVAILABLE, reason=problem.message + way)
    broken = _broken(folder)
    error_class, error, trace = type(problem).__name__, problem.message, ""
    log = folder / LAUNCHER_LOG
    if broken is not None:
        error_class, error, trace = broken["error_class"], broken["error"], broken.get("trace", "")
        log = rank_log(folder, broken.get("rank", 0))
    return replace(
        cell,
        status=FAILED,
        signature=cell.signature or signature_of(error_class, error, trace),
        error=cell.error or _first_line(error),
        log=cell.log or store.relative(log),
    )


def _broken(folder: Path) -> Event | None:
    """The last word of a worker that could not build the Actor."""
    events = [event for path in sorted(folder.glob("rank*.jsonl")) for event in read_events(path)]
    return next((event for event in reversed(events) if event["event"] == "broken"), None)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]
