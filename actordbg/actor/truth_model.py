"""The truth's model: the rounded weights, with everything computed from them in fp32 or truly in fp64.

Three things would silently spoil it:

* **Buffers.** A rotary embedding's `inv_freq` is not in the checkpoint: transformers computes it while the model is built, in
  fp32, or in whatever dtype is the default then. So the buffers that are not stored are recomputed in the truth's dtype, in a
  skeleton of the model without weights, and replace the model's.
* **Casts.** transformers' models compute some things in fp32 whatever the model's dtype is: the norms' variance, the softmax
  of the attention, the angles and their cosines. In a bf16 model that is a gain, in an fp64 model a loss (measured with the
  tiny Llama over 600 tokens: log-probs are off by 1.7e-6). Within `in_double` whatever asks for a narrower float gets fp64.
* **Faster products.** TF32 is off.

`Narrowed` counts operations that still returned a narrower float, in code that `in_double` does not reach.

Example:
    model = load(path, weights="bfloat16", dtype=torch.float64, device=torch.device("cpu"))
    with in_double(), Narrowed(torch.float64) as narrowed:
        logits = model(ids, position_ids=positions, use_cache=False).logits      # float64
    narrowed.counts                                                                # {}
"""

from __future__ import annotations

import base64
import contextlib
import csv
import functools
import hashlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from actordbg.trainers.rows_actor import model_class

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS: dict[Any, Any] = {
    torch.Tensor.float: torch.Tensor.double,
    torch.Tensor.half: torch.Tensor.double,
    torch.Tensor.bfloat16: torch.Tensor.double,
}


def load(path: str, *, weights: str, dtype: torch.dtype, device: torch.device, trust: bool = False) -> Any:
    """Load the causal language model at `path` in the dtype `weights` ("bfloat16"), which rounds it, then convert it to `dtype`.

    trust: its own code may run (`actordbg.actor.model_code`). Attention and experts are eager, in evaluation mode. In a `dtype`
    below fp32 the buffers are fp32, as they are in any model, and so is what the model keeps in fp32 in any dtype, such as a
    router (`_keep_in_fp32_modules_strict`). Raises EnvironmentProblem if transformers is missing.
    """
    exact_products()
    auto, loads = model_class(path, trust), getattr(torch, weights)
    loaded = auto.from_pretrained(path, trust_remote_code=trust, attn_implementation="eager", torch_dtype=loads)
    model = (loaded if dtype is loads else loaded.to(dtype)).to(device).eval()
    if hasattr(model, "_can_set_experts_implementation") and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped products of experts do not exist in fp64
    model.config.use_cache = False
    _renew_buffers(model, skeleton(auto, path, torch.promote_types(dtype, torch.float32), trust))
    return model


def exact_products() -> None:
    """Turn TF32 off, and choose deterministic kernels where that costs nothing."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


_NO_MODULES = ("torch", "accelerate", "safetensors", "typing_extensions", *sys.stdlib_module_names)
"""Packages of other functions that transformers' files and torch's import."""
_LOADING = "transformers.modeling_utils"
"""The file that loads models. Since transformers 5.21 a model's file imports a function of it, and it the hub's and ours."""


def code_of(model: Any, attn: str = "eager") -> dict[str, str]:
    """Name the packages, beside torch, whose code computes a model, each with a part of it: `{"mine": "LlamaMLP"}`.

    A forward that was replaced, or a function of a file of transformers that the model runs or of torch, or the attention
    and mask registered as `attn`, count as the package whose file has its code, whatever its name says; so does what it wraps.
    """
    parts = {getattr(module.forward, "__func__", module.forward): type(module).__name__ for module in model.modules()}
    own = [*_scopes_of(model), *map(vars, (torch, torch.Tensor, torch.nn.functional))]  # theirs are in torch's own files
    parts |= {function: name for scope in own for name, function in _functions_in(scope)}
    return _packages(parts | _registered(attn))


def _functions_in(scope: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the functions of a module, and of its tables of them, by name."""
    for name, value in [*scope.items()]:
        held = value.items() if name.endswith("_FUNCTIONS") and type(value) is dict else [(name, value)]
        yield from ((str(key), each) for key, each in held if inspect.isfunction(each))


def _scopes_of(model: Any) -> list[dict[str, Any]]:
    """Return the names in each file of transformers that a model runs: of its forwards, and of the functions beside them."""
    scopes: dict[str, dict[str, Any]] = {}
    left = [inspect.unwrap(type(module).forward) for module in model.modules()]
    while left:
        scope = getattr(inspect.unwrap(left.pop()), "__globals__", {})
        name = scope.get("__name__", "")
        if name.startswith("transformers.") and name not in (*scopes, _LOADING):
            scopes[name] = scope
            left += [function for _, function in _functions_in(scope)]
    return [*scopes.values()]


def is_own_attention(attn: str) -> bool:
    """Return whether the attention that is registered under this name is transformers' own code."""
    return _packages(_registered(attn)).keys() <= {"transformers"}


def _registered(attn: str) -> dict[Any, str]:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    registries = {"attention": ALL_ATTENTION_FUNCTIONS, "mask": ALL_MASK_ATTENTION_FUNCTIONS}
    return {held[attn]: f"{attn} {what}" for what, held in registries.items() if attn in held}


