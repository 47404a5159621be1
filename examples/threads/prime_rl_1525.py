"""prime-rl PR#1525, and trl PR#5620: entropies one position further than the log-probs beside them.

A fused head returned both by the place that predicts. The log-probs were moved to the token that they are of, the entropies
were not. Loss and reward looked well; a reviewer saw it in the code. prime-rl's forward is a module's function, without a
`self`; this is its stand-in.
"""

from __future__ import annotations

from typing import Any

import stand_in
import torch

from actordbg.trainers.seam import Rows, Scores, Seam

PLANTED = False


def forward(
    model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, *, labels: torch.Tensor, temperature: float
) -> dict[str, torch.Tensor]:
    logits = model(input_ids=input_ids, position_ids=position_ids).logits / temperature
    result = {"logprobs": stand_in.log_probs(logits, labels), "entropy": stand_in.entropies(logits)}
    for name in ("logprobs",) if PLANTED else ("logprobs", "entropy"):
        result[name] = torch.roll(result[name], 1, 1)
    return result


def rows(call: Any) -> Rows:
    return Rows(call["model"], call["input_ids"], temperature=call["temperature"], entropy=True, step=int(PLANTED))


class Adapter:
    name = package = "prime-rl-1525"
    tried = ()
    seams = (Seam("prime_rl_1525:forward", rows, lambda output: Scores(output["logprobs"][:, 1:], output["entropy"][:, 1:])),)


def train(model: Any) -> None:
    ids = stand_in.batch()[0]
    places = torch.arange(ids.shape[1]).expand_as(ids)
    forward(model, ids, places, labels=torch.roll(ids, -1, 1), temperature=0.8)
