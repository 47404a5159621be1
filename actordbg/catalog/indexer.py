"""Updates the catalog from the files of the store. Nothing else writes it.

`refresh` finds what changed since the last refresh, and writes only that:

* It lists a folder of dumps again only if the folder's modification time changed, so a refresh with nothing new costs one
  `stat` for each folder. It does not rely on a time younger than two seconds: file systems keep coarse times, and it would miss
  a file that arrived in the same tick.
* It reads packs first (`sources`). A dump that lies both in a pack and in a file has one row, the packed one.
* It reads only the header of a new dump, removes the row of a vanished dump, and notes a damaged dump with the reason. A dump
  of a newer format, or an unreadable dump, may become readable later, so its folder is listed again each time.
* It reads journals of replays from where the last refresh stopped (`record_rows`).
* It opens only regular files. It also notes links, FIFOs, names that are not text and anything else that is not a file of ours.
* It reads files of comparisons and lints that are new or were replaced (`sources`).

Many processes may refresh at once. Each reads a batch of files and then writes it in one immediate transaction. The first
batch forgets the folder's noted time and the last batch notes it again. So a refresh that is killed, or overtaken by
another, leaves a folder that will be listed again, and never a lasting wrong row.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actordbg.base.errors import NewerFormat, StoreProblem
from actordbg.catalog import connections as engine, dump_verdicts, migrate, record_rows
from actordbg.catalog.lab_columns import Replay
from actordbg.catalog.sources import Lints, Source, packs
from actordbg.catalog.tables import OF_A_RANK, Damaged, odd_files
from actordbg.formats.dump_record import SUFFIX
from actordbg.formats.store_files import OddFile
from actordbg.store.layout import UNPRINTABLE, Store, printable

if TYPE_CHECKING:
    from actordbg.catalog.statements import CatalogWriter

ANALYZE_FROM = 5000
"""A refresh that adds at least this many dumps updates the statistics of SQLite's planner."""

Progress = Callable[[int, int], None]
"""Called with (dumps read, dumps to read) after each batch."""

FOLDERS = ("dumps", "packs", "replays", "comparisons", "lints")
"""The folders that a refresh reads."""
NO_FOLDER = "it is not a folder"


@dataclass
class IndexSummary:
    """Summary of a refresh. `damaged` lists every known file that could not be indexed.

    `comparisons` counts their files that were read. `private_catalog`: where the catalog lies, if not in the store.
    """

    added: int = 0
    removed: int = 0
    results: int = 0
    replays: int = 0
    comparisons: int = 0
    damaged: list[Damaged] = field(default_factory=list)
    skipped_lines: int = 0
    dumps: int = 0
    seconds: float = 0.0
    private_catalog: str | None = None


def refresh(store: Store, rebuild: bool = False, on_progress: Progress | None = None) -> IndexSummary:
    """Index what is new in the store; with `rebuild` forget everything first. Safe to run in many processes at once.

    A store whose catalog cannot be written gets a private catalog. Raises StoreProblem or NewerFormat for an invalid store,
    CatalogProblem for an unusable catalog. Damaged dumps and replays are in the summary; they never raise.
    """
    start = time.perf_counter()
    store.require()
    summary = migrate.with_a_catalog(store, lambda: _refresh(store, rebuild, on_progress))
    summary.private_catalog = str(store.catalog_path) if migrate.is_private(store) else None
    summary.seconds = time.perf_counter() - start
    return summary


def _refresh(store: Store, rebuild: bool, on_progress: Progress | None) -> IndexSummary:
    path, summary = store.catalog_path, IndexSummary()

    def take_in() -> None:
        _refresh_dumps(store, summary, on_progress)
        _refresh_replays(store, summary)
        summary.comparisons = len(Source(store, "comparisons").look().take().changed)
        Lints(store, "lints").look().take()
        _judge_dumps(store)

    revision, usable = (None, False) if rebuild else migrate.look(path)
    if revision and not usable and migrate.upgraded(store, revision):
        logging.getLogger("actordbg").warning(f"migrated the catalog from revision {revision:.20} to {migrate.HEAD}")
        usable = True
    made = not usable and migrate.make_anew(store, take_in, rebuild=rebuild)
    if made and revision:
        logging.getLogger("actordbg").warning(
            f"rebuilt the catalog from the store's files: it was made by another actordbg (revision {revision:.20})"
        )
    if not made:
        with engine.held_open(path):
            take_in()
    if summary.added >= ANALYZE_FROM:
        with engine.writing(path) as writer:
            writer.count_for_planner()
    with engine.connect_readonly(path) as reader:  # the last to close leaves empty journals, which read-only users need
        summary.damaged += read_damaged(reader)
        summary.dumps = reader.execute("SELECT count(*) FROM dump").fetchone()[0]
    return summary


