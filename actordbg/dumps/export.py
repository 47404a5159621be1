"""Export a dump to a file that other tools read: plain safetensors, or a `.pt` that `torch.load(weights_only=True)` opens.

`.safetensors`  every tensor in its logical dtype (int64 ids as int64, not as stored), contiguous, with the record as
                JSON under the metadata key `actordbg`; any safetensors reader opens it.
`.pt`           one flat dict like the old pickles: the tensors by argument name, strides kept, the call's plain
                arguments, `rank`, `timestamp`, `run`, `dump_id`, `batch_size`, `seq_len`, and the record as JSON under
                `record`. Nothing but tensors and plain values, so `weights_only=True` (the default since torch 2.6)
                opens it.

Example::

    path = export_dump(dump_path, Path("exported"), "pt")
    torch.load(path, weights_only=True)["sequences"]

Only `.pt` needs torch.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

from actordbg.base.errors import EnvironmentProblem, StoreProblem, UsageError
from actordbg.formats.dump_record import DumpRecord
from actordbg.formats.encoding import PlainTensor, plain_safetensors
from actordbg.formats.store_files import atomic_write
from actordbg.store.payload import as_torch, load_plain
from actordbg.store.places import dump_id_of

SUFFIXES = {"safetensors": ".safetensors", "pt": ".pt"}


def export_path(dump_id: str, folder: Path, format: str) -> Path:
    """Return the path that `export_dump` writes this dump to."""
    if format not in SUFFIXES:
        raise UsageError(f"unknown export format {format!r:.40}", hint=f"known formats: {', '.join(SUFFIXES)}")
    return folder / f"{dump_id}{SUFFIXES[format]}"


def export_dump(place: Path, folder: Path, format: str = "safetensors") -> Path:
    """Write the dump at `place` into `folder` (created if needed), whole or not at all, and return the file's path.

    Replaces an existing file. Raises UsageError for an unknown format, EnvironmentProblem if it cannot be written,
    StoreProblem if the dump cannot be read or its id does not match its place.
    """
    dump_id = dump_id_of(place)
    path = export_path(dump_id, folder, format)
    record, tensors = load_plain(place)
    if record.dump_id != dump_id:  # its export would take another dump's name
        raise StoreProblem(f"{place}: its record is of dump {record.dump_id}", hint="move the file there")
    if format == "safetensors":
        entries = {name: (tensor.dtype, tensor.values) for name, tensor in tensors.items()}
        data = plain_safetensors(entries, {"actordbg": record.to_json()})
    else:
        data = _pt(record, tensors)
    try:
        atomic_write(Path(os.path.abspath(path)), data, mode=0o644)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}", hint="choose another folder with --out") from None
    return path


def _pt(record: DumpRecord, tensors: dict[str, PlainTensor]) -> bytes:
    """Return the bytes of a `.pt` file that holds one flat dict of tensors and plain values."""
    import torch

    facts = {name: getattr(record, name) for name in ("dump_id", "run", "rank", "timestamp", "batch_size", "seq_len")}
    dense = {name: as_torch(tensor) for name, tensor in tensors.items()}
    buffer = io.BytesIO()
    torch.save({**record.arguments, **dense, **facts, "record": record.to_json()}, buffer)
    return buffer.getvalue()
