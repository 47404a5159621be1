"""OpenRLHF as `trainer.Trainer` asks for it. Light: what needs torch or OpenRLHF is imported when it is called."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from actordbg.config.choices import Choices
    from actordbg.config.replay_config import ReplayConfig
    from actordbg.store.payload import Dump
    from actordbg.trainers.captured_call import ReplayedCall
    from actordbg.trainers.openrlhf.demo_programs import DemoProgram
    from actordbg.trainers.openrlhf.strategy import OpenRlhfStrategy
    from actordbg.trainers.rows_strategy import Steps


def _of(module: str, name: str) -> Any:
    """A member that is a function of this room. Its module, which needs torch or OpenRLHF, is imported when it is called."""

    def call(_self: OpenRlhf, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(f"actordbg.trainers.openrlhf.{module}"), name)(*args, **kwargs)

    call.__qualname__ = f"{module}.{name}"
    return call


class OpenRlhf:
    """OpenRLHF 0.7 to 0.11. See `trainer.Trainer` for what each member promises."""

    name = "OpenRLHF"
    package = "openrlhf"
    actor_module = "openrlhf.models.actor"
    actor_file = "openrlhf/models/actor.py"
    known_version = "0.11.2"
    oldest = (0, 7)
    newest = (0, 11)
    trap = "its Actor.forward takes num_actions; capture works from 0.7 on"
    modules: Mapping[str, str] = {
        "openrlhf.models.actor": "capture and replay",
        "openrlhf.utils.deepspeed": "replay --backend deepspeed",
        "openrlhf.trainer.sft_trainer": "SFT training",
        "openrlhf.cli.train_sft": "SFT training",
        "openrlhf.cli.train_dpo": "DPO training",
        "openrlhf.cli.train_ppo_ray": "PPO training under Ray",
    }
    losses: tuple[str, ...] = (
        "gpt_loss",
        "loss",
        "policy_loss",
        "act_loss",
        "actor_loss",
        "critic_loss",
        "loss_mean",
        "train_loss",
    )
    bar_epoch = r"\bepoch (\d{1,9})$"
    bar_evaluation = r"\beval\w*\b.*?(\d{1,15})$"

    @property
    def programs(self) -> Mapping[str, DemoProgram]:
        from actordbg.trainers.openrlhf.demo_programs import PROGRAMS

        return PROGRAMS

    sft_command = _of("demo_programs", "sft_command")
    sft_lacks = _of("demo_programs", "sft_lacks")
    support_cpu = _of("cpu", "install_cpu_support")
    build_actor = _of("build", "build_actor")
    open_ring = _of("ring_attention", "open_ring")
    ring_kernel = _of("ring_attention", "ring_kernel")
    close_ring = _of("ring_attention", "close_ring")
    absent = _of("late_imports", "absent")

    def prepare_process(self) -> None:
        from actordbg.trainers.openrlhf.cpu import allow_fp32_actor, stand_in_for_flash_attn

        if not self.support_cpu():
            allow_fp32_actor()
            stand_in_for_flash_attn()

    def loads_checkpoint_dtype(self, dtype: str) -> bool:
        from actordbg.trainers.openrlhf.build import import_actor, init_parameters, loads_checkpoint_dtype

        return loads_checkpoint_dtype(init_parameters(import_actor()), dtype)

    def make_call(self, actor: Any, dump: Dump, vocab_size: int, device: torch.device, ring_group: Any = None) -> ReplayedCall:
        from actordbg.trainers.captured_call import Signature, make_call

        return make_call(Signature.of(actor), dump, vocab_size, device, ring_group)

    def read_result(self, result: Any, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        from actordbg.trainers.captured_call import read_result

        return read_result(result, mask)

    def strategy(
        self, choices: Choices, config: ReplayConfig, world_size: int, training: Steps | None = None
    ) -> OpenRlhfStrategy:
        from actordbg.trainers.openrlhf.strategy import OpenRlhfStrategy

        return OpenRlhfStrategy(choices, config, world_size, training)
