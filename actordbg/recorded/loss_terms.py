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
| RLOO | PPO, with r of a row: exp(sum(new - old)) | TRL 1.16 |
| CISPO | -sg(clip(r, 1 - low, 1 + high)) A new | MiniMax-M1 2025 |
| DPPO | -t A r, or 0 where p has moved farther than a limit in A's direction; + c (new - old)^2 | prime-rl 0.8 `loss.py` |
| supervised | -new, in DFT times exp(new) | Wu et al. 2025 |
| DPO, of a row's pair | -log sigmoid(b d), max(0, 1 - b d), or IPO's (d - 1 / 2b)^2, d = chosen - rejected | Rafailov 2023 |
| | of the rows' sums of new - base, or TRL's IPO's means; the first half of the rows was chosen | TRL 1.16 `_compute_loss` |
| with label smoothing s | + s b d | OpenRLHF 0.11 `DPOLoss` |
| rewards of a pair | log(1 + exp(m - d)), d = chosen - rejected, with a margin m | OpenRLHF 0.11 `PairWiseLoss` |
| a critic's value | (v - R)^2 / 2, or that of v clipped to within `clip_eps` of the old value if it is larger | the same |
| KL to the base | k1: d, abs: |d|, k2: d^2 / 2, k3: exp(-d) - 1 + d, with d = new - base | Schulman 2020 |
| other trainers' penalties | + c KL, in TRL times r by default, - c' entropy | TRL 1.16 `_compute_loss`, verl 0.9.1 `ppo_loss` |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actordbg.base.units import plural

Values = Any
"""A numpy array or a torch tensor."""
Named = Mapping[str, Values]
"""Values by the names of `loss_terms`."""
Attributes = Mapping[str, Any]
"""Recorded attributes of a loss, without those that it does not have."""
_FARTHEST, _MOST_KL = 20.0, 10.0
"""Nats to which OpenRLHF limits a log ratio, and a term of the KL penalty."""
VALUES = ("values", "old_values", "returns")
"""Names of the tensors that a critic's loss gets."""
REWARDS = ("chosen_reward", "reject_reward", "margin")
"""Names of the tensors that a reward model's loss gets, [pairs]."""
OF_ROWS = ("old_row_log_probs", "base_row_log_probs")
"""Names of sums of log-probs over the actions of each row, [B], of losses that get only those."""


@dataclass(frozen=True)
class Terms:
    """The loss of a micro-batch before it is normalized, float64: sums over its tokens, and over its rows' means.

    `size`: the sum of absolute terms, since a loss cancels. `tokens`, `rows`: how many terms each sum has. `apart`: penalties
    that are means of the micro-batch, and added to its normalized loss.
    """

    by_token: float
    by_row: float
    size: float
    tokens: int
    rows: int
    apart: float = 0.0

    def divisor(self, loss: Attributes) -> tuple[float, str] | None:
        """Return what the sum of a whole step's terms is divided by, and the result in words; None if it is not known.

        That is the sum over tokens, but over rows' means for a mean of those. loss: a loss's recorded attributes, with
        `loss_agg_mode` (see `trainers.seam`) or `token_level_loss`.
        """
        tokens, rows = plural(self.tokens, "token"), plural(self.rows, "row")
        scale = loss.get("loss_scale_factor")
        by_scale = scale * self.rows if isinstance(scale, int | float) else None
        known: dict[str, tuple[float | None, str]] = {
            "token-mean": (self.tokens, f"mean over {tokens}"), "token-sum": (1.0, f"sum over {tokens}"),
            BY_ROW: (self.rows, f"mean over {rows}"), "seq-mean-token-sum": (self.rows, f"sum over tokens by {rows}"),
            "seq-mean-token-sum-norm": (by_scale, f"sum over tokens by {scale} times {rows}"),
            "call-token-sum": (1.0, f"sum over {tokens}"), "call-row-means": (1.0, f"sum of the means of {rows}"),
            "step-token-sum": (1.0, f"sum over {tokens}"),
        }  # fmt: skip
        by, words = known.get(aggregation(loss), (None, ""))
        return (by, words) if by else None


_CLIPS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 1.0, math.inf)
"""Ranges of clipping that a trainer may use in the place of its setting. If nothing is clipped, most give the same loss."""
_BETAS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
"""Weights of preferences that a trainer may use in the place of its setting."""
_RATIOS = ("ppo", "gspo", "rloo", "cispo", "dppo")
BY_ROW = "seq-mean-token-mean"
OF_STEPS = {"step-token-sum": "batch_num_tokens", "call-row-means": "global_batch_size"}
OF_CALLS = {"call-token-sum": "batch_num_tokens", **OF_STEPS}
"""Losses that are sums of their own call, by the argument that divides them; for those of `OF_STEPS` it is the step's number."""


def aggregation(loss: Attributes) -> str:
    """Return what the losses of a step add up to, as a `loss_agg_mode`."""
    return str(loss.get("loss_agg_mode", "token-mean" if loss.get("token_level_loss") is not False else BY_ROW))


