"""What runs on a node: an actor of Ray that starts one node's ranks of a group, watches them, and ends them.

The ranks are processes of their own, the same that a replay on one machine has, with the same journals and logs in the store.
So a rank that dies leaves its exit status, and the host lives on and starts the next attempt. What only the node can see, the
host writes down where all can read it: a rank's journal gets the event `gone` after its process has ended. The ranks end
with their host, and Ray ends the host with its node or with the command that asked for it.

**Whose death it was.** A host that Ray ends kills its ranks first, and may still see them dead. So it lets `SETTLE_S` pass before
it writes `gone`, and writes nothing when its raylet is gone. The command asks once more (`RayRunning.stands`).

Where the store lies behind a URL, the ranks write into a folder of this node alone, and the host answers the command's
questions with what is new there (`node_store.py`).
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from actordbg.base.errors import ActordbgError, EnvironmentProblem, StoreProblem
from actordbg.base.processes import GONE, ZOMBIE, state_of, wait_for_any
from actordbg.cluster.node_store import HostNews, HostQuestion, NodeStore, Parcel
from actordbg.cluster.paused_ranks import PausedRanks
from actordbg.config.replay_config import LAUNCHERS, ReplayConfig
from actordbg.debug import editor
from actordbg.formats.store_files import read_regular
from actordbg.records.journal import Event, Journal, Tail, rank_journal, rank_log
from actordbg.replay.launch import Launched, NodeShare, launch_share
from actordbg.replay.rank_view import NODE
from actordbg.replay.work_order import WorkOrder
from actordbg.replay.worker_logs import status_by_launcher
from actordbg.trainers.trainer import TRAINER

POLL_S = 0.05
SETTLE_S = 0.5
"""How long a host that ends its ranks may outlive them."""
PACKAGES = ("torch", "transformers", "deepspeed", TRAINER.package, "flash-attn", "ray", "actordbg")
"""Packages whose versions decide what comes out, or whether it can run."""
_SIOCGIFADDR = 0x8915


def versions_here(also: Sequence[str] = ()) -> dict[str, str]:
    """The versions of this machine's packages, "none" where one is missing. Imports none of them."""
    found = {"python": platform.python_version()}
    for name in (*PACKAGES, *also):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None where none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


@dataclass
class _Rank:
    """One rank here: its journal, what that said of its process, and when and how that was seen dead."""

    number: int
    tail: Tail
    identity: tuple[int, int] | None = None
    attempt: int = 0
    done: bool = False
    told: bool = False
    ended_at: float | None = None
    wait_status: int | None = None

    def look(self) -> None:
        """See whether its process has ended. Its launcher reaps it soon, and the exit status with it."""
        if self.identity is None or self.ended_at is not None:
            return
        state, self.wait_status = state_of(*self.identity)
        if state in (GONE, ZOMBIE):
            self.ended_at = time.monotonic()


