"""A model split over a tensor-parallel group by the plan that transformers ships with it.

The plan says for each linear layer how its weight is cut; torch's `parallelize_module` does it. Its vocabulary:

| transformers | torch | |
|---|---|---|
| `colwise` | ColwiseParallel | weight cut by output features; each rank goes on with its own heads |
| `rowwise` | RowwiseParallel | weight cut by input features; the outputs are summed over the group |
| `colwise_gather_output` (5.x), `colwise_rep` (4.x) | ColwiseParallel, output replicated | every rank has all logits |
| `embedding_rowwise` (5.x), `rowwise_rep` (4.x) | RowwiseParallel, input replicated | the embedding, cut by tokens |
| `replicated_with_grad_allreduce` | not cut | norms of single heads: their gradients are summed over the group |

Other styles (packed projections, experts) have no counterpart in torch, and a model whose plan asks for them is refused.

**Tied weights.** Where the head shares the embedding's weight, `parallelize_module` gives each a parameter of its own, and the
embedding would miss half of its gradient. Both are cut the same way, by tokens, so they are tied again afterwards. Where the
plan cuts the head alone (transformers 4), a tied head is left whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from actordbg.base.errors import Unsupported

_SUMMED = "replicated_with_grad_allreduce"


@dataclass(frozen=True)
class Split:
    """What was split: how many `modules`. `summed`: whose gradients need a sum over the group. `left_whole`: tied heads."""

    modules: int
    summed: tuple[str, ...]
    left_whole: tuple[str, ...]

    def sum_gradients(self, model: Any, group: dist.ProcessGroup) -> None:
        """Complete the gradients of what was not cut and yet computed on a part of the heads. Every rank has to call it."""
        for name in self.summed:
            for parameter in model.get_submodule(name).parameters():
                if parameter.grad is not None:
                    own = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                    dist.all_reduce(own, group=group)


def split(model: Any, mesh: DeviceMesh) -> Split:
    """Split `model` in place over the one-dimensional `mesh`. Raises Unsupported for a model without a plan that torch can do."""
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
    """The style of every module that the model's own plan names, by the module's full name."""
    plan = dict(getattr(model, "_tp_plan", None) or {})
    base = getattr(model, "base_model_prefix", "")
    for pattern, style in (getattr(model.config, "base_model_tp_plan", None) or {}).items():
        plan.setdefault(f"{base}.{pattern}", style)
    names = [name for name, _ in model.named_modules() if name]
    found = {name: style for pattern, style in plan.items() for name in names if fnmatchcase(name, pattern)}
    if not found:
        raise Unsupported(
            f"{type(model).__name__} has no plan for tensor parallelism in this transformers",
            hint="leave --tp out, or use a newer transformers",
        )
    return found


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
            f"the model's plan asks for {style!r} at {name}, which torch's tensor parallelism cannot do", hint="leave --tp out"
        )
    return made[style]


def _is_tied(model: Any, name: str) -> bool:
    weight = getattr(model.get_submodule(name), "weight", None)
    embedding = getattr(model.get_input_embeddings(), "weight", None)
    return weight is not None and weight is embedding and model.get_submodule(name) is not model.get_input_embeddings()
