"""The table of causes: each is a row of `BANK`, and a recipe for another row is in docs/how-to/read-an-explanation.md.

A cause has a *size*, and the size at which nothing is wrong is the model's `own` (its epsilon, its theta, a factor of 1). The
truth's log-probs are computed at each of the sizes to try, in one of two ways:

* `closed`: from the logits of the truth's forward, in closed form: nothing else is computed;
* `planted`: the model is changed for one forward.

A continuous cause is fitted between the tried sizes too; others are tried at each size alone. `kin` says which causes move the
same log-probs in similar ways: where the tokens cannot tell causes apart, all are named.

Functions get torch's tensors and models, and call their methods only: the desk, which reads names and sentences, needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple


class Chosen(NamedTuple):
    """Sampled tokens of a row. labels: their ids [n]. first: bool [n], the first of the row. following: `labels`, but behind the
    row's end the first id of the next row.
    """

    labels: Any
    first: Any
    following: Any


Closed = Callable[[Any, Chosen], Any]
"""(logits [n, V], divided by the temperature; the sampled tokens) -> log-probs [n]."""
Laid = Iterator[tuple[Any, Any, Any]]
"""Arguments of each forward, [B, S]: its tokens (bool, row after row), their positions, those that attention sees (bool)."""


@dataclass(frozen=True)
class Cause:
    """A way to be wrong. said: the sentence, with {amount} and {own}. thread: a public report of it, "" if none is known.

    own: from the model, the size at which nothing is wrong; None if this model cannot have this cause. sizes: to try, absolute;
    near: to try, times `own`. along: the scale, log or linear, in which a continuous size is fitted between these; "": the cause
    is there or not. laid: gets the attended tokens and the sampled ones, bool [B, S]. expected: healthy in rollouts. spreads:
    log-probs' noise grows by own / size. rounds: a run in bf16 does it, and is right.
    """

    name: str
    kin: str
    said: str
    remedy: str
    thread: str
    own: Callable[[Any], float | None]
    closed: Callable[[Any, float], Closed] | None = None
    planted: Callable[[Any, float], AbstractContextManager[Any]] | None = None
    laid: Callable[[Any, Any, float], Laid] | None = None
    sizes: tuple[float, ...] = ()
    near: tuple[float, ...] = ()
    along: str = ""
    expected: bool = False
    spreads: bool = False
    rounds: bool = False

    def tried(self, own: float) -> list[float]:
        """Return the sizes to try beside a model's own, in order."""
        return sorted({*self.sizes, *(own * factor for factor in self.near)} - {own})


def _always(_model: Any) -> float:
    return 1.0


def _never(_model: Any) -> None:
    """Return that no model has this cause: it moves log-probs without one."""


def _nothing(_model: Any) -> float:
    """Return the size of what is absent from a healthy model."""
    return 0.0


# -- from the logits


def _chosen(logits: Any, labels: Any) -> Any:
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def _temperature(_model: Any, size: float) -> Closed:
    return lambda logits, chosen: _chosen(logits, chosen.labels) / size - (logits / size).logsumexp(-1)


def _unnormalised(_model: Any, _size: float) -> Closed:
    return lambda logits, chosen: _chosen(logits, chosen.labels)


def _next_row(_model: Any, _size: float) -> Closed:
    return lambda logits, chosen: _chosen(logits, chosen.following) - logits.logsumexp(-1)


def _rounded_logits(_model: Any, _size: float) -> Closed:
    return lambda logits, chosen: _chosen(logits.bfloat16().float().log_softmax(-1), chosen.labels)


def _rounded_scores(_model: Any, _size: float) -> Closed:
    return lambda logits, chosen: (_chosen(logits, chosen.labels) - logits.logsumexp(-1)).bfloat16()


