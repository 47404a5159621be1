"""One call of the actor written down in the usual ways, on the thread that trains, against each other and against the hook.

The call is 135 kB: sequences [4, 2048] and attention_mask int64, action_mask [4, 1024] bool. A naive dumper takes
`detach().clone().cpu()` of each tensor and writes the dict at once; what it writes with is compared:

- `pickle.dump` (what wrote the old dumps), `torch.save`, and `safetensors.torch.save_file`;
- *ours*: a call through the installed hook, less the same call without it. The file is written by another thread later.

Ways alternate call by call, with about 5 ms of matrix products between, so that a busy machine disturbs all alike; medians.
Nobody calls fsync here but our writer thread. *bytes* are those of one file, *load* is a file from the page cache into tensors.
"""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import safetensors.torch
import torch

from actordbg.capture import hook
from actordbg.capture.control import Control
from actordbg.capture.switch_file import write_control
from actordbg.formats.dump_record import now_timestamp
from actordbg.store import payload
from actordbg.store.layout import Store
from benchmarks.rows import Row, one_thread, seconds_of

Tensors = dict[str, torch.Tensor]


class Actor(torch.nn.Module):
    """An Actor that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.packing_samples, self.temperature = torch.nn.Linear(1, 1), False, 1.0

    def forward(self, sequences: Any, action_mask: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Returns its input."""
        return sequences


class Recorded(Actor):
    """The same; the hook is installed on this class."""

    def forward(self, sequences: Any, action_mask: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Returns its input."""
        return sequences


def _pickle(tensors: Tensors, path: Path) -> None:
    with path.open("wb") as file:
        pickle.dump(tensors, file)


def _unpickle(path: Path) -> Tensors:
    with path.open("rb") as file:
        loaded: Tensors = pickle.load(file)
        return loaded


WRITERS: dict[str, Callable[[Tensors, Path], None]] = {
    "pickle.dump": _pickle,
    "torch.save": torch.save,
    "safetensors save_file": safetensors.torch.save_file,
}
READERS: dict[str, Callable[[Path], object]] = {
    "pickle.dump": _unpickle,
    "torch.save": lambda path: torch.load(path, weights_only=True),
    "safetensors save_file": lambda path: safetensors.torch.load_file(path),
}


def run(calls: int = 100) -> list[Row]:
    """Nine rows: time on the calling thread, bytes, and load, ours against each of the three ways."""
    with one_thread():
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            return _run(Path(folder), calls)


def _run(folder: Path, calls: int) -> list[Row]:
    store = Store(folder / "store").create()
    write_control(store, Control(True, "bench", now_timestamp(), free_floor_bytes=0))
    hook.install(Recorded, store=str(store.root))
    bare, recorded, tensors = Actor(), Recorded(), make_call()
    stalls, written = _write(bare, recorded, tensors, folder, calls)
    dump = _wait_for_dumps(store, calls)
    Recorded.forward = getattr(Recorded.forward, hook.MARK)  # type: ignore[method-assign]
    note = f"{calls} calls, {len(list(store.iter_dumps()))} captured"
    loads = _load({"ours": (payload.load, dump)} | {name: (READERS[name], path) for name, path in written.items()})
    sizes = {name: path.stat().st_size for name, path in (written | {"ours": dump}).items()}
    return [
        *(_row(f"on the calling thread: ours / {name}", stalls, name, 1e6, "us", note) for name in WRITERS),
        *(_row(f"bytes of a file: ours / {name}", sizes, name, 1e-3, "kB", "random ids, masks of ones") for name in WRITERS),
        *(_row(f"load: ours / {name}", loads, name, 1e6, "us", "page cache") for name in WRITERS),
    ]  # fmt: skip


def make_call() -> Tensors:
    """The tensors of the call."""
    generator = torch.Generator().manual_seed(0)
    return {
        "sequences": torch.randint(0, 128_000, (4, 2048), generator=generator),
        "attention_mask": torch.ones(4, 2048, dtype=torch.int64),
        "action_mask": torch.ones(4, 1024, dtype=torch.bool),
    }


def _write(bare: Actor, recorded: Actor, tensors: Tensors, folder: Path, calls: int) -> tuple[dict[str, float], dict[str, Path]]:
    """Median seconds on the calling thread by way, and the last file of each; the first calls warm up."""
    times: dict[str, list[float]] = {name: [] for name in ("ours", *WRITERS)}
    pad, paths = torch.randn(200, 200), {name: folder / name.replace(" ", "-") for name in WRITERS}
    for number in range(calls + 5):
        _work(pad)
        without = seconds_of(lambda: bare(**tensors))
        _work(pad)
        times["ours"].append(seconds_of(lambda: recorded(**tensors)) - without)
        for name, write in WRITERS.items():
            _work(pad)
            path = paths[name] = folder / f"{number}-{name.replace(' ', '-')}"
            times[name].append(seconds_of(lambda write=write, path=path: write(_copies(tensors), path)))
    return {name: median(values[5:]) for name, values in times.items()}, paths


def _copies(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone().cpu() for name, tensor in tensors.items()}


def _wait_for_dumps(store: Store, calls: int) -> Path:
    """A dump, once the writer thread is through; the calls before the first look at the switch are not recorded."""
    deadline = time.monotonic() + 60
    while len(list(store.iter_dumps())) < calls and time.monotonic() < deadline:
        time.sleep(0.1)
    return next(store.iter_dumps())


def _load(ways: dict[str, tuple[Callable[[Path], object], Path]], repeat: int = 200) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat):
        for name, (read, path) in ways.items():
            times[name].append(seconds_of(lambda read=read, path=path: read(path)))
    return {name: median(values) for name, values in times.items()}


def _row(name: str, values: dict[str, float], peer: str, scale: float, unit: str, note: str) -> Row:
    ours, theirs = values["ours"], values[peer]
    return Row(name, ours * scale, theirs * scale, unit, ratio=ours / theirs, note=note)


def _work(pad: torch.Tensor) -> None:
    until = time.perf_counter() + 0.005
    while time.perf_counter() < until:
        pad @ pad


if __name__ == "__main__":
    for row in run():
        print(row)
