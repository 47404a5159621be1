"""An Actor of our own: a transformers model, and log-probs of rows. No trainer is imported, and none needs to be installed.

What a trainer's adapter recorded is replayed through it, and anything else on request (`--through rows`). It takes the arguments
that a captured call has, and returns what they ask for, so that every tool knows one kind of Actor:

    log_prob[row, t] = log softmax(logits[row, t] / temperature)[id at t + 1]

Positions count the attended tokens from 0, and 1 stands at padding, unless the call brought its own. Packed, the attended tokens
of all rows lie one behind the other, without a mask: transformers finds the borders where positions begin anew, with every
attention that is offered here.

    actor = ROWS.build_actor("path/to/model", choices)
    actor(sequences=ids, attention_mask=mask, action_mask=actions)     # [B, A]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actordbg.base.errors import EnvironmentProblem, Unsupported
from actordbg.config import consent
from actordbg.config.choices import Choices
from actordbg.config.replay_config import DTYPES, ReplayConfig
from actordbg.formats.nested_values import nested
from actordbg.trainers.built_model import check, follow_adapters
from actordbg.trainers.captured_call import ReplayedCall, Signature, make_call, read_result

if TYPE_CHECKING:
    from actordbg.store.payload import Dump
    from actordbg.trainers.rows_strategy import RowsStrategy, Steps

_CHUNK = 1024
"""Positions whose softmax over the vocabulary is summed at a time."""


class RowsActor(torch.nn.Module):
    """See the module. packing_samples, temperature: may be changed between calls."""

    def __init__(self, model: Any, *, packing: bool, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.packing_samples = packing
        self.temperature = temperature
        self._sees = getattr(model.config, "vision_config", None) is not None

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
        """Log-probs [B, A] of the actions, or [B, S-1] of all; with `return_output` a pair of them and the model's output."""
        real = torch.ones_like(sequences) if attention_mask is None else attention_mask
        following = sequences.roll(-1, 1)
        packed = self.packing_samples
        output, kept = self._packed(sequences, real, more) if packed else (self._padded(sequences, real, more), None)
        logits = output["logits"].float()
        if self.temperature != 1.0:
            logits = logits / self.temperature
        output["logits"] = logits
        if return_entropy:
            output.entropy = unpacked_values(entropies(logits), kept, sequences.shape)[:, :-1]
        labels = following if kept is None else following.flatten()[kept].unsqueeze(0)
        log_probs = unpacked_values(log_probs_of(logits, labels), kept, sequences.shape)[:, :-1]
        if action_mask is not None:
            log_probs = log_probs[:, -action_mask.shape[1] :] * action_mask.float()
        return (log_probs, output) if return_output or return_entropy else log_probs

    def _padded(self, sequences: Tensor, real: Tensor, more: Mapping[str, Tensor]) -> Any:
        places = None if self._sees else positions_of(real)  # a model with images knows its own
        return self.model(sequences, **{"attention_mask": real, "position_ids": places, "use_cache": False, **nested(more)})

    def _packed(self, sequences: Tensor, real: Tensor, more: Mapping[str, Tensor]) -> tuple[Any, Tensor]:
        if more:
            raise Unsupported(f"rows with {', '.join(more)} are not packed", hint="--no-packing")
        kept = real.flatten().nonzero().flatten()
        ids, places = (one.flatten()[kept].unsqueeze(0) for one in (sequences, positions_of(real)))
        return self.model(ids, attention_mask=None, position_ids=places, use_cache=False), kept


def positions_of(real: Tensor) -> Tensor:
    """The place of each attended token in its row, from 0; 1 where nothing is attended."""
    return (real.long().cumsum(-1) - 1).masked_fill(real == 0, 1)


