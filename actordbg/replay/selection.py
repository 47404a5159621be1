"""The inputs of a replay: dumps that a condition selects, or named files; and the record that decides open settings."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from actordbg.base.errors import StoreProblem, Unsupported, UsageError
from actordbg.config.choices import adapter_of
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import SUFFIX, DumpRecord
from actordbg.records.replay_record import ReplayInput
from actordbg.store.layout import Store
from actordbg.store.pack_bytes import PACK_SUFFIX
from actordbg.store.places import open_pack, packed_place, read_record, split_place

if TYPE_CHECKING:
    from actordbg.catalog.query import Catalog, DumpRow

PICKLES = (".pkl", ".pickle")
"""What the commands import before they look here."""


_OF_RECORD = (
    "dump_id", "run", "rank", "timestamp", "batch_size", "seq_len", "tokens", "source", "role", "instance", "step", "call_index",
    "grad_enabled", "replayable",
)  # fmt: skip


@dataclass(frozen=True)
class FileRow:
    """A named dump, as planning sees it. `path`: relative to the store where the dump is in it, else absolute."""

    dump_id: str
    path: str
    run: str
    rank: int
    timestamp: str
    batch_size: int
    seq_len: int
    tokens: int
    source: str
    role: str | None
    instance: str | None
    step: int | None
    call_index: int | None
    grad_enabled: bool | None
    return_output: bool | None
    replayable: bool
    adapter: str | None

    @classmethod
    def of(cls, record: DumpRecord, path: str) -> FileRow:
        flag = record.arguments.get("return_output")
        values = {name: getattr(record, name) for name in _OF_RECORD}
        adapter = adapter_of(record.actor)
        return cls(path=path, return_output=flag if isinstance(flag, bool) else None, adapter=adapter, **values)


Row: TypeAlias = "FileRow | DumpRow"
"""A dump as planning sees it: named, or selected by the catalog."""


def defaults_of(root: Path, inputs: Sequence[ReplayInput]) -> DumpRecord | None:
    """The record that decides open settings: of the first input whose header can be read. Desk and workers agree on it."""
    for item in inputs:
        with contextlib.suppress(StoreProblem):
            return read_record(root / item.path)
    return None


def require_one_trainer(rows: Iterable[Row], configs: Iterable[ReplayConfig]) -> None:
    """A replay runs one trainer's code: refuse rows that several recorded, unless every configuration takes them on the rows."""
    counts = Counter(row.adapter for row in rows)
    asked = {config.through for config in configs if not config.truth}
    if len(counts) < 2 or not ("trainer" in asked or (None in asked and None in counts)):
        return
    found = sorted(counts.items(), key=lambda pair: (pair[0] or "", pair[1]))
    whose = ", ".join(f"{count:,} {f'by adapter {name}' if name else 'without an adapter'}" for name, count in found)
    narrower = " or ".join(f"\"adapter='{name}'\"" if name else '"adapter is null"' for name, _ in found)
    raise Unsupported(
        f"these inputs were recorded by several trainers ({whose}), and a replay runs one trainer's code",
        hint=f"one at a time: --where {narrower}; or --through rows, which takes the rows of all, without a trainer",
    )


def rows_of_files(store: Store, files: Sequence[Path]) -> list[FileRow]:
    """The named dumps, each once: dump files, dumps of a pack (`FILE.pack#ID`), or all dumps of a pack.

    UsageError for any other file, CorruptDump for a damaged one.
    """
    rows: dict[str, FileRow] = {}
    for place in (place for file in files for place in _places(file)):
        record = read_record(place)
        rows.setdefault(record.dump_id, FileRow.of(record, _in_store(store, place)))
    return list(rows.values())


def _places(file: Path) -> list[Path]:
    """The dumps that a named file stands for."""
    packed = split_place(file)
    path = (Path(packed[0]) if packed else file).absolute()
    path = path.resolve() if path.is_symlink() else path  # who names a link means what it leads to
    if not path.is_file():
        raise UsageError(f"--input-file {file} is not a file", hint="`actordbg dump ls --json` has every dump's path")
    if packed:
        return [Path(packed_place(str(path), packed[1]))]
    if path.name.endswith(PACK_SUFFIX):
        return [Path(packed_place(str(path), dump_id)) for dump_id in open_pack(path).dump_ids]
    if not path.name.endswith(SUFFIX):
        raise UsageError(
            f"--input-file {file} is neither a dump file (*{SUFFIX}) nor a pack (*{PACK_SUFFIX})",
            hint="name files below store/dumps or store/packs",
        )
    return [path]


def _in_store(store: Store, place: Path) -> str:
    path, root = place.parent.resolve() / place.name, store.root.resolve()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(place)


def rows_of(store: Store, where: str | None, files: Sequence[Path], order: str, max_inputs: int | None) -> Sequence[Row]:
    """The dumps that --where selects or --input-file names; UsageError for both at once. `max_inputs`: what the plan needs."""
    from actordbg.catalog.query import open_fresh

    if files and where is not None:
        raise UsageError("--where and --input-file exclude each other", hint="give one of them")
    return rows_of_files(store, files) if files else rows_of_catalog(open_fresh(store, where), where, order, max_inputs)


def rows_of_catalog(catalog: Catalog, where: str | None, order: str, max_inputs: int | None) -> list[DumpRow]:
    """The dumps that `where` selects; only as many as the plan needs, if the catalog sorts as the plan does."""
    from actordbg.catalog.query import select_dumps

    if max_inputs is not None and order != "shuffle":
        limit = 2 * max_inputs + 100
        rows = select_dumps(catalog, where, order=order, limit=limit)
        if len(rows) < limit or sum(row.replayable for row in rows) >= max_inputs:
            return rows
    return select_dumps(catalog, where)
