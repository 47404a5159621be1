"""What a green verdict excludes: the smallest faults that would have made it red, on the same inputs and under the same limits.

Four follow from the limits and from how far A is off already, without another forward. Each holds in the worst case: whichever
token, dump or parameter it is, and whichever way it goes.

| fault | size | would have been above |
|---|---|---|
| token | nats, of any one log-prob | max_abs |
| tokens | nats, all log-probs shifted by as much | mean_abs, or the bias over all dumps |
| gradients | relative, all of them times 1 + e | gradient_distance or grad_norm_rel |
| parameter | relative, the gradient of any one parameter | parameter_distance |

`None` as a size: no size of this fault is known to be seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actordbg.compare.measured_limits import Bias
from actordbg.compare.thresholds import measures
from actordbg.formats.comparison_record import GOOD, DumpComparison

Sizes = dict[str, float | None]


def excluded(dumps: Sequence[DumpComparison], limits: Mapping[str, float], bias: Bias | None) -> Sizes:
    """Sizes by fault over the dumps that were judged and are good. `limits`: of dumps that have none of their own."""
    each = [(one.limits or limits, measures(one)) for one in dumps if one.verdict in GOOD]
    if not each:
        return {}
    shifts = _sums(each, "mean_abs") + ([bias.seen] if bias else [])
    found: Sizes = {"token": _all(each, "max_abs"), "tokens": min(shifts, default=None)}
    if any("grad_norm_rel" in values or "gradient_distance" in values for _, values in each):
        parameters = [one.parameter_seen for one in dumps if one.verdict in GOOD]
        known = [one for one in parameters if one is not None]
        found["gradients"] = min(
            (one for name in ("grad_norm_rel", "gradient_distance") for one in _scales(each, name)), default=None
        )
        found["parameter"] = max(known, default=None) if len(known) == len(parameters) else None
    return found


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
