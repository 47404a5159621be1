"""Start a machine's ranks as `deepspeed` and torchrun would, without the seconds that those take to import.

    python -m actordbg.replay.rank_launcher deepspeed 2 '{"first": 0, "count": 2}' MODULE ARGUMENTS...

The arguments are the launcher to resemble, the number of ranks, and this machine's `NodeShare`. Each rank gets the variables that
the real launcher sets; a test compares them. The first rank that fails ends the others, and its exit code becomes ours, after a
line in deepspeed's words (`worker_logs.status_by_launcher` parses it). Standard library only: importing torch is what makes the
real launchers slow. Unlike `deepspeed --num_gpus`, it respects CUDA_VISIBLE_DEVICES.

A launcher that `forks` imports torch and transformers itself, and nothing else that computes. Its rank is a fork of it; and when
the rank has left, so is a process for another kind of order, such as the truth's. That process has seen nothing of DeepSpeed, and
nothing is imported twice. Not where there is a GPU: a fork cannot use CUDA.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05
PATIENCE_S = 30.0
"""Seconds that a rank has to end when told to, as with deepspeed."""


@dataclass(frozen=True)
class NodeShare:
    """The ranks of a group that a node starts: `count` of them, from `first`, numbered within the group.

    node, nodes: the node's number, and how many nodes the group has. address, port: the rendezvous at rank 0. worker: the number
    of the group's rank 0 among all workers of the replay; journals are named by these numbers. forks: see above.
    """

    first: int
    count: int
    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    worker: int = 0
    forks: bool = False

    @property
    def workers(self) -> range:
        """Return the numbers of these ranks among all workers of the replay."""
        return range(self.worker + self.first, self.worker + self.first + self.count)


def main() -> int:
    """Start the ranks and wait for them; return the exit code of the first that failed, else 0."""
    like, nproc, text, module, *arguments = sys.argv[1:]
    share = NodeShare(**json.loads(text))
    if share.forks:
        return _fork(like, share, arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _told_to_end)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for local_rank in range(share.count):
            local = [f"--local_rank={local_rank}"] if like == "deepspeed" else []
            environment = os.environ | variables(like, int(nproc), share, local_rank)
            command = [sys.executable, "-u", "-m", module, *local, *arguments]
            ranks.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
        return _wait(ranks)
    finally:
        end(ranks)


def _fork(like: str, share: NodeShare, arguments: Sequence[str]) -> int:
    """Run the order that the last argument names in a fork of this process, then each that is announced for another process."""
    from actordbg.base.imports import without_collecting

    with contextlib.suppress(ImportError), without_collecting("torch"):  # the rank says what is missing
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText  # noqa: F401

        from actordbg.actor import session  # noqa: F401
    from actordbg.replay.actor_engine import ActorEngine
    from actordbg.replay.work_order import following_fork
    from actordbg.replay.worker import run_worker

    *options, text = arguments
    work: Path | None = Path(text)
    while work is not None:
        pid = os.fork()
        if not pid:
            os.environ.update(variables(like, 1, share))
            sys.argv[1:] = [*options, str(work)]
            run_worker(ActorEngine)
        if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
            return _failed(0, pid, code)
        like, work = following_fork(work)
    return 0


def variables(like: str, nproc: int, share: NodeShare, local_rank: int = 0) -> Mapping[str, str]:
    """Return the variables that deepspeed's launcher or torchrun sets for a rank of this machine.

    Ranks of "python", which has no launcher, are independent and choose their devices by their rank.
    """
    rank = share.first + local_rank
    common: dict[str, object] = {
        "RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": nproc, "MASTER_ADDR": share.address, "MASTER_PORT": share.port,
    }  # fmt: skip
    own: dict[str, object] = {}
    if like == "python":
        own["LOCAL_RANK"] = rank
    elif like == "deepspeed":
        own = {"LOCAL_SIZE": share.count, "CROSS_RANK": share.node, "CROSS_SIZE": share.nodes}
        own["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(share.count))))
    else:
        own = {
            "LOCAL_WORLD_SIZE": share.count, "GROUP_RANK": share.node, "GROUP_WORLD_SIZE": share.nodes, "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": nproc,
            "ROLE_NAME": "default", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        }  # fmt: skip
    return {name: str(value) for name, value in (common | own).items()}


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Wait until all ranks exited with 0, or the first with another code, and return that code."""
    left = dict(enumerate(ranks))
    while left:
        for rank, process in list(left.items()):
            code = process.poll()
            if code:
                return _failed(rank, process.pid, code)
            if code == 0:
                del left[rank]
        time.sleep(POLL_S)
    return 0


def _failed(rank: int, pid: int, code: int) -> int:
    sys.stderr.write(f"rank {rank} (pid {pid}) exits with return code = {code}\n")
    return code if code > 0 else 128 - code


def end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run: terminate them, and kill those that take longer than PATIENCE_S."""
    alive = [process for process in ranks if process.poll() is None]
    for process in alive:
        process.terminate()
    until = time.monotonic() + PATIENCE_S
    for process in alive:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def _told_to_end(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
