"""A private copy of a call's tensors, taken in the training thread without making it wait.

A copy has to be taken at once: training may change its tensors in place after the call. Inputs go into an extent of the ring
(`Copier.place`), what a call returned into memory of its own (`Copier.outputs`). Whoever asks has reserved the bytes (`cost`).

- **CPU**: bytes as they lie in memory, with the GIL held: for 135 kB that is a few microseconds, and a GIL that is let go may
  come back only after the 5 ms of a switch interval. Layouts of which that would copy far too much are copied by torch.
- **CUDA**: a non-blocking copy into pinned host memory (which torch keeps for the next copies) on a side stream. The side stream
  waits for the work that is already queued (so the copy sees the values of the call), and the current stream waits for the copy
  by an event *on the device* (so neither an in-place change nor reuse of the memory overtakes it). Only the writer thread waits
  for the event. No GPU memory is allocated, ever: a strided tensor is copied by the span of storage that it covers.
- **Other devices**: a blocking copy, since their stream interfaces differ.

Nothing here draws random numbers, builds a graph, or leaves a device current.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from actordbg.capture.ring import Arena
from actordbg.formats.dump_record import OUTPUT_PREFIX, storable
from actordbg.formats.ringfile import ALIGNMENT, aligned

LOGITS_SUM = "logits_sum"
"""Stands in for logits, which are far too large to be copied: their sum is finite exactly if they are (or overflows)."""
LOW = 2**40
"""An address below this may be the offset into a storage that was freed; it is looked at more closely."""
_CANARY = 0xEE
"""No byte of a mask, nor the first one of a token id."""

memmove = ctypes.PyDLL(None).memmove  # PyDLL: keeps the GIL
memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove.restype = ctypes.c_void_p
_memory_at = (ctypes.c_ubyte * LOW).from_address  # a slice costs less, cold, than a call by ctypes


class CudaDevice:
    """The few things asked of an accelerator: copies on one side stream per GPU. Tests have one made of CPU tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, nbytes: int) -> torch.Tensor:
        """A new uint8 host tensor that the device can copy into asynchronously."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def capturing(self) -> bool:
        """Whether a graph capture is under way, during which nothing may be queued from here."""
        return torch.cuda.is_current_stream_capturing()

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """Queue copies (host, device) that see the present values; return a function that waits until they are done."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            for host, source in pairs:
                host.copy_(source, non_blocking=True)
            event.record(self._stream)
        current.wait_event(event)
        return event.synchronize

    def event(self) -> torch.cuda.Event:
        """Mark this moment of the device's work."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> Callable[[], float]:
        def seconds() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000

        return seconds


class Snapshot:
    """Copies of tensors on the host, by name or by whatever the copier was given. Those from a device are there after `wait`.

    `strides`: those of the original, by name, where the copy is compact and the original was not.
    """

    def __init__(self) -> None:
        self.strides: dict[Any, tuple[int, ...]] = {}
        self._copies: dict[Any, tuple[bytes | torch.Tensor, torch.dtype, torch.Size, tuple[int, ...]]] = {}
        """The memory that each spans (a tensor: of its dtype), its dtype, shape and strides."""
        self._marks: list[torch.Tensor] = []
        self._waits: list[Callable[[], None]] = []

    def tensors(self) -> dict[Any, torch.Tensor]:
        """The copies, as tensors with the strides that they were copied with."""
        made = {}
        for name, (data, dtype, shape, strides) in self._copies.items():
            flat = data if isinstance(data, torch.Tensor) else torch.frombuffer(bytearray(data), dtype=dtype)
            made[name] = flat.as_strided(shape, strides)
        return made

    def wait(self) -> None:
        """Return when all copies are complete. RuntimeError if the device is lost, unless they were complete before."""
        try:
            for wait in self._waits:
                wait()
        except RuntimeError:
            if not self._marks or any(mark.eq(_CANARY).all() for mark in self._marks):
                raise
        self._waits.clear()

    def land(self, arena: Arena) -> None:
        """Wait for the copies, and bring them to the places in the ring that they are named by."""
        self.wait()
        for offset, source in self.tensors().items():
            _room(arena, offset, source).copy_(source)

    def add(self, name: Hashable, tensor: torch.Tensor) -> None:
        """Copy a tensor that is not on a CUDA device."""
        size, shape, strides = span_bytes(tensor), tensor.shape, tensor.stride()
        if tensor.is_cpu and 0 < size <= 2 * tensor.nbytes and not tensor.is_neg():
            data: Any = memoryview(_memory_at(_address(tensor)))[:size].tobytes()
        else:
            copy = torch.empty(shape, dtype=tensor.dtype, device="cpu")
            if size:
                _address(tensor)
                copy.copy_(tensor.detach())
            self.strides[name], data, strides = strides, copy, copy.stride()
        self._copies[name] = (data, tensor.dtype, shape, strides)

    def queue(self, device: CudaDevice, tensors: Mapping[Any, torch.Tensor]) -> None:
        """Have a device copy tensors, and behind them an element once more: it is there when all copies before it are."""
        buffer, offset, pairs = device.pinned(ALIGNMENT + sum(aligned(span_bytes(t)) for t in tensors.values())), 0, []
        for name, tensor in tensors.items():
            size = span_bytes(tensor)
            host = buffer[offset : offset + size].view(tensor.dtype)
            pairs.append((host, span(tensor)))
            self._copies[name] = (host, tensor.dtype, tensor.shape, tensor.stride())
            offset += aligned(size)
        for _, source in [pair for pair in pairs if pair[1].numel()][:1]:
            mark = buffer[offset : offset + source.element_size()].fill_(_CANARY)
            self._marks.append(mark)
            pairs.append((mark.view(source.dtype), source[:1]))
        self._waits.append(device.copy(pairs))


class Copier:
    """Takes copies. One per process; not used across a fork."""

    def __init__(self, make_device: Callable[[torch.device], CudaDevice] = CudaDevice) -> None:
        self._make_device = make_device
        self._devices: dict[torch.device, CudaDevice] = {}

    def outputs(self, tensors: Mapping[str, torch.Tensor]) -> Snapshot:
        """Copy tensors as they are now."""
        taken = Snapshot()
        for name, tensor in tensors.items():
            if not tensor.is_cuda:
                taken.add(name, tensor)
        return self._from_devices(taken, tensors.items())

    def place(self, tensors: Sequence[torch.Tensor], arena: Arena, first: int, offsets: Sequence[int]) -> Snapshot:
        """Copy tensors as they are now into an arena, to these offsets behind `first`; those of a device come later (`land`)."""
        places = [(first + offset, tensor) for tensor, offset in zip(tensors, offsets, strict=True) if tensor.numel()]
        for place, tensor in places:
            if tensor.is_cuda:
                continue
            address = _address(tensor)
            if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
                memmove(arena.address + place, address, tensor.nbytes)
            else:
                _room(arena, place, tensor).copy_(tensor.detach())
        return self._from_devices(Snapshot(), places)

    def may_copy(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether copies can be queued now: False during a CUDA graph capture."""
        return not any(t.is_cuda and self._device(t.device).capturing() for t in tensors)

    def timer(self, where: torch.device) -> Callable[[], Callable[[], float]]:
        """A device's timer from now on. Called when the call returns, it gives what says the seconds once the device is done."""
        device = self._device(where)
        start = device.event()
        return lambda: device.seconds_between(start, device.event())

    def _from_devices(self, taken: Snapshot, tensors: Iterable[tuple[Any, torch.Tensor]]) -> Snapshot:
        by_device: dict[torch.device, dict[Any, torch.Tensor]] = {}
        for name, tensor in tensors:
            if tensor.is_cuda:
                by_device.setdefault(tensor.device, {})[name] = tensor
        for where, group in by_device.items():
            taken.queue(self._device(where), group)
        return taken

    def _device(self, where: torch.device) -> CudaDevice:
        if where not in self._devices:
            self._devices[where] = self._make_device(where)
        return self._devices[where]


