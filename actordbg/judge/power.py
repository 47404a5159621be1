"""What a green verdict excludes: the smallest faults that would have made it red, on the same inputs and under the same limits.

Four follow from the limits and from how far A is off already, without another forward. Each holds in the worst case: whichever
token, dump or parameter it is, and whichever way it goes.

| fault | size | would have been above |
|---|---|---|
| token | nats, of any one log-prob | max_abs |
| tokens | nats, all log-probs shifted by as much | mean_abs, or the bias over all dumps |
| gradients | relative, all of them times 1 + e | gradient_distance or grad_norm_rel |
| parameter | relative, the gradient of any one parameter | parameter_distance |

Others depend on the model, so they are planted in it (`actordbg.actor.truth_model`), each row alone in A's dtype, and judged as
A is (`noticed`). The size is the smallest one that was tried from which on all are red. Gradients are not computed for these,
so a smaller one may be seen by its gradient.

`None` as a size: no size of this fault is known to be seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from actordbg.judge.dump_figures import measure
from actordbg.judge.measured_limits import MOST_Z, Bias, Rounding
from actordbg.judge.sides import ReplaySide, Side
from actordbg.judge.thresholds import Floors, judge, measures
from actordbg.records.comparison_record import GOOD, MISMATCH, DumpComparison

Sizes = dict[str, float | None]


def excluded(dumps: Sequence[DumpComparison], limits: Mapping[str, float], bias: Bias | None, floors: Floors) -> Sizes:
    """Sizes by fault over the dumps that were judged and are good. `limits`: of dumps that have none of their own.

    floors: the noise that excuses what is above a limit, so it hides a fault of that size.
    """
    good = [(one, floors.of(one.dump_id)) for one in dumps if one.verdict in GOOD]
    if not good:
        return {}
    each = [
        ({name: max(limit, floor.get(name, 0.0)) for name, limit in (one.limits or limits).items()}, measures(one))
        for one, floor in good
    ]
    tokens = [limits + value for limits, value in _both(each, "max_abs")]
    shifts = [limits + value for limits, value in _both(each, "mean_abs")] + ([bias.seen] if bias else [])
    found: Sizes = {"token": max(tokens) if len(tokens) == len(each) else None, "tokens": min(shifts, default=None)}
    if any("grad_norm_rel" in values or "gradient_distance" in values for _, values in each):
        scales = [*_both(each, "grad_norm_rel"), *_both(each, "gradient_distance")]
        found["gradients"] = min(((limit + value) / (1 - value) for limit, value in scales if value < 1), default=None)
        known = [
            max(one.parameter_seen, floor.get("parameter_distance", 0.0) + (one.parameter_distance or 0.0))
            for one, floor in good if one.parameter_seen is not None
        ]  # fmt: skip
        found["parameter"] = max(known, default=None) if len(known) == len(good) else None
    return found


def _both(each: Sequence[tuple[Mapping[str, float], Mapping[str, float]]], name: str) -> list[tuple[float, float]]:
    """The limit and the value of a measure, of each dump that has both."""
    return [(limits[name], values[name]) for limits, values in each if name in limits and name in values]


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
            fault, _, size = name.partition("/")
            faulty = replace(ours, log_probs=log_probs, entropy=None, loss=None, grad_norm=None, gradients=())
            found = measure(one.dump_id, None, faulty, replace(theirs, entropy=None, loss=None, grad_norm=None, gradients=()))
            planted[fault, float(size)].append(found.dump)
            if judge(found.dump, one.limits or limits, floors.of(one.dump_id), found.broken)[0].verdict == MISMATCH:
                red.add((fault, float(size)))
    for key, found_dumps in planted.items():
        bias = rounding.bias(found_dumps) if rounding else None
        red |= {key} if bias is not None and abs(bias.z) > MOST_Z else set()
    smallest: Sizes = {fault: None for fault, _ in planted}
    for fault in smallest:
        for tried in sorted((tried for name, tried in planted if name == fault), reverse=True):
            if (fault, tried) not in red:
                break
            smallest[fault] = tried
    return smallest
