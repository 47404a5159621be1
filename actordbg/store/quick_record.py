"""A record read as `formats.record_reading.parse_record` reads it, in a third of the time, where tensors are loaded.

msgspec parses the JSON and checks types and ranges on the way, in C. What it refuses goes through the full check, which says
what is wrong, or accepts it. What it accepts is the same record; `tests/fuzz/of_record.py` holds the two against each other.

Importing msgspec takes as long as reading some hundred records, so this is for who has imported torch. No trainer does.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import Field, fields
from typing import Annotated, Any, Literal

import msgspec

from actordbg.formats.dump_record import (
    DEFAULTS,
    MAX_DIMS,
    MAX_VALUES,
    RECORD_VERSION,
    DumpRecord,
    TensorSpec,
    contiguous_strides,
    is_plain_name,
)
from actordbg.formats.record_reading import MAX_SIZE, is_moment, parse_record

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Sizes = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_SIZE)], ...], msgspec.Meta(max_length=MAX_DIMS)]
_Plain = bool | int | float | str | None
_Inner = _Plain | list[_Plain] | dict[str, _Plain]
_Value = _Plain | list[_Inner] | dict[str, _Inner]
_KINDS: dict[str, Any] = {"int": _Count, "str": str, "bool": bool, "dict": dict[str, _Value], "float": float | _Number}


class _Spec(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    dtype: str
    stored: str
    shape: _Sizes
    strides: _Sizes | msgspec.UnsetType = msgspec.UNSET


_OTHERS: dict[str, Any] = {"tensors": dict[str, _Spec], "format_version": Literal[RECORD_VERSION]}


def _field(field: Field[Any]) -> tuple[Any, ...]:
    """A field as msgspec checks it: what the record's annotation says, as in `record_reading`."""
    name = field.name
    kind = _OTHERS.get(name) or _KINDS[re.split(r"\W", str(field.type))[0]]
    if name not in DEFAULTS or name == "format_version":
        return name, kind
    default = DEFAULTS[name]
    return name, kind | None if default is None else kind, msgspec.field(default_factory=dict) if default == {} else default


RECORD_FIELDS: dict[str, tuple[Any, ...]] = {field.name: _field(field) for field in fields(DumpRecord)}
"""The fields of a record as `msgspec.defstruct` takes them; the catalog reads some of them."""
_Record = msgspec.defstruct("_Record", RECORD_FIELDS.values(), kw_only=True, forbid_unknown_fields=True)
_decode = msgspec.json.Decoder(_Record).decode
_plain_run = functools.lru_cache(64)(is_plain_name)
_new, _set = object.__new__, object.__setattr__


def quick_record(line: bytes) -> DumpRecord:
    """The record in a line of JSON; errors as of `parse_record`."""
    return quickly(line) or parse_record(line)


def quickly(line: bytes) -> DumpRecord | None:
    """The record, if all of it is found sound; None: ask the full check.

    Records are written in ASCII, and other characters as escapes, of which msgspec takes some that are none.
    """
    if len(line) > MAX_VALUES or b"\\" in line or not line.isascii():
        return None
    try:
        values = msgspec.structs.asdict(_decode(line))
    except msgspec.MsgspecError:
        return None
    tensors = values["tensors"] = {name: _tensor(spec) for name, spec in values["tensors"].items()}
    named = is_plain_name(values["dump_id"]) and _plain_run(values["run"]) and is_moment(values["timestamp"])
    if not named or None in tensors.values() or "__metadata__" in tensors:
        return None
    record = _new(DumpRecord)  # 42 fields: the frozen __init__ takes longer than everything above
    _set(record, "__dict__", values)
    return record


def _tensor(found: _Spec) -> TensorSpec | None:
    shape, strides = found.shape, found.strides
    if not 0 < math.prod(shape) < MAX_SIZE:  # the full check knows more of a tensor without elements
        return None
    if strides is msgspec.UNSET:
        strides = contiguous_strides(shape)
    elif len(strides) != len(shape):
        return None
    spec = _new(TensorSpec)
    _set(spec, "__dict__", {"dtype": found.dtype, "shape": shape, "strides": strides, "stored": found.stored})
    return spec
