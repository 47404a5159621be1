"""DeepSpeed without CUDA: what it needs before it is imported. Nothing is imported here.

| Replaced | By | Why |
|---|---|---|
| its shared-memory operator | off | it compiles C++ for 30 to 60 s at the first `init_distributed` |
| ZeRO 3 gathers several parameters at once | one by one | it waits for the last only: over gloo weights came out as garbage |
"""

from __future__ import annotations

import functools
import os
from typing import Any

from actordbg.trainers.importhook import after_import

_MARK = "__actordbg_deepspeed_cpu__"


def prepare_deepspeed() -> bool:
    """Make DeepSpeed runnable in this process if it has no CUDA; say whether it has none. Calling it again does nothing more."""
    import torch

    if torch.cuda.is_available():
        return False
    if not getattr(torch.cuda, _MARK, False):
        setattr(torch.cuda, _MARK, True)
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        after_import("deepspeed.ops", _without_shared_memory_operator)
        after_import("deepspeed.runtime.zero.partition_parameters", _waiting_for_each)
    return True


def _without_shared_memory_operator(ops: Any) -> None:
    """DeepSpeed's collectives over gloo are enough; its C++ ones would be compiled in every fresh environment."""
    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _waiting_for_each(partition_parameters: Any) -> None:
    """Gather parameters one at a time. DeepSpeed starts all and waits for the last one, which is enough in a CUDA stream only.

    Over gloo the others go on, and may overwrite what `from_pretrained` has just put there with what was gathered before.
    """
    init = partition_parameters.Init
    original = init._allgather_params_coalesced

    @functools.wraps(original)
    def _allgather_params_coalesced(self: Any, param_list: Any, *args: Any, **kwargs: Any) -> None:
        for one in param_list:
            original(self, [one], *args, **kwargs)

    init._allgather_params_coalesced = _allgather_params_coalesced