def named_outputs(output: Any, returns: str, logits: bool = False) -> dict[str, torch.Tensor]:
    """The small tensors of what `forward` returned, named `output.<name>`.

    A trainer returns log-probs, `(log-probs, model output)` or the model output, which may carry `entropy`, and in some trainers
    the log-probs. `returns`: what these are called. With `logits`, where there are no log-probs, the sum of the logits (a scalar,
    float32) stands for them: that reads them once on their device, and waits for nothing.
    """
    found: dict[str, Any] = {}
    several = isinstance(output, (tuple, list)) and not hasattr(output, "logits")
    parts = list(output) if several else [output]
    if parts and isinstance(parts[0], torch.Tensor):
        found[returns] = parts.pop(0)
    for part in parts:
        found = {name: getattr(part, name, None) for name in (returns, "entropy")} | found
    if logits and found.get(returns) is None:
        values = next((part.logits for part in parts if hasattr(part, "logits")), None)
        if type(values) is torch.Tensor and values.is_floating_point():
            with torch.no_grad():
                found[LOGITS_SUM] = values.detach().sum(dtype=torch.float32)
    return {
        OUTPUT_PREFIX + name: value
        for name, value in found.items()
        if type(value) is torch.Tensor and storable(value) and not value.is_meta
    }


def cost(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that copies of these tensors take in host memory."""
    return sum(span_bytes(t) if t.is_cuda else t.nbytes for t in tensors)


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first to its last element in storage."""
    if tensor.numel() == 0:
        return 0
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return extent * tensor.element_size()


def span(tensor: torch.Tensor) -> torch.Tensor:
    """The contiguous stretch of storage that holds a tensor, as a 1-D view (no copy, whatever its strides)."""
    if tensor.numel():
        _address(tensor)
    base: Any = tensor.detach()
    return base.as_strided((span_bytes(tensor) // tensor.element_size(),), (1,))  # type: ignore[no-any-return]


def _room(arena: Arena, offset: int, like: torch.Tensor) -> torch.Tensor:
    return arena.tensor[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def _address(tensor: torch.Tensor) -> int:
    """Where a tensor's memory is. ValueError if it was freed (ZeRO, FSDP), or is nowhere (torch.func): copying would crash."""
    address = tensor.data_ptr()
    if address < LOW and not (tensor.untyped_storage().nbytes() and tensor.untyped_storage().data_ptr()):
        raise ValueError(f"the memory of a tensor of shape {tuple(tensor.shape)} was freed")
    return address
