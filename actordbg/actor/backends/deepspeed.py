"""The Actor in the trainer's own DeepSpeed strategy: ZeRO 0 to 3, and DeepCompile where DeepSpeed has it.

The engine is what the trainer would build from its own DeepSpeed configuration:

| Requested | Engine |
|---|---|
| backward, ZeRO 1 or 2, or DeepCompile | training, as a policy has |
| forward only, ZeRO 0 or 3 | evaluation, as a reference model has |

**No input may influence the next.** After `engine.backward` the gradients lie wherever the stage keeps them: in `.grad`
(stage 0), in flat averaged partitions (1, 2), in partitions by parameter id that are accumulated unless a step came between (3).
Only DeepSpeed's own `step` clears that, except what stage 3 keeps for parameters without a gradient, and only it computes the
global gradient norm of a partitioned model. So `step` is called, with the innermost optimizer's `step` replaced by a no-op:
DeepSpeed reduces, unscales, computes the norm, copies the unchanged master weights back and resets itself, and no weight ever
changes, not even for a NaN gradient. The learning-rate scheduler is removed as well, and fp16's loss scale is restored.

Single gradients (`keep_gradients`) are read between `backward` and `step`, when they are averaged and not clipped, with
DeepSpeed's own `safe_get_full_grad`, which gathers one parameter at a time.
"""

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from actordbg.actor.backends.backend import COMPILE_OPTIONS, Backend, initialize, rendezvous, timeout_of
from actordbg.actor.backends.training import Norms, Stepped, Training
from actordbg.actor.forward_outcome import GradientKeeper, norm_of
from actordbg.base.errors import Unsupported
from actordbg.config.choices import Choices


