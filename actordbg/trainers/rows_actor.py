"""actordbg's own Actor: a transformers model that returns log-probs of rows. No trainer is imported or needs to be installed.

Calls that a trainer's adapter recorded are replayed through it, and any others on request (`--through rows`). It takes the
arguments of a captured call and returns what they ask for, so that all tools know a single kind of Actor:

    log_prob[row, t] = log softmax(logits[row, t] / temperature)[id at t + 1]

Positions count the attended tokens from 0, with 1 at padding, unless the call has its own positions. When packing, the attended
tokens of all rows are concatenated, without a mask: transformers finds the borders where positions restart, with every attention
offered here.

    actor = ROWS.build_actor("path/to/model", choices)
    actor(sequences=ids, attention_mask=mask, action_mask=actions)     # [B, A]

The facts of a built model (attention, dtype, size) are read from the model itself: an Actor silently accepts unknown arguments,
and a fallback to another attention would go unnoticed. A replay reports these facts, never its options, and `check` compares them
with the request.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actordbg.base.errors import EnvironmentProblem, Unsupported
from actordbg.config import consent
from actordbg.config.choices import Choices
from actordbg.config.replay_config import DTYPES, ReplayConfig
from actordbg.formats.nested_values import nested
from actordbg.trainers import images
from actordbg.trainers.captured_call import ReplayedCall, Signature, make_call
from actordbg.trainers.importhook import prepare_deepspeed

if TYPE_CHECKING:
    from actordbg.store.payload import Dump


def describe(model: Any, choices: Choices, device: torch.device) -> dict[str, Any]:
    """Return the facts of a model that every session reports in `resolved`."""
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
    """Return the attention that the built model uses (its text model, if it has several)."""
    return str(getattr(text_config(model), "_attn_implementation", None) or "eager")


def resolved_dtype(model: Any) -> str:
    """Return the dtype of most of the model's parameters, in its short spelling (torch's name for uncommon ones).

    Most, because some models keep a few parameters (routers, norms) in fp32 whatever dtype they are loaded in.
    """
    sizes: Counter[str] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            sizes[str(parameter.dtype).removeprefix("torch.")] += _size(parameter)
    full = sizes.most_common(1)[0][0] if sizes else "none"
    return next((short for short, name in DTYPES.items() if name == full), full)


_RANDOM_SETTINGS = ("drop", "jitter")
_OTHER_HEADS = ("summary_", "classifier_")
"""Parts of the names of settings that draw random numbers, and beginnings of names that are ignored."""


def drawn_share(model: Any) -> float:
    """Return the largest dropout probability or router jitter in training mode; 0.0 if the model draws no random numbers.

    Settings of heads that a language model does not have (GPT-2's `summary_first_dropout` of 0.1) are ignored.
    """
    shares = [float(module.p) for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    for name, value in text_config(model).to_dict().items():
        if any(word in name for word in _RANDOM_SETTINGS) and not name.startswith(_OTHER_HEADS) and isinstance(value, float):
            shares.append(value)
    return max(shares, default=0.0)


def text_config(model: Any) -> Any:
    """Return the configuration of the text model, which has vocabulary size and layers."""
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def has_experts(model: Any) -> bool:
    """Check whether the model is a mixture of experts."""
    return any((getattr(text_config(model), name, None) or 0) > 1 for name in _EXPERT_COUNTS)


_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _size(parameter: Any) -> int:
    """Return the total element count, even if ZeRO-3 has partitioned the parameter."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def change_attention(model: Any, choices: Choices) -> None:
    """Make a built model use another attention. Raises Unsupported if it then still reports another."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(choices.attn)
    else:
        model.config._attn_implementation = choices.attn
    check(model, choices)


def follow_adapters(model: Any, recorded: Mapping[str, Any]) -> None:
    """Turn a model's LoRA adapters off for a call that was recorded with none active (a reference pass), else on and trainable.

    recorded: the `actor` facts of a dump's record; without `lora_adapters`, adapters are on.
    """
    for layer in model.modules():
        if hasattr(layer, "_disable_adapters"):
            layer.enable_adapters(recorded.get("lora_adapters") != [])


def check(model: Any, choices: Choices) -> None:
    """Raise Unsupported if the model runs another attention or dtype than `choices` says."""
    attention, dtype = resolved_attention(model), resolved_dtype(model)
    if attention != choices.attn:
        raise Unsupported(
            f"attention {choices.attn} was requested, this model runs {attention}",
            hint=f"pass --attn {attention}",
        )
    if dtype != choices.dtype:
        raise Unsupported(
            f"dtype {choices.dtype} was requested, the model was loaded in {dtype}",
            hint="pass --dtype bf16: the installed trainer cannot load the requested dtype",
        )


_POSITIONS_AT_ONCE = 1024
"""Positions whose softmax over the vocabulary is summed at a time."""


class RowsActor(torch.nn.Module):
    """The Actor that the module describes. `packing_samples` and `temperature` may be changed between calls."""

    def __init__(self, model: Any, *, packing: bool, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.packing_samples = packing
        self.temperature = temperature
        self._has_images = getattr(model.config, "vision_config", None) is not None
        self._types = images.types_name(model) if self._has_images else ""
        self._config = model.config  # an engine's is another

    def forward(
        self,
        sequences: Tensor,
        action_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        allgather_logits: bool = False,
        return_logprobs: bool = False,
        return_entropy: bool = False,
        **more: Tensor,
    ) -> Any:
        """Compute log-probs [B, A] of the actions, or [B, S-1] of all; with `return_output`, also return the model's output."""
        real = torch.ones_like(sequences) if attention_mask is None else attention_mask
        next_tokens, kept = sequences.roll(-1, 1), None
        if self.packing_samples:
            if more:
                raise Unsupported(f"rows with {', '.join(more)} cannot be packed", hint="pass --no-packing")
            ids, packed_positions, kept = in_one_row(sequences, real)
            output = self.model(ids, attention_mask=None, position_ids=packed_positions, use_cache=False)
            next_tokens = next_tokens.flatten()[kept].unsqueeze(0)
        else:
            positions = None if self._has_images else positions_of(real)  # a model with images knows its own
            if self._types and images.PIXELS in more and self._types not in more:
                more[self._types] = images.types_of(self._config, sequences)
            given = {"attention_mask": real, "position_ids": positions, "use_cache": False, **nested(more)}
            output = self.model(sequences, **given)
        logits = output["logits"].float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        output["logits"] = logits
        if return_entropy:
            output.entropy = unpacked_values(entropies(logits), kept, sequences.shape)[:, :-1]
        log_probs = unpacked_values(log_probs_of(logits, next_tokens), kept, sequences.shape)[:, :-1]
        if action_mask is not None:
            log_probs = log_probs[:, -action_mask.shape[1] :] * action_mask.float()
        return (log_probs, output) if return_output or return_entropy else log_probs


def in_one_row(sequences: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attended tokens of [B, S] concatenated [1, T], their positions [1, T], and their places in B * S [T]."""
    kept = real.flatten().nonzero().flatten()
    ids, positions = (values.flatten()[kept].unsqueeze(0) for values in (sequences, positions_of(real)))
    return ids, positions, kept


def positions_of(real: Tensor) -> Tensor:
    """Return the position of each attended token in its row, from 0; 1 at padding."""
    return (real.long().cumsum(-1) - 1).masked_fill(real == 0, 1)


def log_probs_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Compute the log-prob of each label under fp32 logits; the whole softmax is never in memory at once."""
    flat = logits.reshape(-1, logits.shape[-1])
    sums = torch.cat([part.logsumexp(-1) for part in torch.split(flat, _POSITIONS_AT_ONCE)])
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - sums.view(labels.shape)


def entropies(logits: Tensor) -> Tensor:
    """Compute the entropy of each distribution given by fp32 logits."""
    flat = logits.reshape(-1, logits.shape[-1])
    parts = [part.logsumexp(-1) - (part.softmax(-1) * part).sum(-1) for part in torch.split(flat, _POSITIONS_AT_ONCE)]
    return torch.cat(parts).view(logits.shape[:-1])


def unpacked_values(values: Tensor, kept: Tensor | None, shape: torch.Size) -> Tensor:
    """Scatter values [1, kept] of attended tokens to their places in [B, S], 0 elsewhere."""
    if kept is None:
        return values
    return values.new_zeros(shape.numel()).index_put((kept,), values.flatten()).view(shape)


class RowsStrategy:
    """Runs a `RowsActor` under DeepSpeed, with the methods of a trainer's own strategy class.

    ring_group: this rank's process group for ring attention; None without ring attention.
    """

    ring_group: Any = None

    def __init__(self, choices: Choices, config: ReplayConfig, world_size: int, training: Any) -> None:
        self._dtype, self._zero, self._deepcompile = choices.dtype, config.zero_stage, config.deepcompile
        self._world_size, self._training = world_size, training

    def set_up(self, timeout: timedelta) -> None:
        """Create the process group, unless it exists."""
        _deepspeed().init_distributed(timeout=timeout)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))

    def ds_config(self, *, train: bool) -> dict[str, Any]:
        """Return the DeepSpeed configuration that an Actor is built with."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "train_batch_size": self._training.accumulation * self._world_size,
            "steps_per_print": 2**31,
            "zero_optimization": {"stage": self._zero},
            "bf16": {"enabled": self._dtype == "bf16"},
            "fp16": {"enabled": self._dtype == "fp16"},
            "gradient_clipping": self._training.max_norm,
            "compile": {"deepcompile": self._deepcompile and train},
        }
        if train:
            adam = {**self._training.adam, "torch_adam": not torch.cuda.is_available()}
            config["optimizer"] = {"type": "AdamW", "params": adam}
        return config

    def prepare(self, actor: Any, device: torch.device, *, train: bool) -> Any:
        """Replace the actor's model by a DeepSpeed engine and return the actor."""
        model = actor.model
        experts = {type(module) for module in model.modules() if "SparseMoeBlock" in type(module).__name__}
        if experts and self._zero == 3:  # each rank gathers all experts, whichever its tokens go to
            _deepspeed().utils.set_z3_leaf_modules(model, list(experts))
        parameters = {"model_parameters": [weight for weight in model.parameters() if weight.requires_grad]} if train else {}
        place = {"local_rank": int(os.environ.get("LOCAL_RANK", "-1"))}
        actor.model = _deepspeed().initialize(args=place, model=model, config=self.ds_config(train=train), **parameters)[0]
        if self._deepcompile and train:
            actor.model.compile()
        return actor

    def backward(self, loss: torch.Tensor, actor: Any, optimizer: Any) -> None:
        """Run the backward of a scalar loss."""
        actor.model.backward(loss)

    def step(self, actor: Any, optimizer: Any) -> None:
        """Run an optimizer step."""
        actor.model.step()


