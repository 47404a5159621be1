"""What each cause of the bank computes: log-probs in closed form from logits, changes of the model, other arrangements of rows.

Functions get torch's tensors and models, and call their methods only: the desk, which reads names and sentences, needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from actordbg.actor.other_log_probs import Chosen, Closed, Laid

# -- from the logits


def _chosen(logits: Any, labels: Any) -> Any:
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def temperature(_model: Any, size: float) -> Closed:
    return lambda logits, chosen: _chosen(logits, chosen.labels) / size - (logits / size).logsumexp(-1)


def _always(log_probs: Closed) -> Callable[[Any, float], Closed]:
    """Return log-probs that are the same for every model and size."""
    return lambda _model, _size: log_probs


unnormalised = _always(lambda logits, chosen: _chosen(logits, chosen.labels))
next_row = _always(lambda logits, chosen: _chosen(logits, chosen.following) - logits.logsumexp(-1))
rounded_logits = _always(lambda logits, chosen: _chosen(logits.bfloat16().float().log_softmax(-1), chosen.labels))
narrow_softmax = _always(lambda logits, chosen: _chosen(logits.bfloat16().log_softmax(-1), chosen.labels))
rounded_scores = _always(lambda logits, chosen: (_chosen(logits, chosen.labels) - logits.logsumexp(-1)).bfloat16())


def _renormalised(keep: Callable[[Any], Any]) -> Closed:
    """Return log p - log S. S is the mass of the tokens that the sampler kept: keep(sorted probabilities [n, V]) -> bool."""

    def log_probs(logits: Any, chosen: Chosen) -> Any:
        ordered = logits.softmax(-1).sort(-1, descending=True).values
        return _chosen(logits, chosen.labels) - logits.logsumexp(-1) - (ordered * keep(ordered)).sum(-1).log()

    return log_probs


def top_p(_model: Any, size: float) -> Closed:
    return _renormalised(lambda ordered: ordered.cumsum(-1) - ordered < size)


def top_k(_model: Any, size: float) -> Closed:
    return _renormalised(lambda ordered: (ordered > -1).cumsum(-1) <= size)


def min_p(_model: Any, size: float) -> Closed:
    return _renormalised(lambda ordered: ordered >= size * ordered[..., :1])


def end_ids(model: Any) -> list[int]:
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None) or getattr(model.config, "eos_token_id", None)
    return [ends] if isinstance(ends, int) else list(ends or ())


def no_end(model: Any, _size: float) -> Closed:
    ends = end_ids(model)

    def log_probs(logits: Any, chosen: Chosen) -> Any:
        total = logits.logsumexp(-1)
        removed = (logits[..., ends] - total[..., None]).exp().sum(-1)
        return _chosen(logits, chosen.labels) - total - (-removed).log1p() * chosen.first

    return log_probs


# -- from a changed model

Change = AbstractContextManager[None]
"""A model is changed within it."""
Holders = list[tuple[Any, str]]
"""Objects, and the names of their attributes."""


@contextmanager
def _set(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set (object, attribute, value) within the block."""
    with ExitStack() as undo:
        for holder, name, value in changes:
            undo.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        yield


def _having(model: Any, *names: str, within: str = "") -> Holders:
    """Return (module, attribute) of the modules that have one of these attributes, with a value, and `within` in their class'
    name.
    """
    modules = [module for module in model.modules() if within in type(module).__name__.lower()]
    return [(module, name) for module in modules for name in names if getattr(module, name, None) is not None]


def first_value(holders: Holders) -> float | None:
    return next((float(getattr(module, name)) for module, name in holders), None)


def norms(model: Any) -> Holders:
    return _having(model, "variance_epsilon", "eps", within="norm")


def epsilon(model: Any, size: float) -> Change:
    return _set([(module, name, size) for module, name in norms(model)])


def scaled(model: Any) -> list[Any]:
    return [module for module, name in _having(model, "scaling") if isinstance(getattr(module, name), float)]


def attention(model: Any, size: float) -> Change:
    return _set([(module, "scaling", module.scaling * size) for module in scaled(model)])


def ropes(model: Any) -> list[Any]:
    return [module for module, _ in _having(model, "inv_freq")]


def theta_of(model: Any) -> float | None:
    """Return theta where all angles follow from it: one rotary embedding, of the default kind."""
    rope = getattr(model.config, "rope_parameters", None) or getattr(model.config, "rope_scaling", None) or {}
    theta = rope.get("rope_theta") or getattr(model.config, "rope_theta", None)
    plain = len(ropes(model)) == 1 and rope.get("rope_type", "default") == "default"
    return float(theta) if plain and theta else None


def theta(model: Any, size: float) -> Change:
    (rope,), own = ropes(model), theta_of(model) or size
    return _set([(rope, "inv_freq", rope.inv_freq ** (math.log(size) / math.log(own)))])


def angles(model: Any, size: float) -> Change:
    return _set([(rope, "inv_freq", rope.inv_freq / size) for rope in ropes(model)])


def rounded_angles(model: Any, _size: float) -> Change:
    return _set([(rope, "inv_freq", rope.inv_freq.bfloat16().to(rope.inv_freq.dtype)) for rope in ropes(model)])


