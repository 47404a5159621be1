"""What a worker knows of the others, and how it reads ahead: both through plain files and threads, no collective involved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from actordbg.formats.journal import Tail, rank_journal
from actordbg.replay.processes import GONE, ZOMBIE, state_of

T = TypeVar("T")


class Peer:
    """Another rank of the group, as its journal shows it."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self.rank = rank
        self._attempt = attempt
        self._tail = Tail(rank_journal(folder, rank))
        self._identity: tuple[int, int] | None = None
        self._slots = 0
        self._done = False

    def slots_finished(self) -> int:
        """How many slots of this attempt the peer has finished, well or not."""
        self._read()
        return self._slots

    def is_done(self) -> bool:
        """Whether it has nothing left to do in this attempt."""
        self._read()
        return self._done

    def is_alive(self) -> bool:
        """Whether its process lives; a peer that has not even booted counts as alive."""
        self._read()
        return self._identity is None or state_of(*self._identity)[0] not in (GONE, ZOMBIE)

    def _read(self) -> None:
        for event in self._tail.poll():
            if event.get("attempt") != self._attempt:
                continue
            if event["event"] == "boot":
                self._identity = (event["pid"], event["ticks"])
            elif event["event"] in ("end", "filled"):
                self._slots = max(self._slots, event["slot"] + 1)
            elif event["event"] == "done":
                self._done = True


class Prefetch(Generic[T]):
    """Iterate over futures of `load(item)`: while the caller uses one, the next is being loaded; never more than that."""

    def __init__(self, load: Callable[[int], T], items: Sequence[int]) -> None:
        self._load, self._items = load, items

    def __iter__(self) -> Iterator[Future[T]]:
        with ThreadPoolExecutor(1, thread_name_prefix="load") as pool:
            ahead: list[Future[T]] = []
            for position, item in enumerate(self._items):
                current = ahead.pop() if ahead else pool.submit(self._load, item)
                if position + 1 < len(self._items):
                    ahead.append(pool.submit(self._load, self._items[position + 1]))
                yield current
                del current
