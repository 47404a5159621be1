"""The host: a Ray actor on a node that starts the node's ranks of a group, watches them, and ends them.

The ranks are separate processes, the same as in a replay on one machine, with the same journals and logs in the store.
So a rank that dies leaves its exit status, and the host survives and starts the next attempt. The host records what only the
node can see: a rank's journal gets the event `gone` after its process has ended. The ranks end with their host, and Ray ends the
host with its node or with the command that created it.

**Which died first.** A host that Ray ends kills its ranks first, and may still see them dead. So it waits `SETTLE_S` before
it writes `gone`, and writes nothing if its raylet is gone. The command checks the hosts again (`RayRunning.stands`).

If the store is behind a URL, the ranks write to a local folder of this node, and the host answers the command's requests with
what is new there (`node_store.py`).
"""

import contextlib
import fcntl
import importlib.util
import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actordbg.base.errors import ActordbgError, EnvironmentProblem, StoreProblem
from actordbg.base.processes import GONE, ZOMBIE, state_of, wait_for_any, wait_status_of
from actordbg.cluster.node_store import NodeStore, Parcel, disk_problems
from actordbg.config.choices import installed_versions
from actordbg.config.replay_config import LAUNCHERS, ReplayConfig
from actordbg.debug import editor
from actordbg.formats.store_files import read_regular
from actordbg.replay.launch import Launched, child_environment, free_port, launch_share
from actordbg.replay.rank_launcher import NodeShare
from actordbg.replay.rank_view import NODE, RankView
from actordbg.replay.work_order import WorkOrder, announce
from actordbg.replay.worker_logs import launcher_log, status_by_launcher, take_stacks
from actordbg.trainers.trainer import TRAINER

POLL_S = 0.05
SETTLE_S = 0.5
"""Seconds that a host may outlive the ranks that it ends."""
PACKAGES = ("torch", "transformers", "deepspeed", TRAINER.package, "flash-attn", "ray", "actordbg")
"""Packages whose versions affect the numbers, or whether a replay can run."""
_SIOCGIFADDR = 0x8915


def versions_here() -> dict[str, str]:
    """Return the versions of this machine's packages, "none" for a missing package. Imports none of them."""
    return dict.fromkeys(PACKAGES, "none") | installed_versions(PACKAGES)


