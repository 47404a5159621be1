"""Read the result of a cell, and the environment of a whole matrix, from the folders of the replays.

**Loads** (`loads_of`). A group of workers that starts together builds one Actor; plain workers are groups of one. A worker that
reuses a loaded Actor says so in its `ready` event (`load_shared_with`). So loads are counted where they happened, even after
crashes and in a resumed matrix.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actordbg.actor.signatures import signature_of
from actordbg.base.errors import ActordbgError, MachineFault, Refused, UsageError
from actordbg.base.owners import whose
from actordbg.base.units import first_line, listed
from actordbg.campaign.cells import unavailable
from actordbg.campaign.matrix_document import MatrixContext
from actordbg.judge.agreement import agreement_of, ranks_in_words
from actordbg.judge.comparison_document import flat_where_it_matters
from actordbg.judge.replay_findings import FLAT
from actordbg.judge.summary import summarise
from actordbg.records.comparison_record import NOT_COMPARED
from actordbg.records.journal import SPEC, SUPERVISOR, Event, rank_journal, rank_log, read_events, read_results
from actordbg.records.matrix_record import FAILED, NOT_RUN, PASSED, UNAVAILABLE, MatrixCell, MatrixRecord
from actordbg.records.replay_record import PASSED as INPUT_PASSED, ReplaySpec, ResultRecord
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import load_spec
from actordbg.replay.worker_logs import LAUNCHER_LOG
from actordbg.store.layout import Store

RANKS_DIFFER = "ranks-differ"
"""The signature of a cell whose inputs all passed, but with different results on different ranks."""
LAW_FAILED = "law-failed"
"""The signature of a cell whose inputs all passed, but checking a law raised."""


def finished(
    store: Store, cell: MatrixCell, spec: ReplaySpec, by_replay: Mapping[str, int], problem: ActordbgError | None = None
) -> MatrixCell:
    """Return the cell after its replay. `problem`: what ended the replay early. `by_replay`: the cell of each replay."""
    folder = store.replays / spec.replay_id
    data = data_of(store, spec)
    summary = summarise([data], selection=spec.replay_id, now=spec.created_at).replays[0]
    laws, first = summary.laws, dict[str, str]()
    for violation in laws.violations if laws else ():
        first.setdefault(violation.rule.name, violation.said)
    loads, load_s, shared_with = loads_of(folder)
    counts = dict(Counter(result.status for result in data.results))
    if missing := len(spec.inputs) - len(data.results):
        counts[NOT_RUN] = missing
    passed = set(counts) == {INPUT_PASSED}
    why: tuple[Path, str, str] | None = None  # log, signature and error of the failure
    failures = (result for result in data.results if result.status != INPUT_PASSED)
    if failure := min(failures, key=lambda result: (result.started_at, result.slot), default=None):
        signature = failure.signature or failure.error_class or failure.status
        why = rank_log(folder, failure.worker), signature, failure.error or failure.status
    elif passed and laws and first and not laws.broken:
        why = rank_log(folder, data.results[0].worker), LAW_FAILED, next(iter(first.values()))
        first = {}
    agreement = agreement_of(data.results, spec.config) if spec.config.align == "same" else None
    if passed and agreement is not None and agreement.differ:  # the replay alone would have failed too
        error = f"on {agreement.checked - agreement.agree} of {agreement.checked} inputs; {ranks_in_words(agreement)[1]}"
        why = why or (rank_log(folder, agreement.differ[0].rank), RANKS_DIFFER, error)
    refused = isinstance(problem, Refused) and not counts.get(INPUT_PASSED)  # a worker refused it
    if problem is not None and not refused:
        events = [event for path in sorted(folder.glob("rank*.jsonl")) for event in read_events(path)]
        unbuilt = [event for event in events if event["event"] == "broken"]
        event: Event = unbuilt[-1] if unbuilt else {"error_class": type(problem).__name__, "error": problem.message}
        log = rank_log(folder, event.get("rank", 0)) if unbuilt else folder / LAUNCHER_LOG
        why = why or (log, signature_of(event["error_class"], event["error"], event.get("trace", "")), event["error"])
    cell = replace(
        cell,
        status=PASSED if passed and not why else FAILED,
        replay_id=spec.replay_id,
        counts=counts,
        forward_s=summary.forward.median,
        backward_s=summary.backward.median,
        peak_memory_bytes=summary.peak_memory_bytes,
        loads=loads,
        load_s=load_s,
        shared_with=by_replay.get(shared_with or ""),
    )
    if laws:
        said, names = tuple(first.values()), tuple(first)
        cell = replace(cell, laws=laws.headline, violations=said, broken=names, unasked=tuple(laws.not_checked))
    if why:
        log, signature, error = why
        cell = replace(cell, signature=signature, error=first_line(error)[:300], log=store.relative(log))
    return unavailable(cell, problem) if problem is not None and refused else cell


def loads_of(folder: Path) -> tuple[int, float, str | None]:
    """Count the Actors built for a replay, with the seconds that took (sum over groups of the slowest rank).

    The last value is the replay whose Actor was reused; None if this replay built all of its own.
    """
    count, seconds, shared = 0, 0.0, None
    groups = {tuple(event["ranks"]) for event in read_events(folder / SUPERVISOR) if event["event"] == "attempt"}
    for ranks in groups:
        attempts: dict[int, list[float]] = {}
        for event in (event for rank in ranks for event in read_events(rank_journal(folder, rank)) if event["event"] == "ready"):
            resolved = event.get("resolved") or {}
            if (whose := resolved.get("load_shared_with")) is not None:
                shared = shared or (whose if whose != folder.name else None)
            else:
                attempts.setdefault(event.get("attempt", 0), []).append(float(resolved.get("load_s") or 0.0))
        count += len(attempts)
        seconds += sum(map(max, attempts.values()))
    return count, seconds, shared


_RESOLVED = ("model", "model_class", "parameters", "num_layers", "device_name", "threads")


def context_of(store: Store, record: MatrixRecord) -> MatrixContext:
    """Return the context of the first cell whose Actor was built, else of the first that began. Empty if none began."""
    gone, replays, logs, specs = [], [], {}, []
    for cell in record.cells:
        if cell.replay_id is None:
            continue
        folder = store.replays / cell.replay_id
        specs.append(folder / SPEC)
        if not folder.is_dir():
            gone.append(cell.replay_id)
        log = folder / Path(cell.log or rank_log(folder, 0)).name  # ignore the folder that a record names
        if os.path.isfile(log):
            logs[cell.index] = shown_path(log)
        with contextlib.suppress(ActordbgError):  # pruned or damaged: the table is still worth showing
            replays.append(data_of(store, load_spec(store, cell.replay_id)))
    matrices = [store.matrices / f"{name}.json" for name in (record.matrix_id, record.baseline) if name]
    context = MatrixContext(gone=tuple(gone), logs=logs, whose=whose(*matrices, *specs))
    if not replays:
        return context
    chosen = next((data for data in replays if data.resolved), replays[0])
    inputs = chosen.spec.inputs
    return replace(
        context,
        resolved={name: chosen.resolved[name] for name in _RESOLVED if name in chosen.resolved},
        versions=dict(chosen.spec.versions),
        seq_lens=tuple(item.seq_len for item in inputs),
        batch_sizes=tuple(item.batch_size for item in inputs),
        tokens=sum(item.tokens for item in inputs),
        folded=sum(bool(result.folded_ids) for result in chosen.results),
    )


def shown_path(path: Path) -> str:
    """Return a path as shown to users: relative to the current folder if it lies below it, else absolute."""
    relative = os.path.relpath(path)
    return str(path.absolute()) if relative.startswith(os.pardir) else relative


SHOWN = 3
"""How many dumps a regression names."""


def judged(
    store: Store, cell: MatrixCell, truth_dtype: str, power: bool = False, **callbacks: Any
) -> tuple[MatrixCell, str | None]:
    """Compare a passed cell with the truth in `truth_dtype`, computed now if missing; return the cell and the truth's replay id.

    power: plant faults to measure which would be detected. `callbacks`: passed on to `run_replay`. If the truth cannot be
    computed, the cell becomes `not-compared`, with the reason.
    """
    from actordbg.compare.comparing import compare, save
    from actordbg.compare.find_truth import ensure_rounding, ensure_truth

    assert cell.replay_id is not None
    try:
        truth = ensure_truth(store, cell.replay_id, dtype=truth_dtype, **callbacks)
        rounding = ensure_rounding(store, cell.replay_id, planted=power, **callbacks)
        record = compare(store, cell.replay_id, truth, rounding=rounding)
    except MachineFault:
        raise
    except ActordbgError as problem:
        return replace(cell, verdict=NOT_COMPARED, reason=f"no truth to compare with: {problem.message}"), None
    save(store, record)
    why = "; ".join(record.reasons) or next(("; ".join(dump.reasons) for dump in record.dumps if dump.reasons), "")
    if record.good:
        flat = [FLAT] if flat_where_it_matters(record) else []
        unjudged = [f"not checked against the truth: {each.text}" for each in (*flat, *record.unjudged)]
        why = "; ".join(filter(None, (cell.reason, *unjudged)))
    furthest = record.furthest
    return replace(
        cell,
        verdict=record.verdict,
        comparison_id=record.comparison_id,
        max_abs=furthest[0] if furthest else None,
        excludes=record.excludes,
        reason=why,
    ), truth


def cell_like(baseline: MatrixRecord, cell: MatrixCell) -> MatrixCell | None:
    """Return the baseline's cell with the same configuration, apart from which laws are checked; None if there is none."""
    only_asked = {"laws": None, "accept": None}
    return next((other for other in baseline.cells if other.config | only_asked == cell.config | only_asked), None)


