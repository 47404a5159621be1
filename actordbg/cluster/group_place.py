"""A place: a group's Ray placement group, and a host on each of its nodes (`node_host.py`).

A group of N ranks with M per node takes ceil(N / M) bundles: the ranks of a bundle share a node, and the bundles are on
different nodes. The first bundle has the first ranks. A place outlives the attempts of its group, and also its replay. It is lost
as a whole when one of its hosts dies.

**A node that runs out of memory.** Ray's memory monitor kills a Ray worker there, and says why. That worker is the host of
our ranks. It is small, so which of several hosts Ray kills has little to do with the ranks. But its message names the node and
the processes that held the most memory. So we blame the rank that the kernel's out-of-memory killer would have chosen
(`Starved`): it gets the event `gone` in its journal, as its host would have written it, and is judged as on one machine.
"""

import re
import signal
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actordbg.base.errors import ActordbgError
from actordbg.base.processes import ALIVE
from actordbg.cluster.node_host import NodeHost
from actordbg.cluster.node_store import DeskSide, Parcel, StoreElsewhere
from actordbg.cluster.order import GroupShape
from actordbg.config import consent
from actordbg.config.replay_config import ReplayConfig
from actordbg.replay.launch import Group, Loss, Running
from actordbg.replay.rank_launcher import NodeShare
from actordbg.replay.rank_view import RankView
from actordbg.replay.work_order import announce
from actordbg.replay.worker_logs import launcher_log

FENCE_S = 3.0
"""Seconds that ranks may outlive a lost node: they check for their host four times a second."""
LOOK_S = 0.1
"""Minimum seconds between two queries to Ray about a group."""
NOTICE_S = 20.0
"""Maximum seconds to wait for Ray to notice a dead node: its default is 14."""
SOON_S = 0.2
"""Seconds until a host without news answers, if nodes exchange their journals through the command."""
END_S = 20.0
"""Maximum seconds to wait for the ranks of a node to end when told to."""
ANSWER_S = 120.0
"""Maximum seconds to wait for a host's sign of life."""
START_S = 900.0
"""Maximum seconds for the hosts of a reserved place to start: Ray gives a runtime environment 600, and then ends it."""


_NODE = re.compile(r"\(IP: ([^,)]+), ID: ([0-9a-f]+)\) was ([\d.]+ ?\w+ / [\d.]+ ?\w+)")
_USER = re.compile(r"(?:^|[,\n] ?)(\d+)\t([\d.]+)\t")
NODE_ID = 8
"""Characters of a node's id in a journal."""


@dataclass(frozen=True)
class Starved:
    """Ray's out-of-memory report. node: its id, "" if it could not be parsed; held: gigabytes by pid of the largest processes."""

    node: str
    why: str
    held: dict[int, float] = field(default_factory=dict)

    def culprits(self, ranks: Iterable[RankView], mine: Container[int]) -> list[RankView]:
        """Return the ranks to blame among those of a replay that have booted, if Ray killed the host of the ranks `mine`.

        That is the rank of `mine` that held the most memory, or all of `mine` if Ray names none. It is a rank of another group if
        that rank and `mine` were running inputs and it held more than twice as much.
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
        """Write `gone` to the culprits' journals; return whether any culprit is outside `mine`, which is then innocent."""
        views = [RankView(int(path.stem.removeprefix("rank")), folder) for path in folder.glob("rank*.jsonl")]
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
    """Parse the message of Ray's OutOfMemoryError."""
    match = _NODE.search(message)
    if match is None:
        return Starved("", f"its node ran out of memory, and Ray's memory monitor ended a host there: {message[:300]}")
    address, node, used = match.groups()
    held = {int(pid): float(size) for pid, size in _USER.findall(message.partition("memory users:")[2])}
    why = f"node {node[:NODE_ID]} ({address}) ran out of memory ({used}), and Ray's memory monitor ended a host there"
    return Starved(node, why, held)


