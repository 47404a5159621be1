"""Log-probs and entropies held against the logits that the model itself gave: log-softmax of logits / T, once more in fp64.

The logits are seen between the model and the Actor, before the Actor divides them by the temperature, and never kept: what they
should come to is computed at once, some positions at a time. What may differ is the rounding of fp32 in one logarithm of a sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actordbg.laws.judging import ForwardValues, not_checked
from actordbg.records.replay_record import BROKEN, KEPT, LawAnswer

TOLERANCE = 16 * 2.0**-23
"""Times the size of the numbers that meet in a log-softmax: a few roundings of fp32."""
_AT_ONCE = 2**25


@dataclass
class Expected:
    """What log-probs and entropies should be, [B, S-1] in float64, NaN where no logits were seen. allowed: for rounding."""

    places: Tensor
    ids: Tensor
    temperature: float
    log_probs: Tensor = field(init=False)
    entropy: Tensor = field(init=False)
    allowed: Tensor = field(init=False)
    problem: str = "the Actor did not call its model"

    def __post_init__(self) -> None:
        shape = (self.ids.shape[0], self.ids.shape[1] - 1)
        self.log_probs, self.entropy, self.allowed = (torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(3))

    def take(self, logits: Any) -> None:
        """The model's logits: [..., V], one vector for each of `places`."""
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        flat = logits.detach().reshape(-1, logits.shape[-1])
        if len(flat) != len(self.places):
            self.problem = f"the model gave logits of {len(flat)} positions, the input has {len(self.places)}"
            return
        self.problem = ""
        rows, columns = self.places.unbind(1)
        inside = ((columns >= 0) & (columns < self.ids.shape[1] - 1)).nonzero().flatten()
        for some in torch.split(inside, max(1, _AT_ONCE // flat.shape[-1])):
            place = rows[some], columns[some]
            scaled = flat[some.to(flat.device)].double() / self.temperature
            total, largest = scaled.logsumexp(-1), scaled.abs().amax(-1)
            label = scaled.gather(-1, self.ids[place[0], place[1] + 1].to(scaled.device)[:, None]).squeeze(-1)
            self.log_probs[place] = (label - total).cpu()
            self.entropy[place] = (total - (scaled.softmax(-1) * scaled).sum(-1)).cpu()
            self.allowed[place] = (TOLERANCE * (1 + largest + total.abs())).cpu()


class _Watched:
    """Stands for the Actor's model in one call: passes everything on, and shows the logits."""

    def __init__(self, model: Any, expected: Expected) -> None:
        self.__dict__ |= {"_model": model, "_expected": expected}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._model(*args, **kwargs)
        with torch.no_grad():
            self._expected.take(output["logits"])
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@contextlib.contextmanager
def watching(actor: Any, expected: Expected) -> Iterator[None]:
    """Inside the block the logits of the Actor's model are shown to `expected`. No hook, so a compiled model keeps its graph."""
    vars(actor)["model"] = _Watched(actor.model, expected)
    try:
        yield
    finally:
        del vars(actor)["model"]


def judge_normalisation(ours: ForwardValues, expected: Expected, mask: Tensor) -> LawAnswer:
    """The answer of `normalisation`. mask: bool [B, S-1], the log-probs that count."""
    if expected.problem:
        return not_checked("normalisation", expected.problem)
    seen = mask & ~expected.allowed.isnan()
    if not bool(seen.any()):
        return not_checked("normalisation", "the input has no token to look at, or its logits are not finite")
    pairs = [(ours.log_probs, expected.log_probs, "the log-prob is not the log-softmax of the logits / T")]
    if ours.entropy is not None:
        pairs.append((ours.entropy, expected.entropy, "the entropy is not that of the same logits"))
    answers = []
    for values, theirs, words in pairs:
        apart = (values.double() - theirs).abs().nan_to_num(torch.inf, torch.inf).where(seen, torch.zeros(()))
        wrong = (apart > expected.allowed) & seen
        measured = (float(apart.max()), float(expected.allowed[seen].max()))
        count, looked_at = int(wrong.sum()), int(seen.sum())
        if count:
            row, column = wrong.nonzero()[0].tolist()
            place = (row, column + 1, int(expected.ids[row, column + 1]))
            return LawAnswer("normalisation", BROKEN, words, *measured, *place, count, looked_at)
        answers.append(LawAnswer("normalisation", KEPT, "", *measured, count=0, looked_at=looked_at))
    return answers[0]
