"""A node's own part of a store that lies behind a URL, where nodes and the command share no folder.

    ~/.cache/actordbg/nodes/<store>/dumps/, packs/, models/            what nodes brought from the URL; stays, for all hosts here
    ~/.cache/actordbg/nodes/<store>/host-<...>/replays/<id>/           one host's replays; goes with the host
    ~/.cache/actordbg/nodes/<store>/host-<...>/dumps -> ../dumps       so workers find a store like any other

With each work order a `Parcel` comes from the command, and the dumps that it names are fetched. What the ranks write goes back
as `HostNews`: journals by whole lines, logs by bytes, other files whole and before the lines that speak of them. A node puts
nothing behind the URL: the command alone does. So what is there was written by one process, in the right order.

The conversation with the command is in turns: it asks, the host answers with what is new since the last question. An answer
counts as taken when the next question comes. A lost host costs what it had not said.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from actordbg.base.errors import StoreProblem
from actordbg.base.owners import user_folder
from actordbg.base.processes import GONE, ZOMBIE, start_ticks, state_of
from actordbg.config.sources import mirror_name
from actordbg.formats.store_files import TEMPORARY, atomic_write, make_folder, open_regular, processes, read_regular
from actordbg.records.journal import SPEC
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.work_order import WorkOrder, announce
from actordbg.store.places import split_place
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


@dataclass(frozen=True)
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
        with _told(self.root):
            make_folder(self.root)
            for name in _SHARED:
                make_folder(shared / name)
                (self.root / name).symlink_to(Path("..") / name)
            _clear_away(shared)

    def take(self, parcel: Parcel) -> Path:
        """Lay a work order out with everything that its ranks read; its path here."""
        order = self.root / parcel.order
        folder = order.parent
        with _told(folder):
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

    def announce(self, before: Path, following: Path | None) -> None:
        """Tell the waiting ranks what comes next."""
        with _told(before):
            announce(before, following)

    def hear(self, question: HostQuestion) -> None:
        """Take in what other nodes' ranks wrote, and forget whole files that the command has."""
        with _told(self.root):
            for path in question.whole:
                (self.root / path).unlink(missing_ok=True)
            for path, data in question.peers.items():
                with open(open_regular(self.root / path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
                    file.write(data)

    def news(self, journals: Sequence[Path], logs: Sequence[Path], grown: Mapping[str, int], *, last: bool) -> HostNews:
        """What is new, at most MOST_AT_ONCE bytes of it. last: the ranks have finished, so files that change no more go too."""
        with _told(self.root):
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
def _told(where: Path) -> Iterator[None]:
    """What the node's disk refuses, as a problem of the store there."""
    try:
        yield
    except OSError as error:
        hint = "--runtime-env XDG_CACHE_HOME=/FOLDER puts it where a node has room"
        raise StoreProblem(f"{error.filename or where}: {error.strerror or error}", hint=hint) from None
