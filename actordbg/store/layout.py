"""Where things lie in a store, and how a file gets there: whole or not at all.

    store/FORMAT                                     {"format": 1}
    store/control.json                               the dump switch, replaced atomically
    store/controls/<run>.json                        the switch of one job that has a name of its own
    store/counters/<run>/<rank>-<host>-<pid>-<instance>.json   what each recording actor counted, replaced by its writer
    store/dumps/<run>/rank0003/<dump_id>.safetensors.zst
    store/packs/<run>/<utc>-<sha256>.pack            many dumps in one file (`dump pack`)
    store/replays/<replay>/spec.json, rank0.jsonl, rank0.log, supervisor.jsonl, tensors/
    store/comparisons/, noise/, matrices/            one JSON file for each (`actordbg.formats.comparison_record`)
    store/events/<utc>-<pid>-<rand>.json             one immutable file for each patch and unpatch
    store/backups/<sha256>/actor.py + origin.json    the original of every patched file
    store/models/                                    models that actordbg built itself (`tiny`)
    store/catalog.db                                 derived from all of the above; `actordbg index` makes it again
    store/reports/

Ranks on many hosts write here at once, so a shared file system needs nothing but create-exclusive and rename: every
file is written under a temporary name in its own folder, flushed to disk, and renamed. Files are 0600, folders 0700.

Imported in the training process: standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from actordbg.base.errors import NewerFormat, StoreProblem
from actordbg.formats.dump_record import DumpRecord, is_plain_name
from actordbg.formats.dumpfile import SUFFIX

FORMAT = 1
TEMPORARY = ".tmp-"
"""How the names of unfinished files begin."""


class Store:
    """A store by its root folder. Making one touches nothing; `create` makes the folders, `require` insists on them."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(root))
        self.dumps = self.root / "dumps"
        self.replays = self.root / "replays"
        self.comparisons = self.root / "comparisons"
        self.noise = self.root / "noise"
        self.matrices = self.root / "matrices"
        self.backups = self.root / "backups"
        self.reports = self.root / "reports"
        self.events = self.root / "events"
        self.counters = self.root / "counters"
        self.models = self.root / "models"
        self.format_path = self.root / "FORMAT"
        self.control_path = self.root / "control.json"
        self.controls = self.root / "controls"
        self.packs = self.root / "packs"
        self.catalog_path = self.root / "catalog.db"

    def __repr__(self) -> str:
        return f"Store({str(self.root)!r})"

    def exists(self) -> bool:
        """Whether a store was made here."""
        return self.format_path.is_file()

    def create(self) -> Store:
        """Make the store if it is not there yet; safe to call from many processes at once."""
        if self.exists():
            return self.require()
        try:
            make_folder(self.root)
            atomic_write(self.format_path, json.dumps({"format": FORMAT}).encode() + b"\n")
        except OSError as error:
            raise StoreProblem(
                f"cannot make a store in {self.root}: {error.strerror}",
                hint="name a folder you may write with --store DIR or ACTORDBG_STORE",
            ) from None
        return self

    def require(self) -> Store:
        """Check that a store of a known format is here; StoreProblem or NewerFormat otherwise."""
        try:
            data = json.loads(self.format_path.read_bytes())
            version = data["format"]
        except FileNotFoundError:
            raise StoreProblem(
                f"there is no store in {self.root}",
                hint="`actordbg dump enable`, `dump import` or `dump create` make one; --store DIR names another",
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreProblem(
                f"{self.format_path} is unreadable: {error}",
                hint='if this is a store, write {"format": 1} into it again',
            ) from None
        if version != FORMAT:
            raise NewerFormat(
                f"the store in {self.root} has format {version}, this actordbg reads format {FORMAT}",
                hint="upgrade actordbg: pip install --upgrade actordbg",
            )
        return self

    def control_of(self, job: str | None = None) -> Path:
        """The switch that a job of this name follows where the file is there; without a name, the store's."""
        return self.controls / f"{job}.json" if job else self.control_path

    def dump_folder(self, run: str, rank: int) -> Path:
        """The folder of one rank's dumps of one run."""
        return self.dumps / run / f"rank{rank:04d}"

    def dump_path(self, record: DumpRecord) -> Path:
        """Where the dump of this record lies or will lie."""
        return self.dump_folder(record.run, record.rank) / f"{record.dump_id}{SUFFIX}"

    def dump_folders(self, run: str | None = None) -> Iterator[Path]:
        """Every rank folder, or those of one run, sorted."""
        for folder in _folders(self.dumps) if run is None else [self.dumps / run]:
            yield from _folders(folder)

    def pack_folders(self) -> Iterator[Path]:
        """Every run's folder of packs, sorted."""
        yield from _folders(self.packs)

    def iter_packs(self, run: str | None = None) -> Iterator[Path]:
        """Every published pack, or those of one run, sorted."""
        for folder in _folders(self.packs) if run is None else [self.packs / run]:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                yield from sorted(path for path in folder.iterdir() if path.suffix == ".pack" and path.name[0] != ".")

    def iter_dumps(self) -> Iterator[Path]:
        """Every published dump file, folder by folder, in name (time) order; unfinished temporary files are left out."""
        for folder in self.dump_folders():
            yield from sorted(
                path for path in folder.iterdir() if path.name.endswith(SUFFIX) and not path.name.startswith(".")
            )

    def publish_dump(self, record: DumpRecord, blob: bytes) -> Path:
        """Write one dump file atomically and return its path; OSError passes through (a full disk is the caller's case)."""
        path = self.dump_path(record)
        atomic_write(path, blob)
        return path

    def publish_text(self, path: Path, text: str) -> Path:
        """Write or replace a file of this store atomically and return its path; StoreProblem where that cannot be."""
        try:
            atomic_write(path, text.encode())
        except OSError as error:
            raise StoreProblem(
                f"cannot write {path}: {error.strerror or error}",
                hint="check the folder's permissions and the free space of its disk",
            ) from None
        return path

    def relative(self, path: Path) -> str:
        """A path inside the store as the catalog keeps it (POSIX, relative to the root)."""
        return path.relative_to(self.root).as_posix()


def atomic_write(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write `data` to `path`, whole or not at all: temporary name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}-{path.name[:80]}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
    try:
        descriptor = os.open(temporary, flags, mode)
    except FileNotFoundError:
        make_folder(path.parent)
        descriptor = os.open(temporary, flags, mode)
    try:
        try:
            file = os.fdopen(descriptor, "wb")
        except BaseException:
            os.close(descriptor)
            raise
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def make_folder(path: Path) -> None:
    """`mkdir -p` with mode 0700 for every folder that it makes."""
    if not path.is_dir():
        make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return
        if not path.is_dir():
            raise NotADirectoryError(20, "not a folder", str(path))


def sync_folder(path: Path) -> None:
    """fsync a folder so that a rename in it survives a power cut; file systems that cannot are left alone."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir() and is_plain_name(entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return []
