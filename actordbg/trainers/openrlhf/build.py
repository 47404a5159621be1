"""Build OpenRLHF's Actor in any supported version, and check that it is what was requested.

The arguments of `Actor.__init__` changed three times in the versions that a replay supports:

| OpenRLHF | attention | dtype |
|---|---|---|
| 0.7.0 to 0.8.9 | `use_flash_attention_2: bool` (else eager; sdpa is set afterwards) | `bf16: bool` (else the checkpoint's) |
| 0.8.10 to 0.9.1 | `attn_implementation: str` | `bf16: bool` |
| 0.9.2 and later | `attn_implementation: str` | `param_dtype: str` |

Its `**kwargs` silently swallows unknown arguments, so arguments are chosen by its signature, and the result is compared with the
request: another attention or dtype than requested is an error.

A strategy is OpenRLHF's own DeepspeedStrategy, as a replay uses it: its process group, its DeepSpeed configuration, its engines.
It reads its settings from `args`, nested since 0.10 and flat before. Its `prepare` returns engines:

| engine | call | used for |
|---|---|---|
| training | `prepare((actor, optimizer settings))` | a policy |
| evaluation | `prepare(actor)` | a reference model |
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from actordbg.base.errors import EnvironmentProblem, Unsupported
from actordbg.base.imports import deferred, without_collecting
from actordbg.config.choices import Choices
from actordbg.config.replay_config import ReplayConfig
from actordbg.trainers.importhook import after_import, before_import
from actordbg.trainers.openrlhf import cannot_import
from actordbg.trainers.openrlhf.flash_attn_standin import all_gather, stand_in
from actordbg.trainers.rows_actor import change_attention, check, follow_adapters


def import_actor() -> type[Any]:
    """Import OpenRLHF's Actor class. Raises EnvironmentProblem, naming the missing module, if that fails."""
    try:
        return _imported("openrlhf.models", without="deepspeed").Actor  # type: ignore[no-any-return]
    except ImportError as error:
        raise cannot_import(error) from error


def _imported(module: str, without: str) -> Any:
    """Import a module of OpenRLHF. Importing the package `without` is deferred, since what the module imports may name it without
    using it. A module that uses it gets the real one.
    """
    with compiling_at_the_first_call(module):
        try:
            with deferred(without):
                return import_module(module)
        except ImportError:
            return import_module(module)


def init_parameters(actor_class: type[Any]) -> frozenset[str]:
    """Return the names of the arguments that this Actor really takes (without those that `**kwargs` swallows)."""
    parameters = inspect.signature(actor_class.__init__).parameters.values()
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def loads_checkpoint_dtype(dtype: str) -> bool:
    """Return whether this Actor gets `dtype` only from the checkpoint's own dtype (bf16=False in old versions)."""
    return dtype != "bf16" and "param_dtype" not in init_parameters(import_actor())


