"""From the rows of replays to a Summary. Pure: no file, no catalog, and no clock but the one that is handed in.

Rules that keep the figures honest:

* A report names the configuration that the workers *resolved* (their `ready` event), not the flag.
* Warm-up is no part of steady timing (`records/arithmetic.py`) and shown apart. All other inputs whose forward ended count,
  failed ones too.
* An input without a result is "not run", so the counts add up to the inputs of the plan.
* Times of different replays are never pooled. Side by side (`compare`), a ratio is over the inputs that both ran.

Example::

    summary = summarise([ReplayData(spec, resolved, "complete", results)], selection="the last replay", now=timestamp)
    summary.replays[0].forward.median       # seconds
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

from actordbg.base.units import letter_of
from actordbg.config.as_ran import as_ran, telling
from actordbg.config.replay_config import SETTINGS
from actordbg.judge.agreement import agreement_of, generators_of, golden_of, not_compared_of
from actordbg.judge.failures import Explain, group_failures, nothing_known
from actordbg.judge.law_summary import laws_of
from actordbg.judge.report_model import (
    Against,
    BucketFigures,
    Compiled,
    Counts,
    Inputs,
    LogProbs,
    ReplaySummary,
    SideBySide,
    SlowInput,
    Summary,
    Throughput,
    WarmUp,
)
from actordbg.records.arithmetic import (
    PERCENTILE_DEFINITION,
    Bucket,
    bucket_of,
    finite,
    median,
    spread,
    warm_up_of,
    weighted_mean,
)
from actordbg.records.replay_record import CRASHED, FAILED, HUNG, PASSED, STOPPED, ReplayInput, ResultRecord
from actordbg.replay.replay_data import ReplayData

SLOWEST = 5


def summarise(
    replays: Sequence[ReplayData],
    *,
    selection: str,
    now: str,
    slowest: int = SLOWEST,
    explain: Explain = nothing_known,
    notes: Sequence[str] = (),
) -> Summary:
    """The report over `replays`, in their order; the first one is the baseline of the comparison.

    `explain` knows failure signatures (see `failures.Explain`); `slowest` is the number of slowest inputs per replay.
    """
    summaries = tuple(summary_of(data, letter_of(index), slowest, explain) for index, data in enumerate(replays))
    return Summary(
        selection=selection,
        generated_at=now,
        percentile=PERCENTILE_DEFINITION,
        replays=summaries,
        totals=Counts(*(sum(getattr(one.counts, field.name) for one in summaries) for field in fields(Counts))),
        comparison=compare(replays, [one.label for one in summaries]) if len(replays) > 1 else None,
        notes=tuple(notes),
    )


def restrict(data: ReplayData, keep: Callable[[str], bool]) -> ReplayData:
    """The same replay with only the inputs (and their results) whose dump id `keep` accepts."""
    inputs = tuple(one for one in data.spec.inputs if keep(one.dump_id))
    results = tuple(one for one in data.results if keep(one.dump_id))
    return replace(data, spec=replace(data.spec, inputs=inputs), results=results)


def summary_of(data: ReplayData, name: str = "A", slowest: int = SLOWEST, explain: Explain = nothing_known) -> ReplaySummary:
    """What a report says of one replay."""
    spec, results = data.spec, data.results
    by_id = {one.dump_id: one for one in spec.inputs}
    of, lengths = Counter(one.status for one in results), [one.seq_len for one in spec.inputs]
    not_run = len(spec.inputs) - len({one.dump_id for one in results} & by_id.keys())
    first, compiling = warm_up_of(results)
    warm = first | compiling
    steady = [one for one in results if one.forward_s is not None and one.dump_id not in warm]
    counted = [one for one in results if one.graphs is not None]
    measured = [one for one in results if one.forward_s is not None]
    return ReplaySummary(
        label=name,
        replay_id=spec.replay_id,
        created_at=spec.created_at,
        status=data.status,
        command=spec.command,
        where=spec.where,
        order=spec.order,
        asked=spec.config.to_dict(),
        resolved=dict(data.resolved),
        versions=dict(spec.versions),
        inputs=Inputs(
            min(lengths, default=None),
            median(finite(lengths)),
            max(lengths, default=None),
            sum(one.tokens for one in spec.inputs),
        ),
        counts=Counts(not_run + len(results), of[PASSED], of[FAILED], of[CRASHED], of[HUNG], not_run, of[STOPPED]),
        worker_starts=len({(one.worker, one.attempt) for one in results}),
        failures=group_failures(results, explain),
        forward=spread(one.forward_s for one in steady),
        backward=spread(one.backward_s for one in steady),
        tokens_per_s=_throughput(steady, by_id),
        peak_memory_bytes=_peak(results),
        buckets=_buckets(results, steady, by_id),
        warm_up=WarmUp(
            len(first),
            spread(one.forward_s for one in results if one.dump_id in first),
            len(compiling),
            spread(one.forward_s for one in results if one.dump_id in compiling),
        ),
        slowest=_slowest(steady or measured, by_id, slowest),
        slowest_are_steady=bool(steady),
        logprobs=_logprobs(results),
        golden=golden_of(results, "golden"),
        golden_entropy=golden_of(results, "golden_entropy"),
        generators=generators_of(results),
        not_compared=not_compared_of(results),
        compiled=Compiled(len(counted), sum(one.graphs or 0 for one in counted), sum(one.graph_breaks or 0 for one in counted))
        if counted
        else None,
        comparisons=data.comparisons,
        ranks=agreement_of(results, spec.config),
        laws=laws_of(results, spec.config),
        why=data.why,
    )


def _tokens(one: ResultRecord, by_id: dict[str, ReplayInput]) -> int | None:
    if one.tokens is not None:
        return one.tokens
    return by_id[one.dump_id].tokens if one.dump_id in by_id else None


def _throughput(results: Sequence[ResultRecord], by_id: dict[str, ReplayInput]) -> Throughput:
    pairs = [(_tokens(one, by_id), one.forward_s) for one in results]
    known = [(tokens, seconds) for tokens, seconds in pairs if tokens is not None and seconds]
    seconds = sum(s for _, s in known)
    return Throughput(median([t / s for t, s in known]), sum(t for t, _ in known) / seconds if seconds else None)


def _peak(results: Iterable[ResultRecord]) -> int | None:
    return max((one.peak_memory_bytes for one in results if one.peak_memory_bytes is not None), default=None)


def _buckets(
    results: Sequence[ResultRecord], steady: Sequence[ResultRecord], by_id: dict[str, ReplayInput]
) -> tuple[BucketFigures, ...]:
    timed = {one.dump_id for one in steady}
    groups: dict[Bucket, list[ResultRecord]] = {}
    for one in results:
        if one.dump_id in by_id:
            groups.setdefault(bucket_of(by_id[one.dump_id].seq_len), []).append(one)
    buckets = []
    for bucket in sorted(groups):
        known = [one for one in groups[bucket] if one.dump_id in timed]
        buckets.append(
            BucketFigures(
                label=bucket.label,
                inputs=len(groups[bucket]),
                passed=sum(one.status == PASSED for one in groups[bucket]),
                steady=len(known),
                forward=spread(one.forward_s for one in known),
                backward=spread(one.backward_s for one in known),
                tokens_per_s=_throughput(known, by_id),
                peak_memory_bytes=_peak(groups[bucket]),
            )
        )
    return tuple(buckets)


def _slowest(results: Sequence[ResultRecord], by_id: dict[str, ReplayInput], count: int) -> tuple[SlowInput, ...]:
    def seconds(one: ResultRecord) -> float:
        return (one.forward_s or 0.0) + (one.backward_s or 0.0)

    known = [one for one in results if one.dump_id in by_id]
    ordered = sorted(known, key=lambda one: (-seconds(one), one.dump_id))
    pairs = ((one, by_id[one.dump_id]) for one in ordered[:count])
    return tuple(
        SlowInput(one.dump_id, at.rank, at.batch_size, at.seq_len, at.tokens, one.forward_s or 0.0, one.backward_s)
        for one, at in pairs
    )


def _logprobs(results: Sequence[ResultRecord]) -> LogProbs | None:
    known = [one for one in results if one.logprob_count is not None]
    if not known:
        return None
    return LogProbs(
        results=len(known),
        count=sum(one.logprob_count or 0 for one in known),
        mean=weighted_mean((one.logprob_mean, one.logprob_count) for one in known),
        lowest=min(finite(one.logprob_min for one in known), default=None),
        highest=max(finite(one.logprob_max for one in known), default=None),
        nonfinite=sum(one.nonfinite or 0 for one in known),
        entropy_mean=weighted_mean((one.entropy_mean, one.logprob_count) for one in known),
        folded_ids=sum(bool(one.folded_ids) for one in known),
    )


# Replays side by side: what differs in their resolved configurations, and how each compares with the first.
#
# Medians of two replays say little when they ran different inputs, so the ratio is taken input by input, over those that
# both ran and that are steady in both (no first inputs, none that compiled). Output digests are SHA-256 of float32
# log-probs: equal means equal bit for bit; different is expected between dtypes or kernels and says nothing about size
# (`golden` and the log-prob figures do).


NO_SETTINGS = ("load_s", "load_shared_with", "rank", "ids_folded")
"""What workers report that is no part of what ran."""
_SETTINGS = {name for one in SETTINGS.values() for name in (one.name, one.stored, one.resolved)}


def compare(replays: Sequence[ReplayData], labels: Sequence[str]) -> SideBySide:
    """All of `replays` (two or more) against the first one.

    What some do not report differs in none: no worker became ready, or the truth, which has no Actor, was computed.
    """
    settings = [configuration(data) for data in replays]
    reported: dict[str, list[Any]] = {}
    for one in settings:
        for name, value in one.items():
            reported.setdefault(name, []).append(value)
    differing = [name for name, values in reported.items() if any(value != values[0] for value in values)]
    rows = [
        _against(replays[0], data, name, {key: own.get(key) for key in differing})
        for data, name, own in zip(replays, labels, settings, strict=True)
    ]
    shared = {name: values[0] for name, values in reported.items() if name not in differing}
    return SideBySide(baseline=labels[0], shared=shared, rows=tuple(rows))


def configuration(data: ReplayData) -> dict[str, Any]:
    """What a replay ran under: the settings that tell it from others, then the other plain facts that its workers reported."""
    facts = {name: value for name, value in data.resolved.items() if name not in _SETTINGS and name not in NO_SETTINGS}
    plain = {key: value for key, value in facts.items() if value is None or isinstance(value, str | int | float | bool)}
    return telling(as_ran(data.spec.config, data.resolved)) | plain


def _against(baseline: ReplayData, data: ReplayData, label: str, differs: dict[str, Any]) -> Against:
    ours = {one.dump_id: one for one in data.results}
    theirs = {one.dump_id: one for one in baseline.results}
    common = ours.keys() & theirs.keys()
    warm = set().union(*warm_up_of(data.results), *warm_up_of(baseline.results))
    timed = [(ours[key].forward_s, theirs[key].forward_s) for key in common - warm]
    ratios = [here / there for here, there in timed if here is not None and there]
    passed = [(ours[key], theirs[key]) for key in common if ours[key].status == theirs[key].status == PASSED]
    equal = [one.output_digest == other.output_digest for one, other in passed if one.output_digest and other.output_digest]
    means = [(one.logprob_mean, other.logprob_mean) for one, other in passed]
    moved = [abs(here - there) for here, there in means if here is not None and there is not None]
    return Against(
        label=label,
        replay_id=data.spec.replay_id,
        differs=differs,
        common=len(common),
        timed=len(ratios),
        forward_ratio=median(ratios),
        digests_equal=sum(equal),
        digests_differ=len(equal) - sum(equal),
        mean_moved=max(finite(moved), default=None),
    )
