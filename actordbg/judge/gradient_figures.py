"""Kept gradients of two replays of one dump, parameter by parameter: figures of each, and of all together.

A file holds `grad/<parameter>` (float32, 1-D): the whole flattened gradient of a small parameter, of a large one the
elements at `floor(i * numel / GRADIENT_SAMPLE)`; its metadata `gradients` says the number of elements and the norm of the whole.
One parameter of both sides is in memory at a time, and one float32 difference for each kept element.

`distance` of all together is of the whole gradients: a sampled parameter counts by its number of elements, not of samples.

**Averages.** Lanes that compute together average their gradients, so a side's gradient of one dump may be over several. The mean
of samples is the sample of the mean. So a side whose gradients are each over one dump gives any such average from its files.

**Single parameters** are judged too (`parameter_distance`): a parameter without a gradient moves the distance of all together by
less than rounding does. It is |a - b| of one parameter by |b|, or by what |b| would be if its elements had `SMALL` times the
root mean square of all elements, where that is more. Some gradients are zero in exact arithmetic (GPT-2's key biases), and what
is there is rounding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors import SafetensorError

from actordbg.formats.dumpfile import DEFAULT_CAP
from actordbg.formats.encoding import Array
from actordbg.judge.tensor_figures import figures, finite_on_one_side, spread_of
from actordbg.records.comparison_record import Figures, ParameterFigures
from actordbg.store.layout import known_regular

PREFIX = "grad/"
SMALL = {"bf16": 0.05, "fp16": 0.01}
"""By dtype, the share of the root mean square of all elements under which a parameter's gradient is mostly rounding."""
SMALL_ELSE = 1e-3


@dataclass(frozen=True)
class GradientFigures:
    """`together`: all kept gradients. `worst`: single parameters, the worst first. `nonfinite`: parameters that are finite on
    one side only. `missing`: those that only B has a gradient of, and not zero. `not_compared`: by what, why.
    `distances`: of each parameter. `norm_b`: of B's whole gradient; None where only samples of it were kept.
    """

    together: Figures | None
    worst: tuple[ParameterFigures, ...] = ()
    not_compared: dict[str, str] = field(default_factory=dict)
    nonfinite: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    distances: dict[str, float] = field(default_factory=dict)
    norm_b: float | None = None


def compare_gradients(a: Sequence[Path], b: Sequence[Path], *, count: int, dtype: str | None = None) -> GradientFigures:
    """The mean of the gradients in the files `a` against the mean of those in `b`, and the `count` worst parameters by
    |a - b| / |b|. `dtype`: the weaker one of both sides.
    """
    try:
        with _opened(a) as ours, _opened(b) as theirs:
            return _compare(ours, theirs, count, SMALL.get(dtype or "", SMALL_ELSE))
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        return GradientFigures(None, not_compared={"gradients": f"the kept tensors cannot be read ({error})"})


@dataclass
class _KeptGradients:
    handles: list[Any]
    names: set[str]
    sizes: dict[str, int]

    def read(self, name: str) -> Array:
        """The mean over the files, float32 (of one file: its own tensor)."""
        first: Array = self.handles[0].get_tensor(PREFIX + name)
        if len(self.handles) == 1:
            return first
        total = first.astype(np.float64)
        for handle in self.handles[1:]:
            total += handle.get_tensor(PREFIX + name)
        mean: Array = (total / len(self.handles)).astype(np.float32)
        return mean

    def numel(self, name: str, kept: Array) -> int:
        return self.sizes.get(name, kept.size)


@contextmanager
def _opened(paths: Sequence[Path]) -> Iterator[_KeptGradients]:
    with ExitStack() as opened:
        handles = [
            opened.enter_context(safetensors.safe_open(known_regular(path, DEFAULT_CAP), framework="np")) for path in paths
        ]
        names = [{key.removeprefix(PREFIX) for key in one.keys() if key.startswith(PREFIX)} for one in handles]  # noqa: SIM118
        said = json.loads((handles[0].metadata() or {}).get("gradients", "{}"))
        sizes = {name: int(one["numel"]) for name, one in said.items()} if isinstance(said, dict) else {}
        yield _KeptGradients(handles, set.intersection(*names), sizes)


