"""OpenRLHF behind the interface of `actordbg.trainers.trainer`. Cheap to import: torch and OpenRLHF are imported when needed."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from actordbg.base.fault import EnvironmentProblem
from actordbg.trainers.openrlhf import cannot_import

if TYPE_CHECKING:
    import torch

    from actordbg.store.payload import Dump
    from actordbg.trainers.captured_call import ReplayedCall
    from actordbg.trainers.openrlhf.demo_programs import DemoProgram


def _of(where: str) -> Any:
    """Return a member that calls a function of this folder, importing its module (torch, OpenRLHF) at the call."""

    def call(_self: OpenRlhf, *args: Any, **kwargs: Any) -> Any:
        return resolve_name(f"{__package__}.{where}")(*args, **kwargs)

    return call


class OpenRlhf:
    """OpenRLHF 0.7 to 0.11.

    package: its distribution and import name. actor_module, actor_file: where `class Actor` is. known_version: the tested
    release. oldest, newest: the supported releases; `trap` says what is wrong with older ones. modules: modules that doctor
    imports, and what fails without each. losses: their names in its logs, the one to compare first. bar_epoch, bar_evaluation:
    regular expressions for a progress bar's title that capture the epoch, and the step of an evaluation. The other members are
    functions of this folder, and those of `actordbg.trainers.rows_actor.RowsActors`.
    """

    name = "OpenRLHF"
    package = "openrlhf"
    actor_module = "openrlhf.models.actor"
    actor_file = "openrlhf/models/actor.py"
    known_version = "0.11.2"
    oldest = (0, 7)
    newest = (0, 11)
    trap = "its Actor.forward takes num_actions; capture works from 0.7 on"
    modules = {
        "openrlhf.models.actor": "capture and replay",
        "openrlhf.utils.deepspeed": "replay --backend deepspeed",
        "openrlhf.trainer.sft_trainer": "SFT training",
        "openrlhf.cli.train_sft": "SFT training",
        "openrlhf.cli.train_dpo": "DPO training",
        "openrlhf.cli.train_ppo_ray": "PPO training under Ray",
    }
    losses = (
        "gpt_loss", "loss", "policy_loss", "act_loss", "actor_loss", "critic_loss", "loss_mean", "train_loss",
    )  # fmt: skip
    bar_epoch = r"\bepoch (\d{1,9})$"
    bar_evaluation = r"\beval\w*\b.*?(\d{1,15})$"

    @property
    def programs(self) -> Mapping[str, DemoProgram]:
        from actordbg.trainers.openrlhf.demo_programs import PROGRAMS

        return PROGRAMS

    prepare_process = _of("cpu:prepare_process")
    support_cpu = _of("cpu:install_cpu_support")
    loads_checkpoint_dtype = _of("build:loads_checkpoint_dtype")
    build_actor = _of("build:build_actor")
    strategy = _of("build:OpenRlhfStrategy")
    sft_rows = _of("sft_rows:sft_rows")
    total_loss = _of("recorded_loss:total_loss")
    open_ring = _of("build:open_ring")
    ring_kernel = _of("build:ring_kernel")
    close_ring = _of("build:close_ring")

    def absent(self) -> EnvironmentProblem | None:
        """Return the error that building an Actor would raise if OpenRLHF is not installed, else None. Does not import it."""
        from actordbg.base.imports import is_there  # not loaded in training

        return None if is_there(self.package) else cannot_import(f"No module named {self.package!r}")

    def make_call(self, actor: Any, dump: Dump, vocab_size: int, device: torch.device, ring_group: Any = None) -> ReplayedCall:
        from actordbg.trainers.captured_call import Signature, make_call

        return make_call(Signature.of(actor), dump, vocab_size, device, ring_group)