def _renormalised(keep: Callable[[Any], Any]) -> Closed:
    """Return log p - log S. S is the mass of the tokens that the sampler kept: keep(sorted probabilities [n, V]) -> bool."""

    def log_probs(logits: Any, chosen: Chosen) -> Any:
        ordered = logits.softmax(-1).sort(-1, descending=True).values
        return _chosen(logits, chosen.labels) - logits.logsumexp(-1) - (ordered * keep(ordered)).sum(-1).log()

    return log_probs


def _top_p(_model: Any, size: float) -> Closed:
    return _renormalised(lambda ordered: ordered.cumsum(-1) - ordered < size)


def _top_k(_model: Any, size: float) -> Closed:
    return _renormalised(lambda ordered: (ordered > -1).cumsum(-1) <= size)


def _min_p(_model: Any, size: float) -> Closed:
    return _renormalised(lambda ordered: ordered >= size * ordered[..., :1])


def _end_ids(model: Any) -> list[int]:
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None) or getattr(model.config, "eos_token_id", None)
    return [ends] if isinstance(ends, int) else list(ends or ())


def _no_end(model: Any, _size: float) -> Closed:
    ends = _end_ids(model)

    def log_probs(logits: Any, chosen: Chosen) -> Any:
        total = logits.logsumexp(-1)
        removed = (logits[..., ends] - total[..., None]).exp().sum(-1)
        return _chosen(logits, chosen.labels) - total - (-removed).log1p() * chosen.first

    return log_probs


# -- from a changed model


