"""The model of the truth: the weights as they were rounded, everything that is computed from them in fp32 or really fp64.

Three things would spoil it without a word:

* **Buffers.** A rotary embedding's `inv_freq` is not in the checkpoint: transformers computes it while the model is built, in
  fp32, or in whatever dtype is the default then. So the buffers that are not stored are computed again, in the truth's
  dtype, in a skeleton of the model without weights, and put in the place of the others.
* **Casts.** transformers' models compute some things in fp32 whatever the model's dtype is: the norms' variance, the softmax
  of the attention, the angles and their cosines. In a bf16 model that is a gain, in an fp64 model a loss (measured with the
  tiny Llama over 600 tokens: log-probs are off by 1.7e-6). Within `in_double` whatever asks for a narrower float gets fp64.
* **Faster products.** TF32 is off.

`Narrowed` counts operations that gave a narrower float all the same, in code that `in_double` does not reach.

Example:
    model = load(path, weights="bfloat16", dtype=torch.float64, device=torch.device("cpu"))
    with in_double(), Narrowed(torch.float64) as narrowed:
        logits = model(ids, position_ids=positions, use_cache=False).logits      # float64
    narrowed.found                                                                # {}
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from actordbg.base.errors import EnvironmentProblem, Unsupported

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS: dict[Any, Any] = {
    torch.Tensor.float: torch.Tensor.double,
    torch.Tensor.half: torch.Tensor.double,
    torch.Tensor.bfloat16: torch.Tensor.double,
}


def load(path: str, *, weights: str, dtype: torch.dtype, device: torch.device, trust: bool = False) -> Any:
    """The causal language model at `path`: loaded in `weights` ("bfloat16"), so rounded to it, then brought to `dtype`.

    trust: its own code may run (`actordbg.actor.model_code`). Attention is eager, and the model is in evaluation mode. In a
    `dtype` below fp32 the buffers are fp32, as they are in any model. Raises EnvironmentProblem where transformers is missing,
    Unsupported for a model with images.
    """
    exact_products()
    auto = _auto_model()
    _require_text_model(path, trust)
    loaded = auto.from_pretrained(path, trust_remote_code=trust, attn_implementation="eager", torch_dtype=getattr(torch, weights))
    model = loaded.to(dtype).to(device).eval()
    model.config.use_cache = False
    _renew_buffers(model, _skeleton(auto, path, wide(dtype), trust))
    return model


def wide(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or fp32 where that is wider: what log-probs are computed in from the logits, as the Actor does."""
    return dtype if dtype is torch.float64 else torch.float32


def exact_products() -> None:
    """No TF32, and the same kernels every time where there is a choice that costs nothing."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def in_double(dtype: torch.dtype = torch.float64) -> AbstractContextManager[Any]:
    """A block in which nothing is cast to less than fp64; for another `dtype` a block that does nothing."""
    return _InDouble() if dtype is torch.float64 else nullcontext()


class Narrowed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, by operation and dtype, the results that are floats narrower than `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()
        self._size = torch.finfo(dtype).bits

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, torch.Tensor) and one.is_floating_point() and torch.finfo(one.dtype).bits < self._size:
                self.found[f"{func} in {str(one.dtype).removeprefix('torch.')}"] += 1
        return result


class _InDouble(TorchFunctionMode):
    """Replaces every narrower dtype that a torch function is given by fp64, and `.float()` by `.double()`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        wide = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return _CASTS.get(func, func)(*(_widened(value) for value in args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def _skeleton(auto: Any, path: str, dtype: torch.dtype, trust: bool) -> Any:
    """The same model without weights, whose buffers are computed in `dtype`."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    with in_double(dtype), init_empty_weights(include_buffers=False):
        return auto.from_config(config, torch_dtype=dtype, attn_implementation="eager", trust_remote_code=trust)


def _renew_buffers(model: Any, skeleton: Any) -> None:
    """The skeleton's buffers in the place of the model's, but for those that came out of the checkpoint."""
    stored = set(model.state_dict())
    ours = dict(model.named_buffers())
    for name, buffer in skeleton.named_buffers():
        if name in ours and name not in stored:
            holder, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(holder), leaf, buffer.to(ours[name].device))


def _auto_model() -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise EnvironmentProblem(
            f"transformers cannot be imported here: {error}",
            hint="`actordbg doctor` says what is missing; pip install 'actordbg[replay]'",
        ) from error
    return AutoModelForCausalLM


def _require_text_model(path: str, trust: bool) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    if getattr(config, "vision_config", None) is not None:
        raise Unsupported(
            "the truth is computed for text models, and this one has images",
            hint="compare two configurations of this model with each other",
        )


def takes(model: Any, argument: str) -> bool:
    """Whether the model's forward has this argument by name."""
    return argument in inspect.signature(model.forward).parameters
