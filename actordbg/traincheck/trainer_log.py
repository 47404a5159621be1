"""The log of a cell, as a training prints it: `Global step 3: {'gpt_loss': 5.78, ...}`, which `compare-logs` reads.

The ancestor's `compare_backends.py` finds its losses in it, too.
"""

from __future__ import annotations

from pathlib import Path

from actordbg.base.errors import StoreProblem
from actordbg.formats.store_files import atomic_write, make_folder
from actordbg.formats.train_check_record import TrainCell, TrainCheckRecord

METRIC = "gpt_loss"


def trainer_log(cell: TrainCell, record: TrainCheckRecord) -> str:
    """The whole log."""
    told = f"# actordbg train-check {record.check_id}: {cell.name}, {record.dtype}, {cell.optimizer or 'no optimizer ran'}"
    lines = [told]
    for one in cell.steps:
        figures = {METRIC: one.loss, "grad_norm": one.grad_norm, "update_norm": one.update_norm, "lr": record.training.get("lr")}
        lines.append(f"Global step {one.step}: {figures}")
    ended = " ".join([cell.status, *cell.reason.splitlines()[:1]])
    return "\n".join([*lines, f"# {ended}", ""])


def write_trainer_log(path: Path, cell: TrainCell, record: TrainCheckRecord) -> None:
    """Write or replace it. StoreProblem where the folder cannot be written."""
    try:
        make_folder(path.parent)
        atomic_write(path, trainer_log(cell, record).encode())
    except OSError as error:
        raise StoreProblem(f"cannot write {path}: {error.strerror}", hint="name another folder with --log-dir") from None