class GroupPlace:
    """A placement group with its hosts.

    nodes: where the hosts are, None until all have started. lost: why the place is gone, or "". dead_nodes: the nodes whose death
    lost it. starved: Ray's report if a node ran out of memory. side: exchanges files with the hosts if nodes do not share the
    store's folder, else None.
    """

    def __init__(
        self,
        ray: Any,
        shape: GroupShape,
        name: str,
        tell: Callable[[str], None],
        store: StoreElsewhere | None,
    ) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.ray, self.shape, self.name, self._tell = ray, shape, name, tell
        self.nodes: list[dict[str, Any]] | None = None
        self.lost, self.lost_at = "", 0.0
        self.dead_nodes: frozenset[str] = frozenset()
        self._unsure: Exception | None = None
        self.starved: Starved | None = None
        self._told_at, self._reserved_at = time.monotonic(), 0.0
        strategy = "PACK" if len(shape.counts) == 1 else "STRICT_SPREAD"
        self.reserved = placement_group(shape.bundles, strategy=strategy, name=name)
        self.side = None if store is None else DeskSide(store, len(shape.counts))
        kind = ray.remote(NodeHost)
        self.hosts = []
        for node, count in enumerate(shape.counts):
            first = sum(shape.counts[:node])
            ranks = f"rank {first}" if count == 1 else f"ranks {first}-{first + count - 1}"
            where = PlacementGroupSchedulingStrategy(self.reserved, placement_group_bundle_index=node)
            needs = {"num_cpus": count, "num_gpus": count if shape.gpu else 0}
            options = {"name": f"{name} {ranks}", "max_concurrency": 8, "scheduling_strategy": where, **needs}
            self.hosts.append(kind.options(**options).remote(None if store is None else store.url))
        self._coming = [host.where.remote() for host in self.hosts]

    def ready(self) -> bool:
        """Check whether every host has started; never waits."""
        if self.nodes is None and not self.lost:
            there, _ = self.ray.wait(self._coming, num_returns=len(self._coming), timeout=0)
            if len(there) == len(self._coming):
                self.nodes = self.answers(self._coming)
        return self.holds_nodes

    def is_reserved(self) -> bool:
        """Check whether Ray has reserved the resources; the place is lost if its hosts have not started START_S later."""
        from ray.util.placement_group import placement_group_table

        if placement_group_table(self.reserved).get("state") != "CREATED":
            return False
        self._reserved_at = self._reserved_at or time.monotonic()
        if time.monotonic() - self._reserved_at > START_S:
            why = f" did not start its hosts in {START_S:g} s: raylet.out in /tmp/ray on the node says why"
            self._lose(TimeoutError(), why)
        return True

    @property
    def holds_nodes(self) -> bool:
        """Check whether its hosts had started and none is lost, as far as is known."""
        return self.nodes is not None and not self.lost

    def is_late(self, after_s: float) -> bool:
        """Check whether `after_s` have passed since the place was requested, or since this was last true."""
        if time.monotonic() - self._told_at < after_s:
            return False
        self._told_at = time.monotonic()
        return True

    def answers(self, references: Sequence[Any]) -> list[Any] | None:
        """Return the hosts' answers; None, and the place is lost, if a host is gone. Raises actordbg's errors."""
        try:
            return list(self.ray.get(list(references), timeout=END_S))
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ActordbgError):
                raise error.cause from None
            raise
        except (self.ray.exceptions.RayError, TimeoutError) as error:
            self._lose(error)
            return None

    def _lose(self, error: Exception, why: str = "") -> None:
        then = "; the remaining groups run its inputs"
        if isinstance(error, self.ray.exceptions.OutOfMemoryError):
            self.starved = starved_by(str(error))
            why, then = f": {self.starved.why}", ""
        else:
            self._unsure = error if isinstance(error, self.ray.exceptions.ActorUnavailableError) else None
            why = why or self._death(error)
        self.lost, self.lost_at = f"{self.name}{why}", time.monotonic()
        for host in self.hosts:  # ranks on other nodes wait for the lost ranks, and must not report that as their failure
            self.ray.kill(host)
        self._tell(self.lost + then)

    def _death(self, error: Exception) -> str:
        """Describe which node or process died, as far as Ray knows by now."""
        dead = {node["NodeID"] for node in self.ray.nodes() if not node["Alive"]}
        here = {host["node"] for host in self.nodes or ()}
        self.dead_nodes = frozenset(node for node in dead if node in here or node in str(error))
        gone = " and ".join(sorted(node[:NODE_ID] for node in self.dead_nodes))
        return f" is lost: node {gone} died" if gone else f" is lost: its process or its node died ({type(error).__name__})"

    def settled(self) -> bool:
        """Check whether the loss is final: no rank can write a result any more, and Ray knows whether a node died.

        Ray reports an unreachable host some seconds before it knows that.
        """
        waited = time.monotonic() - self.lost_at
        if not self.lost or waited <= FENCE_S:
            return False
        if self._unsure is not None and self.is_late(LOOK_S):
            self.lost = f"{self.name}{self._death(self._unsure)}"
            if self.dead_nodes or waited > NOTICE_S:
                self._unsure = None
        return self._unsure is None

    def release(self) -> None:
        """Remove the placement group. The hosts end, and their ranks with them."""
        from ray.util.placement_group import remove_placement_group

        if self.side is not None and self.ready():
            self.answers([host.leave.remote() for host in self.hosts])
        self.lost = self.lost or "released"
        for host in self.hosts:
            self.ray.kill(host)
        remove_placement_group(self.reserved)


