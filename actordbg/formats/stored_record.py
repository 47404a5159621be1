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
        return json.dumps({"format": FORMAT} | _plain(dataclasses.asdict(self)), indent=1, sort_keys=True)  # type: ignore[call-overload]

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
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    kind, origin, inner = kinds[0], get_origin(kinds[0]) or kinds[0], get_args(kinds[0])
    if origin is Any:
        return _plain_json(value)
    if value is None and (NoneType in kinds or origin is float):
        return None
    if dataclasses.is_dataclass(origin) and isinstance(value, dict):
        types = _field_types(origin)  # type: ignore[arg-type]
        return origin(**{name: built(types[name], item) for name, item in value.items()})  # type: ignore[operator]
    if origin in (tuple, list) and isinstance(value, list):
        return origin(built(inner[0], item) for item in value)
    if origin is dict and isinstance(value, dict):
        return {_plain_json(name): built(inner[1], item) for name, item in value.items()}
    if type(value) is not origin and not (origin is float and type(value) is int):
        raise TypeError(f"{value!r:.60} where a {getattr(origin, '__name__', origin)} belongs")
    return _plain_json(value)


def _plain_json(value: Any) -> Any:
    """The value; ValueError for a number of more than 64 bits or half of a surrogate pair."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"{value!r:.40} has more than 64 bits")
    if isinstance(value, str | dict | list):
        json.dumps(value, ensure_ascii=False).encode()
    return value


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
