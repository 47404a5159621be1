"""Faults planted in small random models, as one table. It loads torch and nothing else: an interpreter with a fault imports it.

    with FAULTS[0].plant(model):
        ...                           # the model has the fault

Each fault was written down, with the module and the cause that an engineer would want to read, before the judge saw it.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from casefiles import cases_of

Plant = Callable[[Any], Any]
"""A context manager over the suspect's model: inside the block it has the fault."""
BOTH, FP32 = ("fp32", "bf16"), ("fp32",)


@dataclass(frozen=True)
class Planted:
    """A fault. module: what the headline has to name, "" where no module is at fault. cause: a pattern of the right cause or its kin.

    rows: the only rows that it touches, None for all. packed: how the model is called. trains: a fault of the backward.
    """

    name: str
    plant: Plant
    module: str
    cause: str
    family: str = "llama"
    dtypes: tuple[str, ...] = BOTH
    rows: tuple[int, ...] | None = None
    packed: bool = True
    trains: bool = False


# ---- how faults are planted ----


def weights(name, change):
    """A parameter or a buffer whose values `change` changed: in place, or by returning others."""

    @contextlib.contextmanager
    def plant(model):
        held = dict(model.named_parameters()) | dict(model.named_buffers())
        tensor = held[name]
        kept = tensor.data.clone()
        other = change(tensor.data)
        if isinstance(other, torch.Tensor):
            tensor.data.copy_(other)
        yield
        tensor.data.copy_(kept)

    return plant


def all_of(*plants):
    @contextlib.contextmanager
    def plant(model):
        with contextlib.ExitStack() as stack:
            for each in plants:
                stack.enter_context(each(model))
            yield

    return plant


def attribute(module, name, change):
    @contextlib.contextmanager
    def plant(model):
        holder = model.config if module == "config" else model.get_submodule(module)
        kept = getattr(holder, name)
        setattr(holder, name, change(kept))
        yield
        setattr(holder, name, kept)

    return plant


def output(module, change):
    """The code of a module gives something else: the first of its outputs is changed."""

    @contextlib.contextmanager
    def plant(model):
        def hook(_module, _inputs, out):
            return (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)

        handle = model.get_submodule(module).register_forward_hook(hook)
        yield
        handle.remove()

    return plant


def forward(module, make):
    """The module's forward is what `make` makes of the module and its forward."""

    @contextlib.contextmanager
    def plant(model):
        holder = model.get_submodule(module)
        holder.forward = make(holder, holder.forward)
        yield
        del holder.forward

    return plant


def attention(layer, change):
    """Let one layer call another attention function: `change(original, module, query, key, value, mask, **more)`."""

    def make(_module, right):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

        def run(*args, **more):
            original = functions["sdpa"]
            functions["sdpa"] = lambda *given, **named: change(original, *given, **named)
            try:
                return right(*args, **more)
            finally:
                functions["sdpa"] = original

        return run

    return forward(f"model.layers.{layer}.self_attn", make)


def function_of(layer, name, change):
    """Let the attention of one layer call another function in place of `name` of its module's file: `change(original, ...)`."""

    def make(module, right):
        scope = sys.modules[type(module).__module__]

        def run(*args, **more):
            original = getattr(scope, name)
            setattr(scope, name, lambda *given, **named: change(original, *given, **named))
            try:
                return right(*args, **more)
            finally:
                setattr(scope, name, original)

        return run

    return forward(f"model.layers.{layer}.self_attn", make)


def rotation(layer, change):
    """Let one layer turn its queries and keys in another way: `change(original, query, key, cos, sin)`."""
    return function_of(layer, "apply_rotary_pos_emb", lambda original, *given, **_: change(original, *given))


def positions(change):
    def make(_module, right):
        return lambda values, position_ids, **more: right(values, change(position_ids), **more)

    return forward("model.rotary_emb", make)


def gradient(name, change):
    @contextlib.contextmanager
    def plant(model):
        handle = model.get_parameter(name).register_hook(change)
        yield
        handle.remove()

    return plant


def detached(module):
    return output(module, lambda values: values.detach() + 0 * values)


def outside(context):
    return lambda _model: context()


# ---- changes ----


def doubled_row(values):
    values[3] *= 2


