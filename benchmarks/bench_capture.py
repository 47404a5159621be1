"""What capture costs the thread that trains, against the synchronous way it replaces.

Peer: at the end of forward, `clone().cpu()` the arguments and `pickle.dump` them into a file (what the scripts did that
wrote the old dumps). Ours: the hook, recording everything. Both record the same call of an empty Actor, 135 kB of inputs
(sequences [4, 2048] and attention_mask int64, action_mask [4, 1024] bool), with about 5 ms of matrix products between
calls, so that our writer thread competes with work as it does in training. Calls of the peer and ours alternate.

- *stall*: time of the call, less that of the same call without any recording.
- *slow file system*: every file takes 20 ms more, in the thread that writes it.
- *off*: time that an installed hook adds while recording is off, per call.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from actordbg.capture.control import Control
from actordbg.capture.hook import Slot, wrap
from actordbg.capture.switch_file import write_control
from actordbg.formats.dump_record import DumpRecord, now_timestamp
from actordbg.store.layout import Store
from benchmarks.rows import Row


class Actor(torch.nn.Module):
    """An Actor with OpenRLHF's signature that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.packing_samples, self.temperature = torch.nn.Linear(1, 1), False, 1.0

    def forward(
        self, sequences: torch.Tensor, action_mask: Any = None, attention_mask: Any = None, return_output: bool = False,
        allgather_logits: bool = False, return_logprobs: bool = False, ring_attn_group: Any = None,
        packed_seq_lens: Any = None, return_entropy: bool = False, **mm_inputs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Returns its input."""
        return sequences


class SlowStore(Store):
    """A store on a file system that takes 20 ms more for each file."""

    def publish_dump(self, record: DumpRecord, blob: bytes) -> Path:
        time.sleep(0.02)
        return super().publish_dump(record, blob)


def run(calls: int = 300) -> list[Row]:
    """Four rows: stall p50 and p99, stall on a slow file system, and the cost of a hook that is off."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            ours, theirs, kept = _stalls(Path(folder) / "fast", calls, slow=False)
            slow_ours, slow_theirs, slow_kept = _stalls(Path(folder) / "slow", calls // 3, slow=True)
            off = _off(Path(folder) / "off")
    finally:
        torch.set_num_threads(threads)
    conditions = f"135 kB, {calls} calls, {kept} captured"
    return [
        _row("capture stall, p50 / synchronous pickle", median(ours), median(theirs), 0.15, conditions),
        _row("capture stall, p99 / synchronous pickle, p99", _p99(ours), _p99(theirs), 0.3, conditions),
        _row("capture stall, p50, 20 ms a file", median(slow_ours), median(slow_theirs), 0.01, f"{slow_kept} captured"),
        Row("hook that is off, per call", off, None, "us", off, "< 2 us", "median of differences", off < 2),
    ]


def _row(name: str, ours: float, theirs: float, budget: float, note: str) -> Row:
    ratio = ours / theirs
    return Row(name, ours * 1e6, theirs * 1e6, "us", ratio, f"<= {budget}", note, ratio <= budget)


def _stalls(root: Path, calls: int, slow: bool) -> tuple[list[float], list[float], int]:
    """Seconds of stall of each call, ours and the peer's, and how many of ours were captured."""
    store = (SlowStore if slow else Store)(root / "store").create()
    write_control(store, Control(True, "bench", now_timestamp(), free_floor_bytes=0))
    slot = Slot(store, None)
    actor, hooked = Actor(), wrap(Actor.forward, slot)
    arguments, pad = _arguments(), torch.randn(200, 200)
    ours, theirs = [], []
    for number in range(calls + 10):
        _work(pad)
        bare = _timed(lambda: actor(**arguments))
        _work(pad)
        ours.append(_timed(lambda: hooked(actor, **arguments)) - bare)
        _work(pad)
        theirs.append(_timed(lambda path=root / f"{number}.pkl": _pickle(path, arguments, slow)))
    slot.recorder.close(60)
    return ours[10:], theirs[10:], len(list(store.iter_dumps()))


def _pickle(path: Path, arguments: dict[str, Any], slow: bool) -> None:
    copies = {k: v.detach().clone().cpu() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with path.open("wb") as file:
        pickle.dump(copies, file)
        if slow:
            time.sleep(0.02)


def _off(root: Path, batches: int = 60, calls: int = 500) -> float:
    """Microseconds that a hook adds to a call while recording is off: the median over pairs of batches."""
    slot = Slot(Store(root), None)
    plain, hooked, arguments = Actor.forward, wrap(Actor.forward, slot), _arguments()
    actor = Actor()

    def batch(forward: Callable[..., Any]) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            forward(actor, **arguments)
        return (time.perf_counter() - start) / calls

    return median(batch(hooked) - batch(plain) for _ in range(batches)) * 1e6


def _arguments() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "sequences": torch.randint(0, 128_000, (4, 2048), generator=generator),
        "action_mask": torch.ones(4, 1024, dtype=torch.bool),
        "attention_mask": torch.ones(4, 2048, dtype=torch.int64),
        "return_output": True,
    }


def _work(pad: torch.Tensor) -> None:
    until = time.perf_counter() + 0.005
    while time.perf_counter() < until:
        pad @ pad


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]


if __name__ == "__main__":
    for row in run():
        print(row)
