"""OpenRLHF's own DeepspeedStrategy, as a replay uses it: its process group, its DeepSpeed configuration, its engines.

The strategy reads its settings from `args`, nested since 0.10 and flat before. Engines come out of its `prepare`:

| engine | call | as for |
|---|---|---|
| training | `prepare((actor, optimizer settings))` | a policy |
| evaluation | `prepare(actor)` | a reference model |
"""

from __future__ import annotations

import argparse
import inspect
from datetime import timedelta
from typing import Any

import torch

from actordbg.base.errors import EnvironmentProblem
from actordbg.config.choices import Choices
from actordbg.config.replay_config import ReplayConfig
from actordbg.trainers.openrlhf.late_imports import compiling_at_the_first_call
from actordbg.trainers.openrlhf.ring_attention import prepare_ring
from actordbg.trainers.rows_strategy import Steps

_OPTIMIZER = {
    "optim": "adam",
    "adam": {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0},
    "lr_scheduler": "constant",
    "max_norm": 1.0,
    "scheduler_steps": 1,
}
"""What `prepare` takes since OpenRLHF 0.11. The learning rate does not matter where no weight is stepped."""


class OpenRlhfStrategy:
    """A strategy for one replay. `ring_group`: this rank's ring, None without ring attention and before `set_up`."""

    def __init__(self, choices: Choices, config: ReplayConfig, world_size: int, training: Steps | None = None) -> None:
        self.ring_group: Any = None
        self._attn = choices.attn
        self._ring = config.ring > 1
        self._training = training
        self._strategy = _make(choices, config, world_size, training)

    def set_up(self, timeout: timedelta) -> None:
        if self._ring:
            prepare_ring(self._attn)
        self._strategy.setup_distributed(timeout=timeout)
        self.ring_group = self._strategy.ring_attn_group if self._ring else None

    def ds_config(self, *, train: bool) -> dict[str, Any]:
        config: dict[str, Any]
        if not train:
            config = self._strategy.get_ds_eval_config(offload=False)
        elif "is_actor" in inspect.signature(self._strategy.get_ds_train_config).parameters:
            config = self._strategy.get_ds_train_config(is_actor=True)
        else:
            config = self._strategy.get_ds_train_config()
        return config

    def prepare(self, actor: Any, device: torch.device, *, train: bool) -> Any:
        if not train:
            return self._strategy.prepare(actor)
        if hasattr(self._strategy, "create_optimizer"):
            return self._strategy.prepare((actor, self._optimizer(actor, device), None), is_rlhf=True)[0]
        settings: dict[str, Any] = dict(_OPTIMIZER)
        if self._training is not None:
            settings |= {"adam": self._training.adam, "max_norm": self._training.max_norm}
        return self._strategy.prepare((actor, settings))[0]

    def backward(self, loss: torch.Tensor, actor: Any, optimizer: Any) -> None:
        self._strategy.backward(loss, actor, optimizer)

    def step(self, actor: Any, optimizer: Any) -> None:
        self._strategy.optimizer_step(optimizer, actor, None)

    def _optimizer(self, actor: Any, device: torch.device) -> Any:
        """For OpenRLHF before 0.11, whose FusedAdam needs CUDA (or a minute of C++)."""
        adam: dict[str, Any] = {"lr": 0.0, "betas": (0.9, 0.95), "weight_decay": 0.0}
        if self._training is not None:
            adam = self._training.adam
        if device.type == "cuda":
            return self._strategy.create_optimizer(actor, **adam)
        return torch.optim.AdamW(actor.model.parameters(), **adam)


def _make(choices: Choices, config: ReplayConfig, world_size: int, training: Steps | None) -> Any:
    try:
        with compiling_at_the_first_call("openrlhf.utils.deepspeed"):
            from openrlhf.utils.deepspeed import DeepspeedStrategy
    except ImportError as error:
        raise EnvironmentProblem(
            f"OpenRLHF's DeepSpeed strategy cannot be imported: {error}",
            hint="`actordbg doctor` says what is missing; `--backend plain` needs no DeepSpeed engine",
        ) from error
    settings = {
        "param_dtype": choices.dtype,
        "bf16": choices.dtype == "bf16",
        "deepcompile": config.deepcompile,
        "ring_attn_size": config.ring,
    }
    args = argparse.Namespace(
        local_rank=-1, **settings, ds=argparse.Namespace(**settings), train=argparse.Namespace(dynamic_batch_enable=False)
    )
    options = {
        "seed": choices.seed,
        "max_norm": 1.0 if training is None else training.max_norm,
        "micro_train_batch_size": 1,
        "train_batch_size": (1 if training is None else training.accumulation) * world_size // config.ring,
        "zero_stage": config.zero_stage,
        "args": args,
    }
    if "bf16" in inspect.signature(DeepspeedStrategy.__init__).parameters:
        options["bf16"] = choices.dtype == "bf16"
    return DeepspeedStrategy(**options)
