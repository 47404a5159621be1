"""From the lab's records (`actordbg.formats.comparison_record`) to rows of the catalog: pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actordbg.formats.comparison_record import (
    MISMATCH,
    NOT_COMPARED,
    WITHIN_NOISE,
    ComparisonRecord,
    DumpComparison,
    Figures,
)
from actordbg.formats.matrix_record import MatrixRecord
from actordbg.formats.noise_record import NoiseRecord

Row = dict[str, Any]
_TOKEN_FIGURES = (
    "max_abs", "mean_abs", "p95_abs", "p99_abs", "max_rel", "p99_rel", "cosine", "kl_k1", "kl_k3", "clip_share", "max_ulp",
    "nonfinite",
)  # fmt: skip


def against_of(record: ComparisonRecord) -> str:
    """What `comparison.against` says of B: golden, or its replay id."""
    return record.b.replay_id or record.b.kind


def comparison_run(record: ComparisonRecord) -> Row:
    """The row of `comparison_run`; `current` is decided elsewhere."""
    compared = [one for one in record.dumps if one.log_probs is not None and one.verdict != NOT_COMPARED]
    tokens = [one.log_probs for one in compared if one.log_probs is not None]
    count = sum(one.count for one in tokens)
    return {
        "comparison_id": record.comparison_id,
        "created_at": record.created_at,
        "replay_id": record.a.replay_id or "",
        "against": against_of(record),
        "against_kind": record.b.kind,
        "current": 0,
        "verdict": record.verdict,
        "dumps": len(record.dumps),
        "compared": len(compared),
        "mismatches": sum(one.verdict == MISMATCH for one in record.dumps),
        "within_noise": sum(one.verdict == WITHIN_NOISE for one in record.dumps),
        "worst_dump": compared[0].dump_id if compared else None,
        "max_abs": _largest(one.max_abs for one in tokens),
        "mean_abs": _weighted(tokens, "mean_abs", count),
        "clip_share": _weighted(tokens, "clip_share", count),
        "grad_norm_rel": max((one.grad_norm_rel for one in compared if one.grad_norm_rel is not None), default=None),
        "label": record.a.label,
        "against_label": record.b.label,
        "thresholds_from": record.thresholds_from,
        "thresholds": record.thresholds,
        "noise_id": record.noise_id,
        "reasons": "; ".join(record.reasons) or None,
    }


def comparisons(record: ComparisonRecord) -> list[Row]:
    """The rows of `comparison`, one for each dump."""
    return [_comparison(record, one) for one in record.dumps]


def noise_floor(record: NoiseRecord) -> Row:
    """The row of `noise_floor`."""
    named = ("noise_id", "created_at", "replay_id", "label", "dtype", "floor", "config")
    floors = ("max_abs", "p99_abs", "mean_abs", "grad_norm_rel")
    row = {name: getattr(record, name) for name in named}
    return row | {"inputs": len(record.dumps)} | {name: record.floor.get(name) for name in floors}


def matrix(record: MatrixRecord) -> Row:
    """The row of `matrix`."""
    named = (
        "matrix_id", "created_at", "finished_at", "status", "loads", "selection", "command", "truth_id", "baseline", "axes",
    )  # fmt: skip
    return {name: getattr(record, name) for name in named} | {"inputs": len(record.dump_ids)}


def matrix_cells(record: MatrixRecord) -> list[Row]:
    """The rows of `matrix_cell`."""
    named = ("name", "status", "verdict", "replay_id", "signature", "max_abs", "load_s", "settings")
    return [
        {"matrix_id": record.matrix_id, "cell": cell.index}
        | {name: getattr(cell, name) for name in named}
        | {"reason": cell.reason or None, "regressed": "; ".join(cell.regressed) or None}
        for cell in record.cells
    ]


def _comparison(record: ComparisonRecord, one: DumpComparison) -> Row:
    tokens = one.log_probs or Figures(0)
    reasons = [*one.reasons, *(f"{what} not compared: {why}" for what, why in one.not_compared.items())]
    return {
        "replay_id": record.a.replay_id,
        "dump_id": one.dump_id,
        "against": against_of(record),
        "comparison_id": record.comparison_id,
        "created_at": record.created_at,
        "verdict": one.verdict,
        "count": tokens.count,
        **{name: getattr(tokens, name) for name in _TOKEN_FIGURES},
        "sequence_max_abs": one.sequences.max_abs if one.sequences else None,
        "entropy_max_abs": one.entropy.max_abs if one.entropy else None,
        "loss_abs": one.loss_abs,
        "grad_norm_rel": one.grad_norm_rel,
        "gradient_cosine": one.gradients.cosine if one.gradients else None,
        "gradient_distance": one.gradients.distance if one.gradients else None,
        "reasons": "; ".join(reasons) or None,
    }


def _largest(values: Iterable[float | None]) -> float | None:
    """The largest; None where one is not finite (so that a NaN is not hidden by the others), or there is none."""
    known = list(values)
    return max((value for value in known if value is not None), default=None) if None not in known else None


def _weighted(tokens: list[Figures], name: str, count: int) -> float | None:
    values = [getattr(one, name) for one in tokens]
    if not count or None in values:
        return None
    return float(sum(value * one.count for value, one in zip(values, tokens, strict=True)) / count)
