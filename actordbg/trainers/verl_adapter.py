"""verl: an engine's step of one micro-batch, whose rows are jagged: concatenated, with offsets.

The rows are on the CPU there, so reading their lengths is free; the engine moves them itself. The tokens that count are the
responses, or the loss mask of a supervised training run. With Ulysses each rank has whole rows, and gets whole log-probs. The
step is the optimizer step: the scheduler's covers several mini-batches and epochs. Critics are not recorded.
"""

from __future__ import annotations

from typing import Any

import torch

from actordbg.trainers.seam import Arguments, LossCall, Rows, Scores, Seam, Unreadable, no_rows, padded, updates_of


def _rows(call: Arguments) -> Rows | None:
    engine, batch = call["self"], call["micro_batch"]
    ids, temperature = batch["input_ids"], torch.as_tensor(batch["temperature"], dtype=torch.float64).flatten()
    if engine.model_config.model_type != "language_model":
        return None
    if not ids.is_nested or ids.device.type != "cpu" or "multi_modal_inputs" in batch or (temperature != temperature[0]).any():
        raise Unreadable("its rows are not jagged, not on the CPU, have images, or differ in temperature")
    module: Any = engine.module[0] if isinstance(engine.module, list) else engine.module  # TorchTitan's has parts
    sequences, lengths = padded(ids), ids.offsets().diff()[:, None]
    places = torch.arange(sequences.shape[1])
    return Rows(
        model=getattr(module, "_fsdp_wrapped_module", module),
        sequences=sequences,
        attention_mask=(places < lengths).long(),
        action_mask=_counted(batch, places, lengths)[:, 1:],
        temperature=float(temperature[0]),
        entropy="calculate_entropy" in batch and bool(batch["calculate_entropy"]),
        step=None if getattr(engine, "lr_scheduler", None) is None else updates_of(engine),
    )


def _counted(batch: Any, places: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return a mask [B, S] of the tokens that count."""
    if "prompts" not in batch:
        return padded(batch["loss_mask"].long()) > 0
    prompts = batch["prompts"]
    begins = prompts.offsets().diff() if prompts.is_nested else batch["attention_mask"][:, : prompts.shape[1]].sum(1)
    return torch.logical_and(places >= begins[:, None], places < lengths)


def _ppo_loss(call: Arguments, log_probs: Any, output: Any) -> LossCall:
    """Read verl's loss, which its engine calls inside the forward. Values of responses are put behind their prompts, [B, S-1].

    Lengths are those of the forward's rows on the CPU: those of the micro-batch may wait for the GPU.
    """
    config, data, rows = call["config"], call["data"], call["rows"]
    new = padded(call["model_output"]["log_probs"], tuple(rows["sequences"].shape))[:, :-1]  # the last predicts nothing
    totals, counts = (rows[name].sum(1).tolist() for name in ("attention_mask", "action_mask"))

    def behind(values: Any) -> torch.Tensor:
        wide = torch.zeros(new.shape, dtype=values.dtype, device=values.device)
        of_rows = values.values().split(counts) if values.is_nested else values.unbind()
        for row, (of_row, total, count) in enumerate(zip(of_rows, totals, counts, strict=True)):
            wide[row, total - count - 1 : total - 1] = of_row[:count]
        return wide

    names = ("advantages", "old_log_probs", "rollout_log_probs", "rollout_is_weights")
    known: dict[str, Any] = {name: behind(data[name]) for name in names if name in data}
    weights = known.pop("rollout_is_weights", None)
    mask = behind(data["response_mask"])
    mode = config.policy_loss.get("loss_mode", "vanilla")
    entropy = call["model_output"].get("entropy")
    own = {
        "base_action_log_probs": behind(data["ref_log_prob"]) if config.use_kl_loss else None,
        "entropy": padded(entropy, tuple(rows["sequences"].shape))[:, :-1]
        if config.entropy_coeff and entropy is not None
        else None,
    }
    estimator = getattr(config, "kl_loss_type", "").removesuffix("+") if config.use_kl_loss else ""
    estimator = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}.get(estimator, estimator)
    clip = config.clip_ratio
    low, high = (getattr(config, name, None) for name in ("clip_ratio_low", "clip_ratio_high"))
    facts = {
        "policy_loss_type": "ppo" if mode == "vanilla" else mode, "loss_mode": mode, "loss_agg_mode": config.loss_agg_mode,
        "clip_eps_low": clip if low is None else low, "clip_eps_high": clip if high is None else high,
        "dual_clip": getattr(config, "clip_ratio_c", None), "is_correction_level": "off", "is_corrected": weights is not None,
        "loss_scale_factor": getattr(config, "loss_scale_factor", None), "kl_estimator": estimator,
        "kl_coef": config.kl_loss_coef if config.use_kl_loss else 0.0, "kl_limits": [20.0, 10.0] if estimator == "k3" else None,
        "entropy_coef": config.entropy_coeff if entropy is not None else 0.0,
    }  # fmt: skip
    normalizers = {name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size") if name in data}
    return LossCall(new, mask, **known, loss=output[0], **normalizers, facts=facts, weights=weights, own=own)


def _scores(output: Any) -> Scores:
    return Scores(*map(output[1]["model_output"].get, ("log_probs", "entropy")))


_PLACE = "verl.workers.engine."
_FORWARDS = (
    "fsdp.transformer_impl:FSDPEngineWithLMHead", "torchtitan.transformer_impl:TorchTitanEngineWithLMHead",
    "automodel.transformer_impl:AutomodelEngineWithLMHead",
)  # fmt: skip
"""Engines with a `forward_step` of their own: VeOmni's and FSDP Turbo's have that of FSDP."""
_STEPS = (
    "fsdp.transformer_impl:FSDPEngine", "fsdp.fsdp_turbo_impl:FSDPTurboEngineWithLMHead", "veomni.transformer_impl:VeOmniEngine",
    "torchtitan.transformer_impl:TorchTitanEngine", "automodel.transformer_impl:AutomodelEngine",
)  # fmt: skip


class Verl:
    """verl 0.9: its FSDP and FSDP2 engines were tried; VeOmni, TorchTitan, Automodel and FSDP Turbo were read."""

    name = package = "verl"
    tried = ("0.9.1",)
    seams = (
        *(Seam(f"{_PLACE}{engine}.forward_step", _rows, _scores, ("micro_batch",)) for engine in _FORWARDS),
        Seam("verl.workers.utils.losses:ppo_loss", no_rows, needs=("config", "model_output", "data"), loss=_ppo_loss),
        *(Seam(f"{_PLACE}{engine}.optimizer_step", no_rows, steps=lambda call: call["self"]) for engine in _STEPS),
    )  # fmt: skip
