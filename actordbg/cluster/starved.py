"""A node that runs out of memory: Ray's memory monitor ends a worker of Ray's there, and says why.

That worker is the host of our ranks. It is small, so which of several hosts Ray takes has little to do with the ranks. But its
message has the node, and who held the most memory there. So a rank is blamed as the kernel's out-of-memory killer would have
chosen it: it gets the event `gone` in its journal, as its host would have written it, and is judged as on one machine.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from actordbg.records.journal import Event, Journal, rank_journal, read_events

_NODE = re.compile(r"\(IP: ([^,)]+), ID: ([0-9a-f]+)\) was ([\d.]+ ?\w+ / [\d.]+ ?\w+)")
_USER = re.compile(r"(?:^|[,\n] ?)(\d+)\t([\d.]+)\t")
NODE_ID = 8
"""Characters of a node's id that a journal has."""


@dataclass(frozen=True)
class RankThere:
    """A rank by its journal: its process, the attempt, and whether it was in an input."""

    number: int
    pid: int
    attempt: int
    node: str
    busy: bool

    @classmethod
    def of(cls, number: int, events: Iterable[Event]) -> RankThere | None:
        """None before its first boot."""
        boot, running = None, -1
        for event in events:
            kind, slot = event["event"], event.get("slot", 0)
            boot = event if kind == "boot" else boot
            if kind in ("start", "fill"):
                running = slot
            elif kind == "boot" or (kind in ("end", "filled") and slot >= running):  # one that fails late ends no other
                running = -1
        return None if boot is None else cls(number, boot["pid"], boot["attempt"], boot.get("node", ""), running >= 0)


@dataclass(frozen=True)
class Starved:
    """What Ray said. node: its id, "" if that was not to be read; held: gigabytes by pid, of those that held the most."""

    node: str
    why: str
    held: dict[int, float] = field(default_factory=dict)

    def culprits(self, there: Iterable[RankThere], mine: Container[int]) -> list[RankThere]:
        """Who is to blame among the ranks of a replay, where Ray took the memory from `mine`.

        Of mine the one that held the most; all of them where Ray names none. A rank of another group instead, if mine were in
        an input and it was in one that took more than twice as much.
        """
        here = [one for one in there if not self.node or (one.node and self.node.startswith(one.node))]
        ours = [one for one in here if one.number in mine]
        ours = [one for one in ours if one.busy] or ours
        if not ours:
            return []
        most = max(ours, key=self._held)
        others = [one for one in here if one.busy and one.number not in mine and self._held(one) > 2 * self._held(most)]
        if most.busy and others:
            return [max(others, key=self._held)]
        return [most] if most.pid in self.held else ours

    def blame(self, folder: Path, mine: Container[int]) -> bool:
        """Write `gone` into the culprits' journals; whether they are others than mine, which are innocent then."""
        numbers = (int(path.stem.removeprefix("rank")) for path in folder.glob("rank*.jsonl"))
        seen = [RankThere.of(number, read_events(rank_journal(folder, number))) for number in numbers]
        chosen = self.culprits([one for one in seen if one is not None], mine)
        for one in chosen:
            held = f"; it held {self._held(one):g} GB" if one.pid in self.held else ""
            journal = Journal(rank_journal(folder, one.number))
            how = {"attempt": one.attempt, "wait_status": int(signal.SIGKILL), "why": self.why + held}
            journal.append("gone", rank=one.number, **how)
            journal.close()
        return any(one.number not in mine for one in chosen)

    def _held(self, rank: RankThere) -> float:
        return self.held.get(rank.pid, 0.0)


def starved_by(message: str) -> Starved:
    """What the message of Ray's OutOfMemoryError says."""
    found = _NODE.search(message)
    if found is None:
        return Starved("", f"its node ran out of memory, and Ray's memory monitor ended a host there: {message[:300]}")
    address, node, used = found.groups()
    held = {int(pid): float(size) for pid, size in _USER.findall(message.partition("memory users:")[2])}
    why = f"node {node[:NODE_ID]} ({address}) ran out of memory ({used}), and Ray's memory monitor ended a host there"
    return Starved(node, why, held)
