"""A matrix on disk: `store/matrices/<id>.json`, replaced whenever a cell is finished."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from actordbg.base.errors import Conflict
from actordbg.base.ids import resolve
from actordbg.formats.matrix_record import MatrixRecord
from actordbg.replay.processes import ALIVE, STOPPED, start_ticks, state_of
from actordbg.store.layout import Store

RUNNER = "runner"


def save(store: Store, record: MatrixRecord) -> None:
    """Write or replace the matrix's file; StoreProblem when that cannot be."""
    store.publish_text(path_of(store, record.matrix_id), record.to_json())


def path_of(store: Store, matrix_id: str) -> Path:
    """The file of a matrix."""
    return store.matrices / f"{matrix_id}.json"


def names(store: Store) -> list[str]:
    """Ids of all matrices of the store, the oldest first."""
    return sorted(path.stem for path in store.matrices.glob("*.json") if not path.name.startswith("."))


def load(store: Store, name: str) -> MatrixRecord:
    """A matrix by its id, a prefix of it, or "last"; UsageError when there is none, CorruptDump for a damaged file."""
    return MatrixRecord.from_file(path_of(store, resolve(name, names(store), "matrix", made_by="matrix")))


def claimed(record: MatrixRecord) -> MatrixRecord:
    """The matrix as run by this process; Conflict while another process runs it."""
    runner = record.options.get(RUNNER)
    me = [os.getpid(), start_ticks(os.getpid())]
    if runner and runner != me and state_of(runner[0], runner[1])[0] in (ALIVE, STOPPED):
        raise Conflict(
            f"matrix {record.matrix_id} is being run by process {runner[0]}", hint="wait for it, or end it with Ctrl-C"
        )
    return replace(record, options=record.options | {RUNNER: me}, status="running", finished_at=None)


def released(record: MatrixRecord, status: str, finished_at: str) -> MatrixRecord:
    """The matrix when nobody runs it any more."""
    return replace(record, options=record.options | {RUNNER: None}, status=status, finished_at=finished_at)
