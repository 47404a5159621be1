"""The states of torch's random generators: read around a call, so that a replay with dropout can draw the same numbers.

Reading a state changes nothing and waits for nothing: a CPU generator's is 5,056 bytes of host memory, a CUDA generator's is its
seed and its offset, 16 bytes that lie on the host as well (no device synchronisation). CUDA is never initialised for it, and
left out while a graph is being captured, where torch refuses the question.

A state is private to its reader (torch hands out a copy), so it needs no further one.

Example::

    before = states([sequences.device])         # {"cpu": uint8 [5056], "cuda:0": uint8 [16]}
    ...                                         # the call
    after = digests(states([sequences.device])) # {"cpu": "9f3a...", "cuda:0": "2c1b..."}
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping

import torch

CPU = "cpu"


def states(devices: Iterable[torch.device] = ()) -> dict[str, torch.Tensor]:
    """Present states (uint8, on the CPU) by device: of the CPU, and of the CUDA devices among `devices`.

    Without any CUDA device among them it is the current one. Only where this process has initialised CUDA.
    """
    found = {CPU: torch.default_generator.get_state()}
    if _cuda_is_ready():
        wanted = {_index(device) for device in devices if device.type == "cuda"} or {torch.cuda.current_device()}
        for index in sorted(wanted):
            found[f"cuda:{index}"] = torch.cuda.default_generators[index].get_state()
    return found


def digests(states: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The SHA-256, in hex, of each state's bytes."""
    return {name: hashlib.sha256(ctypes.string_at(t.data_ptr(), t.numel())).hexdigest() for name, t in states.items()}


def _cuda_is_ready() -> bool:
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and not torch.cuda.is_current_stream_capturing()


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
