"""Records that a command writes to the store, each as one JSON file: comparisons, noise floors and matrices.

    store/comparisons/<comparison_id>.json    one ComparisonRecord, written once
    store/noise/<noise_id>.json               one NoiseRecord, written once
    store/matrices/<matrix_id>.json           one MatrixRecord, replaced as cells finish

The catalog's tables `comparison`, `noise_floor`, `matrix` and `matrix_cell` are made from these files alone. Ids have the
form of a replay's (`20250619T052608-9f3a2c`), so they sort by time. A float that is not finite is stored as null.

Standard library only: the desk reads these files without torch.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_type_hints

from actordbg.base.errors import CorruptDump, NewerFormat, StoreProblem

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
            text = path.read_bytes()
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
                raise NewerFormat(f"this {cls.what} has format {version}, this actordbg reads {FORMAT}", hint="upgrade actordbg")
            record: T = _built(cls, data)
            return record
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            file = f"the {cls.what}'s file {source}".rstrip()
            raise CorruptDump(f"{file} is damaged: {error}", hint="remove the file") from None


def _built(kind: Any, value: Any) -> Any:
    """A JSON value as the type that its field is declared with; dataclasses and tuples at any depth."""
    if value is None:
        return None
    kind = next((one for one in get_args(kind) if dataclasses.is_dataclass(one)), kind)
    if isinstance(value, list):
        return tuple(_built(kind, item) for item in value)
    if not dataclasses.is_dataclass(kind):
        return value
    types = _field_types(kind)  # type: ignore[arg-type]
    return kind(**{name: _built(types.get(name, Any), item) for name, item in value.items()})  # type: ignore[operator]


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