def rows_swapped(count):
    return lambda values: torch.cat((values[count : 2 * count], values[:count], values[2 * count :]))


def noisy(share):
    def change(values):
        return values * (1 + share * torch.randn(values.shape, generator=torch.Generator().manual_seed(3)))

    return change


def in_8_bits(values):
    scale = values.abs().amax(-1, keepdim=True) / 127
    return (values / scale).round() * scale


def rounded(values):
    return values.bfloat16().to(values.dtype)


def zeroed(values):
    values[50:90] = 0


def half_scaled(values):
    values[::2] *= 1.02


def no_first_key(original, module, query, key, value, mask, **more):
    key = key.clone()
    key[:, :, 0] = 0
    return original(module, query, key, value, mask, **more)


def heads_permuted(original, *given, **more):
    mixed, rest = original(*given, **more)
    return mixed.roll(1, 2), rest


def window_of_16(original, module, query, key, value, mask, **more):
    count = query.shape[2]
    at = torch.arange(count)
    near = (at[:, None] - at < 16)[None, None]
    seen = (
        near & (at[:, None] >= at)
        if mask is None
        else (mask & near if mask.dtype is torch.bool else mask.masked_fill(~near, -1e9))
    )
    return original(module, query, key, value, seen, **(more | {"is_causal": False}))


def queries_are_keys(original, module, query, key, value, mask, **more):
    groups = query.shape[1] // key.shape[1]
    return original(module, key.repeat_interleave(groups, 1), query[:, ::groups], value, mask, **more)


def scores_in_bf16(original, module, query, key, value, mask, **more):
    mask = mask if mask is None or mask.dtype is torch.bool else mask.bfloat16()
    mixed, rest = original(module, query.bfloat16(), key.bfloat16(), value.bfloat16(), mask, **more)
    return mixed.to(query.dtype), rest


def scaled_by(factor):
    def change(original, *given, scaling=None, **more):
        return original(*given, scaling=factor * scaling, **more)

    return change


def values_late(original, module, query, key, value, mask, **more):
    return original(module, query, key, value.roll(1, 2), mask, **more)


def interleaved(original, query, key, cos, sin):
    def turn(values):
        even, odd = values[..., ::2], values[..., 1::2]
        half = values.shape[-1] // 2
        c, s = cos[:, None, :, :half], sin[:, None, :, :half]
        return torch.stack((even * c - odd * s, odd * c + even * s), -1).flatten(-2)

    return turn(query), turn(key)


def turned_back(original, query, key, cos, sin):
    return original(query, key, cos, -sin)


def only_queries(original, query, key, cos, sin):
    return original(query, key, cos, sin)[0], key