def log_probs_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Of each label under fp32 logits; the softmax of all is never in memory at once."""
    flat = logits.reshape(-1, logits.shape[-1])
    sums = torch.cat([part.logsumexp(-1) for part in torch.split(flat, _CHUNK)])
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - sums.view(labels.shape)


def entropies(logits: Tensor) -> Tensor:
    """Of the distributions that fp32 logits stand for."""
    flat = logits.reshape(-1, logits.shape[-1])
    parts = [part.logsumexp(-1) - (part.softmax(-1) * part).sum(-1) for part in torch.split(flat, _CHUNK)]
    return torch.cat(parts).view(logits.shape[:-1])


def unpacked_values(values: Tensor, kept: Tensor | None, shape: torch.Size) -> Tensor:
    """Values [1, kept] of attended tokens at their places in [B, S], 0 elsewhere."""
    if kept is None:
        return values
    return values.new_zeros(shape.numel()).index_put((kept,), values.flatten()).view(shape)


_NAMES = frozenset(inspect.signature(RowsActor.forward).parameters) - {"self", "more"}


class RowsActors:
    """What builds and calls such Actors. See `actordbg.trainers.trainer.Actors` for what each member promises."""

    name = "rows"
    read_result = staticmethod(read_result)

    def prepare_process(self) -> None:
        from actordbg.trainers.deepspeed_cpu import prepare_deepspeed

        prepare_deepspeed()

    def loads_checkpoint_dtype(self, dtype: str) -> bool:
        return False

    def build_actor(self, path: str, choices: Choices, ds_config: Mapping[str, Any] | None = None) -> RowsActor:
        return build_rows_actor(path, choices, ds_config, RowsActor)

    def make_call(self, actor: Any, dump: Dump, vocab_size: int, device: torch.device, ring_group: Any = None) -> ReplayedCall:
        return make_call(Signature(_NAMES | {*dump.inputs}, multimodal=True), dump, vocab_size, device)

    def strategy(self, choices: Choices, config: ReplayConfig, world_size: int, training: Steps | None = None) -> RowsStrategy:
        from actordbg.trainers.rows_strategy import RowsStrategy

        return RowsStrategy(choices, config, world_size, training)

    def open_ring(self, group: Any, attn: str) -> Any:
        raise _no_ring()

    def ring_kernel(self) -> str:
        raise _no_ring()

    def close_ring(self) -> None:
        """There is none."""


ROWS = RowsActors()


def build_rows_actor(
    path: str, choices: Choices, ds_config: Mapping[str, Any] | None, kind: Callable[..., RowsActor]
) -> RowsActor:
    """An Actor of the model at `path`, checked against `choices`. `ds_config`: its ZeRO stage 3 partitions what is loaded."""
    kept = _partitioning(ds_config)
    dtype = getattr(torch, DTYPES[choices.dtype])
    trust = consent.is_given(choices.model)
    model = _class_for(path, trust).from_pretrained(
        path, trust_remote_code=trust, attn_implementation=choices.attn, torch_dtype=dtype
    )
    model.config.use_cache = False
    follow_adapters(model, {})
    check(model, choices)
    actor = kind(model, packing=choices.packing, temperature=choices.temperature)
    actor.__dict__["partitioning"] = kept  # transformers looks at it as long as it lives
    return actor


def _class_for(path: str, trust: bool) -> Any:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    except ImportError as error:
        raise EnvironmentProblem(
            f"transformers cannot be imported here: {error}",
            hint="`actordbg doctor` says what is missing; pip install 'actordbg[replay]'",
        ) from error
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    return AutoModelForCausalLM if getattr(config, "vision_config", None) is None else AutoModelForImageTextToText


def _partitioning(ds_config: Mapping[str, Any] | None) -> Any:
    if ds_config is None or ds_config["zero_optimization"]["stage"] != 3:
        return None
    from transformers.integrations.deepspeed import HfDeepSpeedConfig

    return HfDeepSpeedConfig(dict(ds_config))


def _no_ring() -> Unsupported:
    return Unsupported("ring attention is the trainer's own: rows are replayed without it", hint="--through trainer")
