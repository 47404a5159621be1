"""`run --hash-weights`: hashes of the weights at recorded calls, stored beside the dumps. Imported only on request.

At the first recorded call of each step of a model the training thread waits for a hash of each parameter, before the model runs:
a copy to the host and one to two seconds for each gigabyte that this rank holds. If the step is unknown, a change of any
parameter begins a new step. Buffers are not hashed. A failure is reported once; the training continues.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from actordbg.base.fault import describe
from actordbg.capture import facts, hook
from actordbg.capture.facts import Binder
from actordbg.capture.recorded_call import Item
from actordbg.capture.recorder import Recorder
from actordbg.formats.dump_record import dtype_name, now_timestamp
from actordbg.formats.store_files import StoreFiles, atomic_write
from actordbg.formats.weight_hashes import WEIGHTS, ParameterHash, WeightRecord, sha256_of

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "base_model.model.")
"""Prefixes that torch.compile, activation checkpointing and peft add to parameter names."""


def follow(root: str) -> None:
    """Hash the weights at calls that are recorded into this store, in this process and not in its forks."""
    slot = hook._slot(root)
    if not isinstance(getattr(slot.recorder.enter, "__self__", None), WeightRecorder):
        WeightRecorder(slot.recorder, StoreFiles(root))
        slot._follow()


class WeightRecorder:
    """Wraps a recorder's `enter`."""

    def __init__(self, recorder: Recorder, store: StoreFiles) -> None:
        self._recorder, self._store, self._enter = recorder, store, recorder.enter
        self._met: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        recorder.enter = self.enter  # type: ignore[method-assign, assignment]

    def enter(self, binder: Binder, actor: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *control: Any) -> Item | None:
        """Run the recorder's `enter`; then hash the weights, if the call is recorded and they are new."""
        before = self._wanted(actor)
        item = self._enter(binder, actor, args, kwargs, *control)
        try:
            capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
            if self._wanted(actor) != before and not capturing:
                self._look(actor)
                if item is not None:  # do not count the hashing as the call's time
                    item.began = time.monotonic_ns()
                    if item.timer is not None and item.device is not None:
                        item.timer = self._recorder._copier.timer(item.device)
        except Exception as error:  # noqa: BLE001  # weights may be of any kind; the training continues
            self._recorder.notices.warn("weights", f"weights are not hashed: {describe(error)}")
        return item

    def _wanted(self, actor: Any) -> tuple[Any, int]:
        """Return the ledger of an actor, and how many of its calls were not sampled out."""
        instance = self._recorder.known(actor)
        return (instance.ledger, instance.ledger.calls - sum(instance.ledger.sampled_out.values())) if instance else (None, 0)

    def _look(self, actor: Any) -> None:
        model = facts.unwrap(getattr(actor, "model", None))
        if not isinstance(model, torch.nn.Module):
            return
        ledger = self._wanted(actor)[0]
        number = facts.facts_of_call(actor)[0]
        step = None if number == facts.NO_STEP else number
        moment = (ledger, step if step is not None else [parameter._version for parameter in model.parameters()])
        if self._met.get(actor) == moment:
            return
        self._met[actor] = moment
        began = time.perf_counter()
        hashes = dict(hashes_of(model))
        nbytes = sum(
            (torch.Size(parameter.shape).numel() if parameter.part is None else parameter.part[1])
            * getattr(torch, parameter.dtype).itemsize
            for parameter in hashes.values()
            if parameter.sha256 is not None
        )
        who = ledger.identity
        record = WeightRecord(
            who.run, who.rank, who.host, who.pid, who.instance, ledger.calls - 1, step, now_timestamp(),
            round(time.perf_counter() - began, 3), nbytes, hashes,
        )  # fmt: skip
        atomic_write(self._store.root / WEIGHTS / who.run / record.name, record.to_json().encode())


def hashes_of(model: torch.nn.Module) -> Iterator[tuple[str, ParameterHash]]:
    """Yield each parameter's plain name, and the hash of the part that this rank holds."""
    for name, parameter in model.named_parameters():
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        whole = tuple(getattr(parameter, "ds_shape", parameter.shape))
        local, part, why_not = _local(name, parameter)
        dtype = dtype_name(parameter.dtype if local is None else local.dtype)
        yield name, ParameterHash(dtype, whole, part, None if local is None else sha256_of(local), why_not)


def _local(name: str, parameter: Any) -> tuple[torch.Tensor | None, tuple[int, int] | None, str]:
    """Return this rank's part of a parameter, its place in the flattened whole, and why the part is unknown ("" if known)."""
    if "_fsdp_wrapped_module." in name or "_flat_param" in name:
        return None, None, "a shard of FSDP1, which does not say where it starts"
    if parameter.is_meta:
        return None, None, "it has no values"
    if hasattr(parameter, "ds_tensor"):
        return _partition(parameter)
    if not hasattr(parameter, "placements"):
        return parameter, None, ""
    sharded = [(at, each) for at, each in enumerate(parameter.placements) if not each.is_replicate()]
    if not sharded:
        return parameter.to_local(), None, ""
    ((at, placement), *more) = sharded
    if more or type(placement).__name__ != "Shard" or placement.dim != 0:
        return None, None, f"sharded as {parameter.placements}"
    size, ranks, rank = parameter.shape[0], parameter.device_mesh.size(at), parameter.device_mesh.get_local_rank(at)
    row = parameter[0].numel() if size else 0
    first = min(-(-size // ranks) * rank, size)
    local = parameter.to_local()
    return local, (first * row, local.numel()), ""


def _partition(parameter: Any) -> tuple[torch.Tensor | None, tuple[int, int] | None, str]:
    """Return a partition of ZeRO-3: equal runs of the flattened parameter, the last padded."""
    held = parameter.ds_tensor
    if held.is_meta or str(getattr(getattr(held, "status", None), "name", "AVAILABLE")) != "AVAILABLE":
        return None, None, "its partition is on a disk"
    rank = torch.distributed.get_rank(getattr(parameter, "ds_process_group", None))
    first = min(rank * held.numel(), parameter.ds_numel)
    count = min(held.numel(), parameter.ds_numel - first)
    return held.reshape(-1)[:count], (first, count), ""
