"""A decoded old pickle as what the store keeps: tensors and a record. The only part of `legacy` that needs torch.

The record says nothing that the pickle does not say. Unknown there, and so None or empty here: role, training and grad
mode, model, host and pid. `world_size` is the smallest that the ranks seen allow. `origin` keeps the pickle's file
name, the dump's id the beginning of its SHA-256. An import has time, so it compresses harder (`LEVEL`) than a training
process does; reading costs the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from actordbg.base.errors import CorruptDump
from actordbg.formats.dump_record import DumpRecord
from actordbg.legacy.decode import LegacyDump, LegacyTensor
from actordbg.legacy.pickle_machine import CORRUPT_HINT
from actordbg.store import payload

LEVEL = 12
"""zstd level of imported dumps: 2.4% smaller than level 3 for 1 ms more each; level 19 gives 1.5% more for 3 ms more."""


def to_tensors(data: bytes, dump: LegacyDump) -> dict[str, torch.Tensor]:
    """The tensors of a decoded pickle (CPU; dtype, shape and strides as pickled), copied out of the file's bytes."""
    return {name: _tensor(name, data, tensor) for name, tensor in dump.tensors.items()}


def to_record(dump: LegacyDump, dump_id: str, run: str, world_size: int, origin: dict[str, str]) -> DumpRecord:
    """The record of a decoded pickle, its payload not yet described."""
    action = dump.tensors.get("action_mask")
    return DumpRecord(
        dump_id=dump_id,
        run=run,
        rank=dump.rank,
        timestamp=dump.timestamp,
        batch_size=dump.batch_size,
        seq_len=dump.seq_len,
        tokens=dump.batch_size * dump.seq_len,
        source="import",
        world_size=world_size,
        action_len=action.shape[1] if action is not None else None,
        arguments=dict(dump.arguments),
        origin=dict(origin),
    )


def to_file(record: DumpRecord, tensors: dict[str, torch.Tensor]) -> tuple[DumpRecord, bytes]:
    """The finished record and the bytes of its dump file; `tokens` becomes the positions that the attention mask shows."""
    mask = tensors.get("attention_mask")
    if mask is not None:
        record = replace(record, tokens=int(torch.count_nonzero(mask)))
    return payload.encode(record, tensors, level=LEVEL)


def _tensor(name: str, data: bytes, tensor: LegacyTensor) -> torch.Tensor:
    dtype = getattr(torch, tensor.dtype)
    if tensor.span == 0:
        return torch.empty_strided(tensor.shape, tensor.strides, dtype=dtype)
    raw = bytearray(data[tensor.start : tensor.start + tensor.span * tensor.itemsize])
    if dtype is torch.bool and max(raw) > 1:
        raise CorruptDump(f"{name} is boolean and holds something other than 0 and 1", hint=CORRUPT_HINT)
    return torch.frombuffer(raw, dtype=dtype).as_strided(tensor.shape, tensor.strides)