def _deepspeed() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise EnvironmentProblem(
            f"DeepSpeed cannot be imported: {error}", hint="pass `--backend plain` or `--backend fsdp2`"
        ) from error
    return deepspeed


_FORWARD_ARGUMENTS = frozenset(inspect.signature(RowsActor.forward).parameters) - {"self", "more"}


class RowsActors:
    """Builds and calls `RowsActor`s; a trainer's own class has the same members (`actordbg.trainers.trainer.Actors`)."""

    actor_class = RowsActor
    strategy = staticmethod(RowsStrategy)

    def prepare_process(self) -> None:
        """Make this process ready to build Actors, with CUDA or without."""
        prepare_deepspeed()

    def loads_checkpoint_dtype(self, dtype: str) -> bool:
        """Return whether the Actor gets `dtype` only by loading the checkpoint in the checkpoint's own dtype."""
        return False

    def build_actor(self, path: str, choices: Choices, ds_config: Mapping[str, Any] | None = None) -> RowsActor:
        """Build an Actor of the model at `path`, checked against `choices`. A ZeRO-3 `ds_config` partitions it while loading."""
        partitioning, trust = None, consent.is_given(choices.model)
        if ds_config is not None and ds_config["zero_optimization"]["stage"] == 3:
            from transformers.integrations.deepspeed import HfDeepSpeedConfig

            partitioning = HfDeepSpeedConfig(dict(ds_config))
        dtype = getattr(torch, DTYPES[choices.dtype])
        model = model_class(path, trust).from_pretrained(
            path, trust_remote_code=trust, attn_implementation=choices.attn, torch_dtype=dtype
        )
        model.config.use_cache = False
        follow_adapters(model, {})
        check(model, choices)
        actor = self.actor_class(model, packing=choices.packing, temperature=choices.temperature)
        actor.__dict__["partitioning"] = partitioning  # transformers reads it as long as it is alive
        return actor

    def make_call(self, actor: Any, dump: Dump, vocab_size: int, device: torch.device, ring_group: Any = None) -> ReplayedCall:
        """Build the captured call for this Actor. Raises Unsupported if it cannot be replayed."""
        return make_call(Signature(_FORWARD_ARGUMENTS | {*dump.inputs}, multimodal=True), dump, vocab_size, device)


def model_class(path: str, trust: bool) -> Any:
    """Return the class of transformers that loads the model at `path`, with or without images. trust: allow remote code."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    except ImportError as error:
        raise EnvironmentProblem(
            f"transformers cannot be imported here: {error}",
            hint="run `actordbg doctor` to see what is missing; pip install 'actordbg[replay]'",
        ) from error
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    return AutoModelForCausalLM if getattr(config, "vision_config", None) is None else AutoModelForImageTextToText


ROWS = RowsActors()