def forget_dumps(store: Store, dump_ids: Iterable[str], folders: Iterable[str]) -> None:
    """Forget dumps whose files were replaced, and the listing of their folders (paths below the store)."""
    if not migrate.look(store.catalog_path)[1]:
        return  # the next refresh rebuilds it
    with engine.writing(store.catalog_path) as writer:
        writer.remove_dumps(dump_ids)
        for folder in folders:
            writer.note_folder(folder, -1)


def read_damaged(reader: sqlite3.Connection) -> list[Damaged]:
    """Return every file that is noted as damaged: dumps, packs, comparisons."""
    return [Damaged(*row) for row in reader.execute("SELECT path, code, reason FROM damaged_file ORDER BY path")]


class Dumps(Source):
    """The dump files of one rank. There may be many, and they never change, so their names identify them."""

    suffix = SUFFIX
    at_once = 4096

    def __init__(self, store: Store, folder: str) -> None:
        super().__init__(store, folder)
        _, self._run, name = folder.split("/")
        match = re.fullmatch(r"rank(\d{4,})", name)
        self._rank = int(match[1]) if match and name == f"rank{int(match[1]):04d}" else None

    def known(self, reader: sqlite3.Connection) -> dict[str, Any]:
        """Return the rank's dumps that have rows, by path."""
        rows = reader.execute(f"SELECT dump_id, pack FROM dump WHERE {OF_A_RANK}", (self._run, self._rank)).fetchall()
        self._packed = {self._path(dump_id): None for dump_id, pack in rows if pack is not None}
        return {self._path(dump_id): None for dump_id, _ in rows}

    def listed(self, rejected: dict[str, str]) -> dict[str, Any]:
        """Return the dumps that have a file, or lie in a pack."""
        names = [name for name in self.store.names(self.folder) if name[0] != "."]
        strange = set() if "".join(names).isprintable() else {name for name in names if not name.isprintable()}
        rejected |= {printable(f"{self.folder}/{name}"): UNPRINTABLE for name in strange}
        return self._packed | {f"{self.folder}/{name}": None for name in names if name.endswith(SUFFIX) and name not in strange}

    def remove(self, writer: CatalogWriter, paths: Sequence[str]) -> int:
        """Remove the rows of these dumps, except packed ones."""
        names = {self._name(path) for path in paths if path.endswith(SUFFIX)}  # rejected files may have other names
        gone = names.intersection(writer.known_dumps(self._run, self._rank))
        writer.remove_dumps(gone)
        return len(gone)

    def take_in(self, paths: Sequence[str], on_read: Callable[[int], None]) -> bool:
        """Read these files in batches; batches with an irregular file one by one."""
        from actordbg.catalog import dump_rows  # imports msgspec, which is needed only if something is new

        blocks: list[dump_rows.Columns] = []
        damaged: list[Damaged] = []
        final = True
        with _collector_paused():
            for first in range(0, len(paths), dump_rows.AT_ONCE):
                names = list(map(self._name, paths[first : first + dump_rows.AT_ONCE]))
                columns = dump_rows.read_columns(f"{self.store.root}/{self.folder}/", names, self._run, self._rank)
                if columns is not None:
                    blocks.append(columns)
                    continue
                for name in names:
                    path = f"{self.store.root}/{self._path(name)}"
                    try:
                        blocks.append(dump_rows.read_one(path, name, self._run, self._rank))
                    except FileNotFoundError:
                        continue
                    except (StoreProblem, OSError) as error:
                        passing = isinstance(error, NewerFormat | OSError) and not isinstance(error, OddFile)
                        final = final and not passing
                        damaged.append(Damaged.by(self._path(name), error, path))
            together = dump_rows.joined(blocks)
            with self._writing() as writer:
                writer.note_folder(self.folder, -1)
                writer.put_damaged(self.folder, damaged, map(self._path, together.get("dump_id", ())))
                self.added += writer.put_dumps(self._run, together)
        on_read(len(paths))
        return final

    def _path(self, dump_id: str) -> str:
        return f"{self.folder}/{dump_id}{SUFFIX}"

    def _name(self, path: str) -> str:
        return path[len(self.folder) + 1 : -len(SUFFIX)]


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause garbage collection: rows are many small tuples without cycles, and the search for cycles takes 2 of 27 us a dump."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def dump_folders(store: Store, rejected: dict[str, str]) -> Iterator[Dumps]:
    """Return the ranks' folders, including vanished ones. `rejected` gets what lies in place of a folder, and why."""
    runs = store.folder_names("dumps", rejected)
    present = {f"dumps/{run}/{rank}" for run in runs for rank in store.folder_names(f"dumps/{run}", rejected)}
    with engine.connect_readonly(store.catalog_path) as reader:
        noted = {path for (path,) in reader.execute("SELECT path FROM scanned_folder WHERE path LIKE 'dumps/%'")}
    gone = {path for path in noted - present if not {"dumps", path.rpartition("/")[0]} & rejected.keys()}
    return (Dumps(store, path) for path in sorted(present | gone))


