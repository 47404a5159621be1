"""Compare a replay with another replay, with the truth, or with the run's recorded outputs, dump by dump.

Only dumps that both sides have are compared; the record lists every other dump with the reason. Comparing nothing gets the
verdict `not-compared`, because it must never look like agreement. A dump that A failed on and B did not is a mismatch without
figures.

Only one dump's tensors are in memory at a time. Only figures are kept, and tokens and parameters only for the worst dumps, so a
thousand dumps take no more memory than ten.

Example::

    record = compare(store, "last", "recorded")
    record.verdict, record.dumps[0].log_probs.max_abs
    save(store, record)
"""

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from actordbg.base.errors import UsageError
from actordbg.base.units import new_replay_id
from actordbg.catalog import query
from actordbg.compare.dump_figures import measure, scaled_gradients, unlike
from actordbg.compare.measured_limits import MOST_Z, Rounding, excluded, noticed
from actordbg.compare.sides import (
    TRUTH,
    GoldenSide,
    ReplaySide,
    Side,
    Values,
    averaged,
    both_sides,
    open_replay,
    recorded_arrays,
    why_not,
)
from actordbg.compare.thresholds import Applied, Floors, applied_to, judge, measures, weaker
from actordbg.formats.dump_record import now_timestamp
from actordbg.locate.verdict import WRONG, unlocated, verdict_of
from actordbg.records.comparison_record import (
    GOOD,
    MATCH,
    MISMATCH,
    NOT_COMPARED,
    WITHIN_NOISE,
    ComparisonRecord,
    DumpComparison,
    NoiseRecord,
)
from actordbg.records.locate_record import formula_checks
from actordbg.records.replay_record import ResultRecord
from actordbg.store.layout import Store

DETAILED = 50
"""How many of the worst dumps keep their worst tokens and parameters."""
NAMED = 10
"""How many of the worst dumps have the ids of their worst tokens looked up, for which each dump file is read again."""
MOST_DISTANCES = 4000
"""How many parameter distances a record keeps per dump; only models with very many experts have more."""
OF_TOKENS = ("max_abs", "p99_abs", "mean_abs")
"""Measures of log-probs. Ranks may average their gradients, so a gradient does not name a rank."""
ORDER = (MISMATCH, WITHIN_NOISE, MATCH, NOT_COMPARED)
"""Verdicts, worst first; `not-compared` is last."""


