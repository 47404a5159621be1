"""Export a dump to a plain safetensors file: every tensor in its logical dtype (int64 ids as int64, not as stored), contiguous,
with the record as JSON under the metadata key `actordbg`. Any safetensors reader opens it.

Example::

    path = export_dump(dump_path, Path("exported"))
    safetensors.torch.load_file(path)["sequences"]
"""

import os
from pathlib import Path

from actordbg.base.errors import EnvironmentProblem, StoreProblem, system_errors
from actordbg.formats.encoding import plain_safetensors
from actordbg.formats.store_files import atomic_write
from actordbg.store.payload import load_plain
from actordbg.store.places import dump_id_of


def export_path(dump_id: str, folder: Path) -> Path:
    """Return the path that `export_dump` writes this dump to."""
    return folder / f"{dump_id}.safetensors"


def export_dump(place: Path, folder: Path) -> Path:
    """Write the dump at `place` into `folder` (created if needed), whole or not at all, and return the file's path.

    Replaces an existing file. Raises EnvironmentProblem if it cannot be written, StoreProblem if the
    dump cannot be read or its id does not match its place.
    """
    dump_id = dump_id_of(place)
    path = export_path(dump_id, folder)
    record, tensors = load_plain(place)
    if record.dump_id != dump_id:  # its export would take another dump's name
        raise StoreProblem(f"{place}: its record is of dump {record.dump_id}", hint="move the file there")
    entries = {name: (tensor.dtype, tensor.values) for name, tensor in tensors.items()}
    data = plain_safetensors(entries, {"actordbg": record.to_json()})
    with system_errors(EnvironmentProblem, f"cannot write {path}", "choose another folder with --out"):
        atomic_write(Path(os.path.abspath(path)), data, mode=0o644)
    return path