def _packages(parts: Mapping[Any, str]) -> dict[str, str]:
    """Name the packages that functions come from, and what they wrap, each with the name of one. The files of code decide."""
    named = reversed(list(sys.modules.items()))  # the first name of a module is its own: `__main__`, not `__mp_main__`
    files = {getattr(module, "__dict__", {}).get("__file__"): name for name, module in named}
    packages: dict[str, str] = {}
    for function, name in parts.items():
        while function is not None:
            function = getattr(function, "func", function)  # of a partial
            file = function.__code__.co_filename if hasattr(function, "__code__") else ""
            package = files.get(file, Path(file).stem) if file else type(function).__module__
            packages.setdefault(package.partition(".")[0], name)
            function = getattr(function, "__wrapped__", None)
    return {package: name for package, name in packages.items() if package not in _NO_MODULES}


def shared_code(model: Any) -> list[str]:
    """Name the packages, beside torch, whose code computes this model: a fault in them is in the truth as well.

    A file of transformers that was edited since its installation is named.
    """
    folder, recorded = _record_of_transformers()
    digests = {scope["__file__"]: recorded.get(os.path.relpath(scope["__file__"], folder)) for scope in _scopes_of(model)}
    edited = [f"an edited {Path(file).name}" for file, digest in digests.items() if digest and digest != _digest(file)]
    return [*sorted(code_of(model)), *edited]


def _digest(file: str) -> str:
    """Return a file's digest as an installation's RECORD has it."""
    digest = hashlib.sha256(Path(file).read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


@functools.cache
def _record_of_transformers() -> tuple[str, dict[str, str]]:
    """Return the folder that transformers is installed in, and the digest of each of its files; none without an installation."""
    try:
        installed = metadata.distribution("transformers")
    except metadata.PackageNotFoundError:
        return "", {}
    lines = (installed.read_text("RECORD") or "").splitlines()
    return str(installed.locate_file("")), {name: digest for name, digest, *_ in csv.reader(lines)}


def in_double(dtype: torch.dtype = torch.float64) -> AbstractContextManager[Any]:
    """Return a block in which nothing is cast to less than fp64; for another `dtype`, a block that does nothing."""
    return _InDouble() if dtype is torch.float64 else nullcontext()


class Narrowed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, by operation and dtype, the results that are floats narrower than `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._size = torch.finfo(dtype).bits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and torch.finfo(value.dtype).bits < self._size:
                self.counts[f"{func} in {str(value.dtype).removeprefix('torch.')}"] += 1
        return result


class _InDouble(TorchFunctionMode):
    """Replaces every narrower dtype that a torch function is given by fp64, and `.float()` by `.double()`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {name: _widened(value) for name, value in kwargs.items()} if kwargs else {}
        return _CASTS.get(func, func)(*map(_widened, args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def skeleton(auto: Any, path: str, dtype: torch.dtype, trust: bool, attn: str = "eager") -> Any:
    """Build the model without weights (meta), with its buffers computed in `dtype`."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    with in_double(dtype), init_empty_weights(include_buffers=False):
        model = auto.from_config(config, torch_dtype=dtype, attn_implementation=attn, trust_remote_code=trust)
    model.tie_weights()  # each assignment of a parameter without memory makes another one
    return model


def _renew_buffers(model: Any, skeleton: Any) -> None:
    """Replace the model's buffers by the skeleton's, except those from the checkpoint."""
    stored = set(model.state_dict())
    ours = dict(model.named_buffers())
    for name, buffer in skeleton.named_buffers():
        if name in ours and name not in stored:
            holder, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(holder), leaf, buffer.to(ours[name].device))


PREFIX = "planted/"
_COARSE = (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3)
_FINE = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1)
_TOKENS = (1.0, 4.0, 16.0, 64.0)


def sizes_of(model: Any, dtype: torch.dtype) -> dict[str, tuple[float, ...]]:
    """Return the sizes to try, by fault: only faults that this model can have."""
    shares = _COARSE if dtype in (torch.bfloat16, torch.float16) else _FINE
    return {"matrix": shares, "position": _TOKENS, **({"attention": shares} if _scaled(model) else {})}


@contextlib.contextmanager
def planted(model: Any, fault: str, size: float) -> Iterator[None]:
    """Plant this fault in the model for the block: a weight `matrix` or the scale of `attention` times 1 + size, or the
    `position` of the second half of each row `size` tokens further on.
    """
    with contextlib.ExitStack() as undo:
        if fault == "position":
            undo.callback(model.register_forward_pre_hook(partial(_shifted, size=int(size)), with_kwargs=True).remove)
        elif fault == "attention":
            for module in _scaled(model):
                undo.callback(setattr, module, "scaling", module.scaling)
                module.scaling *= 1 + size
        else:
            layers = [weight for name, weight in model.named_parameters() if any(map(str.isdigit, name.split(".")))]
            matrices = [weight for weight in layers if weight.dim() == 2]
            weight = matrices[len(matrices) // 2]
            undo.callback(setattr, weight, "data", weight.data)
            weight.data = (weight.data.double() * (1 + size)).to(weight.dtype)
        yield


def _shifted(model: Any, args: Any, kwargs: dict[str, Any], size: int) -> tuple[Any, dict[str, Any]]:
    last = getattr(model.config, "max_position_embeddings", None) or 2**31
    positions = kwargs["position_ids"]
    further = torch.arange(positions.shape[-1], device=positions.device) >= positions.shape[-1] // 2
    return args, kwargs | {"position_ids": (positions + size * further).clamp(max=last - 1)}


def _scaled(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(getattr(module, "scaling", None), float)]
