"""Move dumps into packs and out of them, without loss even if killed at any point.

The order is always the same: write the new place, flush it, read it again and verify it (SHA-256 of every payload, every byte of
every record), and only then remove the old one. A process that is killed in between leaves dumps in both places: readers
take either, the catalog counts them once (as packed), and the next `pack` or `unpack` removes one of two equal copies.

A dump that cannot be read whole stays unchanged and is reported. One process at a time moves dumps (`publish.exclusive`).

Example::

    summary = pack_dumps(store, "run = 'ppo-1'")
    print(summary.figures.content / summary.figures.stored)
"""

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from actordbg.base.errors import ActordbgError, StoreProblem
from actordbg.base.units import grouped
from actordbg.catalog.query import Catalog, dump_files, open_fresh
from actordbg.catalog.tables import Damaged
from actordbg.dumps.recover import remove_unfinished_files
from actordbg.dumps.verify import check_place
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import SUFFIX
from actordbg.formats.encoding import pack_line
from actordbg.formats.store_files import atomic_write, remove, require_own_way, sync_folder
from actordbg.store import places
from actordbg.store.layout import Store
from actordbg.store.pack_build import PackFigures, PackWriter, exclusive
from actordbg.store.places import open_pack

UNPACK_LEVEL = 12
"""zstd level of the files that `unpack` writes."""

Progress = Callable[[int], object]
"""Called for each dump that is done, with the number of all."""


@dataclass
class PackSummary:
    """What a pack run did: the new packs, their figures, bytes of the files before; `finished`: files removed now whose dumps an
    interrupted run had already packed; `kept`: what stayed a file, with the reason."""

    packs: list[str] = field(default_factory=list)
    figures: PackFigures = field(default_factory=PackFigures)
    loose_bytes: int = 0
    finished: int = 0
    kept: list[Damaged] = field(default_factory=list)


@dataclass
class UnpackSummary:
    """What an unpack run did: dumps restored as files, their bytes, packs removed or rewritten; what stayed packed, and why."""

    dumps: int = 0
    bytes: int = 0
    packs: list[str] = field(default_factory=list)
    kept: list[Damaged] = field(default_factory=list)


def pack_dumps(
    store: Store,
    where: str | None = None,
    on_progress: Progress = lambda total: None,
) -> PackSummary:
    """Move the dumps that a condition selects (all without one) into packs, each run into its own.

    Raises Conflict while another process moves dumps, WhereError, and StoreProblem for a store that cannot be written.
    """
    summary = PackSummary()
    with _moving(store, where) as (catalog, chosen):
        loose = [path for path in chosen if places.split_place(path) is None]
        summary.finished = _remove_twins(store, [path for path in chosen if places.split_place(path)], summary.kept)
        _remove_redundant(store, catalog)
        for paths in grouped((path.split("/")[1], path) for path in loose).values():
            _pack_run(store, paths, summary, lambda: on_progress(len(loose)))
    return summary


def unpack_dumps(
    store: Store,
    where: str | None = None,
    on_progress: Progress = lambda total: None,
) -> UnpackSummary:
    """Restore the packed dumps that a condition selects as separate files, with the same records and payloads."""
    summary = UnpackSummary()
    with _moving(store, where) as (_, chosen):
        packed = [parts for path in chosen if (parts := places.split_place(path))]
        for pack, dump_ids in grouped(packed).items():
            restored = []
            for dump_id in dump_ids:
                place = places.packed_place(pack, dump_id)
                try:
                    check_place(store, places.read_record(store.root / place), place)
                    summary.bytes += write_out(store, place).stat().st_size
                    summary.dumps += 1
                    restored.append(dump_id)
                except ActordbgError as error:
                    summary.kept.append(Damaged.by(place, error, f"{store.root}/{place}"))
                on_progress(len(packed))
            if restored:
                try:
                    drop_from_pack(store, pack, restored)
                    summary.packs.append(pack)
                except StoreProblem as error:
                    reason = f"not rewritten without the unpacked dumps: {error.message}"
                    summary.kept.append(Damaged(pack, error.code, reason))
    return summary


