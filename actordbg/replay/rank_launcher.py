"""Start ranks as `deepspeed` and torchrun would on a machine, without the seconds that these take to import.

    python -m actordbg.replay.rank_launcher --like deepspeed --nproc 2 --port 29500 MODULE ARGUMENTS...

Each rank gets the variables that the real launcher sets. The first rank that fails ends the others, and its exit code is the
launcher's, in the words in which deepspeed says it (`worker_logs.reported_by_launcher` reads them). `--launcher real` starts the
real ones; tests hold the two against each other. Standard library only: torch is what makes the others slow.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

POLL_S = 0.05
PATIENCE_S = 30.0
"""How long a rank may take to end when it is told to, as with deepspeed."""


def main() -> int:
    """Start the ranks and wait for them; the exit code of the first that failed, else 0."""
    parser = argparse.ArgumentParser(description="Starts the ranks of a replay.")
    parser.add_argument("--like", choices=("deepspeed", "torchrun"), required=True)
    parser.add_argument("--nproc", type=int, required=True)
    parser.add_argument("--port", required=True)
    parser.add_argument("--address", default="127.0.0.1", help="the machine of rank 0")
    parser.add_argument("--first", type=int, default=0, help="the first rank of this machine")
    parser.add_argument("--count", type=int, help="how many ranks this machine starts; default: all")
    parser.add_argument("--node", type=int, default=0, help="the number of this machine")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--devices", help="numbers of the CUDA devices, with commas; default: as deepspeed, the first ones")
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _told_to_end)
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        machine = RankMachine(options.address, options.first, options.count or options.nproc, options.node, options.nodes)
        for local_rank in range(machine.count):
            rank = machine.first + local_rank
            local = [f"--local_rank={local_rank}"] if options.like == "deepspeed" else []
            environment = os.environ | variables(options.like, rank, options.nproc, options.port, options.devices, machine)
            command = [sys.executable, "-u", "-m", options.module, *local, *options.arguments]
            ranks.append(subprocess.Popen(command, env=environment))
        return _wait(ranks)
    finally:
        end(ranks)


@dataclass(frozen=True)
class RankMachine:
    """One of the machines of a group: its ranks, its number among them, and the address of rank 0's."""

    address: str = "127.0.0.1"
    first: int = 0
    count: int = 0
    node: int = 0
    nodes: int = 1


def variables(
    like: str, rank: int, nproc: int, port: str, devices: str | None = None, machine: RankMachine | None = None
) -> Mapping[str, str]:
    """What deepspeed's launcher or torchrun sets for a rank."""
    here = machine or RankMachine(count=nproc)
    common: dict[str, object] = {
        "RANK": rank, "LOCAL_RANK": rank - here.first, "WORLD_SIZE": nproc, "MASTER_ADDR": here.address, "MASTER_PORT": port,
    }  # fmt: skip
    if like == "deepspeed":
        own: dict[str, object] = {"LOCAL_SIZE": here.count, "CROSS_RANK": here.node, "CROSS_SIZE": here.nodes}
        own["CUDA_VISIBLE_DEVICES"] = devices or ",".join(map(str, range(here.count)))
    else:
        own = {
            "LOCAL_WORLD_SIZE": here.count, "GROUP_RANK": here.node, "GROUP_WORLD_SIZE": here.nodes, "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": nproc,
            "ROLE_NAME": "default", "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1),
        }  # fmt: skip
    return {name: str(value) for name, value in (common | own).items()}


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    """Until all ended well, or the first did not."""
    left = dict(enumerate(ranks))
    while left:
        for rank, process in list(left.items()):
            code = process.poll()
            if code:
                sys.stderr.write(f"rank {rank} (pid {process.pid}) exits with return code = {code}\n")
                return code if code > 0 else 128 - code
            if code == 0:
                del left[rank]
        time.sleep(POLL_S)
    return 0


def end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what is left of the ranks: asked first, killed when it takes too long."""
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
