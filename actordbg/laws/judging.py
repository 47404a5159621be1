"""Judge a law by comparing two sets of log-probs. Pure: tensors in, a `LawAnswer` out.

A law needs no truth and no tolerance: it compares an Actor with itself, on the same input, in equal shapes. So it detects in bf16
what it detects in fp32. An exact law compares bit for bit with a rerun of the same input. The others compare with the measured
effect of rounding on this input (`actordbg.actor.changes`).

* `state` (exact, independence of calls). Changed: the call before, which had other tokens. Kept: every log-prob and entropy.
  Finds a cache or a state that is not reset. If it is broken, laws that compare two calls are not checked.
* `rerun` (exact, determinism). Changed: nothing; without dropout, the random seed. Kept: every selected log-prob and entropy.
  Finds nondeterministic kernels, random noise, uninitialized memory.
* `mask` (action mask). Changed: the action mask is left out. Kept: selected log-probs, within rounding; those outside the mask
  are 0 with it. Finds a mask that is not applied, shifted or scaled, and a fault in the path of calls that have a mask.
* `normalisation`. Changed: nothing. Kept: log-probs are the log-softmax of logits / T, recomputed in fp64; entropies follow from
  the same logits. Finds log-softmax in bf16, a wrong temperature, labels that are off by one.
* `images` (exact). Changed: nothing. Kept: the model is given the call's own pixels and grids, with positions and types that
  fit; see `actordbg.laws.given`.
* `neighbour` (exact, row isolation). Changed: the tokens and images of every second row, then of the others. Kept: log-probs and
  entropies of the unchanged rows. Finds leaks between packed rows: attention, a mask, a state or convolution that is not reset.
* `routing` (of a call with recorded experts). Changed: the router chooses itself. Kept: no shift of the recorded experts fits its
  choices far better than they do as they are; see `actordbg.laws.given`.
* `padding` (exact). Changed: the ids under the padding. Kept: every log-prob and entropy of real tokens. Finds padding that is
  attended to or enters a state.
* `future` (exact, causality). Changed: the tokens after the middle of each row. Kept: log-probs and entropies before them. Finds
  attention that is not causal, labels shifted in the wrong direction.
* `jacobian` (exact). Changed: nothing; one backward of one row's log-probs to the output of the input embeddings. Kept: entries
  of other rows, of later positions and of padding are exactly 0. Finds what the previous three find, for all tokens at once.
* `order`. Changed: the order of the rows. Kept: every log-prob, within rounding. Finds wrong packing offsets, swapped rows.
* `alone` (batch invariance). Changed: all rows but one are left out. Kept: that row's log-probs, within rounding. Finds positions
  that continue from the previous row, masks made for the whole batch.
* `additivity`. Changed: the loss is computed over one half of its terms, then over the other. Kept: the two gradients add up to
  the whole gradient, for each parameter. Finds rows lost between loss and gradient, gradients left over from the previous input,
  counts that depend on the batch.

Limits: with experts, `neighbour`, `padding` and `future` hold only within rounding, since other tokens change the shapes of their
matrix products; they do not hold if routing has a capacity or an FP8 scale covers a whole tensor. `jacobian` cannot be checked
in a compiled graph, which hooks cannot enter. `order` and `alone` cannot be checked if a call draws random numbers, and with
experts the mean change counts instead of the largest. `additivity` needs a backward without a loss term for the whole batch,
such as a router's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actordbg.laws.rules import LAWS
from actordbg.records.finding import BROKEN, KEPT, NOT_CHECKED
from actordbg.records.replay_record import WITHIN_ROUNDING, LawAnswer

NOISE_FACTOR = 4.0
"""In a nondeterministic configuration, an exact law is broken only if the change exceeds the noise by this factor."""


@dataclass(frozen=True)
class ForwardValues:
    """The results of a forward for each next token, [B, S-1]: log-probs, and entropies if the call requests them."""

    log_probs: Tensor
    entropy: Tensor | None = None

    def rows(self, index: Tensor) -> ForwardValues:
        """Select these rows in this order."""
        return ForwardValues(self.log_probs[index], None if self.entropy is None else self.entropy[index])


@dataclass(frozen=True)
class Change:
    """Where and how far two sets of values differ. where: bool [B, S-1], the differences among the values that were compared.

    size, mean: the largest and the mean absolute difference. looked_at: how many tokens were compared.
    """

    where: Tensor
    size: float
    mean: float
    looked_at: int

    @property
    def count(self) -> int:
        return int(self.where.sum())

    @property
    def first(self) -> tuple[int, int]:
        """Row and position (of the predicted token in its row) of the first difference."""
        places = self.where.nonzero()
        row, column = places[0].tolist()
        return row, column + 1


def change(ours: ForwardValues, base: ForwardValues, mask: Tensor) -> Change:
    """Compare `ours` with `base` where `mask` is set. Equal means bit-identical; NaN equals NaN."""
    pairs = [(ours.log_probs, base.log_probs)]
    if ours.entropy is not None and base.entropy is not None:
        pairs.append((ours.entropy, base.entropy))
    where, distances = torch.zeros_like(mask), torch.zeros(mask.shape, dtype=torch.float64)
    for left, right in pairs:
        differs = (left != right) & ~(left.isnan() & right.isnan()) & mask
        distance = (left.double() - right.double()).abs().nan_to_num(torch.inf, torch.inf)
        where, distances = where | differs, torch.where(differs, torch.maximum(distances, distance), distances)
    compared = distances[mask]
    if not compared.numel():
        return Change(where, 0.0, 0.0, 0)
    return Change(where, float(compared.max()), float(compared.mean()), compared.numel())


def answer(
    law: str,
    moved: Change,
    ids: Tensor,
    words: str,
    *,
    limit: float | None = None,
    by_mean: bool = False,
    verdict: str = BROKEN,
    nothing: str = "this input has nothing to compare",
) -> LawAnswer:
    """Build the answer of a law that allows a change up to `limit`, or none if `limit` is None.

    moved: what changed. ids: the tokens of the original input [B, S]. words, verdict: for a forbidden change. by_mean: apply the
    limit to the mean over the tokens instead of the largest change. nothing: the reason to give if no value was compared.
    """
    if not moved.looked_at:
        return not_checked(law, nothing)
    if not moved.count:
        return LawAnswer(law, KEPT, count=0, looked_at=moved.looked_at)
    size = moved.mean if by_mean else moved.size
    if limit is not None and size <= limit:
        return LawAnswer(law, WITHIN_ROUNDING, "", size, limit, count=moved.count, looked_at=moved.looked_at)
    row, position = moved.first
    return LawAnswer(
        law, verdict, words, size, limit,
        row=row, position=position, token=int(ids[row, position]), count=moved.count, looked_at=moved.looked_at,
    )  # fmt: skip


def not_checked(law: str, why: str) -> LawAnswer:
    """Build the answer of a law that could not be checked."""
    assert law in LAWS
    return LawAnswer(law, NOT_CHECKED, why)


TOLERANCE = 16 * 2.0**-23
"""Allowed distance from the expected value, relative to the operands of a log-softmax: a few fp32 roundings."""
_LOGITS_AT_ONCE = 2**25
"""Most logits that are converted to float64 at a time."""


class Expected:
    """The expected log-probs and, if `entropies`, entropies, float64 [B, S-1], NaN where unknown. allowed: the tolerance.

    places: [N, 2], the row and column in `ids` of each of the model's N logit vectors; outside [B, S-1], or where `tokens`, bool
    [B, S-1], is not set: ignored. problem: why nothing could be computed, or "".
    """

    def __init__(self, places: Tensor, ids: Tensor, tokens: Tensor, temperature: float, entropies: bool) -> None:
        self.places, self.ids, self.tokens, self.temperature, self.entropies = places, ids, tokens, temperature, entropies
        self.problem = "the Actor did not call its model"
        shape = (ids.shape[0], ids.shape[1] - 1)
        self.log_probs, self.entropy, self.allowed = (torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(3))

    def take(self, logits: Any) -> None:
        """Compute the expected values from the model's logits [..., V], one vector for each of `places`."""
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        flat = logits.detach().reshape(-1, logits.shape[-1])
        if len(flat) != len(self.places):
            self.problem = f"the model returned logits of {len(flat)} positions, the input has {len(self.places)}"
            return
        self.problem = ""
        rows, columns = self.places.unbind(1)
        known = (columns >= 0) & (columns < self.ids.shape[1] - 1)
        inside = known.nonzero().flatten()
        inside = inside[self.tokens[rows[inside], columns[inside]]]
        for part in torch.split(inside, max(1, _LOGITS_AT_ONCE // flat.shape[-1])):
            place = rows[part], columns[part]
            scaled = flat[part.to(flat.device)].double() / self.temperature
            total, largest = scaled.logsumexp(-1), scaled.abs().amax(-1)
            labels = self.ids[place[0], place[1] + 1].to(scaled.device)
            label = scaled.gather(-1, labels[:, None]).squeeze(-1)
            self.log_probs[place] = (label - total).cpu()
            if self.entropies:
                mean = (scaled.softmax(-1) * scaled).sum(-1)
                self.entropy[place] = (total - mean).cpu()
            self.allowed[place] = (TOLERANCE * (1 + largest + total.abs())).cpu()


class _Watched:
    """Stands in for the Actor's model in one call: forwards everything, and passes the logits to `show`."""

    def __init__(self, model: Any, show: Callable[[Any], None], given: dict[str, Any]) -> None:
        self.__dict__ |= {"_model": model, "_show": show, "_given": given}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._given.update(kwargs)
        output = self._model(*args, **kwargs)
        with torch.no_grad():
            self._show(output["logits"])
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextlib.contextmanager
def watching(actor: Any, expected: Expected) -> Iterator[dict[str, Any]]:
    """Pass the logits of the Actor's model to `expected` inside the block, and yield what it is given by name.

    Uses no hook, so a compiled model keeps its graph.
    """
    given: dict[str, Any] = {}
    vars(actor)["model"] = _Watched(actor.model, expected.take, given)
    try:
        yield given
    finally:
        del vars(actor)["model"]


def judge_normalisation(ours: ForwardValues, expected: Expected, mask: Tensor) -> LawAnswer:
    """Build the answer of `normalisation`. mask: bool [B, S-1], the log-probs to check."""
    seen = mask & ~expected.allowed.isnan()
    if expected.problem or not bool(seen.any()):
        why = expected.problem or "the input has no token to check, or its logits are not finite"
        return not_checked("normalisation", why)
    pairs = [(ours.log_probs, expected.log_probs, "the log-prob is not the log-softmax of the logits / T")]
    if ours.entropy is not None and expected.entropies:
        pairs.append((ours.entropy, expected.entropy, "the entropy does not follow from the same logits"))
    answers = []
    for values, theirs, words in pairs:
        apart = (values.double() - theirs).abs()
        distances = apart.nan_to_num(torch.inf, torch.inf).where(seen, torch.zeros(()))
        wrong = (distances > expected.allowed) & seen
        measured = (float(distances.max()), float(expected.allowed[seen].max()))
        count, looked_at = int(wrong.sum()), int(seen.sum())
        if count:
            row, column = wrong.nonzero()[0].tolist()
            position = column + 1  # log-probs [B, S-1] begin with those of the second token
            return LawAnswer(
                "normalisation", BROKEN, words, *measured,
                row=row, position=position, token=int(expected.ids[row, position]), count=count, looked_at=looked_at,
            )  # fmt: skip
        answers.append(LawAnswer("normalisation", KEPT, "", *measured, count=0, looked_at=looked_at))
    return answers[0]
