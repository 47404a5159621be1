"""How far two sides may be apart before it is called a mismatch: defaults by dtype, a TOML file, flags.

A *measure* is one number of a comparison of one dump; the larger, the worse. Thresholds and noise floors are both by the
names of measures::

    max_abs 0.31        the largest difference of a log-prob, nats
    clip_share 0.02     the share of tokens whose ratio leaves 0.8 to 1.2

The weaker of both sides' dtypes decides which defaults apply. fp32's are the differences that other kernels, other orders
of summation and packing make (measured here: up to 5e-6 for a tiny model) with a margin of 20; bf16's and fp16's are what real
models move by at single tokens when kernels change. They say "nobody would look at this", not "this is right": the truth
and a noise floor say more (`actordbg compare A truth --noise last`).

A file has measures at the top level, for every dtype, and below a dtype's name, for that one. `-` and `_` are the same;
`inf` switches a measure off::

    mean-abs = 0.01

    [bf16]
    max-abs = 0.3
    clip-share = inf

Example::

    applied = Thresholds.from_file(path).override({"max_abs": 0.2}, "flags").for_dtype("bf16")
    applied.limits["max_abs"], applied.source
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.base.errors import UsageError
from actordbg.formats.comparison_record import DumpComparison

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
}
"""Every measure that a threshold may be set on."""

FLAGS = "flags"
"""The source of thresholds that were typed as options."""

STRENGTH = ("bf16", "fp16", "fp32", "fp64")
"""dtypes, the weakest first."""

DEFAULTS: dict[str, dict[str, float]] = {
    "fp64": {
        "max_abs": 2e-5, "p99_abs": 1e-5, "mean_abs": 2e-6, "clip_share": 0.0, "entropy_max_abs": 2e-5, "loss_abs": 2e-6,
        "grad_norm_rel": 1e-5, "gradient_distance": 1e-5,
    },
    "fp32": {
        "max_abs": 1e-4, "p99_abs": 5e-5, "mean_abs": 1e-5, "clip_share": 0.0, "entropy_max_abs": 1e-4, "loss_abs": 1e-5,
        "grad_norm_rel": 1e-3, "gradient_distance": 1e-3,
    },
    "fp16": {
        "max_abs": 0.1, "p99_abs": 0.05, "mean_abs": 0.005, "clip_share": 0.005, "entropy_max_abs": 0.1, "loss_abs": 0.005,
        "grad_norm_rel": 0.02, "gradient_distance": 0.05,
    },
    "bf16": {
        "max_abs": 0.5, "p99_abs": 0.25, "mean_abs": 0.03, "clip_share": 0.02, "entropy_max_abs": 0.5, "loss_abs": 0.02,
        "grad_norm_rel": 0.05, "gradient_distance": 0.2,
    },
}  # fmt: skip
"""By the weaker dtype. fp64's end where kept tensors do: they are float32."""

UNKNOWN = "bf16"
"""What an unknown dtype is taken for."""


@dataclass(frozen=True)
class Applied:
    """The thresholds of one comparison, by measure, and where they are from in words. A measure without one is not judged."""

    limits: dict[str, float]
    source: str


@dataclass(frozen=True)
class Thresholds:
    """What was asked for beside the defaults: (where from, value) by measure, for every dtype (`any`) and for single ones."""

    any: dict[str, tuple[str, float]] = field(default_factory=dict)
    by_dtype: dict[str, dict[str, tuple[str, float]]] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: Path) -> Thresholds:
        """Read a TOML file. UsageError for one that cannot be read, unknown names and values that are no thresholds."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}", hint="name a TOML file") from None
        except ValueError as error:
            raise UsageError(f"{path} is not TOML: {error}", hint='it has lines like "max-abs = 0.2"') from None
        tables = {key: value for key, value in data.items() if isinstance(value, dict)}
        plain = {key: value for key, value in data.items() if key not in tables}
        unknown = sorted(set(tables) - set(STRENGTH))
        if unknown:
            raise UsageError(f"{path}: [{unknown[0]}] is not a dtype", hint=f"known: {', '.join(STRENGTH)}")
        return cls(
            _checked(plain, str(path)), {name: _checked(table, str(path), name) for name, table in tables.items()}
        )

    def override(self, values: Mapping[str, Any], source: str) -> Thresholds:
        """The same with `values` (None: not given) in front of everything else. UsageError as for a file."""
        given = _checked({name: value for name, value in values.items() if value is not None}, source)
        by_dtype = {
            dtype: {name: pair for name, pair in table.items() if name not in given}
            for dtype, table in self.by_dtype.items()
        }
        return Thresholds(self.any | given, by_dtype)

    def for_dtype(self, dtype: str | None) -> Applied:
        """What applies where `dtype` is the weaker one of the two sides; None: nobody knows it."""
        name = dtype if dtype in DEFAULTS else UNKNOWN
        own = self.any | self.by_dtype.get(name, {})
        limits = DEFAULTS[name] | {measure: value for measure, (_, value) in own.items()}
        base = f"defaults for {name}" + ("" if dtype in DEFAULTS else f" (the dtype is {dtype or 'unknown'})")
        named: dict[str, list[str]] = {}
        for measure, (source, _) in own.items():
            named.setdefault(source, []).append(measure)
        parts = [base] if set(DEFAULTS[name]) - set(own) else []
        parts += [f"{', '.join(sorted(measures))} from {source}" for source, measures in named.items()]
        return Applied({measure: value for measure, value in limits.items() if math.isfinite(value)}, "; ".join(parts))


def weaker(dtypes: Iterable[str | None]) -> str | None:
    """The weakest of the known dtypes; None where none is known. One that is not listed (float8) is weaker than all."""
    known = [dtype for dtype in dtypes if dtype is not None]
    return min(known, key=lambda dtype: STRENGTH.index(dtype) if dtype in STRENGTH else -1, default=None)


def measures(dump: DumpComparison) -> dict[str, float]:
    """The measures of one compared dump: what thresholds and noise floors are about. What was not measured is left out."""
    parts = {
        "max_abs": (dump.log_probs, "max_abs"),
        "p99_abs": (dump.log_probs, "p99_abs"),
        "mean_abs": (dump.log_probs, "mean_abs"),
        "clip_share": (dump.log_probs, "clip_share"),
        "sequence_max_abs": (dump.sequences, "max_abs"),
        "max_ulp": (dump.log_probs, "max_ulp"),
        "entropy_max_abs": (dump.entropy, "max_abs"),
        "gradient_distance": (dump.gradients, "distance"),
    }
    values = {name: getattr(figures, figure) for name, (figures, figure) in parts.items() if figures is not None}
    values |= {"loss_abs": dump.loss_abs, "grad_norm_rel": dump.grad_norm_rel}
    return {name: float(value) for name, value in values.items() if value is not None}


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
