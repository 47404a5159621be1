"""Start a replay's workers, each group in a separate session.

Workers form *groups* that start and end together (`groups_of`). With deepspeed or fsdp2, all ranks are one group. It is started
the way `deepspeed` or torchrun would (`rank_launcher`). With the plain backend every rank computes alone, so each is a group of
one, and a crash does not affect the others.

Traps that this module avoids:

* If a launcher started *us* (`deepspeed -m actordbg replay ...`), its rank variables must not reach our workers.
* A process may leave its session (torch's compile workers do). So all processes of a group carry a mark in their environment,
  by which we find them (`MARK`).
* Torch uses every core in every process by default: N processes share the cores (`OMP_NUM_THREADS`), unless the user set it.
* Torch's threads spin while they wait for each other. Where something else keeps the cores busy, as a training does, a check then
  takes six times as long; threads that sleep cost nothing on a quiet machine (`OMP_WAIT_POLICY`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from actordbg.actor.hub_model import needs_no_hub
from actordbg.base.errors import LaunchProblem
from actordbg.base.owners import NOT_FROM_HERE
from actordbg.base.processes import GONE, DeathWatch, end_session, state_of, wait_status_of
from actordbg.config import consent
from actordbg.config.choices import gather_facts
from actordbg.config.replay_config import LAUNCHERS, ReplayConfig
from actordbg.formats.store_files import open_regular, read_regular
from actordbg.replay.rank_launcher import NodeShare, variables
from actordbg.replay.work_order import WorkOrder, announce
from actordbg.replay.worker_logs import LAUNCHER_LOG, take_stacks

WORKER_MODULE = "actordbg.replay.worker"
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK",
)  # fmt: skip
_ELASTIC = "TORCHELASTIC_"
MARK = "ACTORDBG_GROUP"
"""The environment variable that marks the processes of a group; its value is unique to the group."""

BREAKPOINT = "actordbg.debug.breakpoint"
"""The hook for `breakpoint()` in the actor's or the model's code: a worker has no terminal."""
HUB_TIMEOUTS = {"HF_HUB_ETAG_TIMEOUT": "3", "HF_HUB_DOWNLOAD_TIMEOUT": "10"}
"""Seconds that a worker waits for the hub, unless the user set them. A fully cached model makes no request."""
_ALWAYS = {**NOT_FROM_HERE, "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "PYTHONUNBUFFERED": "1"}
"""Nothing is imported from the current folder, and no pickle runs as weights."""


Group: TypeAlias = range
"""The ranks of workers that start and end together. Several compute together, so that none can continue alone."""


@dataclass(frozen=True)
class Loss:
    """Why a group is gone without an input's fault. dead_nodes: the nodes that died with it, together one failure.
    excused: another group caused the loss, so it does not count.
    """

    why: str
    dead_nodes: frozenset[str] = frozenset()
    excused: bool = False


class Running(Protocol):
    """A started group, on this machine unless a subclass says otherwise. `log`: the launcher's output."""

    log: Path

    @property
    def lost(self) -> Loss | None:
        """Return how the group was lost, such as by the death of its node; None while it exists."""
        return None

    @property
    def descriptors(self) -> list[int]:
        """Return file descriptors that become readable when a worker dies; [] if the kernel has none."""
        return []

    def ended(self) -> bool:
        """Check whether the launcher of the workers has ended."""

    def stands(self) -> bool:
        """Check whether all machines of the group are known to be alive, so that a dead worker died alone. Never waits."""
        return True

    def end(self) -> None:
        """End every process of the group, and wait until they are gone."""

    def announce(self, before: Path, following: Path | None) -> None:
        """Give the waiting group, which finished `before`, its next order; None: it may leave."""

    def watch(self, identity: tuple[int, int]) -> None:
        """Watch a worker that has booted, with this pid and start time."""
        return None

    def state_of(self, identity: tuple[int, int]) -> tuple[str, int | None]:
        """Return a worker's state and wait status, as its machine knows them: see `processes.state_of`."""
        return state_of(*identity)

    def stacks(self, folder: Path, identities: Mapping[int, tuple[int, int]]) -> dict[int, str]:
        """Return the stacks of these ranks: see `worker_logs.take_stacks`."""
        return take_stacks(folder, identities)


@dataclass
class Launched(Running):
    """A group on this machine. `process`: the launcher, a session leader, or a lone worker itself (`lone`). `mark`: in the
    environment of all its processes. template: the model whose replays the launcher forks workers for, if it does.
    """

    process: subprocess.Popen[bytes]
    mark: str | None = None
    log: Path = Path()
    lone: bool = False
    template: str = ""
    _deaths: DeathWatch = field(default_factory=DeathWatch)

    @property
    def session(self) -> int:
        return self.process.pid

    @property
    def descriptors(self) -> list[int]:
        return self._deaths.descriptors

    def ended(self) -> bool:
        return self.process.poll() is not None

    def end(self) -> None:
        """End every process of the group, and wait for the launcher."""
        end_session(self.session, mark=self.mark)
        self.process.wait()
        self._deaths.clear()

    def announce(self, before: Path, following: Path | None) -> None:
        if following is not None:
            self._deaths.clear()
        announce(before, following)

    def fork(self, config: ReplayConfig, before: Path, following: Path) -> bool:
        """Let the waiting group leave, and its launcher run the order in a new process; return whether it can."""
        if config.model != self.template or config.nproc != 1:
            return False
        self._deaths.clear()
        announce(before, following, LAUNCHERS[config.backend])
        return True

    def watch(self, identity: tuple[int, int]) -> None:
        self._deaths.add(*identity)

    def state_of(self, identity: tuple[int, int]) -> tuple[str, int | None]:
        state, status = state_of(*identity)
        if state == GONE and self.lone and self.ended():  # asking whether it has ended reaped it, and only we know how
            status = wait_status_of(self.process.returncode)
        return state, status