def interface_of(address: str) -> str | None:
    """Return the network interface that has this IPv4 address; None if there is none."""
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
    """The Ray actor. Its methods run in separate threads, since `wait` may last as long as the group.

    url: where the store is, if nodes share no folder with the command.
    """

    def __init__(self, url: str | None = None) -> None:
        self._url = url
        self._store: NodeStore | None = None
        self._launched: Launched | None = None
        self._views: list[RankView] = []
        self._ended_at: dict[int, float] = {}
        self._noted: set[int] = set()
        self._work, self._launcher_log, self._name = Path(), Path(), ""
        self._direct = False
        self._paused = PausedRanks()
        self._raylet = os.getppid()

    def where(self) -> dict[str, Any]:
        """Return the node's id, its address as Ray knows it, and a free port there."""
        import ray

        address = ray.util.get_node_ip_address()
        return {"node": ray.get_runtime_context().get_node_id(), "address": address, "port": free_port(address)}

    def start(
        self,
        config: Mapping[str, Any],
        share: NodeShare,
        given_order: str | Parcel,
        program: Sequence[str],
        *,
        node: str,
        address: str,
    ) -> None:
        """Start this node's ranks on a work order. program: their module, and arguments for them. node: this node's name."""
        self._name = f"node {node} ({address})"
        self._work = order = self._take(given_order)
        if WorkOrder.from_json(read_regular(order)).stops.debugpy is not None and not importlib.util.find_spec("debugpy"):
            raise EnvironmentProblem(
                f"{self._name} has no debugpy, which --debugpy needs there",
                hint="run `pip install 'actordbg[ray]'` on every node, or pass --runtime-env FILE with `pip: [debugpy]`",
            )
        added, name = {NODE: node, editor.HOST: address}, None if share.nodes == 1 else interface_of(address)
        if name is not None:
            added |= {key: name for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if key not in os.environ}
        replay_config = ReplayConfig.from_dict(config)
        self._direct = LAUNCHERS[replay_config.backend] == "python"
        self._launcher_log = order.parent / launcher_log(share.workers.start)
        self._views = [RankView.begin(order.parent, number) for number in share.workers]
        self._ended_at, self._noted = {}, set()
        environment = child_environment(replay_config, os.environ, share.count) | added
        self._launched = launch_share(replay_config, share, order, program, environment=environment, log=self._launcher_log)

    def _take(self, given: str | Parcel) -> Path:
        """Return the work order's path here, after fetching its files if it is a parcel."""
        if isinstance(given, Parcel):
            try:
                self._store = self._store or NodeStore(str(self._url))
                return self._store.take(given)
            except ActordbgError as error:
                raise type(error)(f"{self._name}: {error.message}", hint=error.hint) from None
        if not Path(given).is_file():
            raise StoreProblem(
                f"{self._name} does not see the store: there is no {given}",
                hint="use a store on a file system that all nodes mount at the same path, or behind a URL (--store s3://...)",
            )
        return Path(given)

    def go_on(self, given: str | Parcel | None) -> None:
        """Give the waiting ranks their next order, whose folder then has their journals. None: there is no other."""
        before = self._work
        if given is not None:
            self._work = self._take(given)
            for view in self._views:
                view.move(self._work.parent)
        if self._store is not None:
            with disk_problems(before):
                announce(before, None if given is None else self._work)

    def wait(self, peers: dict[str, bytes] | None = None, longest_s: float | None = None) -> int | dict[str, bytes] | None:
        """Wait for news and return it, or the launcher's exit code once it has ended; None after `longest_s`.

        peers: lines of other nodes' journals; None if nodes share a folder: then only the end is news. The deaths of ranks are in
        their journals before this returns, and all news is returned before an exit code.
        """
        launched, store, since = self._launched, None if peers is None else self._store, time.monotonic()
        assert launched is not None
        if store is not None:
            store.hear(peers or {})
        while True:
            self._look(launched)
            untold = bool(self._ended_at.keys() - self._noted)
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
                time.sleep(POLL_S)  # a dead process's descriptor would wake us at once
            else:
                wait_for_any(launched.descriptors, POLL_S)

    def hello(self) -> None:
        """Answer, so that the command knows that this host is alive."""

    def stacks(self, identities: Mapping[int, tuple[int, int]]) -> tuple[dict[int, str], dict[tuple[int, int], str]]:
        """Return the stacks of those of these ranks that run on this node, and the states of their processes."""
        here = {view.rank: identities[view.rank] for view in self._views if view.rank in identities}
        return take_stacks(self._work.parent, here), {identity: state_of(*identity)[0] for identity in here.values()}

    def end(self) -> None:
        """End the ranks."""
        if self._launched is not None:
            self._launched.end()

    def leave(self) -> None:
        """End the ranks, and remove their files on this node."""
        self.end()
        if self._store is not None:
            self._store.remove()

    def _look(self, launched: Launched) -> None:
        """Watch the ranks' processes, and write `gone` for those that ended."""
        ended, noted = self._ended_at, self._noted  # a concurrent `start` may replace them
        for view in self._views:
            for event in view.poll():
                if event["event"] == "boot":
                    launched.watch((event["pid"], event["ticks"]))
                elif event["event"] == "stop" and event.get("editor"):
                    self._paused.tell(view.rank, event["editor"])
                elif event["event"] in ("go", "done"):
                    self._paused.tell(view.rank)
            if view.rank not in ended and view.identity is not None:
                # its launcher soon reaps it together with the exit status; this also covers a rank for which the command wrote
                # `gone`, with a reason that ours would replace
                view.state, view.wait_status = state_of(*view.identity)
                if view.state in (GONE, ZOMBIE):
                    ended[view.rank] = time.monotonic()
            if view.rank not in ended or view.rank in noted or not (view.done or time.monotonic() - ended[view.rank] > SETTLE_S):
                continue
            noted.add(view.rank)
            self._paused.tell(view.rank)
            status = view.wait_status
            if status is None and self._direct and launched.ended():  # we are its parent and have just reaped it
                status = wait_status_of(launched.process.returncode)
            elif status is None and view.identity is not None:  # its launcher polls as often as we do, and may be first
                status = status_by_launcher(launched.log, view.identity[0])
            if not view.done and os.getppid() == self._raylet:
                view.write_gone(status)


class PausedRanks:
    """The ranks of a host that wait for an editor, registered with Ray's distributed debugger.

    The debugger lists Ray workers that have paused threads, and connects to debugpy at the port that Ray knows for the worker:
    for a host, that of the last rank. A rank is not a Ray process. So its host reports itself as paused, at the rank's port, as
    `ray.util.debugpy` does. If this Ray lacks these functions, nothing is listed, and the address in the command's terminal still
    works.
    """

    def __init__(self) -> None:
        self._ports: dict[int, int] = {}
        self._shown = contextlib.ExitStack()

    def tell(self, rank: int, address: str = "") -> None:
        """Register a rank that waits at HOST:PORT; with "", unregister it."""
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
