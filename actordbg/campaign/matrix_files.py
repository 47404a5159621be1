"""A matrix in the store: its file, who runs it, and the dumps that it replays.

`store/matrices/<id>.json` is replaced whenever a cell is finished. All cells replay the same dumps, also after `--resume`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from actordbg.base.errors import Conflict, CorruptDump, StoreProblem
from actordbg.base.owners import Owner
from actordbg.base.processes import ALIVE, STOPPED, start_ticks, state_of
from actordbg.base.units import resolve
from actordbg.catalog.query import get_dump, open_fresh
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord, is_plain_name
from actordbg.records.matrix_record import MatrixRecord
from actordbg.replay.plan import make_plan
from actordbg.replay.selection import Row, defaults_of, rows_of, rows_of_files
from actordbg.store.layout import Store, read_with_owner

RUNNER = "runner"


def save(store: Store, record: MatrixRecord) -> None:
    """Write or replace the matrix's file; StoreProblem if that fails."""
    store.publish_text(path_of(store, record.matrix_id), record.to_json())


def path_of(store: Store, matrix_id: str) -> Path:
    """The file of a matrix."""
    return store.matrices / f"{matrix_id}.json"


def names(store: Store) -> list[str]:
    """Ids of all matrices of the store, the oldest first."""
    return sorted(path.stem for path in store.matrices.glob("*.json") if not path.name.startswith("."))


def load(store: Store, name: str) -> MatrixRecord:
    """A matrix by its id, a prefix of it, or "last"; UsageError when there is none, CorruptDump for a damaged file."""
    return load_with_owner(store, name)[0]


def load_with_owner(store: Store, name: str) -> tuple[MatrixRecord, Owner]:
    """The same, and the user who wrote its file: what another user wrote is confirmed before it runs."""
    path = path_of(store, resolve(name, names(store), "matrix", made_by="matrix"))
    data, owner = read_with_owner(path)
    record = MatrixRecord.from_json(data, str(path))
    folders = [one.replay_id for one in record.cells if one.replay_id is not None]
    if record.matrix_id != path.stem or not all(map(is_plain_name, (path.stem, *folders))):  # it is written where these say
        raise CorruptDump(f"{path} is another matrix's file, or has replays as none is called", hint="remove the file")
    return record, owner


def claimed(record: MatrixRecord) -> MatrixRecord:
    """The matrix, now run by this process; Conflict while another process runs it."""
    runner = record.options.get(RUNNER)
    me = [os.getpid(), start_ticks(os.getpid())]
    if runner and runner != me and state_of(runner[0], runner[1])[0] in (ALIVE, STOPPED):
        raise Conflict(
            f"matrix {record.matrix_id} is being run by process {runner[0]}", hint="wait for it, or end it with Ctrl-C"
        )
    return replace(record, options=record.options | {RUNNER: me}, status="running", finished_at=None)


def released(record: MatrixRecord, status: str, finished_at: str) -> MatrixRecord:
    """The matrix, now run by nobody."""
    return replace(record, options=record.options | {RUNNER: None}, status=status, finished_at=finished_at)


FILES = "input_files"
"""The option that keeps the named files for `--resume`."""


@dataclass(frozen=True)
class Selection:
    """The chosen rows, the record that decides open settings, and how many rows were left out for each reason."""

    rows: tuple[Row, ...]
    defaults: DumpRecord | None
    skipped: dict[str, int]


def select(
    store: Store,
    base: ReplayConfig,
    where: str | None,
    files: Sequence[Path],
    order: str,
    max_inputs: int | None,
    shuffle_seed: int,
) -> Selection:
    """The first `max_inputs` dumps in `order` that `where` selects or the files hold."""
    rows = rows_of(store, where, files, order, max_inputs)
    plan = make_plan(rows, base, order=order, max_inputs=max_inputs, shuffle_seed=shuffle_seed)
    chosen = {item.dump_id for item in plan.spec.inputs}
    kept = tuple(row for row in rows if row.dump_id in chosen)
    return Selection(kept, defaults_of(store.root, plan.spec.inputs), plan.skipped)


def select_again(store: Store, record: MatrixRecord) -> Selection:
    """The dumps of a matrix that is resumed; StoreProblem if one of them is gone."""
    rows: list[Row]
    files = [Path(name) for name in record.options.get(FILES, ())]
    if files:
        rows = list(rows_of_files(store, files))
    else:
        catalog = open_fresh(store)
        rows = [get_dump(catalog, dump_id) for dump_id in record.dump_ids]
    found = {row.dump_id: row for row in rows}
    gone = [dump_id for dump_id in record.dump_ids if dump_id not in found]
    if gone:
        raise StoreProblem(
            f"{len(gone)} of the {len(record.dump_ids)} dumps of matrix {record.matrix_id} are gone: {gone[0]}",
            hint="start a new matrix",
        )
    kept = tuple(found[dump_id] for dump_id in record.dump_ids)
    inputs = make_plan(kept, ReplayConfig(), order=record.options.get("order", "time")).spec.inputs
    return Selection(kept, defaults_of(store.root, inputs), {})