Launcher = Callable[[ReplayConfig, Group, Path], Running]
"""Starts a group on a work order."""


def groups_of(config: ReplayConfig) -> list[Group]:
    """Return the groups that a replay's workers form."""
    if LAUNCHERS[config.backend] == "python":
        return [range(rank, rank + 1) for rank in range(config.nproc)]
    return [range(config.nproc)]


def launch(config: ReplayConfig, group: Group, work: Path, module: str = WORKER_MODULE) -> Launched:
    """Start the workers of `group` on a work order. Their launcher writes `launcher.log` next to that file."""
    alone = LAUNCHERS[config.backend] != "python" and config.nproc == 1 and module == WORKER_MODULE
    forks = alone and not gather_facts().gpus and WorkOrder.from_json(read_regular(work)).stay
    share = NodeShare(group.start, len(group), port=free_port(), forks=forks)
    environment = child_environment(config, os.environ)
    given = consent.arguments(config.model)
    launched = launch_share(config, share, work, [module, *given], environment=environment, log=work.parent / LAUNCHER_LOG)
    launched.template = config.model if forks else ""
    return launched


def launch_share(
    config: ReplayConfig, share: NodeShare, work: Path, program: Sequence[str], *, environment: dict[str, str], log: Path
) -> Launched:
    """Start a group's ranks of this machine: a lone rank of the plain backend itself, others below `rank_launcher`.

    program: the workers' module, and arguments for them.
    """
    like, command = LAUNCHERS[config.backend], [sys.executable, "-m"]
    if like == "python":
        environment |= variables(like, config.nproc, share)
    else:
        command += ["actordbg.replay.rank_launcher", like, str(config.nproc), json.dumps(asdict(share))]
    whose = ["--first-worker", str(share.worker), "--supervisor", str(os.getpid())]
    launched = start([*command, *program, *whose, "--work", str(work)], environment, log)
    launched.lone = like == "python"
    return launched


def child_environment(config: ReplayConfig, base: Mapping[str, str], beside: int | None = None) -> dict[str, str]:
    """Return the workers' environment: the user's, without a surrounding launcher's rank variables, and able to import actordbg.

    beside: how many ranks share this machine's cores (default: all).
    """
    beside = beside or config.nproc
    unless_set = {"OMP_WAIT_POLICY": "PASSIVE", **HUB_TIMEOUTS}
    if beside > 1:
        unless_set["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // beside))
    if LAUNCHERS[config.backend] == "deepspeed" and not gather_facts().gpus:
        unless_set["DS_ACCELERATOR"] = "cpu"
    if needs_no_hub(config.model):
        unless_set["HF_HUB_OFFLINE"] = "1"
    users = {key: value for key, value in base.items() if key not in RANK_VARIABLES and not key.startswith(_ELASTIC)}
    kept = unless_set | users | _ALWAYS
    if kept.get("PYTHONBREAKPOINT") != "0":
        kept["PYTHONBREAKPOINT"] = BREAKPOINT
    home = str(Path(__file__).resolve().parents[2])
    if home not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        kept["PYTHONPATH"] = os.pathsep.join(part for part in (home, kept.get("PYTHONPATH", "")) if part)
    return kept


def surrounding_launcher(environment: Mapping[str, str]) -> tuple[int, int, int, bool] | None:
    """Detect the launcher around us (`deepspeed -m actordbg ...`, `torchrun -m actordbg ...`) by the variables that it set.

    Returns our rank, its world size, how many processes it started on this machine, and whether it is deepspeed's.
    """
    try:
        rank, world, _ = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except (KeyError, ValueError):
        return None
    local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or world
    return rank, world, int(local), "CROSS_SIZE" in environment


def free_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port that was free a moment ago on an address of this machine."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def start(command: list[str], environment: dict[str, str], log: Path) -> Launched:
    own = os.urandom(8).hex()
    mark = f"{MARK}={own}"
    with open(open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
        log.chmod(0o600)
        line = f"$ {' '.join(command)}\n"
        file.write(line.encode())
        file.flush()
        try:
            process = subprocess.Popen(
                command,
                env=environment | dict([mark.split("=")]),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchProblem(f"cannot start {command[0]}: {error.strerror}", hint="run `actordbg doctor`") from None
    return Launched(process, mark, log)
