"""Replays side by side: what differs in their resolved configurations, and how each compares with the first.

Medians of two replays say little when they ran different inputs, so the ratio is taken input by input, over those that
both ran and that are steady in both (no first inputs, none that compiled). Output digests are SHA-256 of float32
log-probs: equal means equal bit for bit; different is expected between dtypes or kernels and says nothing about size
(`golden` and the log-prob figures do).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actordbg.config.as_ran import as_ran, telling
from actordbg.config.replay_config import SETTINGS
from actordbg.formats.replay_record import PASSED, ResultRecord
from actordbg.report.arithmetic import finite, median, warm_up_of
from actordbg.report.report_model import Against, ReplayData, SideBySide

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
    ratios = [ratio for key in common - warm if (ratio := _ratio(ours[key].forward_s, theirs[key].forward_s)) is not None]
    passed = [(ours[key], theirs[key]) for key in common if ours[key].status == theirs[key].status == PASSED]
    equal = [one.output_digest == other.output_digest for one, other in passed if one.output_digest and other.output_digest]
    return Against(
        label=label,
        replay_id=data.spec.replay_id,
        differs=differs,
        common=len(common),
        timed=len(ratios),
        forward_ratio=median(ratios),
        digests_equal=sum(equal),
        digests_differ=len(equal) - sum(equal),
        mean_moved=max(finite(_moved(one, other) for one, other in passed), default=None),
    )


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None


def _moved(one: ResultRecord, other: ResultRecord) -> float | None:
    if one.logprob_mean is None or other.logprob_mean is None:
        return None
    return abs(one.logprob_mean - other.logprob_mean)
