"""Folders whose files become rows: packs, comparisons and lints; `indexer` has dumps.

One loop indexes them all (`Source.look`, `Source.take`). It lists a folder again only if the folder's modification time changed,
and reads a file again only if its size or time did. It does not rely on a folder's time that is younger than two seconds: file
systems keep coarse times, and it would miss a file that came in the same tick. A file has its own name and is published once.
A subclass defines how to read a file and write its rows.

An interrupted `pack` or `unpack` leaves a dump both in a pack and in a file. Such a dump has one row, the packed one. So packs
are indexed before files, and take over the files' rows. When a pack vanishes, the run's folders are listed again, because files
may have replaced it. Another pack may take over a row whose pack is no longer noted."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actordbg.base.errors import ActordbgError, NewerFormat, StoreProblem
from actordbg.catalog import connections as engine
from actordbg.catalog.columns import Row
from actordbg.catalog.lab_columns import Comparison, ComparisonRun, LintAnswer, ReadFile
from actordbg.catalog.tables import Damaged, odd_files
from actordbg.formats.store_files import OddFile
from actordbg.store.layout import Store
from actordbg.store.pack_bytes import PACK_SUFFIX
from actordbg.store.places import open_pack, packed_place

if TYPE_CHECKING:
    from actordbg.catalog.statements import CatalogWriter

SETTLED_NS = 2_000_000_000
"""Age, in nanoseconds, from which a modification time is reliable."""
_NAMED = 20
"""Most dumps of a damaged pack that a message names."""


class Source:
    """A folder of the store whose files make rows. This class reads the comparisons, one in each file. `changed`: the files to
    read, after a `look`. tables: of its rows, the first of those about dumps; `key`: their column with the name of the file.
    """

    tables: tuple[type[Row], ...] = (Comparison, ComparisonRun)
    key = "comparison_id"

    suffix = ".json"
    at_once = 1
    """Files that are indexed together."""

    def __init__(self, store: Store, folder: str) -> None:
        self.store, self.folder = store, folder
        self.added = self.removed = 0
        self.changed: list[str] = []

    def known(self, reader: sqlite3.Connection) -> dict[str, Any]:
        """Return the files that have rows, each with its size and time when it was read."""
        sql = "SELECT path, size, mtime_ns FROM read_file WHERE substr(path, 1, ?) = ?"
        return {row[0]: row[1:] for row in reader.execute(sql, (len(self.folder) + 1, f"{self.folder}/"))}

    def listed(self, rejected: dict[str, str]) -> dict[str, Any]:
        """Return the files of the folder, each with its current size and time. `rejected` gets what is not a file of
        ours, and why."""
        there = self.store.files(self.folder, self.suffix, rejected)
        return {path: (state.st_size, state.st_mtime_ns) for path, state in there.items()}

    def rows(self, path: str) -> tuple[Any, list[Damaged]]:
        """Read the rows of a file (path below the store), and the damage in it. StoreProblem or OSError."""
        from actordbg.catalog.record_rows import comparison_rows

        return comparison_rows(self.store.root, path), []

    def put(self, writer: CatalogWriter, path: str, rows: Any) -> int:
        """Replace the rows of a file; return how many are new."""
        self.remove(writer, [path])
        for table, made in rows.items():
            writer.put(table, made)
        writer.has_news(row["dump_id"] for row in rows[self.tables[0]])
        return 1

    def remove(self, writer: CatalogWriter, paths: Sequence[str]) -> int:
        """Remove the rows of vanished or damaged files; return how many."""
        for path in paths:
            name = Path(path).stem
            writer.has_news(writer.first(f"SELECT dump_id FROM {self.tables[0].table} WHERE {self.key} = ?", name))
            writer.remove_rows((table.table for table in self.tables), self.key, name)
        return len(paths)

    def begin(self, writer: CatalogWriter) -> None:
        """Prepare the catalog before the first file is read; `Packs` overrides this."""

    def look(self) -> Source:
        """Find new, changed and vanished files, if the folder changed."""
        self._mtime_ns = self.store.modified_ns(self.folder)
        with engine.connect_readonly(self.store.catalog_path) as reader:
            noted = reader.execute("SELECT mtime_ns FROM scanned_folder WHERE path = ?", (self.folder,)).fetchone()
            self._differs = (noted[0] if noted else 0) != self._mtime_ns
            if not self._differs:
                return self
            known = self.known(reader)
            damaged = reader.execute("SELECT path FROM damaged_file WHERE folder = ?", (self.folder,)).fetchall()
        self._odd: dict[str, str] = {}
        self._there = self.listed(self._odd)
        self._gone = sorted({*known, *(self._file_of(path) for (path,) in damaged)} - self._there.keys())
        self.changed = sorted(path for path, stamp in self._there.items() if path not in known or known[path] != stamp)
        return self

    def take(self, on_read: Callable[[int], None] = lambda count: None) -> Source:
        """Read the files that `look` found, and write their rows. on_read: called after each batch with the number of rows."""
        if not self._differs:
            return self
        with self._writing() as writer:
            writer.note_folder(self.folder, -1)
            self.begin(writer)
        final = True
        for first in range(0, len(self.changed), self.at_once):
            final = self.take_in(self.changed[first : first + self.at_once], on_read) and final
        with self._writing() as writer:
            known = self.known(writer.connection)  # including rows that another refresh wrote since `look`
            gone = sorted({*self._gone, *known.keys() - self._there.keys()})
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
        """Read a file and write its rows; return whether they are final while the file does not change."""
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
        except StoreProblem as error:  # not final: a newer actordbg may have written it, or it is unreadable now
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
                size, mtime_ns = self._there[path]
                mark = {"path": path, "replay_id": "", "size": size, "mtime_ns": mtime_ns, "offset": 0}
                writer.put(ReadFile, [mark])
        self.added += added
        on_read(added)
        return final

    def _file_of(self, path: str) -> str:
        """Return the file of a damaged path: `x.pack` for `x.pack#dump`. A file's own name may contain a #."""
        file, mark, _ = path.partition(f"{self.suffix}#")
        return file + self.suffix if mark and path not in self._there else path

    def _writing(self) -> Any:
        return engine.writing(self.store.catalog_path)


