"""Find the input positions that a row's log-probs depend on: the Jacobian's support, by one backward to the embeddings' output.

A log-prob at position j of a row may depend on positions 0 to j of that row, and on nothing else. Every other derivative is
exactly 0 in every dtype: it is not rounded to 0, there is no path to compute. So one backward checks all tokens of every other
row, later positions and padding.

A hook cuts the embeddings' output out of the graph, and `torch.autograd.grad` stops there: no parameter gets a gradient, so no
engine's hook reduces any.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from actordbg.actor.changes import attended, next_tokens, places
from actordbg.actor.forward_outcome import PREFIX
from actordbg.actor.session import ActorSession
from actordbg.base.errors import Unsupported
from actordbg.laws.judging import not_checked
from actordbg.records.finding import BROKEN, KEPT
from actordbg.records.replay_record import WITHIN_ROUNDING, LawAnswer
from actordbg.store.payload import Dump

_FP16_SCALE = 1024.0


@dataclass(frozen=True)
class RowTarget:
    """The log-probs to differentiate: `columns` of `row`. The last position that they may depend on is the last column."""

    row: int
    columns: Tensor


def target_of(dump: Dump) -> RowTarget:
    """Choose the first half of the log-probs of the last row that has any; log-prob 0 of row 0 if no row has any."""
    real = next_tokens(dump)
    rows = real.any(1).nonzero().flatten()
    if not len(rows):
        return RowTarget(0, torch.tensor([0]))
    row = int(rows[-1])
    columns = real[row].nonzero().flatten()
    return RowTarget(row, columns[: max(1, len(columns) // 2)])


def support(session: ActorSession, dump: Dump, *, backward: bool, packing: bool) -> LawAnswer:
    """Check the law `jacobian` on one input. Collective in a ring: every rank must call it."""
    target = target_of(dump)
    reached = _reached(session, dump, target, backward)
    group = session.ring_group
    where = places(dump, packing, *session.ring)
    if len(reached) != len(where):
        raise Unsupported(f"the embeddings returned {len(reached)} positions, the input has {len(where)}", hint="report it")
    positions = torch.cat((where.double(), reached[:, None]), 1)
    if group is not None:
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, positions, group=group)
        positions = torch.cat(parts)
    return judge(positions[positions[:, 0] >= 0], target, dump)


def judge(positions: Tensor, target: RowTarget, dump: Dump) -> LawAnswer:
    """Build the answer. positions: float64 [n, 3], the row, column and largest entry of each computed position."""
    rows, columns, size = positions[:, 0].long(), positions[:, 1].long(), positions[:, 2].nan_to_num(torch.inf, torch.inf)
    real = attended(dump)[rows, columns]
    last = int(target.columns[-1])
    allowed = (rows == target.row) & (columns <= last) & real
    wrong = (size != 0) & ~allowed
    looked_at, count = int((~allowed).sum()), int(wrong.sum())
    why = "there is no other row, later position or padding" if not looked_at else ""
    if not bool((size[allowed] != 0).any()):
        why = "no derivative reached the embeddings: the graph is cut, or they are not the model's input"
    if not next_tokens(dump).any():
        why = "the input has no token to check"
    if why:
        return not_checked("jacobian", why)
    if not count:
        return LawAnswer("jacobian", KEPT, count=0, looked_at=looked_at)
    sources = []
    for other in sorted(set(rows[wrong & real & (rows != target.row)].tolist())):
        own = (rows == other) & real
        reached, of = int((own & wrong).sum()), int(own.sum())
        sources.append(f"row {other} ({reached:,} of {of:,} tokens)")
    if later := int((wrong & real & (rows == target.row) & (columns > last)).sum()):
        sources.append(f"{later:,} tokens after position {last}")
    if padding := int((wrong & ~real).sum()):
        sources.append(f"{padding:,} positions of padding")
    words = "; ".join(f"row {target.row} depends on {what}" for what in sources)
    row, column = int(rows[wrong][0]), int(columns[wrong][0])
    token = int(dump.inputs["sequences"][row, column])
    return LawAnswer(
        "jacobian", BROKEN, words, float(size[wrong].max()),
        row=row, position=column, token=token, count=count, looked_at=looked_at,
    )  # fmt: skip


def _reached(session: ActorSession, dump: Dump, target: RowTarget, backward: bool) -> Tensor:
    """Return the largest absolute derivative by each position's embedding, float64 on the CPU, in the model's order."""
    leaves: list[Tensor] = []
    scale = _FP16_SCALE if session.resolved["dtype"] == "fp16" else 1.0

    def cut(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    def read(log_probs: Tensor, _entropy: Tensor | None) -> Tensor:
        if not leaves:
            raise Unsupported("the model did not call its input embeddings", hint="report it with the model's name")
        selected = log_probs[target.row, target.columns.to(log_probs.device)].sum() * scale
        (gradient,) = torch.autograd.grad(selected, leaves[0], allow_unused=True)
        if gradient is None:
            gradient = torch.zeros_like(leaves[0])
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        largest = whole.detach().abs().amax(-1)
        return largest.flatten().double().cpu()

    hook = session.model.get_input_embeddings().register_forward_hook(cut)
    try:
        return session.probe(dump, read, backward=backward, graph=True)
    finally:
        hook.remove()


# Gradient additivity: is the whole gradient the sum of its parts? Checked with the backend's own backward, after its reduction.
#
# The loss is a sum of terms, one per token. It is computed over one half of the terms (every other row, or every other token of a
# single row), then over the other half, divided by the same count. Shapes stay, so only the upstream gradient differs, and the
# two gradients must add up to the whole gradient for each parameter. Samples are enough (`actordbg.actor.forward_outcome`).


LIMITS = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}
"""How far, relative to its parts, a parameter's gradient may be from their sum; normally it is ten times nearer."""
_SMALL = 0.05
"""A parameter's distance is relative to its gradient, or to this share of the largest gradient if that is more."""