@contextmanager
def _set(changes: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set (object, attribute, value) within the block."""
    with ExitStack() as undo:
        for holder, name, value in changes:
            undo.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        yield


def _having(model: Any, *names: str, within: str = "") -> list[tuple[Any, str]]:
    """Return (module, attribute) of the modules that have one of these attributes, with a value, and `within` in their class'
    name.
    """
    modules = [module for module in model.modules() if within in type(module).__name__.lower()]
    return [(module, name) for module in modules for name in names if getattr(module, name, None) is not None]


def _first_value(holders: list[tuple[Any, str]]) -> float | None:
    return next((float(getattr(module, name)) for module, name in holders), None)


def _norms(model: Any) -> list[tuple[Any, str]]:
    return _having(model, "variance_epsilon", "eps", within="norm")


def _epsilon(model: Any, size: float) -> AbstractContextManager[None]:
    return _set([(module, name, size) for module, name in _norms(model)])


def _scaled(model: Any) -> list[Any]:
    return [module for module, name in _having(model, "scaling") if isinstance(getattr(module, name), float)]


def _attention(model: Any, size: float) -> AbstractContextManager[None]:
    return _set([(module, "scaling", module.scaling * size) for module in _scaled(model)])


def _ropes(model: Any) -> list[Any]:
    return [module for module, _ in _having(model, "inv_freq")]


def _theta_of(model: Any) -> float | None:
    """Return theta where all angles follow from it: one rotary embedding, of the default kind."""
    rope = getattr(model.config, "rope_parameters", None) or getattr(model.config, "rope_scaling", None) or {}
    theta = rope.get("rope_theta") or getattr(model.config, "rope_theta", None)
    plain = len(_ropes(model)) == 1 and rope.get("rope_type", "default") == "default"
    return float(theta) if plain and theta else None


def _theta(model: Any, size: float) -> AbstractContextManager[None]:
    (rope,), own = _ropes(model), _theta_of(model) or size
    return _set([(rope, "inv_freq", rope.inv_freq ** (math.log(size) / math.log(own)))])


def _angles(model: Any, size: float) -> AbstractContextManager[None]:
    return _set([(rope, "inv_freq", rope.inv_freq / size) for rope in _ropes(model)])


def _rounded_angles(model: Any, _size: float) -> AbstractContextManager[None]:
    return _set([(rope, "inv_freq", rope.inv_freq.bfloat16().to(rope.inv_freq.dtype)) for rope in _ropes(model)])


@contextmanager
def _narrow_head(model: Any, _size: float) -> Iterator[None]:
    from torch._C import DisableTorchFunction  # the truth's own mode would widen the casts

    def narrow(module: Any, inputs: Any, output: Any) -> Any:
        with DisableTorchFunction():
            return (inputs[0].bfloat16() @ module.weight.bfloat16().T).to(output.dtype)

    hook = model.get_output_embeddings().register_forward_hook(narrow)
    yield
    hook.remove()


def _window_of(model: Any) -> float | None:
    window = getattr(model.config, "sliding_window", None)
    in_use = "sliding_attention" in (getattr(model.config, "layer_types", None) or ["sliding_attention"])
    return float(window) if window and in_use and getattr(model.config, "use_sliding_window", True) else None


def _window(model: Any, size: float) -> AbstractContextManager[None]:
    return _set([(model.config, "sliding_window", int(size))])


_CAPS = ("final_logit_softcapping", "attn_logit_softcapping")


def _cap_of(model: Any) -> float | None:
    return next((0.0 for name in _CAPS if getattr(model.config, name, None)), None)


def _uncapped(model: Any, _size: float) -> AbstractContextManager[None]:
    attributes = [(holder, name, None) for holder, name in _having(model, *_CAPS)]
    return _set([*attributes, *((model.config, name, None) for name in _CAPS if getattr(model.config, name, None))])


def _activations(model: Any) -> list[tuple[Any, str]]:
    kinds = ("silu", "gelu")
    return [pair for pair in _having(model, "act_fn") if any(kind in type(pair[0].act_fn).__name__.lower() for kind in kinds)]


def _other_activation(model: Any, size: float) -> AbstractContextManager[None]:
    """Set gelu where the model has silu, by its tanh for a size of 1, exact for 2; else silu."""
    from torch.nn import GELU, SiLU

    gelu = GELU(approximate="tanh" if size == 1 else "none")
    return _set([
        (holder, name, gelu if "silu" in type(holder.act_fn).__name__.lower() else SiLU())
        for holder, name in _activations(model)
    ])  # fmt: skip


def _adapters(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_disable_adapters") and not module._disable_adapters]


@contextmanager
def _without_adapters(model: Any, _size: float) -> Iterator[None]:
    layers = _adapters(model)
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


def _together(attended: Any, _sampled: Any, size: float) -> Laid:
    yield attended, _positions(attended), attended


def _running_on(attended: Any, _sampled: Any, size: float) -> Laid:
    yield attended, attended.flatten().cumsum(0).view(attended.shape) - 1, attended


def _with_padding(attended: Any, _sampled: Any, size: float) -> Laid:
    """Let rows see their padding, at the position 0 (size 1), 1 (the trainer's, size 2), or in the order of columns (size 3)."""
    everything, positions = attended | True, _positions(attended)
    positions = (positions, positions * attended + ~attended, _positions(everything))[int(size) - 1]
    yield from ((row, positions, everything) for row in _alone(everything))


def _without_prompts(attended: Any, sampled: Any, size: float) -> Laid:
    yield from ((row, _positions(attended), sampled) for row in _alone(attended))


SHIFT, ROWS, PLACEHOLDER, WEIGHTS, NAN = "shift", "other rows", "placeholder", "weights", "not finite"

BANK: tuple[Cause, ...] = (
    Cause(
        "temperature", "temperature",
        "the temperature was {amount}, not {own}",
        "give both sides the same temperature, and log-probs after it (vLLM: logprobs_mode processed_logprobs)",
        "trl#4159",
        _always, closed=_temperature, near=tuple(2 ** (step / 12) for step in range(-13, 14)), sizes=(0.1, 0.2, 0.3, 3, 5, 10),
        along="log", spreads=True,
    ),
    Cause(
        "top-p", "sampling",
        "log-probs were renormalized to the nucleus of top-p {amount}",
        "request log-probs before top-p, or train on the same nucleus",
        "trl#6789",
        _always, closed=_top_p, sizes=(0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999),
    ),
    Cause(
        "top-k", "sampling",
        "log-probs were renormalized to the {amount} likeliest tokens (top-k)",
        "request log-probs before top-k, or set top-k to -1",
        "trl#6789",
        _nothing, closed=_top_k, sizes=(1, 5, 10, 20, 32, 40, 50, 64, 100, 128, 200, 256),
    ),
    Cause(
        "min-p", "sampling",
        "log-probs were renormalized to tokens of at least {amount} times the largest probability (min-p)",
        "request log-probs before min-p, or set min-p to 0",
        "trl#6789",
        _nothing, closed=_min_p, sizes=(0.01, 0.02, 0.05, 0.1, 0.2),
    ),
    Cause(
        "min-tokens", "sampling",
        "the first token of each answer was sampled without the end token (min_tokens)",
        "nothing to fix: -log(1 - p_eos) is what min_tokens=1 adds; pass min_tokens=0 to remove it",
        "",
        lambda model: 0.0 if _end_ids(model) else None, closed=_no_end, sizes=(1,), expected=True,
    ),
    Cause(
        "no normalization", "sampling",
        "logits stand for log-probs: they were not normalized",
        "subtract the logsumexp of the logits (log_softmax), in fp32",
        "verl#2656",
        _nothing, closed=_unnormalised, sizes=(1,),
    ),
    Cause(
        "next row's label", "alignment",
        "the label at the end of a row is the first token of the next packed row",
        "shift labels within each row, or leave the end of each row out of the loss",
        "verl#6475",
        _nothing, closed=_next_row, sizes=(1,),
    ),
    Cause(
        "packed rows", "packing",
        "packed rows saw each other: attention did not know where rows begin",
        "pass the borders of rows (cu_seqlens) or positions that restart, use_cache=False and no mask; or do not pack",
        "AReaL#1442",
        _nothing, laid=_together, sizes=(1,),
    ),
    Cause(
        "positions run on", "packing",
        "positions ran on over packed rows, so rows saw each other",
        "let positions begin at 0 in each packed row",
        "verl#1381",
        _nothing, laid=_running_on, sizes=(1,),
    ),
    Cause(
        "padding", "masks",
        "rows saw their padding: the attention mask was not applied",
        "pass the attention mask of the whole batch to the model",
        "verl#6280",
        _nothing, laid=_with_padding, sizes=(1, 2, 3),
    ),
    Cause(
        "loss mask", "masks",
        "answers did not see their prompts: the attention mask was that of the loss",
        "build the attention mask from the padding, not from the loss mask",
        "verl#6278",
        _nothing, laid=_without_prompts, sizes=(1,),
    ),
    Cause(
        "norm epsilon", "norms",
        "the norms' epsilon was {amount}, not {own}",
        "load the norms' epsilon from the checkpoint's config.json",
        "",
        lambda model: _first_value(_norms(model)), planted=_epsilon, sizes=(1e-6, 1e-5, 1e-4, 1e-3), along="linear",
    ),
    Cause(
        "attention scale", "attention",
        "the attention's scale was {amount} times the model's",
        "compare the softmax scale of the attention kernel with 1/sqrt(head_dim), or the config's own",
        "",
        lambda model: 1.0 if _scaled(model) else None, planted=_attention, near=(0.5, 0.7, 0.85, 0.95, 1.05, 1.2, 1.4, 2),
        along="log",
    ),
    Cause(
        "rope theta", "positions",
        "rope theta was {amount}, not {own}",
        "compare rope_theta of both sides (config.json, and overrides of the engine)",
        "",
        _theta_of, planted=_theta, sizes=(1e4, 1e5, 5e5, 1e6, 5e6, 1e7), near=(0.9, 1.1),
        along="log",
    ),
    Cause(
        "rope scaling", "positions",
        "positions were divided by {amount}",
        "compare rope_scaling of both sides (config.json, and overrides of the engine)",
        "",
        lambda model: 1.0 if _ropes(model) else None, planted=_angles,
        sizes=(0.25, 0.5, 0.97, 1.03, 1.5, 2, 3, 4, 8, 16, 32), along="log",
    ),
    Cause(
        "inv_freq in bf16", "positions",
        "the rotary embedding's inv_freq was rounded to bf16",
        "keep the buffer in fp32: cast parameters, not the whole module",
        "",
        lambda model: 0.0 if _ropes(model) else None, planted=_rounded_angles, sizes=(1,),
    ),
    Cause(
        "head in bf16", "precision",
        "the output head was computed in bf16",
        "compute lm_head in fp32 on both sides (vLLM: hf_overrides head_dtype)",
        "vLLM PR#48390",
        lambda model: None if model.get_output_embeddings() is None else 0.0, planted=_narrow_head, sizes=(1,), rounds=True,
    ),
    Cause(
        "logits in bf16", "precision",
        "the log-softmax was taken of logits in bf16",
        "convert the logits to fp32 before the log-softmax, and keep autocast off there",
        "",
        _nothing, closed=_rounded_logits, sizes=(1,), rounds=True,
    ),
    Cause(
        "log-probs in bf16", "precision",
        "log-probs were rounded to bf16",
        "keep log-probs in fp32: a difference of two of them is the ratio's logarithm",
        "",
        _nothing, closed=_rounded_scores, sizes=(1,), rounds=True,
    ),
    Cause(
        "sliding window", "attention",
        "the attention's window of {own} tokens was not applied",
        "compare sliding_window of both sides; an engine may drop it",
        "",
        _window_of, planted=_window, sizes=(2**30,),
    ),
    Cause(
        "soft cap", "attention",
        "logits were not soft-capped",
        "use an attention kernel and a head that apply the model's soft caps",
        "",
        _cap_of, planted=_uncapped, sizes=(1,),
    ),
    Cause(
        "activation", "mlp",
        "the MLPs' activation was gelu where the model has silu, or silu where it has gelu",
        "compare hidden_act of both sides (config.json, and fused kernels)",
        "",
        lambda model: 0.0 if _activations(model) else None, planted=_other_activation, sizes=(1, 2),
    ),
    Cause(
        "adapter", "weights",
        "the adapter was not applied: these are the base model's",
        "merge the adapter, or send it to the engine at each sync",
        "verl#7495",
        lambda model: 0.0 if _adapters(model) else None, planted=_without_adapters, sizes=(1,),
    ),
    Cause(
        SHIFT, "alignment",
        "log-probs are shifted by {amount} tokens in their rows",
        "align log-probs with tokens: the log-prob at t is of the id at t + 1",
        "ms-swift PR#8196",
        _never,
    ),
    Cause(
        ROWS, "alignment",
        "{amount} rows have the log-probs of other rows",
        "match rollouts and rows by id, not by order",
        "open-instruct#1473",
        _never,
    ),
    Cause(
        PLACEHOLDER, "alignment",
        "0.0 stands for the log-probs of {amount} tokens under the action mask",
        "mask tokens that were not sampled, such as an appended end token",
        "SkyRL PR#2148",
        _never,
    ),
    Cause(
        WEIGHTS, "weights",
        "the weights were those of {model}",
        "synchronize the weights before each rollout, and check that they arrive",
        "trl#5312",
        _never,
    ),
    Cause(
        NAN, "weights",
        "no token has a finite log-prob, and all are finite with these weights: a weight was NaN or infinite then",
        "find the step that made it: record with `dump enable --on nan`, which keeps the first such call",
        "OpenRLHF#1120",
        _never,
    ),
)  # fmt: skip
"""All causes. The last five move log-probs without a model, or are given as further models: `fit` knows how."""
BY_NAME = {cause.name: cause for cause in BANK}
