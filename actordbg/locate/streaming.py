"""Models of which only one decoder layer is in memory: each is read from the checkpoint when it runs, and freed for the next.

    streamed = Streamed(model_without_weights, Checkpoint(path, model_without_weights), torch.float32, device)
    with streamed.under(recording):
        logits = streamed.model(ids).logits             # layers 0, 1, 2, ... one after the other
        loss.backward()                                 # each is read again, and runs again, before its backward

What lies outside of the decoder layers (embedding, last norm, head) stays. The modules, and their parameters as objects, are
those of a whole model, so hooks, ties and gradients work as they do there: a parameter of a layer that is not in memory is a
single element, expanded to its shape. Tensors are converted by transformers' own loader, which merges experts and renames them.
"""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from actordbg.actor.backends.fsdp2 import decoder_layers
from actordbg.actor.forward_outcome import trim
from actordbg.actor.hub_model import safetensors_of
from actordbg.actor.truth_model import in_double
from actordbg.base.errors import Unsupported
from actordbg.locate.forced_forward import Hooks
from actordbg.locate.places import layer_of, places_of

_Run = Callable[[Sequence[Any]], Any]
"""Runs a layer on its inputs, flattened."""
_Gradients = Callable[[Sequence[Any]], Sequence[Tensor]]
"""The gradients of a layer's first outputs."""


class Checkpoint:
    """The tensors of the checkpoint at `path`, by decoder layer. Unsupported, with the reason, if it has to be loaded whole.

    target: the model without weights, in the dtype that weights are rounded to. resident: elements that are in memory at once.
    """

    def __init__(self, path: str, target: Any) -> None:
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightConverter, rename_source_key
        except ImportError:
            raise Unsupported("this transformers loads whole checkpoints only") from None
        from safetensors import safe_open

        layers = decoder_layers(target)
        self.layers = {name for name, module in target.named_modules() if any(module is layer for layer in layers)}
        if not layers or len(layers) != len(self.layers):
            raise Unsupported("the model has no list of decoder layers")
        if any(getattr(target.config, name, None) for name in ("quantization_config", "transformers_weights")):
            raise Unsupported("the checkpoint is quantized, or names its files itself")
        self._target, state = target, target.state_dict()
        named = dict(target.named_parameters())
        owners: dict[int, set[str]] = defaultdict(set)
        for name, parameter in target.named_parameters(remove_duplicate=False):
            owners[id(parameter)].add(self._layer(name))
        if any(len(each) > 1 for each in owners.values()):
            raise Unsupported("its decoder layers share parameters")
        named |= {name: buffer for name, buffer in target.named_buffers() if name in state}
        self._meta: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in named.items():
            self._meta[self._layer(name)][name] = tensor
        sizes = {layer: sum(each.numel() for each in own.values()) for layer, own in self._meta.items()}
        self.resident = sizes.pop("", 0) + max(sizes.values())
        self._mapping = get_model_conversion_mapping(target)
        converters = [each for each in self._mapping if isinstance(each, WeightConverter)]
        renamings = [each for each in self._mapping if each not in converters]
        patterns = {source: each.target_patterns for each in converters for source in each.source_patterns}
        self._keys: dict[str, list[tuple[str, str]]] = defaultdict(list)  # by layer: file and key
        missing, files = set(named), safetensors_of(path)
        if not files:
            raise Unsupported("the checkpoint has an adapter, or no safetensors files")
        for file in files:
            with safe_open(file, framework="pt") as opened:
                keys = sorted(opened.keys())
            for key in keys:
                name, pattern = rename_source_key(key, renamings, converters, target.base_model_prefix, state)
                kinds = patterns[pattern] if pattern else [name]
                into = {name.replace(kinds[0], kind) for kind in kinds}
                if any(each in named for each in into):
                    missing -= into
                    self._keys[self._layer(name)].append((str(file), key))
                elif any(each in state for each in into):
                    raise Unsupported(f"the checkpoint has {key}, which is tied to another tensor")
        if missing:
            raise Unsupported(f"{min(missing)} is not in safetensors files of the checkpoint")

    def _layer(self, name: str) -> str:
        layer = layer_of(name)
        return layer if layer in self.layers else ""

    def read(self, layer: str) -> dict[str, Tensor]:
        """Read a layer's parameters and stored buffers, on the CPU, in the dtype that `from_pretrained` gives them."""
        from safetensors import safe_open
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig
        from transformers.utils import logging

        target, bars = self._target, logging.is_progress_bar_enabled()
        dtype = next(target.parameters()).dtype
        plan = target._get_dtype_plan(dtype)
        config = LoadStateDictConfig(dtype=dtype, dtype_plan=plan, weight_mapping=self._mapping)
        logging.disable_progress_bar()
        try:
            with contextlib.ExitStack() as files, torch.no_grad(), torch._C.DisableTorchFunction():
                names = {file for file, _ in self._keys[layer]}
                opened = {file: files.enter_context(safe_open(file, framework="pt")) for file in names}
                slices = {key: opened[file].get_slice(key) for file, key in self._keys[layer]}
                convert_and_load_state_dict_in_model(target, slices, config, None)
            return {name: _at(target, name).detach() for name in self._meta[layer]}
        finally:
            for name, tensor in self._meta[layer].items():
                holder, _, leaf = name.rpartition(".")
                setattr(target.get_submodule(holder), leaf, tensor)
            if bars:
                logging.enable_progress_bar()


