"""The Actor in PyTorch's FSDP2: `fully_shard` for each decoder layer and the whole, tensor parallelism and rings on request.

What the trainer's FSDP2 branch builds, around the Actor of the installed trainer, so that both are compared on equal terms:

* **Mesh** (dp, sp, tp). Tensor parallelism first, by the model's own plan (`split`), then `fully_shard` over dp x sp:
  the ranks of a ring compute different tokens of one input, so they reduce gradients together. (The branch
  shards over dp alone, and its ring ranks drift apart; its pull request 1176 flattens dp and sp as here.)
* **Mixed precision**: `param_dtype` is the Actor's dtype, gradients are reduced in fp32. The branch sets `output_dtype` to fp32
  unless gradient checkpointing is on; with bf16 weights the first linear layer after a decoder layer then fails
  ("expected m1 and m2 to have the same dtype"). So `output_dtype` is left alone here, which is what the branch does with
  checkpointing: layers return their computation dtype. The Actor's forward converts the logits to fp32 in any case.
* **Temperature.** The Actor divides the logits in place. Under tensor parallelism fp32 logits are a view, and autograd refuses
  that ("a view and is being modified inplace"); so such logits are copied first.
* **Gradient norm** by our own sums: `clip_grad_norm_` fails where some gradients lie on the mesh (dp, tp) and others on dp.

Only a training check has an optimizer, so no weight changes in a replay.

**Tensor parallelism** is a model split over a tensor-parallel group by the plan that transformers ships with it.

The plan says for each linear layer how its weight is cut; torch's `parallelize_module` does it. Its vocabulary:

| transformers | torch | |
|---|---|---|
| `colwise` | ColwiseParallel | weight cut by output features; each rank continues with its own heads |
| `rowwise` | RowwiseParallel | weight cut by input features; the outputs are summed over the group |
| `colwise_gather_output` (5.x), `colwise_rep` (4.x) | ColwiseParallel, output replicated | every rank has all logits |
| `embedding_rowwise` (5.x), `rowwise_rep` (4.x) | RowwiseParallel, input replicated | the embedding, cut by tokens |
| `replicated_with_grad_allreduce` | not cut | norms of single heads: their gradients are summed over the group |

Other styles (packed projections, experts) have no counterpart in torch, and a model whose plan asks for them is refused.

**Tied weights.** Where the head shares the embedding's weight, `parallelize_module` gives each a separate parameter, and the
embedding would miss half of its gradient. Both are cut the same way, by tokens, so they are tied again afterwards. Where the
plan cuts the head alone (transformers 4), a tied head is left whole.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from actordbg.actor.backends.backend import Backend, initialize
from actordbg.actor.backends.training import Training
from actordbg.actor.forward_outcome import norm_of
from actordbg.base.errors import Unsupported
from actordbg.config.choices import Choices
from actordbg.config.replay_config import DTYPES
from actordbg.trainers.rows_actor import text_config
from actordbg.trainers.trainer import TRAINER

_SHARDED, _TP = "shard", "tp"


class Fsdp2Backend(Backend):
    """An Actor whose model is sharded with `fully_shard`."""

    def open(self, path: str, choices: Choices, training: Training | None) -> None:
        tp, world_size = self.config.tp, self.place.world_size
        initialize(self.place, self.device, self.config)
        # (dp x sp, tp): what is sharded over, and what is split over
        self._mesh = init_device_mesh(self.device.type, (world_size // tp, tp), mesh_dim_names=(_SHARDED, _TP))
        if self.config.ring > 1:
            shape = (world_size // (tp * self.config.ring), self.config.ring, tp)
            rings = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "sp", "tp"))
            self.ring_group = TRAINER.open_ring(rings["sp"].get_group(), choices.attn)
        self.actor = self._built(path, choices, training)
        if training is not None:
            self.actor.float()  # what is stepped is fp32; the policy below computes in the dtype
        self._split: Split | None = split(self.actor.model, self._mesh[_TP]) if tp > 1 else None
        self._shard(getattr(torch, DTYPES[choices.dtype]))
        if training is not None:
            self.step_with_adam(training)

    def facts(self) -> dict[str, Any]:
        """Add the sizes of the mesh. `reduce_dtype`: of gradients. `zero_stage` stays 0: ZeRO is DeepSpeed's."""
        ring, tp = self.config.ring, int(self._mesh[_TP].size())
        mesh = {"dp": self.place.world_size // (tp * ring), "sp": ring, "tp": tp}
        facts = super().facts() | {"reduce_dtype": "fp32", "mesh": mesh, "tp": tp}
        if self._split is not None:
            facts |= {"tp_modules": self._split.modules, "tp_left_whole": list(self._split.left_whole)}
        return facts

    def is_collective(self, backward: bool) -> bool:
        """Return True with several ranks: every forward gathers weights."""
        return self.place.world_size > 1

    def _complete_gradients(self) -> None:
        if self._split is not None:
            self._split.sum_gradients(self.model, self._mesh[_TP].get_group())

    def _whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def recover(self) -> None:
        """Reset FSDP after a forward or backward that raised (torch 2.13 and later), else set `tainted`.

        FSDP sets itself up in the first forward: a failure before that leaves nothing behind, and nothing can be reset.
        """
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        if self.model._get_fsdp_state()._is_root is None:
            return
        if hasattr(self.model, "reset_iter_state"):
            self.model.reset_iter_state()
        else:
            self.tainted = True

    def _shard(self, dtype: torch.dtype) -> None:
        self.model.register_forward_hook(_own_logits)  # before FSDP's own hook, which has to see what is handed out
        policy, mesh = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32), self._mesh[_SHARDED]
        kept = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        for module in _kept_in_fp32(self.model):
            fully_shard(module, mesh=mesh, mp_policy=kept)
        for layer in decoder_layers(self.model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)

    def _total(self, tensors: Iterable[Tensor]) -> float:
        """Return the L2 norm over tensors and ranks, each element once: what is not cut over tp is equal on all tp ranks."""
        squares = torch.zeros(2, dtype=torch.float64, device=self.device)  # cut over tp, and not
        for tensor in tensors:
            own, cut = tensor, False
            if isinstance(own, DTensor):
                cut = _TP in (own.device_mesh.mesh_dim_names or ())
                own = own.to_local()
            squares[0 if cut else 1] += norm_of(own) ** 2
        dist.all_reduce(squares, group=self._mesh[_SHARDED].get_group())
        if self._split is not None:
            dist.all_reduce(squares[:1], group=self._mesh[_TP].get_group())
        return float(squares.sum().sqrt())


