"""Whole checks of dump files, many at once.

`dumpfile.read_payload` checks frame, sizes, checksum and SHA-256; here the payload's safetensors header is held against the
record too: same tensors, same stored dtypes and shapes, offsets that cover the data exactly. No torch: the header is
JSON. Threads are enough, since reading, hashing and decompressing release the interpreter's lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from actordbg import contents, dumpfile
from actordbg.catalog.index import Damaged
from actordbg.catalog.query import Catalog, damaged_files, dump_paths
from actordbg.errors import StoreProblem
from actordbg.store import Store


def paths_to_verify(catalog: Catalog, where: str | None) -> list[str]:
    """Paths below the store of the dumps that a condition selects; without one of all files, the damaged ones too."""
    paths = dump_paths(catalog, where)
    return paths if where is not None else sorted({*paths, *(item.path for item in damaged_files(catalog))})


def verify_files(
    store: Store, paths: list[str], jobs: int = 0, max_bytes: int = dumpfile.DEFAULT_CAP
) -> Iterator[tuple[str, int, Damaged | None]]:
    """(path, bytes read, what is wrong or None) for each file, as they are done. `jobs` threads, 0 for all processors."""
    with ThreadPoolExecutor(jobs or min(os.cpu_count() or 1, 16)) as pool:
        yield from pool.map(lambda path: _verify(store, path, max_bytes), paths)


def _verify(store: Store, path: str, max_bytes: int) -> tuple[str, int, Damaged | None]:
    try:
        size = (store.root / path).stat().st_size
        record, payload = dumpfile.read_payload(store.root / path, max_bytes)
        contents.check(record, payload, str(store.root / path), max_bytes)
        if store.relative(store.dump_path(record)) != path:
            raise StoreProblem(f"its record belongs at {store.relative(store.dump_path(record))}")
    except StoreProblem as error:
        return path, 0, Damaged(path, error.code, error.message.removeprefix(f"{store.root / path}: "))
    except OSError as error:
        return path, 0, Damaged(path, StoreProblem.code, f"cannot be read: {error.strerror}")
    return path, size, None
