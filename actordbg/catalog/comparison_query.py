"""Reading what the lab found out: comparisons, noise floors, matrices. As `query`, which see.

Example::

    for one in comparisons(catalog, "20250619T052608-9f3a2c"):
        print(one.against, one.verdict, one.max_abs)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from actordbg.base.ids import resolve
from actordbg.catalog import connections as engine
from actordbg.catalog.query import Catalog, open_fresh
from actordbg.formats.noise_record import NoiseRecord
from actordbg.store.layout import Store

T = TypeVar("T")
_AT_ONCE = 500
"""Dumps that one query names: SQLite takes 999 parameters at least."""


@dataclass(frozen=True)
class ComparisonRow:
    """One comparison: both sides, its verdict, and figures over all dumps (log-probs in nats)."""

    comparison_id: str
    created_at: str
    replay_id: str
    against: str
    against_kind: str
    verdict: str
    dumps: int
    compared: int
    mismatches: int
    within_noise: int
    worst_dump: str | None
    max_abs: float | None
    mean_abs: float | None
    clip_share: float | None
    grad_norm_rel: float | None
    label: str | None
    against_label: str | None
    thresholds_from: str | None
    thresholds: dict[str, float]
    noise_id: str | None
    reasons: str | None


@dataclass(frozen=True)
class NoiseRow:
    """One noise floor: how far a configuration moves by itself, by measure."""

    noise_id: str
    created_at: str
    replay_id: str
    label: str
    dtype: str | None
    inputs: int
    floor: dict[str, float]
    config: dict[str, Any]


@dataclass(frozen=True)
class CellRow:
    """One cell of a matrix."""

    cell: int
    name: str
    status: str
    verdict: str | None
    replay_id: str | None
    reason: str | None
    signature: str | None
    max_abs: float | None
    load_s: float | None
    regressed: str | None
    settings: dict[str, Any]


@dataclass(frozen=True)
class MatrixRow:
    """One matrix with its cells."""

    matrix_id: str
    created_at: str
    finished_at: str | None
    status: str
    inputs: int
    loads: int
    selection: str | None
    command: str | None
    truth_id: str | None
    baseline: str | None
    axes: dict[str, list[Any]]
    cells: tuple[CellRow, ...]


def comparisons(source: Store | Catalog, replay_id: str | None = None) -> list[ComparisonRow]:
    """The newest comparison of each pair whose replays are there, the newest first; of one replay (its full id): as A."""
    where, params = ("current AND replay_id = ?", (replay_id,)) if replay_id else ("current", ())
    return _rows(
        source, ComparisonRow, "comparison_run", f"{where} ORDER BY created_at DESC, comparison_id DESC", params
    )


def noise_floors(source: Store | Catalog, limit: int | None = None) -> list[NoiseRow]:
    """Noise floors, the newest first."""
    order = "1 ORDER BY created_at DESC, noise_id DESC LIMIT ?"
    return _rows(source, NoiseRow, "noise_floor", order, (-1 if limit is None else limit,))


def matrices(source: Store | Catalog, limit: int | None = None) -> list[MatrixRow]:
    """Matrices with their cells, the newest first."""
    catalog = _catalog(source)
    names = [f.name for f in fields(MatrixRow) if f.name != "cells"]
    sql = f"SELECT {', '.join(names)} FROM matrix ORDER BY created_at DESC, matrix_id DESC LIMIT ?"
    with engine.connect_readonly(catalog.store.catalog_path) as reader:
        found = reader.execute(sql, (-1 if limit is None else limit,)).fetchall()
    rows = [dict(zip(names, row, strict=True)) for row in found]
    return [
        MatrixRow(**row | {"axes": json.loads(row["axes"] or "{}"), "cells": tuple(_cells(catalog, row["matrix_id"]))})
        for row in rows
    ]


def autocast_dtypes(source: Store | Catalog, dump_ids: Sequence[str]) -> dict[str, str]:
    """The autocast dtype ("torch.bfloat16") of those of the dumps that were recorded under autocast, by dump id."""
    found: dict[str, str] = {}
    with engine.connect_readonly(_catalog(source).store.catalog_path) as reader:
        for first in range(0, len(dump_ids), _AT_ONCE):
            some = dump_ids[first : first + _AT_ONCE]
            places = ",".join("?" * len(some))
            sql = f"SELECT dump_id, autocast_dtype FROM dump WHERE dump_id IN ({places}) AND autocast_dtype IS NOT NULL"
            found |= dict(reader.execute(sql, some).fetchall())
    return found


def read_noise(source: Store | Catalog, name: str) -> NoiseRecord:
    """The noise floor of this id, the beginning of one, or the newest for "last"; UsageError if there is none."""
    catalog = _catalog(source)
    with engine.connect_readonly(catalog.store.catalog_path) as reader:
        ids = [row[0] for row in reader.execute("SELECT noise_id FROM noise_floor ORDER BY created_at, noise_id")]
    return NoiseRecord.from_file(catalog.store.noise / f"{resolve(name, ids, 'noise floor', made_by='noise')}.json")


def _cells(catalog: Catalog, matrix_id: str) -> list[CellRow]:
    return _rows(catalog, CellRow, "matrix_cell", "matrix_id = ? ORDER BY cell", (matrix_id,))


def _rows(source: Store | Catalog, kind: type[T], table: str, where: str, params: tuple[Any, ...]) -> list[T]:
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    with engine.connect_readonly(_catalog(source).store.catalog_path) as reader:
        found = reader.execute(f"SELECT {', '.join(names)} FROM {table} WHERE {where}", params).fetchall()
    return [kind(**{name: _value(name, value) for name, value in zip(names, row, strict=True)}) for row in found]


def _value(name: str, value: Any) -> Any:
    return json.loads(value or "{}") if name in ("thresholds", "floor", "config", "settings") else value


def _catalog(source: Store | Catalog) -> Catalog:
    return source if isinstance(source, Catalog) else open_fresh(source)
