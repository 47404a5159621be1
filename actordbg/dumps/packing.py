"""Moving dumps into packs and out of them, without loss, killed at any point or not.

The order is always the same: write the new place, flush it, read it again and verify it (SHA-256 of every payload, every byte of
every record), and only then remove the old one. A process that is killed in between leaves dumps in both places: readers
take either, the catalog counts them once (as packed), and the next `pack` or `unpack` removes one of two that hold the same.

What cannot be read whole stays as it is and is named. One process at a time moves dumps (`publish.exclusive`).

Example::

    summary = pack_dumps(store, "run = 'ppo-1'")
    print(summary.figures.content / summary.figures.stored)
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from actordbg.base.errors import ActordbgError, StoreProblem
from actordbg.catalog.query import Catalog, dump_files, open_fresh
from actordbg.catalog.tables import Damaged
from actordbg.dumps.recover import remove_unfinished_files
from actordbg.dumps.verify import check_place
from actordbg.formats import dumpfile
from actordbg.formats import dumpfile as contents
from actordbg.formats.dump_record import SUFFIX, DumpRecord
from actordbg.formats.encoding import pack_line
from actordbg.formats.store_files import atomic_write, sync_folder
from actordbg.store import places
from actordbg.store.layout import Store
from actordbg.store.pack_build import DEFAULT_LEVEL, PackFigures, PackWriter, exclusive
from actordbg.store.places import open_pack

T = TypeVar("T")
K = TypeVar("K")
UNPACK_LEVEL = 12
"""zstd level of the files that `unpack` writes."""

Progress = Callable[[int, int], None]
"""Called with (dumps done, dumps to do)."""


@dataclass
class PackSummary:
    """What a pack run did: dumps packed, the packs made, bytes of the files before; files of dumps that an interrupted run had
    packed already and that were removed now; what stayed a file, with the reason."""

    packs: list[str] = field(default_factory=list)
    figures: PackFigures = field(default_factory=PackFigures)
    loose_bytes: int = 0
    finished: int = 0
    kept: list[Damaged] = field(default_factory=list)


@dataclass
class UnpackSummary:
    """What an unpack run did: dumps that are files again, their bytes, packs that are gone or were written again; what stayed."""

    dumps: int = 0
    bytes: int = 0
    packs: list[str] = field(default_factory=list)
    kept: list[Damaged] = field(default_factory=list)


def pack_dumps(
    store: Store,
    where: str | None = None,
    run: str | None = None,
    level: int = DEFAULT_LEVEL,
    on_progress: Progress | None = None,
) -> PackSummary:
    """Move the dumps that a condition selects (all without one; of one run with `run`) into packs, each run into its own.

    Raises Conflict while another process moves dumps, WhereError, and StoreProblem for a store that cannot be written.
    """
    store.require()
    summary = PackSummary()
    with exclusive(store):
        catalog = open_fresh(store, where)
        chosen = [path for path, _ in dump_files(catalog, where, run=run)]
        loose = [path for path in chosen if places.split_place(path) is None]
        summary.finished = _remove_twins(store, [path for path in chosen if places.split_place(path)], summary.kept)
        _remove_redundant(store, catalog)
        tell = _telling(on_progress, len(loose))
        for of_run, paths in grouped(loose, lambda path: path.split("/")[1]).items():
            with contextlib.closing(_Packing(store, of_run, level, summary)) as job:
                for path in paths:
                    job.take(path)
                    tell()
                job.flush()
    open_fresh(store)
    return summary


def unpack_dumps(
    store: Store, where: str | None = None, run: str | None = None, level: int = UNPACK_LEVEL, on_progress: Progress | None = None
) -> UnpackSummary:
    """Make files of their own again of the packed dumps that a condition selects; the same records, the same payloads."""
    store.require()
    summary = UnpackSummary()
    with exclusive(store):
        remove_unfinished_files(store)
        catalog = open_fresh(store, where)
        packed = [found for path, _ in dump_files(catalog, where, run=run) if (found := places.split_place(path))]
        tell = _telling(on_progress, len(packed))
        for pack, places_of_pack in grouped(packed, lambda place: place[0]).items():
            restored = []
            for _, dump_id in places_of_pack:
                if _restore(store, pack, dump_id, level, summary):
                    restored.append(dump_id)
                tell()
            if restored:
                try:
                    drop_from_pack(store, pack, restored)
                    summary.packs.append(pack)
                except StoreProblem as error:
                    reason = f"not written again without what was taken out: {error.message}"
                    summary.kept.append(Damaged(pack, error.code, reason))
    open_fresh(store)
    return summary


def _telling(on_progress: Progress | None, total: int) -> Callable[[], None]:
    """Return a function that counts one dump more each time it is called, and says so."""
    done = itertools.count(1)
    return lambda: on_progress(next(done), total) if on_progress else None


def drop_from_pack(store: Store, pack: str, dump_ids: Iterable[str]) -> None:
    """Write a pack (its path below the store) again without these dumps, or remove it if none is left. Hold `exclusive`.

    Raises CorruptDump if one of the dumps that are to stay is damaged; the pack is as it was then.
    """
    path, gone = store.root / pack, set(dump_ids)
    try:
        held = open_pack(path)
    except FileNotFoundError:
        return
    staying = [dump_id for dump_id in held.dump_ids if dump_id not in gone]
    if len(staying) == len(held.dump_ids):
        return
    writer = None
    try:
        for dump_id in staying:
            writer = writer or PackWriter(path.parent)
            record, line, payload = _read_packed(path, dump_id)
            writer.add(record, line, payload)
            if writer.is_full:
                writer.publish()
                writer = None
        if writer:
            writer.publish()
    except BaseException:
        if writer:
            writer.discard()
        raise
    path.unlink(missing_ok=True)
    sync_folder(path.parent)


class _Packing:
    """The packs of one run under way, and the files that may go when the pack that they went into stands."""

    def __init__(self, store: Store, run: str, level: int, summary: PackSummary) -> None:
        self.store, self.run, self.level, self.summary = store, run, level, summary
        self._writer: PackWriter | None = None
        self._going: list[tuple[Path, int]] = []

    def take(self, place: str) -> None:
        """Read one file whole and put it into the pack; a bad one stays where it is."""
        path = self.store.root / place
        try:
            try:
                data = dumpfile.read_file(path)
            except FileNotFoundError:
                return
            record, payload = dumpfile.unpack(data, path)
            contents.check(record, payload, str(path))
            check_place(self.store, record, place)
            if self._writer is None:
                self._writer = PackWriter(self.store.packs / self.run, self.level)
            self._writer.add(record, dumpfile.line_of(data, path), payload)
        except ActordbgError as error:
            self.summary.kept.append(Damaged.by(place, error, str(path)))
            return
        self._going.append((path, len(data)))
        if self._writer.is_full:
            self.flush()

    def flush(self) -> None:
        """Publish what there is, and remove the files that are in it."""
        writer, self._writer = self._writer, None
        if writer is None or not writer.count:
            if writer:
                writer.discard()
            return
        path, figures = writer.publish()
        self.summary.packs.append(self.store.relative(path))
        self.summary.figures += figures
        self.summary.loose_bytes += sum(size for _, size in self._going)
        _remove_files([path for path, _ in self._going])
        self._going = []

    def close(self) -> None:
        """Give up what is not published."""
        if self._writer is not None:
            self._writer.discard()


def _restore(store: Store, pack: str, dump_id: str, level: int, summary: UnpackSummary) -> bool:
    """Write one dump as a file of its own and read it again; whether it stands there now."""
    place = places.packed_place(pack, dump_id)
    try:
        record, line, payload = _read_packed(store.root / pack, dump_id)
        contents.check(record, payload, place)
        check_place(store, record, place)
        path = store.dump_path(record)
        if not path.exists():
            atomic_write(path, pack_line(line, payload, level))
        written, _ = dumpfile.read_payload(path)
        if written != record:
            raise StoreProblem(f"{store.relative(path)} exists and is another dump")
    except ActordbgError as error:
        summary.kept.append(Damaged.by(place, error, f"{store.root}/{place}"))
        return False
    summary.dumps += 1
    summary.bytes += path.stat().st_size
    return True


def _read_packed(path: Path, dump_id: str) -> tuple[DumpRecord, bytes, bytes]:
    """Record, its exact line, and the checked payload of a packed dump."""
    record, payload = places.read_payload(places.packed_place(os.fspath(path), dump_id))
    return record, open_pack(path).line(dump_id), payload


def _remove_twins(store: Store, packed: Sequence[str], kept: list[Damaged]) -> int:
    """Remove the files of packed dumps that an interrupted run left, after reading both: only if they are the same."""
    removed = []
    for place, path in twins(store, packed):
        try:
            record, _ = places.read_payload(store.root / place)
            twin, _ = dumpfile.read_payload(path)
            if twin != record:
                raise StoreProblem(f"is another dump than {place}, which has its id")
        except ActordbgError as error:
            kept.append(Damaged.by(store.relative(path), error, str(path)))
        else:
            removed.append(path)
    _remove_files(removed)
    return len(removed)


def _remove_redundant(store: Store, catalog: Catalog) -> None:
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


def twins(store: Store, packed: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Find (place in a pack, file) of each packed dump that has a file too: an interrupted `pack` or `unpack` left it."""
    files: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for run in {Path(place).parent.name for place in packed}:
        for folder in store.dump_folders(run):
            for name in os.listdir(folder):
                if name.endswith(SUFFIX) and name[0] != ".":
                    files[run, name.removesuffix(SUFFIX)].append(folder / name)
    for place in packed:
        for path in files.get((Path(place).parent.name, places.dump_id_of(place)), []):
            yield place, path


def _remove_files(paths: Sequence[Path]) -> None:
    """Remove files, and flush their folders."""
    for path in paths:
        path.unlink(missing_ok=True)
    for folder in {path.parent for path in paths}:
        sync_folder(folder)


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by a key, in their order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found
