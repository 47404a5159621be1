"""A store that lies behind a URL, where nodes and the command share no folder: a node's own part of it, and the command's side.

    ~/.cache/actordbg/nodes/<store>/dumps/, packs/, models/            what nodes brought from the URL; stays, for all hosts here
    ~/.cache/actordbg/nodes/<store>/host-<...>/replays/<id>/           one host's replays; goes with the host
    ~/.cache/actordbg/nodes/<store>/host-<...>/dumps -> ../dumps       so workers find a store like any other

With each work order a `Parcel` comes from the command, and the dumps that it names are fetched. What the ranks write goes back
as `HostNews`: journals by whole lines, logs by bytes, other files whole and before the lines that speak of them. A node puts
nothing behind the URL: the command alone does. So what is there was written by one process, in the right order.

The conversation with the command is in turns: it asks, the host answers with what is new since the last question. An answer
counts as taken when the next question comes. A lost host costs what it had not said.

**The command's side** (`DeskSide`) is what it gives a place's hosts, and takes from them:


    side = DeskSide(StoreElsewhere("s3://bucket/store", mirror), hosts=2)
    host.start.remote(..., side.parcel(work, ranks, number), ...)
    side.take(number, news)                    # journals, logs and kept files lie in the command's mirror then

What was taken is counted for each place. So a new place begins anew, and what a lost one had not said is not awaited.
Of a journal whole lines are taken, so a place that is lost in the middle of one leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from actordbg.base.errors import StoreProblem, Unsupported
from actordbg.base.owners import user_folder
from actordbg.base.processes import GONE, ZOMBIE, start_ticks, state_of
from actordbg.config.sources import mirror_name
from actordbg.formats.store_files import TEMPORARY, atomic_write, make_folder, open_regular, processes, read_regular
from actordbg.records.journal import SPEC, Journal, rank_journal, rank_log
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.work_order import WorkOrder
from actordbg.replay.worker_logs import launcher_log, size_of
from actordbg.store.places import read_record, split_place
from actordbg.store.staging import Fetched

MOST_AT_ONCE = 2**25
"""Most bytes of an answer, a single larger file aside."""
_MOST_OF_A_FILE = 2**33
_GROWING = (".jsonl", ".log")
_ORDERS = ("work-", "next-")
_SHARED = ("dumps", "packs", "models")


@dataclass(frozen=True)
class Parcel:
    """A work order with what it needs. order: its path below the store; files: of its folder, by name; logs: their sizes at the
    command, by path. defaults: the input whose record decides open settings.
    """

    order: str
    files: dict[str, bytes]
    logs: dict[str, int]
    defaults: int | None = None


@dataclass
class HostQuestion:
    """What the command has of this host's files, by path: bytes of those that grow, names of the last whole ones. peers: what
    ranks of other nodes wrote into their journals.
    """

    grown: dict[str, int]
    whole: tuple[str, ...] = ()
    peers: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class HostNews:
    """What a host's ranks wrote: whole files, and what others grew by behind the bytes that were asked from."""

    whole: dict[str, bytes]
    grown: dict[str, bytes]

    def __bool__(self) -> bool:
        return bool(self.whole or self.grown)