def _refresh_dumps(store: Store, summary: IndexSummary, on_progress: Progress | None) -> None:
    done = total = 0

    def count(read: int) -> None:
        nonlocal done
        done += read
        if on_progress and read:
            on_progress(done, max(done, total))

    rejected = {
        path: NO_FOLDER for path in FOLDERS if os.path.lexists(store.root / path) and not os.path.isdir(store.root / path)
    }
    for pack in packs(store, rejected):
        pack.look().take(count)
        summary.added, summary.removed = summary.added + pack.added, summary.removed + pack.removed
    folders = []
    for folder in dump_folders(store, rejected):
        try:
            folder.look()
            folders.append(folder)
        except StoreProblem as error:
            rejected[folder.folder] = error.message
    total = done + sum(len(folder.changed) for folder in folders)
    for folder in folders:
        folder.take(count)
        summary.added, summary.removed = summary.added + folder.added, summary.removed + folder.removed
    summary.damaged += odd_files(rejected)


def _judge_dumps(store: Store) -> None:
    """Fold the verdicts of all dumps with news, some in each transaction; those that a killed refresh left too."""
    with engine.connect_readonly(store.catalog_path) as reader:
        has_news = reader.execute("SELECT 1 FROM unjudged LIMIT 1").fetchone()
    while has_news:
        with engine.plain_transaction(store.catalog_path) as connection:
            has_news = dump_verdicts.fold_news(connection)


def _refresh_replays(store: Store, summary: IndexSummary) -> None:
    known: dict[str, record_rows.Marks] = {}
    with engine.connect_readonly(store.catalog_path) as reader:
        sql = "SELECT replay_id, path, size, mtime_ns, offset FROM read_file WHERE replay_id != ''"
        for replay_id, path, *mark in reader.execute(sql):
            known.setdefault(replay_id, {})[path] = tuple(mark)
        present = [replay_id for (replay_id,) in reader.execute("SELECT replay_id FROM replay")]
    rejected: dict[str, str] = {}
    for replay_id, paths in record_rows.changed_replays(store, known, rejected):
        before = known.get(replay_id, {})
        try:
            with engine.connect_readonly(store.catalog_path) as reader:
                rows = reader.execute(f"SELECT {', '.join(Replay.columns)} FROM replay WHERE replay_id = ?", (replay_id,))
                row = next(engine.decoded(Replay.columns, rows), None)
            news = record_rows.read_news(store.root, replay_id, paths, before, row)
        except (StoreProblem, OSError) as error:
            summary.damaged.append(Damaged.by(f"replays/{replay_id}", error))
            continue
        with engine.writing(store.catalog_path) as writer:
            writer.put_replay(news, before)
        rejected |= news.odd
        summary.replays += 1
        summary.results += len(news.results)
        summary.skipped_lines += news.skipped
    summary.damaged += odd_files(rejected)
    gone = [replay_id for replay_id in present if not (store.replays / replay_id).is_dir()]
    if gone:
        with engine.writing(store.catalog_path) as writer:
            writer.remove_replays(gone)
