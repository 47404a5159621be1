"""Rows of comparisons, noise floors, matrices and memory, made from the records of their files.

A column that is a field of the record by the same name is taken over as it is; what is computed stands here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actordbg.catalog import tables
from actordbg.records.comparison_record import (
    MISMATCH,
    NOT_COMPARED,
    WITHIN_NOISE,
    ComparisonRecord,
    DumpComparison,
    Figures,
    MemoryRecord,
    NoiseRecord,
)
from actordbg.records.matrix_record import MatrixCell, MatrixRecord

Row = dict[str, Any]
RECORDS: dict[str, Any] = {
    "comparisons": ComparisonRecord, "noise": NoiseRecord, "matrices": MatrixRecord, "memory": MemoryRecord,
}  # fmt: skip
"""What the files of a folder hold."""


def rows_of(record: ComparisonRecord | NoiseRecord | MatrixRecord | MemoryRecord) -> dict[type[Any], list[Row]]:
    """The rows that a file's record makes, by table. Those of a comparison's dumps are wanted once it is current (`dumps_of`)."""
    if isinstance(record, ComparisonRecord):
        return {tables.ComparisonRow: [_comparison_run(record)]}
    if isinstance(record, NoiseRecord):
        figures = {name: record.floor.get(name) for name in ("max_abs", "p99_abs", "mean_abs", "grad_norm_rel")}
        return {tables.NoiseRow: [tables.shared(record, tables.NoiseRow) | figures | {"inputs": len(record.dumps)}]}
    if isinstance(record, MemoryRecord):
        return {tables.MemoryRow: [_watching(record)]}
    matrix = tables.shared(record, tables.Matrix) | {"inputs": len(record.dump_ids)}
    return {tables.Matrix: [matrix], tables.CellRow: [_cell(record.matrix_id, cell) for cell in record.cells]}


def _comparison_run(record: ComparisonRecord) -> Row:
    """The row of `comparison_run`; whether it is current is decided elsewhere."""
    compared = [one for one in record.dumps if one.log_probs is not None and one.verdict != NOT_COMPARED]
    tokens = [one.log_probs for one in compared if one.log_probs is not None]
    count = sum(one.count for one in tokens)
    return tables.shared(record, tables.ComparisonRow) | {
        "replay_id": record.a.replay_id or "",
        "against": _against(record),
        "against_kind": record.b.kind,
        "current": 0,
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
        "reasons": "; ".join(record.reasons) or None,
    }


def dumps_of(record: ComparisonRecord) -> list[Row]:
    """The rows of `comparison`, one for each dump."""
    return [_compared_dump(record, one) for one in record.dumps]


def _compared_dump(record: ComparisonRecord, one: DumpComparison) -> Row:
    reasons = [*one.reasons, *(f"{what} not compared: {why}" for what, why in one.not_compared.items())]
    row = tables.shared(one.log_probs or Figures(0), tables.ComparedDump) | tables.shared(one, tables.ComparedDump)
    return row | {
        "replay_id": record.a.replay_id,
        "against": _against(record),
        "comparison_id": record.comparison_id,
        "created_at": record.created_at,
        "sequence_max_abs": one.sequences.max_abs if one.sequences else None,
        "entropy_max_abs": one.entropy.max_abs if one.entropy else None,
        "gradient_cosine": one.gradients.cosine if one.gradients else None,
        "gradient_distance": one.gradients.distance if one.gradients else None,
        "reasons": "; ".join(reasons) or None,
    }


def _against(record: ComparisonRecord) -> str:
    """What B is called: golden, or its replay id."""
    return record.b.replay_id or record.b.kind


def _cell(matrix_id: str, cell: MatrixCell) -> Row:
    made = {"reason": cell.reason or None, "regressed": "; ".join(cell.regressed) or None}
    made |= {"laws": cell.laws or None, "violations": "; ".join(cell.violations) or None}
    return tables.shared(cell, tables.CellRow) | made | {"matrix_id": matrix_id, "cell": cell.index}


def _watching(record: MemoryRecord) -> Row:
    """A watching of memory: the largest peaks over its processes, and the fastest growth of one that grows."""
    sizes = [(name, one) for process in record.processes for name, one in process.sizes.items()]
    row = tables.shared(record, tables.MemoryRow) | {
        "processes": len(record.processes),
        "samples": sum(one.samples for one in record.processes),
        "steps": max((one.steps for one in record.processes), default=0),
        "notes": "; ".join(record.notes) or None,
    }
    for name in ("rss", "uss", "cuda_used"):
        row[f"peak_{name}"] = max((one.peak for at, one in sizes if at == name), default=None)
    growths = [one.growth for _, one in sizes if one.growth is not None and one.growth.grows]
    for unit in ("step", "second"):
        row[f"growth_per_{unit}"] = max((growth.slope for growth in growths if growth.unit == unit), default=None)
    return row


def _largest(values: Iterable[float | None]) -> float | None:
    """The largest; None where one is not finite (so that a NaN is not hidden by the others), or there is none."""
    known = list(values)
    return max((value for value in known if value is not None), default=None) if None not in known else None


def _weighted(tokens: list[Figures], name: str, count: int) -> float | None:
    values = [getattr(one, name) for one in tokens]
    if not count or None in values:
        return None
    return float(sum(value * one.count for value, one in zip(values, tokens, strict=True)) / count)
