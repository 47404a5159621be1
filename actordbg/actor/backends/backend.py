"""The base backend: an Actor built and placed, a backward that leaves nothing behind, and the process group of the ranks.

Ranks lie in a mesh (dp, sp, tp) whose last dimension varies fastest, as in the trainer's strategies. Adjacent ranks share an
input: a *lane* of sp x tp ranks. Lanes are data-parallel replicas.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actordbg.actor.actors import actors_of
from actordbg.actor.backends.training import AdamSteps, Norms, Stepped, Training, freeze
from actordbg.actor.forward_outcome import GradientKeeper, norm_of, release
from actordbg.actor.models import locate
from actordbg.base.errors import UsageError
from actordbg.base.owners import own_cache
from actordbg.config import consent
from actordbg.config.choices import Choices
from actordbg.config.replay_config import COMPILE_BACKENDS, DTYPES, ReplayConfig
from actordbg.debug import stops
from actordbg.trainers.trainer import TRAINER

LEAST_TIMEOUT_S = 3600.0
"""Least timeout of collectives, the trainer's own: finding hangs is the job of the replay's supervisor."""
PAUSE_S = 30 * 86400.0
COMPILE_OPTIONS = {"dynamic": True}
"""Keyword arguments of `module.compile`, in every backend."""


class Backend:
    """Runs an Actor alone on this rank's device; ranks are independent of each other.

    Other backends override `open` and what their layout changes: with an engine `backward` and the steps, with shards `_total`
    and `_whole`. `actor` is callable as the trainer calls it, `actors` built it; inputs go to `device`. tainted: a failure left
    something behind that cannot be cleared. can_train: built so that `backward` works.
    ring_group: the process group of this rank's ring, None without ring attention: `forward` gets it as `ring_attn_group`.
    stepped_by: the optimizer, in words; "" where no weight is stepped.
    """

    actor: Any
    tainted = False
    can_train = True
    ring_group: Any = None
    stepped_by = ""
    _adam: AdamSteps

    def __init__(self, path: str, choices: Choices, config: ReplayConfig, training: Training | None = None) -> None:
        self.config, self.place, self.actors = config, Place.from_environment(), actors_of(choices)
        self.device = self.place.device()
        self.open(path, choices, training)

    def open(self, path: str, choices: Choices, training: Training | None) -> None:
        """Build the Actor of the model at `path`. training: how its weights are stepped."""
        self.actor = self._built(path, choices, training).to(self.device)
        if training is not None:
            if training.wide:
                self.actor.float()
            self.step_with_adam(training)

    def _built(self, path: str, choices: Choices, training: Training | None, *more: Any) -> Any:
        """Build the Actor, of whose parameters some are not trained."""
        actor = self.actors.build_actor(path, choices, *more)
        if training is not None:
            freeze(actor.model, training.frozen)
        return actor

    def step_with_adam(self, training: Training) -> None:
        """Step the built model's weights with torch's own optimizer."""
        self.stepped_by = "torch's AdamW"
        self._adam = AdamSteps(self.model.parameters(), training)

    @property
    def model(self) -> Any:
        """The transformers model itself, without any wrapper."""
        return self.actor.model

    def facts(self) -> dict[str, Any]:
        """Return the backend's part of `session.resolved`, read off what was built. ZeRO stage 0 partitions nothing."""
        facts = {
            "backend": self.config.backend,
            "rank": self.place.rank,
            "world_size": self.place.world_size,
            "engine": None,
            "zero_stage": 0,
            "compile": getattr(self.model, "_compiled_call_impl", None) is not None,
            "deepcompile": False,
        }
        if dist.is_initialized():
            facts |= {"world_size": dist.get_world_size(), "dist_backend": str(dist.get_backend()), "ring": self.config.ring}
        return facts if self.ring_group is None else facts | {"ring_kernel": TRAINER.ring_kernel()}

    def is_collective(self, backward: bool) -> bool:
        """Return whether every rank has to take part in a forward (and backward)."""
        return False

    def compile(self, compile_backend: str) -> None:
        """torch.compile the model through "inductor", "aot_eager" or "eager"; shapes are dynamic."""
        self.model.compile(backend=compile_backend, **COMPILE_OPTIONS)

    def uncompile(self) -> None:
        """Undo `compile` on the module; torch's own compiler state stays."""
        self.model._compiled_call_impl = None

    def backward(self, loss: Tensor, keeper: GradientKeeper | None = None) -> float:
        """Run backward from the scalar `loss`, return the gradients' global L2 norm, and clear the gradients. Weights stay.

        With a keeper, every parameter's full gradient is handed to it. Ranks that compute together must all pass a keeper.
        """
        loss.backward()  # type: ignore[no-untyped-call]
        self._complete_gradients()
        parameters = [(name, p) for name, p in self.model.named_parameters() if p.grad is not None]
        norm = self._total(p.grad for _, p in parameters)
        if keeper is not None:
            for name, parameter in parameters:
                keeper.take(name, self._whole(parameter.grad))
        self.model.zero_grad(set_to_none=True)
        return norm

    def accumulate(self, loss: Tensor) -> None:
        """Run the backward of a step's micro-batch, in an Actor that was opened for training."""
        (loss / self._adam.training.accumulation).backward()  # type: ignore[no-untyped-call]

    def step(self) -> Norms:
        """Clip, step and clear what was accumulated. Every rank has to call it."""
        self._complete_gradients()
        return self._adam.step(self._total)

    def stepped(self) -> Stepped:
        """Return what this rank's next step depends on, in an Actor that was opened for training."""
        return self._adam.stepped

    def _complete_gradients(self) -> None:
        """Add up, after a backward, the gradients that ranks hold in parts."""

    def _total(self, tensors: Iterable[Tensor]) -> float:
        """Return the L2 norm over tensors that lie as parameters do, in float64 like the truth's; 0.0 for none."""
        return math.sqrt(sum(norm_of(tensor) ** 2 for tensor in tensors))

    def _whole(self, tensor: Tensor) -> Tensor:
        """Return a whole parameter or gradient. Collective where ranks have parts of it."""
        return tensor

    def without_engine(self) -> contextlib.AbstractContextManager[None]:
        """Keep the engine around the model, inside the block, from reacting to derivatives of the Actor's outputs."""
        return contextlib.nullcontext()

    def gather(self, name: str) -> Tensor:
        """Copy a parameter's full value. Collective where parameters are sharded."""
        return self._whole(self.model.get_parameter(name).detach()).clone()

    def averaged_over(self, dump_id: str) -> list[str]:
        """Return, after a backward, the dump id of each lane in the gradients' average. Collective where backward is."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return [dump_id]
        ids: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ids, dump_id)
        return ids[:: self.config.tp * self.config.ring]

    def recover(self) -> None:
        """Drop what a failed input left behind, or set `tainted` if that is not possible."""
        self.actor.zero_grad(set_to_none=True)
        release(self.device)

    def close(self) -> None:
        """Free the model. The process group lives as long as its process."""
        if self.ring_group is not None:
            TRAINER.close_ring()
        del self.actor
        gc.collect()


@dataclass(frozen=True)
class Place:
    """This process's place in the job, as its launcher set it in the environment."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> Place:
        """Read RANK, LOCAL_RANK and WORLD_SIZE; a process that no launcher started is rank 0 of 1."""
        rank = int(os.environ.get("RANK", "0"))
        local = int(os.environ.get("LOCAL_RANK", "-1"))
        return cls(rank, rank if local < 0 else local, int(os.environ.get("WORLD_SIZE", "1")))

    def device(self) -> torch.device:
        """Return the CUDA device of this local rank, or the CPU."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.local_rank % torch.cuda.device_count())


def set_seed(seed: int) -> None:
    """Seed everything that a forward with dropout or a model's initialization draws from."""
    random.seed(seed)
    if torch.cuda.is_available():
        torch.manual_seed(seed)
    else:  # torch.manual_seed would format this thread's whole stack, for a CUDA that comes later
        torch.default_generator.manual_seed(seed)


