"""The dumps of a store as a lazy sequence of typed rows, each with its tensors, its record and its text.

dumps = store.dumps("seq_len>4096")       # nothing is read yet
len(dumps), dumps[0].seq_len              # a count, and one row
dumps[:100].to_pandas()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, overload

from actordbg.base.errors import require_package
from actordbg.base.units import plural
from actordbg.catalog import query
from actordbg.catalog.columns import DumpRow
from actordbg.formats.dump_record import DumpRecord
from actordbg.store.layout import Store
from actordbg.store.places import read_record

if TYPE_CHECKING:
    from torch import Tensor


class Tokenizer(Protocol):
    """What `StoredDump.text` needs of a tokenizer: those of transformers and of tokenizers have it."""

    def decode(self, token_ids: Any) -> Any:
        """Return the text of a row's token ids."""


class StoredDump(DumpRow):
    """A dump: the columns of `--where` as attributes, with those of its last result, and what its file holds."""

    def __init__(self, store: Path, columns: dict[str, Any]) -> None:
        super().__init__(columns)
        self._store = store

    @property
    def file(self) -> Path:
        """The dump's file, or its place in a pack (`FILE.pack#ID`)."""
        return self._store / self.path

    @property
    def record(self) -> DumpRecord:
        """Everything that was recorded of the call except tensors, read from the head of its file."""
        return read_record(self.file)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The recorded tensors by name, on the CPU, as captured: `sequences` int64 [B, S], masks, outputs. Reads the file."""
        from actordbg.store import payload

        return payload.load(self.file).tensors

    def text(self, tokenizer: Tokenizer) -> list[str]:
        """Return the text of each row, without its padding."""
        tensors = self.tensors
        ids, real = tensors["sequences"], tensors.get("attention_mask")
        return [str(tokenizer.decode((row if real is None else row[real[at] != 0]).tolist())) for at, row in enumerate(ids)]


class DumpList(Sequence[StoredDump]):
    """The dumps of a condition, in an order of `query.ORDERS`. A slice is another such sequence; rows are read on demand."""

    def __init__(self, store: Store, where: str | None = None, order: str = "time", part: range | None = None) -> None:
        self.where, self._store, self._order = where, store, order
        if part is not None:
            self._part = part

    @cached_property
    def _catalog(self) -> query.Catalog:
        return query.open_fresh(self._store.require(), self.where)

    @cached_property
    def _part(self) -> range:
        return range(query.count_dumps(self._catalog, self.where))

    def __len__(self) -> int:
        return len(self._part)

    def __iter__(self) -> Iterator[StoredDump]:
        part = self._part
        if part.step != 1:
            return (self[at] for at in range(len(part)))
        return (typed(self._store, row) for row in self._rows(part.start, len(part)))

    @overload
    def __getitem__(self, at: int) -> StoredDump: ...
    @overload
    def __getitem__(self, at: slice) -> DumpList: ...
    def __getitem__(self, at: int | slice) -> StoredDump | DumpList:
        """Return a dump, or the sequence of a slice."""
        part = self._part[at]
        if isinstance(part, range):
            return DumpList(self._store, self.where, self._order, part)
        return typed(self._store, next(self._rows(part, 1)))

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame, a row for each dump. Raises EnvironmentProblem without pandas."""
        require_package("to_pandas", "pandas")
        rows = list(self)
        return import_module("pandas").DataFrame({name: [getattr(row, name) for row in rows] for name in DumpRow.columns})

    def _rows(self, first: int, count: int) -> Iterator[Any]:
        return query.each_dump(self._catalog, self.where, order=self._order, limit=count, offset=first)

    def __repr__(self) -> str:
        where = f" where {self.where}" if self.where else ""
        return f"<{plural(len(self), 'dump')} of {self._store.root}{where}>"


def typed(store: Store, row: Any) -> StoredDump:
    """Build a dump from a row of the catalog."""
    return StoredDump(store.root, dict(vars(row)))
