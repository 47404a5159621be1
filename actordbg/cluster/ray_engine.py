"""The engine of `--engine ray`: runs a replay's groups in places on a Ray cluster.

    with connected(order, "replay 20260101T000000-abcdef") as engine, using(engine):
        run_replay(...)

Ray schedules, ships code, and reports deaths. Inputs, attempts, blame and results work as on one machine: the supervisor stays
with the command, and the ranks write to the store, which all nodes mount, or their output is sent to the command
(`node_store.py`). When the command ends, however it ends, Ray ends its actors, and their ranks end with them. `--resume` then
continues from the store.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import socket
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

from actordbg.base.errors import Conflict, EnvironmentProblem, LaunchProblem, Unsupported, UsageError, reason_of, require_package
from actordbg.base.units import listed, plural, some
from actordbg.cluster.group_place import FENCE_S, GroupPlace, RayRunning
from actordbg.cluster.node_host import interface_of, versions_here
from actordbg.cluster.order import ClusterOrder, GroupShape, runtime_env_of
from actordbg.config.choices import facts_elsewhere, gather_facts
from actordbg.config.replay_config import LAUNCHERS, ReplayConfig
from actordbg.replay.group_engine import GroupEngine, Losses, PlaceLost
from actordbg.replay.launch import WORKER_MODULE, Group, Running

_ADDRESS = re.compile(r"(?:ray://)?(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})")
_SETTINGS = b"\0\0\0\4\0\0\0\0\0"
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS
"""The start of an HTTP/2 connection, which Ray speaks: both sides send their settings first. Its dashboard speaks HTTP/1."""
EARLIER_S = 60.0
"""Maximum seconds to wait for the hosts of a dead command."""
SAY_AFTER_S = 10.0
"""Seconds until the user is told that a place is not ready, and between further checks."""
_ANOTHER = "`ray start --head` starts one; or pass --address HOST:PORT"
_TOKEN = "if the cluster asks for a token, set RAY_AUTH_MODE=token"
WHO_HOLDS = "`ray status` says what others hold, `ray list placement-groups` who"


class RayEngine(GroupEngine):
    """Runs groups in places. A place belongs to a group's ranks, so the next attempt and the next replay reuse it."""

    def __init__(self, ray: Any, order: ClusterOrder, title: str) -> None:
        self.ray, self.order, self.title = ray, order, title
        self._places: dict[Group, GroupPlace] = {}
        self._news: list[str] = []
        self._said: set[str] = set()
        self._made = 0
        self._gpu: bool | None = None
        self._parts: list[RayEngine] = []

    def shape(self, config: ReplayConfig) -> GroupShape:
        """Return the resources of a group on this cluster. If it has GPUs, each rank gets one."""
        if self._gpu is None:
            self._gpu = any("GPU" in node for node in self.resources())
        return GroupShape.of(config, self.order.per_node, self._gpu)

    def deals(self, config: ReplayConfig) -> bool:
        """Deal inputs unless --align decides which inputs meet."""
        return config.align is None

    def groups(self, config: ReplayConfig, inputs: int) -> list[Group]:
        """Return as many groups as were requested, else as fit on the cluster; never more than there are inputs."""
        self.refuse(config)
        shape, together = self.shape(config), LAUNCHERS[config.backend] != "python"
        requested = self.order.groups or (0 if together or config.nproc == 1 else config.nproc) or self.holds(shape)
        lanes = config.lanes if together else 1
        count = max(1, min(requested, -(-inputs // lanes)))
        firsts = range(0, count * shape.ranks, shape.ranks)
        return [range(first, first + shape.ranks) for first in firsts]

    def holds(self, shape: GroupShape) -> int:
        """Count how many such groups fit on the cluster; EnvironmentProblem for 0."""
        room = shape.groups_on(self.resources())
        if not room:
            raise EnvironmentProblem(
                f"the Ray cluster cannot fit a group of {shape.words()}: {self._in_words()}",
                hint="lower --gpus-per-node or --nproc, or pass --groups 1 to wait for the autoscaler",
            )
        return room

    def refuse(self, config: ReplayConfig) -> None:
        """Refuse settings that cannot run on a cluster."""
        if config.align is not None and (self.order.groups or 1) > 1:
            raise UsageError(
                f"--align {config.align} decides which inputs run together, so it needs a single group", hint="drop --groups"
            )

    def parts(self, configs: Sequence[ReplayConfig]) -> list[GroupEngine]:
        """Return one engine per group that fits on the cluster, each with one group at a time; the largest group decides."""
        for config in configs:
            self.refuse(config)
        most = self.order.groups or min((self.holds(self.shape(config)) for config in configs), default=1)
        alone = replace(self.order, groups=1)
        self._parts = [RayEngine(self.ray, alone, f"{self.title} runner {number}") for number in range(min(most, len(configs)))]
        return list(self._parts)

    def losses(self) -> Losses:
        return Losses(self.order.max_failures, "--max-failures")

    def await_end(self, replay_id: str, folder: Path) -> None:
        """Wait until Ray has ended the hosts of a dead command, and their ranks; not needed if hosts have separate folders.

        Conflict if they stay: then that command still runs, on another machine.
        """
        from ray.util import list_named_actors

        if self.order.store is not None:
            return
        until = time.monotonic() + EARLIER_S
        while any(replay_id in actor["name"] for actor in list_named_actors(all_namespaces=True)):
            if time.monotonic() > until:
                raise Conflict(
                    f"another command runs replay {replay_id} on this cluster", hint="wait for it, or end it with Ctrl-C"
                )
            time.sleep(0.2)
        time.sleep(FENCE_S)

    def ready(self, config: ReplayConfig, group: Group) -> bool:
        shape, place = self.shape(config), self._places.get(group)
        if place is not None and (place.settled() or place.shape != shape):
            self._give_up(group)
            place = None
        if place is None:
            self.refuse(config)
            for other in [other for other in self._places if set(other) & set(group)]:
                self._give_up(other)  # from an earlier replay, whose groups had other ranks
            number = group[0] // shape.ranks
            self._made += 1
            name = f"actordbg {self.title} group {number}"
            if self._made > 1 + number:
                name += f" try {self._made}"
            place = self._places[group] = GroupPlace(self.ray, shape, name, self._news.append, self.order.store)
        there = place.ready()
        if place.settled():
            raise PlaceLost(place.lost, place.dead_nodes)
        if not there and place.is_late(SAY_AFTER_S):
            says = f"{place.name} is starting: its nodes get the code and start hosts"
            if not place.is_reserved():
                says = f"{place.name} waits for {shape.words()}; {self._in_words()}, free {self._free()}; {WHO_HOLDS}"
            if says not in self._said:
                self._said.add(says)
                self._news.append(says)
        return there

    def launch(self, config: ReplayConfig, group: Group, work: Path, module: str = WORKER_MODULE) -> Running:
        return RayRunning(self._places[group], config, group, work, module)

    def news(self) -> list[str]:
        messages = list(self._news)
        self._news.clear()
        return messages

    def is_here(self, address: str) -> bool:
        return interface_of(address) is not None

    def facts_of(self, group: Group) -> dict[str, object]:
        place = self._places.get(group)
        return {"nodes": [host["node"] for host in place.nodes]} if place is not None and place.nodes else {}

    def close(self) -> None:
        """Release every place: first those that wait.

        A released place makes room for waiting places, and Ray (2.55) never frees what it prepares for a place that is released
        meanwhile: its CPUs are lost to everybody.
        """
        for part in self._parts:
            part.close()
        for group in sorted(self._places, key=lambda group: self._places[group].holds_nodes):
            self._give_up(group)

    def _give_up(self, group: Group) -> None:
        place = self._places.pop(group)
        with contextlib.suppress(self.ray.exceptions.RayError):  # a lost place cannot be released
            place.release()

    def resources(self) -> list[dict[str, float]]:
        """Return the resources of each live node."""
        return [node["Resources"] for node in alive(self.ray)]

    def _free(self) -> str:
        """Describe the unreserved resources of all nodes together."""
        free, most = self.ray.available_resources(), self.ray.cluster_resources()
        return " and ".join(f"{free.get(kind, 0):g} of {most[kind]:g} {kind}" for kind in ("CPU", "GPU") if kind in most)

    def _in_words(self) -> str:
        nodes = self.resources()
        each = [f"{node.get('CPU', 0):g} CPU" + (f" and {node['GPU']:g} GPU" if "GPU" in node else "") for node in nodes]
        return f"it has {plural(len(nodes), 'node')} ({some(each, 8)})"


@contextlib.contextmanager
def connected(order: ClusterOrder, title: str) -> Iterator[RayEngine]:
    """Connect to the cluster, check that its nodes have our versions, and release everything at the end."""
    ray = join_cluster(order.address, f"actordbg {title}", runtime_env=runtime_env_of(order) or None)
    try:
        require_same_versions(ray)
        engine = RayEngine(ray, order, title)
        gpus = int(sum(node.get("GPU", 0) for node in engine.resources()))
        there = gather_facts(cuda=gpus > 0, gpus=gpus)  # facts that configurations depend on: this machine may have no GPU
        try:
            with contextlib.redirect_stdout(cast(IO[str], OwnOutput(sys.stdout))), facts_elsewhere(there):
                yield engine
        finally:
            engine.close()
    finally:
        with contextlib.redirect_stdout(io.StringIO()):  # Ray now prints buffered errors of its nodes, in this thread
            ray.shutdown()


def join_cluster(address: str | None, title: str, **options: Any) -> Any:
    """Connect this process to a cluster, and return Ray. Raises LaunchProblem within seconds if none answers."""
    require_package("a cluster", "ray")
    import ray

    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    require_answer(address)
    warnings.filterwarnings("ignore", category=FutureWarning, module="ray")  # advice about the future of Ray's own settings
    if not address.startswith("ray://"):  # Ray's client cannot name a job
        options["job_config"] = ray.job_config.JobConfig(metadata={"job_name": title})
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError, OSError) as error:
        where = "on this machine" if address == "auto" else f"at {address}"
        why = reason_of(error).split(". ")[0]
        hint = _ANOTHER if os.environ.get("RAY_AUTH_MODE") == "token" else f"{_TOKEN}; {_ANOTHER}"  # Ray's error names no token
        raise LaunchProblem(f"cannot join a Ray cluster {where}: {why}", hint=hint) from None
    return ray


class OwnOutput:
    """Standard output without the prints of Ray's threads: output for a program must stay parsable.

    They print each dead raylet with the end of its log. The engine's news report lost groups.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if threading.current_thread().name.startswith("ray_"):
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def alive(ray: Any) -> list[dict[str, Any]]:
    """Return Ray's facts about the live nodes."""
    return [node for node in ray.nodes() if node["Alive"]]


def require_answer(address: str) -> None:
    """Check that Ray answers at `address`; LaunchProblem within seconds, where Ray would retry for minutes."""
    if address == "auto":
        return
    match = _ADDRESS.fullmatch(address)
    if match is None:
        source = "" if os.environ.get("RAY_ADDRESS") != address else " (RAY_ADDRESS)"
        raise UsageError(
            f"{address:.100}{source} is not a Ray cluster address",
            hint="use --address auto, HOST:PORT (`ray start` prints it, usually 6379) or ray://HOST:10001, not the dashboard's",
        )
    try:
        with socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=10) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                connection.sendall(_HELLO)
                if connection.recv(9)[3:4] != _SETTINGS[3:4]:
                    raise ConnectionError("something other than Ray listens there")
    except (OSError, OverflowError) as error:
        raise LaunchProblem(f"no Ray cluster answers at {address}: {reason_of(error)}", hint=_ANOTHER) from None


# Nothing starts unless every node has this command's versions: other versions would give other numbers.


ANSWER_S = 300.0
"""Maximum seconds to wait for a node's answer: it may first have to fetch the code and install the runtime environment."""


def require_same_versions(ray: Any) -> None:
    """Compare each node's versions; Unsupported with the list if any differ, EnvironmentProblem if a node does not answer."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote_versions = ray.remote(versions_here)
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in alive(ray)}
    answers = {
        node: remote_versions.options(
            name="actordbg versions", num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote()
        for node in nodes
    }
    ours, different = versions_here(), []
    for node, answer in answers.items():
        name = f"{node[:8]} ({nodes[node]})"
        try:
            theirs = ray.get(answer, timeout=ANSWER_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            if node not in {other["NodeID"] for other in alive(ray)}:
                continue  # it died since
            words = str(error).strip().splitlines() or [type(error).__name__]
            raise EnvironmentProblem(
                f"node {name} cannot run actordbg: {words[-1].strip()[:400]}",
                hint="set what the node needs with --runtime-env; its log is in /tmp/ray on the node",
            ) from None
        if other := differing_versions(ours, theirs):
            different.append(f"  node {name}: {listed(other)}")
    if different:
        raise Unsupported(
            "nodes have other versions than this command:\n" + "\n".join(sorted(different)),
            hint="use the same environment on every node, or install it there with --runtime-env FILE",
        )


def differing_versions(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Return each package whose version differs on a node."""
    theirs = {name: theirs.get(name, "none") for name in ours}
    return [f"{name} {theirs[name]} (here {ours[name]})" for name in ours if theirs[name] != ours[name]]
