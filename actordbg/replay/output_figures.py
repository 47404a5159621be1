"""Figures of one input's outputs: what a result keeps, so that the tensors themselves can go.

Everything is over the tokens that `mask` selects. Log-probs are in nats. The digest is the SHA-256 of *all* log-probs'
float32 bytes in C order, so two results are bit-identical exactly if their digests are equal and their masks are.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

from actordbg.formats.replay_record import FAILED, PASSED

NON_FINITE = "non-finite-output"


def summarise(log_probs: torch.Tensor, mask: torch.Tensor, entropy: torch.Tensor | None) -> dict[str, Any]:
    """ResultRecord fields of log-probs [B, A] (float), their mask (bool, same shape) and entropies (or None)."""
    values = log_probs.detach().to(torch.float32).contiguous()
    chosen = values[mask.bool()].double()
    finite = chosen[chosen.isfinite()]
    fields = {
        "logprob_count": chosen.numel(),
        "nonfinite": chosen.numel() - finite.numel(),
        "output_digest": hashlib.sha256(values.numpy().tobytes()).hexdigest(),
    }
    if finite.numel():
        low, high = torch.aminmax(finite)
        fields |= {"logprob_mean": float(finite.mean()), "logprob_min": float(low), "logprob_max": float(high)}
        fields["logprob_std"] = float(finite.std(correction=0))
    if entropy is not None and entropy.shape == mask.shape:
        fields["entropy_mean"] = _finite_mean(entropy[mask.bool()])
    return fields


def verdict_of(fields: dict[str, Any], loss: float | None, grad_norm: float | None) -> dict[str, Any]:
    """`status`, and why it failed: a run that finished with a NaN is not a success."""
    figures = {"loss": loss, "gradient norm": grad_norm}
    odd = [name for name, value in figures.items() if value is not None and not math.isfinite(value)]
    bad = fields["nonfinite"]
    if not bad and not odd:
        return {"status": PASSED}
    parts = [f"{bad} of {fields['logprob_count']} log-probs are"] if bad else []
    parts += [f"the {name} is" for name in odd]
    return {
        "status": FAILED,
        "error_class": "NonFiniteOutput",
        "error": " and ".join(parts) + " not finite",
        "signature": NON_FINITE,
    }


def _finite_mean(values: torch.Tensor) -> float | None:
    finite = values[values.isfinite()]
    return float(finite.double().mean()) if finite.numel() else None
