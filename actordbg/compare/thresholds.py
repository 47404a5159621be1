"""Define how far two sides may be apart before it is a mismatch, and judge one dump.

A *measure* is one number of a dump's comparison; larger is worse. Thresholds and noise floors use the same names::

    max_abs 0.31        the largest difference of a log-prob, nats
    clip_share 0.02     the share of tokens whose ratio leaves 0.8 to 1.2

**Defaults** follow the weaker of the two sides' dtypes. For fp32: what other kernels, summation orders and packing change
(measured here: up to 5e-6 for a tiny model), times 20. For bf16 and fp16: what a change of kernels changes at single tokens of
real models. Within them, a difference is unsuspicious, not proven harmless: the truth and a noise floor say more.

**User thresholds** are typed as options (`asked`); `inf` disables a measure.

**A verdict** (`judge`). A measure above its threshold is outside. It is a mismatch if it is also above the noise floor of that
dump (or of all dumps, if that dump has none), else `within-noise`. A measure without a threshold is not checked. A
value that is not finite, or zero, on one side only is always a mismatch. A measure above the noise floor and within
its threshold stays a match and is listed: thresholds are what a user accepts, the noise floor is what noise explains.

Example::

    applied = applied_to("bf16", asked({"max_abs": 0.2, "mean_abs": None}))
    applied.limits["max_abs"], applied.source
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from actordbg.base.errors import UsageError
from actordbg.records.comparison_record import MATCH, MISMATCH, WITHIN_NOISE, DumpComparison

MEASURES: dict[str, str] = {
    "max_abs": "largest difference of a log-prob, nats",
    "p99_abs": "99th percentile of the differences, nats",
    "mean_abs": "mean difference, nats",
    "clip_share": "share of tokens whose ratio is outside 0.8 to 1.2",
    "entropy_max_abs": "largest difference of an entropy, nats",
    "loss_abs": "difference of the losses",
    "grad_norm_rel": "relative difference of the gradient norms",
    "gradient_distance": "|a - b| / |b| of all kept gradients",
    "parameter_distance": "the largest |a - b| / |b| of a single parameter's gradient",
}
"""Every measure, in words."""

STRENGTH = ("bf16", "fp16", "fp32", "fp64")
"""dtypes, the weakest first."""

DEFAULTS: dict[str, dict[str, float]] = {
    dtype: dict(zip(MEASURES, limits, strict=True))
    for dtype, limits in {
        # max_abs, p99_abs, mean_abs, clip_share, entropy_max_abs, loss_abs, grad_norm_rel, gradient_distance, parameter_distance
        "fp64": (2e-5, 1e-5, 2e-6, 0.0, 2e-5, 2e-6, 1e-5, 1e-5, 1e-4),
        "fp32": (1e-4, 5e-5, 1e-5, 0.0, 1e-4, 1e-5, 1e-3, 1e-3, 1e-2),
        "fp16": (0.1, 0.05, 0.005, 0.005, 0.1, 0.005, 0.02, 0.05, 0.2),
        "bf16": (0.5, 0.25, 0.03, 0.02, 0.5, 0.02, 0.05, 0.2, 0.5),
    }.items()
}
"""By the weaker dtype. The fp64 limits allow for kept tensors, which are float32."""

UNKNOWN = "bf16"
"""The dtype whose defaults an unknown dtype gets."""


@dataclass(frozen=True)
class Applied:
    """The thresholds of one comparison by measure, and their source in words. A measure without a threshold is not checked.

    dtype: the dtype whose defaults apply. own: measures whose threshold the user set.
    """

    limits: dict[str, float]
    source: str
    dtype: str = "fp32"
    own: frozenset[str] = frozenset()


def asked(options: Mapping[str, float | None]) -> dict[str, float]:
    """Return the thresholds that were typed as options (None: not typed). UsageError for a negative one and for NaN."""
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(given.keys() - MEASURES):
        raise UsageError(f"there is no measure {unknown[0]!r:.40}", hint=f"use one of {', '.join(MEASURES)}")
    for name, value in given.items():
        if not isinstance(value, int | float):
            raise UsageError(f"{name} {value!r:.40} is not a threshold", hint="pass a number >= 0, or inf to disable the check")
        if not value >= 0:
            typed = f"--{name.replace('_', '-')} {value:g}"
            raise UsageError(f"{typed} is not a threshold", hint="pass a number >= 0, or inf to disable the check")
    return given


def applied_to(dtype: str | None, own: Mapping[str, float]) -> Applied:
    """Return the thresholds for `dtype`, the weaker of the two sides (None: unknown). own: thresholds that the user set."""
    name = dtype if dtype in DEFAULTS else UNKNOWN
    parts = []
    if DEFAULTS[name].keys() - own.keys():
        shown = dtype or "unknown"
        parts.append(f"defaults for {name}" + ("" if dtype in DEFAULTS else f" (the dtype is {shown})"))
    if own:
        parts.append(f"{', '.join(sorted(own))} from flags")
    finite = {measure: value for measure, value in {**DEFAULTS[name], **own}.items() if math.isfinite(value)}
    return Applied(finite, "; ".join(parts), name, frozenset(own))


def weaker(dtypes: Iterable[str | None]) -> str | None:
    """Return the weakest of the known dtypes; None if none is known. An unlisted dtype (float8) counts as the weakest."""
    known = [dtype for dtype in dtypes if dtype is not None]
    return min(known, key=lambda dtype: STRENGTH.index(dtype) if dtype in STRENGTH else -1, default=None)


_FIGURES = {
    "entropy_max_abs": ("entropy", "max_abs"),
    "gradient_distance": ("gradients", "distance"),
}
"""Measures that are not figures of log-probs."""


def measures(dump: DumpComparison) -> dict[str, float]:
    """Return the measures of one compared dump, without those that were not measured."""
    measured = {}
    for name in MEASURES:
        part, figure = _FIGURES.get(name, ("log_probs", name))
        value = getattr(dump if hasattr(dump, name) else getattr(dump, part), figure, None)
        if value is not None:
            measured[name] = float(value)
    return measured


_QUANTITIES = {"entropy": "entropies", "loss": "the loss", "grad": "gradients", "parameter": "gradients"}
"""What a measure is of, by a part of its name; else of log-probs."""


def judge(dump: DumpComparison, limits: Mapping[str, float], floor: Mapping[str, float]) -> tuple[DumpComparison, float]:
    """Return the dump with verdict and reasons, and its severity: the largest measure / threshold (1: exactly at the threshold).

    Reasons that the dump already has are mismatches under any thresholds. One more says which measure is furthest above its
    threshold, and which other quantities are above theirs. A measure above a threshold of 0 counts as just outside, so that it
    does not hide others. A share of one token is not checked: `max_abs` judges a single token.
    """
    values, severity = measures(dump), math.inf if dump.reasons else 0.0
    real: list[tuple[float, str, str, str]] = []
    outside, beyond = list(real), []
    tokens = dump.log_probs  # a token that is finite on one side only has a separate reason
    alone = tokens is not None and round((tokens.clip_share or 0.0) * tokens.count) - tokens.nonfinite <= 1
    for name, limit in limits.items():
        value, noise = values.get(name), floor.get(name)
        if value is None or (name == "clip_share" and alone):
            continue
        times = value / limit if limit else value and 1.0 + value
        severity = max(severity, times)
        covered = noise is not None and value <= noise
        if value > limit:
            within = ", within" if covered else " and"
            against = "" if noise is None else f"{within} the noise {noise:.3g}"
            quantity = next((of for part, of in _QUANTITIES.items() if part in name), "log-probs")
            parameter = f" ({dump.worst_parameter})" if quantity == "gradients" and dump.worst_parameter else ""
            outside.append((times, f"{name} {value:.4g} is above {limit:.4g}{against}{parameter}", quantity + parameter, name))
            real += [] if covered else outside[-1:]
        elif noise is not None and not covered:
            beyond.append(f"{name} {value:.4g} (noise {noise:.3g})")
    verdict = MISMATCH if real or dump.reasons else WITHIN_NOISE if outside else MATCH
    reasons = dump.reasons
    if above := sorted(real or ([] if reasons else outside), reverse=True):
        *others, last = dict.fromkeys(quantity for _, _, quantity, _ in above)
        all_of = f"; {', '.join(others)} and {last} are above their limits" if others else ""
        reasons = (*reasons, above[0][1] + all_of)
    measured = tuple(name for *_, name in above) if real and not dump.reasons else ()
    return replace(dump, verdict=verdict, reasons=reasons, beyond_noise=tuple(beyond), above=measured), severity


Floors = Mapping[str, Mapping[str, float]]
"""The noise floor by dump and measure."""
