"""How far two sides may be apart before it is called a mismatch, and the verdict of one dump.

A *measure* is one number of the comparison of one dump; larger is worse. Thresholds and noise floors use the same names::

    max_abs 0.31        the largest difference of a log-prob, nats
    clip_share 0.02     the share of tokens whose ratio leaves 0.8 to 1.2

**Defaults** follow the weaker of both sides' dtypes. fp32's are what other kernels, summation orders and packing move (measured
here: up to 5e-6 for a tiny model) with a margin of 20. bf16's and fp16's are what real models move at single tokens when
kernels change. They say "nobody would look at this", not "this is right": the truth and a noise floor say more.

**A file** has measures at the top level for every dtype, and under a dtype's name for that one. `-` and `_` are the same;
`inf` switches a measure off::

    mean-abs = 0.01

    [bf16]
    max-abs = 0.3
    clip-share = inf

**A verdict** (`judge`). A measure above its threshold is outside. It is a mismatch if it is also above the noise floor of that
dump (of all dumps together where that dump has none), else `within-noise`. A measure without a threshold is not judged. A
value that is not finite, or zero, on one side only is always a mismatch. A measure above the floor and within its
threshold stays a match and is named: thresholds are what a user accepts, the floor is what noise explains.

Example::

    applied = Thresholds.from_file(path).override({"max_abs": 0.2}, "flags").for_dtype("bf16")
    applied.limits["max_abs"], applied.source
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actordbg.base.errors import UsageError
from actordbg.config.sources import parse_toml
from actordbg.formats.store_files import read_regular
from actordbg.records.comparison_record import MATCH, MISMATCH, WITHIN_NOISE, DumpComparison, NoiseRecord

MEASURES: dict[str, str] = {
    "max_abs": "largest difference of a log-prob, nats",
    "p99_abs": "99th percentile of the differences, nats",
    "mean_abs": "mean difference, nats",
    "clip_share": "share of tokens whose ratio is outside 0.8 to 1.2",
    "sequence_max_abs": "largest difference of a row's sum of log-probs, nats (no default)",
    "max_ulp": "largest difference of a log-prob in units of last place (no default)",
    "entropy_max_abs": "largest difference of an entropy, nats",
    "loss_abs": "difference of the losses",
    "grad_norm_rel": "relative difference of the gradient norms",
    "gradient_distance": "|a - b| / |b| of all kept gradients",
    "parameter_distance": "the largest |a - b| / |b| of a single parameter's gradient",
}
"""Every measure that a threshold may be set on."""

FLAGS = "flags"
"""The source of thresholds that were typed as options."""

STRENGTH = ("bf16", "fp16", "fp32", "fp64")
"""dtypes, the weakest first."""

DEFAULTS: dict[str, dict[str, float]] = {
    dtype: dict(zip([name for name in MEASURES if name not in ("sequence_max_abs", "max_ulp")], limits, strict=True))
    for dtype, limits in {
        # max_abs, p99_abs, mean_abs, clip_share, entropy_max_abs, loss_abs, grad_norm_rel, gradient_distance, parameter_distance
        "fp64": (2e-5, 1e-5, 2e-6, 0.0, 2e-5, 2e-6, 1e-5, 1e-5, 1e-4),
        "fp32": (1e-4, 5e-5, 1e-5, 0.0, 1e-4, 1e-5, 1e-3, 1e-3, 1e-2),
        "fp16": (0.1, 0.05, 0.005, 0.005, 0.1, 0.005, 0.02, 0.05, 0.2),
        "bf16": (0.5, 0.25, 0.03, 0.02, 0.5, 0.02, 0.05, 0.2, 0.5),
    }.items()
}
"""By the weaker dtype. fp64's end where kept tensors do: they are float32."""

UNKNOWN = "bf16"
"""What an unknown dtype is taken for."""


@dataclass(frozen=True)
class Applied:
    """The thresholds of one comparison by measure, and their source in words. A measure without a threshold is not judged.

    dtype: whose defaults they are. own: measures that somebody set a threshold on.
    """

    limits: dict[str, float]
    source: str
    dtype: str = "fp32"
    own: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Thresholds:
    """Thresholds that were asked for: (source, value) by measure, for every dtype (`any`) and for single dtypes."""

    any: dict[str, tuple[str, float]] = field(default_factory=dict)
    by_dtype: dict[str, dict[str, tuple[str, float]]] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: Path) -> Thresholds:
        """Read a TOML file. UsageError for an unreadable file, unknown names and values that are no thresholds."""
        try:
            data = parse_toml(read_regular(path.resolve()).decode())
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}", hint="name a TOML file") from None
        except ValueError as error:
            raise UsageError(f"{path} is not TOML: {error}", hint='it has lines like "max-abs = 0.2"') from None
        tables = {key: value for key, value in data.items() if isinstance(value, dict)}
        plain = {key: value for key, value in data.items() if key not in tables}
        unknown = sorted(set(tables) - set(STRENGTH))
        if unknown:
            raise UsageError(f"{path}: [{unknown[0]}] is not a dtype", hint=f"known: {', '.join(STRENGTH)}")
        return cls(_checked(plain, str(path)), {name: _checked(table, str(path), name) for name, table in tables.items()})

    def override(self, values: Mapping[str, Any], source: str) -> Thresholds:
        """The same, overridden by `values` (None: not given). UsageError as for a file."""
        given = _checked({name: value for name, value in values.items() if value is not None}, source)
        by_dtype = {
            dtype: {name: pair for name, pair in table.items() if name not in given} for dtype, table in self.by_dtype.items()
        }
        return Thresholds(self.any | given, by_dtype)

    def for_dtype(self, dtype: str | None) -> Applied:
        """The thresholds if `dtype` is the weaker one of the two sides; None: unknown."""
        name = dtype if dtype in DEFAULTS else UNKNOWN
        own = self.any | self.by_dtype.get(name, {})
        limits = DEFAULTS[name] | {measure: value for measure, (_, value) in own.items()}
        base = f"defaults for {name}" + ("" if dtype in DEFAULTS else f" (the dtype is {dtype or 'unknown'})")
        named: dict[str, list[str]] = {}
        for measure, (source, _) in own.items():
            named.setdefault(source, []).append(measure)
        parts = [base] if set(DEFAULTS[name]) - set(own) else []
        parts += [f"{', '.join(sorted(measures))} from {source}" for source, measures in named.items()]
        finite = {measure: value for measure, value in limits.items() if math.isfinite(value)}
        return Applied(finite, "; ".join(parts), name, frozenset(own))


