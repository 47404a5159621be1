"""The two modules of `flash_attn` that OpenRLHF imports at module top, in plain torch.

OpenRLHF since 0.4.6 cannot be imported without the `flash_attn` package, although on a CPU it needs none of its kernels:
only the helpers that remove padding before a packed forward and restore it afterwards (`flash_attn.bert_padding`), and an
all-gather with a gradient for ring attention (`flash_attn.utils.distributed`). Those are index arithmetic, so this module
provides them under the same names, with the contract of flash-attn 2.7 and later (`unpad_input` returns five values).

It provides no kernels: `flash_attn.ops...` stays missing, so OpenRLHF takes its own torch path for log-probs, and transformers
still reports that flash attention 2 is not available (it checks for an installed distribution and for CUDA).

Two things are deliberate. `index_first_axis` indexes the first axis of an already flattened tensor; transformers has a
private function of that name which flattens first, and with it every packed forward fails with a shape error. And an
out-of-place `index_copy` restores the padding, so that gradients flow.

Example:
    >>> import torch
    >>> ids = torch.tensor([[0, 7, 8], [5, 6, 0]]); mask = torch.tensor([[0, 1, 1], [1, 1, 0]])
    >>> flat, indices, cu_seqlens, longest, lengths = unpad_input(ids.unsqueeze(-1), mask)
    >>> flat.squeeze(-1).tolist(), cu_seqlens.tolist(), longest
    ([7, 8, 5, 6], [0, 2, 4], 2)
    >>> pad_input(flat, indices, 2, 3).squeeze(-1).tolist()
    [[0, 7, 8], [5, 6, 0]]
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor


def index_first_axis(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return the rows of `tensor` (N, ...) at `indices` (M,) int64: (M, ...). The caller has flattened batch and sequence."""
    return tensor[indices]


def unpad_input(hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drop the padding of `hidden_states` (B, S, ...), keeping rows where `attention_mask` (B, S) is not 0.

    Returns (kept, indices, cu_seqlens, max_seqlen, lengths): kept (tokens, ...); indices (tokens,) int64 into the flattened
    B*S; cu_seqlens (B+1,) int32; max_seqlen a python int; lengths (B,) int32.
    """
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(lengths.max()), lengths


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undo `unpad_input`: (tokens, ...) and its indices to (batch, seqlen, ...), zeros where the padding was."""
    flat = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return flat.index_copy(0, indices, hidden_states).view(batch, seqlen, *hidden_states.shape[1:])


class _AllGather(torch.autograd.Function):
    """Concatenate every rank's tensor on the first axis; backward sums the gradients and takes this rank's slice."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        ctx.rows = tensor.shape[0]
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim=0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        start = dist.get_rank(ctx.group) * ctx.rows
        return total[start : start + ctx.rows], None


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """All-gather (n, ...) of every rank of `group` into (world * n, ...), differentiable."""
    return _AllGather.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


def register() -> None:
    """Make the stand-in importable as `flash_attn.bert_padding` and `flash_attn.utils.distributed` in this process."""
    own = {"index_first_axis": index_first_axis, "pad_input": pad_input, "rearrange": rearrange, "unpad_input": unpad_input}
    padding = stand_in("flash_attn.bert_padding", **own)
    distributed = stand_in("flash_attn.utils.distributed", all_gather=all_gather)
    utils = stand_in("flash_attn.utils", is_package=True, distributed=distributed)
    stand_in("flash_attn", is_package=True, bert_padding=padding, utils=utils, __actordbg_standin__=True)


def stand_in(name: str, *, is_package: bool = False, **attributes: object) -> ModuleType:
    """Register an importable module of this name, with these attributes, in this process."""
    module = ModuleType(name, f"Stand-in for {name} by actordbg: see {__name__}.")
    module.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=is_package)
    if is_package:
        module.__path__ = []
    for key, value in attributes.items():
        setattr(module, key, value)
    sys.modules[name] = module
    return module
