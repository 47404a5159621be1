"""The losses of RL trainers, token by token, written from their formulas: numpy arrays or torch tensors in, terms out.

A loss is a sum of terms over the actions of a step, divided by their number (`token_level_loss`), or the mean over rows of
each row's mean. `xp` is numpy or torch: both have these functions, so recorded log-probs are judged without torch, and a replay
differentiates the same formula. No trainer's code is used.

| Term of an action | Formula | Source |
|---|---|---|
| PPO | -min(r A, clip(r, 1 - low, 1 + high) A), r = exp(new - old) | Schulman et al. 2017 |
| dual clip, where A < 0 | -max(min(...), c A) | Ye et al. 2020 |
| GSPO | the same, with r of a row: exp(mean(new - old)); with correction new - rollout, and w is left out | Zheng et al. 2025 |
| importance correction | times w = exp(old - rollout), if its statistic is inside the band | OpenRLHF 0.11 `PolicyLoss` |
| supervised | -new | |
| a critic's value | (v - R)^2 / 2, or that of v clipped to within `clip_eps` of the old value if it is larger | the same |
| KL to the base | k1: d, k2: d^2 / 2, k3: exp(-d) - 1 + d, with d = new - base | Schulman 2020 |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Values = Any
"""A numpy array or a torch tensor."""
_FARTHEST, _MOST_KL = 20.0, 10.0
"""Nats to which OpenRLHF limits a log ratio, and a term of the KL penalty."""


def loss_terms(xp: Any, loss: Mapping[str, Any], named: Mapping[str, Values], mask: Values) -> Values | None:
    """Return the terms of a recorded loss, [B, A], not yet masked; None for a loss that is not known, or lacks its log-probs.

    loss: its recorded attributes, without those that it does not have. named: log_probs, old_log_probs, advantages,
    rollout_log_probs, or values, old_values, returns, each [B, A]; `term_weights`, factors of a policy's terms, [B, A] or [B, 1].
    mask: bool [B, A].
    """
    new, old, advantages = (named.get(name) for name in ("log_probs", "old_log_probs", "advantages"))
    if new is None and {"values", "old_values", "returns"} <= named.keys():
        values, before, clip = named["values"], named["old_values"], loss.get("clip_eps")
        terms = (values - named["returns"]) ** 2 / 2
        if clip is None:
            return terms
        return xp.maximum(terms, (before + xp.clip(values - before, -clip, clip) - named["returns"]) ** 2 / 2)
    if new is None or (old is None) != (advantages is None):
        return None
    if old is None or advantages is None:
        return -new
    kind, corrected = loss.get("policy_loss_type"), loss.get("is_correction_level") not in (None, "off")
    rollout = named.get("rollout_log_probs")
    if kind not in ("ppo", "gspo") or (corrected and rollout is None):
        return None
    if kind == "gspo":
        ratio = xp.exp(_row_mean(xp, new - (rollout if corrected else old), mask))[:, None]
    else:
        ratio = xp.exp(xp.clip(new - old, -_FARTHEST, _FARTHEST))
    terms = xp.minimum(ratio * advantages, xp.clip(ratio, 1 - loss["clip_eps_low"], 1 + loss["clip_eps_high"]) * advantages)
    if loss.get("dual_clip") is not None:
        terms = xp.where(advantages < 0, xp.maximum(terms, loss["dual_clip"] * advantages), terms)
    terms = -(terms * _weights(xp, loss, old, rollout, mask) if corrected and kind == "ppo" else terms)
    return terms * named["term_weights"] if "term_weights" in named else terms


def _weights(xp: Any, loss: Mapping[str, Any], old: Values, rollout: Values, mask: Values) -> Values:
    """Return the factor of each action by importance correction, [B, A]."""
    low, high = loss["is_correction_threshold"]
    by_row, apart = loss["is_correction_level"] == "seq", old - rollout
    if loss.get("is_correction_gating") in (None, "ratio"):
        known = xp.exp(_row_mean(xp, apart, mask)[:, None] if by_row else apart)
    else:
        p, q = (xp.clip(xp.exp(each), 1e-6, 1 - 1e-6) for each in (rollout, old))
        known = abs(p - q)
        if loss["is_correction_gating"] == "binary_kl":
            known = p * xp.log(p / q) + (1 - p) * xp.log((1 - p) / (1 - q))
        known = _row_mean(xp, known, mask)[:, None] if by_row else known
    if loss.get("is_correction_mode") == "clip":
        return xp.clip(known, low, high)
    weight = xp.exp(apart)
    return xp.where((known >= low) & (known <= high), weight, 0.0)


def kl_terms(xp: Any, estimator: str, new: Values, base: Values) -> Values | None:
    """Return the terms of a KL penalty to the base log-probs, [B, A]; None for an estimator that is not known."""
    apart = new - base
    near = xp.clip(apart, -_MOST_KL, None)
    terms = {"k1": apart, "k2": apart * apart / 2, "k3": xp.exp(-near) - 1 + near}.get(estimator)
    return None if terms is None else xp.clip(terms, -_MOST_KL, _MOST_KL)


def _row_mean(xp: Any, values: Values, mask: Values) -> Values:
    counts = mask.sum(-1)
    return xp.where(mask, values, 0.0).sum(-1) / xp.where(counts > 0, counts, counts + 1)
