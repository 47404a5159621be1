"""Find the model that a configuration names, and put an adapter of peft on it, or make it smaller, without touching it.

A trainer's Actor takes a *path or name* and calls `from_pretrained` with its own arguments: there is no way to pass it a changed
configuration. So a change is made where it can be seen: in a folder with links to the model's files and a changed `config.json`.
That works for every version of a trainer and under ZeRO-3, where the weights are partitioned while they are loaded. The first N
layers of a real model become the truncated model's N layers; the rest of the checkpoint is not loaded. An adapter's files lie
beside links to its base, so transformers loads both, and the adapter is not merged.

    store/models/tiny-0123456789ab/            built by actordbg
    store/models/derived-0123456789ab/         a changed config.json, everything else links

Example:
    path = locate("meta-llama/Llama-3.1-8B", cache, num_layers=2)      # a folder with num_hidden_layers = 2

**The embedded model** is a random Llama of a megabyte, so that a replay needs no download and no GPU.

A replay of captured inputs asks whether a configuration *runs* and whether two configurations *agree*. For that the weights
need not be trained, but they must not be degenerate either. Two choices follow:

- Weights are scaled so that activations keep their size from layer to layer and logits spread over a few units. The usual 0.02
  would give almost uniform log-probs, in which a leak between packed rows is invisible.
- Weights are rounded to bf16 once, here. So a bf16 and an fp32 replay use the *same* weights, and what differs between them
  is arithmetic alone.

Real inputs come from tokenizers with 100,000 and more ids; a replay maps them into the small vocabulary (id modulo size).
The shapes, masks, padding and packing of the input are untouched, only the meaning of the text is lost; the result says
so. A full vocabulary would cost 2.5 GB per process in fp32 logits for a mid-sized input.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from actordbg.actor.hub_model import base_of, find_model, folder_of, read_config, read_json
from actordbg.base.errors import EnvironmentProblem, Refused, UnsafeInput, UsageError
from actordbg.base.imports import is_there
from actordbg.base.owners import own_cache
from actordbg.config import consent
from actordbg.config.replay_config import TINY

_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEAD_KEYS = (("num_attention_heads", "n_head"), ("num_key_value_heads", "num_kv_heads"))
_PER_LAYER_KEYS = ("layer_types", "mlp_layer_types", "no_rope_layers")


def locate(model: str, cache: Path, *, num_layers: int | None = None, dtype: str | None = None) -> str:
    """Return what to pass to `from_pretrained`: a folder, or a hub name if nothing has to change.

    `num_layers` keeps the first layers only; `dtype` (torch's name, "float32") overrides the checkpoint's own, for Actors
    that load in the checkpoint's dtype. Raises EnvironmentProblem if the model is not available, and UsageError for
    more layers than there are.
    """
    name = str(ensure_tiny(cache)) if model == TINY else model
    base = base_of(name)
    if base and not is_there("peft"):  # transformers would silently load the base alone
        raise EnvironmentProblem(f"{name} is an adapter, and peft is not installed", hint="pip install 'actordbg[replay]'")
    if base is None and num_layers is None and dtype is None:
        return str(folder_of(name) or name)
    kept = own_cache("models") if consent.is_given(model) else cache  # what may run lies where nobody else writes
    return str(_derive(_folder(base or name), kept, num_layers, dtype, _folder(name) if base else None))


def save_checkpoint(model: str, cache: Path, num_layers: int | None, folder: Path) -> None:
    """Copy the checkpoint that an Actor is built from, whole or its first layers, into a new folder, which `--model` takes.

    cache: where the tiny model and truncated ones lie. Raises Refused if `folder` is not empty, EnvironmentProblem if it cannot
    be written.
    """
    require_empty(folder)
    try:
        shutil.copytree(_folder(locate(model, cache, num_layers=num_layers)), folder, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        raise EnvironmentProblem(f"{folder} cannot be written: {error}"[:400], hint="name a folder on a disk with room") from None


def copy_beside(model: str, cache: Path, num_layers: int | None, folder: Path) -> None:
    """Copy what lies beside a model's weights, as its tokenizer, into a folder that has no file of that name."""
    for path in _folder(locate(model, cache, num_layers=num_layers)).iterdir():
        weights = path.suffix in (".safetensors", ".bin", ".pt") or path.name.endswith(".index.json")
        if path.is_file() and not weights and not (folder / path.name).exists():
            shutil.copy(path, folder)


def require_empty(folder: Path) -> None:
    """Raise Refused if something lies in a folder into which a checkpoint will be saved."""
    if folder.exists() and not (folder.is_dir() and next(folder.iterdir(), None) is None):
        raise Refused(f"{folder} exists, and is not an empty folder", hint="name a new folder")


def attention_heads(model: str) -> tuple[int, int] | None:
    """Return (attention heads, key/value heads) by the model's config.json; None if it is not here or does not say."""
    folder = Path(base_of(model) or model).expanduser()
    config = TINY_CONFIG if model == TINY else read_json(folder / "config.json")
    text: dict[str, Any] = config.get("text_config") or config
    heads, kv_heads = (next((text[key] for key in keys if isinstance(text.get(key), int)), None) for keys in _HEAD_KEYS)
    return None if heads is None else (heads, kv_heads or heads)


def require_model(model: str, num_layers: int | None) -> None:
    """Raise EnvironmentProblem if a model is not available (`find_model`), UsageError if it has not that many layers."""
    config = TINY_CONFIG if model == TINY else find_model(model)
    if config and num_layers is not None:
        truncate(config, num_layers)


def truncate(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return a model's config.json with only the first `num_layers` layers (of its text model, if it has several models)."""
    if isinstance(config.get("text_config"), dict):
        return config | {"text_config": truncate(config["text_config"], num_layers)}
    key = next((key for key in _LAYER_KEYS if isinstance(config.get(key), int)), None)
    if key is None:
        raise UsageError("--num-layers: this model's config.json does not say how many layers it has")
    if num_layers > config[key]:
        raise UsageError(
            f"--num-layers {num_layers}: the model has {config[key]} layers", hint=f"use --num-layers {config[key]} or fewer"
        )
    shortened = {k: config[k][:num_layers] for k in _PER_LAYER_KEYS if isinstance(config.get(k), list)}
    return config | shortened | {key: num_layers}


def _folder(name: str) -> Path:
    """Return a model's folder: itself, or the hub's snapshot of it (downloaded where the hub allows)."""
    if (folder := folder_of(name)) is not None:
        return folder.absolute()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.pth", "original/*", "*.gguf"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise EnvironmentProblem(f"cannot get the model {name}: {error}", hint="download it, then name its folder") from None


def _derive(source: Path, cache: Path, num_layers: int | None, dtype: str | None, adapter: Path | None = None) -> Path:
    config = read_config(source, f"{source} holds no model")
    if num_layers is not None:
        config = truncate(config, num_layers)
    if dtype is not None:
        config |= {"torch_dtype": dtype, "dtype": dtype}
    text = json.dumps(config, indent=2, sort_keys=True)
    of_adapter = sorted(adapter.glob("adapter_*")) if adapter else []
    changed = [path.stat().st_mtime_ns for path in of_adapter]  # one that was trained on is another
    named = f"{adapter}{changed}" if adapter else ""
    digest = hashlib.sha256(f"{source}\0{text}{named}".encode()).hexdigest()[:12]

    def build(folder: Path) -> None:
        for path in (*source.iterdir(), *of_adapter):
            if path.is_file() and path.name != "config.json":
                (folder / path.name).symlink_to(path.resolve())
        (folder / "config.json").write_text(text)
        safe, pickled = folder / "adapter_model.safetensors", folder / "adapter_model.bin"
        if pickled.exists() and not safe.exists():
            _as_safetensors(pickled, safe)

    return once(cache / f"derived-{digest}", build)


def _as_safetensors(pickled: Path, safe: Path) -> None:
    """Write an adapter as transformers reads it from a folder. Trainers under ZeRO-3 save it as torch does.

    Raises EnvironmentProblem for a file with anything but tensors: nothing of it is run.
    """
    import torch
    from safetensors.torch import save_file

    try:
        tensors = torch.load(pickled, map_location="cpu", weights_only=True)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, safe, metadata={"format": "pt"})
    except (OSError, UnpicklingError, RuntimeError, AttributeError, ValueError) as error:
        why = f"{pickled.resolve()} cannot be read as an adapter's weights: {error}"
        raise EnvironmentProblem(why[:400], hint="save the adapter again, as safetensors") from None


if TYPE_CHECKING:
    import torch

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""The embedded model's config.json."""
_LAYOUT = 1
"""Increment this when the same TINY_CONFIG gives other weights, so that an old cached copy is not mistaken for the new model."""


def build_tiny(path: Path, **changes: Any) -> Path:
    """Write a random tiny Llama (config.json and model.safetensors, bf16) that `from_pretrained(path)` opens; return `path`.

    Deterministic: the same configuration gives the same bytes. changes: entries of TINY_CONFIG, such as `pad_token_id`.
    Existing files of a model at `path` are replaced.
    """
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    config = TINY_CONFIG | changes
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(_weights(config), str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


def tiny_folder(cache: Path) -> Path:
    """Return the tiny model's place: its name changes with anything that changes the weights."""
    text = json.dumps([_LAYOUT, TINY_CONFIG])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return cache / f"tiny-{digest[:12]}"


def ensure_tiny(cache: Path) -> Path:
    """Return the tiny model's folder in `cache`, built if it is not there. Safe in concurrent processes."""
    return once(tiny_folder(cache), build_tiny)


def require_tiny(cache: Path) -> None:
    """Raise UnsafeInput if something else lies in the tiny model's place; an empty place is fine.

    Others may write into a store, and their model in this place would run without being named.
    """
    folder = tiny_folder(cache)
    if not (folder / "config.json").exists():
        return
    names = {path.name for path in folder.iterdir()}
    if names != {"config.json", "model.safetensors"} or read_json(folder / "config.json") != TINY_CONFIG:
        raise UnsafeInput(f"{folder} is not the tiny model that actordbg builds", hint="remove that folder; it is rebuilt")


def once(target: Path, build: Callable[[Path], object]) -> Path:
    """Return the model folder `target`, filled by `build` if it is not there.

    It is built beside its place and renamed, so it is there whole or not at all. A process that loses the race deletes its copy.
    """
    if not (target / "config.json").is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(prefix=f".{target.name.partition('-')[0]}-", dir=target.parent))
        build(own)
        try:
            own.rename(target)
        except OSError:
            shutil.rmtree(own)
            if not (target / "config.json").is_file():
                raise
    return target


def _weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Draw all weights, bf16, in a fixed order from one generator: projections with variance 1 / fan_in."""
    import torch

    generator, hidden = torch.Generator().manual_seed(0), config["hidden_size"]

    def normal(rows: int, columns: int, std: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).to(torch.bfloat16)

    def linear(out: int, fan_in: int, gain: float = 1.0) -> torch.Tensor:
        return normal(out, fan_in, gain * fan_in**-0.5)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    kv, wide = config["num_key_value_heads"] * config["head_dim"], config["intermediate_size"]
    projections = {
        "self_attn.q": (hidden, hidden),
        "self_attn.k": (kv, hidden),
        "self_attn.v": (kv, hidden),
        "self_attn.o": (hidden, hidden),
        "mlp.gate": (wide, hidden),
        "mlp.up": (wide, hidden),
        "mlp.down": (hidden, wide),
    }
    weights = {"model.embed_tokens.weight": normal(config["vocab_size"], hidden, 1.0)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        weights |= {f"{prefix}{name}_proj.weight": linear(*sizes) for name, sizes in projections.items()}
        weights |= {f"{prefix}{name}_layernorm.weight": ones.clone() for name in ("input", "post_attention")}
    weights["model.norm.weight"] = ones.clone()
    weights["lm_head.weight"] = linear(config["vocab_size"], hidden, gain=2.0)
    return weights
