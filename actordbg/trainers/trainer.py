"""The seam between actordbg and the trainer that it debugs: what a trainer provides, and `TRAINER`, the one that does.

Everything outside of `host/` knows an *Actor* with a `forward`, DeepSpeed, torch and transformers. What the trainer calls its
modules and arguments, how its Actor is built and called, how its log looks: all of that is asked of `TRAINER`.

| who asks | for |
|---|---|
| install, `run`, `doctor` | the module that holds the Actor, its package, the versions that are supported |
| `replay`, `actor init` | a process made ready, an Actor built, a captured call made again, its log-probs read |
| the deepspeed backend | the trainer's own DeepSpeed strategy |
| `demo`, `train-check --trainer sft` | real training programs, and how their logs tell progress |

Another trainer is another class with these members, in a room of its own beside `host/openrlhf/`. What a member needs (torch, the
trainer) it imports when it is called: this module is loaded in training processes and by every command.

    TRAINER.prepare_process()
    actor = TRAINER.build_actor("path/to/model", choices, ds_config=None)
    call = TRAINER.make_call(actor, dump, vocab_size, device)
    log_probs, entropy = TRAINER.read_result(actor(**call.arguments), call.mask)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from actordbg.trainers.openrlhf.adapter import OpenRlhf

if TYPE_CHECKING:
    import torch

    from actordbg.base.fault import EnvironmentProblem
    from actordbg.config.choices import Choices
    from actordbg.config.replay_config import ReplayConfig
    from actordbg.store.payload import Dump


class Call(Protocol):
    """One forward ready to be made.

    arguments: by name, tensors on their device. mask: bool, [B, A] or [B, S-1], on the CPU: what summaries are over. folded:
    token ids were folded into the vocabulary. notes: where the call differs from the record.
    """

    arguments: dict[str, Any]
    mask: torch.Tensor
    folded: bool
    notes: tuple[str, ...]


class Strategy(Protocol):
    """The trainer's DeepSpeed strategy. `ring_group`: this rank's process group for ring attention, None without."""

    ring_group: Any

    def set_up(self, timeout: timedelta) -> None:
        """Make the process group, unless there is one, and its rings."""

    def ds_config(self, *, train: bool) -> dict[str, Any]:
        """The DeepSpeed configuration that an Actor is built with."""

    def prepare(self, actor: Any, device: torch.device, *, train: bool) -> Any:
        """The actor with a DeepSpeed engine in the place of its model."""

    def backward(self, loss: torch.Tensor, actor: Any, optimizer: Any) -> None:
        """The backward of a scalar loss."""

    def step(self, actor: Any, optimizer: Any) -> None:
        """An optimizer step."""


class Program(Protocol):
    """One real training for the demo, small enough for a laptop.

    typed: the command without options, as a user types it. needs: modules that it imports. data: "prompts" or "conversations",
    and `rows` how many of them it takes. every: of how many steps one is told.
    """

    name: str
    typed: str
    needs: tuple[str, ...]
    data: str
    rows: int
    every: int

    def command(self, model: Path, data: Path, output: Path, port: int) -> list[str]:
        """The command line; `port` of this host is free."""

    def environment(self, temporary: Path) -> dict[str, str]:
        """What the processes find in their environment; `temporary` has a short path."""

    def hide_gpus(self) -> dict[str, str]:
        """Environment that keeps it on the CPU where GPUs are there, but not all that it needs to use them; else empty."""

    def progress(self, text: str) -> Iterator[tuple[str, int, str]]:
        """What lines of its log say: ("starting" or "loading", 0, words) or ("step", number, "reward 0.395")."""


@dataclass(frozen=True)
class SftOrder:
    """A supervised training by the trainer's own program. keys: of a row, what is asked and what is answered.

    batch: rows of a step, over all processes; micro_batch: of a micro-batch, in each process. samples: rows that are used.
    """

    model: Path
    data: Path
    keys: tuple[str, str]
    processes: int
    zero_stage: int
    tp: int
    ring: int
    dtype: str
    attn: str
    batch: int
    micro_batch: int
    samples: int
    epochs: int
    max_len: int
    lr: float
    weight_decay: float
    max_norm: float
    seed: int
    gradient_checkpointing: bool = False


class Actors(Protocol):
    """How Actors are built and called: a trainer's own, or those of the rows alone (`actordbg.trainers.rows_actor`).

    name: for people.
    """

    name: str

    def prepare_process(self) -> None:
        """Make this process ready to build Actors, with CUDA or without."""

    def loads_checkpoint_dtype(self, dtype: str) -> bool:
        """Whether the Actor gets `dtype` only by loading the checkpoint in its own."""

    def build_actor(self, path: str, choices: Choices, ds_config: Mapping[str, Any] | None = None) -> Any:
        """An Actor of the model at `path`, checked against `choices`."""

    def make_call(self, actor: Any, dump: Dump, vocab_size: int, device: torch.device, ring_group: Any = None) -> Call:
        """The captured call for this Actor. Raises Unsupported where it cannot be made."""

    def read_result(self, result: Any, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(log_probs, entropy or None) of what `forward` returned, both shaped like `mask`."""

    def strategy(self, choices: Choices, config: ReplayConfig, world_size: int, training: Any = None) -> Strategy:
        """The trainer's DeepSpeed strategy for this replay. `training`: how weights are stepped, None for never."""

    def open_ring(self, group: Any, attn: str) -> Any:
        """Do for this process group what the trainer does for a ring; returns the group."""

    def ring_kernel(self) -> str:
        """Which kernel the open ring runs."""

    def close_ring(self) -> None:
        """Take the ring out of this process again."""


class Trainer(Actors, Protocol):
    """What a trainer provides.

    package: its distribution and its import name. actor_module, actor_file: where `class Actor` is.
    known_version: the one that was tested. oldest, newest: the releases that are supported; `trap` says what is wrong with
    older ones. modules: what doctor imports, and what does not work without it. losses: how its logs name them, the one that is
    compared first. bar_epoch, bar_evaluation: regular expressions for a progress bar's title, with the epoch's number, and with
    the step that an evaluation belongs to.
    """

    package: str
    actor_module: str
    actor_file: str
    known_version: str
    oldest: tuple[int, int]
    newest: tuple[int, int]
    trap: str
    modules: Mapping[str, str]
    losses: tuple[str, ...]
    bar_epoch: str
    bar_evaluation: str

    @property
    def programs(self) -> Mapping[str, Program]:
        """The demo's trainings, by name."""

    def sft_command(self, order: SftOrder, output: Path, port: int) -> list[str]:
        """The command line of a supervised training; `port` of this host is free, `output` a folder that may be written."""

    def sft_lacks(self, backend: str) -> str:
        """Why the trainer's own program cannot train so; "" if it can."""

    def absent(self) -> EnvironmentProblem | None:
        """What building an Actor would raise where the trainer is not installed; None where it is. It is not imported."""

    def support_cpu(self) -> bool:
        """Make the trainer importable and runnable without CUDA; whether that was needed. Before it is imported."""


TRAINER: Trainer = OpenRlhf()
"""The trainer of this installation."""
