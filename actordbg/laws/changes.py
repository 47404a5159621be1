"""Changes to a captured input that the laws are asked with. Pure: a dump goes in, a changed dump comes out.

Tokens are replaced by other tokens of the same dump, so that they are ids which the model knows and which no fork treats as
special. Places, masks and shapes stay; the record's outputs are left out.

    asked = plain_call(dump, vocab_size)            # every log-prob and the logits, ids inside of the vocabulary
    changed = other_tokens(asked, rows_of(asked, odd=False))
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from actordbg.store.payload import Dump

_STEP = 7
"""By how many places in the list of ids a token is moved; odd, and no power of two."""


def plain_call(dump: Dump, vocab_size: int) -> Dump:
    """The call that laws compare: log-probs of all next tokens, and the logits. Nothing that is computed before them changes."""
    inputs = {name: tensor for name, tensor in dump.inputs.items() if name != "action_mask"}
    inputs["sequences"] = inputs["sequences"].remainder(vocab_size)
    inputs.setdefault("attention_mask", torch.ones_like(inputs["sequences"]))
    arguments = dump.record.arguments | {"return_logprobs": True, "return_output": True}
    states = {name: tensor for name, tensor in dump.tensors.items() if name.startswith("rng.")}
    record = replace(dump.record, arguments={k: v for k, v in arguments.items() if k != "action_mask"})
    return Dump(record, inputs | states)


def attended(dump: Dump) -> Tensor:
    """Bool [B, S]: the real tokens."""
    return dump.inputs["attention_mask"] != 0


def rows_of(dump: Dump, *, odd: bool) -> Tensor:
    """Bool [B, 1]: every other row."""
    return (torch.arange(dump.inputs["sequences"].shape[0]) % 2 == int(odd))[:, None]


def with_other_tokens(dump: Dump, where: Tensor) -> Dump:
    """The dump with other ids wherever `where`, bool and broadcastable to [B, S], is set."""
    sequences = dump.inputs["sequences"]
    where = where.expand_as(sequences)
    known, index = torch.unique(sequences, return_inverse=True)
    if len(known) == 1:
        other = torch.where(sequences > 0, sequences - 1, sequences + 1)
    else:
        shift = 1 + (_STEP * torch.arange(sequences.shape[1])) % (len(known) - 1)
        other = known[(index + shift) % len(known)]
    return Dump(dump.record, dump.tensors | {"sequences": torch.where(where, other, sequences)})


def behind_the_middle(dump: Dump) -> Tensor:
    """Bool [B, S]: of each row the real tokens behind its first half; of rows with fewer than three none."""
    real = attended(dump)
    count = real.cumsum(1)
    total = real.sum(1, keepdim=True)
    return real & (count > (total + 1) // 2) & (total > 2)


def before(changed: Tensor) -> Tensor:
    """Bool [B, S-1]: log-probs that no changed token may reach, not as the label either, in rows with a changed token."""
    reached = changed.cumsum(1) > 0
    return ~reached[:, 1:] & changed.any(1, keepdim=True)


def next_tokens(dump: Dump) -> Tensor:
    """Bool [B, S-1]: next tokens that are real, and so is the token before."""
    real = attended(dump)
    return real[:, 1:] & real[:, :-1]


def reversed_rows(dump: Dump) -> Dump:
    """The rows in reversed order."""
    return _rows(dump, torch.arange(dump.inputs["sequences"].shape[0]).flip(0))


def only_row(dump: Dump, row: int) -> Dump:
    """One row by itself, with its padding."""
    return _rows(dump, torch.tensor([row]))


def _rows(dump: Dump, rows: Tensor) -> Dump:
    inputs = {name: tensor[rows] for name, tensor in dump.inputs.items()}
    batch, length = inputs["sequences"].shape
    record = replace(dump.record, batch_size=batch, seq_len=length, tokens=int((inputs["attention_mask"] != 0).sum()))
    return Dump(record, dump.tensors | inputs)


def places(dump: Dump, packing: bool, rank: int = 0, size: int = 1) -> Tensor:
    """Int [n, 2]: the row and column of each position that the model computes, in its order; -1 for what fills up a ring.

    rank, size: of a ring, where each rank computes an equal part of the packed positions.
    """
    real = attended(dump)
    found = (real if packing else torch.ones_like(real)).nonzero()
    if size > 1:
        found = torch.cat((found, torch.full((-len(found) % size, 2), -1)))
        found = found.tensor_split(size)[rank]
    return found
