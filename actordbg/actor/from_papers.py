"""A second truth: each module of the truth's model against the formula of its paper, in fp64, with none of transformers' code.

The truth runs transformers' modules, so a fault in one of them (an edited installation, a kernel that replaces a module in every
model) is in the truth as well. One row runs through the truth's model; each module's output is compared with what its formula
makes of the outputs of the modules before it. Only the weights and the configuration are shared:

    embedding[ids], times sqrt(d) in Gemma
    RMSNorm: x / sqrt(mean(x^2) + eps) * w, or * (1 + w) in Gemma                     Zhang and Sennrich, arXiv:1910.07467
    rotary positions: pairs (i, i + d/2) turned by position * theta^(-2i/d)           Su et al., arXiv:2104.09864
        scaled linearly, or by wavelength as in Llama 3.1                             arXiv:2306.15595, arXiv:2407.21783
        scaled by parts (YaRN), or with a larger theta for long rows (dynamic NTK)    arXiv:2309.00071
    attention: softmax(q k^T / sqrt(d)) v, causal, heads of queries share keys        Ainslie et al., arXiv:2305.13245
        within a window; cap * tanh(scores / cap)                                     arXiv:2310.06825, arXiv:2408.00118
        RMSNorm of queries and keys                                                   arXiv:2505.09388
    gated product: down(silu(gate(x)) * up(x)), gelu in Gemma                         Shazeer, arXiv:2002.05202
    experts: the k likeliest of softmax(router(x)), weighed by their probabilities, in most models divided by their sum
        tokens whose last choice is a near tie are not judged                         arXiv:2401.04088

The unit of an error is what fp32 costs the formula, scaled to the truth's dtype. A model in half precision is held against its
formulas too: there the unit is what that dtype costs them, with norms, angles and softmax in fp32, as in a healthy model. So a
norm that loses its cast is seen, which no truth shows. A model is recognized by its class, its parameters' names and its
configuration; nothing is said of any other model.

Example:
    check = against_formulas(model, ids)        # None: not recognized
    check.differs                               # "transformers' own LlamaRMSNorm is wrong: model.norm is 1.05 times what ..."
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from actordbg.actor.truth_model import in_double
from actordbg.base.errors import machine_errno
from actordbg.base.units import plural
from actordbg.records.locate_record import FormulaCheck


def window_of(config: Any, index: int) -> int | None:
    """Return how many tokens a layer's attention sees, its own included; None: all before it."""
    types = getattr(config, "layer_types", None)
    slides = types is None or types[index] == "sliding_attention"
    return getattr(config, "sliding_window", None) if slides else None


