"""Rows of an adapter as arguments of an Actor's forward, and its scores as what that returns."""

from __future__ import annotations

from typing import Any

import torch

from actordbg.formats.encoding import OFFSETS, POSITIONS
from actordbg.formats.nested_values import CONTEXT, flat
from actordbg.trainers.seam import Rows, Scores, Seam, Unreadable, padded

_POSITIONS = 128
"""Positions whose softmax over the vocabulary is computed at a time."""


def named_rows(rows: Rows) -> dict[str, Any]:
    """Return the rows as arguments of an equivalent Actor.forward. Without a mask, all tokens are real."""
    flags = {"return_logprobs": rows.action_mask is None, "return_entropy": rows.entropy, "return_output": rows.entropy}
    more = flat(rows.more) if rows.more else {}
    if rows.context:
        more |= {f"{CONTEXT}{name}": value for name, value in flat(rows.context).items()}
    if rows.packed:
        return _packed(rows) | flags | more
    real = torch.ones_like(rows.sequences) if rows.attention_mask is None else rows.attention_mask
    counted = {} if rows.action_mask is None else {"action_mask": rows.action_mask}
    return {"sequences": rows.sequences, "attention_mask": real, **counted, **flags, **more}


def _packed(rows: Rows) -> dict[str, Any]:
    """Return packed rows as one long row, and where each begins: views of the trainer's tensors. The writer separates them."""
    ids: Any = rows.sequences
    tensors = {
        name: _long(held) for name, held in (("sequences", ids), ("attention_mask", rows.attention_mask)) if held is not None
    }
    if rows.action_mask is not None:
        tensors["action_mask"] = _long(_every_column(rows.action_mask, ids))[:, 1 - tensors["sequences"].shape[1] :]
    offsets = ids.offsets() if rows.offsets is None and ids.is_nested else rows.offsets
    if offsets is not None:
        return tensors | {OFFSETS: offsets.reshape(-1)}
    return tensors | ({} if rows.positions is None else {POSITIONS: rows.positions})


def _every_column(values: Any, ids: Any, behind: int = 0) -> Any:
    """Return values of next tokens, [B, A] beside ids [B, S], as [B, S] with `behind` of the new columns behind them."""
    lacks = 0 if ids.is_nested or values.shape[:-1] != ids.shape[:-1] else ids.shape[-1] - values.shape[-1]
    return torch.nn.functional.pad(values, (lacks - behind, behind)) if lacks > 0 else values


def _long(tensor: Any) -> torch.Tensor:
    """Return a packed or jagged tensor as [1, T]."""
    if not tensor.is_nested:
        return tensor.reshape(1, -1)  # type: ignore[no-any-return]
    if tensor.layout is not torch.jagged or tensor.lengths() is not None:
        raise Unreadable("a nested tensor has holes, or the old strided layout")
    long: torch.Tensor = tensor.values().reshape(1, -1)
    return long


def _of_next(values: torch.Tensor | list[torch.Tensor], rows: Rows, total: int) -> torch.Tensor:
    """Return scores of packed rows as [1, T-1]; jagged ones, with a value for each token, and lists as [B, A] or [B, S-1]."""
    if isinstance(values, list):
        every = torch.cat(values)
        counted = torch.as_tensor(rows.action_mask, device=every.device) != 0
        return every.new_zeros(counted.shape).masked_scatter(counted, every)
    if rows.packed:
        return _long(_every_column(values, rows.sequences, 1))[:, : total - 1]
    if not values.is_nested:
        return values
    dense = padded(values.detach(), tuple(rows.sequences.shape))[:, :-1]
    if rows.action_mask is None:
        return dense
    return dense[:, -rows.action_mask.shape[1] :] * rows.action_mask.to(dense.device)


def read_scores(seam: Seam, rows: Rows, output: Any) -> Scores:
    """Return the log-probs and entropies of a result, those of packed rows as [1, T-1]. Raises whatever the adapter raises."""
    scores, given = seam.result(output), named_rows(rows)
    actions = given.get("action_mask")
    ids, logits = given["sequences"], scores.logits
    if logits is None or scores.log_probs is not None:
        expected = (ids[:, 1:] if actions is None else actions).shape
        read = [None if values is None else _of_next(values, rows, ids.shape[1]) for values in (scores.log_probs, scores.entropy)]
        if mismatched := [tuple(values.shape) for values in read if values is not None and values.shape != expected]:
            raise ValueError(f"scores of {mismatched[0]} for next tokens of {tuple(expected)}")
        return Scores(*read)
    if hasattr(logits, "placements"):
        raise ValueError("its logits are sharded, and gathering them would wait for other ranks")
    if rows.packed:
        logits = logits.reshape(1, -1, logits.shape[-1])
    if logits.shape[0] != ids.shape[0] or ids.shape[1] - logits.shape[1] not in (0, 1):
        raise ValueError(f"logits of {tuple(logits.shape[:2])} positions for ids of {tuple(ids.shape)}")
    log_probs = log_probs_of(logits, ids, rows.temperature)
    if actions is not None:
        width = actions.shape[1]
        log_probs = log_probs[:, -width:] * actions
    return Scores(log_probs)


def log_probs_of(logits: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    """Compute log-probs [B, S-1] of the next ids in float32, a few positions at a time: no second tensor of the logits' size."""
    parts = []
    for at in range(0, ids.shape[1] - 1, _POSITIONS):
        end = min(at + _POSITIONS, ids.shape[1] - 1)
        some = logits[:, at:end].float() / temperature
        following = ids[:, at + 1 : at + 1 + some.shape[1], None]
        parts.append(some.gather(-1, following).squeeze(-1) - some.logsumexp(-1))
    return torch.cat(parts, 1)