class RayRunning(Running):
    """A group that runs in a place. Its supervisor learns of dead ranks from the journals, and of a lost place from here."""

    def __init__(self, place: GroupPlace, config: ReplayConfig, group: Group, work: Path, module: str) -> None:
        assert place.nodes is not None
        self.place, self.log = place, work.parent / launcher_log(group[0])
        self._states: dict[tuple[int, int], str] = {}
        counts, first = place.shape.counts, place.nodes[0]
        address = "127.0.0.1" if len(counts) == 1 else first["address"]
        self._work, self._workers = work, group
        self._excused: bool | None = None
        self._shares = [
            NodeShare(
                sum(counts[:number]), count, number, nodes=len(counts), address=address, port=first["port"], worker=group[0]
            )
            for number, count in enumerate(counts)
        ]
        known, program = config.to_dict(), [module, *consent.arguments(config.model)]
        self._starting = [
            host.start.remote(known, share, order, program, node=here["node"][:NODE_ID], address=here["address"])
            for host, here, share, order in zip(place.hosts, place.nodes, self._shares, self._orders(work), strict=True)
        ]
        self._waiting: dict[Any, int] = {}
        self._codes: dict[int, int] = {}
        self._looked = 0.0
        self._hello: list[Any] = []
        self._greeted = 0.0

    def _orders(self, work: Path) -> list[str | Parcel]:
        """Return the order for each host: its path, or a parcel with its files."""
        side = self.place.side
        if side is None:
            return [str(work.absolute())] * len(self._shares)
        return [side.parcel(work, share.workers, number) for number, share in enumerate(self._shares)]

    @property
    def lost(self) -> Loss | None:
        """Return the loss of the place. Ranks whose node ran out of memory are dead, not lost, unless others are to blame."""
        self._take_in()
        place = self.place
        if not place.settled():
            return None
        if place.starved is not None and self._excused is None:
            self._excused = place.starved.blame(self._work.parent, self._workers)
        return None if self._excused is False else Loss(place.lost, place.dead_nodes, bool(self._excused))

    def ended(self) -> bool:
        """Check whether all shares have ended, or a node's share has failed, so that the others wait in vain."""
        self._take_in()
        over = len(self._codes) == len(self._shares) or any(self._codes.values())
        return self.place.settled() or over

    def stands(self) -> bool:
        """Check whether every host has answered since the first call. A host that ends takes its ranks with it."""
        if self.place.lost:
            return False
        if not self._hello:
            self._greeted, self._hello = time.monotonic(), [host.hello.remote() for host in self.place.hosts]
        _, left = self.place.ray.wait(self._hello, num_returns=len(self._hello), timeout=0)
        if left and time.monotonic() - self._greeted < ANSWER_S:
            return False
        references, self._hello = self._hello, []
        return self.place.answers(references) is not None

    def end(self) -> None:
        """End the ranks on all nodes and take in their last news; in a lost place, wait until they end with their hosts."""
        if not self.place.lost:
            self.place.answers([host.end.remote() for host in self.place.hosts])
            until = time.monotonic() + END_S
            while self.place.side and self._waiting and not self.place.lost and time.monotonic() < until:
                self._hear(END_S)
        if self.place.lost:  # then their inputs may go to other groups
            time.sleep(max(self.place.lost_at + FENCE_S - time.monotonic(), 0))

    def announce(self, before: Path, following: Path | None) -> None:
        """Announce the next order. Hosts with separate folders tell their ranks, after fetching the order's files."""
        orders: Sequence[str | Parcel | None] = [None] * len(self._shares)
        if following is not None:
            self._work, self.log, orders = following, following.parent / self.log.name, self._orders(following)
        shared = self.place.side is None
        replies = [host.go_on.remote(order) for host, order in zip(self.place.hosts, orders, strict=True) if order or not shared]
        if not shared:
            self._starting += replies
            return
        self.place.answers(replies)  # every host watches the new folder before a rank writes there
        announce(before, following)

    def state_of(self, identity: tuple[int, int]) -> tuple[str, int | None]:
        """Return the state that a host saw when it took the stacks. Deaths are in the journals."""
        return self._states.get(identity, ALIVE), None

    def stacks(self, folder: Path, identities: Mapping[int, tuple[int, int]]) -> dict[int, str]:
        by_rank: dict[int, str] = {}
        for stacks, states in self.place.answers([host.stacks.remote(dict(identities)) for host in self.place.hosts]) or ():
            by_rank |= stacks
            self._states |= states
        return by_rank

    def _take_in(self) -> None:
        """Take in events: hosts have started their ranks, a share has ended, or a host is gone."""
        now = time.monotonic()
        if self.place.lost or now - self._looked < LOOK_S:
            return
        self._looked = now
        if self._starting:
            over, left = self.place.ray.wait(self._starting, num_returns=len(self._starting), timeout=0)
            if over and self.place.answers(over) is None:
                return
            self._starting = left
            if not left and not self._waiting and not self._codes:
                for number in range(len(self._shares)):
                    self._ask(number)
        self._hear(0)

    def _ask(self, number: int) -> None:
        """Request news from a host."""
        wait, side = self.place.hosts[number].wait.options(name=self.place.name), self.place.side
        peers = None if side is None else side.peers(number)
        self._waiting[wait.remote(peers, None if peers is None or len(self._shares) == 1 else SOON_S)] = number

    def _hear(self, timeout_s: float) -> None:
        """Take in the hosts' answers, and request news again if ranks continue."""
        if not self._waiting:
            return
        most = len(self._waiting) if timeout_s == 0 else 1
        over, _ = self.place.ray.wait(list(self._waiting), num_returns=most, timeout=timeout_s)
        for reference in over:
            if (answers := self.place.answers([reference])) is None:
                return
            (answer,), number = answers, self._waiting.pop(reference)
            if isinstance(answer, int):
                self._codes[number] = answer
                continue
            if answer is not None and self.place.side is not None:
                self.place.side.take(number, answer)
            self._ask(number)
