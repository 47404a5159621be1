"""The command's side of a store that nodes do not see (`node_store.py`): what it gives a place's hosts, and takes from them.

    side = DeskSide(StoreElsewhere("s3://bucket/store", mirror), hosts=2)
    host.start.remote(..., side.parcel(work, ranks, "launcher.log", number), ...)
    side.take(number, news)                    # journals, logs and kept files lie in the command's mirror then

What was taken is counted for each place. So a new place begins anew, and what a lost one had not said is not awaited.
Of a journal whole lines are taken, so a place that is lost in the middle of one leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from actordbg.base.errors import StoreProblem, Unsupported
from actordbg.cluster.node_store import HostNews, HostQuestion, Parcel
from actordbg.formats.store_files import atomic_write, open_regular, read_regular
from actordbg.records.journal import SPEC, Journal, rank_journal, rank_log
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.worker_logs import size_of
from actordbg.store.places import read_record


@dataclass(frozen=True)
class StoreElsewhere:
    """A store behind a URL, and the command's mirror of it."""

    url: str
    mirror: Path


@dataclass
class _Host:
    """What one host got, and what was taken from it. outbox: what it is told of the journals on other nodes."""

    folders: set[Path] = field(default_factory=set)
    grown: dict[str, int] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    outbox: dict[str, bytes] = field(default_factory=dict)


class DeskSide:
    """The side of one place."""

    def __init__(self, store: StoreElsewhere, hosts: int) -> None:
        self._store = store
        self._hosts = [_Host() for _ in range(hosts)]
        self._journals: set[str] = set()

    def parcel(self, work: Path, ranks: Sequence[int], launcher_log: str, number: int) -> Parcel:
        """What host `number`, which has these ranks, needs for an order."""
        host, folder, files = self._hosts[number], work.parent, {work.name: read_regular(work)}
        defaults = None
        if folder not in host.folders:
            for path in folder.glob("*.json"):
                if not path.name.startswith(("work-", "next-")):
                    files[path.name] = read_regular(path, most=2**31)
            host.folders.add(folder)
            defaults = _defaults(folder / SPEC, self._store)
        logs = {self._path(path): size_of(path) for path in (*(rank_log(folder, rank) for rank in ranks), folder / launcher_log)}
        host.grown = logs | host.grown
        for path in (rank_journal(folder, rank) for rank in ranks):
            if path.is_file():
                Journal(path).close()  # a line that an earlier writer left cut is closed
            self._journals.add(self._path(path))
        return Parcel(self._path(work), files, logs, defaults)

    def question(self, number: int) -> HostQuestion:
        """What to ask a host."""
        host = self._hosts[number]
        asked = HostQuestion(dict(host.grown), host.whole, host.outbox)
        host.outbox, host.whole = {}, ()
        return asked

    def take(self, number: int, news: HostNews) -> None:
        """Write down what a host answered: what was kept first, then logs, then the journals that speak of both."""
        host = self._hosts[number]
        try:
            for path, data in news.whole.items():
                atomic_write(self._own(path), data)
            for path in sorted(news.grown, key=self._journals.__contains__):
                self._append(self._own(path), news.grown[path])
                host.grown[path] = host.grown.get(path, 0) + len(news.grown[path])
        except OSError as error:
            raise StoreProblem(
                f"cannot write {error.filename or self._store.mirror}: {error.strerror}", hint="check the free space of its disk"
            ) from None
        host.whole = tuple(news.whole)
        for path in self._journals.intersection(news.grown):
            for other in self._hosts:
                if other is not host:
                    other.outbox[path] = other.outbox.get(path, b"") + news.grown[path]

    def _path(self, path: Path) -> str:
        return path.absolute().relative_to(self._store.mirror).as_posix()

    def _own(self, path: str) -> Path:
        parts = PurePosixPath(path)
        if parts.is_absolute() or ".." in parts.parts:
            raise StoreProblem(f"a node names {path!r:.80}, which lies outside of the store", hint="nothing was written")
        return self._store.mirror / parts

    @staticmethod
    def _append(path: Path, data: bytes) -> None:
        with open(open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
            file.write(data)


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
