"""The collectives that a replay's ranks make, in a group of one process: over NCCL where there is CUDA, over gloo elsewhere."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist


def run(device: torch.device) -> list[str]:
    """Each collective once, with its result checked; their names."""
    given = torch.arange(8, dtype=torch.float32, device=device)
    out, done = torch.empty_like(given), []
    for name, call in {
        "all_reduce": lambda: (out.copy_(given), dist.all_reduce(out)),
        "broadcast": lambda: (out.copy_(given), dist.broadcast(out, 0)),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(out, given),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(out, given),
        "all_to_all_single": lambda: dist.all_to_all_single(out, given),
        "barrier": dist.barrier,
    }.items():
        if device.type == "cpu" and name in ("reduce_scatter_tensor", "all_to_all_single"):
            continue  # gloo has no such collective in every release
        call()
        assert torch.equal(out, given), f"{name}: {out.tolist()}"
        done.append(name)
    return done


def main() -> None:
    """Say which collectives are right."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    cuda = torch.cuda.is_available()
    backend, device = ("nccl", torch.device("cuda", 0)) if cuda else ("gloo", torch.device("cpu"))
    dist.init_process_group(backend, rank=0, world_size=1)
    version = ".".join(map(str, torch.cuda.nccl.version())) if cuda else "no CUDA"
    print(f"{backend} ({version}): {', '.join(run(device))} are right in a group of one")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
