"""Create synthetic actor inputs in the format of captured inputs: random ids, chosen shapes.

Each rank gets `count` calls of `sequences` [B, S] (int64), `attention_mask` [B, S] (int64) and `action_mask` [B, A]
(bool), as a trainer's experience maker passes them: the actions are the last A = S / 2 positions, a prompt is padded on the
left, a response that ended early on the right. Every row keeps at least one prompt token and one action. The same seed gives
the same tensors as torch's generator; ids and timestamps are new, so creating twice adds twice.

Example::

    create_dumps(store, count=4, batch_size=2, seq_len=512, ranks=2, seed=7)      # 8 dumps
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from actordbg.base.errors import UsageError
from actordbg.formats.dump_record import DumpRecord, contiguous_strides, is_plain_name, make_dump_id, now_timestamp
from actordbg.formats.encoding import Array, PlainTensor
from actordbg.store.layout import Store
from actordbg.store.payload import encode_plain

LLAMA_VOCABULARY = 128_256
PAD_ID = 0
_FLAGS = ("return_output", "allgather_logits", "return_logprobs", "return_entropy")


def create_dumps(
    store: Store,
    count: int,
    batch_size: int = 2,
    seq_len: int = 512,
    ranks: int = 1,
    vocab_size: int = LLAMA_VOCABULARY,
    seed: int = 0,
    run: str = "created",
    action_len: int | None = None,
    on_progress: Callable[[], object] = lambda: None,
) -> list[Path]:
    """Write `count` dumps for each of `ranks` ranks and return their paths. action_len: A, if not S / 2. `on_progress` is called
    for each.

    Raises UsageError for numbers that make no sense and StoreProblem when the store cannot be written.
    """
    if batch_size < 1 or seq_len < 2 or vocab_size < 2:
        raise UsageError(
            f"cannot make {batch_size} x {seq_len} ids below {vocab_size}",
            hint="use a batch size of at least 1, and a sequence length and vocabulary of at least 2",
        )
    if count < 1 or ranks < 1 or not is_plain_name(run):
        raise UsageError(f"cannot create {count} dumps for {ranks} ranks of run {run!r:.80}", hint="see --help")
    store.create()
    generator, actions = Draws(seed), action_len or seq_len // 2
    paths = []
    for call in range(count):
        for rank in range(ranks):
            tensors = make_inputs(batch_size, seq_len, actions, vocab_size, generator)
            facts = {"host": socket.gethostname(), "origin": {"seed": seed, "vocab_size": vocab_size}}
            made = dump_of_inputs(tensors, run, rank=rank, world_size=ranks, call_index=call, **facts)
            paths.append(store.put_dump(*encode_plain(*made), hint="make room, or name another store"))
            on_progress()
    return paths


def dump_of_inputs(
    tensors: Mapping[str, Array], run: str, *, rank: int = 0, world_size: int = 1, call_index: int = 0, **facts: Any
) -> tuple[DumpRecord, dict[str, PlainTensor]]:
    """Return a new dump of these inputs: `sequences` and `attention_mask` [B, S], `action_mask` [B, A]. facts: of its record."""
    timestamp, (batch, length) = now_timestamp(), tensors["sequences"].shape
    record = DumpRecord(
        dump_id=make_dump_id(timestamp, call_index, 0, os.urandom(4).hex()), run=run, rank=rank, timestamp=timestamp,
        batch_size=batch, seq_len=length, tokens=int(tensors["attention_mask"].sum()), source="create", world_size=world_size,
        call_index=call_index, action_len=tensors["action_mask"].shape[1],
        arguments=dict.fromkeys(_FLAGS, False) | {"packed_seq_lens": None}, **facts,
    )  # fmt: skip
    plain = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    return record, {name: PlainTensor(v.dtype.name, v, contiguous_strides(v.shape)) for name, v in plain.items()}


class Draws:
    """Draws integers as `torch.randint` does on a CPU from a generator with this seed: MT19937, and a remainder."""

    def __init__(self, seed: int) -> None:
        self._twister = np.random.RandomState(seed & 0xFFFFFFFF)

    def between(self, low: int, high: int, shape: tuple[int, ...]) -> Array:
        """Draw int64 values from `low` to below `high`."""
        drawn = self._twister.randint(0, 2**32, size=shape, dtype=np.uint32)
        return drawn.astype(np.int64) % (high - low) + low


def make_inputs(batch: int, length: int, actions: int, vocab_size: int, generator: Draws) -> dict[str, Array]:
    """Make the random inputs of a call: `sequences` and `attention_mask` int64 [B, S], `action_mask` bool [B, A]."""
    left, right = (  # how many positions each row is padded on a side, [B, 1]
        generator.between(0, most, (batch, 1)) if most > 1 else np.zeros((batch, 1), np.int64)
        for most in (length - actions, actions)
    )
    position = np.arange(length)
    shown = (position >= left) & (position < length - right)
    ids = generator.between(1, vocab_size, (batch, length))
    return {
        "sequences": np.where(shown, ids, PAD_ID),
        "attention_mask": shown.astype(np.int64),
        "action_mask": np.ascontiguousarray(shown[:, -actions:]),
    }