def require_common(store: Store, baseline: MatrixRecord, record: MatrixRecord) -> None:
    """Raise UsageError if no dump can be compared with the baseline: that must not look like "nothing regressed"."""
    like = [other for cell in record.cells if (other := cell_like(baseline, cell)) and other.replay_id]
    passed = {
        dump_id
        for cell in like
        for dump_id, result in read_results(store.replays / str(cell.replay_id)).items()
        if result.status == INPUT_PASSED
    }
    if not passed.intersection(record.dump_ids):
        what = "has passed none of these dumps" if like else "has no cell in common with this matrix"
        hint = "select the dumps that it replayed"
        raise UsageError(f"--baseline {baseline.matrix_id} {what}: nothing could regress", hint=hint)


def regressions(store: Store, cell: MatrixCell, baseline: MatrixRecord, slower: float | None = None) -> tuple[str, ...]:
    """List what got worse since the baseline, in words; () if nothing did, or if the baseline has no such cell.

    A regression is: a dump that passed in the baseline and does not pass now; log-probs that differ by more than `compare`
    allows, or that cannot be compared (another temperature, another model, outputs that were not kept); a forward that takes
    more than `slower` times as long (median of the per-input ratio over inputs that are steady in both); a cell that ran in the
    baseline and is unavailable now, or that fails now and did not run in the baseline.
    """
    from actordbg.compare.comparing import compare

    like = cell_like(baseline, cell)
    theirs = like.replay_id if like else None
    if cell.status == UNAVAILABLE and like and like.good:
        return (f"passed in the baseline, and is unavailable here: {cell.reason}",)
    if cell.status == FAILED and theirs is None:
        return ("failed, and did not run in the baseline",)
    if cell.status == UNAVAILABLE or theirs is None or cell.replay_id is None or theirs == cell.replay_id:
        return ()
    there, here = read_results(store.replays / theirs), read_results(store.replays / cell.replay_id)
    selected = {item.dump_id for item in load_spec(store, cell.replay_id).inputs}
    expected = sorted(dump_id for dump_id, result in there.items() if result.status == INPUT_PASSED and dump_id in selected)
    lost = [dump_id for dump_id in expected if dump_id not in here or here[dump_id].status != INPUT_PASSED]
    worse = [f"passed in the baseline, not here: {_named(lost)}"] if lost else []
    # skip dumps that are bit-identical, backward included
    if both := [dump_id for dump_id in expected if dump_id not in lost and not _alike(here[dump_id], there[dump_id])]:
        record = compare(store, cell.replay_id, theirs, only=both)
        bad = [dump.dump_id for dump in record.mismatches]
        worse += [f"numbers differ from the baseline: {_named(bad)}"] if bad else []
        if record.verdict == NOT_COMPARED:
            reasons = record.reasons or [reason for dump in record.dumps for reason in dump.not_compared.values()][:1]
            worse.append(f"numbers cannot be compared with the baseline: {'; '.join(reasons)}")
    if slower is not None:
        replays = [data_of(store, load_spec(store, replay_id)) for replay_id in (theirs, cell.replay_id)]
        comparison = summarise(replays, selection="", now="").comparison
        ratio = comparison.rows[1].forward_ratio if comparison else None
        if ratio is not None and ratio > slower:
            worse.append(f"forward takes {ratio:.2f}x the baseline's time")
    return tuple(worse)


def _alike(here: ResultRecord, there: ResultRecord) -> bool:
    names = ("output_digest", "loss", "grad_norm")
    return here.output_digest is not None and all(getattr(here, name) == getattr(there, name) for name in names)


def _named(dumps: Sequence[str]) -> str:
    more = f" and {len(dumps) - SHOWN} more" if len(dumps) > SHOWN else ""
    return listed(dumps[:SHOWN]) + more
