"""The outcome of an input, and the clock and the memory high-water mark that measure it.

* CUDA runs asynchronously: without a synchronization before the clock is read, a forward takes microseconds.
* "Peak memory" is a high-water mark. torch resets CUDA's on request. A process's resident mark on Linux is reset by
  writing 5 to /proc/self/clear_refs; where that is not allowed it is the highest since the process began.

**Gradients worth keeping** are a fixed sample of each parameter's full gradient, and the norm of all of it.

To say on *which* parameter two configurations disagree, a comparison needs gradients of single parameters. Kept whole they would
be as large as the model, for every input. So of a parameter with more than `GRADIENT_SAMPLE` elements every n-th is kept,
at places that depend on its size alone: the same places in every backend, so the samples compare element by element.

Backends hand over one full gradient at a time (`GradientKeeper.take`): at most one parameter's full gradient is in memory
beside what the backend itself holds.

    store/replays/<id>/tensors/<dump>.safetensors
        grad/<name>                   float32, [min(numel, GRADIENT_SAMPLE)]
        metadata "gradients"          {"<name>": {"numel": 262144, "norm": 0.0171}}

Example:
    >>> keeper = GradientKeeper()
    >>> keeper.take("module.lm_head.weight", torch.ones(2, 3))
    >>> keeper.facts
    {'lm_head.weight': {'numel': 6, 'norm': 2.449489742783178}}
"""

import contextlib
import ctypes
import gc
import logging
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actordbg.actor.randomness import Randomness
from actordbg.records.locate_record import FormulaCheck

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass
class ForwardOutcome:
    """The outcome of an input. Tensors are on the CPU and hold no graph.

    log_probs: float32, [B, A] as the call masks them where there is an action mask, else [B, S-1] (next tokens).
    mask: bool, the same shape: the tokens that summaries and the loss are over. entropy: float32, the same shape, where the
    recorded call requested it. Times in seconds, device work included; `backward_s` includes clearing the gradients.
    `peak_memory_bytes`: CUDA memory allocated, or resident memory of the process on a CPU, at its highest in this input.
    `graphs`, `graph_breaks`: what torch.compile did in this input, None where nothing is compiled.
    `randomness`: where its random numbers came from, None if the dump has no RNG state.
    `folded`: token ids were outside the vocabulary and were folded into it. `notes`: where the call differs from the record.
    `tensors`: with `keep`, what is worth storing, by name. `gradients`: with `keep_gradients`, each parameter's `numel`, `norm`.
    `gradient_over`: the dumps in the gradients' average, one for each lane; () if they are all the same.
    `formulas`: in a truth's first input, its modules against the formulas of their papers. `overlap`: by layer, the share of the
    recorded experts that the router chooses too; [] without any.
    """

    log_probs: Tensor
    mask: Tensor
    forward_s: float
    backward_s: float | None = None
    entropy: Tensor | None = None
    loss: float | None = None
    grad_norm: float | None = None
    peak_memory_bytes: int | None = None
    graphs: int | None = None
    graph_breaks: int | None = None
    randomness: Randomness | None = None
    folded: bool = False
    packing: bool = False
    temperature: float = 1.0
    training: bool = False
    notes: tuple[str, ...] = ()
    tensors: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, dict[str, Any]] = field(default_factory=dict)
    gradient_over: tuple[str, ...] = ()
    formulas: FormulaCheck | None = None
    overlap: list[float] = field(default_factory=list)

    def apply(self, layout: Callable[[Tensor], Tensor]) -> None:
        """Bring every tensor of the mask's shape into another layout (see `actordbg.actor.changes`)."""
        self.log_probs, self.mask = layout(self.log_probs), layout(self.mask)
        self.entropy = None if self.entropy is None else layout(self.entropy)
        if "log_probs" in self.tensors:
            self.keep()

    def keep(self) -> None:
        """Put log-probs, mask and entropy among the `tensors`."""
        self.tensors |= {"log_probs": self.log_probs, "mask": self.mask}
        self.tensors |= {} if self.entropy is None else {"entropy": self.entropy}


