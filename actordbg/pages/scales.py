"""Where a value lies in a static picture: numbers along a line, names in bands; and the ticks that an axis shows."""

from __future__ import annotations

import math
from typing import Any


class Numbers:
    """A linear, log or symlog scale from `start` to `end`."""

    def __init__(self, low: float, high: float, start: float, end: float, kind: str = "linear") -> None:
        self.low, self.high, self.start, self.end, self.kind = low, high if high > low else low + 1.0, start, end, kind
        self.unit = max(abs(low), abs(high), 1e-30) * 1e-3
        if kind == "log":
            self.low = max(low, 1e-30)
            self.high = max(self.high, self.low * 1.0001)

    def place(self, value: Any) -> tuple[float, float]:
        """Where it is drawn; the same twice, since a number has no width."""
        low, high = self._bent(self.low), self._bent(self.high)
        share = (self._bent(float(value)) - low) / (high - low)
        at = self.start + (self.end - self.start) * share
        return at, at

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """(place, text) of a few round values."""
        values = self._powers() if self.kind == "log" else round_values(self.low, self.high, most)
        texts = [f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.4g}" for value in values]
        if len(set(texts)) < len(texts):  # the values differ behind the fourth figure
            texts = [f"{value:.{1 - math.floor(math.log10(values[1] - values[0]))}f}" for value in values]
        return [(self.place(value)[0], text) for value, text in zip(values, texts, strict=True)]

    def _powers(self) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        step = max(1, (last - first) // 6)
        return [10.0**power for power in range(first, last + 1, step) if self.low <= 10.0**power <= self.high]

    def _bent(self, value: float) -> float:
        if self.kind == "log":
            return math.log10(max(value, self.low))
        if self.kind == "symlog":
            return math.copysign(math.log1p(abs(value) / self.unit), value)
        return value


class Bands:
    """Names, each with a band of the same width between `start` and `end`."""

    def __init__(self, known: list[str], start: float, end: float) -> None:
        self.known, self.start, self.width = known, start, (end - start) / max(1, len(known))
        self._at = {name: index for index, name in enumerate(known)}

    def place(self, value: Any) -> tuple[float, float]:
        """The ends of its band."""
        first = self.start + self.width * self._at.get(str(value), 0)
        return first, first + self.width

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """(place, name) of every band, or of some where there are many."""
        every = max(1, math.ceil(len(self.known) / 24))
        return [(sum(self.place(name)) / 2, name) for name in self.known[::every]]


def round_values(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most about `most` of them."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def short(text: str, width: int) -> str:
    """`text` cut in its middle."""
    if len(text) <= width:
        return text
    return f"{text[: width - width // 2 - 1]}…{text[len(text) - width // 2 :]}"
