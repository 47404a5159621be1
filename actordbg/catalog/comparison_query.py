"""Reads comparisons, noise floors and matrices from the catalog, as `query` reads dumps and replays.

Example::

    for one in comparisons(catalog, "20250619T052608-9f3a2c"):
        print(one.against, one.verdict, one.max_abs)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actordbg.base.ids import resolve
from actordbg.catalog import connections as engine
from actordbg.catalog.query import Catalog, open_fresh, rows_of, table_rows
from actordbg.catalog.tables import CellRow, ComparisonRow, Matrix, columns_of
from actordbg.formats.noise_record import NoiseRecord
from actordbg.store.layout import Store

_AT_ONCE = 500
"""Dumps that one query names: SQLite takes 999 parameters at least."""


@dataclass(init=False, repr=False, eq=False, match_args=False, kw_only=True)
class MatrixRow(Matrix):
    """One matrix with its cells."""

    cells: tuple[CellRow, ...]


def comparisons(source: Store | Catalog, replay_id: str | None = None) -> list[ComparisonRow]:
    """The newest comparison of each pair whose replays are there, the newest first; of one replay (its full id): as A."""
    where, params = ("current AND replay_id = ?", (replay_id,)) if replay_id else ("current", ())
    return table_rows(source, ComparisonRow, f"{where} ORDER BY created_at DESC, comparison_id DESC", params)


def matrices(source: Store | Catalog, limit: int | None = None) -> list[MatrixRow]:
    """Matrices with their cells, the newest first."""
    catalog = _catalog(source)
    sql = f"SELECT {', '.join(columns_of(Matrix))} FROM matrix ORDER BY created_at DESC, matrix_id DESC LIMIT ?"
    with engine.connect_readonly(catalog.store.catalog_path) as reader:
        found = reader.execute(sql, (-1 if limit is None else limit,)).fetchall()

    def cells(row: dict[str, Any]) -> tuple[CellRow, ...]:
        return tuple(table_rows(catalog, CellRow, "matrix_id = ? ORDER BY cell", (row["matrix_id"],)))

    return rows_of(MatrixRow, found, cells=cells)


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


def _catalog(source: Store | Catalog) -> Catalog:
    return source if isinstance(source, Catalog) else open_fresh(source)