def loss_terms(xp: Any, loss: Attributes, named: Named, mask: Values) -> Values | None:
    """Return the terms of a recorded loss, [B, A], not yet masked; None for a loss that is not known, or lacks its log-probs.

    loss: its recorded attributes, without those that it does not have. named: log_probs, old_log_probs, advantages,
    rollout_log_probs, or values, old_values, returns, each [B, A]; `term_weights`, factors of a policy's terms, [B, A] or [B, 1].
    mask: bool [B, A].
    """
    new, old, advantages = (named.get(name) for name in ("log_probs", "old_log_probs", "advantages"))
    if "chosen_reward" in named:
        over = loss["beta"] * (named["chosen_reward"] - named["reject_reward"])
        return xp.logaddexp(loss.get("margin", named.get("margin", 0.0)) - over, 0 * over)[:, None]
    if new is None and {"values", "old_values", "returns"} <= named.keys():
        values, before, clip = named["values"], xp.roll(named["old_values"], loss.get("rows_late", 0), 0), loss.get("clip_eps")
        terms = (values - named["returns"]) ** 2 / 2
        if clip is None:
            return terms
        near = before + xp.clip(values - before, -clip, clip)
        return -_lower(xp, loss, -terms, -((near - named["returns"]) ** 2) / 2)
    kind, old_rows = loss.get("policy_loss_type"), named.get("old_row_log_probs")
    if new is None or kind == "other" or (old is None and old_rows is None) != (advantages is None):
        return None
    if kind == "dpo":
        return _of_pairs(xp, loss, named, mask)
    if advantages is None:
        return -new * named.get("term_weights", 1.0)
    corrected = loss.get("is_correction_level") not in (None, "off")
    rollout = named.get("rollout_log_probs")
    if kind not in _RATIOS or (corrected and rollout is None) or (old is None) != (kind == "rloo"):
        return None
    if kind == "rloo":
        ratio = xp.exp(xp.where(mask, new, 0.0).sum(-1) - old_rows)[:, None]
    elif kind == "gspo":
        ratio = xp.exp(_row_mean(xp, new - (rollout if corrected else old), mask))[:, None]
    else:
        ratio = xp.exp(xp.clip(new - old, -_FARTHEST, _FARTHEST))
    ratio = ratio ** loss.get("ratio_power", 1)
    terms = _surrogate(xp, loss, named, ratio)
    if loss.get("dual_clip") is not None:
        terms = xp.where(advantages < 0, xp.maximum(terms, loss["dual_clip"] * advantages), terms)
    terms = -(terms * _weights(xp, loss, old, rollout, mask) if corrected and kind == "ppo" else terms)
    terms = terms * named["term_weights"] if "term_weights" in named and loss.get("weighted", True) else terms
    for name, by in (("kl", ratio if loss.get("kl_by_ratio") else 1.0), ("entropy", -1.0)):
        if loss.get(f"{name}_coef") and loss.get(f"{name}_share") is None:
            each = penalty(xp, name, loss, named)
            if each is None:
                return None
            terms = terms + loss[f"{name}_coef"] * by * each
    return terms


def _surrogate(xp: Any, loss: Attributes, named: Named, ratio: Values) -> Values:
    """Return the terms that a policy's loss maximizes, before the dual clip, [B, A]. ratio: [B, A], or [B, 1] of rows."""
    new, old, advantages, kind = named["log_probs"], named.get("old_log_probs"), named["advantages"], loss["policy_loss_type"]
    if kind == "dppo":
        moved, up = xp.exp(new) - xp.exp(old), advantages > 0
        outside = xp.where(up, moved > loss["dppo_mask_high"], moved < -loss["dppo_mask_low"])
        return xp.where(outside, 0.0, loss["adv_tau"] * advantages * ratio) - loss["kl_tau"] * (new - old) ** 2
    clipped = xp.clip(ratio, 1 - loss["clip_eps_low"], 1 + loss["clip_eps_high"])
    if kind == "cispo":
        return getattr(clipped, "detach", clipped.__array__)() * advantages * new
    return _lower(xp, loss, ratio * advantages, clipped * advantages)


def _lower(xp: Any, loss: Attributes, plain: Values, clipped: Values) -> Values:
    """Return the lower of two objectives, or what a trainer may take of them instead."""
    others = {"clipped": clipped, "higher": xp.maximum(plain, clipped)}
    return others.get(loss.get("bound", ""), xp.minimum(plain, clipped))