@contextmanager
def narrow_head(model: Any, _size: float) -> Iterator[None]:
    from torch._C import DisableTorchFunction  # the truth's own mode would widen the casts

    def narrow(module: Any, inputs: Any, output: Any) -> Any:
        with DisableTorchFunction():
            logits = inputs[0].bfloat16() @ module.weight.bfloat16().T
            return (logits if module.bias is None else logits + module.bias.bfloat16()).to(output.dtype)

    head = model.get_output_embeddings()
    head = getattr(head, "base_layer", head)  # its adapter is added behind it, and stays
    hook = head.register_forward_hook(narrow)
    yield
    hook.remove()


def window_of(model: Any) -> float | None:
    window = getattr(model.config, "sliding_window", None)
    in_use = "sliding_attention" in (getattr(model.config, "layer_types", None) or ["sliding_attention"])
    return float(window) if window and in_use and getattr(model.config, "use_sliding_window", True) else None


def window(model: Any, size: float) -> Change:
    return _set([(model.config, "sliding_window", int(size))])


_CAPS = ("final_logit_softcapping", "attn_logit_softcapping")


def cap_of(model: Any) -> float | None:
    return next((0.0 for name in _CAPS if getattr(model.config, name, None)), None)


def uncapped(model: Any, _size: float) -> Change:
    attributes = [(holder, name, None) for holder, name in _having(model, *_CAPS)]
    return _set([*attributes, *((model.config, name, None) for name in _CAPS if getattr(model.config, name, None))])


def activations(model: Any) -> Holders:
    return [pair for pair in _having(model, "act_fn") if "silu" in _kind(pair[0]) or "gelu" in _kind(pair[0])]


def _kind(holder: Any) -> str:
    """Return the class name of a module's activation, in lower case."""
    return type(holder.act_fn).__name__.lower()


def other_activation(model: Any, size: float) -> Change:
    """Set gelu where the model has silu, by its tanh for a size of 1, exact for 2; else silu."""
    from torch.nn import GELU, SiLU

    gelu = GELU(approximate="tanh" if size == 1 else "none")
    return _set([(holder, name, gelu if "silu" in _kind(holder) else SiLU()) for holder, name in activations(model)])


def adapters(model: Any, part: Any = "") -> dict[str, Any]:
    """Return the modules with an adapter, by name: all, or those with `part` at the end of their name."""
    active = {name: module for name, module in model.named_modules() if getattr(module, "_disable_adapters", None) is False}
    if not part:
        return active
    return {name: module for name, module in active.items() if f".{name}".endswith(f".{part}")}


MOST_ADAPTED = 32
"""Modules with an adapter up to which each is a part of its own: a part costs a forward of the truth."""


def adapted(model: Any) -> list[str]:
    """Return the kinds of modules that have an adapter, such as `q_proj`, and, where they are few, each such module."""
    names = list(adapters(model))
    kinds = {name.rpartition(".")[2] for name in names}
    return sorted({*(kinds if len(kinds) > 1 else ()), *(names if 1 < len(names) <= MOST_ADAPTED else ())})


def scales(model: Any) -> list[float]:
    """Return the scale of each adapter of each module: LoRA's alpha / r."""
    return [scale for module in adapters(model).values() for scale in getattr(module, "scaling", {}).values()]


def adapter_scale(model: Any, size: float) -> Change:
    """Set the scales to `size` times their own, or to `size` if all are 0."""
    layers, known = [module for module in adapters(model).values() if hasattr(module, "scaling")], any(scales(model))
    given = [{name: size * (scale if known else 1.0) for name, scale in layer.scaling.items()} for layer in layers]
    return _set([(layer, "scaling", scaling) for layer, scaling in zip(layers, given, strict=True)])


@contextmanager
def without_adapters(model: Any, part: Any) -> Iterator[None]:
    """Disable the adapters of modules whose name ends with `part`; all of them for a size instead of a name."""
    layers = adapters(model, part if isinstance(part, str) else "").values()
    for layer in layers:
        layer.enable_adapters(False)
    yield
    for layer in layers:
        layer.enable_adapters(True)


# -- from rows that are given to the model in another way


def _positions(attended: Any) -> Any:
    """Return each token's position in its row, [B, S]; 0 in padding before it."""
    return (attended.cumsum(-1) - 1).clamp(min=0)


def _alone(where: Any) -> Iterator[Any]:
    """Yield each row's part of a mask [B, S]."""
    for row in range(len(where)):
        part = where & False
        part[row] = where[row]
        yield part


def together(attended: Any, _sampled: Any, size: float) -> Laid:
    yield attended, _positions(attended), attended


def running_on(attended: Any, _sampled: Any, size: float) -> Laid:
    counted = attended.flatten().cumsum(0).view(attended.shape)
    yield attended, counted - 1, attended


def with_padding(attended: Any, _sampled: Any, size: float) -> Laid:
    """Let rows see their padding, at the position 0 (size 1), 1 (the trainer's, size 2), or in the order of columns (size 3)."""
    everything, positions = attended | True, _positions(attended)
    positions = (positions, positions * attended + ~attended, _positions(everything))[int(size) - 1]
    yield from ((row, positions, everything) for row in _alone(everything))


def with_mask_of(attended: Any, _sampled: Any, size: float) -> Laid:
    """Let rows see what the row `size` before attends to; padding has the trainer's position 1."""
    positions, seen = _positions(attended) * attended + ~attended, attended.roll(int(size), 0)
    yield from ((row, positions, seen) for row in _alone(attended | True))


def without_prompts(attended: Any, sampled: Any, size: float) -> Laid:
    yield from ((row, _positions(attended), sampled) for row in _alone(attended))