class Streamed:
    """A model in `dtype` (None: the checkpoint's, as rounded) on `device`, made of one without weights."""

    hooks: Hooks

    def __init__(self, model: Any, source: Checkpoint, dtype: torch.dtype | None, device: torch.device) -> None:
        self.model, self._source, self._dtype, self._device = model, source, dtype, device
        self._here = ""
        for name, parameter in list(model.named_parameters()):
            holder, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(holder), leaf, torch.nn.Parameter(_absent(parameter, device)))
        model.tie_weights()
        model.to(device).eval()
        self._put(source.read(""))
        for name in source.layers:
            layer = model.get_submodule(name)
            layer.forward = functools.wraps(layer.forward)(partial(self._forward, name, layer.forward))

    @contextlib.contextmanager
    def under(self, hooks: Hooks) -> Iterator[None]:
        """Hook the model's places while the block lasts; a backward needs it."""
        self.hooks = hooks
        with hooks.on(places_of(self.model)):
            yield

    def bring(self, name: str) -> None:
        """Read the layer that a tensor or module belongs to, and free the layer before it; nothing for what always stays."""
        layer = self._source._layer(name)
        if layer in ("", self._here):
            return
        self._free()
        self._put(self._source.read(layer))
        self._here = layer

    def close(self) -> None:
        """Free the layer, and let go of the model."""
        self._free()
        for name in self._source.layers:
            del self.model.get_submodule(name).forward

    def _free(self) -> None:
        layer, self._here = self._here, ""
        if layer:
            for parameter in self.model.get_submodule(layer).parameters():
                parameter.data = _absent(parameter, self._device)
            trim()

    def _put(self, tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            dtype = self._dtype if tensor.is_floating_point() else None
            _at(self.model, name).data = tensor.to(self._device).to(dtype or tensor.dtype)

    def _forward(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))

        def run(leaves: Sequence[Any]) -> Any:
            self.bring(name)
            args, kwargs = tree_unflatten(leaves, spec)
            return forward(*args, **kwargs)

        if not torch.is_grad_enabled():
            return run(leaves)
        floats = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if not any(leaves[at].requires_grad for at in floats):  # such as embeddings that are not trained
            leaves[floats[0]] = leaves[floats[0]].detach().requires_grad_()
        return _Layer.apply(run, self, name, *leaves)  # type: ignore[no-untyped-call]

    def with_graph(self, run: _Run, leaves: Sequence[Any], needed: Sequence[bool], back: _Gradients) -> tuple[Any, list[Any]]:
        """Run a layer and its backward. Return its outputs, and the gradients of its inputs `leaves`. back: its outputs' own."""
        pairs = list(zip(leaves, needed, strict=True))
        own = [leaf.detach().to(self._device).requires_grad_() if need else leaf for leaf, need in pairs]
        wide = in_double(self._dtype or torch.float32)  # a backward does not run in the modes around it
        with torch.enable_grad(), self.hooks.own_graph(), wide:
            outputs = run(own)
            parts = outputs if isinstance(outputs, tuple) else (outputs,)
            known = [(part, gradient) for part, gradient in zip(parts, back(parts), strict=False) if _has_graph(part)]
            torch.autograd.backward([part for part, _ in known], [gradient for _, gradient in known])
        gradients = [leaf.grad if need else None for leaf, need in zip(own, needed, strict=True)]
        return tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, outputs), gradients


class _Layer(torch.autograd.Function):
    """Runs a layer in the forward without a graph, and in the backward again, with one, from its inputs `leaves`.

    If the gradient that comes back is forced, it is known in the forward: then the layer's backward follows its forward at once.
    """

    @staticmethod
    def forward(ctx: Any, run: _Run, streamed: Streamed, name: str, *leaves: Any) -> Any:
        needed = ctx.needs_input_grad[3:]
        if streamed.hooks.forces:
            outputs, ctx.gradients = streamed.with_graph(run, leaves, needed, partial(streamed.hooks.gradients, name))
            return outputs
        kept = [streamed.hooks.keep(leaf) if need else leaf for leaf, need in zip(leaves, needed, strict=True)]
        ctx.gradients, ctx.again = None, partial(streamed.with_graph, run, kept, needed)
        return run(leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, None, *(ctx.gradients or ctx.again(lambda _: gradients)[1])


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _at(model: Any, name: str) -> Tensor:
    holder, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(holder), leaf)
    return tensor


def _absent(parameter: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of a parameter's shape and dtype with the memory of one element."""
    return torch.empty(1, dtype=parameter.dtype, device=device).expand(parameter.shape)