def now(device: torch.device) -> float:
    """Wait for all work queued on `device`, then return seconds on a steady clock."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def release(device: torch.device) -> None:
    """Free unused memory, so that the next peak is not an earlier configuration's."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim()


def trim() -> None:
    """Return freed host memory to the system: glibc keeps it, and the process stays as large."""
    _of_glibc("malloc_trim", 0)


@contextlib.contextmanager
def keeping_memory() -> Iterator[None]:
    """Reuse freed memory inside the block instead of returning it to the kernel, which clears every page that it gives: a third
    of the time of a forward on a CPU. Afterwards all of it is returned. Peaks that are measured inside may be higher.
    """
    for option, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1)):
        _of_glibc("mallopt", option, value)
    try:
        yield
    finally:
        for option, value in ((_MMAP_MAX, 65_536), (_TRIM_THRESHOLD, 2**26)):
            _of_glibc("mallopt", option, value)
        trim()


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Options of glibc's mallopt: by default 65,536 blocks may be mapped, and the threshold grows up to 64 MiB."""


def _of_glibc(name: str, *values: int) -> None:
    """Call a function of glibc's allocator; nothing where there is another C library."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), name)(*values)


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
    """Return the high-water mark in bytes since `reset_peak`: CUDA memory allocated, or this process's resident memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(line.split()[1]) * 1024


MOST_ENTRIES = 100_000
"""Allocations and frees that torch remembers; the oldest are forgotten."""


class MemoryHistory:
    """Records torch's CUDA allocations until `stop`. folder: the replay's."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        torch.cuda.memory._record_memory_history(max_entries=MOST_ENTRIES)

    def keep(self, failed: str = "") -> None:
        """Write the history so far, whole or not at all. failed: the dump that just failed."""
        name = f"memory-rank{self._rank}-{failed}.pickle" if failed else f"memory-rank{self._rank}.pickle"
        part = self._folder / f".{name}.part"
        try:
            torch.cuda.memory._dump_snapshot(os.fspath(part))  # type: ignore[no-untyped-call]
            part.chmod(0o600)
            part.replace(self._folder / name)
        except (OSError, RuntimeError) as error:  # the input's result counts, and its log says what is missing
            logging.getLogger(__name__).warning("the history of allocations could not be kept: %s", error)

    def stop(self) -> None:
        """Stop recording."""
        torch.cuda.memory._record_memory_history(enabled=None)


GRADIENT_SAMPLE = 65_536
"""Elements that are kept of one parameter's gradient."""
PREFIX = "grad/"
_PIECE = 2**24
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@dataclass
class GradientKeeper:
    """Collects one input's gradients. `records` False: takes part (collectives need every rank) and keeps nothing.

    tensors: by `grad/<name>`, float32, 1-D, on the CPU. facts: by name, `numel` of the whole gradient and its L2 `norm`.
    """

    records: bool = True
    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def take(self, name: str, gradient: Tensor) -> None:
        """Keep a parameter's full gradient, of any shape, dtype and device."""
        if self.records:
            plain = plain_name(name)
            self.tensors[PREFIX + plain] = sample(gradient).to("cpu", torch.float32, copy=True)
            self.facts[plain] = {"numel": gradient.numel(), "norm": norm_of(gradient)}


def sample(gradient: Tensor) -> Tensor:
    """Return the kept elements in order: all up to GRADIENT_SAMPLE, else those at floor(i * numel / GRADIENT_SAMPLE)."""
    flat = gradient.detach().reshape(-1)
    if flat.numel() <= GRADIENT_SAMPLE:
        return flat
    places = torch.arange(GRADIENT_SAMPLE, device=flat.device) * flat.numel() // GRADIENT_SAMPLE
    return flat[places]


def norm_of(gradient: Tensor) -> float:
    """Return the L2 norm over all elements, in float64, a piece at a time: torch would convert the whole tensor at once."""
    pieces = gradient.detach().reshape(-1).split(_PIECE)  # type: ignore[no-untyped-call]
    norms = [float(torch.linalg.vector_norm(piece, dtype=torch.float64)) for piece in pieces]
    return math.sqrt(sum(norm**2 for norm in norms))


def plain_name(name: str) -> str:
    """Return a parameter's name in the transformers model, without the parts that engines and compilers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