class NodeStore:
    """One host's store. Guarantees: no path of the command's machine is used here."""

    def __init__(self, url: str) -> None:
        shared = user_folder("XDG_CACHE_HOME", "~/.cache") / "nodes" / mirror_name(url)
        self.root = shared / f"host-{processes()}-{os.getpid()}-{start_ticks(os.getpid())}"
        self._fetched = Fetched(url, shared)
        self._paths: dict[Path, list[str]] = {}
        self._given: set[Path] = set()
        self._lines: dict[str, bytes] = {}
        self._whole: list[str] = []
        with told(self.root):
            make_folder(self.root)
            for name in _SHARED:
                make_folder(shared / name)
                (self.root / name).symlink_to(Path("..") / name)
            _clear_away(shared)

    def take(self, parcel: Parcel) -> Path:
        """Lay a work order out with everything that its ranks read; its path here."""
        order = self.root / parcel.order
        folder = order.parent
        with told(folder):
            for name, data in parcel.files.items():
                atomic_write(folder / name, data)
                self._given.add(folder / name)
            for path, size in parcel.logs.items():
                _reach(self.root / path, size)
            if folder not in self._paths:
                self._paths[folder] = [item.path for item in ReplaySpec.from_json(read_regular(folder / SPEC)).inputs]
            paths, slots = self._paths[folder], WorkOrder.from_json(read_regular(order)).slots
            wanted = [] if parcel.defaults is None else [parcel.defaults]
            wanted += [index for slot in slots for index in slot if index is not None]
            self._fetched.bring(file_of(paths[index]) for index in wanted)
        return order

    def hear(self, question: HostQuestion) -> None:
        """Take in what other nodes' ranks wrote, and forget whole files that the command has."""
        with told(self.root):
            for path in question.whole:
                (self.root / path).unlink(missing_ok=True)
            for path, data in question.peers.items():
                _append(self.root / path, data)

    def news(self, journals: Sequence[Path], logs: Sequence[Path], grown: Mapping[str, int], *, last: bool) -> HostNews:
        """What is new, at most MOST_AT_ONCE bytes of it. last: the ranks have finished, so files that change no more go too."""
        with told(self.root):
            if not self._lines:
                self._lines = {path: data for path, data in self._grown(journals, grown) if data}
                folders = {path.parent for path in journals} if self._lines or last else ()
                self._whole = [path for folder in folders for path in self._whole_files(folder, last)]
            whole, room = {}, MOST_AT_ONCE
            while self._whole and room > 0:
                path = self._whole.pop()
                with contextlib.suppress(FileNotFoundError):
                    whole[path] = read_regular(self.root / path, _MOST_OF_A_FILE)
                    room -= len(whole[path])
            lines = {} if self._whole else self._lines
            self._lines = self._lines if self._whole else {}
            texts = {path: data for path, data in self._grown(logs, grown) if data}
        return HostNews(whole, texts | lines)

    def remove(self) -> None:
        """The host leaves: its replays are at the command."""
        shutil.rmtree(self.root, ignore_errors=True)

    def _grown(self, paths: Sequence[Path], grown: Mapping[str, int]) -> Iterator[tuple[str, bytes]]:
        """What these files have behind what the command has of them; of a journal whole lines."""
        for path in paths:
            name = path.relative_to(self.root).as_posix()
            with contextlib.suppress(FileNotFoundError), open(open_regular(path), "rb") as file:
                file.seek(grown.get(name, 0))
                data = file.read(MOST_AT_ONCE // len(paths))
                yield name, data if path.suffix == ".log" else data[: data.rfind(b"\n") + 1]

    def _whole_files(self, folder: Path, last: bool) -> Iterator[str]:
        """What ranks wrote beside journals and logs. Of the folder itself only at the end: such a file may still change."""
        for above, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in names if last or Path(above) != folder else ():
                path = Path(above, name)
                ours = path in self._given or name.startswith((*_ORDERS, TEMPORARY, ".")) or name.endswith(_GROWING)
                if not ours and not path.is_symlink() and path.is_file():
                    yield path.relative_to(self.root).as_posix()


def file_of(place: str) -> str:
    """The file in which a dump lies: its own, or a pack."""
    packed = split_place(place)
    return packed[0] if packed else place


def _append(path: Path, data: bytes) -> None:
    with open(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        file.write(data)


def _reach(path: Path, size: int) -> None:
    """Let a log begin where the command's copy ends, so that places in it mean the same there: a hole takes no room."""
    descriptor = open_regular(path, os.O_WRONLY | os.O_CREAT)
    try:
        if os.fstat(descriptor).st_size < size:
            os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def _clear_away(shared: Path) -> None:
    """Remove what hosts of this machine left whose processes are gone."""
    for path in shared.glob(f"host-{processes()}-*"):
        with contextlib.suppress(ValueError):
            pid, ticks = map(int, path.name.split("-")[2:])
            if state_of(pid, ticks)[0] in (GONE, ZOMBIE):
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def told(where: Path) -> Iterator[None]:
    """What the node's disk refuses, as a problem of the store there."""
    try:
        yield
    except OSError as error:
        hint = "--runtime-env XDG_CACHE_HOME=/FOLDER puts it where a node has room"
        raise StoreProblem(f"{error.filename or where}: {error.strerror or error}", hint=hint) from None


@dataclass(frozen=True)
class StoreElsewhere:
    """A store behind a URL, and the command's mirror of it."""

    url: str
    mirror: Path


@dataclass
class _Host:
    """What one host got, and what it is asked next, by what was taken from it."""

    folders: set[Path] = field(default_factory=set)
    asked: HostQuestion = field(default_factory=lambda: HostQuestion({}))


class DeskSide:
    """The side of one place."""

    def __init__(self, store: StoreElsewhere, hosts: int) -> None:
        self._store = store
        self._hosts = [_Host() for _ in range(hosts)]
        self._journals: set[str] = set()

    def parcel(self, work: Path, ranks: Sequence[int], number: int) -> Parcel:
        """What host `number`, which has these ranks, needs for an order."""
        host, folder, files = self._hosts[number], work.parent, {work.name: read_regular(work)}
        defaults = None
        if folder not in host.folders:
            for path in folder.glob("*.json"):
                if not path.name.startswith(_ORDERS):
                    files[path.name] = read_regular(path, most=2**31)
            host.folders.add(folder)
            defaults = _defaults(folder / SPEC, self._store)
        paths = [*(rank_log(folder, rank) for rank in ranks), folder / launcher_log(ranks[0])]
        logs = {self._path(path): size_of(path) for path in paths}
        host.asked.grown = logs | host.asked.grown
        for path in (rank_journal(folder, rank) for rank in ranks):
            if path.is_file():
                Journal(path).close()  # a line that an earlier writer left cut is closed
            self._journals.add(self._path(path))
        return Parcel(self._path(work), files, logs, defaults)

    def question(self, number: int) -> HostQuestion:
        """What to ask a host."""
        host = self._hosts[number]
        asked, host.asked = host.asked, HostQuestion(dict(host.asked.grown))
        return asked

    def take(self, number: int, news: HostNews) -> None:
        """Write down what a host answered: what was kept first, then logs, then the journals that speak of both."""
        asked = self._hosts[number].asked
        try:
            for path, data in news.whole.items():
                atomic_write(self._own(path), data)
            for path in sorted(news.grown, key=self._journals.__contains__):
                _append(self._own(path), news.grown[path])
                asked.grown[path] = asked.grown.get(path, 0) + len(news.grown[path])
        except OSError as error:
            raise StoreProblem(
                f"cannot write {error.filename or self._store.mirror}: {error.strerror}", hint="check the free space of its disk"
            ) from None
        asked.whole = tuple(news.whole)
        for path in self._journals.intersection(news.grown):
            for other in self._hosts:
                if other.asked is not asked:
                    other.asked.peers[path] = other.asked.peers.get(path, b"") + news.grown[path]

    def _path(self, path: Path) -> str:
        return path.absolute().relative_to(self._store.mirror).as_posix()

    def _own(self, path: str) -> Path:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts:
            raise StoreProblem(f"a node names {path!r:.80}, which lies outside of the store", hint="nothing was written")
        return self._store.mirror / parts


@functools.lru_cache(8)
def _defaults(spec: Path, store: StoreElsewhere) -> int | None:
    """The input whose record decides open settings, so that workers find the same one: `selection.defaults_of`."""
    inputs = ReplaySpec.from_file(spec).inputs
    outside = next((item for item in inputs if Path(item.path).is_absolute()), None)
    if outside is not None:
        raise Unsupported(
            f"dump {outside.dump_id} lies outside of the store, and nodes see only what is behind {store.url}",
            hint="put it into the store; or leave --engine ray out",
        )
    for index, item in enumerate(inputs):
        with contextlib.suppress(StoreProblem):
            read_record(store.mirror / item.path)
            return index
    return None
