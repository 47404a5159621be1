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

import contextlib
import fcntl
import importlib.util
import os
import platform
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from actordbg.base.errors import ActordbgError, EnvironmentProblem, StoreProblem
from actordbg.base.processes import GONE, ZOMBIE, state_of, wait_for_any, wait_status_of
from actordbg.cluster.node_store import NodeStore, Parcel, disk_problems
from actordbg.config.replay_config import LAUNCHERS, ReplayConfig
from actordbg.debug import editor
from actordbg.formats.store_files import read_regular
from actordbg.replay.launch import Launched, free_port, launch_share
from actordbg.replay.rank_launcher import NodeShare
from actordbg.replay.rank_view import NODE, RankView
from actordbg.replay.work_order import WorkOrder, announce
from actordbg.replay.worker_logs import launcher_log, status_by_launcher, take_stacks
from actordbg.trainers.trainer import TRAINER

POLL_S = 0.05
SETTLE_S = 0.5
"""How long a host that ends its ranks may outlive them."""
PACKAGES = ("torch", "transformers", "deepspeed", TRAINER.package, "flash-attn", "ray", "actordbg")
"""Packages whose versions decide what comes out, or whether it can run."""
_SIOCGIFADDR = 0x8915


def versions_here(also: Sequence[str] = ()) -> dict[str, str]:
    """The versions of this machine's packages, "none" where one is missing. Imports none of them."""
    versions = {"python": platform.python_version()}
    for name in (*PACKAGES, *also):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "none"
    return versions


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


class NodeHost:
    """The actor. Its methods run in threads of their own, since `wait` may last as long as the group.

    url: where the store is, if nodes share no folder with the command.
    """

    def __init__(self, url: str | None = None) -> None:
        self._url = url
        self._store: NodeStore | None = None
        self._launched: Launched | None = None
        self._views: list[RankView] = []
        self._ended_at: dict[int, float] = {}
        self._reported: set[int] = set()
        self._work, self._launcher_log, self._name = Path(), Path(), ""
        self._direct = False
        self._paused = PausedRanks()
        self._raylet = os.getppid()

    def where(self) -> dict[str, Any]:
        """The node, its address as Ray knows it, and a free port there."""
        import ray

        address = ray.util.get_node_ip_address()
        return {"node": ray.get_runtime_context().get_node_id(), "address": address, "port": free_port(address)}

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
        self._work = order = self._take(given_order)
        if WorkOrder.from_json(read_regular(order)).stops.debugpy is not None and not importlib.util.find_spec("debugpy"):
            raise EnvironmentProblem(
                f"{self._name} has no debugpy, which --debugpy needs there",
                hint="pip install 'actordbg[ray]' on every node, or --runtime-env FILE with `pip: [debugpy]`",
            )
        added, name = {NODE: node, editor.HOST: own}, None if share.nodes == 1 else interface_of(own)
        if name is not None:
            added |= {key: name for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if key not in os.environ}
        replay_config = ReplayConfig.from_dict(config)
        self._direct, self._launcher_log = LAUNCHERS[replay_config.backend] == "python", order.parent / launcher_log(share.workers.start)
        self._views = [RankView.begin(order.parent, number) for number in share.workers]
        self._ended_at, self._reported = {}, set()
        self._launched = launch_share(replay_config, share, order, module, given, added)

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

    def go_on(self, given: str | Parcel | None) -> None:
        """The waiting ranks get another order: their journals lie in its folder from now on. None: they get no other."""
        before = self._work
        if given is not None:
            self._work = self._take(given)
            for view in self._views:
                view.move(self._work.parent)
        if self._store is not None:
            with disk_problems(before):
                announce(before, None if given is None else self._work)

    def wait(self, peers: dict[str, bytes] | None = None, longest_s: float | None = None) -> int | dict[str, bytes] | None:
        """Until there is news for the command, or what started the ranks has ended, with its exit code; else None in the end.

        peers: what other nodes' ranks wrote into their journals; None where nodes share a folder, and nothing is news but an end.
        Whoever died before that is written down by then, and everything is told before an exit code.
        """
        launched, store, since = self._launched, None if peers is None else self._store, time.monotonic()
        assert launched is not None
        if store is not None:
            store.hear(peers or {})
        while True:
            self._look(launched)
            untold = bool(self._ended_at.keys() - self._reported)
            ended = not untold and launched.ended()
            if ended:
                self._look(launched)
            if store is not None:
                last = ended or all(view.done for view in self._views)
                ranks = [view.rank for view in self._views]
                if news := store.news(self._work.parent, ranks, self._launcher_log, last=last):
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

    def stacks(self, identities: Mapping[int, tuple[int, int]]) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
        """The stacks of this node's ranks among these, and the states of their processes."""
        here = {view.rank: identities[view.rank] for view in self._views if view.rank in identities}
        return take_stacks(self._work.parent, here), {identity: state_of(*identity)[0] for identity in here.values()}

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
        ended, reported = self._ended_at, self._reported  # of the ranks below or of those before: the next start may come meanwhile
        for view in self._views:
            for event in view.poll():
                if event["event"] == "boot":
                    launched.watch((event["pid"], event["ticks"]))
                elif event["event"] == "stop" and event.get("editor"):
                    self._paused.tell(view.rank, event["editor"])
                elif event["event"] in ("go", "done"):
                    self._paused.tell(view.rank)
            if view.rank not in ended and view.identity is not None:
                # its launcher reaps it soon, and the exit status with it; asked also of a rank that the command wrote down as
                # gone, with a reason that our word would take the place of
                view.state, view.wait_status = state_of(*view.identity)
                if view.state in (GONE, ZOMBIE):
                    ended[view.rank] = time.monotonic()
            if view.rank not in ended or view.rank in reported or not (view.done or time.monotonic() - ended[view.rank] > SETTLE_S):
                continue
            reported.add(view.rank)
            self._paused.tell(view.rank)
            status = view.wait_status
            if status is None and self._direct and launched.ended():  # its parent is we: reaped a moment ago
                status = wait_status_of(launched.process.returncode)
            elif status is None and view.identity is not None:  # its launcher looks as often as we do, and may be first
                status = status_by_launcher(launched.log, view.identity[0])
            if not view.done and os.getppid() == self._raylet:
                view.write_gone(status)


class PausedRanks:
    """The ranks of a host that wait for an editor, of which Ray's distributed debugger learns here.

    It lists Ray's workers that have paused threads, and connects to the port that Ray knows for one (debugpy speaks with it): for
    a host that of the last rank. A rank is a process beside Ray's. So its host says that it is paused itself, at the rank's port,
    as `ray.util.debugpy` does. Where Ray has other functions for that, nothing is listed, and the address in the command's
    terminal works all the same.
    """

    def __init__(self) -> None:
        self._ports: dict[int, int] = {}
        self._shown = contextlib.ExitStack()

    def tell(self, rank: int, address: str = "") -> None:
        """A rank waits at HOST:PORT, or, with "", no more."""
        if self._ports.pop(rank, None) is None and not address:
            return
        if address:
            self._ports[rank] = int(address.rpartition(":")[2])
        self._shown.close()
        if self._ports:
            with contextlib.suppress(AttributeError):
                import ray

                worker: Any = ray._private.worker.global_worker
                worker.set_debugger_port([*self._ports.values()][-1])
                self._shown.enter_context(worker.worker_paused_by_debugger())
                self._shown.enter_context(worker.task_paused_by_debugger())
