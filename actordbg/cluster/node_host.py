"""What runs on a node: an actor of Ray that starts one node's ranks of a group, watches them, and ends them.

The ranks are processes of their own, the same that a replay on one machine has, with the same journals and logs in the store.
So a rank that dies leaves its exit status, and the host lives on and starts the next attempt. What only the node can see, the
host writes down where all can read it: a rank's journal gets the event `gone` after its process has ended. The ranks end
with their host, and Ray ends the host with its node or with the command that asked for it.

**Whose death it was.** A host that Ray ends kills its ranks first, and may still see them dead. So it lets `SETTLE_S` pass before
it writes `gone`, and writes nothing when its raylet is gone. The command asks once more (`RayRunning.stands`).
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

from actordbg.base.errors import EnvironmentProblem, StoreProblem
from actordbg.cluster.paused_ranks import PausedRanks
from actordbg.config.replay_config import LAUNCHERS, ReplayConfig
from actordbg.debug import editor
from actordbg.formats.journal import Event, Journal, Tail, rank_journal
from actordbg.formats.store_files import read_regular
from actordbg.host.trainer import TRAINER
from actordbg.replay.launch import Launched, NodeShare, launch_share
from actordbg.replay.processes import GONE, ZOMBIE, state_of, wait_for_any
from actordbg.replay.rank_view import NODE
from actordbg.replay.work_order import WorkOrder

POLL_S = 0.05
SETTLE_S = 0.5
"""How long a host that ends its ranks may outlive them."""
PACKAGES = ("torch", "transformers", "deepspeed", TRAINER.package, "flash-attn", "ray", "actordbg")
"""Packages whose versions decide what comes out, or whether it can run."""
_SIOCGIFADDR = 0x8915


def versions_here() -> dict[str, str]:
    """The versions of this machine's packages, "none" where one is missing. Imports none of them."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
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
    """The actor. Its methods run in threads of their own, since `wait` lasts as long as the group."""

    def __init__(self) -> None:
        self._launched: Launched | None = None
        self._ranks: list[_Rank] = []
        self._folder = Path()
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
        self, config: Mapping[str, Any], share: NodeShare, work: str, module: str, given: Sequence[str], node: str, own: str
    ) -> None:
        """Start this node's ranks on a work order. `own`: the address of this node; `node`: its name."""
        order = Path(work)
        if not order.is_file():
            raise StoreProblem(
                f"node {node} ({own}) does not see the store: there is no {order}",
                hint="a store on a file system that all nodes mount at the same place",
            )
        require_debugpy(order, f"node {node} ({own})")
        added = {NODE: node, editor.HOST: own}
        name = interface_of(own) if share.nodes > 1 else None
        if name is not None:
            added |= {key: name for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if key not in os.environ}
        asked = ReplayConfig.from_dict(config)
        self._folder, self._direct = order.parent, LAUNCHERS[asked.backend] == "python"
        self._ranks = [_Rank(number, Tail(rank_journal(self._folder, number))) for number in share.workers]
        for rank in self._ranks:
            rank.tail.poll()
        self._launched = launch_share(asked, share, order, module, given, added)

    def go_on(self, work: str) -> None:
        """The waiting ranks got another order: their journals lie in its folder from now on."""
        folder = Path(work).parent
        if folder != self._folder:
            self._folder = folder
            for rank in self._ranks:
                rank.tail = Tail(rank_journal(folder, rank.number))
        for rank in self._ranks:
            rank.done = False

    def wait(self) -> int:
        """Until what started the ranks has ended; its exit code. Whoever died before it is written down by then."""
        launched = self._launched
        assert launched is not None
        while True:
            self._look(launched)
            untold = [rank for rank in self._ranks if rank.ended_at is not None and not rank.told]
            if untold:
                time.sleep(POLL_S)  # the descriptor of a dead process wakes at once
            elif launched.ended():
                self._look(launched)
                return launched.process.returncode
            else:
                wait_for_any(launched.descriptors, POLL_S)

    def hello(self) -> None:
        """Answer, so that the command knows this host to live."""

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
