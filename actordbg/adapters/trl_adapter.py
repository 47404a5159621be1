"""TRL: GRPO and RLOO at the function that scores completions; DPO and SFT at the models that are given a fused LM head.

`add_fused_lm_head(model)` gives a model a forward that returns log-probs, when it is asked to: all trainers since 1.16. GRPO's
own function is recorded where there is one, for it knows the step. Rows that TRL packed begin where only the device knows.
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
    counted, entropy = mask[:, -call["logits_to_keep"] :], bool(call.get("compute_entropy"))
    facts = {"temperature": trainer.temperature, "entropy": entropy, "step": trainer.state.global_step}
    return Rows(call["model"], call["input_ids"], mask, counted, more=_images(call), **facts)


def _labelled(call: Mapping[str, Any]) -> Rows | None:
    labels, mask = call.get("labels"), call.get("attention_mask")
    if not call.get("fused_lm_head"):
        return None
    if labels is None or mask is None or call.get("position_ids") is not None:
        raise Unreadable("its rows are packed, or split over ranks, which this adapter does not read")
    facts = {"temperature": call["temperature"], "entropy": "entropy" in call["outputs"]}
    return Rows(call["self"], call["input_ids"], mask, labels[:, 1:] != -100, more=_images(call), **facts)


def _images(call: Mapping[str, Any]) -> dict[str, Any]:
    return {name: call[name] for name in _IMAGES if call.get(name) is not None}


def _scoring(where: str) -> Seam:
    needs = ("model", "input_ids", "attention_mask", "logits_to_keep")
    return Seam(where, _completions, lambda output: Scores(output[0], output[1]), needs)


class Trl:
    """TRL 1.16."""

    name = package = "trl"
    tried = ("1.16.0",)
    seams = (
        _scoring("trl.trainer.grpo_trainer:GRPOTrainer._get_per_token_logps_and_entropies"),
        _scoring("trl.trainer.rloo_trainer:RLOOTrainer._get_per_token_logps_and_entropies"),
        Seam(
            "trl.trainer.utils:add_fused_lm_head", _labelled,
            lambda output: Scores(getattr(output, "log_probs", None), getattr(output, "entropy", None)),
            ("model", "temperature", "outputs"), makes_model="model",
        ),
    )  # fmt: skip
