"""How a tensor's stored bytes are cut into pieces, so that the same row is found again wherever it is padded differently.

A tensor is cut into its rows (dim 0). From each row the padding goes: a run, be it of one, at the beginning or the end, of an
element that often pads this kind of tensor on that side. Trainers pad with the end-of-text token, so a row without padding still
ends in one such element; that it counts as padding is what makes both rows equal in the middle. What is left is the row's core:
one piece, stored once. A row of a few runs (a mask) is just these runs.

    row    0 0 0 0 17 4 8 4 9 9      pieces    (0, 4 times)  (17 4 8 4, once)  (9, 2 times)

Pieces are put together again by repeating and joining, whatever rule made them: the rule may change, the format does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

MIN_ROW = 64
"""Rows of fewer bytes are not worth a reference each."""
MAX_ROWS = 4096
"""A tensor of more rows is cut as a whole."""
MAX_PIECE = 2**20
"""Longer cores are cut into pieces of this many bytes."""

MAX_RUNS = 3
"""A mask: padding, sample, padding."""
MAX_TIMES = 2**31
"""Longer runs are cut, so that their length fits into 32 bits."""

Piece = tuple[bytes, int]
"""Bytes, and how often they are repeated."""


def rows_of(data: bytes, shape: Sequence[int]) -> list[bytes]:
    """The rows (dim 0) of a tensor's bytes; all of it as one if it has fewer than two dimensions, or tiny or too many rows."""
    count = shape[0] if len(shape) > 1 else 1
    if not 1 < count <= MAX_ROWS or len(data) < MIN_ROW * count:
        return [data] if data else []
    size = len(data) // count
    return [data[at : at + size] for at in range(0, len(data), size)]


class Cutter:
    """Cuts the rows of one kind of tensor; learns which elements pad them, on either side, as they come."""

    def __init__(self) -> None:
        self._lead: Counter[bytes] = Counter()
        self._trail: Counter[bytes] = Counter()

    def cut(self, rows: Sequence[bytes], width: int) -> list[list[Piece]]:
        """For each row (of elements of `width` bytes) its pieces."""
        for row in rows:
            for edge, run, element in (
                (self._lead, leading_run(row, width), row[:width]),
                (self._trail, trailing_run(row, width), row[-width:]),
            ):
                if width < run < len(row):
                    edge[element] += run
        lead, trail = (_padding(edge) for edge in (self._lead, self._trail))
        return [few_runs(row, width) or list(_trimmed(row, width, lead, trail)) for row in rows]


def _padding(edge: Counter[bytes]) -> set[bytes]:
    """The elements that make up a good part of all runs on one side. Chance runs of other elements do not."""
    enough = edge.total() / 16
    return {element for element, total in edge.items() if total >= enough}


def few_runs(row: bytes, width: int) -> list[Piece]:
    """The row as runs, as a mask is, if it has at most MAX_RUNS of them; else nothing."""
    runs: list[Piece] = []
    at = 0
    while at < len(row):
        if len(runs) == MAX_RUNS:
            return []
        size = leading_run(row[at:], width)
        runs += _run(row[at : at + width], size // width)
        at += size
    return runs


def _trimmed(row: bytes, width: int, lead: set[bytes], trail: set[bytes]) -> Iterator[Piece]:
    """Padding, core, padding."""
    before = leading_run(row, width) if row[:width] in lead else 0
    after = trailing_run(row, width) if row[-width:] in trail else 0
    yield from _run(row[:width], before // width)
    for at in range(before, len(row) - after, MAX_PIECE):
        yield row[at : min(at + MAX_PIECE, len(row) - after)], 1
    yield from _run(row[-width:], after // width)


def _run(element: bytes, times: int) -> Iterator[Piece]:
    for done in range(0, times, MAX_TIMES):
        yield element, min(times - done, MAX_TIMES)


def leading_run(data: bytes, width: int) -> int:
    """Bytes at the beginning of `data` that repeat its first element of `width` bytes."""
    end, known, step, growing = len(data), min(width, len(data)), width, True
    while known < end:
        upto = min(known + step, end)
        if data[known:upto] == data[known - width : upto - width]:
            known = upto
            step = step * 2 if growing else step
        elif step == width:
            break
        else:
            growing, step = False, step // 2
    return known


def trailing_run(data: bytes, width: int) -> int:
    """Bytes at the end of `data`, which is whole elements, that repeat its last one."""
    return leading_run(data[::-1], width)
