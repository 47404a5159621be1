"""Folders whose files become rows: packs, comparisons, noise floors, matrices, memory, patch events; `indexer` has the dumps'.

One loop takes them all in (`Source.look`, `Source.take`). It lists a folder again only if the folder's modification time changed,
and reads a file again only if its size or time did. Times younger than two seconds are not relied on: file systems keep coarse
times, and a file that was replaced in the same tick would be missed. A subclass says how a file is read, and what becomes of its
rows.

An interrupted `pack` or `unpack` leaves a dump both in a pack and in a file. Such a dump is one row, the packed one. So packs are
indexed before files, and take over the files' rows. When a pack vanishes, the run's folders are listed again, because files may
have come in its place. Another pack may take over a row whose pack is no longer noted."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actordbg.base.errors import ActordbgError, NewerFormat, StoreProblem
from actordbg.catalog import connections as engine
from actordbg.catalog.tables import Damaged, odd_files
from actordbg.formats.store_files import OddFile
from actordbg.store.layout import Store
from actordbg.store.pack_bytes import PACK_SUFFIX
from actordbg.store.places import open_pack, packed_place

if TYPE_CHECKING:
    from actordbg.catalog.statements import CatalogWriter

SETTLED_NS = 2_000_000_000
"""A modification time is relied on if it was at least so old when it was looked at."""
_NAMED = 20
"""Dumps of a damaged pack that are named."""


class Source:
    """A folder of the store, each of whose files makes rows; on its own one of comparisons, noise floors, matrices, memory or
    patch events, of which a file is one record. `changed`: the files to read, after a `look`.
    """

    suffix = ".json"
    changes = True
    """Whether a file may be replaced under its name."""
    at_once = 1
    """Files that are taken in together."""
    tables: dict[str, tuple[str, ...]] = {
        "comparisons": ("comparison", "comparison_run"),
        "noise": ("noise_floor",),
        "memory": ("memory_watch",),
        "matrices": ("matrix_cell", "matrix"),
        "events": ("patch_event",),
    }
    """By folder of records the tables that its rows are in."""

    def __init__(self, store: Store, folder: str) -> None:
        self.store, self.folder = store, folder
        self.added = self.removed = 0
        self.changed: list[str] = []

    def known(self, reader: sqlite3.Connection) -> dict[str, Any]:
        """The files whose rows are there, each with what it was when it was read."""
        sql = "SELECT path, size, mtime_ns FROM read_file WHERE substr(path, 1, ?) = ?"
        return {row[0]: row[1:] for row in reader.execute(sql, (len(self.folder) + 1, f"{self.folder}/"))}

    def listed(self, rejected: dict[str, str]) -> dict[str, Any]:
        """The files that are there, each with what it is now: its size and time. `odd` gets what is not a file of ours, and
        why."""
        young = time.time_ns() - SETTLED_NS  # such a time is noted as -1, and the file read again the next time
        return {
            path: (state.st_size, -1 if self.changes and state.st_mtime_ns >= young else state.st_mtime_ns)
            for path, state in self.store.files(self.folder, self.suffix, rejected).items()
        }

    def rows(self, path: str) -> tuple[Any, list[Damaged]]:
        """What a file (its path below the store) says, None for nothing, and what is damaged in it. StoreProblem or OSError."""
        from actordbg.catalog.record_rows import event_row, read_record, rows_of

        if self.folder == "events":
            event = event_row(self.store.root / path)
            return event and {"patch_event": [event]}, []
        return rows_of(read_record(self.store.root, path)), []

    def put(self, writer: CatalogWriter, path: str, rows: Any) -> int:
        """Write what a file says in place of what was there; returns how many rows are new."""
        self.remove(writer, [path])
        for table, made in rows.items():
            writer.put(table, made)
        return 1

    def remove(self, writer: CatalogWriter, paths: Sequence[str]) -> int:
        """Remove what came from files that are gone, or damaged; returns how many rows went."""
        from actordbg.catalog.record_rows import ID

        for path in paths:
            name = Path(path).name if self.folder == "events" else Path(path).stem
            writer.remove_rows(self.tables[self.folder], ID[self.folder], name)
        return len(paths)

    def begin(self, writer: CatalogWriter) -> None:
        """What is forgotten before the first file is read."""

    def look(self) -> Source:
        """Find the files that are new, changed or gone, if anything came into the folder or left it."""
        self._mtime_ns = self.store.modified_ns(self.folder)
        with engine.connect_readonly(self.store.catalog_path) as reader:
            noted = reader.execute("SELECT mtime_ns FROM scanned_folder WHERE path = ?", (self.folder,)).fetchone()
            self._differs = (noted[0] if noted else 0) != self._mtime_ns
            if not self._differs:
                return self
            known = self.known(reader)
            damaged = reader.execute("SELECT path FROM damaged_file WHERE folder = ?", (self.folder,)).fetchall()
        self._odd: dict[str, str] = {}
        self._found = self.listed(self._odd)
        self._gone = sorted({*known, *(self._file_of(path) for (path,) in damaged)} - self._found.keys())
        self.changed = sorted(
            path for path, stamp in self._found.items() if path not in known or known[path] != stamp or (stamp and stamp[1] < 0)
        )
        return self

    def take(self, on_read: Callable[[int], None] = lambda count: None) -> Source:
        """Read what `look` found, and write its rows. on_read: called with how many were read, again and again."""
        if not self._differs:
            return self
        with self._writing() as writer:
            writer.note_folder(self.folder, -1)
            self.begin(writer)
        final = True
        for first in range(0, len(self.changed), self.at_once):
            final = self.take_in(self.changed[first : first + self.at_once], on_read) and final
        with self._writing() as writer:
            known = self.known(writer.connection)  # also rows that another refresh has written since `look`
            gone = sorted({*self._gone, *known.keys() - self._found.keys()})
            gone = [path for path in gone if path in self._odd or not os.path.lexists(self.store.root / path)]
            self.removed += self.remove(writer, gone)
            for path in gone:
                writer.forget_file(path)
            writer.put_damaged(self.folder, odd_files(self._odd))
            settled = final and time.time_ns() - self._mtime_ns >= SETTLED_NS
            writer.note_folder(self.folder, self._mtime_ns if settled else -1)
            if not self._mtime_ns:  # it is gone
                writer.remove_rows(("scanned_folder",), "path", self.folder)
        return self

    def take_in(self, paths: Sequence[str], on_read: Callable[[int], None]) -> bool:
        """Read a file and write its rows; whether they stay the same as long as the file does."""
        (path,) = paths
        rows: Any = None
        damaged: list[Damaged] = []
        try:
            rows, damaged = self.rows(path)
            final = not any(item.code == NewerFormat.code for item in damaged)
        except FileNotFoundError:
            final = False
        except OSError as error:
            damaged, final = [Damaged.by(path, error)], isinstance(error, OddFile)
        except StoreProblem as error:  # a newer actordbg may have written it; and a plain one says that it cannot be read now
            damaged = [Damaged.by(path, error, f"{self.store.root / path}")]
            final = error.code not in (NewerFormat.code, StoreProblem.code)
        with self._writing() as writer:
            writer.note_folder(self.folder, -1)
            writer.forget_file(path)
            if rows is None:
                self.remove(writer, paths)
            added = 0 if rows is None else self.put(writer, path, rows)
            writer.put_damaged(self.folder, damaged)
            if final:
                size, mtime_ns = self._found[path]
                writer.put("read_file", [{"path": path, "replay_id": "", "size": size, "mtime_ns": mtime_ns, "offset": 0}])
        self.added += added
        on_read(added)
        return final

    def _file_of(self, path: str) -> str:
        """The file that a damaged path is, or is in: `x.pack` of `x.pack#dump`. A file's own name may have a # in it."""
        file, mark, _ = path.partition(f"{self.suffix}#")
        return file + self.suffix if mark and path not in self._found else path

    def _writing(self) -> Any:
        return engine.writing(self.store.catalog_path)


