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

from actordbg.replay.rank_view import RankView

_NODE = re.compile(r"\(IP: ([^,)]+), ID: ([0-9a-f]+)\) was ([\d.]+ ?\w+ / [\d.]+ ?\w+)")
_USER = re.compile(r"(?:^|[,\n] ?)(\d+)\t([\d.]+)\t")
NODE_ID = 8
"""Characters of a node's id that a journal has."""


@dataclass(frozen=True)
class Starved:
    """What Ray said. node: its id, "" if that was not to be read; held: gigabytes by pid, of those that held the most."""

    node: str
    why: str
    held: dict[int, float] = field(default_factory=dict)

    def culprits(self, ranks: Iterable[RankView], mine: Container[int]) -> list[RankView]:
        """Who is to blame among the ranks of a replay that have booted, where Ray took the memory from `mine`.

        Of mine the one that held the most; all of them where Ray names none. A rank of another group instead, if mine were in
        an input and it was in one that took more than twice as much.
        """
        here = [view for view in ranks if not self.node or (view.node and self.node.startswith(view.node))]
        ours = [view for view in here if view.rank in mine]
        ours = [view for view in ours if view.doing] or ours
        if not ours:
            return []
        most = max(ours, key=self._held)
        others = [view for view in here if view.doing and view.rank not in mine and self._held(view) > 2 * self._held(most)]
        if most.doing and others:
            return [max(others, key=self._held)]
        return [most] if self._held(most) else ours

    def blame(self, folder: Path, mine: Container[int]) -> bool:
        """Write `gone` into the culprits' journals; whether they are others than mine, which are innocent then."""
        views = [RankView.of_peer(folder, int(path.stem.removeprefix("rank"))) for path in folder.glob("rank*.jsonl")]
        for view in views:
            list(view.poll())
        chosen = self.culprits([view for view in views if view.identity], mine)
        for view in chosen:
            held = f"; it held {self._held(view):g} GB" if self._held(view) else ""
            view.write_gone(int(signal.SIGKILL), why=self.why + held)
        return any(view.rank not in mine for view in chosen)

    def _held(self, view: RankView) -> float:
        return self.held.get(view.identity[0], 0.0) if view.identity else 0.0


def starved_by(message: str) -> Starved:
    """What the message of Ray's OutOfMemoryError says."""
    found = _NODE.search(message)
    if found is None:
        return Starved("", f"its node ran out of memory, and Ray's memory monitor ended a host there: {message[:300]}")
    address, node, used = found.groups()
    held = {int(pid): float(size) for pid, size in _USER.findall(message.partition("memory users:")[2])}
    why = f"node {node[:NODE_ID]} ({address}) ran out of memory ({used}), and Ray's memory monitor ended a host there"
    return Starved(node, why, held)
