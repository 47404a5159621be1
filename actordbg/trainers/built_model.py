"""What a built transformers model is, read off the model itself: attention, dtype, size.

A trainer's Actor takes arguments that it does not know in silence, and a fallback to another attention would go unseen. So
what a replay reports comes from here, never from its options, and `check` compares it with what was asked for.

    describe(actor.model, choices, device)["attn"]        # "sdpa"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from actordbg.base.errors import Unsupported
from actordbg.config.choices import Choices
from actordbg.config.replay_config import DTYPES


def describe(model: Any, choices: Choices, device: Any) -> dict[str, Any]:
    """What every session says of its model in `resolved`; `device` is a torch.device."""
    import torch

    config = text_config(model)
    return {
        "model": choices.model,
        "model_class": type(model).__name__.removeprefix("FSDP"),  # `fully_shard` changes the class
        "parameters": sum(map(_size, model.parameters())),
        "num_layers": getattr(config, "num_hidden_layers", None),
        "vocab_size": int(config.vocab_size),
        "attn": resolved_attention(model),
        "backward": choices.backward,
        "seed": choices.seed,
        "device": str(device),
        "device_name": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


def resolved_attention(model: Any) -> str:
    """The attention that the built model uses (of its text model, where it has several)."""
    return str(getattr(text_config(model), "_attn_implementation", None) or "eager")


def resolved_dtype(model: Any) -> str:
    """The dtype of most of the model's parameters, in its short spelling (torch's for another).

    Most, because some models keep a few parameters (routers, norms) in fp32 whatever they are loaded in.
    """
    sizes: Counter[str] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[str(parameter.dtype).removeprefix("torch.")] += _size(parameter)
    full = sizes.most_common(1)[0][0] if sizes else "none"
    return next((short for short, name in DTYPES.items() if name == full), full)


_AT_RANDOM = ("drop", "jitter")
_OF_OTHER_HEADS = ("summary_", "classifier_")


def drawn_share(model: Any) -> float:
    """The largest share that the model drops, or jitters its routing by, in training mode; 0.0 where it draws nothing.

    Settings of heads that a language model does not have (GPT-2's `summary_first_dropout` of 0.1) drop nothing.
    """
    import torch

    shares = [float(module.p) for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    for name, value in text_config(model).to_dict().items():
        if any(word in name for word in _AT_RANDOM) and not name.startswith(_OF_OTHER_HEADS) and isinstance(value, float):
            shares.append(value)
    return max(shares, default=0.0)


def text_config(model: Any) -> Any:
    """The configuration of the text model: where vocabulary size and layers are."""
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def has_experts(model: Any) -> bool:
    """Whether a router sends each token to some of several experts."""
    return any((getattr(text_config(model), name, None) or 0) > 1 for name in _EXPERTS)


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _size(parameter: Any) -> int:
    """Its number of elements, also where ZeRO-3 has left only a part of them here."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def change_attention(model: Any, choices: Choices) -> None:
    """Make a built model use another attention; Unsupported where it then still says another."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(choices.attn)
    else:
        model.config._attn_implementation = choices.attn
    check(model, choices)


def follow_adapters(model: Any, recorded: Mapping[str, Any]) -> None:
    """Turn a model's adapters off for a call that was recorded with its own off (a reference pass), else on, to be trained.

    recorded: what a record says of its actor.
    """
    for layer in model.modules():
        if hasattr(layer, "_disable_adapters"):
            layer.enable_adapters(recorded.get("lora_adapters") != [])


def check(model: Any, choices: Choices) -> None:
    """Raise Unsupported where the model runs another attention or dtype than `choices` says."""
    attention, dtype = resolved_attention(model), resolved_dtype(model)
    if attention != choices.attn:
        raise Unsupported(
            f"attention {choices.attn} was asked for, this model runs {attention}",
            hint=f"ask for what it has: --attn {attention}",
        )
    if dtype != choices.dtype:
        raise Unsupported(
            f"dtype {choices.dtype} was asked for, the model was loaded in {dtype}",
            hint="the installed trainer cannot load it so; try --dtype bf16",
        )