def _of_pairs(xp: Any, loss: Attributes, named: Named, mask: Values) -> Values | None:
    """Return the term of a preference loss of the pair that each row is in, at each of its actions, [B, A]."""
    new, base, beta = named["log_probs"], named.get("base_action_log_probs"), loss.get("beta")
    kind = loss.get("loss_type") or ("ipo_sum" if loss.get("ipo") else "sigmoid")
    sums = named.get("base_row_log_probs") if base is None else xp.where(mask, base, 0.0).sum(-1)
    if sums is None or not isinstance(beta, int | float) or not beta or len(new) % 2:
        return None
    apart = xp.where(mask, new, 0.0).sum(-1) - (0.0 if loss.get("without_reference") else sums)
    apart = apart / xp.clip(mask.sum(-1), 1, None) if loss.get("by_means") or kind in ("ipo", "sigmoid_norm") else apart
    half = len(apart) // 2
    over = apart[:half] - apart[half:]
    near = beta * over
    smoothed = loss.get("label_smoothing", 0.0) * near
    terms = {
        "sigmoid": xp.logaddexp(-near, 0 * near) + smoothed, "hinge": xp.clip(1 - near, 0.0, None),
        "ipo": (over - 1 / (2 * beta)) ** 2,
    }.get(kind.partition("_")[0])  # fmt: skip
    return None if terms is None else xp.concatenate((terms, terms))[:, None] * xp.ones_like(new)


def penalty(xp: Any, name: str, loss: Attributes, named: Named) -> Values | None:
    """Return the terms of a penalty, "kl" or "entropy", without its coefficient, [B, A]; None if it is not known."""
    if name == "entropy":
        return named.get("entropy")
    base, estimator = named.get("base_action_log_probs"), loss.get("kl_estimator") or ""
    return None if base is None else kl_terms(xp, estimator, named["log_probs"], base, *loss.get("kl_limits") or (1e9, 1e9))


def _weights(xp: Any, loss: Attributes, old: Values, rollout: Values, mask: Values) -> Values:
    """Return the factor of each action by importance correction, [B, A]."""
    low, high = loss["is_correction_threshold"]
    by_row, apart = loss["is_correction_level"] == "seq", (old - rollout) * loss.get("weights_power", 1)
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


def kl_terms(
    xp: Any, estimator: str, new: Values, base: Values, farthest: float = _MOST_KL, most: float = _MOST_KL
) -> Values | None:
    """Return the terms of a KL penalty to the base log-probs, [B, A]; None for an estimator that is not known.

    farthest: nats to which a log ratio is limited in k3. most: to which a term is limited.
    """
    apart = new - base
    near = xp.clip(apart, -farthest, None)
    terms = {"k1": apart, "abs": abs(apart), "k2": apart * apart / 2, "k3": xp.exp(-near) - 1 + near}.get(estimator)
    return None if terms is None else xp.clip(terms, -most, most)


def other_settings(loss: Attributes, *, moved: bool) -> dict[str, dict[str, Any]]:
    """Return changes of a loss's attributes that a trainer may compute with, in words: what changes nothing explains nothing.

    moved: ratios are not all 1.
    """
    changes: dict[str, dict[str, Any]] = {
        "the opposite sign": {"sign": -1.0}, "a loss without its mask": {"masked": False},
        "the inverse ratio, old over new": {"ratio_power": -1},
        "clipping with min and max swapped": {"bound": "higher"}, "the clipped term alone": {"bound": "clipped"},
        "a loss without its importance correction": {"weighted": False},
        "the inverse importance weights, rollout over old": {"weights_power": -1},
    }  # fmt: skip
    low, high, limits = loss.get("clip_eps_low"), loss.get("clip_eps_high"), ["clip_eps"] if "clip_eps" in loss else []
    if low is not None and moved:
        kind, of = ("ppo", "token") if loss.get("policy_loss_type") == "gspo" else ("gspo", "row")
        changes[f"a ratio of each {of}"], limits = {"policy_loss_type": kind}, ["clip_eps_low", "clip_eps_high"]
        if low != high:
            changes["clip_eps_low and clip_eps_high swapped"] = {"clip_eps_low": high, "clip_eps_high": low}
    if "clip_eps" in loss:
        changes["old values of another row"] = {"rows_late": 1}
    for limit in {*_CLIPS, low or math.inf, high or math.inf} if limits else ():
        words = f"clipping at {limit}" if math.isfinite(limit) else "a loss without clipping"
        changes[words] = dict.fromkeys(limits, limit)
    if loss.get("is_correction_threshold"):
        others = {"off", "token", "seq"} - {loss["is_correction_level"]}
        changes |= {f"importance correction {level}": {"is_correction_level": level} for level in others}
    if beta := loss.get("beta"):
        changes |= {
            "chosen and rejected swapped": {"beta": -beta}, "a loss without its reference": {"without_reference": True},
            "means over a row's tokens instead of sums": {"by_means": True}, "no label smoothing": {"label_smoothing": 0.0},
            "no margin": {"margin": 0.0},
        }  # fmt: skip
        changes |= {f"beta {other}": {"beta": other} for other in _BETAS if other != beta}
    if loss.get("kl_coef"):
        changes["no KL"] = {"kl_coef": 0.0}
        known = (name for name in ("k1", "abs", "k2", "k3") if name != loss.get("kl_estimator"))
        changes |= {f"KL by {name}": {"kl_estimator": name} for name in known}
    if loss.get("entropy_coef"):
        changes["no entropy"] = {"entropy_coef": 0.0}
    return changes


def _row_mean(xp: Any, values: Values, mask: Values) -> Values:
    counts = mask.sum(-1)
    return xp.where(mask, values, 0.0).sum(-1) / xp.where(counts > 0, counts, counts + 1)