def not_the_last_pair(original, query, key, cos, sin):
    cos, sin = cos.clone(), sin.clone()
    for part in (cos.shape[-1] // 2 - 1, cos.shape[-1] - 1):
        cos[..., part], sin[..., part] = 1, 0
    return original(query, key, cos, sin)


def only_half(original, query, key, cos, sin):
    """Turn the first half of a head's dimensions, as models with partial rotary positions do."""
    half = query.shape[-1] // 2
    turned = original(query[..., :half], key[..., :half], cos[..., :half], sin[..., :half])
    return tuple(torch.cat((own, other[..., half:]), -1) for own, other in zip(turned, (query, key), strict=True))


def seen_by(rule):
    """An attention whose mask is `rule(distance, seen)`: of queries from keys, and what the right mask allows."""

    def change(original, module, query, key, value, mask, **more):
        at = torch.arange(query.shape[2])
        distance = (at[:, None] - at)[None, None]
        seen = distance >= 0 if mask is None else mask if mask.dtype is torch.bool else mask > -1
        return original(module, query, key, value, rule(distance, seen), **(more | {"is_causal": False}))

    return change


def no_soft_cap(original, *given, softcap=None, **more):
    return original(*given, softcap=None, **more)


def without(name):
    """A forward that leaves out a child."""

    def make(module, right):
        def run(*given, **more):
            kept = module._modules.pop(name)
            object.__setattr__(module, name, lambda values: values)
            try:
                return right(*given, **more)
            finally:
                object.__delattr__(module, name)
                module._modules[name] = kept

        return run

    return make


@contextlib.contextmanager
def gelu_module(model):
    """The activation of one layer is a module of another class."""
    mlp = model.get_submodule(f"{L2}.mlp")
    kept, mlp.act_fn = mlp.act_fn, torch.nn.GELU(approximate="tanh")
    yield
    mlp.act_fn = kept


def residual_short(module, _right):
    def run(hidden, **more):
        mixed, _ = module.self_attn(hidden_states=module.input_layernorm(hidden), **more)
        hidden = 0.97 * hidden + mixed
        return hidden + module.mlp(module.post_attention_layernorm(hidden))

    return run


def routed(module, hidden, last=None):
    """Route as a router does that chooses among the experts up to `last`, and whose gates do not add up to 1."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, module.hidden_dim), module.weight)
    return logits, *torch.topk(logits.float().softmax(-1)[:, :last], module.top_k, dim=-1)


def never_the_last(module, _right):
    """A router that chooses among all experts but the last."""

    def run(hidden):
        logits, top, chosen = routed(module, hidden, -1)
        return logits, top / top.sum(-1, keepdim=True), chosen

    return run


def one_token_up(values):
    values = values.clone()
    values[..., 77] += 0.3
    return values


def of_row(row, change):
    def run(values):
        values = values.clone()
        values[row : row + 1] = change(values[row : row + 1])
        return values

    return run


def behind(position, factor):
    def run(values):
        values = values.clone()
        values[:, position:] *= factor
        return values

    return run


def with_gelu(module, _right):
    gelu = torch.nn.functional.gelu
    return lambda values: module.down_proj(gelu(module.gate_proj(values)) * module.up_proj(values))


def soft_capped(_original, module, query, key, value, mask, **more):
    """Attention as its formula says, in fp32, with scores capped at 20 and masked by `masked_fill`."""
    groups, count = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = (query @ key.transpose(2, 3) * more["scaling"]).float()
    seen = torch.ones(1, 1, count, count, dtype=torch.bool).tril() if mask is None else mask
    scores = (20 * torch.tanh(scores / 20)).masked_fill(~(seen if seen.dtype is torch.bool else seen > -1), -1e9)
    return (scores.softmax(-1).to(value.dtype) @ value).transpose(1, 2), None


def norms_late(module, right):
    """Queries and keys are turned first, and normalised then."""
    scope, names = sys.modules[type(module).__module__], ("q_norm", "k_norm")

    def run(*given, **more):
        norms = [module._modules.pop(name) for name in names]
        for name in names:
            object.__setattr__(module, name, lambda values: values)
        turn = scope.apply_rotary_pos_emb  # type: ignore[attr-defined]

        def late(*each, **named):
            pairs = zip(norms, turn(*each, **named), strict=True)
            return tuple(norm(values.transpose(1, 2)).transpose(1, 2) for norm, values in pairs)

        try:
            with patch.object(scope, "apply_rotary_pos_emb", late):
                return right(*given, **more)
        finally:
            for name, norm in zip(names, norms, strict=True):
                object.__delattr__(module, name)
                module._modules[name] = norm

    return run


def in_bf16(module, _right):
    return lambda values: torch.nn.functional.linear(values.bfloat16(), module.weight.bfloat16()).to(values.dtype)


def norm_in_bf16(_module, right):
    return lambda values: right(values.bfloat16().to(values.dtype)).bfloat16().to(values.dtype)


def mean_removed(module, _right):
    def run(values):
        wide = values.float() - 0.1 * values.float().mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.variance_epsilon)
        return module.weight * wide.to(values.dtype)

    return run


def residual_scaled(_module, right):
    return lambda hidden, *given, **more: right(hidden, *given, **more) - 0.02 * hidden


def unnormalised(module, _right):
    return partial(routed, module)


def second_best(module, right):
    def run(hidden):
        logits, weights_, _ = right(hidden)
        others = logits.topk(3, -1).indices
        return logits, weights_, torch.stack((others[:, 0], others[:, 2]), -1)

    return run


def over_capacity(_module, right):
    def run(*given, **more):
        mixed = right(*given, **more).clone()
        mixed[40:60] = 0
        return mixed

    return run


def patched(name, make):
    """A function of the trainer's module of the Actor, replaced by what `make` makes of it."""
    import openrlhf.models.actor as module

    return patch.object(module, name, make(getattr(module, name)))


def log_probs_that(change):
    """OpenRLHF's log-probs of logits, changed."""
    name = "log_probs_from_logits"
    return patched(name, lambda original: lambda logits, labels, **named: change(original, logits, labels, **named))


def temperature_off():
    return log_probs_that(lambda original, logits, labels, **named: original(logits / 1.02, labels, **named))


def shifted_labels():
    return log_probs_that(lambda original, logits, labels, **named: original(logits, labels.roll(1, -1), **named))


def capped_log_probs():
    return log_probs_that(lambda original, logits, labels, **named: original(logits, labels, **named).clamp(min=-6))


def top_of_logits():
    def change(original, logits, labels, **named):
        least = logits.topk(128, -1).values[..., -1:]
        low = logits.masked_fill(logits < least, -1e4)
        return original(low.scatter(-1, labels[..., None], logits.gather(-1, labels[..., None])), labels, **named)

    return log_probs_that(change)


L0, L1, L2, L3 = (f"model.layers.{layer}" for layer in range(4))
PLANTS = {
    # What the model holds.
    "gate_proj x0.99": weights(f"{L0}.mlp.gate_proj.weight", lambda v: v * 0.99),
    "a channel of up_proj doubled": weights(f"{L3}.mlp.up_proj.weight", doubled_row),
    "key heads swapped": weights(f"{L2}.self_attn.k_proj.weight", rows_swapped(8)),
    "two tokens of the head swapped": weights("lm_head.weight", rows_swapped(40)),
    "embeddings zeroed": weights("model.embed_tokens.weight", zeroed),
    "final norm x1.01": weights("model.norm.weight", lambda v: v * 1.01),
    "half of a norm x1.02": weights(f"{L1}.input_layernorm.weight", half_scaled),
    "o_proj transposed": weights(f"{L1}.self_attn.o_proj.weight", lambda v: v.T.clone()),
    "q_proj in 8 bits": weights(f"{L0}.self_attn.q_proj.weight", in_8_bits),
    "down_proj in bf16": weights(f"{L2}.mlp.down_proj.weight", rounded),
    "v_proj of another step": weights(f"{L3}.self_attn.v_proj.weight", noisy(1e-2)),
    "lm_head x1.005": weights("lm_head.weight", lambda v: v * 1.005),
    "a layer of another step": all_of(*(weights(f"{L2}.{name}.weight", noisy(1e-2)) for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj"))),
    "an expert x1.02": weights(f"{L1}.mlp.experts.down_proj", doubled_row),
    # What the model is set to.
    "an angle x1.01": weights("model.rotary_emb.inv_freq", half_scaled),
    "cosines x1.01": attribute("model.rotary_emb", "attention_scaling", lambda v: v * 1.01),
    "epsilon of the final norm": attribute("model.norm", "variance_epsilon", lambda _: 1e-4),
    "epsilon of the queries' norm": attribute(f"{L1}.self_attn.q_norm", "variance_epsilon", lambda _: 1e-3),
    "all scales x1.02": all_of(*(attribute(f"{at}.self_attn", "scaling", lambda v: v * 1.02) for at in (L0, L1, L2, L3))),
    "not causal": attribute(f"{L1}.self_attn", "is_causal", lambda _: False),
    "a soft cap of 30": attribute(f"{L1}.self_attn", "attn_logit_softcapping", lambda _: 30.0),
    "no final soft cap": attribute("config", "final_logit_softcapping", lambda _: None),
    "a window of 4": attribute("config", "sliding_window", lambda _: 4),
    "embeddings' factor": weights("model.embed_tokens.embed_scale", lambda v: v * 1.01),
    "one expert instead of two": attribute(f"{L1}.mlp.gate", "top_k", lambda _: 1),
    # What the model's code does.
    "gelu for silu": forward(f"{L1}.mlp", with_gelu),
    "a norm in bf16": forward(f"{L2}.post_attention_layernorm", norm_in_bf16),
    "a norm that removes the mean": forward(f"{L0}.post_attention_layernorm", mean_removed),
    "an MLP with a bias": output(f"{L1}.mlp", lambda v: v + 0.03),
    "a residual x0.98": forward(L2, residual_scaled),
    "the head in bf16": forward("lm_head", in_bf16),
    "a token's logit +0.3": output("lm_head", one_token_up),
    "the last row x1.02": output(f"{L1}.mlp.down_proj", of_row(2, lambda v: v * 1.02)),
    "from position 40 on": output(f"{L2}.self_attn.v_proj", behind(40, 1.03)),
    # Attention and positions.
    "no first key": attention(0, no_first_key),
    "heads permuted": attention(2, heads_permuted),
    "a window of 16 tokens": attention(3, window_of_16),
    "queries for keys": attention(0, queries_are_keys),
    "attention in bf16": attention(1, scores_in_bf16),
    "a scale x1.02 in the kernel": attention(2, scaled_by(1.02)),
    "values a token late": attention(1, values_late),
    "interleaved pairs": rotation(1, interleaved),
    "turned backwards": rotation(3, turned_back),
    "keys not turned": rotation(0, only_queries),
    "a pair not turned": rotation(2, not_the_last_pair),
    "positions halved": positions(lambda at: at // 2),
    "positions jump at 20": positions(lambda at: at + (at >= 20)),
    # Experts.
    "router weights not normalised": forward(f"{L2}.mlp.gate", unnormalised),
    "the third expert for the second": forward(f"{L1}.mlp.gate", second_best),
    "tokens over capacity dropped": forward(f"{L3}.mlp.experts", over_capacity),
    # Operations between the modules of one layer.
    "half of the dimensions turned": rotation(1, only_half),
    "a mask off by one": attention(2, seen_by(lambda far, seen: seen | ((far == -1) & seen.any(-2, keepdim=True)))),
    "a softmax scale x1.03": function_of(1, "eager_attention_forward", lambda original, *given, scaling, **more: original(*given, scaling=1.03 * scaling, **more)),
    "gelu in one layer": gelu_module,
    "no soft cap in one layer": function_of(2, "eager_attention_forward", no_soft_cap),
    "a window of 7 for 6": attention(2, seen_by(lambda far, seen: seen | ((far == 6) & seen.any(-2, keepdim=True)))),
    "never the last expert": forward(f"{L2}.mlp.gate", never_the_last),
    "the queries' norm left out": forward(f"{L1}.self_attn", without("q_norm")),
    "keys not turned in Qwen3": rotation(3, only_queries),
    "attention's residual x0.97": forward(L2, residual_short),
    "a soft cap of 20": attention(1, soft_capped),
    "norms behind the rotation": forward(f"{L3}.self_attn", norms_late),
    # Beside the model.
    "temperature x1.02": outside(temperature_off),
    "labels a token late": outside(shifted_labels),
    "log-probs above -6": outside(capped_log_probs),
    "half of the vocabulary": outside(top_of_logits),
    # The backward.
    "o_proj's gradient x0.9": gradient(f"{L1}.self_attn.o_proj.weight", lambda g: 0.9 * g),
    "a norm's gradient lost": gradient(f"{L2}.input_layernorm.weight", torch.zeros_like),
    "an MLP detached": detached(f"{L1}.mlp"),
    "no gradient of the embeddings": gradient("model.embed_tokens.weight", torch.zeros_like),
    "q_proj's gradient flipped": gradient(f"{L3}.self_attn.q_proj.weight", torch.neg),
    "the head's gradient x1.05": gradient("lm_head.weight", lambda g: 1.05 * g),
    "k_proj's gradient counted twice": gradient(f"{L0}.self_attn.k_proj.weight", lambda g: 2 * g),
}  # fmt: skip


def planted(name, case):
    """A fault, and what its case says of it."""
    family, *flags = case.given[0].split()
    cause, *module = case.expected
    rows = [tuple(map(int, flag.removeprefix("rows=").split(","))) for flag in flags if flag.startswith("rows=")]
    return Planted(
        name,
        PLANTS[name],
        "".join(module),
        cause,
        family,
        dtypes=FP32 if "fp32" in flags else BOTH,
        rows=rows[0] if rows else None,
        packed="padded" not in flags,
        trains="trains" in flags,
    )


FAULTS = tuple(planted(name, case) for name, case in cases_of("planted_faults").items())
