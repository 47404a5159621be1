"""What a matrix replays: the dumps that were selected, the same ones for every cell, and again when it is resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.catalog.query import get_dump, open_fresh
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import DumpRecord
from actordbg.formats.matrix_record import MatrixRecord
from actordbg.replay.plan import Row, make_plan
from actordbg.replay.selection import defaults_of, rows_of_catalog, rows_of_files
from actordbg.store.layout import Store

FILES = "input_files"
"""The option that keeps the files that were named, for a resumed matrix."""


@dataclass(frozen=True)
class Selection:
    """The chosen rows, the record that open settings follow, and how many were left out for which reason."""

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
    """The first `max_inputs` dumps, in the order asked for, that `where` selects or that the files hold."""
    if files and where is not None:
        raise UsageError("--where and --input-file exclude each other", hint="give one of them")
    rows: Sequence[Row]
    rows = rows_of_files(store, files) if files else rows_of_catalog(open_fresh(store, where), where, order, max_inputs)
    plan = make_plan(rows, base, order=order, max_inputs=max_inputs, shuffle_seed=shuffle_seed)
    chosen = {item.dump_id for item in plan.spec.inputs}
    kept = tuple(row for row in rows if row.dump_id in chosen)
    return Selection(kept, defaults_of(store.root, plan.spec.inputs), plan.skipped)


def select_again(store: Store, record: MatrixRecord) -> Selection:
    """The dumps of a matrix that was begun; StoreProblem when one of them is gone."""
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