def decoder_layers(model: Any) -> list[Any]:
    """Return the layers that are sharded one by one: the text model's `layers` (`h` or `blocks` in older models)."""
    base = getattr(model, getattr(model, "base_model_prefix", ""), model)
    base = base.get_decoder() if hasattr(base, "get_decoder") else base
    count = getattr(text_config(model), "num_hidden_layers", None)
    for holder in (base, getattr(base, "language_model", None)):
        for name in ("layers", "h", "blocks"):
            layers = getattr(holder, name, None)
            if isinstance(layers, torch.nn.ModuleList) and len(layers) == count:
                return list(layers)
    return []


def _kept_in_fp32(model: Any) -> list[Any]:
    """Return the modules whose own parameters the model keeps in another dtype than its embeddings, the innermost first: FSDP2
    takes one dtype for each group, so each of these is a group of its own.
    """
    usual = model.get_input_embeddings().weight.dtype
    dtypes = {module: {each.dtype for each in module.parameters(recurse=False)} for module in model.modules()}
    return [module for module, own in reversed(dtypes.items()) if len(own) == 1 and usual not in own]


def _own_logits(_module: Any, _inputs: Any, output: Any) -> None:
    """Copy fp32 logits that are a view, so that the caller may change them. The Actor's conversion to fp32 copies all others."""
    logits = output["logits"]
    if logits.dtype == torch.float32 and logits._is_view():
        output["logits"] = logits.clone()


_SUMMED = "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class Split:
    """What was split: how many `modules`. `summed`: whose gradients need a sum over the group. `left_whole`: tied heads."""

    modules: int
    summed: tuple[str, ...]
    left_whole: tuple[str, ...]

    def sum_gradients(self, model: Any, group: dist.ProcessGroup) -> None:
        """All-reduce gradients of unsharded modules that ran on part of the heads. Collective: call it on every rank."""
        for name in self.summed:
            for parameter in model.get_submodule(name).parameters():
                if parameter.grad is not None:
                    own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                    dist.all_reduce(own, group=group)


def split(model: Any, mesh: DeviceMesh) -> Split:
    """Split `model` in place over the one-dimensional `mesh`. Unsupported for a model without a plan that torch supports."""
    styles = plan_of(model)
    tied = [name for name in styles if _is_tied(model, name)]
    embedding = model.get_input_embeddings()
    together = any(model.get_submodule(name) is embedding for name in styles)
    summed = tuple(name for name, style in styles.items() if style == _SUMMED)
    whole = {*summed, *(() if together else tied)}
    plan = {name: _style(name, style) for name, style in styles.items() if name not in whole}
    parallelize_module(model, mesh, plan)
    for name in tied if together else ():
        model.get_submodule(name).weight = embedding.weight
    return Split(len(plan), summed, () if together else tuple(sorted(tied)))


def plan_of(model: Any) -> dict[str, str]:
    """Return the style of every module that the model's own plan names, by the module's full name."""
    plan = dict(getattr(model, "_tp_plan", None) or {})
    base = getattr(model, "base_model_prefix", "")
    for pattern, style in (getattr(model.config, "base_model_tp_plan", None) or {}).items():
        plan.setdefault(f"{base}.{pattern}", style)
    names = [name for name, _ in model.named_modules() if name]
    styles = {name: style for pattern, style in plan.items() for name in names if fnmatchcase(name, pattern)}
    if not styles:
        raise Unsupported(
            f"{type(model).__name__} has no plan for tensor parallelism in this transformers",
            hint="drop --tp, or use a newer transformers",
        )
    return styles


def _style(name: str, style: str) -> ParallelStyle:
    made: dict[str, ParallelStyle] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": ColwiseParallel(output_layouts=Replicate()),
        "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
        "rowwise_rep": RowwiseParallel(input_layouts=Replicate()),
    }
    if style not in made:
        raise Unsupported(
            f"the model's plan asks for {style!r} at {name}, which torch's tensor parallelism cannot do", hint="drop --tp"
        )
    return made[style]


def _is_tied(model: Any, name: str) -> bool:
    weight = getattr(model.get_submodule(name), "weight", None)
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    return weight is not None and weight is embedding and model.get_submodule(name) is not model.get_input_embeddings()
