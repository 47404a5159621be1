"""CPU support for OpenRLHF, installed before it is imported.

OpenRLHF is written for GPUs: it imports flash-attn at module top, calls `torch.cuda` directly, asks for a "cuda" device mesh,
and its DeepSpeed optimizers compile C++ at first use. None of that is essential to what its Actor and trainers compute.
Without CUDA, `install_cpu_support()` replaces exactly the pieces below and leaves everything else alone; with it, OpenRLHF's own
Actor, DeepspeedStrategy, `train_sft` and `train_ppo_ray` run on a laptop.

| Replaced | By | Why |
|---|---|---|
| `flash_attn.bert_padding`, `.utils.distributed`, if flash-attn is missing | `flash_attn_standin` | imported at module top |
| `ring_flash_attn`, for ring attention | `ring_attention` | its kernel needs CUDA |
| `torch.cuda.set_device`, `synchronize`, `empty_cache`, `current_stream` | no-ops | called by its strategy and trainers |
| `torch.cuda.current_device` | the CPU, as a device | `tensor.to(torch.cuda.current_device())` |
| `torch.distributed.device_mesh.init_device_mesh("cuda", ...)` | `"cpu"` | its strategy's mesh |
| `param_dtype="fp32"` refused by `convert_to_torch_dtype` | accepted | fp32 is exact, and faster than bf16 on a CPU |
| the Adam of OpenRLHF's strategy | torch's (`torch_adam`) | DeepSpeed's compiles C++ for a minute |
| parts of DeepSpeed | see `actordbg.trainers.importhook` | it waits too little, and compiles C++ |

Not replaced, on purpose: `torch.cuda.get_device_properties` (inductor's cache key relies on its raising), `torch.empty` and
`Tensor.to` (wrapping them breaks transformers' meta-device initialization: rotary `inv_freq` stays zero and the loss is
wrong), `torch.cuda.is_available` (stays False).

Example (a replay worker):
    install_cpu_support()
    from openrlhf.models import Actor
    actor = Actor("path/to/model", attn_implementation="sdpa", param_dtype="fp32", packing_samples=True)
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

from actordbg.trainers.importhook import after_import, prepare_deepspeed

_MARK = "__actordbg_cpu__"


def install_cpu_support() -> bool:
    """Make OpenRLHF importable and runnable in this process if it has no CUDA; return whether this was needed.

    Call it before anything imports `openrlhf`, which imports names by value. Idempotent. With CUDA it returns False and changes
    nothing. This module's docstring lists what it replaces.
    """
    import torch

    if not prepare_deepspeed():
        return False
    if not getattr(torch.cuda, _MARK, False):
        setattr(torch.cuda, _MARK, True)
        stand_in_for_flash_attn()
        import torch.distributed.device_mesh as device_mesh

        device, init_device_mesh = CpuDevice("cpu"), device_mesh.init_device_mesh
        torch.cuda.current_device = lambda: device  # type: ignore[assignment, return-value]
        for name in ("set_device", "synchronize", "empty_cache", "current_stream"):
            setattr(torch.cuda, name, lambda *args, **kwargs: None)

        @functools.wraps(init_device_mesh)
        def on_cpu(device_type: str, *args: Any, **kwargs: Any) -> Any:
            return init_device_mesh("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

        device_mesh.init_device_mesh = on_cpu
        after_import("openrlhf.utils.deepspeed.deepspeed", _with_torch_adam)
        allow_fp32_actor()
    return True


def prepare_process() -> None:
    """Make this process ready to build Actors, with CUDA or without."""
    if not install_cpu_support():
        allow_fp32_actor()
        stand_in_for_flash_attn()


def allow_fp32_actor() -> None:
    """Make OpenRLHF's `Actor(param_dtype="fp32")` mean float32. Also useful with CUDA: OpenRLHF knows only bf16 and fp16."""
    after_import("openrlhf.utils.utils", _with_fp32)


def map_flash_attention_to_sdpa() -> None:
    """Load models that ask for flash attention, which cannot run here, with torch's sdpa instead.

    Only for OpenRLHF's training programs: they force `flash_attention_2` whenever packing is on, and transformers refuses it on a
    CPU. A replay never does this: it runs the requested attention or raises an error. Packing with sdpa is exact since
    transformers 4.53.1.
    """
    after_import("openrlhf.models.actor", _with_sdpa_for_flash_attention)


class CpuDevice(str):
    """The string "cpu", formatted as device index 0.

    OpenRLHF uses `torch.cuda.current_device()` in two ways: as a device (`tensor.to(...)`), which has to mean the CPU, and as a
    number inside `f"cuda:{...}"`, which torch has to be able to parse.
    """

    def __format__(self, spec: str) -> str:
        return format(0, spec)


def stand_in_for_flash_attn() -> None:
    """Provide the helpers that OpenRLHF imports from flash-attn at module top (`flash_attn_standin`), if it is not installed.

    Also with CUDA: a replay with `--attn sdpa` needs no flash-attn, but OpenRLHF cannot be imported without those names.
    """
    if "flash_attn" not in sys.modules and importlib.util.find_spec("flash_attn") is None:
        from actordbg.trainers.openrlhf import flash_attn_standin

        flash_attn_standin.register()
        # Some releases of transformers (such as 5.7) look up a module's distribution and raise KeyError if it has none. So it
        # gets a distribution that is not installed: then flash attention is correctly unavailable.
        after_import(
            "transformers.utils.import_utils",
            lambda utils: vars(utils).get("PACKAGE_DISTRIBUTION_MAPPING", {}).setdefault("flash_attn", ["stand-in-of-actordbg"]),
        )


def _with_torch_adam(strategy_module: Any) -> None:
    """Use torch's Adam whenever OpenRLHF's strategy asks DeepSpeed for an Adam; the arithmetic is AdamW's either way."""
    strategy = strategy_module.DeepspeedStrategy
    original = strategy.get_ds_train_config

    @functools.wraps(original)
    def get_ds_train_config(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        config: dict[str, Any] = original(self, *args, **kwargs)
        optimizer = config.get("optimizer") or {}
        if str(optimizer.get("type", "")).lower() in ("adam", "adamw"):
            optimizer.setdefault("params", {}).setdefault("torch_adam", True)
        return config

    strategy.get_ds_train_config = get_ds_train_config


def _with_fp32(utils: Any) -> None:
    original = getattr(utils, "convert_to_torch_dtype", None)
    if original is None or getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    def convert_to_torch_dtype(param_dtype: str) -> Any:
        if param_dtype == "fp32":
            import torch

            return torch.float32
        return original(param_dtype)

    setattr(convert_to_torch_dtype, _MARK, True)
    utils.convert_to_torch_dtype = convert_to_torch_dtype


def _with_sdpa_for_flash_attention(actor_module: Any) -> None:
    """Replace `AutoModelForCausalLM` inside `openrlhf.models.actor`, which calls only its `from_pretrained`."""
    auto_model = actor_module.AutoModelForCausalLM

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:
        if "flash_attention" in str(kwargs.get("attn_implementation")):
            kwargs["attn_implementation"] = "sdpa"
        return auto_model.from_pretrained(*args, **kwargs)

    actor_module.AutoModelForCausalLM = SimpleNamespace(from_pretrained=from_pretrained)
