"""The Actor in OpenRLHF's own DeepspeedStrategy: ZeRO 0 to 3, and DeepCompile where DeepSpeed has it.

The engine is the one that OpenRLHF's trainers would have made, from its own configuration (`get_train_ds_config`), through
`strategy.prepare`:

| Asked for | Engine |
|---|---|
| backward, ZeRO 1 or 2, or DeepCompile | training (`prepare((actor, optimizer settings))`), as a policy has |
| forward only, ZeRO 0 or 3 | evaluation (`prepare(actor)`), as a reference model has |

**No input may influence the next.** After `engine.backward` the gradients lie wherever the stage keeps them: in `.grad`
(stage 0), in flat averaged partitions (1, 2), in partitions by parameter id that are accumulated unless a step came between (3).
Only DeepSpeed's own `step` clears all of that, and only it computes the global gradient norm of a partitioned model. So `step`
is called, with the innermost optimizer's `step` replaced by one that does nothing: DeepSpeed reduces, unscales, takes the norm,
copies the unchanged master weights back and resets itself, and no weight ever changes, not even for a NaN gradient. The
learning-rate scheduler is taken out as well, and fp16's loss scale is put back.

Single gradients (`keep_gradients`) are taken between the two, where they are averaged and not clipped, with DeepSpeed's own
`safe_get_full_grad`, which gathers one parameter at a time.
"""

from __future__ import annotations

import argparse
import functools
import gc
import inspect
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from actordbg.actor import compiling
from actordbg.actor.backends.backend import Place, gradient_norm
from actordbg.actor.backends.processgroup import backend_in_use, dumps_of_lanes, initialise, rendezvous, timeout_of
from actordbg.actor.compiling import COMPILE_OPTIONS
from actordbg.actor.gradient_samples import GradientKeeper
from actordbg.base.errors import EnvironmentProblem, Unsupported
from actordbg.config.choices import Choices
from actordbg.formats.replay_record import ReplayConfig
from actordbg.host.openrlhf import ring_attention as ring
from actordbg.host.openrlhf.build import build_actor


