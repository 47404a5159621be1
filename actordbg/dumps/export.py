"""One dump as a file that others read: plain safetensors, or a `.pt` that `torch.load(weights_only=True)` opens.

`.safetensors`  every tensor in its logical dtype (int64 ids as int64, not as stored), contiguous, with the record as
                JSON under the metadata key `actordbg`; any safetensors reader opens it.
`.pt`           one flat dict like the old pickles: the tensors by argument name, strides kept, the call's plain
                arguments, `rank`, `timestamp`, `run`, `dump_id`, `batch_size`, `seq_len`, and the record as JSON under
                `record`. Nothing but tensors and plain values, so `weights_only=True` (the default since torch 2.6)
                opens it.

Example::

    path = export_dump(payload.load(dump_path), Path("exported"), "pt")
    torch.load(path, weights_only=True)["sequences"]
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import safetensors.torch
import torch

from actordbg.base.errors import Conflict, EnvironmentProblem, UsageError
from actordbg.formats.store_files import atomic_write
from actordbg.store.payload import Dump

SUFFIXES = {"safetensors": ".safetensors", "pt": ".pt"}


def export_path(dump_id: str, folder: Path, format: str) -> Path:
    """Where `export_dump` writes this dump."""
    if format not in SUFFIXES:
        raise UsageError(f"unknown export format {format!r:.40}", hint=f"known formats: {', '.join(SUFFIXES)}")
    return folder / f"{dump_id}{SUFFIXES[format]}"


def export_dump(dump: Dump, folder: Path, format: str = "safetensors", *, overwrite: bool = False) -> Path:
    """Write one dump into `folder` (made if needed), whole or not at all, and return the file's path.

    Raises UsageError for an unknown format, Conflict if the file exists, EnvironmentProblem if it cannot be written.
    """
    path = export_path(dump.record.dump_id, folder, format)
    if path.exists() and not overwrite:
        raise Conflict(f"{path} exists", hint="choose another folder, or overwrite it with --force")
    data = to_safetensors(dump) if format == "safetensors" else to_pt(dump)
    try:
        atomic_write(Path(os.path.abspath(path)), data, mode=0o644)
    except OSError as error:
        raise EnvironmentProblem(f"cannot write {path}: {error.strerror}", hint="choose another folder with --out") from None
    return path


def to_safetensors(dump: Dump) -> bytes:
    """The bytes of a plain safetensors file."""
    tensors = {name: tensor.contiguous().clone() for name, tensor in dump.tensors.items()}
    data: bytes = safetensors.torch.save(tensors, metadata={"actordbg": dump.record.to_json()})
    return data


def to_pt(dump: Dump) -> bytes:
    """The bytes of a `.pt` file that holds one flat dict of tensors and plain values."""
    record = dump.record
    facts = {name: getattr(record, name) for name in ("dump_id", "run", "rank", "timestamp", "batch_size", "seq_len")}
    buffer = io.BytesIO()
    torch.save({**record.arguments, **dump.tensors, **facts, "record": record.to_json()}, buffer)
    return buffer.getvalue()