def weaker(dtypes: Iterable[str | None]) -> str | None:
    """The weakest of the known dtypes; None if none is known. A dtype that is not listed (float8) counts as the weakest."""
    known = [dtype for dtype in dtypes if dtype is not None]
    return min(known, key=lambda dtype: STRENGTH.index(dtype) if dtype in STRENGTH else -1, default=None)


def measures(dump: DumpComparison) -> dict[str, float]:
    """The measures of one compared dump. What was not measured is left out."""
    values: dict[str, Any] = {
        name: getattr(dump.log_probs, name, None) for name in ("max_abs", "p99_abs", "mean_abs", "clip_share", "max_ulp")
    }
    values |= {name: getattr(dump, name) for name in ("loss_abs", "grad_norm_rel", "parameter_distance")}
    for name, figures in (("sequence_max_abs", dump.sequences), ("entropy_max_abs", dump.entropy)):
        values[name] = figures and figures.max_abs
    values["gradient_distance"] = dump.gradients and dump.gradients.distance
    return {name: float(value) for name in MEASURES if (value := values[name]) is not None}


def _checked(values: Mapping[str, Any], source: str, table: str = "") -> dict[str, tuple[str, float]]:
    found = {}
    place = f"{source}: [{table}]" if table else f"{source}:"
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in MEASURES:
            raise UsageError(
                f"{place} {key} is not a threshold",
                hint=f"known: {', '.join(one.replace('_', '-') for one in MEASURES)}",
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            typed = f"--{name.replace('_', '-')} {value:g}" if source == FLAGS else f"{place} {key} = {value}"
            raise UsageError(f"{typed} is no threshold", hint="a number, 0 or larger; inf: not judged")
        found[name] = (source, float(value))
    return found


def judge(
    dump: DumpComparison, limits: Mapping[str, float], floor: Mapping[str, float], broken: Sequence[str] = ()
) -> tuple[DumpComparison, float]:
    """The compared dump with its verdict and reasons, and its largest measure in units of its threshold (1: just at it).

    `broken`: what is a mismatch under any thresholds, in words.
    """
    values = measures(dump)
    counted = [name for name in limits if name in values and not _one_token(dump, name)]
    outside = [name for name in counted if values[name] > limits[name]]
    real = [name for name in outside if not values[name] <= floor.get(name, -1.0)]
    beyond = tuple(
        f"{name} {values[name]:.4g} (noise {floor[name]:.3g})"
        for name in counted
        if name in floor and name not in outside and values[name] > floor[name]
    )
    severity = max((_times(values[name], limits[name]) for name in counted), default=0.0)
    said = {name: _said(name, values[name], limits[name], floor.get(name)) for name in outside}
    if broken or real:
        if "parameter_distance" in real and dump.worst_parameter:
            said["parameter_distance"] += f" ({dump.worst_parameter})"
        verdict, reasons = MISMATCH, (*broken, *(said[name] for name in real))
        severity = math.inf if broken else severity
    else:
        verdict, reasons = WITHIN_NOISE if outside else MATCH, tuple(said.values())
    return replace(dump, verdict=verdict, reasons=reasons, beyond_noise=beyond), severity


class Floors:
    """The noise floor of each dump by measure: its own, else the one over all dumps; empty without a record."""

    def __init__(self, noise: NoiseRecord | None) -> None:
        self._all = noise.floor if noise else {}
        self._own = {one.dump_id: one.floor for one in noise.dumps} if noise else {}

    def of(self, dump_id: str) -> Mapping[str, float]:
        """The floor of one dump."""
        return self._own.get(dump_id, self._all)


def _one_token(dump: DumpComparison, name: str) -> bool:
    """Whether a share counts one token only. `max_abs` judges a single token, however short the input is.

    Tokens that are finite on one side only have a reason of their own.
    """
    tokens = dump.log_probs
    if name != "clip_share" or tokens is None:
        return False
    return round((tokens.clip_share or 0.0) * tokens.count) - tokens.nonfinite <= 1


def _times(value: float, limit: float) -> float:
    """How many times a value is above its threshold. Above a threshold of 0 it is just outside, so it hides no other."""
    if value <= 0:
        return 0.0
    return value / limit if limit else 1.0 + value


def _said(name: str, value: float, limit: float, floor: float | None) -> str:
    against = "" if floor is None else f" and the noise {floor:.3g}" if value > floor else f", within the noise {floor:.3g}"
    return f"{name} {value:.4g} is above {limit:.4g}{against}"
