"""TRL: GRPO and RLOO at the function that scores completions; DPO and SFT at the models that get a fused LM head.

GRPO, RLOO, DPO, SFT and KTO of 1.15 and 1.16 use `add_fused_lm_head(model)`: the model's forward returns fp32 log-probs. GRPO's
own function comes first. Losses are those of GRPO, RLOO, DPO and SFT; KTO's is not recorded.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from actordbg.base.fault import Unsupported
from actordbg.trainers.seam import (
    TRAINER_STEP,
    Arguments,
    Rows,
    Scores,
    Seam,
    Unreadable,
    images,
    no_rows,
    own_positions,
    step_of,
    trainer_of,
)
from actordbg.trainers.trl_losses import dpo_loss, grpo_loss, rloo_loss, sft_loss

_HEAD = "trl.trainer.utils:add_fused_lm_head"
_SCORED = tuple(
    f"trl.trainer.{kind.lower()}_trainer:{kind}Trainer._get_per_token_logps_and_entropies" for kind in ("GRPO", "RLOO")
)
_LOSS = ("model", "inputs", "num_items_in_batch")
_NEEDS = ("model", "input_ids", "attention_mask", "logits_to_keep")


def _completions(call: Arguments) -> Rows:
    trainer, mask = call["self"], call["attention_mask"]
    given: Any = {"entropy": bool(call.get("compute_entropy")), "step": trainer.state.global_step, "more": images(call)}
    return Rows(call["model"], call["input_ids"], mask, mask[:, -call["logits_to_keep"] :], trainer.temperature, **given)


def _labelled(call: Arguments) -> Rows | None:
    labels, mask, places = (call.get(name) for name in ("labels", "attention_mask", "position_ids"))
    if not call.get("fused_lm_head"):
        return None
    if labels is None or call.get("shift_labels") is not None or (mask is None and places is None):
        raise Unreadable("its rows are split over ranks, or packed without positions, which this adapter cannot read")
    entropy, positions = "entropy" in call["outputs"], own_positions(call["input_ids"], places)
    given: Any = {"entropy": entropy, "positions": positions, "step": step_of(call["self"]), "more": images(call)}
    given["context"], trainer = {"labels": labels}, trainer_of(call["self"])
    tempered = trainer is None or hasattr(trainer.args, "temperature")  # DPO, SFT and KTO score at 1
    temperature = call["temperature"] if tempered else 1.0
    return Rows(call["self"], call["input_ids"], mask, labels[:, 1:] != -100, temperature, **given)


def _again(where: str, model: Any, rows: Rows) -> Any:
    """Repeat a call of TRL's function: GRPO's with a stub trainer that has a temperature and an idle accelerator."""
    from actordbg.trainers import captured_call

    model.__dict__.pop("forward", None)  # the head from the previous call
    captured_call.function(_HEAD)(model, temperature=rows.temperature, outputs=("log_probs", "entropy"))
    if where == _HEAD:
        return model(**captured_call.labelled(rows), **rows.more, fused_lm_head=True)
    if rows.action_mask is None or rows.attention_mask is None:
        raise Unsupported(
            "the trainer's function scores actions of padded rows, and this call has none", hint="pass --through rows"
        )
    trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext), temperature=rows.temperature)
    given = (trainer, model, rows.sequences, rows.attention_mask, rows.action_mask.shape[1])
    return captured_call.function(where)(*given, compute_entropy=rows.entropy, **rows.more)


class Trl:
    """TRL 1.16."""

    name = package = "trl"
    tried = ("1.16.0",)
    seams = (
        *(Seam(at, _completions, lambda out: Scores(out[0], out[1]), _NEEDS, again=partial(_again, at)) for at in _SCORED),
        Seam(_HEAD, _labelled, lambda out: Scores(getattr(out, "log_probs", None), getattr(out, "entropy", None)),
             ("model", "temperature", "outputs"), makes_model="model", again=partial(_again, _HEAD)),
        TRAINER_STEP,
        Seam("trl.trainer.grpo_trainer:GRPOTrainer._compute_loss", no_rows, needs=("model", "inputs"), loss=grpo_loss),
        *(Seam(f"trl.trainer.{kind.lower()}_trainer:{kind}Trainer.compute_loss", no_rows, needs=_LOSS, loss=loss)
          for kind, loss in (("RLOO", rloo_loss), ("DPO", dpo_loss), ("SFT", sft_loss))),
        Seam("transformers.trainer:Trainer._get_grad_norm", no_rows, steps=lambda call: call["self"]),
    )  # fmt: skip
