"""One dump as a file that others read: plain safetensors, or a `.pt` that `torch.load(weights_only=True)` opens.

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

from actordbg.base.errors import Conflict, EnvironmentProblem, StoreProblem, UsageError
from actordbg.formats.encoding import plain_safetensors
from actordbg.formats.store_files import atomic_write
from actordbg.store.payload import load_plain
from actordbg.store.places import dump_id_of

SUFFIXES = {"safetensors": ".safetensors", "pt": ".pt"}


def export_path(dump_id: str, folder: Path, format: str) -> Path:
    """Where `export_dump` writes this dump."""
    if format not in SUFFIXES:
        raise UsageError(f"unknown export format {format!r:.40}", hint=f"known formats: {', '.join(SUFFIXES)}")
    return folder / f"{dump_id}{SUFFIXES[format]}"


def export_dump(place: Path, folder: Path, format: str = "safetensors", *, overwrite: bool = False) -> Path:
    """Write the dump that lies in a place into `folder` (made if needed), whole or not at all, and return the file's path.

    Raises UsageError for an unknown format, Conflict if the file exists, EnvironmentProblem if it cannot be written, StoreProblem
    if the dump cannot be read or is another one than its place says.
    """
    dump_id = dump_id_of(place)
    path = export_path(dump_id, folder, format)
    if path.exists() and not overwrite:
        raise Conflict(f"{path} exists", hint="choose another folder, or overwrite it with --force")
    of, data = to_safetensors(place) if format == "safetensors" else to_pt(place)
    if of != dump_id:  # its export would take another dump's name
        raise StoreProblem(f"{place}: its record is of dump {of}", hint="move the file there")
    try:
        atomic_write(Path(os.path.abspath(path)), data, mode=0o644)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}", hint="choose another folder with --out") from None
    return path


def to_safetensors(place: Path) -> tuple[str, bytes]:
    """A dump's id, and the bytes of a plain safetensors file."""
    record, tensors = load_plain(place)
    entries = {name: (tensor.dtype, tensor.values) for name, tensor in tensors.items()}
    return record.dump_id, plain_safetensors(entries, {"actordbg": record.to_json()})


def to_pt(place: Path) -> tuple[str, bytes]:
    """A dump's id, and the bytes of a `.pt` file that holds one flat dict of tensors and plain values."""
    import torch

    from actordbg.store import payload

    dump = payload.load(place)
    record = dump.record
    facts = {name: getattr(record, name) for name in ("dump_id", "run", "rank", "timestamp", "batch_size", "seq_len")}
    buffer = io.BytesIO()
    torch.save({**record.arguments, **dump.tensors, **facts, "record": record.to_json()}, buffer)
    return record.dump_id, buffer.getvalue()
