"""The statements of `labfiles`, as SQLAlchemy Core. Each takes a connection in a transaction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, delete, select, update
from sqlalchemy.dialects.sqlite import insert

from actordbg.catalog import tables as models
from actordbg.catalog.statements import comparison, comparison_run, damaged, file, folder, put_damaged

noise_floor: Table = models.NoiseFloor.__table__  # type: ignore[attr-defined]
matrix: Table = models.Matrix.__table__  # type: ignore[attr-defined]
matrix_cell: Table = models.MatrixCell.__table__  # type: ignore[attr-defined]

Row = dict[str, Any]


def forget(connection: Connection, folder_name: str, path: str) -> None:
    """Before a file is taken in: forget that it was read, what was wrong with it, and that its folder was listed."""
    connection.execute(delete(folder).where(folder.c.path == folder_name))
    connection.execute(delete(damaged).where(damaged.c.path == path))
    connection.execute(delete(file).where(file.c.path == path))


def remove(connection: Connection, folder_name: str, path: str) -> None:
    """Remove what came from a file that is gone, or damaged."""
    name = Path(path).stem
    if folder_name == "comparisons":
        connection.execute(delete(comparison).where(comparison.c.comparison_id == name))
        connection.execute(delete(comparison_run).where(comparison_run.c.comparison_id == name))
    elif folder_name == "noise":
        connection.execute(delete(noise_floor).where(noise_floor.c.noise_id == name))
    else:
        connection.execute(delete(matrix_cell).where(matrix_cell.c.matrix_id == name))
        connection.execute(delete(matrix).where(matrix.c.matrix_id == name))


def note_damage(connection: Connection, damage: tuple[str, str, str, str]) -> None:
    """Note what is wrong with a file."""
    put_damaged(connection, [damage], [])


def note_file(connection: Connection, path: str, size: int, mtime_ns: int) -> None:
    """Note that a file was read, and what it was then."""
    connection.execute(insert(file).values(path=path, replay_id="", size=size, mtime_ns=mtime_ns, offset=size))


def put_comparison_run(connection: Connection, row: Row) -> None:
    """Add a comparison; its dumps are no rows yet. One that is there already, the same, stays as it is."""
    own = comparison_run.c.comparison_id == row["comparison_id"]
    before = connection.execute(select(comparison_run).where(own)).mappings().first()
    if before is not None and dict(before) | {"current": 0} == row:
        return
    connection.execute(delete(comparison).where(comparison.c.comparison_id == row["comparison_id"]))
    connection.execute(delete(comparison_run).where(own))
    connection.execute(insert(comparison_run).values(**row))


def put_noise(connection: Connection, row: Row) -> None:
    """Add a noise floor, in place of what was there under its id."""
    connection.execute(delete(noise_floor).where(noise_floor.c.noise_id == row["noise_id"]))
    connection.execute(insert(noise_floor).values(**row))


def put_matrix(connection: Connection, row: Row, cells: Sequence[Row]) -> None:
    """Add a matrix with its cells, in place of what was there under its id."""
    connection.execute(delete(matrix_cell).where(matrix_cell.c.matrix_id == row["matrix_id"]))
    connection.execute(delete(matrix).where(matrix.c.matrix_id == row["matrix_id"]))
    connection.execute(insert(matrix).values(**row))
    if cells:
        connection.execute(insert(matrix_cell), list(cells))


def put_comparison_rows(connection: Connection, comparison_id: str, rows: Sequence[Row]) -> None:
    """The dumps of a comparison become rows, and the comparison current."""
    if rows:
        connection.execute(insert(comparison), list(rows))
    connection.execute(_is_current(comparison_id, 1))


def remove_comparison_rows(connection: Connection, comparison_id: str) -> None:
    """The dumps of a comparison are rows no more."""
    connection.execute(delete(comparison).where(comparison.c.comparison_id == comparison_id))
    connection.execute(_is_current(comparison_id, 0))


def _is_current(comparison_id: str, value: int) -> Any:
    return update(comparison_run).where(comparison_run.c.comparison_id == comparison_id).values(current=value)