class Lints(Source):
    """The lints, one in each file."""

    tables = (LintAnswer,)
    key = "lint_id"

    def rows(self, path: str) -> tuple[Any, list[Damaged]]:
        """Read the rows of a lint's file."""
        from actordbg.catalog.record_rows import lint_rows

        return lint_rows(self.store.root, path), []


class Packs(Source):
    """The packs of one run."""

    suffix = PACK_SUFFIX

    def rows(self, path: str) -> tuple[Any, list[Damaged]]:
        """Return the columns of a pack's valid dumps, and its damaged dumps."""
        from actordbg.catalog import dump_rows

        try:
            pack = open_pack(self.store.root / path)
        except StoreProblem as error:
            raise type(error)(f"{error.message}{self._with_it(path)}", hint=error.hint) from None
        run, lines, shares = path.split("/")[1], list(map(pack.line, pack.dump_ids)), pack.shares()
        try:
            columns = dump_rows.columns_of(lines, shares, path)
            if [*columns["dump_id"]] == pack.dump_ids and {*columns["run"]} == {run}:
                return columns, []
        except (ValueError, RecursionError):
            pass  # check each in full
        blocks, damaged = [], []
        for dump_id, line, share in zip(pack.dump_ids, lines, shares, strict=True):
            try:
                columns = dump_rows.columns_of_one(line, share, path)
                of_id, of_run = columns["dump_id"][0], columns["run"][0]
                if (of_id, of_run) != (dump_id, run):
                    raise StoreProblem(f"its record is of {of_id} and belongs below packs/{of_run}")
                blocks.append(columns)
            except ActordbgError as error:
                damaged.append(Damaged.by(packed_place(path, dump_id), error))
        return dump_rows.joined(blocks), damaged

    def _with_it(self, path: str) -> str:
        """Return, in words, which known dumps are lost with an unreadable pack."""
        with engine.connect_readonly(self.store.catalog_path) as reader:
            lost = [dump_id for (dump_id,) in reader.execute("SELECT dump_id FROM dump WHERE pack = ?", (path,))]
        more = f" and {len(lost) - _NAMED} more" if len(lost) > _NAMED else ""
        return f"; with it {', '.join(lost[:_NAMED])}{more} cannot be read" if lost else ""

    def put(self, writer: CatalogWriter, path: str, rows: Any) -> int:
        """Take over rows of dump files, insert new rows, and remove rows of dumps that the pack no longer holds."""
        if rows:
            writer.take_into_pack(path, rows)
        added = writer.put_dumps(path.split("/")[1], rows)
        self._remove(writer, set(writer.packed_dumps(path)).difference(rows.get("dump_id", ())))
        return added

    def remove(self, writer: CatalogWriter, paths: Sequence[str]) -> int:
        """Remove the rows of the dumps in these packs."""
        return self._remove(writer, {dump_id for path in paths for dump_id in writer.packed_dumps(path)})

    def _remove(self, writer: CatalogWriter, dump_ids: set[str]) -> int:
        """Remove rows of packed dumps. The run's folders are listed again: they may have files of the same dumps."""
        if dump_ids:
            writer.remove_dumps(dump_ids)
            writer.forget_folders_of(self.folder.split("/")[1])
        return len(dump_ids)

    def known(self, reader: sqlite3.Connection) -> dict[str, Any]:
        """Return the packs that were read, and the packs that rows of dumps name."""
        sql = "SELECT DISTINCT pack FROM dump WHERE pack > ? AND pack < ?"
        rows = reader.execute(sql, (f"{self.folder}/", f"{self.folder}0"))  # "0" comes after "/"
        return {pack: None for (pack,) in rows} | super().known(reader)

    def begin(self, writer: CatalogWriter) -> None:
        """If a pack is gone, read all: another may hold its dumps. Forget the notes about the packs to read."""
        if self._gone:
            self.changed = sorted(self._there)
        for path in (*self._gone, *self.changed):
            writer.forget_file(path)


def packs(store: Store, rejected: dict[str, str]) -> Iterator[Packs]:
    """Yield the folders of packs, including vanished ones. `rejected` gets entries that are not folders, and why."""
    with engine.connect_readonly(store.catalog_path) as reader:
        noted = reader.execute("SELECT path FROM scanned_folder WHERE path LIKE 'packs/%'").fetchall()
    for run in sorted({*store.folder_names("packs", rejected), *(path.split("/")[1] for (path,) in noted)}):
        yield Packs(store, f"packs/{run}")
