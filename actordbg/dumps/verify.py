"""Whole checks of dumps, many at once, in files of their own and in packs.

`places.read_payload` checks frame, sizes, checksum and SHA-256; here the payload's safetensors header is held against the
record too: same tensors, same stored dtypes and shapes, offsets that cover the data exactly. No torch: the header is
JSON. Threads are enough, since reading, hashing and decompressing release the interpreter's lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from actordbg.base.errors import StoreProblem
from actordbg.catalog.query import Catalog, damaged_files, dump_files
from actordbg.catalog.tables import Damaged
from actordbg.formats import dumpfile
from actordbg.formats import payload_check as contents
from actordbg.formats.dump_record import DumpRecord
from actordbg.store import places
from actordbg.store.layout import Store
from actordbg.store.pack_bytes import PACK_SUFFIX
from actordbg.store.places import open_pack


def paths_to_verify(catalog: Catalog, where: str | None) -> list[str]:
    """Paths below the store of the dumps that a condition selects; without one of all files, the damaged ones too."""
    paths = [path for path, _ in dump_files(catalog, where)]
    return paths if where is not None else sorted({*paths, *(item.path for item in damaged_files(catalog))})


def verify_files(
    store: Store, paths: list[str], jobs: int = 0, max_bytes: int = dumpfile.DEFAULT_CAP
) -> Iterator[tuple[str, int, Damaged | None]]:
    """(path, bytes, what is wrong or None) for each dump, as they are done; bytes of the file, of a packed one of its payload.

    `jobs` threads, 0 for all processors.
    """
    with ThreadPoolExecutor(jobs or min(os.cpu_count() or 1, 16)) as pool:
        yield from pool.map(lambda path: verify_place(store, path, max_bytes), paths)


def verify_place(store: Store, path: str, max_bytes: int = dumpfile.DEFAULT_CAP) -> tuple[str, int, Damaged | None]:
    """One dump or pack, whole: see `verify_files`."""
    try:
        packed = places.split_place(path)
        if packed is None and path.endswith(PACK_SUFFIX):
            return path, open_pack(store.root / path).bytes, None
        record, payload = places.read_payload(store.root / path, max_bytes)
        contents.check(record, payload, str(store.root / path), max_bytes)
        size = len(payload) if packed else (store.root / path).stat().st_size
        check_place(store, record, path)
    except (StoreProblem, OSError) as error:
        return path, 0, Damaged.by(path, error, f"{store.root / path}")
    return path, size, None


def check_place(store: Store, record: DumpRecord, path: str) -> None:
    """StoreProblem if a record does not belong where it was read."""
    packed = places.split_place(path) is not None
    belongs = f"packs/{record.run}" if packed else store.relative(store.dump_path(record))
    if belongs != (os.path.dirname(path) if packed else path):
        raise StoreProblem(f"its record belongs at {belongs}", hint="move it there, or import its original again")
