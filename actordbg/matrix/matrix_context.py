"""What a reader of a matrix has to know besides its cells: model, device, versions, shapes. Read from its replays."""

from __future__ import annotations

from actordbg.base.errors import ActordbgError
from actordbg.formats.matrix_record import MatrixRecord
from actordbg.matrix.cell_outcomes import data_of
from actordbg.matrix.loads import loads_of
from actordbg.matrix.matrix_document import MatrixContext
from actordbg.replay.supervise import load_spec
from actordbg.report.report_model import ReplayData
from actordbg.store.layout import Store

_RESOLVED = ("model", "model_class", "parameters", "num_layers", "device_name", "threads")


def context_of(store: Store, record: MatrixRecord) -> MatrixContext:
    """Of the first cell whose Actor was built; of the first that was begun where none was. Empty if none was."""
    replays = [data for cell in record.cells if cell.replay_id and (data := _data(store, cell.replay_id)) is not None]
    chosen = next((one for one in replays if one.resolved), replays[0] if replays else None)
    truth = _data(store, record.truth_id) if record.truth_id else None
    loads = loads_of(store.replays / truth.spec.replay_id, truth.spec.config) if truth else None
    gone = tuple(
        cell.replay_id for cell in record.cells if cell.replay_id and not (store.replays / cell.replay_id).is_dir()
    )
    if chosen is None:
        return MatrixContext(gone=gone)
    inputs = chosen.spec.inputs
    return MatrixContext(
        resolved={name: chosen.resolved[name] for name in _RESOLVED if name in chosen.resolved},
        versions=dict(chosen.spec.versions),
        seq_lens=tuple(item.seq_len for item in inputs),
        batch_sizes=tuple(item.batch_size for item in inputs),
        tokens=sum(item.tokens for item in inputs),
        folded=sum(bool(one.folded_ids) for one in chosen.results),
        truth_load_s=loads.seconds if loads else None,
        gone=gone,
    )


def _data(store: Store, replay_id: str) -> ReplayData | None:
    try:
        return data_of(store, load_spec(store, replay_id))
    except ActordbgError:
        return None  # pruned, or damaged: the table is still worth showing
