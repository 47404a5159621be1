"""Judge a compiled model at its border, the log-probs: its graph has no places inside, where it runs eagerly.

The unit is the same model without its graph. Both run freely, on their own values, and are held against the truth's log-probs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from actordbg.actor.session import ActorSession
from actordbg.laws import changes
from actordbg.locate.places import Key, Sums
from actordbg.records.locate_record import OUT
from actordbg.store.payload import Dump

BORDER: Key = ("the compiled model", OUT, 0, 0)


def border_of(session: ActorSession, call: Dump, truth: Tensor, numbers: Tensor) -> tuple[Sums, Sums]:
    """Run a call with and without the graph; return the errors of both.

    truth: log-probs [B, S - 1], NaN for other tokens. numbers: of the truth's tokens, int [B, S], -1 for none.
    """

    def log_probs() -> Tensor:
        return session.probe(call, lambda values, _: values.detach().double().cpu(), backward=False)

    compiled = log_probs()
    with changes.eagerly(session.model):
        eager = log_probs()
    judged = changes.next_tokens(call) & ~truth.isnan()
    want, tokens = truth[judged], numbers[:, :-1][judged]

    def sums(have: Tensor) -> Sums:
        errors = torch.zeros(int(numbers.max()) + 1, dtype=torch.float64)
        errors[tokens] = (have[judged] - want).square().nan_to_num(torch.inf, torch.inf)
        return Sums(errors, 1, len(tokens), float((have[judged] * want).sum()), float(want.square().sum()))

    return sums(compiled), sums(eager)
