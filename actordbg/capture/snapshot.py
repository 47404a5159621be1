"""A private copy of a call's tensors, taken in the training thread without making it wait.

A copy has to be taken at once: training may change its tensors in place after the call. Inputs go into an extent of the ring
(`Copier.place`), outputs into newly allocated memory (`Copier.outputs`). The caller has reserved the bytes (`cost`).

- **CPU**: raw bytes, with the GIL held: 135 kB take a few microseconds, whereas a released GIL may come back only after the 5 ms
  of a switch interval. torch copies layouts whose raw span is far larger than their data.
- **CUDA**: a non-blocking copy into pinned host memory (which torch caches for the next copies) on a side stream. The side stream
  waits for the work that is already queued (so the copy sees the values of the call), and the current stream waits for the copy
  by an event *on the device* (so neither an in-place change nor reuse of the memory overtakes it). Only the writer thread waits
  for the event. No GPU memory is ever allocated: a strided tensor is copied by the span of storage that it covers.
- **Other devices**: a blocking copy, since their stream interfaces differ.

Nothing here draws random numbers, builds a graph, or changes the current device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actordbg.capture.ring import Arena
from actordbg.formats.dump_record import OUTPUT_PREFIX, storable
from actordbg.formats.ringfile import ALIGNMENT, aligned

LOGITS_SUM = "logits_sum"
"""Stands in for logits, which are far too large to copy: their sum is finite if and only if they are, unless it overflows."""
LOW = 2**40
"""A smaller `data_ptr` may be an offset into a storage that was freed, so `_address` checks the storage."""
_NOT_ARRIVED = 0xEE
"""Fills a sentinel until its copy arrives. No mask, token id or usual float consists of such bytes."""

memmove = ctypes.PyDLL(None).memmove  # PyDLL: keeps the GIL
memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
memmove.restype = ctypes.c_void_p
_memory_at = (ctypes.c_ubyte * LOW).from_address  # process memory by address; when cold, a slice is cheaper than a ctypes call


class CudaDevice:
    """The accelerator operations that capture needs: copies on one side stream per GPU. Tests use a fake of CPU tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate a uint8 host tensor that the device can copy into asynchronously."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def capturing(self) -> bool:
        """Check whether a CUDA graph is being captured, during which nothing may be queued."""
        return torch.cuda.is_current_stream_capturing()

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Callable[[], None]:
        """Queue copies (host, device) of the current values; return a function that waits until they are done."""
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
        """Record a timing event on the device's current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> Callable[[], float]:
        def seconds() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000

        return seconds


class Snapshot:
    """Copies of tensors on the host, by key: the name of an output, or an offset in the ring. Those from a device need `wait`.

    `strides`: the original's strides by key, if the copy is compact and the original was not.
    """

    def __init__(self) -> None:
        self.strides: dict[Any, tuple[int, ...]] = {}
        self._copies: dict[Any, tuple[bytes | Tensor, torch.dtype, torch.Size, tuple[int, ...]]] = {}
        """By key: the copied memory (bytes, or a tensor of the dtype), dtype, shape and strides."""
        self._sentinels: list[Tensor] = []
        """The memory of the element that each `queue` copies last: no longer `_NOT_ARRIVED` once all its copies have arrived."""
        self._waits: list[Callable[[], None]] = []

    def tensors(self) -> dict[Any, Tensor]:
        """Return the copies as tensors with the strides of the copies."""
        made = {}
        for name, (data, dtype, shape, strides) in self._copies.items():
            flat = data if isinstance(data, Tensor) else torch.frombuffer(bytearray(data), dtype=dtype)
            made[name] = flat.as_strided(shape, strides)
        return made

    def wait(self) -> None:
        """Wait until all copies are complete. RuntimeError if the device was lost before they were."""
        try:
            for wait in self._waits:
                wait()
        except RuntimeError:
            if not self._sentinels or any(sentinel.eq(_NOT_ARRIVED).all() for sentinel in self._sentinels):
                raise
        self._waits.clear()

    def land(self, arena: Arena) -> None:
        """Wait for the copies, and move each into the ring. Only for a snapshot of `Copier.place`, whose keys are offsets."""
        self.wait()
        for offset, source in self.tensors().items():
            _place_in(arena, offset, source).copy_(source)

    def add(self, name: Hashable, tensor: Tensor) -> None:
        """Copy a tensor that is not on a CUDA device: the raw bytes that it spans, or compactly if they are mostly gaps."""
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

    def queue(self, device: CudaDevice, tensors: Mapping[Any, Tensor]) -> None:
        """Queue copies of device tensors, then of one element once more: when that has arrived, so have all copies before it."""
        buffer, offset, pairs = device.pinned(ALIGNMENT + sum(aligned(span_bytes(t)) for t in tensors.values())), 0, []
        for name, tensor in tensors.items():
            size = span_bytes(tensor)
            host = buffer[offset : offset + size].view(tensor.dtype)
            pairs.append((host, span(tensor)))
            self._copies[name] = (host, tensor.dtype, tensor.shape, tensor.stride())
            offset += aligned(size)
        for _, source in [pair for pair in pairs if pair[1].numel()][:1]:
            sentinel = buffer[offset : offset + source.element_size()].fill_(_NOT_ARRIVED)
            self._sentinels.append(sentinel)
            pairs.append((sentinel.view(source.dtype), source[:1]))
        self._waits.append(device.copy(pairs))


class Copier:
    """Copies tensors. One per process; not used across a fork."""

    def __init__(self, make_device: Callable[[torch.device], CudaDevice] = CudaDevice) -> None:
        self._make_device = make_device
        self._devices: dict[torch.device, CudaDevice] = {}

    def outputs(self, tensors: Mapping[str, Tensor]) -> Snapshot:
        """Copy the current values of tensors, by name, into newly allocated memory."""
        taken = Snapshot()
        for name, tensor in tensors.items():
            if not tensor.is_cuda:
                taken.add(name, tensor)
        return self._from_devices(taken, tensors.items())

    def place(self, tensors: Sequence[Tensor], arena: Arena, first: int, offsets: Sequence[int]) -> Snapshot:
        """Copy the current values of tensors into an arena, at `first` plus `offsets`; device tensors follow in `land`."""
        places = [(first + offset, tensor) for tensor, offset in zip(tensors, offsets, strict=True) if tensor.numel()]
        for place, tensor in places:
            if tensor.is_cuda:
                continue
            address = _address(tensor)
            if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
                memmove(arena.address + place, address, tensor.nbytes)
            else:
                _place_in(arena, place, tensor).copy_(tensor.detach())
        return self._from_devices(Snapshot(), places)

    def may_copy(self, tensors: Iterable[Tensor]) -> bool:
        """Check whether copies can be queued now: False during a CUDA graph capture."""
        return not any(t.is_cuda and self._device(t.device).capturing() for t in tensors)

    def timer(self, where: torch.device) -> Callable[[], Callable[[], float]]:
        """Start timing a call on a device; return a function to call when the call has returned.

        That function in turn returns a function, which waits for the device and returns the seconds.
        """
        device = self._device(where)
        start = device.event()
        return lambda: device.seconds_between(start, device.event())

    def _from_devices(self, taken: Snapshot, tensors: Iterable[tuple[Any, Tensor]]) -> Snapshot:
        by_device: dict[torch.device, dict[Any, Tensor]] = {}
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


def named_outputs(output: Any, returns: str | tuple[str, ...], logits: bool = False) -> dict[str, Tensor]:
    """Return the small tensors of `forward`'s result, named `output.<name>`.

    A trainer returns log-probs, `(log-probs, model output)` or the model output, which may carry `entropy`, and in some trainers
    the log-probs. `returns`: the name of the log-probs, or of all results. With `logits`, a result without log-probs gets the
    sum of its logits (a float32 scalar) instead: that reads the logits once on their device, and waits for nothing.
    """
    outputs: dict[str, Any] = {}
    several = isinstance(output, (tuple, list)) and not hasattr(output, "logits")
    parts = list(output) if several else [output]
    if isinstance(returns, tuple):
        outputs, parts, returns = dict(zip(returns, parts, strict=False)), [], returns[0]
    elif parts and isinstance(parts[0], Tensor):
        outputs[returns] = parts.pop(0)
    for part in parts:
        outputs = {name: getattr(part, name, None) for name in (returns, "entropy")} | outputs
    if logits and outputs.get(returns) is None:
        values = next((part.logits for part in parts if hasattr(part, "logits")), None)
        if type(values) is Tensor and values.is_floating_point():
            with torch.no_grad():
                outputs[LOGITS_SUM] = values.detach().sum(dtype=torch.float32)
    tensors = {OUTPUT_PREFIX + name: value for name, value in outputs.items() if type(value) is Tensor}
    return {name: value for name, value in tensors.items() if storable(value.layout, value.dtype) and not value.is_meta}


def cost(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that copies of these tensors take in host memory."""
    return sum(span_bytes(t) if t.is_cuda else t.nbytes for t in tensors)


def span_bytes(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first to its last element in storage."""
    if tensor.is_contiguous():
        return tensor.nbytes
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return extent * tensor.element_size()


def span(tensor: Tensor) -> Tensor:
    """Return the contiguous stretch of storage that holds a tensor, as a 1-D view (no copy, whatever its strides)."""
    if tensor.numel():
        _address(tensor)
    base: Any = tensor.detach()
    return base.as_strided((span_bytes(tensor) // tensor.element_size(),), (1,))  # type: ignore[no-any-return]


def _place_in(arena: Arena, offset: int, like: Tensor) -> Tensor:
    return arena.tensor[offset : offset + like.nbytes].view(like.dtype).view(like.shape)


def _address(tensor: Tensor) -> int:
    """Return a tensor's address. ValueError if it has no memory (freed by ZeRO or FSDP, or torch.func): a copy would crash."""
    address = tensor.data_ptr()
    if address < LOW and not (tensor.untyped_storage().nbytes() and tensor.untyped_storage().data_ptr()):
        raise ValueError(f"the memory of a tensor of shape {tuple(tensor.shape)} was freed")
    return address
