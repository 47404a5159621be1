"""Create synthetic actor inputs in the format of captured inputs: random ids, chosen shapes.

Each rank gets `count` calls of `sequences` [B, S] (int64), `attention_mask` [B, S] (int64) and `action_mask` [B, A]
(bool), as a trainer's experience maker passes them: the actions are the last A positions, a prompt is padded on the left,
a response that ended early on the right. Every row keeps at least one prompt token and one action. The same seed gives
the same tensors as torch's generator; ids and timestamps are new, so creating twice adds twice.

Example::

    create_dumps(store, count=4, batch_size=2, seq_len=512, padding="both", ranks=2, seed=7)      # 8 dumps
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actordbg.base.errors import UsageError
from actordbg.formats.dump_record import DumpRecord, contiguous_strides, is_plain_name, make_dump_id, now_timestamp
from actordbg.formats.encoding import Array, PlainTensor
from actordbg.store.layout import Store
from actordbg.store.payload import encode_plain

PADDINGS = ("left", "right", "both", "none")
LLAMA_VOCABULARY = 128_256
PAD_ID = 0
_FLAGS = ("return_output", "allgather_logits", "return_logprobs", "return_entropy")


@dataclass(frozen=True)
class Shape:
    """What to make: B, S, A (None: half of S; 0: no action mask), which sides are padded, and ids below `vocab_size`."""

    batch_size: int = 2
    seq_len: int = 512
    action_len: int | None = None
    padding: str = "both"
    vocab_size: int = LLAMA_VOCABULARY

    @property
    def actions(self) -> int:
        """A, the number of action positions."""
        return self.seq_len // 2 if self.action_len is None else self.action_len

    def check(self) -> Shape:
        """Return the shape itself; UsageError names a number that makes no sense."""
        if self.batch_size < 1 or self.seq_len < 2 or self.vocab_size < 2:
            raise UsageError(
                f"cannot make {self.batch_size} x {self.seq_len} ids below {self.vocab_size}",
                hint="use a batch size of at least 1, and a sequence length and vocabulary of at least 2",
            )
        if not 0 <= self.actions < self.seq_len:
            raise UsageError(
                f"{self.actions} actions do not fit after a prompt in {self.seq_len} positions",
                hint="choose --action-len between 0 (no action mask) and seq-len - 1",
            )
        if self.padding not in PADDINGS:
            raise UsageError(f"unknown padding {self.padding!r:.40}", hint=f"use {', '.join(PADDINGS)}")
        return self


def create_dumps(
    store: Store,
    count: int,
    batch_size: int = 2,
    seq_len: int = 512,
    action_len: int | None = None,
    padding: str = "both",
    ranks: int = 1,
    vocab_size: int = LLAMA_VOCABULARY,
    seed: int = 0,
    run: str = "created",
    on_progress: Callable[[], object] = lambda: None,
) -> list[Path]:
    """Write `count` dumps for each of `ranks` ranks and return their paths. `on_progress` is called for each.

    Raises UsageError for numbers that make no sense and StoreProblem when the store cannot be written.
    """
    shape = Shape(batch_size, seq_len, action_len, padding, vocab_size).check()
    if count < 1 or ranks < 1 or not is_plain_name(run):
        raise UsageError(f"cannot create {count} dumps for {ranks} ranks of run {run!r:.80}", hint="see --help")
    store.create()
    generator = Draws(seed)
    arguments = dict.fromkeys(_FLAGS, False) | {"packed_seq_lens": None} | ({} if shape.actions else {"action_mask": None})
    paths = []
    for call in range(count):
        for rank in range(ranks):
            tensors = make_inputs(shape, generator)
            timestamp = now_timestamp()
            record = DumpRecord(
                dump_id=make_dump_id(timestamp, call, 0, os.urandom(4).hex()),
                run=run,
                rank=rank,
                timestamp=timestamp,
                batch_size=batch_size,
                seq_len=seq_len,
                tokens=int(tensors["attention_mask"].sum()),
                source="create",
                world_size=ranks,
                host=socket.gethostname(),
                call_index=call,
                action_len=shape.actions or None,
                arguments=arguments,
                origin={"seed": seed, "padding": padding, "vocab_size": vocab_size},
            )
            plain = {name: PlainTensor(v.dtype.name, v, contiguous_strides(v.shape)) for name, v in tensors.items()}
            paths.append(store.put_dump(*encode_plain(record, plain), hint="make room, or name another store"))
            on_progress()
    return paths


class Draws:
    """Draws integers as `torch.randint` does on a CPU from a generator with this seed: MT19937, and a remainder."""

    def __init__(self, seed: int) -> None:
        self._twister = np.random.RandomState(seed & 0xFFFFFFFF)

    def between(self, low: int, high: int, shape: tuple[int, ...]) -> Array:
        """Draw int64 values from `low` to below `high`."""
        drawn = self._twister.randint(0, 2**32, size=shape, dtype=np.uint32)
        return drawn.astype(np.int64) % (high - low) + low


def make_inputs(shape: Shape, generator: Draws) -> dict[str, Array]:
    """Make the random inputs of a call: `sequences`, `attention_mask` int64 [B, S], `action_mask` bool [B, A] unless A is 0."""
    batch, length, actions = shape.batch_size, shape.seq_len, shape.actions
    response = actions or length // 2
    left, right = (  # how many positions each row is padded on a side, [B, 1]
        generator.between(0, most, (batch, 1)) if shape.padding in (side, "both") else np.zeros((batch, 1), np.int64)
        for side, most in (("left", length - response), ("right", response))
    )
    position = np.arange(length)
    shown = (position >= left) & (position < length - right)
    ids = generator.between(1, shape.vocab_size, (batch, length))
    tensors = {"sequences": np.where(shown, ids, PAD_ID), "attention_mask": shown.astype(np.int64)}
    if actions:
        tensors["action_mask"] = np.ascontiguousarray(shown[:, -actions:])
    return tensors
