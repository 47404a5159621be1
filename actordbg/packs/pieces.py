"""How a tensor's stored bytes are cut into pieces, so that the same row is found again wherever it is padded differently.

A tensor is cut into its rows (dim 0). From each row the padding goes: a run of one element at the beginning or the end that
is known as padding of this tensor, because some row had it there more than once. OpenRLHF pads with the end-of-text token, so
a row without padding still ends in one such element; that it counts as padding is what makes both rows equal in the middle.
What is left is the row's core: one piece, stored once. A core that is one element repeated (the middle of a mask) is a run too.

    row    0 0 0 0 17 4 8 4 9 9      pieces    (0, 4 times)  (17 4 8 4, once)  (9, 2 times)

Pieces are put together again by repeating and joining, whatever rule made them: the rule may change, the format does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MIN_ROW = 64
"""Rows of fewer bytes are not worth a reference each."""
MAX_ROWS = 4096
"""A tensor of more rows is cut as a whole."""
MAX_PIECE = 2**20
"""Longer cores are cut into pieces of this many bytes."""

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
    """Cuts the rows of one kind of tensor; remembers which elements pad them."""

    def __init__(self) -> None:
        self._padding: set[bytes] = set()

    def cut(self, rows: Sequence[bytes], width: int) -> list[list[Piece]]:
        """For each row (of elements of `width` bytes) its pieces."""
        for row in rows:
            if leading_run(row, width) > width:
                self._padding.add(row[:width])
            if trailing_run(row, width) > width:
                self._padding.add(row[-width:])
        return [list(self._pieces(row, width)) for row in rows]

    def _pieces(self, row: bytes, width: int) -> Iterator[Piece]:
        lead = leading_run(row, width) if row[:width] in self._padding else 0
        if lead:
            yield from _run(row[:width], lead // width)
            row = row[lead:]
        trail = trailing_run(row, width) if row and row[-width:] in self._padding else 0
        core = row[: len(row) - trail]
        if core and leading_run(core, width) == len(core):
            yield from _run(core[:width], len(core) // width)
        else:
            for at in range(0, len(core), MAX_PIECE):
                yield core[at : at + MAX_PIECE], 1
        if trail:
            yield from _run(row[-width:], trail // width)


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
    """Bytes at the end of `data` that repeat its last element of `width` bytes."""
    known, step, growing = max(len(data) - width, 0), width, True
    while known > 0:
        since = max(known - step, 0)
        if data[since:known] == data[since + width : known + width]:
            known = since
            step = step * 2 if growing else step
        elif step == width:
            break
        else:
            growing, step = False, step // 2
    return len(data) - known
