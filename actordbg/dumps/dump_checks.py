"""Checks of dumps, in files of their own and in packs: the same checks as `dump verify`, and what lies twice."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from actordbg.base.errors import CorruptDump, NewerFormat, StoreProblem
from actordbg.catalog import dump_rows
from actordbg.catalog.tables import Damaged
from actordbg.dumps.finding import Finding, unusable
from actordbg.dumps.verify import verify_place
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import SUFFIX
from actordbg.store.layout import Store
from actordbg.store.pack_bytes import PACK_SUFFIX
from actordbg.store.places import Pack, packed_place

_KINDS = {CorruptDump.code: "damaged-dump", NewerFormat.code: "newer-format", StoreProblem.code: "misplaced-dump"}


def dump_files(store: Store, deep: bool) -> Iterator[Finding]:
    """Every dump file: header, place, and with `deep` payload, checksums and tensors."""
    paths = [store.relative(path) for path in loose_files(store)]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        for path, wrong in zip(paths, pool.map(lambda path: _wrong(store, path, deep), paths), strict=True):
            if wrong is not None:
                kind = "unreadable" if wrong.reason.startswith("cannot") else _KINDS.get(wrong.code, "damaged-dump")
                yield Finding(store.root / path, kind, wrong.reason)


def loose_files(store: Store) -> Iterator[Path]:
    """Every regular file that is called like a dump."""
    for run in store.folder_names("dumps", {}):
        for rank in store.folder_names(f"dumps/{run}", {}):
            yield from (store.root / path for path in store.files(f"dumps/{run}/{rank}", SUFFIX, {}))


def _wrong(store: Store, path: str, deep: bool) -> Damaged | None:
    if deep:
        return verify_place(store, path)[2]
    full = store.root / path
    try:
        dump_rows.read_row(os.fspath(full), full.name.removesuffix(SUFFIX), full.parts[-3], _rank(full.parts[-2]))
    except (StoreProblem, OSError) as error:
        return Damaged.by(path, error)
    return None


def _rank(name: str) -> int | None:
    digits = name.removeprefix("rank")
    return int(digits) if digits.isdecimal() else None


def packs(store: Store, deep: bool) -> Iterator[Finding]:
    """Every pack: head, foot and index; each record in it, and with `deep` each dump, whole."""
    for path in pack_files(store):
        try:
            pack = Pack(path)
        except (StoreProblem, OSError) as error:
            yield unusable(path, "damaged-pack", error)
        else:
            yield from _packed(store, path, pack, deep)


def pack_files(store: Store) -> Iterator[Path]:
    """Every regular file that is called like a pack."""
    for run in store.folder_names("packs", {}):
        yield from (store.root / path for path in store.files(f"packs/{run}", PACK_SUFFIX, {}))


def _packed(store: Store, path: Path, pack: Pack, deep: bool) -> Iterator[Finding]:
    for dump_id in pack.dump_ids:
        place = packed_place(store.relative(path), dump_id)
        try:
            if deep:
                wrong = verify_place(store, place)[2]
            else:
                record, wrong = dumpfile.parse_line(pack.line(dump_id), place), None
                if record.dump_id != dump_id or record.run != path.parent.name:
                    raise StoreProblem(f"its record is that of {record.dump_id}, of run {record.run}")
        except StoreProblem as error:
            wrong = Damaged.by(place, error)
        if wrong is not None:
            kind = "newer-format" if wrong.code == NewerFormat.code else "damaged-packed-dump"
            yield Finding(store.root / place, kind, wrong.reason)


def doubles(store: Store, deep: bool) -> Iterator[Finding]:
    """Dumps that lie in a pack and in a file, or in two packs; with `deep` whether they are the same."""
    packed: dict[str, Path] = {}
    for path in pack_files(store):
        try:
            dump_ids = Pack(path).dump_ids
        except (StoreProblem, OSError):
            continue
        for dump_id in dump_ids:
            if dump_id in packed and _same(packed[dump_id], path, dump_id) is False:
                yield Finding(path, "double-differs", f"{dump_id} lies in {packed[dump_id].name} too, and differs")
            packed.setdefault(dump_id, path)
    for path in loose_files(store):
        dump_id = path.name.removesuffix(SUFFIX)
        if dump_id in packed:
            same, there = _same(packed[dump_id], path, dump_id), store.relative(packed[dump_id])
            if same is not None:
                yield Finding(path, "double-dump" if same else "double-differs", f"{there} has {dump_id} too")


def _same(one: Path, other: Path, dump_id: str) -> bool | None:
    """Compare a dump at two places; None where one of them is damaged, which is named elsewhere."""
    try:
        return _content(one, dump_id) == _content(other, dump_id)
    except (StoreProblem, OSError):
        return None


def _content(path: Path, dump_id: str) -> tuple[bytes, str]:
    """The record's line and the SHA-256 of the payload."""
    if path.name.endswith(PACK_SUFFIX):
        line, payload = Pack(path).read(dump_id)
    else:
        data = dumpfile.read_file(path)
        line, payload = dumpfile.line_of(data, path), dumpfile.unpack(data, path)[1]
    return line, hashlib.sha256(payload).hexdigest()
