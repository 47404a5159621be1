"""Records that a command writes to the store, each as one JSON file: comparisons, noise floors, matrices, memory.

    store/comparisons/<comparison_id>.json    one ComparisonRecord, written once
    store/noise/<noise_id>.json               one NoiseRecord, written once
    store/matrices/<matrix_id>.json           one MatrixRecord, replaced as cells finish
    store/memory/<memory_id>.json             one MemoryRecord, replaced when the watching ends

The catalog's tables `comparison`, `noise_floor`, `matrix`, `matrix_cell` and `memory_watch` are made from these files
alone. Ids have the form of a replay's (`20250619T052608-9f3a2c`), so they sort by time. A float that is not finite is
stored as null.

Standard library only: the desk reads these files without torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from actordbg.base.errors import CorruptDump, NewerFormat, StoreProblem
from actordbg.formats.store_files import read_regular

FORMAT = 1

T = TypeVar("T", bound="StoredRecord")


class StoredRecord:
    """Base of the records: a dataclass as JSON and back. `what` names the kind of record in messages."""

    what: ClassVar[str]

    def to_json(self) -> str:
        """The record as JSON."""
        return json.dumps({"format": FORMAT} | _plain(self), indent=1, sort_keys=True)

    @classmethod
    def from_file(cls: type[T], path: Path) -> T:
        """The record in this file. StoreProblem for a file that cannot be read; otherwise errors as in `from_json`."""
        try:
            text = read_regular(path)
        except OSError as error:
            raise StoreProblem(f"cannot read {path}: {error.strerror}", hint="check its permissions") from None
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls: type[T], text: str | bytes, source: str = "") -> T:
        """Parse what `to_json` wrote. CorruptDump for damaged text, NewerFormat for another version. `source`: its file."""
        try:
            data = json.loads(text)
            version = data.pop("format")
            if version != FORMAT:
                raise NewerFormat(
                    f"this {cls.what} has format {version!r:.40}, this actordbg reads {FORMAT}", hint="upgrade actordbg"
                )
            record: T = built(cls, data)
            return record
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            file = f"the {cls.what}'s file {source}".rstrip()
            raise CorruptDump(f"{file} is damaged: {error}", hint="remove the file") from None


def built(kind: Any, value: Any) -> Any:
    """A JSON value as the type that its field is declared with, at any depth. TypeError or ValueError if it is of another one,
    or no catalog could hold it. A float that was not finite is None.
    """
    return _reader(kind)(value)


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """The function that makes a value of this type out of a JSON value."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    origin, inner = get_origin(kinds[0]) or kinds[0], get_args(kinds[0])
    if origin is Any:
        return _plain_json
    nothing = NoneType in kinds or origin is float
    if dataclasses.is_dataclass(origin):
        return _checked(origin, dict, nothing, lambda value: _made(origin, value))
    if origin in (tuple, list):
        each = _reader(inner[0])
        return _checked(origin, list, nothing, lambda value: origin(map(each, value)))
    if origin is dict:
        of_value = _reader(inner[1])
        return _checked(dict, dict, nothing, lambda value: {_plain_json(name): of_value(item) for name, item in value.items()})
    return _checked(origin, origin, nothing, _plain_json)


def _checked(kind: Any, of: type, nothing: bool, made: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`made` of a JSON value of the type `of`, or of a whole number where a float belongs. What is a `kind` already stays as it
    is, and so does None where it may be."""
    name, fitting = getattr(kind, "__name__", kind), {of, int} if of is float else {of}

    def read(value: Any) -> Any:
        if type(value) in fitting:
            return made(value)
        if type(value) is kind or (value is None and nothing):
            return value
        raise TypeError(f"{value!r:.60} where a {name} belongs")

    return read


def _made(kind: Any, value: dict[str, Any]) -> Any:
    readers = _field_readers(kind)
    return kind(**{name: readers[name](item) for name, item in value.items()})


def _plain_json(value: Any) -> Any:
    """The value; ValueError for a number of more than 64 bits or half of a surrogate pair."""
    if isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{value!r:.40} has more than 64 bits")
    elif isinstance(value, str):
        value.encode()
    elif isinstance(value, dict | list):
        json.dumps(value, ensure_ascii=False).encode()
    return value


@cache
def _field_readers(kind: Any) -> dict[str, Callable[[Any], Any]]:
    return {name: _reader(declared) for name, declared in get_type_hints(kind).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    return value
