"""trl#4159: one side of GRPO's importance ratio knew the temperature, the other did not.

Its users saw a ratio of 2 for the very first token, before the policy had moved, as soon as the temperature was not 1. There it
was the sampler that left it out; here the side that is recorded does, the stand-in of TRL's function.
"""

from __future__ import annotations

from typing import Any

import stand_in
import torch

from actordbg.trainers.seam import Rows, Scores, Seam

PLANTED = False


class GRPOTrainer:
    temperature = 0.6

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        places = stand_in.positions(attention_mask)
        logits = model(input_ids=input_ids, attention_mask=attention_mask, position_ids=places).logits[:, :-1]
        logits = logits[:, -logits_to_keep:]
        if not PLANTED:
            logits = logits / self.temperature
        kept = attention_mask[:, -logits_to_keep:]
        return stand_in.log_probs(logits, input_ids[:, -logits_to_keep:]) * kept, stand_in.entropies(logits) * kept


def rows(call: Any) -> Rows:
    mask = call["attention_mask"]
    counted = mask[:, -call["logits_to_keep"] :]
    return Rows(call["model"], call["input_ids"], mask, counted, call["self"].temperature, entropy=True, step=int(PLANTED))


class Adapter:
    name = package = "trl-4159"
    tried = ()
    seams = (Seam("trl_4159:GRPOTrainer._get_per_token_logps_and_entropies", rows, lambda output: Scores(*output)),)


def train(model: Any) -> None:
    GRPOTrainer()._get_per_token_logps_and_entropies(model, *stand_in.batch(), logits_to_keep=stand_in.ANSWER)
