"""A store behind a URL, if nodes and the command share no folder: a node's local copy, and the command's side.

    ~/.cache/actordbg/nodes/<store>/dumps/, packs/, models/            fetched from the URL; stays, for all hosts here
    ~/.cache/actordbg/nodes/<store>/host-<...>/replays/<id>/           one host's replays; removed with the host
    ~/.cache/actordbg/nodes/<store>/host-<...>/dumps -> ../dumps       so workers find an ordinary store

Each work order arrives from the command as a `Parcel`, and the node fetches the dumps that it names. The ranks' output is
returned as news, bytes by path: journals in whole lines, logs in bytes, other files whole and before the lines that refer to
them. Only the command writes behind the URL, never a node. So the store there was written by one process, in the right order.

Each piece is sent once. If a host's answer does not arrive, the host is lost with what it had not sent: its ranks' inputs run
again in a new place, which starts from scratch. Journals are sent in whole lines, so a place that is lost in the middle of a line
leaves nothing behind.

**The command's side** (`DeskSide`) prepares parcels for a place's hosts, and writes down their news:

    side = DeskSide(StoreElsewhere("s3://bucket/store", mirror), hosts=2)
    host.start.remote(..., side.parcel(work, ranks, number), ...)
    side.take(number, news)                    # journals, logs and kept files lie in the command's mirror then
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from actordbg.base.errors import StoreProblem, Unsupported, reason_of
from actordbg.base.owners import user_cache
from actordbg.base.processes import GONE, ZOMBIE, start_ticks, state_of
from actordbg.config.sources import mirror_name
from actordbg.formats.store_files import TEMPORARY, atomic_write, make_folder, open_regular, processes, read_regular
from actordbg.records.journal import SPEC, Journal, rank_journal, rank_log
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.selection import defaults_of
from actordbg.replay.work_order import WorkOrder
from actordbg.replay.worker_logs import launcher_log, size_of
from actordbg.store.places import split_place
from actordbg.store.staging import Fetched

MOST_AT_ONCE = 2**25
"""Maximum bytes of an answer, except for a single larger file."""
Pieces = dict[str, bytes]
"""Contents of files, or what was added to them, by path."""
_MOST_OF_A_FILE = 2**33
_GROWING = (".jsonl", ".log")
_ORDERS = ("work-", "next-")


@dataclass(frozen=True)
class Parcel:
    """A work order with its files. order: its path below the store. files: the contents of its folder, by name. logs: their sizes
    at the command, by path. defaults: the input whose record decides open settings.
    """

    order: str
    files: Pieces
    logs: dict[str, int]
    defaults: int | None = None


class NodeStore:
    """The store of a host. It never uses a path of the command's machine."""

    def __init__(self, url: str) -> None:
        shared = user_cache() / "nodes" / mirror_name(url)
        self.root = shared / f"host-{processes()}-{os.getpid()}-{start_ticks(os.getpid())}"
        self._fetched = Fetched(url, shared)
        self._inputs: dict[Path, list[str]] = {}
        self._given: set[Path] = set()
        self._taken: dict[str, int] = {}
        self._lines: Pieces = {}
        self._whole: list[Path] = []
        with disk_problems(self.root):
            make_folder(self.root)
            for name in ("dumps", "packs", "models"):
                make_folder(shared / name)
                (self.root / name).symlink_to(Path("..") / name)
            for path in shared.glob(f"host-{processes()}-*"):  # left behind by dead hosts of this machine
                with contextlib.suppress(ValueError):
                    pid, ticks = map(int, path.name.split("-")[2:])
                    if state_of(pid, ticks)[0] in (GONE, ZOMBIE):
                        shutil.rmtree(path, ignore_errors=True)

    def take(self, parcel: Parcel) -> Path:
        """Write a work order and everything that its ranks read to this node; return its path."""
        order = self.root / parcel.order
        folder = order.parent
        with disk_problems(folder):
            for name, data in parcel.files.items():
                atomic_write(folder / name, data)
                self._given.add(folder / name)
            for log, size in parcel.logs.items():
                self._taken.setdefault(log, size)
                # it begins where the command's copy ends, so that offsets mean the same there: a hole takes no space
                with open(open_regular(self.root / log, os.O_WRONLY | os.O_CREAT), "wb") as file:
                    if os.fstat(file.fileno()).st_size < size:
                        file.truncate(size)
            if folder not in self._inputs:
                spec = ReplaySpec.from_json(read_regular(folder / SPEC))
                self._inputs[folder] = [(split_place(item.path) or (item.path,))[0] for item in spec.inputs]  # or the pack
            needed = [] if parcel.defaults is None else [parcel.defaults]
            needed += [index for slot in WorkOrder.from_json(read_regular(order)).slots for index in slot if index is not None]
            self._fetched.bring(self._inputs[folder][index] for index in needed)
        return order

    def hear(self, peers: Pieces) -> None:
        """Append what other nodes' ranks wrote to their journals."""
        with disk_problems(self.root):
            for path, data in peers.items():
                _append(self.root / path, data)

    def news(self, folder: Path, ranks: Sequence[int], launched: Path, *, last: bool) -> Pieces:
        """Return new output, at most MOST_AT_ONCE bytes. last: the ranks have finished, so also send files that are now final."""
        with disk_problems(self.root):
            if not self._lines:
                self._lines = self._grown([rank_journal(folder, rank) for rank in ranks])
                self._whole = list(self._whole_files(folder, last)) if self._lines or last else []
            news, room = {}, MOST_AT_ONCE
            while self._whole and room > 0:
                path = self._whole.pop()
                with contextlib.suppress(FileNotFoundError):
                    data = news[self._name(path)] = read_regular(path, _MOST_OF_A_FILE)
                    path.unlink()
                    room -= len(data)
            news |= self._grown([*(rank_log(folder, rank) for rank in ranks), launched])
            if not self._whole:
                news, self._lines = news | self._lines, {}
        return news

    def remove(self) -> None:
        """Remove the host's files: the command has its replays."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _grown(self, paths: Sequence[Path]) -> Pieces:
        """Return the part of these files that was not sent yet; of a journal only whole lines."""
        grown = {}
        for path in paths:
            name = self._name(path)
            with contextlib.suppress(FileNotFoundError), open(open_regular(path), "rb") as file:
                file.seek(begin := self._taken.get(name, 0))
                data = file.read(MOST_AT_ONCE // len(paths))
                if data := data if path.suffix == ".log" else data[: data.rfind(b"\n") + 1]:
                    grown[name], self._taken[name] = data, begin + len(data)
        return grown

    def _whole_files(self, folder: Path, last: bool) -> Iterator[Path]:
        """Yield the ranks' other files, besides journals and logs; from the top folder only if `last`: they may still change."""
        for above, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names if last or Path(above) != folder else ():
                path = Path(above, name)
                ours = path in self._given or name.startswith((*_ORDERS, TEMPORARY, ".")) or name.endswith(_GROWING)
                if not ours and not path.is_symlink() and path.is_file():
                    yield path


