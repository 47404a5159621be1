"""Ring attention for a replay: OpenRLHF's own slicing and gathering, over ring_flash_attn or a stand-in for it.

OpenRLHF cuts a packed batch into equal parts, one for each rank of the ring, and gives the borders of the rows to the kernel's
`update_ring_flash_attn_params`. The model's attention exchanges keys and values; then the log-probs are gathered. All of that
is OpenRLHF's own code here as well; only the kernel differs:

| attention | kernel |
|---|---|
| `flash_attention_2`, with CUDA and ring_flash_attn | ring_flash_attn's |
| `sdpa`, where ring_flash_attn is not installed | the stand-in below |

The stand-in has the real module's name and the two functions that OpenRLHF calls, and gives the same numbers in the plainest way:

* Every rank gathers the K and V of all ranks, with a gradient: backward sums over the ring and takes this rank's part.
* The mask is causal and keeps rows apart, by the borders (`cu_seqlens`) that OpenRLHF announces before each forward.
* torch's `scaled_dot_product_attention` does the rest, in the place of transformers' sdpa.

It needs the memory of a gathered K and V and of one mask [tokens / ring, tokens] of bools.

Example (inside a process group of two):
    prepare_ring("sdpa"); import ring_flash_attn
    ring_flash_attn.substitute_hf_flash_attn(group, 1)
    ring_flash_attn.update_ring_flash_attn_params(torch.tensor([0, 5, 8], dtype=torch.int32), group)
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from actordbg.trainers.openrlhf.flash_attn_standin import all_gather

NAME = "gathered K/V (stand-in)"
_MODULE = "ring_flash_attn"
_ATTENTION = "sdpa"


@dataclass
class _Ring:
    """The ring of this process. `cu_seqlens`: int32 [rows + 1], borders of the rows of the whole packed batch."""

    group: dist.ProcessGroup | None = None
    cu_seqlens: Tensor | None = None
    original: Any = None
    masks: dict[str, Tensor] = field(default_factory=dict)


_RING = _Ring()


def prepare_ring(attn: str) -> None:
    """Make `import ring_flash_attn` mean the kernel that goes with this attention. Before OpenRLHF's strategy imports it."""
    if attn == "sdpa" and _MODULE not in sys.modules:
        module = ModuleType(_MODULE, f"Stand-in for {_MODULE} by actordbg: see {__name__}.")
        module.__spec__ = ModuleSpec(_MODULE, None, origin=__file__)
        module.__dict__["substitute_hf_flash_attn"] = substitute_hf_flash_attn
        module.__dict__["update_ring_flash_attn_params"] = update_ring_flash_attn_params
        sys.modules[_MODULE] = module


def open_ring(group: Any, attn: str) -> Any:
    """Do what OpenRLHF's strategy does for a ring (`setup_ring_attn`), for a backend without that strategy; returns the group."""
    from openrlhf.models import ring_attn_utils

    prepare_ring(attn)
    ring_attn_utils.set_ring_attn_group(group)
    if hasattr(ring_attn_utils, "patch_transformers_for_ring_flash_attn"):
        ring_attn_utils.patch_transformers_for_ring_flash_attn()
    importlib.import_module(_MODULE).substitute_hf_flash_attn(group, 1)
    return group


def ring_kernel() -> str:
    """Which kernel the open ring runs."""
    return NAME if is_active() else _MODULE


def close_ring() -> None:
    """Take the group, and the stand-in, out of this process again."""
    from openrlhf.models.ring_attn_utils import set_ring_attn_group

    set_ring_attn_group(None)
    release()


def is_active() -> bool:
    """Whether transformers' sdpa is this ring attention at the moment."""
    return _RING.group is not None


def substitute_hf_flash_attn(process_group: dist.ProcessGroup, heads_k_stride: int = 1) -> None:
    """Put ring attention in the place of transformers' sdpa. The stride is a matter of the real kernel's memory."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if not is_active():
        _RING.original = ALL_ATTENTION_FUNCTIONS[_ATTENTION]
        ALL_ATTENTION_FUNCTIONS[_ATTENTION] = ring_attention
    _RING.group = process_group


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: dist.ProcessGroup) -> None:
    """The borders of the rows of the next forward: int32 [rows + 1] over the whole ring's tokens, padding in the last row."""
    _RING.group, _RING.cu_seqlens = process_group, cu_seqlens
    _RING.masks.clear()


def release() -> None:
    """Give transformers its sdpa back."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if is_active():
        ALL_ATTENTION_FUNCTIONS[_ATTENTION] = _RING.original
        _RING.group = _RING.cu_seqlens = _RING.original = None
        _RING.masks.clear()


def ring_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of this rank's tokens to those of the whole ring, as transformers calls it.

    query [1, heads, T, D]; key, value [1, kv heads, T, D], T tokens of this rank; returns [1, T, heads, D]. The mask that
    transformers made knows this rank's tokens only and is not used; a layer's sliding window is in the mask here.
    """
    if _RING.group is None or _RING.cu_seqlens is None:
        raise RuntimeError("ring attention was called without a group or without the borders of the packed rows")
    key, value = (_gather(tensor, _RING.group) for tensor in (key, value))
    mask = _mask(query.shape[2], query.device, kwargs.get("sliding_window"))
    grouped = key.shape[1] != query.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[1, heads, T, D] of every rank, in order: [1, heads, ring * T, D], with gradients."""
    return all_gather(tensor.permute(2, 0, 1, 3).contiguous(), group).permute(1, 2, 0, 3)


def _mask(tokens: int, device: torch.device, window: int | None) -> Tensor:
    """The mask of this rank's tokens, [1, 1, T, ring * T] of bools; the same for every layer with that window."""
    key = f"{tokens} {device} {window}"
    if key not in _RING.masks:
        assert _RING.group is not None and _RING.cu_seqlens is not None
        size, rank = dist.get_world_size(_RING.group), dist.get_rank(_RING.group)
        _RING.masks[key] = visible(_RING.cu_seqlens.to(device), tokens, rank, size, window)[None, None]
    return _RING.masks[key]


def visible(cu_seqlens: Tensor, tokens: int, rank: int, size: int, window: int | None) -> Tensor:
    """[T, size * T] of bools: which of the ring's tokens each of this rank's T tokens sees.

    Those before it, and itself, in its own row (borders: int [rows + 1]); with a window, only the last `window` of them, itself
    included, as transformers' sliding masks have it.
    """
    places = torch.arange(size * tokens, device=cu_seqlens.device)
    rows = torch.bucketize(places, cu_seqlens[1:], right=True)
    own = slice(rank * tokens, (rank + 1) * tokens)
    back = places[own, None] - places
    seen = (rows[own, None] == rows) & (back >= 0)
    return seen if window is None else seen & (back < window)