class DeepspeedBackend(Backend):
    """An Actor whose model is a DeepSpeed engine."""

    def open(self, path: str, choices: Choices, training: Training | None) -> None:
        config = self.config
        train = choices.backward or config.zero_stage in (1, 2) or config.deepcompile
        self.can_train, self._deep = train, config.deepcompile
        self.strategy = self.actors.strategy(choices, config, self.place.world_size, training or Training(lr=0.0))
        rendezvous(self.place)
        if config.dist_backend is not None:  # before the trainer's own set-up, which takes the group that is there
            initialize(self.place, self.device, config)
        self.strategy.set_up(timeout_of(config))
        self.ring_group = self.strategy.ring_group
        actor = self._built(path, choices, training, self.strategy.ds_config(train=train))
        self.actor = self.strategy.prepare(actor, self.device, train=train)
        self._moved = torch.zeros((), dtype=torch.float64)
        self._step_is_open, self._invalid_groups = False, 0
        if train:
            innermost = self.engine.basic_optimizer
            innermost.step = _no_step if training is None else self._measured(innermost)
            self.engine.lr_scheduler = None
            if training is not None:
                package, _, _ = type(innermost).__module__.partition(".")
                self.stepped_by = f"{package}'s {type(innermost).__name__} in {type(self.engine.optimizer).__name__}"
            self._watch_group_norms()

    @property
    def engine(self) -> Any:
        """The DeepSpeedEngine that replaces `actor.model`."""
        return self.actor.model

    @property
    def model(self) -> Any:
        return self.engine.module

    def facts(self) -> dict[str, Any]:
        """Add the engine's own ZeRO stage, and which of the trainer's two engines it is."""
        return super().facts() | {
            "zero_stage": int(self.engine.zero_optimization_stage()),
            "engine": "training" if self.can_train else "evaluation",
            "optimizer": type(self.engine.optimizer).__name__ if self.can_train else None,
            "compile": bool(self.engine.is_compiled) and not self._deep,
            "deepcompile": self._deep and self._is_deep(),
        }

    def is_collective(self, backward: bool) -> bool:
        """Return True where ranks average gradients (backward), gather weights (ZeRO-3) or gather keys and values (a ring)."""
        in_forward = self.engine.zero_optimization_stage() == 3 or self.config.ring > 1
        return self.place.world_size > 1 and (backward or in_forward)

    def compile(self, compile_backend: str) -> None:
        """Call torch.compile through the engine. The trainer turns DeepCompile on; this checks that it is on."""
        if not self._deep:
            self.engine.compile(backend=compile_backend, compile_kwargs=dict(COMPILE_OPTIONS))
        elif not self._is_deep():
            raise Unsupported(
                "DeepSpeed did not accept DeepCompile for this configuration, and fell back to torch.compile",
                hint="use --compile; rank 0's log has DeepSpeed's reason",
            )

    def uncompile(self) -> None:
        """Undo the engine's in-place compilation, and its two notes of it. Unsupported for DeepCompile, which stays."""
        if self._deep:
            raise Unsupported("an engine cannot undo DeepCompile", hint="start another process for it")
        super().uncompile()
        self.engine._is_compiled = False
        self.engine._compile_kwargs = {}

    def _is_deep(self) -> bool:
        """Return whether DeepCompile is on or, before DeepSpeed 0.18, whether it is configured."""
        is_active = getattr(self.engine, "is_deepcompile_active", self.engine.is_deepcompile_enabled)
        return bool(is_active())

    def backward(self, loss: Tensor, keeper: GradientKeeper | None = None) -> float:
        self._step_is_open = True
        self._forget_gradients()
        self.strategy.backward(loss, self.actor, self.engine.optimizer)
        if keeper is not None:
            self._hand_over(keeper)
        norm = self._norm_of(self._step_without_stepping)
        self._step_is_open = False
        return norm

    def _forget_gradients(self) -> None:
        """Clear what stage 3 keeps of the backward before: unreached parameters would have its gradients."""
        optimizer = self.engine.optimizer
        held = [getattr(optimizer, "grad_partitions_flat_buffer", None)]
        held += [part.grad for part in getattr(optimizer, "fp32_partitioned_groups_flat", ())]  # of an offloaded optimizer
        for buffer in held:
            if buffer is not None:
                buffer.zero_()

    def accumulate(self, loss: Tensor) -> None:
        """Run the backward of a micro-batch, and the engine's bookkeeping after each but a step's last micro-batch.

        The engine divides the loss by the number of micro-batches itself.
        """
        self.strategy.backward(loss, self.actor, self.engine.optimizer)
        if not self.engine.is_gradient_accumulation_boundary():
            self.strategy.step(self.actor, self.engine.optimizer)

    def step(self) -> Norms:
        self._moved.zero_()
        norm = self._norm_of(self._step_engine)
        if self.place.world_size > 1 and not self._own_norm:  # each rank stepped its part
            torch.distributed.all_reduce(self._moved)
        return norm, math.sqrt(float(self._moved))

    def stepped(self) -> Stepped:
        """Return the partitions that DeepSpeed steps, and the weights that it writes from them; without fp16's loss scale."""
        innermost = self.engine.basic_optimizer
        in_groups = [tensor for group in innermost.param_groups for tensor in group["params"]]
        stepped = getattr(self.engine.optimizer, "fp32_partitioned_groups_flat", in_groups)  # of stage 3
        copies = [] if self._own_norm else [getattr(weight, "ds_tensor", weight) for weight in self.model.parameters()]
        return Stepped(innermost, stepped, copies)

    def _measured(self, innermost: Any) -> Any:
        """Wrap the innermost optimizer's own step, and add up how far it moves the fp32 weights of this rank."""
        original = innermost.step

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            stepped = [
                parameter for group in innermost.param_groups for parameter in group["params"] if parameter.grad is not None
            ]
            before = [parameter.detach().clone() for parameter in stepped]
            result = original(*args, **kwargs)
            for now, was in zip(stepped, before, strict=True):
                self._moved += norm_of(now - was) ** 2
            return result

        return step

    @property
    def _own_norm(self) -> bool:
        """True for stage 0 in fp32: DeepSpeed keeps no norm, and every rank steps all weights."""
        return self.engine.optimizer is self.engine.basic_optimizer

    @contextlib.contextmanager
    def without_engine(self) -> Iterator[None]:
        """Let the Actor call the module itself: the engine would take a derivative for a training step's backward, and reduce."""
        holders = [
            (hook.id, hooks)
            for hook in getattr(self.engine.optimizer, "_leaf_module_hooks", ())
            if hook.id in (hooks := hook.hooks_dict_ref() or {})
        ]
        # ZeRO 3 reduces the gradients of experts in hooks that any derivative through them runs, and gives zeros to those without
        taken = [(hooks, key, hooks.pop(key)) for key, hooks in holders]
        vars(self.actor)["model"] = self.engine.module
        try:
            yield
        finally:
            del vars(self.actor)["model"]
            for hooks, key, hook in taken:
                hooks[key] = hook

    def gather(self, name: str) -> Tensor:
        """Copy a parameter's full value. Under ZeRO-3, Unsupported while DeepSpeed itself is gathering it for the engine."""
        parameter: Tensor = self.model.get_parameter(name)
        status = str(getattr(getattr(parameter, "ds_status", None), "name", "AVAILABLE"))
        if status == "AVAILABLE":
            return parameter.detach().clone()
        if status != "NOT_AVAILABLE":
            raise Unsupported(f"DeepSpeed is gathering {name} ahead", hint="stop before the forward, or before another layer")
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def recover(self) -> None:
        """Set `tainted` after a failed backward, or at stage 3: a failed forward leaves nothing behind only at stages 0 to 2."""
        gc.collect()
        if self._step_is_open or self.engine.zero_optimization_stage() == 3:
            self.tainted = True

    def close(self) -> None:
        """Free the engine. The process group stays: DeepSpeed holds on to it and cannot create a second group in a process."""
        self.engine.destroy()
        super().close()

    def _hand_over(self, keeper: GradientKeeper) -> None:
        """Hand over every parameter's gradient: averaged, not yet clipped, without fp16's loss scale."""
        from deepspeed.utils import safe_get_full_grad

        scale = float(getattr(self.engine.optimizer, "loss_scale", 1.0))
        for name, parameter in self.model.named_parameters():
            gradient = safe_get_full_grad(parameter) if parameter.requires_grad else None
            if gradient is not None:
                keeper.take(name, gradient if scale == 1.0 else gradient.float() / scale)

    def _norm_of(self, step: Callable[[], None]) -> float:
        """Run `step` and return the norm of its gradients, NaN if a gradient was not finite.

        DeepSpeed reports -1 as the norm of a parameter group that is not finite, and then computes the norm *of the groups'
        norms*: with two groups a NaN gradient comes out as 1.414. So the groups' norms are watched.
        """
        if self._own_norm:
            norm = self._total(parameter.grad for parameter in self.model.parameters() if parameter.grad is not None)
            step()
            return norm
        step()
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

    def _step_engine(self) -> None:
        """Run DeepSpeed's step. In bf16 and fp16 it skips gradients that are not finite, and would keep the last norm."""
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "_global_grad_norm"):
            optimizer._global_grad_norm = math.nan
        self.strategy.step(self.actor, optimizer)

    def _step_without_stepping(self) -> None:
        """Run DeepSpeed's step without moving a weight: it computes the norm and clears the gradients.

        fp16's dynamic loss scale reacts to the gradients, and is restored.
        """
        optimizer = self.engine.optimizer
        holders = [holder for holder in (optimizer, getattr(optimizer, "loss_scaler", None)) if holder is not None]
        before = [(holder, name, getattr(holder, name)) for holder in holders for name in _LOSS_SCALE if hasattr(holder, name)]
        self._step_engine()
        for holder, name, value in before:
            with contextlib.suppress(AttributeError):  # some are properties of the optimizer that read the scaler's
                setattr(holder, name, value)


_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""State of DeepSpeed's fp16 loss scaling, on its optimizers or on their scaler."""


def _no_step(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for the innermost optimizer's step: a replay changes no weights."""
