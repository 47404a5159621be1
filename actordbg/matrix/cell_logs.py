"""A log for each cell of a matrix, under the cell's name: `store/reports/<matrix id>/logs/<cell>.log`.

It holds what the launcher and every rank of the cell's replay printed, one after the other, so that one file is what one shows or
sends. The table links it: in Markdown relative to the current folder, in `--json` as a path.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from actordbg.formats.matrix_record import MatrixCell, MatrixRecord
from actordbg.formats.store_files import atomic_write, make_folder, read_regular
from actordbg.replay.worker_logs import LAUNCHER_LOG
from actordbg.store.layout import Store

MOST_BYTES = 2**20
"""Of one rank's log this much is kept, its end."""


def log_path(store: Store, matrix_id: str, cell: MatrixCell) -> Path:
    """Where the log of a cell lies, or will."""
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", cell.name).strip("-.")[:100] or "all-as-given"
    return store.reports / matrix_id / "logs" / f"{name}.log"


def write_log(store: Store, matrix_id: str, cell: MatrixCell) -> None:
    """Write the log of a cell whose replay ended; the replay's folder keeps the logs that it is made of."""
    if cell.replay_id is None:
        return
    folder = store.replays / cell.replay_id
    parts = [f"# {cell.name or 'all as given'}: {cell.status}, replay {cell.replay_id}\n".encode()]
    for path in (folder / LAUNCHER_LOG, *sorted(folder.glob("rank*.log"))):
        try:
            text = read_regular(path)
        except OSError:  # a launcher that wrote nothing, or a log that was removed
            continue
        cut = f"(its last {MOST_BYTES:,} bytes of {len(text):,})" if len(text) > MOST_BYTES else ""
        parts.append(f"\n== {path.name} {cut}\n".encode() + text[-MOST_BYTES:])
    path = log_path(store, matrix_id, cell)
    make_folder(path.parent)
    atomic_write(path, b"".join(parts))


def shown_path(path: Path) -> str:
    """A path for a reader: from the current folder if it lies below it, else whole."""
    relative = os.path.relpath(path)
    return str(path.absolute()) if relative.startswith(os.pardir) else relative


def logs_of(store: Store, record: MatrixRecord) -> dict[int, Path]:
    """The logs that are there, by index of the cell."""
    paths = {cell.index: log_path(store, record.matrix_id, cell) for cell in record.cells}
    return {index: path for index, path in paths.items() if path.is_file()}
