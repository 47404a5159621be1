"""Write calls and tensors in memory into a store as dumps, at once and in this thread: for notebooks and tests.

A training job is recorded by `actordbg.capture` instead, which never waits for a disk.
"""

import math
import os
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from actordbg.api.dump_list import StoredDump, typed
from actordbg.api.tapping import Caller as Caller, Tap
from actordbg.base.errors import Unsupported
from actordbg.capture.facts import facts_of_actor, facts_of_call, plain_facts, rank_of_process, versions
from actordbg.catalog.query import get_dump
from actordbg.catalog.where import of_dumps
from actordbg.formats.dump_record import OUTPUT_PREFIX, DumpRecord
from actordbg.formats.encoding import of_torch, pack, record_of, serialize
from actordbg.formats.ringfile import host_name
from actordbg.store.layout import Store
from actordbg.store.payload import Dump as LoadedDump, as_torch, widen_plain
from actordbg.trainers.recorded_rows import named_rows
from actordbg.trainers.seam import Rows, Scores, Seam


def encoded(rows: Rows, scores: Scores, caller: Caller, run: str, number: int = 0) -> tuple[DumpRecord, bytes]:
    """Build a call's record and payload. Packed rows are separated. Raises Unsupported if masks do not fit the tokens."""
    given = named_rows(rows)
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    returns = "log_probs" if rows.action_mask is None else "action_log_probs"
    outputs = {returns: scores.log_probs, "entropy": scores.entropy}
    tensors |= {OUTPUT_PREFIX + name: values for name, values in outputs.items() if values is not None}
    plain = {name: of_torch(tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()}
    step, grad, *state = facts_of_call(caller)
    batch, length = given["sequences"].shape
    numbers = (number, time.time_ns(), time.monotonic_ns(), step, int(secrets.token_hex(4), 16), batch, length)
    fields: dict[str, Any] = {
        "run": run,
        "pid": os.getpid(),
        "host": host_name(),
        "role": "policy",
        "extra": {},
        **rank_of_process(),
        **plain_facts(grad, *state),
        "arguments": {name: value for name, value in given.items() if name not in tensors},
        **facts_of_actor(caller),
    }
    return serialize(record_of(fields, numbers, plain, versions()), plain)


def in_memory(rows: Rows, scores: Scores, caller: Caller) -> LoadedDump:
    """Return a call as a dump that lies in no store."""
    record, data = encoded(rows, scores, caller, "memory")
    return LoadedDump(record, {name: as_torch(plain) for name, plain in widen_plain(record, data).items()})


class CallRecording(Tap):
    """A `Tap` that writes each call as a dump of `run` into a store, with its log-probs. dump_ids: those of the dumps so far."""

    def __init__(self, target: Any, store: Store, run: str, on_dump: Callable[[str], object] = lambda dump_id: None) -> None:
        super().__init__(target, self._write)
        self.dump_ids: list[str] = []
        self._store, self._run, self._on_dump = store, run, on_dump

    @property
    def where(self) -> str:
        """The condition that selects just these dumps."""
        return of_dumps(self.dump_ids)

    def write(self, rows: Rows, scores: Scores, seam: Seam) -> None:
        """Write rows that are already here."""
        self._write(rows, scores, Caller(rows, seam, self.adapter))

    def _write(self, rows: Rows, scores: Scores, caller: Caller) -> None:
        record, data = encoded(rows, scores, caller, self._run, len(self.dump_ids))
        self._store.create().put_dump(record, pack(record, data), hint="make room, or open another store")
        self.dump_ids.append(record.dump_id)
        self._on_dump(record.dump_id)

    def dumps(self) -> list[StoredDump]:
        """Return the recorded dumps."""
        return [typed(self._store, get_dump(self._store, dump_id)) for dump_id in self.dump_ids]


_BATCH = "pass input_ids, whole numbers [B, S], and attention_mask [B, S]"


def required(rows: Rows, scores: Scores, vocabulary: int | None = None) -> Rows:
    """Return the rows. Raises Unsupported for rows or scores of a wrong type or shape, and for ids outside the vocabulary."""
    ids, mask = rows.sequences, rows.attention_mask
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.dtype is torch.bool:
        raise Unsupported("the token ids are not a tensor of whole numbers", hint=_BATCH)
    if not (isinstance(rows.temperature, int | float) and 0 < rows.temperature < math.inf):
        raise Unsupported(f"the temperature is {rows.temperature!r:.40}", hint="pass a number above 0")
    if scores.entropy is not None and scores.log_probs is None:
        raise Unsupported("entropies are judged together with log-probs", hint="pass log_probs too")
    if ids.is_nested or rows.packed:
        return rows
    if ids.dim() != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise Unsupported(f"token ids of shape {list(ids.shape)} do not give rows of at least 2 tokens", hint=_BATCH)
    real = ids if mask is None or mask.shape != ids.shape else ids[mask.bool()]
    low, high = (int(real.min()), int(real.max())) if real.numel() else (0, 0)
    if low < 0 or (vocabulary is not None and high >= vocabulary):
        raise Unsupported(
            f"the token ids go from {low} to {high}, the vocabulary has {vocabulary}", hint="pass ids of this model"
        )
    width = ids.shape[1] - 1 if rows.action_mask is None else rows.action_mask.shape[-1]
    for name, values in (("log_probs", scores.log_probs), ("entropy", scores.entropy)):
        if values is not None and (not isinstance(values, torch.Tensor) or [*values.shape] != [ids.shape[0], width]):
            shape = [*values.shape] if isinstance(values, torch.Tensor) else type(values).__name__
            raise Unsupported(
                f"{name} is {shape}, not a tensor {[ids.shape[0], width]}", hint="pass one value for each next token"
            )
    return rows


def batch_rows(model: Any, batch: Mapping[str, Any], temperature: float) -> Rows:
    """Read a batch of `model(**batch)` as rows; positions that count each row's real tokens are those of padded rows.

    Raises Unsupported for a batch that has no rows.
    """
    from actordbg.trainers.plain_adapter import Plain
    from actordbg.trainers.seam import NoPolicy, Unreadable

    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor):
        raise Unsupported("this batch has no input_ids, or they are not a tensor", hint=_BATCH)
    if isinstance(mask := batch.get("attention_mask"), torch.Tensor) and mask.shape != ids.shape:
        raise Unsupported(f"the attention mask is {list(mask.shape)}, the ids are {list(ids.shape)}", hint=_BATCH)
    positions = batch.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.shape[-1:] == ids.shape[-1:]:
        real = torch.ones_like(ids) if mask is None else mask
        usual = (real.cumsum(-1) - 1).clamp(min=0)
        if bool(((positions == usual) | (real == 0)).all()):
            batch = {name: value for name, value in batch.items() if name != "position_ids"}
    try:
        rows = Plain.seams[0].rows({**batch, "self": model})
    except (Unreadable, NoPolicy) as why:
        raise Unsupported(f"this batch has no rows to check: {why}", hint=_BATCH) from None
    if rows is None:
        raise Unsupported("this call continues from a cache", hint=_BATCH)
    rows.temperature = temperature
    return rows
