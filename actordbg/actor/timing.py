"""How long one input took and how much memory it needed, measured so that the figures mean what they say.

* CUDA runs behind the caller: without a synchronisation before the clock is read, a forward takes microseconds.
* "Peak memory" is a high-water mark. torch resets CUDA's on request. A process's resident mark on Linux is reset by
  writing 5 to /proc/self/clear_refs; where that is not allowed it is the highest since the process began.
"""

from __future__ import annotations

import gc
import resource
import time
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def now(device: torch.device) -> float:
    """Seconds on a steady clock, once all work queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def release(device: torch.device) -> None:
    """Give back what is not used any more, so that the next peak is not an earlier configuration's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Begin a new high-water mark."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _CLEAR.write_text("5")
    except OSError:
        return


def peak_bytes(device: torch.device) -> int:
    """The high-water mark in bytes since `reset_peak`: CUDA memory allocated, or this process's resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(line.split()[1]) * 1024