class Packs(Source):
    """The packs of one run."""

    suffix = PACK_SUFFIX
    changes = False

    def rows(self, path: str) -> tuple[Any, list[Damaged]]:
        """Columns of a pack's good dumps."""
        from actordbg.catalog import dump_rows

        try:
            pack = open_pack(self.store.root / path)
        except StoreProblem as error:
            raise type(error)(f"{error.message}{self._with_it(path)}", hint=error.hint) from None
        run, lines, shares = path.split("/")[1], list(map(pack.line, pack.dump_ids)), pack.shares()
        try:
            columns = dict(zip(dump_rows.DUMP_COLUMNS, dump_rows.columns_of(lines, shares, path), strict=True))
            if [*columns["dump_id"]] == pack.dump_ids and {*columns["run"]} == {run}:
                return [*columns.values()], []
        except (ValueError, RecursionError):
            pass  # each goes through the full check
        rows, damaged = [], []
        for dump_id, line, share in zip(pack.dump_ids, lines, shares, strict=True):
            try:
                row = dump_rows.row_of(line, share, path)
                of_id, of_run = (row[dump_rows.DUMP_COLUMNS.index(name)] for name in ("dump_id", "run"))
                if (of_id, of_run) != (dump_id, run):
                    raise StoreProblem(f"its record is that of {of_id}, and belongs below packs/{of_run}")
                rows.append(row)
            except ActordbgError as error:
                damaged.append(Damaged.by(packed_place(path, dump_id), error))
        return list(zip(*rows, strict=True)), damaged

    def _with_it(self, path: str) -> str:
        """The dumps that were known to be in a pack that cannot be read, in words."""
        with engine.connect_readonly(self.store.catalog_path) as reader:
            lost = [dump_id for (dump_id,) in reader.execute("SELECT dump_id FROM dump WHERE pack = ?", (path,))]
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        return f"; with it {', '.join(lost[:_NAMED])}{more} cannot be read" if lost else ""

    def put(self, writer: CatalogWriter, path: str, rows: Any) -> int:
        """Files' rows become the pack's, others are added; those of dumps that it does not have any more go."""
        if rows:
            writer.take_into_pack(path, rows)
        added = writer.put_dumps(path.split("/")[1], rows)
        self._remove(writer, set(writer.packed_dumps(path)).difference(*rows[:1]))
        return added

    def remove(self, writer: CatalogWriter, paths: Sequence[str]) -> int:
        """The rows of dumps in them go."""
        return self._remove(writer, {dump_id for path in paths for dump_id in writer.packed_dumps(path)})

    def _remove(self, writer: CatalogWriter, dump_ids: set[str]) -> int:
        """Remove rows of packed dumps. Files of the same dumps may be there: the run's folders are listed again."""
        if dump_ids:
            writer.remove_dumps(dump_ids)
            writer.forget_folders_of(self.folder.split("/")[1])
        return len(dump_ids)

    def known(self, reader: sqlite3.Connection) -> dict[str, Any]:
        """Also packs that dumps' rows say they lie in."""
        sql = "SELECT DISTINCT pack FROM dump WHERE pack > ? AND pack < ?"
        rows = reader.execute(sql, (f"{self.folder}/", f"{self.folder}0"))  # "0" comes after "/"
        return {pack: None for (pack,) in rows} | super().known(reader)

    def begin(self, writer: CatalogWriter) -> None:
        """If a pack is gone all are read: another may hold what it held. None of these is noted meanwhile."""
        if self._gone:
            self.changed = sorted(self._found)
        for path in (*self._gone, *self.changed):
            writer.forget_file(path)


def packs(store: Store, rejected: dict[str, str]) -> Iterator[Packs]:
    """The folders of packs, also those that are gone. `odd` gets what lies among the runs' folders and is none, and why."""
    with engine.connect_readonly(store.catalog_path) as reader:
        noted = reader.execute("SELECT path FROM scanned_folder WHERE path LIKE 'packs/%'").fetchall()
    for run in sorted({*store.folder_names("packs", rejected), *(path.split("/")[1] for (path,) in noted)}):
        yield Packs(store, f"packs/{run}")