class NodeHost:
    """The actor. Its methods run in threads of their own, since `wait` may last as long as the group.

    url: where the store is, if nodes share no folder with the command.
    """

    def __init__(self, url: str | None = None) -> None:
        self._url = url
        self._store: NodeStore | None = None
        self._launched: Launched | None = None
        self._ranks: list[_Rank] = []
        self._folder, self._work, self._launcher_log, self._name = Path(), Path(), Path(), ""
        self._direct = False
        self._paused = PausedRanks()
        self._raylet = os.getppid()

    def where(self) -> dict[str, Any]:
        """The node, its address as Ray knows it, and a free port there."""
        import ray

        address = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
        return {"node": ray.get_runtime_context().get_node_id(), "address": address, "port": port, "pid": os.getpid()}

    def start(
        self,
        config: Mapping[str, Any],
        share: NodeShare,
        given_order: str | Parcel,
        module: str,
        given: Sequence[str],
        node: str,
        own: str,
    ) -> None:
        """Start this node's ranks on a work order. `own`: the address of this node; `node`: its name."""
        self._name = f"node {node} ({own})"
        order = self._take(given_order)
        require_debugpy(order, self._name)
        added = {NODE: node, editor.HOST: own}
        name = interface_of(own) if share.nodes > 1 else None
        if name is not None:
            added |= {key: name for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if key not in os.environ}
        asked = ReplayConfig.from_dict(config)
        self._folder, self._direct = order.parent, LAUNCHERS[asked.backend] == "python"
        self._work, self._launcher_log = order, order.parent / share.log
        self._ranks = [_Rank(number, Tail(rank_journal(self._folder, number))) for number in share.workers]
        for rank in self._ranks:
            rank.tail.poll()
        self._launched = launch_share(asked, share, order, module, given, added)

    def _take(self, given: str | Parcel) -> Path:
        """The work order's path here, with all that it needs."""
        if isinstance(given, Parcel):
            try:
                self._store = self._store or NodeStore(str(self._url))
                return self._store.take(given)
            except ActordbgError as error:
                raise type(error)(f"{self._name}: {error.message}", hint=error.hint) from None
        if not Path(given).is_file():
            raise StoreProblem(
                f"{self._name} does not see the store: there is no {given}",
                hint="a store on a file system that all nodes mount at the same place, or behind a URL (--store s3://...)",
            )
        return Path(given)

    def go_on(self, given: str | Parcel) -> None:
        """The waiting ranks get another order: their journals lie in its folder from now on."""
        before, self._work = self._work, self._take(given)
        folder = self._work.parent
        if folder != self._folder:
            tails = [Tail(rank_journal(folder, rank.number)) for rank in self._ranks]
            for rank, tail in zip(self._ranks, tails, strict=True):
                tail.poll()
                rank.tail = tail
            self._folder = folder
        for rank in self._ranks:
            rank.done = False
        if self._store is not None:
            self._store.announce(before, self._work)

    def let_go(self) -> None:
        """The waiting ranks get no other order."""
        if self._store is not None:
            self._store.announce(self._work, None)

    def wait(self, question: HostQuestion | None = None, longest_s: float | None = None) -> int | HostNews | None:
        """Until there is news for the command, or what started the ranks has ended, with its exit code; else None in the end.

        Whoever died before that is written down by then, and everything is told before an exit code.
        """
        launched, since = self._launched, time.monotonic()
        assert launched is not None
        if question is not None and self._store is not None:
            self._store.hear(question)
        while True:
            self._look(launched)
            untold = any(rank.ended_at is not None and not rank.told for rank in self._ranks)
            ended = not untold and launched.ended()
            if ended:
                self._look(launched)
            if news := self._news(question, ended):
                return news
            if ended:
                return launched.process.returncode
            if longest_s is not None and time.monotonic() - since > longest_s:
                return None
            if untold:
                time.sleep(POLL_S)  # the descriptor of a dead process wakes at once
            else:
                wait_for_any(launched.descriptors, POLL_S)

    def hello(self) -> None:
        """Answer, so that the command knows this host to live."""

    def _news(self, question: HostQuestion | None, ended: bool) -> HostNews | None:
        if question is None or self._store is None:
            return None
        numbers = [rank.number for rank in self._ranks]
        logs = [*(rank_log(self._folder, number) for number in numbers), self._launcher_log]
        last = ended or all(rank.done for rank in self._ranks)
        return self._store.news([rank_journal(self._folder, number) for number in numbers], logs, question.grown, last=last)

    def stacks(self, identities: Mapping[int, tuple[int, int]]) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
        """The stacks of this node's ranks among these, and the states of their processes."""
        mine = {rank.number for rank in self._ranks}
        here = {number: identity for number, identity in identities.items() if number in mine}
        if self._launched is None:
            return {}, {}
        return self._launched.stacks(self._folder, here), {one: state_of(*one)[0] for one in here.values()}

    def end(self) -> None:
        """End the ranks."""
        if self._launched is not None:
            self._launched.end()

    def leave(self) -> None:
        """End the ranks, and remove what is here of them."""
        self.end()
        if self._store is not None:
            self._store.remove()

    def _look(self, launched: Launched) -> None:
        """Learn which processes the ranks are, and write down those that ended."""
        for rank in self._ranks:
            for event in rank.tail.poll():
                if event["event"] == "boot":
                    rank.identity, rank.attempt = (event["pid"], event["ticks"]), event["attempt"]
                    rank.done = False
                    launched.watch(rank.identity)
                rank.done = rank.done or event["event"] == "done"
                self._tell_ray(rank, event)
            rank.look()
            settled = rank.ended_at is not None and (rank.done or time.monotonic() - rank.ended_at > SETTLE_S)
            if settled and not rank.told:
                self._tell(rank, launched)

    def _tell_ray(self, rank: _Rank, event: Event) -> None:
        if event["event"] == "stop" and event.get("editor"):
            self._paused.pause(rank.number, event["editor"])
        elif event["event"] in ("go", "done"):
            self._paused.go_on(rank.number)

    def _tell(self, rank: _Rank, launched: Launched) -> None:
        rank.told = True
        self._paused.go_on(rank.number)
        status = rank.wait_status
        if status is None and self._direct and launched.ended():  # its parent is we: reaped a moment ago
            code = launched.process.returncode
            status = -code if code < 0 else code << 8
        elif status is None and rank.identity is not None:  # its launcher looks as often as we do, and may be first
            status = status_by_launcher(launched.log, rank.identity[0])
        if not rank.done and os.getppid() == self._raylet:
            journal = Journal(rank_journal(self._folder, rank.number))
            journal.append("gone", rank=rank.number, attempt=rank.attempt, wait_status=status)
            journal.close()


def require_debugpy(order: Path, node: str) -> None:
    """EnvironmentProblem where ranks are to stop for an editor, and cannot."""
    wanted = WorkOrder.from_json(read_regular(order)).stops.get("debugpy") is not None
    if wanted and importlib.util.find_spec("debugpy") is None:
        raise EnvironmentProblem(
            f"{node} has no debugpy, and ranks there are to stop for an editor",
            hint="pip install 'actordbg[ray]' on every node, or --runtime-env FILE with `pip: [debugpy]`",
        )
