"""DeepSpeed around an Actor of rows, without a trainer: a process group, a plain DeepSpeed configuration, an engine."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Protocol

import torch

from actordbg.base.errors import EnvironmentProblem
from actordbg.config.choices import Choices
from actordbg.config.replay_config import ReplayConfig


class Steps(Protocol):
    """How weights are stepped, where they are: `actordbg.actor.backends.training.Training`."""

    @property
    def adam(self) -> dict[str, Any]: ...
    @property
    def max_norm(self) -> float: ...
    @property
    def accumulation(self) -> int: ...


class RowsStrategy:
    """See `actordbg.trainers.trainer.Strategy` for what each member promises."""

    ring_group: Any = None

    def __init__(self, choices: Choices, config: ReplayConfig, world_size: int, training: Steps | None = None) -> None:
        self._dtype, self._zero, self._deep = choices.dtype, config.zero_stage, config.deepcompile
        self._world_size, self._training = world_size, training

    def set_up(self, timeout: timedelta) -> None:
        _deepspeed().init_distributed(timeout=timeout)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))

    def ds_config(self, *, train: bool) -> dict[str, Any]:
        accumulation = 1 if self._training is None else self._training.accumulation
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "train_batch_size": accumulation * self._world_size,
            "steps_per_print": 2**31,
            "zero_optimization": {"stage": self._zero},
            "bf16": {"enabled": self._dtype == "bf16"},
            "fp16": {"enabled": self._dtype == "fp16"},
            "gradient_clipping": 1.0 if self._training is None else self._training.max_norm,
            "compile": {"deepcompile": self._deep and train},
        }
        if train:
            adam = {"lr": 0.0, "weight_decay": 0.0} if self._training is None else dict(self._training.adam)
            config["optimizer"] = {"type": "AdamW", "params": {**adam, "torch_adam": not torch.cuda.is_available()}}
        return config

    def prepare(self, actor: Any, device: torch.device, *, train: bool) -> Any:
        model = actor.model
        experts = {type(one) for one in model.modules() if "SparseMoeBlock" in type(one).__name__}
        if experts and self._zero == 3:  # each rank gathers all experts, whichever its tokens go to
            _deepspeed().utils.set_z3_leaf_modules(model, list(experts))
        parameters = {"model_parameters": [one for one in model.parameters() if one.requires_grad]} if train else {}
        place = {"local_rank": int(os.environ.get("LOCAL_RANK", "-1"))}
        actor.model = _deepspeed().initialize(args=place, model=model, config=self.ds_config(train=train), **parameters)[0]
        if self._deep and train:
            actor.model.compile()
        return actor

    def backward(self, loss: torch.Tensor, actor: Any, optimizer: Any) -> None:
        actor.model.backward(loss)

    def step(self, actor: Any, optimizer: Any) -> None:
        actor.model.step()


def _deepspeed() -> Any:
    try:
        import deepspeed
    except ImportError as error:
        raise EnvironmentProblem(
            f"DeepSpeed cannot be imported: {error}", hint="`--backend plain` and `--backend fsdp2` need no DeepSpeed"
        ) from error
    return deepspeed
