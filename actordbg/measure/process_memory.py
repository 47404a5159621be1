"""Read the current memory of processes on this machine: resident, unshared, and on GPUs. Linux, standard library only.

RSS and USS come from /proc/<pid>/smaps_rollup. The kernel walks all pages of the process for it, which takes about a millisecond
per GiB, and can delay the process's memory mappings that long; without USS, /proc/<pid>/statm costs nothing.

CUDA memory in use comes from `nvidia-smi`, by pid. It prints pids of the host: in a container with a separate pid namespace none
match, and the value is unknown. The memory that torch's allocator reserves is known only to its own process.

Ray sends this module by value to other nodes, where actordbg may not be installed: so it imports nothing from actordbg.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

Reading = tuple[int, int, int, "int | None", "int | None"]
"""(pid, start in clock ticks since boot, RSS, USS, CUDA memory in use), in bytes; None if unknown."""
_ASK_GPU = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
_PATIENCE_S = 10


def read_memory(pids: Sequence[int], unshared: bool) -> list[Reading]:
    """Read the memory of each live process; others are skipped. `unshared`: also read USS."""
    readings = []
    used = gpu_memory() if pids else {}
    for pid in pids:
        ticks, sizes = started(pid), _sizes(pid, unshared)
        if ticks and sizes is not None:
            readings.append((pid, ticks, *sizes, used.get(pid)))
    return readings


class MemoryReader:
    """The Ray actor that reads memory on a node of a cluster while its processes are watched."""

    def read(self, pids: Sequence[int], unshared: bool) -> list[Reading]:
        return read_memory(pids, unshared)


def started(pid: int) -> int:
    """Return a live process's start time in clock ticks since boot; 0 if it is gone or dead."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def _sizes(pid: int, unshared: bool) -> tuple[int, int | None] | None:
    """Return (RSS, USS) in bytes; None if the process is gone. USS is None for processes of other users."""
    try:
        if unshared:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
            if "Rss" in sizes:
                return sizes["Rss"], sizes.get("Private_Clean", 0) + sizes.get("Private_Dirty", 0)
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        pass  # another user's process, a kernel without this file, or no process: statm decides
    except OSError:
        return None
    try:
        sizes_in_pages = Path(f"/proc/{pid}/statm").read_text().split()
        pages = int(sizes_in_pages[1])
    except OSError:
        return None
    return (pages * os.sysconf("SC_PAGE_SIZE"), None) if pages else None


def gpu_memory() -> dict[int, int]:
    """Return bytes on all GPUs by pid, from `nvidia-smi`; {} if it is missing or does not respond."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    try:
        output = subprocess.run(
            [program, *_ASK_GPU], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    used: dict[int, int] = {}
    for line in output.splitlines():
        pid, _, mebibytes = (part.strip() for part in line.partition(","))
        if pid.isdigit() and mebibytes.isdigit():
            used[int(pid)] = used.get(int(pid), 0) + int(mebibytes) * 2**20
    return used