def halves(terms: Tensor) -> tuple[Tensor, Tensor]:
    """Return float weights [B, S-1] of the two halves of the loss, each divided by the total count. terms: bool."""
    rows = terms.any(1).nonzero().flatten()
    whole = terms.double() / terms.sum().clamp(min=1)
    if len(rows) > 1:
        first = torch.zeros(terms.shape[0], 1, dtype=torch.bool)
        first[rows[::2]] = True
    else:
        first = terms.cumsum(1) % 2 == 1
    return whole * first, whole * ~first


def judge_additivity(dtype: str, whole: dict[str, Tensor], first: dict[str, Tensor], second: dict[str, Tensor]) -> LawAnswer:
    """Build the answer of `additivity` from gradient samples by parameter: of the whole loss and of its two halves."""
    if not whole:
        return not_checked("additivity", "this rank keeps no gradients")
    if not all(bool(tensor.isfinite().all()) for part in (whole, first, second) for tensor in part.values()):
        return not_checked("additivity", "a gradient is not finite")
    floor = _SMALL * max(float(tensor.norm()) for tensor in whole.values())
    if floor == 0:
        return not_checked("additivity", "the gradient is 0")
    apart = {}
    for name, gradient in whole.items():
        parts = [part.get(name, torch.zeros_like(gradient)) for part in (first, second)]
        scale = max(floor, *(float(tensor.norm()) for tensor in (gradient, *parts)))
        left = parts[0].double() + parts[1].double() - gradient.double()
        apart[name] = float(left.norm()) / scale
    limit = LIMITS.get(dtype, LIMITS["bf16"])
    worst = max(apart, key=lambda name: apart[name])
    count = sum(size > limit for size in apart.values())
    verdict = BROKEN if count else WITHIN_ROUNDING if apart[worst] else KEPT
    words = f"the gradient of {worst.removeprefix(PREFIX)} is not the sum over its rows" if count else ""
    return LawAnswer("additivity", verdict, words, apart[worst], limit, count=count, looked_at=len(apart))