@contextlib.contextmanager
def _moving(store: Store, where: str | None) -> Iterator[tuple[Catalog, list[str]]]:
    """Let only this process move dumps inside the block: (the catalog, the selected paths). Refreshes the catalog afterwards."""
    store.require()
    with exclusive(store):
        remove_unfinished_files(store)
        catalog = open_fresh(store, where)
        yield catalog, [path for path, _ in dump_files(catalog, where)]
    open_fresh(store)


def drop_from_pack(store: Store, pack: str, dump_ids: Iterable[str]) -> None:
    """Rewrite a pack (its path below the store) without these dumps, or remove it if none is left. Hold `exclusive`.

    Raises CorruptDump, and leaves the pack unchanged, if a remaining dump is damaged.
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
            writer.arrived = path.stat().st_mtime
            writer.add(*places.read_exactly(places.packed_place(os.fspath(path), dump_id)))
            if writer.is_full or dump_id == staying[-1]:
                writer.publish()
                writer = None
    finally:
        if writer:
            writer.discard()
    remove(path)
    sync_folder(path.parent)


def _pack_run(store: Store, paths: Sequence[str], summary: PackSummary, tell: Callable[[], object]) -> None:
    """Put the files of a run into packs, and remove each once its pack is complete; a bad file stays where it is."""
    writer: PackWriter | None = None
    going: list[tuple[Path, int]] = []
    try:
        for place in paths:
            path = store.root / place
            try:
                require_own_way(path)  # it is removed later
                record, line, payload = places.read_exactly(path)
                state = path.stat()
                dumpfile.check(record, payload, str(path))
                check_place(store, record, place)
                writer = writer or PackWriter(store.packs / record.run)
                writer.add(record, line, payload)
                writer.arrived = max(writer.arrived, state.st_mtime)
                going.append((path, state.st_size))
            except FileNotFoundError:  # removed meanwhile
                pass
            except ActordbgError as error:
                summary.kept.append(Damaged.by(place, error, str(path)))
            if writer and going and (writer.is_full or place == paths[-1]):
                published, figures = writer.publish()
                summary.packs.append(store.relative(published))
                summary.figures += figures
                summary.loose_bytes += sum(size for _, size in going)
                _remove_files([path for path, _ in going])
                writer, going = None, []
            tell()
    finally:
        if writer:
            writer.discard()


def write_out(store: Store, place: str) -> Path:
    """Write a packed dump as a separate file, read it again and return its path. StoreProblem if another dump lies there."""
    record, line, payload = places.read_exactly(store.root / place)
    dumpfile.check(record, payload, place)
    path = store.dump_path(record)
    if not os.path.lexists(path):
        atomic_write(path, pack_line(line, payload, UNPACK_LEVEL))
        if parts := places.split_place(place):
            arrived = (store.root / parts[0]).stat().st_mtime
            os.utime(path, (arrived, arrived))
    if dumpfile.read_payload(path) != (record, payload):
        raise StoreProblem(f"{store.relative(path)} exists and is another dump")
    return path


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
    """Remove packs that an interrupted `unpack` or `prune` left: all their dumps are whole elsewhere."""
    rows = {places.dump_id_of(path): path for path, _ in dump_files(catalog)}
    used = {packed[0] for path in rows.values() if (packed := places.split_place(path))}
    for path in store.iter_packs():
        if store.relative(path) in used:
            continue
        with contextlib.suppress(StoreProblem, FileNotFoundError):
            here = {dump_id: places.packed_place(os.fspath(path), dump_id) for dump_id in open_pack(path).dump_ids}
            if all(
                dump_id in rows and places.read_payload(store.root / rows[dump_id])[0] == places.read_record(place)
                for dump_id, place in here.items()
            ):
                remove(path)
                sync_folder(path.parent)


def twins(store: Store, packed: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield (place in a pack, file) of each packed dump that also has a file: an interrupted `pack` or `unpack` left it."""
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
        remove(path)
    for folder in {path.parent for path in paths}:
        sync_folder(folder)
