"""Read records, and other JSON from untrusted files.

`json.loads` accepts more than valid JSON, and more than a program can handle later: NaN and infinity (which `json.dumps` then
refuses), lone surrogates (which no terminal and no database accepts), encodings other than UTF-8, nesting just below the
recursion limit (which fails one call deeper), and 4 MB of `[],[],[]` that become 90 MB of lists. All of these are ValueErrors in
`strict_json`, through which every file of a store, a bundle, a model and a server goes. `parse_record` adds the contract of a
record: every field's type, range and name.

Example::

    strict_json(b'{"temperature": 1e999}')      # ValueError: 1e999 is not a finite number
    parse_record(b"[]")                         # CorruptDump: the record is not a JSON object
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any

from actordbg.base.errors import CorruptDump, NewerFormat
from actordbg.formats.dump_record import (
    DEFAULTS,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_VALUES,
    RECORD_VERSION,
    DumpRecord,
    TensorSpec,
    contiguous_strides,
    is_plain_name,
    kinds_of,
)

_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z\Z", re.ASCII)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MAX_SIZE = 2**48
"""More elements than a tensor can have."""
MOST_VALUES = 2**21
"""Values of a whole file, as `MAX_VALUES` counts them: 64 MiB as our own records are laid out have no more."""


def damaged(message: str) -> CorruptDump:
    """Return the error for a damaged dump, with the command that lists all damaged dumps."""
    hint = "`actordbg dump verify` lists every damaged dump, `actordbg store fsck --repair` moves them into quarantine"
    return CorruptDump(message, hint=hint)


def parse_record(text: str | bytes) -> DumpRecord:
    """Parse and check a record.

    Raises NewerFormat for an unknown version and CorruptDump for anything that is not a record.
    """
    try:
        data = strict_json(text)
    except ValueError as error:
        raise damaged(f"the record is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise damaged("the record is not a JSON object")
    version = data.get("format_version")
    if type(version) is not int or not 0 <= version < 2**31:
        raise damaged("the record has no format version")
    if version != RECORD_VERSION:
        raise NewerFormat(
            f"the record has format version {version}, this actordbg reads version {RECORD_VERSION}",
            hint="upgrade actordbg in this environment: pip install --upgrade actordbg",
        )
    return _checked(data)


def strict_header(data: bytes) -> dict[str, Any]:
    """Parse the header of a safetensors file, as strictly as the safetensors library.

    Raises ValueError unless it is an object from the first byte on, without duplicate keys or negative numbers, and with three
    values per entry.
    """
    header = strict_json(data, _decode_header)
    if data[:1] != b"{" or type(header) is not dict:
        raise ValueError("it is not an object")
    about = header.pop("__metadata__", {})
    if type(about) is not dict or not {*map(type, about.values())} <= {str}:
        raise ValueError("its metadata are not strings")
    if any(type(item) is not dict or len(item) != 3 for item in header.values()):
        raise ValueError("an entry does not have three values")
    return header


def values_in(data: bytes | bytearray) -> int:
    """Count the values of a JSON text, at least: its commas and opening brackets. Each may take 30 times its bytes of memory."""
    return sum(map(data.count, (b"[", b"{", b",")))


def strict_json(data: str | bytes, decode: Callable[[str], Any] | None = None, most: int = MAX_VALUES) -> Any:
    """Parse a JSON text in UTF-8. Raises ValueError for anything else, and for text that is too large or too deeply nested.

    decode: `json.loads` where a file may have what only Python writes, such as NaN. most: values that the text may have.
    """
    data = data.encode() if isinstance(data, str) else data
    if values_in(data) > most:
        raise ValueError(f"it has more than {most} values")
    text, brackets = str(data, "utf-8"), data.count(b"[") + data.count(b"{")
    try:
        value = (decode or _decode)(text)
        too_deep = brackets > MAX_DEPTH and _levels(value) > MAX_DEPTH
    except RecursionError:
        too_deep = True
    if too_deep:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text:.20} is not a finite number")
    return value


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _size(text: str) -> int:
    if text[0] == "-":
        raise ValueError(f"{text:.20} is not a size")
    return int(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key occurs twice")
    return value


_decode = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse).decode
_decode_header = json.JSONDecoder(object_pairs_hook=_once, parse_int=_size, parse_float=_refuse, parse_constant=_refuse).decode


def _levels(value: Any) -> int:
    """Count the levels of nested lists and objects."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max(map(_levels, children), default=0)


_REQUIRED = {f.name for f in fields(DumpRecord) if f.name not in DEFAULTS}
_KINDS = kinds_of(DumpRecord)


def _checked(data: dict[str, Any]) -> DumpRecord:
    values = {name: value for name, value in data.items() if name in _KINDS}
    for name, value in values.items():
        kinds = _KINDS[name]
        if type(value) not in kinds:
            raise damaged(f"the record's {name} has the wrong type: {value!r:.80}")
        if type(value) is int and not (-(2**63) if float in kinds else 0) <= value < 2**63:
            raise damaged(f"the record's {name} is out of range: {value!r:.80}")
    if missing := _REQUIRED - values.keys():
        raise damaged(f"the record has no {min(missing)}")
    for name in ("dump_id", "run"):
        if not is_plain_name(values[name]):
            raise damaged(f"the record's {name} is not a plain name: {values[name]!r:.80}")
    parse_timestamp(values["timestamp"])
    values["tensors"] = {name: _spec(name, spec) for name, spec in values.get("tensors", {}).items()}
    return DumpRecord(**values)


def _spec(name: str, data: Any) -> TensorSpec:
    if name == "__metadata__":  # reserved by safetensors
        raise damaged(f"the record has a tensor named {name}")
    if type(data) is not list or len(data) not in (3, 4) or type(data[0]) is not str or type(data[1]) is not str:
        raise damaged(f"tensor {name!r:.80} of the record has no valid description")
    dtype, stored, shape, *rest = data
    if not _are_sizes(shape) or (rest and not (_are_sizes(rest[0]) and len(rest[0]) == len(shape))):
        raise damaged(f"tensor {name!r:.80} of the record has an impossible shape")
    if math.prod(filter(None, shape)) >= MAX_SIZE:
        raise damaged(f"tensor {name!r:.80} of the record has too many elements")
    return TensorSpec(dtype, tuple(shape), tuple(rest[0]) if rest else contiguous_strides(tuple(shape)), stored)


def _are_sizes(values: Any) -> bool:
    """Check whether this is a shape or strides: at most MAX_DIMS plain integers in torch's range."""
    if type(values) is not list or len(values) > MAX_DIMS or not {*map(type, values)} <= {int}:
        return False
    return not values or (min(values) >= 0 and max(values) < MAX_SIZE)


def parse_timestamp(text: str) -> datetime:
    """Parse a record's ISO-8601 UTC timestamp ("2025-06-19T05:26:08.430740Z") to an aware datetime. Raises CorruptDump."""
    if is_moment(text):
        return datetime.fromisoformat(text[:26]).replace(tzinfo=timezone.utc)
    raise damaged(f"{text!r:.60} is not a timestamp like 2025-06-19T05:26:08.430740Z")


def is_moment(text: str) -> bool:
    """Check whether this is a timestamp for `parse_timestamp`, of a valid date and time."""
    try:
        return bool(_MOMENT.match(text) and datetime.fromisoformat(text[:26]))
    except ValueError:
        return False
