"""Parse the output of workers and launchers as evidence: ends of logs, exit codes, and the stacks of every thread.

Workers answer SIGUSR1 and SIGTERM with faulthandler's text. The thread that matters is inside a collective (with CUDA the
backward runs in an autograd thread); if none is, it is the thread that runs the worker's loop.

Example:
    >>> read_stack(text).waits_in
    'broadcast (deepspeed/runtime/zero/utils.py)'
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from actordbg.base.fault import scrub
from actordbg.base.processes import ALIVE, state_of, wait_status_of
from actordbg.formats.store_files import open_regular
from actordbg.records.journal import rank_log
from actordbg.trainers.trainer import TRAINER

EXCERPT = 6000
"""Characters of a log or a traceback that a result keeps (its end)."""
_TAIL, _LAST_WORDS = 65536, 1500
"""Most bytes of a log that are read, and most characters of each that an error quotes."""
MAX_FRAMES = 30
"""How many frames of a stack are shown, the most recent ones."""

_FRAME = re.compile(r'^  File "(?P<path>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$')
_COLLECTIVES = re.compile(
    r"torch/distributed/(?:distributed_c10d|_functional_collectives|c10d_logger)\.py$|deepspeed/comm/[a-z_]+\.py$"
)
_WAITS = re.compile(
    r"deepspeed/runtime/zero/[a-z_]+\.py (?:wait|synchronize)$"
    r"|torch/distributed/fsdp/.* (?:wait\w*|foreach_all_gather_copy_out)$"
    r"|torch/cuda/(?:__init__|streams)\.py synchronize$"
)
"""Functions in which a process waits for a collective that it began earlier: `path function`."""
_WAITS_FOR = {
    "partition_parameters.py": "the all-gather of parameters (all_gather_into_tensor)",
    "stage3.py": "the reduce-scatter of gradients (reduce_scatter)",
    "_fsdp_collectives.py": "the all-gather of parameters (all_gather_into_tensor)",
    "__init__.py": "its GPU (torch.cuda.synchronize)",
    "streams.py": "its GPU (torch.cuda.synchronize)",
}
_WRAPPERS = frozenset(("wrapper", "log_wrapper", "inner", "_fn", "wrapped_fn", "<lambda>"))
_LOOP = re.compile(r"actordbg/replay/worker\.py run$")
_KNOWN = rf"{TRAINER.package}|transformers|deepspeed|peft|ring_flash_attn|flash_attn"
_LIBRARIES = re.compile(rf"(?:^|/)((?:{_KNOWN})/.*)$")
_INSTALLED = re.compile(
    r"^.*/(?:site|dist)-packages/|^.*/lib/python3\.\d+/"
    rf"|^.*?/(?=(?:actordbg|torch|{_KNOWN})/)"
)


@dataclass(frozen=True)
class Frame:
    """A line of a stack; `path`: without the folder in which packages are installed."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.function}"

    @property
    def place(self) -> str:
        return f"{self.path} {self.function}"


@dataclass(frozen=True)
class Stack:
    """The frames of a thread, most recent first."""

    frames: tuple[Frame, ...]

    @property
    def collective(self) -> str | None:
        """Return the name of the collective in which the thread waits; None outside of any."""
        for frame in self.frames:
            if _WAITS.search(frame.place):
                return _WAITS_FOR.get(frame.path.rpartition("/")[2], f"{frame.function} of {frame.path}")
        called = [frame for frame in self.frames if _COLLECTIVES.search(frame.path)]
        named = [frame.function for frame in called if frame.function not in _WRAPPERS]
        return next(iter(named or [frame.function for frame in called]), None)

    @property
    def caller(self) -> Frame | None:
        """Return the nearest frame of the trainer, DeepSpeed, transformers, ... outside the collective; else the top frame."""
        outside = [frame for frame in self.frames if not _COLLECTIVES.search(frame.path)]
        known = [frame for frame in outside if _LIBRARIES.search(frame.path) and frame.function not in _WRAPPERS]
        return next(iter(known or outside or self.frames), None)

    @property
    def model_frame(self) -> Frame | None:
        """Return the nearest frame of the trainer or of transformers; None if there is none."""
        inside = (f"{TRAINER.package}/", "transformers/")
        return next((frame for frame in self.frames if frame.path.startswith(inside)), None)

    @property
    def waits_in(self) -> str | None:
        """Return the collective and its caller: "broadcast (deepspeed/runtime/zero/utils.py)"; None outside of any."""
        name, caller = self.collective, self.caller
        return f"{name} ({caller.path})" if name and caller else name

    def text(self, limit: int = MAX_FRAMES) -> str:
        """Format a line per frame, at most `limit`."""
        lines = [f"  {frame}" for frame in self.frames[:limit]]
        if len(self.frames) > limit:
            lines.append(f"  ... {len(self.frames) - limit} more")
        return "\n".join(lines)


