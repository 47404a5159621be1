"""A record that a command writes to the store as one JSON file, and reads back: the base class of all of them.

msgspec checks every field against its declared type, at any depth. The records are plain dataclasses all the same: code that
reads or writes such a file imports msgspec; code that only names a verdict does not. A float that is not finite is stored as
null.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from actordbg.base.errors import CorruptDump, NewerFormat, StoreProblem
from actordbg.base.units import resolve
from actordbg.formats.dump_record import is_plain_name
from actordbg.formats.record_reading import MOST_VALUES, strict_json
from actordbg.formats.store_files import read_regular

if TYPE_CHECKING:
    Real = float
else:
    Real = float | None  # a value that is not finite is null in the file, and None when it is read

FORMAT = 1

T = TypeVar("T", bound="StoredRecord")


class StoredRecord:
    """Base of the records: a dataclass as JSON and back. `what` names the kind of record in messages."""

    what: ClassVar[str]

    def to_json(self) -> str:
        """Return the record as JSON."""
        from msgspec.json import encode, format

        return format(encode({"format": FORMAT} | _plain(self), order="sorted"), indent=1).decode()

    @classmethod
    def from_file(cls: type[T], path: Path) -> T:
        """Read the record in this file. StoreProblem for a file that cannot be read; otherwise errors as in `from_json`."""
        try:
            text = read_regular(path)
        except OSError as error:
            raise StoreProblem(f"cannot read {path}: {error.strerror}", hint="check its permissions") from None
        return cls.from_json(text, str(path))

    @classmethod
    def named(cls: type[T], folder: Path, name: str, made_by: str) -> T:
        """Read the record with this id, unique beginning of an id, or "last" in a folder. UsageError for another name."""
        ids = sorted(path.stem for path in folder.glob("[!.]*.json"))
        return cls.from_file(folder / f"{resolve(name, ids, cls.what, made_by=made_by)}.json")

    @classmethod
    def from_json(cls: type[T], text: str | bytes, source: str = "") -> T:
        """Parse what `to_json` wrote. CorruptDump for damaged text, NewerFormat for another version. `source`: its file."""
        from msgspec import convert

        try:
            data = stored_json(text)
            version = data.pop("format")
            if version != FORMAT:
                raise NewerFormat(
                    f"this {cls.what} has format {version!r:.40}, this actordbg reads {FORMAT}", hint="upgrade actordbg"
                )
            record = convert(data, cls)
            if _has_unknown_keys(data, _plain(record)):
                raise ValueError("it has fields that this actordbg does not know")
            _complete(record)
            return record
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            file = f"the {cls.what}'s file {source}".rstrip()
            raise CorruptDump(f"{file} is damaged: {error}", hint="remove the file") from None


def stored_json(text: str | bytes) -> Any:
    """Parse a record of ours strictly. ValueError also for an integer of more than 64 bits, which no catalog could hold."""
    return strict_json(text, _decode, MOST_VALUES)


def _of_64_bits(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{text:.40} has more than 64 bits")
    return value


_decode = json.JSONDecoder(parse_int=_of_64_bits).decode


def _plain(record: Any) -> Any:
    """Return a record as plain JSON data. ValueError for half of a surrogate pair."""
    from msgspec.json import decode, encode

    return decode(encode(record, enc_hook=float))  # numpy's floats become plain ones


def _complete(value: Any) -> None:
    """Store, in each record in a value, at any depth, the defaults of fields that its file lacked. msgspec leaves them to the
    class, and code that walks a record's own fields (`vars`, msgspec itself) would miss them. ValueError for an id
    such as "../x": ids become names of files, and that would lead out of the store.
    """
    if is_dataclass(value):
        vars(value).update({each.name: getattr(value, each.name) for each in fields(value)})
        value = vars(value)
        for name, item in value.items():
            if name.endswith("_id") and isinstance(item, str) and item and not is_plain_name(item):
                raise ValueError(f"its {name} is {item!r:.80}, not a plain name")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ():
        _complete(item)


def _has_unknown_keys(data: Any, kept: Any) -> bool:
    """Check whether parsed JSON has keys that are not in `kept`, the plain data of the record that was made of it."""
    if isinstance(data, dict):
        return not data.keys() <= kept.keys() or any(_has_unknown_keys(item, kept[name]) for name, item in data.items())
    return isinstance(data, list) and any(map(_has_unknown_keys, data, kept))
