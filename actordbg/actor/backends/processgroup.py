"""torch.distributed for a replay's ranks: its rendezvous, its backend, and who shares an input with whom.

Ranks lie in a mesh (dp, sp, tp) whose last dimension varies fastest, as in the trainer's strategies: neighbours share an input
(a *lane* of sp x tp ranks), and lanes are data-parallel.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from actordbg.actor.backends.backend import Place
from actordbg.config.replay_config import ReplayConfig

LEAST_TIMEOUT_S = 3600.0
"""Collectives give up no earlier than this (the trainer's own): a hang is for the replay's supervisor to find."""


def timeout_of(config: ReplayConfig) -> timedelta:
    """After how long a collective gives up."""
    return timedelta(seconds=max(LEAST_TIMEOUT_S, 2 * config.timeout_s))


def rendezvous(place: Place) -> None:
    """What torch.distributed wants to find in the environment, for a process that no launcher started."""
    if place.world_size == 1 and "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def initialise(place: Place, device: torch.device, config: ReplayConfig) -> None:
    """Make the process group on the backend asked for, by default the one that suits the device; once in a process."""
    rendezvous(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        chosen = config.dist_backend or ("nccl" if device.type == "cuda" else "gloo")
        dist.init_process_group(chosen, timeout=timeout_of(config))


def backend_in_use() -> str | None:
    """The backend of the process group, in torch.distributed's own words."""
    return str(dist.get_backend()) if dist.is_initialized() else None


def dumps_of_lanes(dump_id: str, lane_width: int) -> list[str]:
    """Which dump each lane has at the moment, in the order of lanes. Every rank has to call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [dump_id]
    ids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ids, dump_id)
    return ids[::lane_width]
