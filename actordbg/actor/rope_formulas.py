"""What formulas of attention (`from_papers`) read from a configuration: the angles of rotary positions, heads, windows.

rope = rope_of(model.config, 0)                                       # {"rope_theta": 10000.0, "rope_type": "default"}
frequencies, factor = frequencies_of(rope, 64, values, longest=8192)  # [32], 1.0
"""

import math
from typing import Any

import torch
from torch import Tensor


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
