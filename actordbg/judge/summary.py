"""Summarize the results of replays. Pure: reads no file and no catalog; the caller passes the time.

Rules that keep the figures honest:

* A report names the configuration that the workers *resolved* (their `ready` event), not the flag.
* Warm-up is not part of steady timing (`records/replay_record.py`) and is shown separately. All other inputs whose forward ended
  count, including failed ones.
* An input without a result is "not run", so the counts add up to the inputs of the plan.
* Times of different replays are never pooled. Side by side (`compare`), a ratio covers the inputs that both ran.

Example::

    summary = summary_of(ReplayData(spec, resolved, "complete", results))
    summary.forward.median       # seconds
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from actordbg.actor.signatures import explain
from actordbg.base.units import first_line, grouped, letter_of
from actordbg.config.as_ran import as_ran, telling
from actordbg.config.replay_config import SETTINGS
from actordbg.formats.nested_values import RUN_ON
from actordbg.judge.agreement import agreement_of, generators_of, golden_of, laws_of, not_compared_of
from actordbg.judge.report_model import (
    Against,
    BucketFigures,
    Compiled,
    Counts,
    FailureGroup,
    Inputs,
    LogProbs,
    ReplaySummary,
    SideBySide,
    SlowInput,
    Summary,
    Throughput,
    WarmUp,
)
from actordbg.locate.verdict import verdict_of
from actordbg.records.replay_record import (
    CRASHED,
    FAILED,
    HUNG,
    PASSED,
    PERCENTILE_DEFINITION,
    STOPPED,
    ReplayInput,
    ResultRecord,
    bucket_of,
    finite,
    median,
    spread,
    warm_up_of,
    weighted_mean,
)
from actordbg.replay.replay_data import ReplayData

SLOWEST = 5
EXAMPLES = 3
CAUSE_CHARS = 600
Results = Sequence[ResultRecord]
ById = Mapping[str, ReplayInput]

_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


def summarise(replays: Sequence[ReplayData], *, selection: str, now: str, notes: Sequence[str] = ()) -> Summary:
    """Summarize `replays` in order; the first is the baseline of the comparison."""
    summaries = tuple(summary_of(data, letter_of(index)) for index, data in enumerate(replays))
    return Summary(
        selection=selection,
        generated_at=now,
        percentile=PERCENTILE_DEFINITION,
        replays=summaries,
        totals=Counts(*(sum(getattr(summary.counts, field.name) for summary in summaries) for field in fields(Counts))),
        comparison=compare(replays, [summary.label for summary in summaries]) if len(replays) > 1 else None,
        notes=tuple(notes),
    )


def restrict(data: ReplayData, keep: Callable[[str], bool]) -> ReplayData:
    """Return the replay with only the inputs and results whose dump id `keep` accepts."""
    inputs = tuple(given for given in data.spec.inputs if keep(given.dump_id))
    results = tuple(result for result in data.results if keep(result.dump_id))
    return replace(data, spec=replace(data.spec, inputs=inputs), results=results)


def summary_of(data: ReplayData, name: str = "A") -> ReplaySummary:
    """Summarize one replay."""
    spec, results = data.spec, data.results
    by_id = {given.dump_id: given for given in spec.inputs}
    of, lengths = Counter(result.status for result in results), [given.seq_len for given in spec.inputs]
    not_run = len(spec.inputs) - len({result.dump_id for result in results} & by_id.keys())
    first, compiling = warm_up_of(results)
    measured = [result for result in results if result.forward_s is not None]
    steady = [result for result in measured if result.dump_id not in first | compiling]
    compiled = [result for result in results if result.graphs is not None]
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
        inputs=Inputs(min(lengths, default=None), median(lengths), max(lengths, default=None), _total(spec.inputs, "tokens")),
        counts=Counts(
            inputs=not_run + len(results),
            not_run=not_run,
            **{status: of[status] for status in (PASSED, FAILED, CRASHED, HUNG, STOPPED)},
        ),
        worker_starts=len({(result.worker, result.attempt) for result in results}),
        failures=_failures(results),
        **_timed(results, steady, by_id),
        buckets=tuple(_buckets(results, {result.dump_id for result in steady}, by_id)),
        warm_up=WarmUp(
            len(first),
            spread(result.forward_s for result in results if result.dump_id in first),
            len(compiling),
            spread(result.forward_s for result in results if result.dump_id in compiling),
        ),
        slowest=_slowest(steady or measured, by_id)[:SLOWEST],
        slowest_are_steady=bool(steady),
        logprobs=_logprobs([result for result in results if result.logprob_count is not None]),
        golden=golden_of(results, "golden"),
        golden_entropy=golden_of(results, "golden_entropy"),
        generators=generators_of(results),
        not_compared=not_compared_of(results),
        compiled=Compiled(len(compiled), _total(compiled, "graphs"), _total(compiled, "graph_breaks")) if compiled else None,
        comparisons=data.comparisons,
        ranks=agreement_of(results, spec.config),
        laws=laws_of(results, spec.config),
        local=verdict_of(results),
        run_on=sum(RUN_ON in result.extra.get("notes", ()) for result in results),
        why=data.why,
        whose=data.whose,
    )


def _total(results: Sequence[Any], figure: str) -> int:
    return sum(getattr(result, figure) or 0 for result in results)


def _timed(results: Results, steady: Results, by_id: ById) -> dict[str, Any]:
    """Return the fields of `Timed`: times of the steady results, the memory peak of all."""
    given = {dump_id: each.tokens for dump_id, each in by_id.items()}
    pairs = [(given.get(r.dump_id) if r.tokens is None else r.tokens, r.forward_s) for r in steady]
    speeds = [(count, seconds) for count, seconds in pairs if count is not None and seconds]
    took = sum(seconds for _, seconds in speeds)
    total = sum(count for count, _ in speeds) / took if took else None
    return {
        "forward": spread(result.forward_s for result in steady),
        "backward": spread(result.backward_s for result in steady),
        "tokens_per_s": Throughput(median([count / seconds for count, seconds in speeds]), total),
        "peak_memory_bytes": max((r.peak_memory_bytes for r in results if r.peak_memory_bytes is not None), default=None),
    }


def _buckets(results: Results, steady: set[str], by_id: ById) -> Iterator[BucketFigures]:
    groups = grouped((bucket_of(by_id[each.dump_id].seq_len), each) for each in results if each.dump_id in by_id)
    for (low, high), members in sorted(groups.items()):
        timed = [result for result in members if result.dump_id in steady]
        passed = sum(result.status == PASSED for result in members)
        yield BucketFigures(f"{low}-{high}", len(members), passed, len(timed), **_timed(members, timed, by_id))


def _slowest(results: Results, by_id: ById) -> tuple[SlowInput, ...]:
    """Return the inputs of these results by forward plus backward seconds, slowest first."""
    ordered = sorted(results, key=lambda result: (-(result.forward_s or 0.0) - (result.backward_s or 0.0), result.dump_id))
    pairs = ((by_id[result.dump_id], result) for result in ordered if result.dump_id in by_id)
    return tuple(
        SlowInput(
            given.dump_id,
            given.rank,
            given.batch_size,
            given.seq_len,
            given.tokens,
            forward_s=took.forward_s or 0.0,
            backward_s=took.backward_s,
        )
        for given, took in pairs
    )


def _logprobs(results: Results) -> LogProbs | None:
    if not results:
        return None
    return LogProbs(
        results=len(results),
        count=_total(results, "logprob_count"),
        mean=weighted_mean((result.logprob_mean, result.logprob_count) for result in results),
        lowest=min(finite(result.logprob_min for result in results), default=None),
        highest=max(finite(result.logprob_max for result in results), default=None),
        nonfinite=_total(results, "nonfinite"),
        entropy_mean=weighted_mean((result.entropy_mean, result.logprob_count) for result in results),
        folded_ids=_total(results, "folded_ids"),
    )


# Failures are grouped by known signature, else by the kind of error with its numbers masked. A hundred inputs that fail alike are
# one line of a report, with the first as the example.


def _failures(results: Results) -> tuple[FailureGroup, ...]:
    """Group the failures by kind, largest group first. The earliest result of a group gives its cause."""
    failed = sorted((each for each in results if each.status != PASSED), key=lambda each: (each.started_at, each.slot))
    groups = grouped((_alike(each), each) for each in failed)
    return tuple(sorted(map(_group, groups.values()), key=lambda group: (-group.count, group.name)))


def _alike(result: ResultRecord) -> tuple[str, str]:
    """Return what results of the same kind of failure have in common."""
    if result.signature:
        return "signature", result.signature
    return result.error_class or result.status, _NUMBERS.sub("#", first_line(result.error)[:200])


def _group(members: Results) -> FailureGroup:
    first = members[0]
    unnamed = {CRASHED: "worker died", HUNG: "timed out", FAILED: "non-finite log-probs" if first.nonfinite else FAILED}
    known = explain(first.signature) if first.signature else None
    explanation, ways_out = known or ("", ())
    return FailureGroup(
        name=first.signature or first.error_class or unnamed.get(first.status, first.status),
        known=known is not None,
        count=len(members),
        statuses=dict(Counter(result.status for result in members)),
        error_class=first.error_class,
        cause=(first.error or "")[:CAUSE_CHARS],
        log_excerpt=first.log_excerpt,
        explanation=explanation,
        ways_out=tuple(ways_out),
        examples=tuple(result.dump_id for result in members[:EXAMPLES]),
    )


# Replays side by side: what differs in their resolved configurations, and how each compares with the first.
#
# Medians of two replays say little if they ran different inputs, so the ratio is taken input by input, over inputs that both ran
# and that are steady in both (not first, not compiling). Output digests are SHA-256 of float32 log-probs: equal means
# bit-identical; a difference is expected between dtypes or kernels and says nothing about its size (`golden` and the log-prob
# figures do).


NO_SETTINGS = ("load_s", "load_shared_with", "rank", "ids_folded")
"""Facts that workers report but that are not part of the configuration."""
_SETTINGS = {name for setting in SETTINGS.values() for name in (setting.name, setting.stored, setting.resolved)}


def compare(replays: Sequence[ReplayData], labels: Sequence[str]) -> SideBySide:
    """Compare all of `replays` (two or more) with the first.

    A fact that a replay does not report is not a difference: its workers did not start, or it is a truth, which has no Actor.
    """
    settings = [configuration(data) for data in replays]
    reported = grouped((name, value) for own in settings for name, value in own.items())
    differing = [name for name, values in reported.items() if any(value != values[0] for value in values)]
    rows = [
        _against(replays[0], data, name, {key: own.get(key) for key in differing})
        for data, name, own in zip(replays, labels, settings, strict=True)
    ]
    shared = {name: values[0] for name, values in reported.items() if name not in differing}
    return SideBySide(baseline=labels[0], shared=shared, rows=tuple(rows))


def configuration(data: ReplayData) -> dict[str, Any]:
    """Return the settings that distinguish a replay's configuration, then the other plain facts that its workers reported."""
    facts = {name: value for name, value in data.resolved.items() if name not in _SETTINGS and name not in NO_SETTINGS}
    plain = {key: value for key, value in facts.items() if value is None or isinstance(value, str | int | float | bool)}
    return telling(as_ran(data.spec.config, data.resolved)) | plain


def _against(baseline: ReplayData, data: ReplayData, label: str, differs: dict[str, Any]) -> Against:
    ours, theirs = ({result.dump_id: result for result in replay.results} for replay in (data, baseline))
    common = ours.keys() & theirs.keys()
    warm = set().union(*warm_up_of(data.results), *warm_up_of(baseline.results))
    timed = [(ours[key].forward_s, theirs[key].forward_s) for key in common - warm]
    ratios = [here / there for here, there in timed if here is not None and there]
    passed = [(ours[key], theirs[key]) for key in common if ours[key].status == theirs[key].status == PASSED]
    equal = [here.output_digest == there.output_digest for here, there in passed if here.output_digest and there.output_digest]
    means = [(here.logprob_mean, there.logprob_mean) for here, there in passed]
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
