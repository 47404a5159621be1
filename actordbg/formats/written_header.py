"""The safetensors header that our recorder writes for a record, to be compared with a payload's.

`payload_check` asks here first. A header that is this text, to the byte, says what the record says: nothing of it has to be
parsed, or held against the record. Nothing is said about any other header, so it is parsed.

The text for tensors of the same names, dtypes and shapes is remembered, all but the name of the dump: of 257 dumps of a real
training, half have the shapes of an earlier one. Example::

    entries_as_written(record, payload)      # {"sequences.lo": Entry("uint16", (4, 2048), 448), ...}; None: parse it
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import NamedTuple

from actordbg.formats.dump_record import SAFETENSORS_DTYPES, SIZES, DumpRecord, TensorSpec, label
from actordbg.formats.dumpfile import Entry

_MOST_HEADER = 4096
"""Bytes of a header that is remembered: most have some hundred."""
_REMEMBERED = 512
_CODES = {name: code for code, (name, _) in SAFETENSORS_DTYPES.items()}
_Tensors = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, `stored` and shape of each tensor of a record."""


class _Form(NamedTuple):
    """A header behind its label, without its numbers; of each entry key, dtype, bytes per element, and which tensor it is of."""

    text: str
    parts: tuple[tuple[str, str, int, int], ...]


class _Written(NamedTuple):
    """A header behind its label, its entries in the order of their bytes, and the bytes of the whole payload."""

    rest: bytes
    entries: dict[str, Entry]
    size: int


def entries_as_written(record: DumpRecord, payload: bytes) -> dict[str, Entry] | None:
    """The payload's entries by key, if its header is this record's to the byte, and the payload as long as it says."""
    size = int.from_bytes(payload[:8], "little")
    if size > _MOST_HEADER:
        return None
    written = _written(tuple([(name, spec.stored, spec.shape) for name, spec in record.tensors.items()]), size)
    if written is None or len(payload) != written.size:
        return None
    header = b'{"__metadata__":{"actordbg":"%b"},%b' % (label(record).encode(), written.rest)
    return written.entries.copy() if payload[8 : 8 + size] == header.ljust(size) else None


@lru_cache(_REMEMBERED)
def _written(tensors: _Tensors, header: int) -> _Written | None:
    """What the recorder writes for such tensors, behind a header of so many bytes; None if it writes none such."""
    form = _form(tuple([(name, stored, len(shape)) for name, stored, shape in tensors]))
    if form is None:
        return None
    entries: dict[str, Entry] = {}
    numbers: list[int] = []
    end = 0
    for key, dtype, width, number in form.parts:
        shape = tensors[number][2]
        entries[key] = Entry(dtype, shape, 8 + header + end)
        first, end = end, end + width * math.prod(shape)
        numbers += (*shape, first, end)
    return _Written((form.text % tuple(numbers)).encode(), entries, 8 + header + end)


@lru_cache(64)
def _form(tensors: tuple[tuple[str, str, int], ...]) -> _Form | None:
    """The form for tensors of these names, `stored` and numbers of dimensions; None if the recorder writes none such."""
    parts = [
        (key, dtype, SIZES.get(dtype, 0), number)
        for number, (name, stored, _) in enumerate(tensors)
        for key, dtype in TensorSpec(stored, (), (), stored).parts(name)
    ]
    parts.sort(key=lambda part: (-part[2], part[0]))
    if not parts or not all(part[2] for part in parts) or len({part[0] for part in parts}) < len(parts):
        return None
    said = {
        key.replace("%", "%%"): {"dtype": _CODES[dtype], "shape": ["%d"] * tensors[number][2], "data_offsets": ["%d"] * 2}
        for key, dtype, _, number in parts
    }
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False)[1:]
    return _Form(text.replace('"%d"', "%d"), tuple(parts))
