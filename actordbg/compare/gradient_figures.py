"""Kept gradients of two replays of one dump, parameter by parameter: figures of each, and of all together.

A file holds `grad/<parameter>` (float32, 1-D): the whole flattened gradient of a small parameter, of a large one the
elements at `floor(i * numel / GRADIENT_SAMPLE)`; its metadata `gradients` says the number of elements and the norm of the whole.
One parameter of both sides is in memory at a time, and one float32 difference for each kept element.

`distance` of all together is of the whole gradients: a sampled parameter counts by its number of elements, not of samples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import SafetensorError
from torch import Tensor

from actordbg.compare.tensor_figures import figures, spread_of
from actordbg.formats.comparison_record import Figures, ParameterFigures
from actordbg.formats.dumpfile import DEFAULT_CAP
from actordbg.store.layout import known_regular

PREFIX = "grad/"


@dataclass(frozen=True)
class GradientFigures:
    """`together`: all kept gradients. `worst`: single parameters, the worst first. `nonfinite`: parameters that are finite on
    one side only. `not_compared`: by what, why.
    """

    together: Figures | None
    worst: tuple[ParameterFigures, ...] = ()
    not_compared: dict[str, str] = field(default_factory=dict)
    nonfinite: tuple[str, ...] = ()


def compare_gradients(a: Path, b: Path, *, count: int) -> GradientFigures:
    """The gradients in two files, and the `count` worst parameters by |a - b| / |b|."""
    try:
        with _opened(a) as ours, _opened(b) as theirs:
            return _compare(ours, theirs, count)
    except (SafetensorError, OSError, ValueError) as error:
        return GradientFigures(None, not_compared={"gradients": f"the kept tensors cannot be read ({error})"})


@dataclass
class _KeptGradients:
    handle: Any
    names: set[str]
    sizes: dict[str, int]

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self.handle.get_tensor(PREFIX + name)
        return tensor

    def numel(self, name: str, kept: Tensor) -> int:
        return self.sizes.get(name, kept.numel())


@contextmanager
def _opened(path: Path) -> Iterator[_KeptGradients]:
    with safetensors.safe_open(known_regular(path, DEFAULT_CAP), framework="pt") as handle:
        names = {key.removeprefix(PREFIX) for key in handle.keys() if key.startswith(PREFIX)}  # noqa: SIM118
        said = json.loads((handle.metadata() or {}).get("gradients", "{}"))
        sizes = {name: int(one["numel"]) for name, one in said.items()} if isinstance(said, dict) else {}
        yield _KeptGradients(handle, names, sizes)


def _compare(a: _KeptGradients, b: _KeptGradients, count: int) -> GradientFigures:
    sums = _Sums()
    each: list[ParameterFigures] = []
    unlike: list[str] = []
    for name in sorted(a.names & b.names):
        ours, theirs = a.read(name), b.read(name)
        numel = a.numel(name, ours)
        if ours.shape != theirs.shape or numel != b.numel(name, theirs):
            unlike.append(name)
            continue
        found = figures(ours, theirs)
        each.append(ParameterFigures(name, found, sampled=numel > ours.numel()))
        if not found.nonfinite:
            sums.add(ours, theirs, numel)
    not_compared = _left_out("only A has it", a.names - b.names) | _left_out("only B has it", b.names - a.names)
    not_compared |= _left_out("another size on each side", set(unlike))
    nonfinite = tuple(one.name for one in each if one.figures.nonfinite)
    together = replace(sums.figures(), nonfinite=sum(one.figures.nonfinite for one in each)) if each else None
    worst = sorted((one for one in each if _badness(one) > 0), key=lambda one: (-_badness(one), one.name))
    return GradientFigures(together, tuple(worst[:count]), not_compared, nonfinite)


def _left_out(why: str, names: set[str]) -> dict[str, str]:
    if not names:
        return {}
    first = min(names)
    what = f"gradient of {first}" if len(names) == 1 else f"gradients of {len(names)} parameters, e.g. {first}"
    return {what: why}


def _badness(one: ParameterFigures) -> float:
    """0 for equal gradients; infinite if finite on one side only, or if only B's is zero."""
    return math.inf if one.figures.distance is None else one.figures.distance


class _Sums:
    """Sums and differences over parameters, from which the figures of all parameters together are made."""

    def __init__(self) -> None:
        self._count = 0
        self._products = torch.zeros(4, dtype=torch.float64)
        self._absolute: list[Tensor] = []
        self._relative: list[Tensor] = []

    def add(self, a: Tensor, b: Tensor, numel: int) -> None:
        """Take in one parameter that is finite on both sides, or equal. `numel`: elements of the whole parameter."""
        ours, theirs = a.double(), b.double()
        both = ours.isfinite()
        ours, theirs = ours[both], theirs[both]
        if not a.numel() or not ours.numel():
            return
        difference = ours - theirs
        weight = numel / a.numel()
        self._products += weight * torch.stack([ours @ ours, theirs @ theirs, ours @ theirs, difference @ difference])
        self._count += a.numel()
        self._absolute.append(difference.abs().float())
        known = theirs != 0
        self._relative.append((difference[known] / theirs[known]).abs().float())

    def figures(self) -> Figures:
        if not self._count:
            return Figures(0)
        ours, theirs, product, difference = self._products.tolist()
        norms = math.sqrt(ours) * math.sqrt(theirs)
        return Figures(
            count=self._count,
            **spread_of("abs", torch.cat(self._absolute)),
            **spread_of("rel", torch.cat(self._relative)),
            cosine=1.0 if difference == 0 else max(-1.0, min(1.0, product / norms)) if norms else None,
            distance=0.0 if difference == 0 else math.sqrt(difference / theirs) if theirs else None,
        )