class DeepspeedBackend:
    """An Actor whose model is a DeepSpeed engine. See `actordbg.actor.backends.backend.Backend`."""

    def __init__(self, path: str, choices: Choices, config: ReplayConfig, place: Place) -> None:
        self.tainted = False
        self.place = place
        self.device = place.device()
        self.can_train = choices.backward or config.zero_stage in (1, 2) or config.deepcompile
        self._deep = config.deepcompile
        self.config = config
        self.strategy = make_strategy(choices, config)
        self._open_process_group(choices)
        actor = build_actor(path, choices, self._ds_config())
        self.actor = self._prepare_training(actor) if self.can_train else self.strategy.prepare(actor)
        self._step_is_open = False
        self._invalid_groups = 0
        if self.can_train:
            self._watch_group_norms()

    @property
    def engine(self) -> Any:
        """The DeepSpeedEngine that OpenRLHF put in the place of `actor.model`."""
        return self.actor.model

    @property
    def model(self) -> Any:
        return self.engine.module

    def facts(self) -> dict[str, Any]:
        """The engine's own word on its stage, and which of OpenRLHF's two engines it is."""
        return {
            "backend": "deepspeed",
            "zero_stage": int(self.engine.zero_optimization_stage()),
            "world_size": int(torch.distributed.get_world_size()),
            "engine": "training" if self.can_train else "evaluation",
            "optimizer": type(self.engine.optimizer).__name__ if self.can_train else None,
            "compile": bool(self.engine.is_compiled) and not self._deep,
            "deepcompile": self._deep and self._is_deep(),
            "dist_backend": backend_in_use(),
            "ring": self.config.ring,
        } | ring.facts(self.ring_group)

    def is_collective(self, backward: bool) -> bool:
        """With several ranks: a backward averages gradients, ZeRO-3 gathers weights in every forward, a ring keys and values."""
        in_forward = self.engine.zero_optimization_stage() == 3 or self.config.ring > 1
        return self.place.world_size > 1 and (backward or in_forward)

    def compile(self, compile_backend: str) -> None:
        """torch.compile through the engine. DeepCompile is OpenRLHF's to switch on; here it is only checked that it is on."""
        if not self._deep:
            self.engine.compile(backend=compile_backend, compile_kwargs=dict(COMPILE_OPTIONS))
        elif not self._is_deep():
            raise Unsupported(
                "DeepSpeed did not accept DeepCompile for this configuration, and fell back to torch.compile",
                hint="--compile; rank 0's log has DeepSpeed's reason",
            )

    def uncompile(self) -> None:
        """The engine compiles its module in place and keeps two notes of it. DeepCompile cannot be undone."""
        if self._deep:
            raise Unsupported("DeepCompile cannot be taken off an engine", hint="a process of its own")
        compiling.take_off(self.engine.module)
        self.engine._is_compiled = False
        self.engine._compile_kwargs = {}

    def _is_deep(self) -> bool:
        """Whether DeepCompile is on: DeepSpeed says so since 0.18; before, only whether it is configured."""
        asked = getattr(self.engine, "is_deepcompile_active", self.engine.is_deepcompile_enabled)
        return bool(asked())

    def backward(self, loss: torch.Tensor, keeper: GradientKeeper | None = None) -> float:
        self._step_is_open = True
        self.strategy.backward(loss, self.actor, self.engine.optimizer)
        norm = None
        if self.engine.optimizer is self.engine.basic_optimizer:  # stage 0 in fp32: DeepSpeed keeps no norm of its own
            norm = gradient_norm(self.engine.module.parameters())
        if keeper is not None:
            self._hand_over(keeper)
        self._step_without_stepping()
        self._step_is_open = False
        return self._norm() if norm is None else norm

    def averaged_over(self, dump_id: str) -> list[str]:
        return dumps_of_lanes(dump_id, self.config.ring)

    def recover(self) -> None:
        """A failed forward leaves nothing at stages 0 to 2; within a backward, or at stage 3, DeepSpeed is lost."""
        gc.collect()
        if self._step_is_open or self.engine.zero_optimization_stage() == 3:
            self.tainted = True

    def save(self, folder: Path) -> None:
        import deepspeed

        partitioned = [p for p in self.model.parameters() if hasattr(p, "ds_id")]
        with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
            if self.place.rank == 0:
                state = {name: tensor.detach().cpu().clone() for name, tensor in self.model.state_dict().items()}
                self.model.save_pretrained(folder, state_dict=state)

    def close(self) -> None:
        """Free the engine. The process group stays: DeepSpeed keeps hold of it and cannot make a second one in a process."""
        ring.close(self.ring_group)
        self.engine.destroy()
        del self.actor
        gc.collect()

    def _open_process_group(self, choices: Choices) -> None:
        """OpenRLHF's own set-up: the process group (made before it where a backend is asked for), and its rings."""
        rendezvous(self.place)
        if self.config.dist_backend is not None:
            initialise(self.place, self.device, self.config)
        if self.config.ring > 1:
            ring.prepare(choices.attn)
        self.strategy.setup_distributed(timeout=timeout_of(self.config))
        self.ring_group = self.strategy.ring_attn_group if self.config.ring > 1 else None

    def _hand_over(self, keeper: GradientKeeper) -> None:
        """Every parameter's gradient, averaged and not yet clipped; fp16's loss scale taken out."""
        from deepspeed.utils import safe_get_full_grad

        scale = float(getattr(self.engine.optimizer, "loss_scale", 1.0))
        for name, parameter in self.model.named_parameters():
            gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
            if gradient is not None:
                keeper.take(name, gradient if scale == 1.0 else gradient.float() / scale)

    def _ds_config(self) -> dict[str, Any]:
        config: dict[str, Any]
        if not self.can_train:
            config = self.strategy.get_ds_eval_config(offload=False)
        elif "is_actor" in inspect.signature(self.strategy.get_ds_train_config).parameters:
            config = self.strategy.get_ds_train_config(is_actor=True)
        else:
            config = self.strategy.get_ds_train_config()
        return config

    def _prepare_training(self, actor: Any) -> Any:
        if hasattr(self.strategy, "create_optimizer"):
            prepared = self.strategy.prepare((actor, self._optimizer(actor), None), is_rlhf=True)
        else:
            prepared = self.strategy.prepare((actor, _OPTIMIZER))
        actor = prepared[0]
        actor.model.basic_optimizer.step = _no_step
        actor.model.lr_scheduler = None
        return actor

    def _optimizer(self, actor: Any) -> Any:
        """For OpenRLHF before 0.11, whose FusedAdam needs CUDA (or a minute of C++)."""
        if self.device.type == "cuda":
            return self.strategy.create_optimizer(actor, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
        return torch.optim.AdamW(actor.model.parameters(), lr=0.0, weight_decay=0.0)

    def _norm(self) -> float:
        """DeepSpeed's gradient norm of the last step; NaN where a gradient was not finite.

        DeepSpeed says -1 for the norm of a parameter group that is not finite, and then takes the norm *of those*: with two
        groups a NaN gradient comes out as 1.414. So the groups' norms are watched.
        """
        norm = self.engine.get_global_grad_norm()
        broken = norm is None or float(norm) < 0 or self._invalid_groups
        self._invalid_groups = 0
        return math.nan if broken else float(norm)

    def _watch_group_norms(self) -> None:
        optimizer = self.engine.optimizer
        original = getattr(optimizer, "get_grad_norm_direct", None)
        if original is None:
            return

        @functools.wraps(original)
        def get_grad_norm_direct(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            self._invalid_groups += float(norm) < 0
            return norm

        optimizer.get_grad_norm_direct = get_grad_norm_direct

    def _step_without_stepping(self) -> None:
        """DeepSpeed's step, in which no weight moves: it takes the norm and clears the gradients.

        Where a gradient is not finite DeepSpeed skips the step and keeps the norm of the step before: that must not be taken
        for this one's. And fp16's dynamic loss scale reacts to what it saw: it is put back.
        """
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "_global_grad_norm"):
            optimizer._global_grad_norm = math.nan
        holders = [one for one in (optimizer, getattr(optimizer, "loss_scaler", None)) if one is not None]
        before = [(one, name, getattr(one, name)) for one in holders for name in _LOSS_SCALE if hasattr(one, name)]
        self.strategy.optimizer_step(optimizer, self.actor, None)
        for one, name, value in before:
            with suppress(AttributeError):  # some are properties of the optimizer that read the scaler's
                setattr(one, name, value)


def make_strategy(choices: Choices, config: ReplayConfig) -> Any:
    """OpenRLHF's DeepspeedStrategy for this replay; it reads its settings from `args`, nested since 0.10 and flat before."""
    try:
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
        local_rank=-1,
        **settings,
        ds=argparse.Namespace(**settings),
        train=argparse.Namespace(dynamic_batch_enable=False),
    )
    place = Place.from_environment()
    options = {
        "seed": choices.seed,
        "max_norm": 1.0,
        "micro_train_batch_size": 1,
        "train_batch_size": place.world_size // config.ring,
        "zero_stage": config.zero_stage,
        "args": args,
    }
    if "bf16" in inspect.signature(DeepspeedStrategy.__init__).parameters:
        options["bf16"] = choices.dtype == "bf16"
    return DeepspeedStrategy(**options)


_OPTIMIZER = {
    "optim": "adam",
    "adam": {"lr": 0.0, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0},
    "lr_scheduler": "constant",
    "max_norm": 1.0,
    "scheduler_steps": 1,
}
"""What `prepare` takes since OpenRLHF 0.11; the learning rate does not matter, see `_no_step`."""


_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""State of DeepSpeed's fp16 loss scaling, on its optimizers or on their scaler."""


def _no_step(*_args: Any, **_kwargs: Any) -> None:
    """Stands for the innermost optimizer's step: a replay changes no weights."""