def actor_arguments(names: frozenset[str], choices: Choices, ds_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return keyword arguments for an Actor that takes `names`. Raises Unsupported if it cannot do what `choices` says."""
    features: tuple[tuple[str, bool, dict[str, Any]], ...] = (
        (
            "choose an attention implementation", True,
            {"attn_implementation": choices.attn, "use_flash_attention_2": choices.attn == "flash_attention_2"},
        ),
        ("choose a dtype", True, {"param_dtype": choices.dtype, "bf16": choices.dtype == "bf16"}),
        ("pack samples", choices.packing, {"packing_samples": choices.packing}),
        ("divide logits by a temperature", choices.temperature != 1.0, {"temperature": choices.temperature}),
        ("be given a DeepSpeed configuration", ds_config is not None, {"ds_config": dict(ds_config)} if ds_config else {}),
    )  # fmt: skip
    arguments: dict[str, Any] = {}
    for what, needed, spellings in features:
        if name := next((spelling for spelling in spellings if spelling in names), None):
            arguments[name] = spellings[name]
        elif needed:
            raise Unsupported(
                f"the installed OpenRLHF's Actor cannot {what}",
                hint="replay with OpenRLHF 0.7 to 0.11; captured dumps do not depend on the version that replays them",
            )
    return arguments


def build_actor(path: str, choices: Choices, ds_config: Mapping[str, Any] | None = None) -> Any:
    """Build an Actor of the model at `path`, on the CPU or wherever it is loaded, checked against `choices`.

    A `ds_config` with ZeRO stage 3 partitions the weights while loading.
    """
    actor_class = import_actor()
    names = init_parameters(actor_class)
    actor = actor_class(path, **actor_arguments(names, choices, ds_config))
    if "attn_implementation" not in names and choices.attn == "sdpa":
        change_attention(actor.model, choices)
    follow_adapters(actor.model, {})
    check(actor.model, choices)
    return actor


@contextlib.contextmanager
def compiling_at_the_first_call(module: str) -> Iterator[None]:
    """Defer `torch.compile` of functions to their first call, with unchanged options, during the first import of `module`."""
    original = torch.compile

    def late(model: Any = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(late, **options)
        return _late(original, model, options) if isinstance(model, FunctionType) else original(model, **options)

    torch.compile = late
    try:
        with without_collecting(module):
            yield
    finally:
        torch.compile = original


def _late(compile_it: Callable[..., Any], function: FunctionType, options: dict[str, Any]) -> Callable[..., Any]:
    @functools.cache
    def compiled() -> Callable[..., Any]:
        return compile_it(function, **options)  # type: ignore[no-any-return]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


class OpenRlhfStrategy:
    """A strategy for one replay. `ring_group`: this rank's ring; None without ring attention or before `set_up`."""

    def __init__(self, choices: Choices, config: ReplayConfig, world_size: int, training: Any) -> None:
        self.ring_group: Any = None
        self._attn = choices.attn
        self._ring = config.ring > 1
        self._training = training
        self._strategy = _make(choices, config, world_size, training)

    def set_up(self, timeout: timedelta) -> None:
        if self._ring:
            prepare_ring(self._attn)
        self._strategy.setup_distributed(timeout=timeout)
        self.ring_group = self._strategy.ring_attn_group if self._ring else None

    def ds_config(self, *, train: bool) -> dict[str, Any]:
        if not train:
            return self._strategy.get_ds_eval_config(offload=False)  # type: ignore[no-any-return]
        takes_actor = "is_actor" in inspect.signature(self._strategy.get_ds_train_config).parameters
        config: dict[str, Any] = self._strategy.get_ds_train_config(**({"is_actor": True} if takes_actor else {}))
        return config

    def prepare(self, actor: Any, device: torch.device, *, train: bool) -> Any:
        adam, create = self._training.adam, getattr(self._strategy, "create_optimizer", None)
        if not train:
            return self._strategy.prepare(actor)
        if create is None:
            rest = {"optim": "adam", "lr_scheduler": "constant", "scheduler_steps": 1}
            return self._strategy.prepare((actor, {**rest, "adam": adam, "max_norm": self._training.max_norm}))[0]
        # before OpenRLHF 0.11, whose FusedAdam needs CUDA (or a minute of C++)
        optimizer = create(actor, **adam) if device.type == "cuda" else torch.optim.AdamW(actor.model.parameters(), **adam)
        return self._strategy.prepare((actor, optimizer, None), is_rlhf=True)[0]

    def backward(self, loss: torch.Tensor, actor: Any, optimizer: Any) -> None:
        self._strategy.backward(loss, actor, optimizer)

    def step(self, actor: Any, optimizer: Any) -> None:
        self._strategy.optimizer_step(optimizer, actor, None)


def _make(choices: Choices, config: ReplayConfig, world_size: int, training: Any) -> Any:
    if not config.deepcompile:
        for part, needed in _OF_DEEPCOMPILE.items():
            _import_without(part, needed)
    try:
        strategy = _imported("openrlhf.utils.deepspeed", without="datasets").DeepspeedStrategy
    except ImportError as error:
        raise EnvironmentProblem(
            f"OpenRLHF's DeepSpeed strategy cannot be imported: {error}",
            hint="run `actordbg doctor` to see what is missing, or pass `--backend plain`, which needs no DeepSpeed engine",
        ) from error
    bf16, ring = choices.dtype == "bf16", config.ring
    flat = {"param_dtype": choices.dtype, "bf16": bf16, "deepcompile": config.deepcompile, "ring_attn_size": ring}
    train = argparse.Namespace(dynamic_batch_enable=False)
    options = {
        "seed": choices.seed,
        "max_norm": training.max_norm,
        "micro_train_batch_size": 1,
        "train_batch_size": training.accumulation * world_size // ring,
        "zero_stage": config.zero_stage,
        "args": argparse.Namespace(local_rank=-1, **flat, ds=argparse.Namespace(**flat), train=train),
    }
    takes_bf16 = "bf16" in inspect.signature(strategy.__init__).parameters
    return strategy(**options, **({"bf16": bf16} if takes_bf16 else {}))


_OF_DEEPCOMPILE = {"deepspeed.compile.inductor": "torch._inductor.lowering", "deepspeed.compile.backend": "functorch.compile"}
"""Modules of DeepSpeed's that DeepCompile needs, and what they import from torch for it: half of DeepSpeed's import. They do
without where that cannot be imported.
"""


def _import_without(module: str, needed: str) -> None:
    """Let `module` find, when it is imported, that `needed` cannot be imported."""
    if needed not in sys.modules and module not in sys.modules:
        before_import(module, lambda: sys.modules.update({needed: None}))  # type: ignore[dict-item]
        after_import(module, lambda _: sys.modules.pop(needed))


NAME = "gathered K/V (stand-in)"
_MODULE = "ring_flash_attn"


@dataclass
class _Ring:
    """The ring of this process. `cu_seqlens`: int32 [rows + 1], row borders of the whole packed batch."""

    group: dist.ProcessGroup | None = None
    cu_seqlens: Tensor | None = None
    original: Any = None
    masks: dict[str, Tensor] = field(default_factory=dict)


_RING = _Ring()


def prepare_ring(attn: str) -> None:
    """Make `import ring_flash_attn` provide the kernel for this attention. Call it before OpenRLHF's strategy imports that."""
    if attn == "sdpa" and _MODULE not in sys.modules:
        stand_in(
            _MODULE,
            substitute_hf_flash_attn=substitute_hf_flash_attn,
            update_ring_flash_attn_params=update_ring_flash_attn_params,
        )


def open_ring(group: Any, attn: str) -> Any:
    """Set up a ring like OpenRLHF's strategy (`setup_ring_attn`), for a backend without that strategy. Returns the group."""
    from openrlhf.models import ring_attn_utils

    prepare_ring(attn)
    ring_attn_utils.set_ring_attn_group(group)
    if hasattr(ring_attn_utils, "patch_transformers_for_ring_flash_attn"):
        ring_attn_utils.patch_transformers_for_ring_flash_attn()
    import_module(_MODULE).substitute_hf_flash_attn(group, 1)
    return group


def ring_kernel() -> str:
    """Return which kernel the open ring runs."""
    return _MODULE if _RING.group is None else NAME


def close_ring() -> None:
    """Remove the group and the stand-in from this process."""
    from openrlhf.models.ring_attn_utils import set_ring_attn_group
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    set_ring_attn_group(None)
    if _RING.group is not None:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = _RING.original
        _RING.group = _RING.cu_seqlens = _RING.original = None
        _RING.masks.clear()


def substitute_hf_flash_attn(process_group: dist.ProcessGroup, heads_k_stride: int = 1) -> None:
    """Replace transformers' sdpa by ring attention. The stride is ignored: it only affects the real kernel's memory."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if _RING.group is None:
        _RING.original = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = ring_attention
    _RING.group = process_group


def update_ring_flash_attn_params(cu_seqlens: Tensor, process_group: dist.ProcessGroup) -> None:
    """Set the row borders of the next forward: int32 [rows + 1] over the whole ring's tokens, with padding in the last row."""
    _RING.group, _RING.cu_seqlens = process_group, cu_seqlens
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
    """Compute attention of this rank's tokens to those of the whole ring; transformers calls this.

    query [1, heads, T, D]; key, value [1, kv heads, T, D], T tokens of this rank; returns [1, T, heads, D]. transformers' mask
    covers only this rank's tokens and is not used; the mask here includes a layer's sliding window.
    """
    if _RING.group is None or _RING.cu_seqlens is None:
        raise RuntimeError("ring attention was called without a group or without the borders of the packed rows")
    # of every rank, in order, with gradients: [1, heads, ring * T, D]
    key, value = (all_gather(own.permute(2, 0, 1, 3).contiguous(), _RING.group).permute(1, 2, 0, 3) for own in (key, value))
    tokens, window = query.shape[2], kwargs.get("sliding_window")
    made_for = f"{tokens} {query.device} {window}"
    if made_for not in _RING.masks:  # every layer with that window has this mask
        size, rank = dist.get_world_size(_RING.group), dist.get_rank(_RING.group)
        _RING.masks[made_for] = visible(_RING.cu_seqlens.to(query.device), tokens, rank, size, window)[None, None]
    mask, grouped = _RING.masks[made_for], key.shape[1] != query.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None


def visible(cu_seqlens: Tensor, tokens: int, rank: int, size: int, window: int | None) -> Tensor:
    """Return a bool mask [T, size * T]: the ring's tokens that each of this rank's T tokens attends to.

    A token attends to itself and earlier tokens of its row (borders: int [rows + 1]); with a window, only to the last `window` of
    them, including itself, like transformers' sliding masks.
    """
    places = torch.arange(size * tokens, device=cu_seqlens.device)
    rows = torch.bucketize(places, cu_seqlens[1:], right=True)
    own = slice(rank * tokens, (rank + 1) * tokens)
    back = places[own, None] - places
    seen = (rows[own, None] == rows) & (back >= 0)
    return seen if window is None else seen & (back < window)
