"""Verify dumps completely, in files and in packs: many at once for `dump verify`, and as findings for `fsck`.

`places.read_payload` checks frame, sizes, checksum and SHA-256; this module also compares the payload's safetensors header with
the record: same tensors, same stored dtypes and shapes, offsets that cover the data exactly. No torch: the header is JSON.
Threads are enough, since reading, hashing and decompressing release the GIL.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from actordbg.base.errors import CorruptDump, NewerFormat, StoreProblem
from actordbg.catalog import dump_rows
from actordbg.catalog.query import Catalog, damaged_files, dump_files
from actordbg.catalog.tables import Damaged, NotRead
from actordbg.dumps.finding import StoreFault, unusable
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import DumpRecord
from actordbg.store import places
from actordbg.store.layout import Store
from actordbg.store.pack_bytes import PACK_SUFFIX
from actordbg.store.places import dump_id_of, open_pack, packed_place


def paths_to_verify(catalog: Catalog, where: str | None) -> list[str]:
    """Return the paths below the store of the dumps that a condition selects; without it of all files, damaged files included."""
    paths = [path for path, _ in dump_files(catalog, where)]
    return paths if where is not None else sorted({*paths, *(item.path for item in damaged_files(catalog))})


def verify_files(store: Store, paths: list[str], *, deep: bool = True) -> Iterator[tuple[str, int, Damaged | None]]:
    """Yield (path, bytes, what is wrong or None) for each dump; bytes of the file, or of a packed dump's payload.

    Without `deep` only records are read.
    """
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 16)) as pool:
        yield from pool.map(lambda path: verify_place(store, path, deep), paths)


def verify_place(store: Store, path: str, deep: bool = True) -> tuple[str, int, Damaged | None]:
    """Verify a dump or pack: see `verify_files`."""
    full, size = store.root / path, 0
    try:
        packed = places.split_place(path)
        if packed is None and path.endswith(PACK_SUFFIX):
            return path, open_pack(full).bytes, None
        if deep:
            record, payload = places.read_payload(full)
            dumpfile.check(record, payload, f"{full}")
            size = len(payload) if packed else full.stat().st_size
            check_place(store, record, path)
        elif packed:
            check_place(store, places.read_record(full), path)
        else:
            rank = full.parent.name.removeprefix("rank")
            dump_rows.read_one(f"{full}", dump_id_of(path), full.parts[-3], int(rank) if rank.isdecimal() else None)
    except (StoreProblem, OSError) as error:
        return path, 0, Damaged.by(path, error, f"{full}")
    return path, size, None


def check_place(store: Store, record: DumpRecord, path: str) -> None:
    """Raise StoreProblem if a record does not belong where it was read."""
    packed = places.split_place(path) is not None
    belongs = f"packs/{record.run}" if packed else store.relative(store.dump_path(record))
    if belongs != (os.path.dirname(path) if packed else path):
        raise StoreProblem(f"its record belongs at {belongs}", hint="move it there, or import its original again")


_KINDS = {CorruptDump.code: "damaged-dump", NewerFormat.code: "newer-format", StoreProblem.code: "misplaced-dump"}


def loose_dumps(store: Store, deep: bool) -> Iterator[StoreFault]:
    """Check every dump file: header, place, and with `deep` payload, checksums and tensors."""
    paths = [store.relative(path) for path in store.iter_dumps()]
    for path, _, wrong in verify_files(store, paths, deep=deep):
        if wrong is not None:
            kind = "unreadable" if isinstance(wrong, NotRead) else _KINDS.get(wrong.code, "damaged-dump")
            yield StoreFault(store.root / path, kind, wrong.reason)


def packs(store: Store, deep: bool) -> Iterator[StoreFault]:
    """Check every pack: head, foot and index; each record in it, and with `deep` each whole dump."""
    for path in store.iter_packs():
        try:
            dump_ids = open_pack(path).dump_ids
        except (StoreProblem, OSError) as error:
            yield unusable(path, "damaged-pack", error)
        else:
            for dump_id in dump_ids:
                place = packed_place(store.relative(path), dump_id)
                wrong = verify_place(store, place, deep)[2]
                if wrong is not None:
                    kind = "newer-format" if wrong.code == NewerFormat.code else "damaged-packed-dump"
                    yield StoreFault(store.root / place, kind, wrong.reason)


def doubles(store: Store, deep: bool) -> Iterator[StoreFault]:
    """Report dumps that lie in a pack and in a file, or in two packs, and whether they are the same."""
    packed: dict[str, Path] = {}
    for path in store.iter_packs():
        try:
            dump_ids = open_pack(path).dump_ids
        except (StoreProblem, OSError):
            continue
        for dump_id in dump_ids:
            if dump_id in packed and _same(packed[dump_id], path, dump_id) is False:
                yield StoreFault(path, "double-differs", f"{dump_id} is also in {packed[dump_id].name}, and differs")
            packed.setdefault(dump_id, path)
    for path in store.iter_dumps():
        dump_id = dump_id_of(path)
        if dump_id in packed:
            same, there = _same(packed[dump_id], path, dump_id), store.relative(packed[dump_id])
            if same is not None:
                yield StoreFault(path, "double-dump" if same else "double-differs", f"{there} also has {dump_id}")


def _same(first_path: Path, second_path: Path, dump_id: str) -> bool | None:
    """Compare a dump at two places; None if either is damaged, which another check reports."""
    try:
        first, second = (
            places.read_exactly(packed_place(str(path), dump_id) if path.name.endswith(PACK_SUFFIX) else path)[1:]
            for path in (first_path, second_path)
        )
    except (StoreProblem, OSError):
        return None
    return first == second
