"""Ring attention for a replay: OpenRLHF's own slicing and gathering, over ring_flash_attn or the stand-in.

OpenRLHF cuts a packed batch into equal parts, one for each rank of the ring, calls ring_flash_attn's
`update_ring_flash_attn_params` with the borders of the rows, lets the model's attention exchange keys and values, and gathers
the log-probs. All of that is its own code here as well; only the kernel differs:

| attention | kernel |
|---|---|
| `flash_attention_2`, with CUDA and ring_flash_attn | ring_flash_attn's |
| `sdpa`, where ring_flash_attn is not installed | `ring_standin`: keys and values of all ranks gathered, plain attention |
"""

from __future__ import annotations

import importlib
from typing import Any

from actordbg.host.openrlhf import ring_attention_standin as ring_standin

REAL = "ring_flash_attn"


def prepare(attn: str) -> None:
    """Make `import ring_flash_attn` mean the kernel that goes with this attention. Before OpenRLHF's strategy imports it."""
    if attn == "sdpa":
        ring_standin.register()


def open_group(group: Any, attn: str) -> Any:
    """Do what OpenRLHF's strategy does for a ring (`setup_ring_attn`), for a backend without that strategy; returns the group."""
    from openrlhf.models import ring_attn_utils

    prepare(attn)
    ring_attn_utils.set_ring_attn_group(group)
    if hasattr(ring_attn_utils, "patch_transformers_for_ring_flash_attn"):
        ring_attn_utils.patch_transformers_for_ring_flash_attn()
    importlib.import_module("ring_flash_attn").substitute_hf_flash_attn(group, 1)
    return group


def facts(group: Any) -> dict[str, Any]:
    """What ran, for the result: which kernel; nothing where there is no ring."""
    if group is None:
        return {}
    return {"ring_kernel": ring_standin.NAME if ring_standin.is_active() else REAL}


def close(group: Any) -> None:
    """Take the group, and the stand-in, out of this process again."""
    if group is not None:
        from openrlhf.models.ring_attn_utils import set_ring_attn_group

        set_ring_attn_group(None)
        ring_standin.release()