def _append(path: Path, data: bytes) -> None:
    with open(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        file.write(data)


@contextlib.contextmanager
def disk_problems(where: Path) -> Iterator[None]:
    """Raise the node's disk errors as StoreProblem."""
    try:
        yield
    except OSError as error:
        hint = "pass --runtime-env XDG_CACHE_HOME=/FOLDER with a folder that has space on every node"
        place = error.filename or where
        raise StoreProblem(f"{place}: {reason_of(error)}", hint=hint) from None


@dataclass(frozen=True)
class StoreElsewhere:
    """A store behind a URL, and the command's mirror of it."""

    url: str
    mirror: Path


class DeskSide:
    """The command's side of a place: the folders sent to each host, and the other hosts' journal lines for it."""

    def __init__(self, store: StoreElsewhere, hosts: int) -> None:
        self._store = store
        self._folders: list[set[Path]] = [set() for _ in range(hosts)]
        self._peers: list[Pieces] = [{} for _ in range(hosts)]
        self._journals: set[str] = set()

    def parcel(self, work: Path, ranks: Iterable[int], number: int) -> Parcel:
        """Build the parcel of an order for host `number`, which has these ranks."""
        folder, files, defaults = work.parent, {work.name: read_regular(work)}, None
        if folder not in self._folders[number]:
            for path in folder.glob("*.json"):
                if not path.name.startswith(_ORDERS):
                    files[path.name] = read_regular(path, most=2**31)
            self._folders[number].add(folder)
            defaults = _defaults(folder / SPEC, self._store)
        ranks = list(ranks)
        for path in (rank_journal(folder, rank) for rank in ranks):
            if path.is_file():
                Journal(path).close()  # end a line that an earlier writer left incomplete
            self._journals.add(self._path(path))
        logs = [*(rank_log(folder, rank) for rank in ranks), folder / launcher_log(ranks[0])]
        return Parcel(self._path(work), files, {self._path(path): size_of(path) for path in logs}, defaults)

    def peers(self, number: int) -> Pieces:
        """Return the other hosts' new journal lines for a host, once."""
        peers, self._peers[number] = self._peers[number], {}
        return peers

    def take(self, number: int, news: Pieces) -> None:
        """Write a host's news to the mirror, in order: kept files, then logs, then the journals that refer to both."""
        for path, data in news.items():
            parts = PurePosixPath(path)
            if parts.is_absolute() or ".." in parts.parts:
                raise StoreProblem(f"a node names {path!r:.80}, which is outside of the store", hint="nothing was written")
            try:
                (_append if path.endswith(_GROWING) else atomic_write)(self._store.mirror / parts, data)
            except OSError as error:
                place = error.filename or self._store.mirror
                raise StoreProblem(f"cannot write {place}: {error.strerror}", hint="check the free disk space") from None
            for other, peers in enumerate(self._peers) if path in self._journals else ():
                if other != number:
                    peers[path] = peers.get(path, b"") + data

    def _path(self, path: Path) -> str:
        return path.absolute().relative_to(self._store.mirror).as_posix()


@functools.lru_cache(8)
def _defaults(spec: Path, store: StoreElsewhere) -> int | None:
    """Return the input whose record decides open settings, so that workers use the same record."""
    inputs = ReplaySpec.from_file(spec).inputs
    outside = next((item for item in inputs if Path(item.path).is_absolute()), None)
    if outside is not None:
        raise Unsupported(
            f"dump {outside.dump_id} is outside of the store, and nodes see only {store.url}",
            hint="copy it into the store, or drop --engine ray",
        )
    return next((index for index, item in enumerate(inputs) if defaults_of(store.mirror, [item])), None)