def read_stack(text: str) -> Stack | None:
    """Return the stack that matters among the threads of faulthandler's text; None if there is none."""
    stacks = [Stack(frames) for frames in _threads(text)]
    waiting = [stack for stack in stacks if stack.collective]
    looping = [stack for stack in stacks if any(_LOOP.search(frame.place) for frame in stack.frames)]
    return next(iter(waiting or looping or stacks[-1:]), None)


def is_complete(text: str) -> bool:
    """Check whether the text has the main thread's last frames, or says that it omitted some."""
    return bool(re.search(r'worker\.py", line \d+ in main\n|^  \.\.\.$', text, re.MULTILINE))


def _threads(text: str) -> Iterator[tuple[Frame, ...]]:
    for thread in text.split("most recent call first"):
        frames = (_FRAME.match(line) for line in thread.splitlines())
        stack = [Frame(_INSTALLED.sub("", match["path"]), int(match["line"]), match["function"]) for match in frames if match]
        if stack:
            yield tuple(stack)


LAUNCHER_LOG = "launcher.log"
STACKS_S = 2.0
"""Maximum seconds to wait for the stacks."""


def launcher_log(first_worker: int) -> str:
    """Return the log name of the launcher that starts this worker and those after it."""
    return f"launcher-{first_worker}.log" if first_worker else LAUNCHER_LOG


def size_of(path: Path) -> int:
    """Return the size of a log in bytes; 0 if it does not exist yet."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def tail_of(path: Path, start: int = 0) -> str:
    """Read a log from byte `start` to its end, at most the last `_TAIL` bytes, without secrets; "" if it does not exist."""
    try:
        with open(open_regular(path), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _TAIL))
            return scrub(file.read().decode(errors="replace"))
    except FileNotFoundError:
        return ""


def last_words(launcher: Path, folder: Path, ranks: Iterable[int]) -> str:
    """Return the ends of the launcher's and the workers' logs, each under its name."""
    paths = [launcher, *(rank_log(folder, rank) for rank in ranks)]
    texts = ((path.name, tail_of(path)[-_LAST_WORDS:].strip()) for path in paths)
    return "\n".join(f"--- {name}\n{text}" for name, text in texts if text)


def was_told_to_end(log: str) -> bool:
    """Check whether SIGTERM ended the process: its log has stacks, and no fatal error before them."""
    return "(most recent call first)" in log and "Fatal Python error" not in log


def status_by_launcher(launcher: Path, pid: int | None = None) -> int | None:
    """Return the wait status of a rank (None: any) that its launcher reaped, from `rank_launcher`'s log; None if it has none."""
    said = re.findall(r"\(pid (\d+)\) exits with return code = (-?\d+)", tail_of(launcher))
    codes = [int(code) for who, code in said if pid in (None, int(who))]
    return wait_status_of(codes[-1]) if codes else None


def take_stacks(folder: Path, processes: Mapping[int, tuple[int, int]]) -> dict[int, str]:
    """Ask workers (rank: pid and start time) for their stacks; return those that answer within STACKS_S, by rank."""
    before: dict[int, int] = {}
    stacks: dict[int, str] = {}
    for rank, identity in processes.items():
        if state_of(*identity)[0] == ALIVE:
            before[rank] = size_of(rank_log(folder, rank))
            with contextlib.suppress(ProcessLookupError):  # it died since
                os.kill(identity[0], signal.SIGUSR1)
    deadline = time.monotonic() + STACKS_S
    while stacks.keys() < before.keys() and time.monotonic() < deadline:
        time.sleep(0.05)
        texts = {rank: tail_of(rank_log(folder, rank), start) for rank, start in before.items()}
        stacks = {rank: text for rank, text in texts.items() if is_complete(text)}
    return stacks


def before_stacks(log: str) -> str:
    """Return the worker's output before the first stack in its log."""
    return log[: log.find("(most recent call first)")].rpartition("\n")[0] if "(most recent call first)" in log else log