def compare(
    store: Store,
    a: str,
    b: str,
    *,
    thresholds: Mapping[str, float] | None = None,
    noise: NoiseRecord | None = None,
    rounding: str | None = None,
    only: Collection[str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ComparisonRecord:
    """Compare the replay `a` with `b`. Each is a replay id, a unique prefix of an id, or "last"; `b` may also be
    "recorded" ("golden" in older scripts).

    A truth is a replay: pass the id that `compare.find_truth.ensure_truth` returns. rounding: the replay whose distance from the
    truth sets the limits (from `compare.find_truth.ensure_rounding`); None: flat limits. only: ids of the dumps to compare.
    on_progress: called with (dumps done, dumps in all) after each dump. `save` writes the record. Raises UsageError for an
    unknown replay, for a replay compared with itself, and for "truth"; StoreProblem for a damaged replay.
    """
    catalog = query.open_fresh(store)
    ours, theirs = both_sides(catalog, a, b)
    if theirs.info.replay_id == ours.row.replay_id:
        raise UsageError(f"A and B are the same replay, {ours.row.replay_id}", hint="name two replays, `recorded` or `truth`")
    with_truth = theirs.info.kind == TRUTH  # the truth serves many replays, so inputs that only it has are not missing in A
    dump_ids = sorted(ours.inputs.keys() | (() if with_truth else theirs.inputs.keys()))
    if only is not None:
        dump_ids = [dump_id for dump_id in dump_ids if dump_id in only]
    blocked, user_thresholds = why_not(ours, theirs), thresholds or {}
    overall_floor: Mapping[str, float] = noise.floor if noise else {}
    floors: defaultdict[str, Mapping[str, float]] = defaultdict(
        lambda: overall_floor, {measured.dump_id: measured.floor for measured in noise.dumps} if noise else {}
    )
    lone_rows = open_replay(catalog, rounding) if rounding and rounding != theirs.info.replay_id else None
    rounded = _rounding(ours, lone_rows, theirs, () if blocked else dump_ids) if lone_rows else None
    judge_by = _Judge(ours, theirs, blocked, user_thresholds, floors, rounded)
    ranked: list[tuple[int, float, str, DumpComparison]] = []
    for done, dump_id in enumerate(dump_ids, 1):
        dump, severity = judge_by.compare(dump_id)
        rank = ORDER.index(dump.verdict), -severity, dump_id
        shown = {name: float(f"{distance:.4g}") for name, distance in islice(dump.distances.items(), MOST_DISTANCES)}
        position = bisect(ranked, rank)
        ranked.insert(position, (*rank, replace(dump, distances=shown, scales={})))
        if (index := max(position, DETAILED)) < len(ranked):  # this dump, or the dump that it moved down, is not among the worst
            ranked[index] = (*ranked[index][:3], replace(ranked[index][3], worst_tokens=(), parameters=(), distances={}))
        if on_progress:
            on_progress(done, len(dump_ids))
    dumps = tuple(_with_token_ids(store, ours, dump) if position < NAMED else dump for position, (*_, dump) in enumerate(ranked))
    applied = applied_to(weaker([ours.info.dtype, theirs.info.dtype]), user_thresholds)
    measured = rounded if rounded and applied.dtype == rounded.dtype else None
    bias = measured.bias(dumps) if measured else None
    biased = bias is not None and bias.excessive
    wrong_truth = _wrong_truth(theirs)
    local = verdict_of([*ours.results.values()]) if with_truth else None
    wrong_model = [local.said] if local and local.word == WRONG else []
    verdict = (
        MISMATCH
        if biased or wrong_truth or wrong_model
        else min((dump.verdict for dump in dumps), key=ORDER.index, default=NOT_COMPARED)
    )
    excludes = {}
    if verdict in GOOD and with_truth:
        excludes = excluded(dumps, applied.limits, bias, floors)
        if lone_rows and lone_rows.spec.config.planted:
            excludes |= noticed(lone_rows, theirs, dumps, applied.limits, measured, floors)
    reasons = [
        *wrong_model,
        *wrong_truth,
        *_notes(ours, theirs, dumps, blocked, noise, only),
        *of_one_rank(ours.results.values(), dumps, applied.limits),
    ]
    if (gain := scaled_gradients(dumps)) is not None:
        whose = "the truth's" if with_truth else "B's"
        reasons.append(f"all gradients are {gain:g} times {whose}")
    if bias is not None and biased:
        reasons.insert(
            0,
            f"over all dumps A's log-probs differ by {bias.ours:+.3g} nats on average, in one direction: {bias.z:+.1f} standard "
            f"errors beyond rounding (limit {MOST_Z:g}); rounding is unbiased",
        )
    return ComparisonRecord(
        comparison_id=new_replay_id(),
        created_at=now_timestamp(),
        a=ours.info,
        b=theirs.info,
        thresholds=applied.limits,
        thresholds_from=_source(applied, measured, dumps),
        rounding_id=measured.replay_id if measured else None,
        verdict=verdict,
        dumps=dumps,
        excludes=excludes,
        noise_id=noise.noise_id if noise else None,
        reasons=tuple(reasons),
        left=unlocated(local, ours.row.replay_id) if with_truth else (),
    )


def of_one_rank(results: Iterable[ResultRecord], dumps: Sequence[DumpComparison], limits: Mapping[str, float]) -> Iterator[str]:
    """Yield the rank whose log-probs are outside in all of its dumps, if those of the other ranks are within in all of theirs."""
    ranks = {result.dump_id: result.worker for result in results}
    within: defaultdict[int, set[bool]] = defaultdict(set)
    for dump in dumps:
        if dump.verdict != NOT_COMPARED and dump.dump_id in ranks:
            within[ranks[dump.dump_id]].add(not tokens_outside(dump, limits))
    bad = [rank for rank, states in within.items() if states == {False}]
    if len(bad) == 1 and len(within) > 1 and all(states == {True} for rank, states in within.items() if rank not in bad):
        yield f"all dumps of rank {bad[0]} are outside, and none of another rank: its weights may differ"


def tokens_outside(dump: DumpComparison, limits: Mapping[str, float]) -> bool:
    """Return whether log-probs differ by more than their limits, those of the dump if it has any, or are not finite."""
    measured, limits = measures(dump), dump.limits or limits
    odd = dump.log_probs is not None and dump.log_probs.nonfinite > 0
    return odd or any(measured.get(name, 0.0) > limits.get(name, math.inf) for name in OF_TOKENS)


def _wrong_truth(side: Side) -> list[str]:
    """Say which module of a truth differs from its formula: A runs the same code, so both are wrong, and may agree."""
    checks = formula_checks(side.results.values()) if isinstance(side, ReplaySide) else []
    return [f"{check.differs}, and the truth runs it too" for check in checks if check.differs][:1]


def save(store: Store, record: ComparisonRecord) -> Path:
    """Write the record to `store/comparisons/<comparison_id>.json` and return the path."""
    return store.publish_text(store.comparisons / f"{record.comparison_id}.json", record.to_json())


@dataclass(frozen=True)
class _Judge:
    """The criteria for each dump. blocked: why the sides cannot be compared at all. thresholds: those that the user set."""

    a: ReplaySide
    b: Side
    blocked: str | None
    thresholds: Mapping[str, float]
    floors: Floors
    rounded: Rounding | None

    def compare(self, dump_id: str) -> tuple[DumpComparison, float]:
        """Compare one dump; return the comparison and its severity."""
        a, b = self.a, self.b
        replay_input = a.inputs.get(dump_id) or b.inputs.get(dump_id)
        length = replay_input.seq_len if replay_input else None
        loaded = self.blocked or _load(a, b, dump_id)
        if isinstance(loaded, str):
            if not self.blocked and a.failed(dump_id) and dump_id in b.inputs and not isinstance(b.read(dump_id), str):
                return DumpComparison(dump_id, MISMATCH, (f"{loaded}, and B has its results",), seq_len=length), math.inf
            return DumpComparison(dump_id, NOT_COMPARED, seq_len=length, not_compared={"dump": loaded}), -1.0
        ours, theirs = loaded
        theirs = averaged(b, theirs, ours.gradient_over)
        dump = measure(dump_id, length, averaged(a, ours, theirs.gradient_over), theirs)
        applied, why = applied_to(weaker([ours.dtype, theirs.dtype]), self.thresholds), ""
        if self.rounded is not None and dump_id in self.rounded.dumps and applied.dtype == self.rounded.dtype:
            dump = self.rounded.limited(applied, dump)
        elif dump.parameter_distance is not None and "parameter_distance" in applied.limits:
            dump = replace(dump, parameter_seen=applied.limits["parameter_distance"] + dump.parameter_distance)
        limits = dump.limits or applied.limits
        if dump.log_probs is None or not dump.log_probs.count:
            why = "its mask selects no token"
        elif not dump.reasons and not limits.keys() & measures(dump).keys():
            why = "no measured value has a threshold"
        if why:
            return replace(dump, verdict=NOT_COMPARED, not_compared=dump.not_compared | {"dump": why}), -1.0
        dump, severity = judge(dump, limits, self.floors[dump_id])
        if theirs.fault and dump.verdict == MISMATCH:
            dump = replace(dump, reasons=(*dump.reasons, theirs.fault))
        return dump, severity


def _load(a: ReplaySide, b: Side, dump_id: str) -> tuple[Values, Values] | str:
    """Read the values of both sides, or return why they cannot be compared."""
    if dump_id not in a.inputs:
        return "only B replayed it, A did not"
    if dump_id not in b.inputs:
        return "only A replayed it, B did not"
    ours = a.read(dump_id)
    if isinstance(ours, str):
        return f"A: {ours}"
    theirs = b.read(dump_id)
    if isinstance(theirs, str):
        return theirs if isinstance(b, GoldenSide) else f"B: {theirs}"
    return unlike(ours, theirs) or (ours, theirs)


def _rounding(a: ReplaySide, lone_rows: ReplaySide, truth: Side, dump_ids: Collection[str]) -> Rounding:
    """Measure what rounding does to each dump: compare `lone_rows`, a replay with each row alone, with the truth.

    Gradients are averaged over the same dumps as in A.
    """
    measured = {}
    for dump_id in dump_ids:
        ours, loaded = a.read(dump_id), _load(lone_rows, truth, dump_id)
        if isinstance(ours, str) or isinstance(loaded, str):
            continue
        over = ours.gradient_over
        dump = measure(dump_id, None, averaged(lone_rows, loaded[0], over), averaged(truth, loaded[1], over))
        if dump.log_probs is not None and dump.log_probs.count and not dump.reasons:
            measured[dump_id] = dump
    dtypes = str(lone_rows.info.dtype), str(truth.info.dtype)
    return Rounding(lone_rows.row.replay_id, measured, *dtypes, bool(lone_rows.resolved.get("experts")))


def _source(applied: Applied, rounded: Rounding | None, dumps: Collection[DumpComparison]) -> str:
    """Describe where the thresholds come from."""
    if rounded is None:
        return applied.source
    flat = sum(dump.verdict != NOT_COMPARED and dump.dump_id not in rounded.dumps for dump in dumps)
    text = f"measured on each dump: what {applied.dtype} costs against {rounded.truth}, replay {rounded.replay_id}"
    text += f"; {flat} of {len(dumps)} dumps without it: flat" if flat else ""
    text += "; wider for experts: rounding may reroute tokens" if rounded.experts else ""
    return "; ".join((text, *applied.source.split("; ")[1:]))


def _with_token_ids(store: Store, side: ReplaySide, dump: DumpComparison) -> DumpComparison:
    """Add token ids to the worst tokens of a dump, if the dump still exists."""
    if not dump.worst_tokens or dump.dump_id not in side.inputs:
        return dump
    if (ids := recorded_arrays(store, side.inputs[dump.dump_id].path).get("sequences")) is None:
        return dump
    named = (
        replace(token, token_id=int(ids[token.row, token.position]))
        if token.row < ids.shape[0] and token.position < ids.shape[1]
        else token
        for token in dump.worst_tokens
    )
    return replace(dump, worst_tokens=tuple(named))


def _notes(
    a: ReplaySide,
    b: Side,
    dumps: tuple[DumpComparison, ...],
    blocked: str | None,
    noise: NoiseRecord | None,
    only: Collection[str] | None,
) -> Iterator[str]:
    """Yield remarks about the whole comparison."""
    if blocked:
        yield blocked
    if not dumps:
        yield "there is no dump to compare" if only is None else "the selection matches none of their dumps"
    if isinstance(b, ReplaySide) and b.spec.config.truth and any(dump.verdict != NOT_COMPARED for dump in dumps):
        ours, theirs = a.weights_dtype, b.weights_dtype
        if ours and theirs and ours != theirs:
            yield f"the truth's weights are {theirs}, A's {ours}: their rounding is part of the difference"
    if noise is not None and noise.replay_id not in (a.row.replay_id, b.info.replay_id):
        yield f"the noise floor was measured with another replay, {noise.replay_id} ({noise.label})"
