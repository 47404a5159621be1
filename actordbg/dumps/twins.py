"""Removes one of two places of a dump that lies twice.

A process that moves dumps writes the new place and then removes the old one. Killed in between, it leaves both. Readers take
either, and the catalog counts such a dump once. Before a place is removed, both are read and must hold the same.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from actordbg.base.errors import ActordbgError, StoreProblem
from actordbg.catalog.query import Catalog, dump_files
from actordbg.catalog.tables import Damaged
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import SUFFIX
from actordbg.formats.store_files import sync_folder
from actordbg.store import places
from actordbg.store.layout import Store
from actordbg.store.pack_reader import open_pack


def remove_twins(store: Store, packed: Sequence[str], kept: list[Damaged]) -> int:
    """Remove the files of packed dumps that an interrupted run left, after reading both: only if they are the same."""
    removed = []
    for place, path in _twins(store, packed):
        try:
            record, _ = places.read_payload(store.root / place)
            twin, _ = dumpfile.read_payload(path)
            if twin != record:
                raise StoreProblem(f"is another dump than {place}, which has its id")
        except ActordbgError as error:
            kept.append(Damaged.by(store.relative(path), error, str(path)))
        else:
            removed.append(path)
    remove_files(removed)
    return len(removed)


def remove_redundant(store: Store, catalog: Catalog) -> None:
    """Remove packs that an interrupted `unpack` or `prune` left: the same dumps, all of them, are whole elsewhere."""
    rows = {places.dump_id_of(path): path for path, _ in dump_files(catalog)}
    used = {packed[0] for path in rows.values() if (packed := places.split_place(path))}
    for path in store.iter_packs():
        if store.relative(path) in used:
            continue
        with contextlib.suppress(StoreProblem, FileNotFoundError):
            if all(_lies_elsewhere(store, path, rows.get(dump_id)) for dump_id in open_pack(path).dump_ids):
                path.unlink()
                sync_folder(path.parent)


def _lies_elsewhere(store: Store, pack: Path, place: str | None) -> bool:
    """Whether the dump that a pack holds is whole at another place, too."""
    if place is None:
        return False
    here = places.read_record(places.packed_place(os.fspath(pack), places.dump_id_of(place)))
    there, _ = places.read_payload(store.root / place)
    return there == here


def loose_twins(store: Store, packed: Sequence[str]) -> list[Path]:
    """Files that an interrupted `pack` or `unpack` left of dumps that lie in a pack too."""
    return [path for _, path in _twins(store, packed)]


def _twins(store: Store, packed: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """(place in a pack, file) of each packed dump that has a file too."""
    files: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for run in {Path(place).parent.name for place in packed}:
        for folder in store.dump_folders(run):
            for name in os.listdir(folder):
                if name.endswith(SUFFIX) and name[0] != ".":
                    files[run, name.removesuffix(SUFFIX)].append(folder / name)
    for place in packed:
        for path in files.get((Path(place).parent.name, places.dump_id_of(place)), []):
            yield place, path


def remove_files(paths: Sequence[Path]) -> None:
    """Remove files, and flush their folders."""
    for path in paths:
        path.unlink(missing_ok=True)
    for folder in {path.parent for path in paths}:
        sync_folder(folder)