def timeout_of(config: ReplayConfig) -> timedelta:
    """Return the timeout of collectives: 30 days where a rank may wait at a prompt."""
    least = PAUSE_S if getattr(stops.in_replay, "may_pause", False) else LEAST_TIMEOUT_S
    return timedelta(seconds=max(least, 2 * config.timeout_s))


def rendezvous(place: Place) -> None:
    """Set the environment variables that torch.distributed needs, in a process that no launcher started."""
    if place.world_size == 1 and "MASTER_PORT" not in os.environ:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def initialize(place: Place, device: torch.device, config: ReplayConfig) -> None:
    """Create the process group, once per process, on the requested backend (default: nccl on CUDA, else gloo)."""
    rendezvous(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        consent.load_plugin()
        chosen = config.dist_backend or ("nccl" if device.type == "cuda" else "gloo")
        if not dist.is_backend_available(chosen):
            every = (name for name in dist.Backend.backend_list if name not in ("undefined", "fake"))
            known = ", ".join(filter(dist.is_backend_available, every))
            hint = f"use one of {known}; or pass {consent.PLUGIN} MODULE with the module that registers it"
            raise UsageError(f"torch does not know --dist-backend {chosen:.60}", hint=hint)
        dist.init_process_group(chosen, timeout=timeout_of(config))


CLASSES = {
    "plain": f"{__name__}:Backend",
    "deepspeed": "actordbg.actor.backends.deepspeed:DeepspeedBackend",
    "fsdp2": "actordbg.actor.backends.fsdp2:Fsdp2Backend",
}
"""Class of each backend; only the requested class is imported."""
GRAPH_LIMIT = 512
_COMPILER = {
    **dict.fromkeys(("recompile_limit", "cache_size_limit"), GRAPH_LIMIT),
    **dict.fromkeys(("accumulated_recompile_limit", "accumulated_cache_size_limit"), 8 * GRAPH_LIMIT),
    "fail_on_recompile_limit_hit": True,
}


def open_backend(config: ReplayConfig, choices: Choices, cache: Path, training: Training | None = None) -> Backend:
    """Build the Actor in its backend. `cache` receives the tiny model and truncated ones. `training`: how weights are stepped."""
    dtype = DTYPES[choices.dtype] if actors_of(choices).loads_checkpoint_dtype(choices.dtype) else None
    path = locate(choices.model, cache, num_layers=choices.num_layers, dtype=dtype)
    if config.compiles:
        _prepare_compiler()
    backend: Backend = resolve_name(CLASSES[config.backend])(path, choices, config, training)
    if config.compiles:
        backend.compile(config.compile_backend or COMPILE_BACKENDS[0])
    return backend


def change_compilation(backend: Backend, config: ReplayConfig) -> None:
    """Recompile a built backend's model as `config` says, or leave it uncompiled, without a trace of earlier compilation."""
    backend.uncompile()
    torch._dynamo.reset()  # forgets every graph, guard and kernel of this process; kernels on disk are found by their content
    if config.compile:
        _prepare_compiler()
        backend.compile(config.compile_backend or COMPILE_BACKENDS[0])


def _prepare_compiler() -> None:
    """Set up torch.compile for this process. Compiled kernels, which later processes load and run, are kept in the user's
    own cache unless the user set TORCHINDUCTOR_CACHE_DIR: never in a store or in /tmp, where others may write.
    """
    from torch._inductor.runtime.runtime_utils import default_cache_dir  # type: ignore[attr-defined]

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", "") in ("", default_cache_dir()):  # torch sets its own default when imported
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own_cache("inductor"))
    import torch._dynamo.config as config

    for name, value in _COMPILER.items():
        if hasattr(config, name):
            setattr(config, name, value)


def compile_counts() -> tuple[int, int]:
    """Return (graphs compiled, graph breaks) of this process so far, by torch's own counters."""
    counters = torch._dynamo.utils.counters
    return int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())
