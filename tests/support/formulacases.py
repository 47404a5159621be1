"""The second truth on small random models: healthy families agree with their formulas, patched modules of transformers do not.

python formulacases.py SCENARIO MODEL_CACHE
"""

import sys
from unittest.mock import patch

import torch
from actorcases import main
from amounts import WHOLE, first_or_all
from lawcases import VOCAB

from actordbg.actor import family_models, truth_model
from actordbg.actor.from_papers import against_formulas
from actordbg.actor.models import once
from benchmarks.families import build_model

LINEAR = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}
DYNAMIC = {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}
MSCALE = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.8}}
FAMILIES = {
    "llama2": ("llama2", {}, 13),
    "llama linear": ("llama2", LINEAR, 13),
    "llama3": ("llama3", {"tie_word_embeddings": True}, 13),
    "qwen2": ("qwen2", {}, 13),
    "qwen3": ("qwen3", {}, 13),
    "mistral": ("mistral", {}, 13),
    "gemma2": ("gemma2", {}, 17),
    "gemma3": ("gemma3", {}, 17),
    "mixtral": ("mixtral", {}, 13),
    "qwen3 moe": ("qwen3_moe", {}, 13),
    "phi3": ("phi3", {}, 13),
    "llama biased": ("llama2", {"attention_bias": True}, 0),
    "llama yarn": ("llama2", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}}, 13),
    "llama dynamic": ("llama2", DYNAMIC, 13),
    "llama mscale": ("llama2", MSCALE, 0),
}
"""Family, what its configuration adds, and how many of its modules have formulas."""
DTYPES = (("bfloat16", torch.float32), ("float32", torch.float64))
NARROW = (("bfloat16", torch.bfloat16), ("float16", torch.float16))
IDS = torch.randint(3, VOCAB, (90,), generator=torch.Generator().manual_seed(1))


def truth_of(cache, name, weights, dtype):
    family, adds, _ = FAMILIES[name]
    config = family_models.FAMILIES[family].config | adds
    path = once(cache / name, lambda folder: build_model(folder, config))
    return truth_model.load(str(path), weights=weights, dtype=dtype, device=torch.device("cpu"))


def healthy(cache):
    """Every family has one of the dtypes in turn, and Llama 3 has all; so has every family in `make whole`."""
    for at, (name, (*_, modules)) in enumerate(FAMILIES.items()):
        every = (*DTYPES, *NARROW)
        for weights, dtype in every if WHOLE or name == "llama3" else [every[at % 4]]:
            found = against_formulas(truth_of(cache, name, weights, dtype), IDS)
            told = (found.modules, found.tokens, found.differs) if found else (0, 90, "")
            assert told == (modules, 90, ""), (name, weights, found)


def of_norm(model):
    right = model.LlamaRMSNorm.forward
    return patch.object(model.LlamaRMSNorm, "forward", lambda self, values: 1.05 * right(self, values))


def of_epsilon(model):
    def forward(self, values):
        return self.weight * values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 2e-6)

    return patch.object(model.LlamaRMSNorm, "forward", forward)


def of_cast(model):
    """Leave out the norm's cast to fp32, which a truth in fp32 does not show."""

    def forward(self, values):
        return self.weight * (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.variance_epsilon))

    return patch.object(model.LlamaRMSNorm, "forward", forward)


def of_rope(model):
    right = model.apply_rotary_pos_emb

    def rotate(query, key, cos, sin):
        cos, sin = cos.clone(), sin.clone()
        cos[..., -1], sin[..., -1] = 1, 0
        return right(query, key, cos, sin)

    return patch.object(model, "apply_rotary_pos_emb", rotate)


def of_scale(model):
    right = model.eager_attention_forward
    return patch.object(
        model, "eager_attention_forward", lambda *given, scaling, **more: right(*given, scaling=1.001 * scaling, **more)
    )


def of_groups(model):
    return patch.object(model, "repeat_kv", lambda states, times: states.repeat(1, times, 1, 1))


def of_residual(model):
    right = model.LlamaDecoderLayer.forward
    return patch.object(model.LlamaDecoderLayer, "forward", lambda self, h, *a, **more: right(self, h, *a, **more) + 1e-5 * h)


def of_product(model):
    def forward(self, values):
        return self.down_proj(self.gate_proj(values).relu() * self.up_proj(values))

    return patch.object(model.LlamaMLP, "forward", forward)


def of_positions(model):
    right = model.LlamaRotaryEmbedding.forward
    return patch.object(
        model.LlamaRotaryEmbedding, "forward", lambda self, x, position_ids: right(self, x, position_ids + (position_ids > 60))
    )


def of_router(model):
    right = model.MixtralTopKRouter.forward

    def forward(self, values):
        logits, scores, chosen = right(self, values)
        return logits, scores * 1.001, chosen

    return patch.object(model.MixtralTopKRouter, "forward", forward)


def of_fused_norm(model):
    right = model.Phi3RMSNorm.forward
    return patch.object(model.Phi3RMSNorm, "forward", lambda self, values: 1.001 * right(self, values))


PATCHES = {
    of_norm: "LlamaRMSNorm (replaced by",
    of_epsilon: "LlamaRMSNorm (replaced by",
    of_rope: "LlamaAttention is wrong",
    of_scale: "LlamaAttention is wrong",
    of_groups: "LlamaAttention is wrong",
    of_residual: "LlamaDecoderLayer (replaced by",
    of_product: "LlamaMLP (replaced by",
    of_positions: "LlamaAttention is wrong",
}


def patched(cache):
    from transformers.models.llama import modeling_llama

    for weights, dtype in (*DTYPES, *NARROW):
        model = truth_of(cache, "llama3", weights, dtype)
        with of_cast(modeling_llama):
            found = against_formulas(model, IDS)
        assert found is not None and ("LlamaRMSNorm (replaced by" in found.differs) is ((weights, dtype) in NARROW), (
            dtype,
            found,
        )
    for weights, dtype in first_or_all(DTYPES):
        model = truth_of(cache, "llama3", weights, dtype)
        for plant, words in PATCHES.items():
            with plant(modeling_llama):
                found = against_formulas(model, IDS)
            assert found is not None and words in found.differs, (weights, plant, found)
        assert not against_formulas(model, IDS).differs  # type: ignore[union-attr]
        for family, patch_of, words in (
            ("mixtral", of_router, "MixtralSparseMoeBlock is wrong"),
            ("phi3", of_fused_norm, "Phi3RMSNorm (replaced by"),
        ):
            model = truth_of(cache, family, weights, dtype)
            with patch_of(sys.modules[type(model).__module__]):
                found = against_formulas(model, IDS)
            assert found is not None and words in found.differs, (weights, family, found)


if __name__ == "__main__":
    main(sys.argv[1:], globals())
