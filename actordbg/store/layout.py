"""Layout of a store, and how a file is written there: whole or not at all.

    store/FORMAT                                     {"format": 1}
    store/control.json                               the dump switch, replaced atomically
    store/controls/<run>.json                        the switch of a named job
    store/counters/<run>/<rank>-<host>-<pid>-<instance>.json   what each recording actor counted, replaced by its writer
    store/weights/<run>/<rank>-<host>-<pid>-<instance>-<call>.json   the weights of a step: samples, and hashes on request
    store/syncs/<run>/<rank>-<host>-<pid>-<number>.json   what engines were sent and got, on request (`run --hash-weights`)
    store/turns/<run>/<host>-<pid>-<number>.json     token ids of a rollout, turn by turn, on request (`run --turns`)
    store/dumps/<run>/rank0003/<dump_id>.safetensors.zst
    store/packs/<run>/<utc>-<sha256>.pack            many dumps in one file (`dump pack`)
    store/replays/<replay>/spec.json, rank0.jsonl, rank0.log, supervisor.jsonl, tensors/
    store/comparisons/, noise/, lints/, matrices/    one JSON file for each (`actordbg.records.comparison_record`)
    store/trainchecks/<check>/check.json, cell-<n>.<attempt>/, logs/
    store/reductions/<id>/reduction.json, trials.jsonl, store/   what `reduce` found, its trials, and a store of its cases
    store/models/                                    models that actordbg built itself (`tiny`)
    store/catalog.db                                 derived from all of the above; `actordbg index` rebuilds it
    store/reports/
    store/quarantine/                                what `fsck --repair` moved out of the way

Ranks on many hosts write here at once. The shared file system needs only create-exclusive and rename: every file is
written under a temporary name in its folder, flushed to disk, and renamed. Files are 0600, folders 0700.

`actordbg.formats.store_files` has the part that the training process writes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from actordbg.base.errors import StoreProblem, UsageError, system_errors
from actordbg.base.owners import Owner, read_owned
from actordbg.formats.dump_record import SUFFIX, DumpRecord, is_plain_name
from actordbg.formats.store_files import (
    FORMAT,
    KINDS,
    OddFile,
    StoreFiles,
    atomic_write,
    make_folder,
    open_regular,
    temporary_name,
)

T = TypeVar("T")
UNPRINTABLE = "its name has bytes that are not text, or control characters"
_ROOM = 2**16
"""Bytes that must be free in a store before work begins that writes results there."""


class Store(StoreFiles):
    """A store by its root folder. The constructor touches no files; `create` makes the store, `require` insists on it."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self.replays = self.root / "replays"
        self.comparisons = self.root / "comparisons"
        self.noise = self.root / "noise"
        self.lints = self.root / "lints"
        self.matrices = self.root / "matrices"
        self.reports = self.root / "reports"
        self.models = self.root / "models"
        self.packs = self.root / "packs"
        self.catalog_path = self.root / "catalog.db"

    def exists(self) -> bool:
        """Check whether a store was made here."""
        return self.format_path.is_file()

    def create(self) -> Store:
        """Make the store if it is not there yet; safe to call from many processes at once."""
        if self.exists():
            return self.require()
        hint = "name a writable folder with --store DIR or ACTORDBG_STORE"
        with system_errors(StoreProblem, f"cannot make a store in {self.root}", hint):
            make_folder(self.root)
            atomic_write(self.format_path, json.dumps({"format": FORMAT}) + "\n")
        return self

    def require_writable(self, *, room: bool = True) -> Store:
        """Insist, before work begins, that results can be written here; with `room`, write some bytes, as a disk may be full."""
        return self.require().probed(room=room)

    def probed(self, *, room: bool) -> Store:
        """Like `require_writable`, but without `require`: the folder may be a damaged store that is about to be repaired."""
        probe = self.root / temporary_name("probe")
        try:
            with open(open_regular(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                with contextlib.suppress(OSError):
                    probe.unlink()  # before the write: a killed process leaves nothing
                if room:
                    file.write(bytes(_ROOM))
        except OSError as error:
            own = f"work in your own copy: `cp -r {self.root} NEW`, then `actordbg --store NEW ...`"
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = f"make room on that disk (`actordbg dump prune`), or {own}" if full else f"{own}; reading commands work here"
            raise StoreProblem(f"cannot write into the store {self.root}: {error.strerror}", hint=hint) from None
        return self

    def modified_ns(self, path: str) -> int:
        """Return the modification time of a folder (a path below the store); 0 if there is no such folder."""
        state = self._look(path, os.stat)
        return state.st_mtime_ns if state else 0

    def names(self, path: str) -> list[str]:
        """Return the names in a folder, in no order."""
        return self._look(path, os.listdir) or []

    def folder_names(self, path: str, rejected: dict[str, str]) -> list[str]:
        """Return the subfolders of a folder, sorted, without hidden ones. `rejected` gets entries that are unusable, and why."""
        folders = []
        try:
            entries = self._look(path, _scanned) or []
        except StoreProblem as error:
            entries, rejected[path] = [], error.message
        for entry in entries:
            if entry.name[0] == ".":
                continue
            if not entry.name.isprintable():
                rejected[printable(f"{path}/{entry.name}")] = UNPRINTABLE
            elif os.path.isdir(entry.path):
                folders.append(entry.name)
            elif not entry.is_file(follow_symlinks=False):  # a file beside the folders does no harm
                rejected[f"{path}/{entry.name}"] = "it is not a folder"
        return sorted(folders)

    def files(self, path: str, suffix: str | tuple[str, ...], rejected: dict[str, str]) -> dict[str, os.stat_result]:
        """Return the published files of a folder by their paths below the store, sorted by name, with their current state.

        `rejected` gets, by path, entries with such a name that are not files of ours, and why.
        """
        states = {}
        for name in sorted(entry.name for entry in self._look(path, _scanned) or []):
            if not name.endswith(suffix) or name[0] == ".":
                continue
            if not name.isprintable():
                rejected[printable(f"{path}/{name}")] = UNPRINTABLE
                continue
            state = self._look(f"{path}/{name}", os.lstat)
            if state is not None and not stat.S_ISREG(state.st_mode):
                rejected[f"{path}/{name}"] = f"it is {KINDS.get(stat.S_IFMT(state.st_mode), 'a device')}, not a file"
            elif state is not None:
                states[f"{path}/{name}"] = state
        return states

    def _look(self, path: str, look: Callable[[Path], T]) -> T | None:
        """Return `look` of a path below the store; None if nothing is there, StoreProblem if it cannot be read."""
        try:
            return look(self.root / path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise StoreProblem(f"cannot list {path}: {error.strerror}", hint="check the permissions of the store") from None

    def job_names(self) -> list[str]:
        """Return the jobs of this store that have their own switch."""
        return sorted(path.stem for path in self.controls.glob("*.json") if not path.name.startswith("."))

    def dump_folders(self, run: str | None = None) -> Iterator[Path]:
        """Yield every rank folder, or those of one run, sorted."""
        for name in self.folder_names("dumps", {}) if run is None else [run]:
            yield from (self.dumps / name / rank for rank in self.folder_names(f"dumps/{name}", {}))

    def iter_packs(self, run: str | None = None) -> Iterator[Path]:
        """Yield every published pack, or those of one run, sorted."""
        for name in self.folder_names("packs", {}) if run is None else [run]:
            yield from (self.root / path for path in self.files(f"packs/{name}", ".pack", {}))

    def iter_dumps(self) -> Iterator[Path]:
        """Yield every published dump file, folder by folder, in name (time) order, without unfinished temporary files."""
        for folder in self.dump_folders():
            yield from (self.root / path for path in self.files(self.relative(folder), SUFFIX, {}))

    def put_dump(self, record: DumpRecord, blob: bytes, hint: str) -> Path:
        """Publish a dump and return its path; StoreProblem with this hint if it cannot be written."""
        with system_errors(StoreProblem, f"cannot write into {self.root}", hint):
            return self.publish_dump(record, blob)

    def publish_text(self, path: Path, text: str) -> Path:
        """Write or replace a file of this store atomically and return its path; StoreProblem if it cannot be written."""
        hint = "check the folder's permissions and the free space of its disk"
        with system_errors(StoreProblem, f"cannot write {path}", hint):
            atomic_write(path, text)
        return path

    def relative(self, path: Path) -> str:
        """Return a path inside the store as the catalog stores it (POSIX, relative to the root)."""
        return path.relative_to(self.root).as_posix()


def printable(name: str) -> str:
    """Return a name from a file system as printable text: bytes that are not text, and control characters, as escapes."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def known_regular(path: Path, most: int) -> Path:
    """Return the path, for a library that opens by name; OddFile unless it is a regular file of at most `most` bytes."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if size > most:
        raise OddFile(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return path


def read_with_owner(path: Path) -> tuple[bytes, Owner]:
    """Read a record that decides what runs; return its bytes and who wrote it. StoreProblem if it cannot be read."""
    with system_errors(StoreProblem, f"cannot read {path}", "check its permissions"):
        return read_owned(path, links=False)


def _scanned(path: Path) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return list(entries)


def require_run_name(run: str | None) -> None:
    """Raise UsageError if the name of a run is not a plain one."""
    if run is not None and not is_plain_name(run):
        raise UsageError(
            f"{run!r:.60} is not the name of a run", hint="use letters, digits and ._+- only; `actordbg dump ls` shows the runs"
        )
