"""How much memory processes of this machine have now: resident, unshared, and on GPUs. Linux, standard library only.

RSS and USS are what /proc/<pid>/smaps_rollup says. The kernel walks all pages of the process for it, which takes about a
millisecond for each GiB, and the process may wait so long to map memory; without USS, /proc/<pid>/statm costs nothing.

CUDA memory that is in use is what `nvidia-smi` says of a pid. It names pids of the host: inside of a container with a pid
namespace of its own nothing is found, and the value stays unknown. What torch's allocator holds in reserve only its own
process can say.

Ray sends what is in this module to other nodes by value, where no actordbg may be installed: so it imports nothing of ours.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

Reading = tuple[int, int, int, "int | None", "int | None"]
"""(pid, start in clock ticks since boot, RSS, USS, CUDA memory in use), in bytes; None for what is not known."""
_ASK_GPU = ("--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
_PATIENCE_S = 10


def read_memory(pids: Sequence[int], unshared: bool = True) -> list[Reading]:
    """What each process has now; those that are gone or dead are left out. `unshared`: ask for USS, too."""
    readings = []
    used = gpu_memory() if pids else {}
    for pid in pids:
        ticks, sizes = started(pid), _sizes(pid, unshared)
        if ticks and sizes is not None:
            readings.append((pid, ticks, *sizes, used.get(pid)))
    return readings


class MemoryReader:
    """What lives on a node of a Ray cluster while its processes are watched."""

    def read(self, pids: Sequence[int], unshared: bool) -> list[Reading]:
        return read_memory(pids, unshared)


def started(pid: int) -> int:
    """When a live process started, in clock ticks since boot; 0 for one that is gone or dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def _sizes(pid: int, unshared: bool) -> tuple[int, int | None] | None:
    """(RSS, USS) in bytes; None where there is no such process. USS is unknown for processes of other users."""
    try:
        if unshared:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
            if "Rss" in sizes:
                return sizes["Rss"], sizes.get("Private_Clean", 0) + sizes.get("Private_Dirty", 0)
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        pass  # another user's process, a kernel without this file, or nobody: statm tells
    except OSError:
        return None
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return None
    return (pages * os.sysconf("SC_PAGE_SIZE"), None) if pages else None


def gpu_memory() -> dict[int, int]:
    """Bytes on all GPUs by pid, as `nvidia-smi` says; {} if there is none, or it does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    try:
        output = subprocess.run([program, *_ASK_GPU], capture_output=True, text=True, timeout=_PATIENCE_S, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    used: dict[int, int] = {}
    for line in output.splitlines():
        pid, _, mebibytes = (part.strip() for part in line.partition(","))
        if pid.isdigit() and mebibytes.isdigit():
            used[int(pid)] = used.get(int(pid), 0) + int(mebibytes) * 2**20
    return used
