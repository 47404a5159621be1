"""What a green verdict excludes: the smallest faults that would have made it red, on the same inputs and under the same limits.

Four follow from the limits and from how far A is off already, without another forward. Each holds in the worst case: whichever
token, dump or parameter it is, and whichever way it goes.

| fault | size | would have been above |
|---|---|---|
| token | nats, of any one log-prob | max_abs |
| tokens | nats, all log-probs shifted by as much | mean_abs, or the bias over all dumps |
| gradients | relative, all of them times 1 + e | gradient_distance or grad_norm_rel |
| parameter | relative, the gradient of any one parameter | parameter_distance |

Others depend on the model, so they are planted in it (`actordbg.actor.planted`), with each row alone in A's dtype, and judged as
A is (`noticed`). The size is the smallest one that was tried from which on all are red. Gradients are not computed for these,
so a smaller one may be seen by its gradient.

`None` as a size: no size of this fault is known to be seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from actordbg.compare.dump_figures import measure
from actordbg.compare.measured_limits import MOST_Z, Bias, Rounding
from actordbg.compare.sides import ReplaySide, Side
from actordbg.compare.thresholds import Floors, judge, measures
from actordbg.formats.comparison_record import GOOD, MISMATCH, DumpComparison

Sizes = dict[str, float | None]


def excluded(dumps: Sequence[DumpComparison], limits: Mapping[str, float], bias: Bias | None, floors: Floors) -> Sizes:
    """Sizes by fault over the dumps that were judged and are good. `limits`: of dumps that have none of their own.

    floors: the noise that excuses what is above a limit, so it hides a fault of that size.
    """
    each = [(_wider(one.limits or limits, floors.of(one.dump_id)), measures(one)) for one in dumps if one.verdict in GOOD]
    if not each:
        return {}
    shifts = _sums(each, "mean_abs") + ([bias.seen] if bias else [])
    found: Sizes = {"token": _all(each, "max_abs"), "tokens": min(shifts, default=None)}
    if any("grad_norm_rel" in values or "gradient_distance" in values for _, values in each):
        parameters = [_parameter_seen(one, floors.of(one.dump_id)) for one in dumps if one.verdict in GOOD]
        known = [one for one in parameters if one is not None]
        found["gradients"] = min(
            (one for name in ("grad_norm_rel", "gradient_distance") for one in _scales(each, name)), default=None
        )
        found["parameter"] = max(known, default=None) if len(known) == len(parameters) else None
    return found


def _wider(limits: Mapping[str, float], floor: Mapping[str, float]) -> dict[str, float]:
    """What a measure must be above to be a mismatch: its limit, and the noise."""
    return {name: max(limit, floor.get(name, 0.0)) for name, limit in limits.items()}


def _parameter_seen(one: DumpComparison, floor: Mapping[str, float]) -> float | None:
    if one.parameter_seen is None:
        return None
    return max(one.parameter_seen, floor.get("parameter_distance", 0.0) + (one.parameter_distance or 0.0))


Judged = Sequence[tuple[Mapping[str, float], Mapping[str, float]]]
"""Limits and measures of each dump."""


def _sums(each: Judged, name: str) -> list[float]:
    """Limit and value together, of each dump: what moves a figure by that is above the limit, whichever way it goes."""
    return [limits[name] + values[name] for limits, values in each if name in limits and name in values]


def _scales(each: Judged, name: str) -> list[float]:
    """How much a gradient that is `value` off may still be scaled, of each dump."""
    both = [(limits[name], values[name]) for limits, values in each if name in limits and name in values]
    return [(limit + value) / (1 - value) for limit, value in both if value < 1]


def _all(each: Judged, name: str) -> float | None:
    """What is seen in whichever dump it is; None if a dump was not judged by it."""
    sums = _sums(each, name)
    return max(sums) if len(sums) == len(each) else None


def noticed(
    lone: ReplaySide,
    truth: Side,
    dumps: Sequence[DumpComparison],
    limits: Mapping[str, float],
    rounding: Rounding | None,
    floors: Floors,
) -> Sizes:
    """By fault that was planted in `lone`, the smallest size from which on each was red for these dumps."""
    planted: dict[tuple[str, float], list[DumpComparison]] = defaultdict(list)
    red: set[tuple[str, float]] = set()
    for one in (dump for dump in dumps if dump.verdict in GOOD):
        ours, theirs = lone.read(one.dump_id), truth.read(one.dump_id)
        if isinstance(ours, str) or isinstance(theirs, str):
            continue
        for name, log_probs in lone.planted(one.dump_id).items():
            fault, size = name.split("/")
            faulty = replace(ours, log_probs=log_probs, entropy=None, loss=None, grad_norm=None, gradients=())
            found = measure(one.dump_id, None, faulty, replace(theirs, entropy=None, loss=None, grad_norm=None, gradients=()))
            planted[fault, float(size)].append(found.dump)
            if judge(found.dump, one.limits or limits, floors.of(one.dump_id), found.broken).verdict == MISMATCH:
                red.add((fault, float(size)))
    for key, found_dumps in planted.items():
        bias = rounding.bias(found_dumps) if rounding else None
        red |= {key} if bias is not None and abs(bias.z) > MOST_Z else set()
    return {fault: _smallest(sorted(size for one, size in planted if one == fault), fault, red) for fault, _ in planted}


def _smallest(sizes: Sequence[float], fault: str, red: set[tuple[str, float]]) -> float | None:
    unseen = [place for place, size in enumerate(sizes) if (fault, size) not in red]
    first = unseen[-1] + 1 if unseen else 0
    return sizes[first] if first < len(sizes) else None
