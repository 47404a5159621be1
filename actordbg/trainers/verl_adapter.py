"""verl: the FSDP engine's step of one micro-batch, whose rows are jagged: concatenated, with offsets.

The rows are on the CPU there, so reading their lengths is free; the engine moves them itself. The tokens that count are the
responses, or the loss mask of a supervised training run. With Ulysses each rank has whole rows, and gets whole log-probs. Critics
are not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from actordbg.trainers.seam import Rows, Scores, Seam, Unreadable, padded


def _rows(call: Mapping[str, Any]) -> Rows | None:
    engine, batch = call["self"], call["micro_batch"]
    ids, temperature = batch["input_ids"], torch.as_tensor(batch["temperature"], dtype=torch.float64).flatten()
    if engine.model_config.model_type != "language_model":
        return None
    if not ids.is_nested or ids.device.type != "cpu" or "multi_modal_inputs" in batch or (temperature != temperature[0]).any():
        raise Unreadable("its rows are not jagged, not on the CPU, have images, or differ in temperature")
    sequences, lengths = padded(ids), ids.offsets().diff()[:, None]
    places = torch.arange(sequences.shape[1])
    return Rows(
        model=getattr(engine.module, "_fsdp_wrapped_module", engine.module),
        sequences=sequences,
        attention_mask=(places < lengths).long(),
        action_mask=_counted(batch, places, lengths)[:, 1:],
        temperature=float(temperature[0]),
        entropy="calculate_entropy" in batch and bool(batch["calculate_entropy"]),
        step=getattr(getattr(engine, "lr_scheduler", None), "last_epoch", None),
    )


def _counted(batch: Any, places: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return a mask [B, S] of the tokens that count."""
    if "prompts" not in batch:
        return padded(batch["loss_mask"].long()) > 0
    prompts = batch["prompts"]
    begins = prompts.offsets().diff() if prompts.is_nested else batch["attention_mask"][:, : prompts.shape[1]].sum(1)
    return torch.logical_and(places >= begins[:, None], places < lengths)


class Verl:
    """verl 0.9, its FSDP and FSDP2 engines."""

    name = package = "verl"
    tried = ("0.9.1",)
    seams = (
        Seam(
            where="verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead.forward_step",
            needs=("micro_batch",),
            rows=_rows,
            result=lambda output: Scores(*map(output[1]["model_output"].get, ("log_probs", "entropy"))),
        ),
    )
