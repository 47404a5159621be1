"""Makes the catalog agree with the files of the store. Nothing else writes it.

`refresh` finds what changed since the last time, and writes only that:

* It lists a folder of dumps again only if the folder's modification time changed, so a refresh with nothing new costs one
  `stat` for each folder. A time younger than two seconds is not relied on: file systems keep coarse times, and a file
  that arrived in the same tick would be missed.
* It reads packs first (`sources`). A dump that lies in a pack and in a file is one row, the packed one.
* It reads only the header of a new dump, removes the row of a vanished one, and notes a damaged one with its reason. A dump
  of a newer format, or one that could not be read, may become readable later; its folder is listed again each time.
* It reads journals of replays on from where the last refresh stopped (`record_rows`).
* It opens nothing but regular files. Links, FIFOs, names that are no text and whatever else is no file of ours are noted too.
* It reads files of comparisons, noise floors, matrices and memory that are new or were replaced (`sources`).

Many processes may refresh at once. Each reads a batch of files and then writes it in one immediate transaction. The first
batch forgets the folder's noted time and the last one notes it again. So a refresh that is killed, or overtaken by
another one, leaves a folder that will be listed again, and never a wrong row that stays.

Example::

    summary = refresh(store)
    print(summary.added, summary.removed, summary.damaged)
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from actordbg.base.errors import NewerFormat, StoreProblem
from actordbg.catalog import connections as engine
from actordbg.catalog import migrate, private_catalog, record_rows
from actordbg.catalog.sources import SETTLED_NS, Events, packs, refresh_records
from actordbg.catalog.tables import OF_A_RANK, Damaged, odd_files
from actordbg.formats.dump_record import SUFFIX
from actordbg.formats.store_files import OddFile
from actordbg.store.layout import UNPRINTABLE, Store, printable

BATCH = 4096
"""Dumps that are read and then written in one transaction."""
ANALYZE_FROM = 5000
"""A refresh that adds so many dumps counts the indexes' entries again for SQLite's planner."""

Progress = Callable[[int, int], None]
"""Called with (dumps read, dumps to read) after each batch."""

FOLDERS = ("dumps", "packs", "replays", "comparisons", "noise", "matrices", "memory", "events")
"""The folders that it reads."""
NO_FOLDER = "it is not a folder"
_RANK = re.compile(r"rank(\d{4,})\Z")


@dataclass
class IndexSummary:
    """What a refresh did. `damaged` lists every file that is known and could not be indexed.

    `lab` counts the files of comparisons, noise floors, matrices and memory that were read.
    `private_catalog`: where the catalog lies, if not in the store.
    """

    added: int = 0
    removed: int = 0
    results: int = 0
    replays: int = 0
    events: int = 0
    lab: int = 0
    damaged: list[Damaged] = field(default_factory=list)
    skipped_lines: int = 0
    dumps: int = 0
    seconds: float = 0.0
    private_catalog: str | None = None


@dataclass
class _DumpFolder:
    """A folder of dumps that has to be listed: its place, its modification time before the listing, and what is new."""

    path: str
    run: str
    rank: int | None
    mtime_ns: int
    names: set[str]
    new: list[str]
    odd: dict[str, str]


def refresh(store: Store, rebuild: bool = False, on_progress: Progress | None = None, *, newer_too: bool = False) -> IndexSummary:
    """Index what is new in the store; with `rebuild` forget everything first. Safe to run in many processes at once.

    A store whose catalog cannot be written has a private one; with `newer_too` also one whose catalog is newer than this program.
    Raises StoreProblem or NewerFormat for a store that is not one, CatalogProblem for a catalog that cannot be used.
    Damaged dumps and replays are in the summary; they never fail it.
    """
    start = time.perf_counter()
    store.require()
    summary = private_catalog.with_a_catalog(store, lambda: _refresh(store, rebuild, on_progress), newer_too=newer_too)
    summary.private_catalog = str(store.catalog_path) if private_catalog.is_private(store) else None
    summary.seconds = time.perf_counter() - start
    return summary


def _refresh(store: Store, rebuild: bool, on_progress: Progress | None) -> IndexSummary:
    path, summary = store.catalog_path, IndexSummary()

    def take_in(anew: bool = False) -> None:
        _refresh_dumps(store, summary, on_progress, anew)
        _refresh_replays(store, summary)
        summary.events = Events(store, "events").refresh().added
        summary.lab = refresh_records(store)

    fresh = rebuild or not path.exists()
    old = None if fresh else migrate.earlier(path)
    made = (fresh or old) and migrate.make_anew(store, lambda: take_in(anew=True), rebuild=rebuild)
    if made and old:
        logging.getLogger("actordbg").warning(
            f"rebuilt the catalog from the store's files: an earlier actordbg made it (revision {old:.20})"
        )
    if not made:
        migrate.ensure(store)
        with engine.held_open(path) if engine.is_writable(path) else contextlib.nullcontext(), engine.one_reader(path):
            take_in()
    if summary.added >= ANALYZE_FROM:
        with engine.writing(path) as writer:
            writer.count_for_planner()
    with engine.connect_readonly(path) as reader:  # the last to close leaves empty journals, without which others cannot read
        summary.damaged += read_damaged(reader)
        summary.dumps = reader.execute("SELECT count(*) FROM dump").fetchone()[0]
    return summary


def forget_dumps(store: Store, dump_ids: Iterable[str], folders: Iterable[str]) -> None:
    """Forget dumps whose files were replaced, and that their folders (paths below the store) were listed: read them again."""
    migrate.ensure(store)
    if migrate.earlier(store.catalog_path):
        return  # the next refresh makes it anew
    with engine.writing(store.catalog_path) as writer:
        writer.remove_dumps(dump_ids)
        for folder in folders:
            writer.note_folder(folder, -1)


def read_damaged(reader: sqlite3.Connection) -> list[Damaged]:
    """Every file that is noted as damaged: dumps, packs, comparisons, noise floors, matrices, memory."""
    return [Damaged(*row) for row in reader.execute("SELECT path, code, reason FROM damaged_file ORDER BY path")]


def _refresh_dumps(store: Store, summary: IndexSummary, on_progress: Progress | None, anew: bool) -> None:
    """anew: no row is there that this refresh did not write."""
    done = 0

    def count(read: int) -> None:
        nonlocal done
        done += read
        if on_progress and read:
            on_progress(done, done)

    odd = {path: NO_FOLDER for path in FOLDERS if os.path.lexists(store.root / path) and not os.path.isdir(store.root / path)}
    for source in packs(store, odd):
        source.refresh(count)
        summary.added, summary.removed = summary.added + source.added, summary.removed + source.removed
    folders, gone = _changed_folders(store, odd)
    summary.damaged += odd_files(odd)
    total = done + sum(len(folder.new) for folder in folders)
    for folder in folders:
        final = True
        for first in range(0, len(folder.new), BATCH):
            batch = folder.new[first : first + BATCH]
            with _collector_paused():
                columns, damaged, passing = _read_batch(store, folder, batch)
                with engine.writing(store.catalog_path) as writer:
                    writer.note_folder(folder.path, -1)
                    sound = (f"{folder.path}/{name}{SUFFIX}" for name in (columns[0] if columns else ()))
                    writer.put_damaged(folder.path, damaged, sound)
                    summary.added += writer.put_dumps(folder.run, columns)
            final = final and not passing
            done += len(batch)
            if on_progress:
                on_progress(done, total)
        summary.removed += _settle(store, folder, final, anew)
    for path in gone:
        summary.removed += _drop_folder(store, path)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Rows are many small tuples without a cycle among them: looking for one takes 2 of 27 us a dump."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _changed_folders(store: Store, odd: dict[str, str]) -> tuple[list[_DumpFolder], list[str]]:
    """Folders to list again, listed, and the known folders that are no longer there. `odd` gets what is there in their place."""
    with engine.connect_readonly(store.catalog_path) as reader:
        noted = dict(reader.execute("SELECT path, mtime_ns FROM scanned_folder WHERE path LIKE 'dumps/%'"))
        present, changed = set(), []
        runs = store.folder_names("dumps", odd)
        for path in (f"dumps/{run}/{rank}" for run in runs for rank in store.folder_names(f"dumps/{run}", odd)):
            _, run, name = path.split("/")
            mtime_ns = store.modified_ns(path)
            if mtime_ns:
                present.add(path)
            if mtime_ns in (0, noted.get(path)):
                continue
            try:
                listed = store.names(path)
            except StoreProblem as error:
                odd[path] = error.message
                continue
            match = _RANK.match(name)
            rank = int(match[1]) if match and name == f"rank{int(match[1]):04d}" else None
            cut, ours = -len(SUFFIX), [entry for entry in listed if entry[0] != "."]
            odd_ones = [] if "".join(ours).isprintable() else [entry for entry in ours if not entry.isprintable()]
            strange = {printable(f"{path}/{entry}"): UNPRINTABLE for entry in odd_ones}
            names = {entry[:cut] for entry in ours if entry.endswith(SUFFIX)}.difference(entry[:cut] for entry in odd_ones)
            known = {row[0] for row in reader.execute(f"SELECT dump_id FROM dump WHERE {OF_A_RANK}", (run, rank))}
            changed.append(_DumpFolder(path, run, rank, mtime_ns, names, sorted(names - known), strange))
    return changed, sorted(path for path in set(noted) - present if not {"dumps", path.rpartition("/")[0]} & odd.keys())


def _read_batch(store: Store, folder: _DumpFolder, names: list[str]) -> tuple[list[Any], list[Damaged], bool]:
    """Columns of the good ones, the damaged ones, and whether any of these may become good without a change of the folder."""
    from actordbg.catalog import dump_rows  # and msgspec, which nothing new does without

    blocks: list[Any] = []
    damaged: list[Damaged] = []
    passing = False
    for first in range(0, len(names), dump_rows.AT_ONCE):
        some = names[first : first + dump_rows.AT_ONCE]
        columns = dump_rows.read_columns(f"{store.root}/{folder.path}/", some, folder.run, folder.rank)
        if columns is None:  # something is odd among them
            rows = []
            for name in some:
                path = f"{folder.path}/{name}{SUFFIX}"
                try:
                    rows.append(dump_rows.read_row(f"{store.root}/{path}", name, folder.run, folder.rank))
                except FileNotFoundError:
                    continue
                except (StoreProblem, OSError) as error:
                    passing = passing or (isinstance(error, NewerFormat | OSError) and not isinstance(error, OddFile))
                    damaged.append(Damaged.by(path, error))
            columns = list(zip(*rows, strict=True))
        if columns:
            blocks.append(columns)
    return [[*chain.from_iterable(parts)] for parts in zip(*blocks, strict=True)], damaged, passing


def _settle(store: Store, folder: _DumpFolder, final: bool, anew: bool) -> int:
    """The last transaction of a folder: rows of vanished files go, and its modification time is noted.

    `final`: what was read of its files will be the same as long as the modification time is.
    """
    settled = final and time.time_ns() - folder.mtime_ns >= SETTLED_NS
    with engine.writing(store.catalog_path) as writer:
        known = [] if anew else writer.known_dumps(folder.run, folder.rank)
        missing = [name for name in known if name not in folder.names]
        missing = [name for name in missing if not os.path.lexists(f"{store.root}/{folder.path}/{name}{SUFFIX}")]
        writer.remove_dumps(missing)
        noted = writer.known_damaged(folder.path)
        unlisted = [path for path in noted if path.rpartition("/")[2].removesuffix(SUFFIX) not in folder.names]
        stale = [path for path in unlisted if not os.path.lexists(store.root / path)]
        writer.put_damaged(folder.path, odd_files(folder.odd), stale)
        writer.note_folder(folder.path, folder.mtime_ns if settled else -1)
    return len(missing)


def _drop_folder(store: Store, path: str) -> int:
    _, run, name = path.split("/")
    match = _RANK.match(name)
    with engine.writing(store.catalog_path) as writer:
        if (store.root / path).is_dir():
            writer.note_folder(path, -1)
            return 0
        missing = writer.known_dumps(run, int(match[1]) if match else None)
        writer.remove_dumps(missing)
        writer.put_damaged(path, (), writer.known_damaged(path))
        writer.forget_folder(path)
    return len(missing)


def _refresh_replays(store: Store, summary: IndexSummary) -> None:
    with engine.connect_readonly(store.catalog_path) as reader:
        marks = reader.execute("SELECT path, size, mtime_ns, offset FROM read_file WHERE replay_id != ''")
        known = {path: record_rows.FileMark(*mark) for path, *mark in marks}
        present = [replay_id for (replay_id,) in reader.execute("SELECT replay_id FROM replay")]
    odd: dict[str, str] = {}
    for replay_id, paths in record_rows.changed_replays(store, known, odd):
        try:
            news = record_rows.read_news(store.root, replay_id, paths, known)
        except (StoreProblem, OSError) as error:
            summary.damaged.append(Damaged.by(f"replays/{replay_id}", error))
            continue
        odd |= news.odd
        if not news.files:
            continue
        with engine.writing(store.catalog_path) as writer:
            writer.put_replay(news, {path: known.get(path) for path in news.files})
        summary.replays += 1
        summary.results += len({row["dump_id"] for row in news.results})
        summary.skipped_lines += news.skipped
    summary.damaged += odd_files(odd)
    gone = [replay_id for replay_id in present if not (store.replays / replay_id).is_dir()]
    if gone:
        with engine.writing(store.catalog_path) as writer:
            writer.remove_replays(gone)