def _compare(a: _KeptGradients, b: _KeptGradients, count: int, small: float) -> GradientFigures:
    sums = _Sums()
    apart: dict[str, tuple[float, float, int]] = {}
    badness: dict[str, float] = {}
    nonfinite: dict[str, int] = {}
    sampled: set[str] = set()
    unlike: set[str] = set()
    for name in sorted(a.names & b.names):
        ours, theirs = a.read(name), b.read(name)
        numel = a.numel(name, ours)
        if ours.shape != theirs.shape or numel != b.numel(name, theirs):
            unlike.add(name)
            continue
        if numel > ours.size:
            sampled.add(name)
        if odd := finite_on_one_side(ours, theirs):
            nonfinite[name], badness[name] = odd, math.inf
            continue
        apart[name] = difference, norm, _ = sums.add(ours, theirs, numel)
        badness[name] = difference and (difference / norm if norm else math.inf)
    not_compared = _left_out("only A has it", a.names - b.names) | _left_out("only B has it", b.names - a.names)
    not_compared |= _left_out("another size on each side", unlike)
    missing = tuple(name for name in sorted(b.names - a.names) if badness and float(np.abs(b.read(name)).max(initial=0)) > 0)
    together = replace(sums.figures(), nonfinite=sum(nonfinite.values())) if badness else None
    worst = sorted((name for name in badness if badness[name] > 0), key=lambda name: (-badness[name], name))[:count]
    whole = bool(badness) and not sampled and not not_compared
    return GradientFigures(
        together,
        tuple(ParameterFigures(name, figures(a.read(name), b.read(name)), sampled=name in sampled) for name in worst),
        not_compared,
        tuple(nonfinite),
        missing,
        _distances(apart, small),
        sums.norm_b if whole else None,
    )


def _distances(apart: dict[str, tuple[float, float, int]], small: float) -> dict[str, float]:
    """The distance of each parameter. `apart`: |a - b|, |b| and number of elements by name."""
    elements = sum(numel for _, _, numel in apart.values())
    usual = math.sqrt(sum(norm**2 for _, norm, _ in apart.values()) / elements) if elements else 0.0
    found = {}
    for name, (difference, norm, numel) in apart.items():
        scale = max(norm, small * usual * math.sqrt(numel))
        if difference == 0 or scale:
            found[name] = difference / scale if difference else 0.0
    return found


def _left_out(why: str, names: set[str]) -> dict[str, str]:
    if not names:
        return {}
    first = min(names)
    what = f"gradient of {first}" if len(names) == 1 else f"gradients of {len(names)} parameters, e.g. {first}"
    return {what: why}


class _Sums:
    """Sums and differences over parameters, from which the figures of all parameters together are made."""

    def __init__(self) -> None:
        self._count = 0
        self._products = np.zeros(4)
        self._absolute: list[Array] = []
        self._relative: list[Array] = []

    @property
    def norm_b(self) -> float:
        """|b| over all that was taken in."""
        return math.sqrt(float(self._products[1]))

    @np.errstate(all="ignore")
    def add(self, a: Array, b: Array, numel: int) -> tuple[float, float, int]:
        """Take in one parameter that is finite on both sides, or equal. `numel`: elements of the whole parameter.

        Returns |a - b| and |b| of the whole parameter, and `numel`.
        """
        ours, theirs = a.astype(np.float64), b.astype(np.float64)
        both = np.isfinite(ours)
        if not both.all():
            ours, theirs = ours[both], theirs[both]
        if not ours.size:
            return 0.0, 0.0, numel
        difference = ours - theirs
        weight = numel / a.size
        products = weight * np.array([ours @ ours, theirs @ theirs, ours @ theirs, difference @ difference])
        self._products += products
        self._count += a.size
        self._absolute.append(np.abs(difference).astype(np.float32))
        known = theirs != 0
        self._relative.append(np.abs(difference[known] / theirs[known]).astype(np.float32))
        return math.sqrt(float(products[3])), math.sqrt(float(products[1])), numel

    def figures(self) -> Figures:
        if not self._count:
            return Figures(0)
        ours, theirs, product, difference = self._products.tolist()
        norms = math.sqrt(ours) * math.sqrt(theirs)
        return Figures(
            count=self._count,
            **spread_of("abs", np.concatenate(self._absolute)),
            **spread_of("rel", np.concatenate(self._relative)),
            cosine=1.0 if difference == 0 else max(-1.0, min(1.0, product / norms)) if norms else None,
            distance=0.0 if difference == 0 else math.sqrt(difference / theirs) if theirs else None,
        )
