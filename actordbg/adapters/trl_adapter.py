"""TRL: GRPO and RLOO at the function that scores completions; DPO and SFT at the models that are given a fused LM head.

`add_fused_lm_head(model)` replaces a model's forward by one that returns log-probs, when it is asked to. All of TRL's trainers
have used it since 1.16. GRPO's own function is recorded instead where there is one, because it knows the step: a recorded
function inside of a recorded one counts once.

Log-probs that do not count are zero, as the Actor's are. Rows that TRL packed (`packing`, `padding_free`) have no attention mask;
where they begin is on the device, so they are not read yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actordbg.adapters.seam import Rows, Scores, Seam, Unreadable

_IMAGES = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "token_type_ids",
    "mm_token_type_ids", "image_position_ids",
)  # fmt: skip


def _completions(call: Mapping[str, Any]) -> Rows:
    trainer, mask = call["self"], call["attention_mask"]
    return Rows(
        model=call["model"],
        sequences=call["input_ids"],
        attention_mask=mask,
        action_mask=mask[:, -call["logits_to_keep"] :],
        temperature=trainer.temperature,
        entropy=bool(call.get("compute_entropy")),
        step=trainer.state.global_step,
        more=_images(call),
    )


def _labelled(call: Mapping[str, Any]) -> Rows | None:
    labels, mask = call.get("labels"), call.get("attention_mask")
    if not call.get("fused_lm_head"):
        return None
    if labels is None or mask is None or call.get("position_ids") is not None:
        raise Unreadable("its rows are packed, or split over ranks, which this adapter does not read")
    return Rows(
        model=call["self"],
        sequences=call["input_ids"],
        attention_mask=mask,
        action_mask=labels[:, 1:] != -100,
        temperature=call["temperature"],
        entropy="entropy" in call["outputs"],
        more=_images(call),
    )


def _images(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: call[name] for name in _IMAGES if call.get(name) is not None}


class Trl:
    """TRL 1.16."""

    name = "trl"
    package = "trl"
    tried = ("1.16.0",)
    seams = (
        *(
            Seam(
                where=f"trl.trainer.{module}:{trainer}._get_per_token_logps_and_entropies",
                needs=("model", "input_ids", "attention_mask", "logits_to_keep"),
                rows=_completions,
                result=lambda output: Scores(output[0], output[1]),
            )
            for module, trainer in (("grpo_trainer", "GRPOTrainer"), ("rloo_trainer", "RLOOTrainer"))
        ),
        Seam(
            where="trl.trainer.utils:add_fused_lm_head",
            needs=("model", "temperature", "outputs"),
            rows=_labelled,
            result=lambda output: Scores(getattr(output, "log_probs", None), getattr(output, "entropy", None)),
            makes_model="model",
        ),
    )
