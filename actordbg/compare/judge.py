"""From figures to a verdict: thresholds first, then the noise floor.

A measure is outside if it is above its threshold, and the difference is *real* if it is above the floor of that dump too (of all
dumps together where that dump was not measured). What is not finite on one side only, or not defined because one side is
zero, is a mismatch whatever the thresholds say. A measure without a threshold is not judged. What is above the floor and
yet within its threshold stays a match, and is named: thresholds are what a user accepts, the floor what noise explains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actordbg.compare.thresholds import measures
from actordbg.formats.comparison_record import MATCH, MISMATCH, WITHIN_NOISE, DumpComparison
from actordbg.formats.noise_record import NoiseRecord


@dataclass(frozen=True)
class Judgement:
    """A verdict, its reasons, and how many times the largest measure is above its threshold (1: just at it).

    `beyond`: measures above the floor though within their thresholds, in words.
    """

    verdict: str
    reasons: tuple[str, ...]
    severity: float
    beyond: tuple[str, ...] = ()


def judge(
    dump: DumpComparison, limits: Mapping[str, float], floor: Mapping[str, float], broken: Sequence[str] = ()
) -> Judgement:
    """The verdict of one compared dump. `broken`: what is a mismatch whatever the thresholds say, in words."""
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
    reasons = (*broken, *(_said(name, values[name], limits[name], floor.get(name)) for name in real))
    if reasons:
        return Judgement(MISMATCH, reasons, float("inf") if broken else severity, beyond)
    said = tuple(_said(name, values[name], limits[name], floor.get(name)) for name in outside)
    return Judgement(WITHIN_NOISE if outside else MATCH, said, severity, beyond)


class Floors:
    """The noise floor that counts for each dump, by measure: its own, else the one over all; nothing without a record."""

    def __init__(self, noise: NoiseRecord | None) -> None:
        self._all = noise.floor if noise else {}
        self._own = {one.dump_id: one.floor for one in noise.dumps} if noise else {}

    def of(self, dump_id: str) -> Mapping[str, float]:
        """The floor of one dump."""
        return self._own.get(dump_id, self._all)


def _one_token(dump: DumpComparison, name: str) -> bool:
    """A share of tokens is about many: a single one outside the band is `max_abs`'s business, however short the input is.

    Tokens that are not finite on one side only have a reason of their own.
    """
    tokens = dump.log_probs
    if name != "clip_share" or tokens is None:
        return False
    return round((tokens.clip_share or 0.0) * tokens.count) - tokens.nonfinite <= 1


def _times(value: float, limit: float) -> float:
    """How many times a value is above its threshold. Above 0 by anything is just outside: it must not hide the others."""
    if value <= 0:
        return 0.0
    return value / limit if limit else 1.0 + value


def _said(name: str, value: float, limit: float, floor: float | None) -> str:
    against = (
        "" if floor is None else f" and the noise {floor:.3g}" if value > floor else f", within the noise {floor:.3g}"
    )
    return f"{name} {value:.4g} is above {limit:.4g}{against}"