def frequencies_of(rope: dict[str, Any], size: int, like: Tensor, longest: int) -> tuple[Tensor, float]:
    """Return the angle per position of each pair of dimensions, [size / 2], and what cosines and sines are multiplied by.

    like: the row's values [n, d]. longest: how many tokens of a row the model is made for.
    """
    theta, factor, kind = rope["rope_theta"], rope.get("factor") or 1.0, rope.get("rope_type", "default")
    original = rope.get("original_max_position_embeddings") or longest
    if kind == "dynamic":
        growth = torch.tensor(factor * max(1.0, len(like) / longest) - (factor - 1))  # in fp32, as the model's own theta
        theta = float(theta * growth ** (size / (size - 2)))
    frequencies: Tensor = theta ** (-torch.arange(0, size, 2, device=like.device, dtype=like.dtype) / size)
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((original * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    elif kind == "yarn":
        turns = (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1)
        low, high = (size * math.log(original / (each * 2 * math.pi)) / (2 * math.log(theta)) for each in turns)
        if rope.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        pair = torch.arange(size // 2, device=like.device, dtype=like.dtype)
        kept = 1 - ((pair - low) / ((high - low) or 0.001)).clamp(0, 1)
    else:
        return frequencies / (factor if kind == "linear" else 1.0), 1.0
    larger = rope.get("attention_factor") or (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
    return frequencies * (kept + (1 - kept) / factor), larger if kind == "yarn" else 1.0


def head_size_of(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def rope_of(config: Any, index: int) -> dict[str, Any] | None:
    """Return the parameters of a layer's rotary positions, which releases of transformers before 5 keep in two attributes.

    None where they are kept in yet another way.
    """
    of_types: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    if of_types is not None:
        return of_types if "rope_theta" in of_types else dict(of_types[config.layer_types[index]])
    if hasattr(config, "rope_local_base_freq"):
        return None
    scaling = dict(config.rope_scaling or {})
    return {"rope_theta": config.rope_theta, "rope_type": scaling.get("type", "default")} | scaling


MOST_TOKENS = 512
_LIMIT, _NARROW_LIMIT = 8.0, 1.15
_NEAR_TIE = 1e-3
"""Probabilities of experts that are nearer to each other than this part may change places by rounding."""
_LOGITS = 16
"""How many of the row's last tokens have their logits compared."""
_VOCABULARY_PART = 16384


@dataclass(frozen=True)
class _Kind:
    """What a class has beyond Llama's. attention: parameters beside its matrices. fused: one matrix for q, k and v, and one for
    gate and up. experts: how many experts there are, by the name of a setting.
    """

    attention: tuple[str, ...] = ()
    gemma: bool = False
    fused: bool = False
    experts: str = ""


_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
_KINDS = {
    "LlamaForCausalLM": _Kind(),
    "MistralForCausalLM": _Kind(),
    "Qwen2ForCausalLM": _Kind(("q_proj.bias", "k_proj.bias", "v_proj.bias")),
    "Qwen3ForCausalLM": _Kind(_HEAD_NORMS),
    "Gemma2ForCausalLM": _Kind(gemma=True),
    "Gemma3ForCausalLM": _Kind(_HEAD_NORMS, gemma=True),
    "Phi3ForCausalLM": _Kind(fused=True),
    "MixtralForCausalLM": _Kind(experts="num_local_experts"),
    "Qwen3MoeForCausalLM": _Kind(_HEAD_NORMS, experts="num_experts"),
}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def recognized(model: Any) -> bool:
    """Return whether this is one of the models that the formulas describe, with nothing added."""
    config, kind = model.config, _KINDS.get(type(model).__name__)
    if kind is None or not hasattr(config, "num_hidden_layers") or getattr(config, "use_bidirectional_attention", False):
        return False
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    layer = {f"{name}.weight" for name in (_GEMMA_NORMS if kind.gemma else _NORMS)}
    projections = ("qkv", "o") if kind.fused else "qkvo"
    layer |= {f"self_attn.{name}" for name in (*kind.attention, *(f"{each}_proj.weight" for each in projections))}
    matrices = ("gate_up", "down") if kind.fused else ("gate", "up", "down")
    experts = {"mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    layer |= experts if kind.experts else {f"mlp.{name}_proj.weight" for name in matrices}
    names = {f"model.layers.{index}.{name}" for index in range(config.num_hidden_layers) for name in layer}
    names |= {"model.embed_tokens.weight", "model.norm.weight"} | (set() if config.tie_word_embeddings else {"lm_head.weight"})
    ropes = (rope_of(config, index) for index in range(config.num_hidden_layers))
    return (
        {name for name, _ in model.named_parameters()} == names
        and activation == ("gelu_pytorch_tanh" if kind.gemma else "silu")
        and all(
            rope is not None
            and rope.get("rope_type", "default") in ("default", "linear", "llama3", "yarn", "dynamic")
            and rope.get("partial_rotary_factor") in (None, 1.0)
            and not any(rope.get(name) for name in ("mscale", "mscale_all_dim"))
            and (rope.get("factor") or rope.get("rope_type", "default") == "default")
            for rope in ropes
        )
    )


def against_formulas(model: Any, ids: Tensor) -> FormulaCheck | None:
    """Compare the modules of the truth's model, or of the clean model in the suspect's dtype, on a row `ids` [n].

    None for a model without formulas, or if they cannot be computed here, such as for want of memory.
    """
    if len(ids) == 0 or not recognized(model):
        return None
    try:
        return _Formulas(model, ids[:MOST_TOKENS]).run()
    except Exception as error:
        if machine_errno(error):
            raise
        return None


class _Formulas:
    """The comparison of a model on one row. outputs: of its modules, by name, as far as they are still needed."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.ids, self.config = model, ids, model.config
        self.kind = _KINDS[type(model).__name__]
        self.weights: dict[str, Tensor] = dict(model.named_parameters())
        self.outputs: dict[str, Tensor] = {}
        self.judged = 0
        own = next(model.parameters()).dtype
        self.narrow = own if own in (torch.bfloat16, torch.float16) else None
        self.near_tie = max(_NEAR_TIE, 16 * torch.finfo(own).eps)
        self.wrong: list[tuple[float, float, str]] = []

    def run(self) -> FormulaCheck:
        """Run the row, and judge a layer when it ends."""
        before, layers = "model.embed_tokens", [f"model.layers.{index}" for index in range(self.config.num_hidden_layers)]
        with contextlib.ExitStack() as stack, torch.no_grad():
            for name in (before, "model.norm"):
                stack.callback(self.model.get_submodule(name).register_forward_hook(self._keeping(name)).remove)
            for index, name in enumerate(layers):
                for leaf, module in self.model.get_submodule(name).named_children():
                    stack.callback(module.register_forward_hook(self._keeping(f"{name}.{leaf}")).remove)
                judging = self._keeping(name, partial(self._judge_layer, index, before))
                stack.callback(self.model.get_submodule(name).register_forward_hook(judging).remove)
                before = name
            positions = torch.arange(len(self.ids), device=self.ids.device)[None]
            with in_double(next(self.model.parameters()).dtype):
                asked = {"position_ids": positions, "use_cache": False, "logits_to_keep": _LOGITS}
                self.outputs["lm_head"] = self.model(self.ids[None], **asked).logits[0]
            self._judge("model.norm", partial(self._normed, "model.norm"), before)
            self._judge("lm_head", self._logits, "model.norm")
        return FormulaCheck(self.judged, len(self.ids), self._in_words(), len(self.wrong))

    def _keeping(self, name: str, then: Callable[[], None] = lambda: None) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            self.outputs[name] = (output[0] if isinstance(output, tuple) else output)[0].detach()
            with torch._C.DisableTorchFunction():  # the truth's own mode widens what is narrow on purpose here
                then()

        return hook

    def _judge_layer(self, index: int, before: str) -> None:
        layer = f"model.layers.{index}"
        first, second, *others = (f"{layer}.{name}" for name in (_GEMMA_NORMS if self.kind.gemma else _NORMS))
        attention, product = f"{layer}.self_attn", f"{layer}.mlp"
        if index == 0:
            self._judge(before, self._embedded)
        self._judge(first, partial(self._normed, first), before)
        self._judge(attention, partial(self._attended, index), first)
        if self.kind.gemma:
            third, last = others
            self._judge(second, partial(self._normed, second), attention)
            self._judge(third, lambda *sums: self._normed(third, sum(sums)), before, second)
            self._judge(product, partial(self._gated, product), third)
            self._judge(last, partial(self._normed, last), product)
            self._judge(layer, lambda *sums: sum(sums), before, second, last)
        else:
            self._judge(second, lambda *sums: self._normed(second, sum(sums)), before, attention)
            self._judge(product, partial(self._routed if self.kind.experts else self._gated, product), second)
            self._judge(layer, lambda *sums: sum(sums), before, attention, product)
        for name in [name for name in self.outputs if name.startswith(f"{layer}.") or name == before]:
            del self.outputs[name]

    def _judge(self, name: str, formula: Callable[..., Any], *inputs: str) -> None:
        """Compare a module's output with its formula of the outputs `inputs`."""
        given, have = [self.outputs[each] for each in inputs], self.outputs[name]
        want = self._computed(formula, given, torch.float64)
        rounded = self._computed(formula, given, self.narrow or torch.float32).double()
        if not bool(want.isfinite().all()):
            return
        self.judged += 1
        eps, of_unit = torch.finfo(have.dtype).eps, torch.finfo(self.narrow or torch.float32).eps
        least, limit = (64, _NARROW_LIMIT * (1 + 4 / math.sqrt(have.numel()))) if self.narrow else (4, _LIMIT)
        unit = max(_rms(rounded - want) * eps / of_unit, _rms(want) * eps / least, 1e-300)
        if not (ratio := _rms(have.double() - want) / unit) <= limit:
            gain = float((have.double() * want).sum() / want.square().sum().clamp(min=1e-300))
            self.wrong.append((ratio, gain, name))

    def _computed(self, formula: Callable[..., Any], given: list[Tensor], dtype: torch.dtype) -> Tensor:
        self.dtype, self.wide = dtype, torch.promote_types(dtype, torch.float32)
        result: Tensor = formula(*(values.to(dtype) for values in given))
        return result

    def _weight(self, name: str) -> Tensor:
        return self.weights[name].to(self.dtype)

    def _applied(self, name: str, values: Tensor) -> Tensor:
        bias = self._weight(f"{name}.bias") if f"{name}.bias" in self.weights else None
        return linear(values, self._weight(f"{name}.weight"), bias)

    def _embedded(self) -> Tensor:
        values = self.weights["model.embed_tokens.weight"][self.ids].to(self.dtype)
        return values * values.new_tensor(math.sqrt(self.config.hidden_size)) if self.kind.gemma else values

    def _normed(self, name: str, values: Tensor) -> Tensor:
        weight = self._weight(f"{name}.weight")
        wide = values.to(self.wide)
        scaled: Tensor = wide * (wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        if self.kind.gemma:
            return (scaled * (1 + weight.to(self.wide))).to(self.dtype)
        return scaled.to(self.dtype) * weight

    def _gated(self, name: str, values: Tensor) -> Tensor:
        if self.kind.fused:
            gate, up = self._applied(f"{name}.gate_up_proj", values).chunk(2, -1)
        else:
            gate, up = (self._applied(f"{name}.{which}_proj", values) for which in ("gate", "up"))
        return self._applied(f"{name}.down_proj", up * (gelu(gate, approximate="tanh") if self.kind.gemma else silu(gate)))

    def _routed(self, name: str, values: Tensor) -> Tensor:
        """Return what experts give; of tokens whose last choice is a near tie, what the model gave."""
        config, count = self.config, self.config.num_experts_per_tok
        likeliest, chosen = self._applied(f"{name}.gate", values).softmax(-1, self.wide).sort(-1, descending=True)
        chances = likeliest[:, :count]
        shares = chances / chances.sum(-1, keepdim=True) if getattr(config, "norm_topk_prob", True) else chances
        result = torch.zeros_like(values)
        for expert in range(getattr(config, self.kind.experts)):
            own = shares * (chosen[:, :count] == expert)
            share = own.sum(-1, keepdim=True).to(self.dtype)
            of = share.squeeze(-1).nonzero().squeeze(-1)
            both, down = (self.weights[f"{name}.experts.{which}_proj"][expert].to(self.dtype) for which in ("gate_up", "down"))
            gate, up = linear(values[of], both).chunk(2, -1)
            result[of] += share[of] * linear(silu(gate) * up, down)
        clear = chances[:, -1] - likeliest[:, count:].amax(-1) > self.near_tie * chances[:, -1]
        return result.where(clear[:, None], self.outputs[name].to(self.dtype))

    def _attended(self, index: int, values: Tensor) -> Tensor:
        name, config, count = f"model.layers.{index}.self_attn", self.config, len(values)
        size, positions = head_size_of(config), torch.arange(count, device=values.device)
        frequencies, factor = frequencies_of(
            rope_of(config, index) or {}, size, values.to(self.wide), config.max_position_embeddings
        )
        angles = torch.outer(positions.to(self.wide), frequencies)
        cos, sin = ((factor * each.repeat(1, 2)).to(self.dtype) for each in (angles.cos(), angles.sin()))
        fused = self._applied(f"{name}.qkv_proj", values) if self.kind.fused else None
        widths = [size * each for each in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        parts = dict(zip("qkv", torch.split(fused, widths, -1), strict=True)) if fused is not None else {}

        def heads(which: str) -> Tensor:
            projected = parts[which] if parts else self._applied(f"{name}.{which}_proj", values)
            split = projected.view(count, -1, size).transpose(0, 1)
            if which == "v":
                return split
            if f"{name}.{which}_norm.weight" in self.weights:
                split = self._normed(f"{name}.{which}_norm", split)
            left, right = split.chunk(2, -1)
            return split * cos + torch.cat((-right, left), -1) * sin

        query, key, value = map(heads, "qkv")
        key, value = (each.repeat_interleave(len(query) // len(each), 0) for each in (key, value))
        scores = query @ key.mT / math.sqrt(getattr(config, "query_pre_attn_scalar", size))
        if cap := getattr(config, "attn_logit_softcapping", None):
            scores = cap * (scores / cap).tanh()
        distance = positions[:, None] - positions
        unseen = distance < 0
        if window := window_of(config, index):
            unseen |= distance >= window
        mixed = scores.masked_fill(unseen, -math.inf).softmax(-1, self.wide).to(self.dtype) @ value
        return self._applied(f"{name}.o_proj", mixed.transpose(0, 1).reshape(count, -1))

    def _logits(self, values: Tensor) -> Tensor:
        head: Tensor = self.weights["model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"]
        starts = range(0, len(head), _VOCABULARY_PART)
        parts = [linear(values[-_LOGITS:], head[start : start + _VOCABULARY_PART].to(self.dtype)) for start in starts]
        logits, cap = torch.cat(parts, -1), getattr(self.config, "final_logit_softcapping", None)
        return cap * (logits / cap).tanh() if cap else logits

    def _in_words(self) -> str:
        if not self.wrong:
            return ""
        ratio, gain, name = max(self.wrong, key=lambda each: math.inf if math.isnan(each[0]) else each[0])
        module = self.model.get_submodule(name)
        package = inspect.unwrap(type(module).forward).__module__.partition(".")[0]
        whose = f" (replaced by {package}'s code)" if package not in ("transformers", "torch") else ""
        far = f"is {gain:.4g} times what the formula gives" if abs(gain - 1) > 1e-3 else "is not what the formula gives"
        more = f"; {plural(len(self.wrong) - 1, 'other module')} too" if len(self.wrong) > 1 else ""
        return f"transformers' own {type(module).__name__}{whose} is wrong: {name} {far} ({ratio:,.3g} times rounding{more})"


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
