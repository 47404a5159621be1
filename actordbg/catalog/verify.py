"""Whole checks of dump files, many at once.

`dumpfile.read_payload` checks frame, sizes, checksum and SHA-256; here the payload's safetensors header is held against the
record too: same tensors, same stored dtypes and shapes, offsets that cover the data exactly. No torch: the header is
JSON. Threads are enough, since reading, hashing and decompressing release the interpreter's lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from actordbg import dumpfile
from actordbg.catalog.index import Damaged
from actordbg.catalog.query import Catalog, damaged_files, dump_paths
from actordbg.errors import CorruptDump, StoreProblem
from actordbg.record import DumpRecord
from actordbg.store import Store


def paths_to_verify(catalog: Catalog, where: str | None) -> list[str]:
    """Paths below the store of the dumps that a condition selects; without one of all files, the damaged ones too."""
    paths = dump_paths(catalog, where)
    return paths if where is not None else sorted({*paths, *(item.path for item in damaged_files(catalog))})


def verify_files(store: Store, paths: list[str], jobs: int = 0) -> Iterator[tuple[str, int, Damaged | None]]:
    """(path, bytes read, what is wrong or None) for each file, as they are done. `jobs` threads, 0 for all processors."""
    with ThreadPoolExecutor(jobs or min(os.cpu_count() or 1, 16)) as pool:
        yield from pool.map(lambda path: _verify(store, path), paths)


def _verify(store: Store, path: str) -> tuple[str, int, Damaged | None]:
    try:
        size = (store.root / path).stat().st_size
        record, payload = dumpfile.read_payload(store.root / path)
        check_payload(record, payload)
        if store.relative(store.dump_path(record)) != path:
            raise StoreProblem(f"its record belongs at {store.relative(store.dump_path(record))}")
    except StoreProblem as error:
        return path, 0, Damaged(path, error.code, error.message.removeprefix(f"{store.root / path}: "))
    except OSError as error:
        return path, 0, Damaged(path, StoreProblem.code, f"cannot be read: {error.strerror}")
    return path, size, None


def check_payload(record: DumpRecord, payload: bytes) -> None:
    """Hold a safetensors payload against its record; CorruptDump if they differ."""
    found = {key: (entry.dtype, entry.shape) for key, entry in dumpfile.payload_entries(payload, "payload").items()}
    wanted = {key: (kind, spec.shape) for name, spec in record.tensors.items() for key, kind in spec.parts(name)}
    if found.keys() != wanted.keys():
        raise CorruptDump("the payload's tensors are not those of its record")
    for key, entry in found.items():
        if entry != wanted[key]:
            raise CorruptDump(f"tensor {key!r} is not what the record says")
