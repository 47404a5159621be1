"""Import old pickles into a store: `actordbg dump import PATH...`.

Each pickle becomes one ordinary dump file. Its id is made of the call's timestamp and the pickle's SHA-256, so it is the
same wherever and whenever the file is imported: a second import finds the id in the store, under whatever run, and adds
nothing; it does not even decode. A bad file is reported by name and skipped, and the others continue.

Names: the run is named after the folder of the files, unless given. The rank and the timestamp come from the
pickle; the file's name (`actor_inputs_rank3_20250619_052608_430740.pkl`) only helps to recognize a known file early.

The record has only facts from the pickle. Unknown there, and so None or empty here: role, training and grad
mode, model, host, pid and world size. `origin` keeps the pickle's file
name. An import has time, so it compresses harder (`LEVEL`) than a training process does; reading costs the same. No torch is
needed.

Example::

    summary = import_paths(store, [Path("input_dumps")])
    summary.added, summary.present, [r.path for r in summary.refused]       # 257, 0, []
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from actordbg.base.errors import ActordbgError, CorruptDump, LaunchProblem, StoreProblem, UsageError
from actordbg.catalog.tables import Damaged
from actordbg.dumps.child_pool import LegacyReader
from actordbg.dumps.decode import LegacyDump, parse_stamp
from actordbg.dumps.pickle_machine import corrupt
from actordbg.formats.dump_record import IMPORTED, DumpRecord, is_plain_name, make_dump_id
from actordbg.store.layout import Store, require_run_name
from actordbg.store.places import dump_id_of, places_of

if TYPE_CHECKING:
    from actordbg.formats.encoding import PlainTensor

LEVEL = 12
"""zstd level of imported dumps: 2.4% smaller than level 3 for 1 ms more each; level 19 gives 1.5% more for 3 ms more."""
_NAME = re.compile(r"rank(\d{1,6})_(?:.*_)?(\d{8}_\d{6}_\d{6})\.pkl\Z", re.ASCII)


@dataclass
class ImportSummary:
    """What an import did. `bytes_read` and `bytes_stored` count the added files only; `refused` names what was not imported."""

    added: int = 0
    present: int = 0
    refused: list[Damaged] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_stored: int = 0


def import_paths(
    store: Store,
    paths: Sequence[Path],
    *,
    run: str | None = None,
    on_file: Callable[[str | None], object] = lambda dump_id: None,
) -> ImportSummary:
    """Import pickles, and every `*.pkl` below folders, into `store`, which is made with the first dump. `on_file` is called
    for each file that is done, with the id of its dump, or None if the file was refused.

    Raises UsageError for a path that does not exist, no pickles at all or an impossible run name, StoreProblem when the
    store cannot be written, LaunchProblem when no decoding process starts. Bad pickles raise nothing: they are in the
    summary's `refused`.
    """
    require_run_name(run)
    files = find_pickles(paths)
    if store.exists():
        store.require()
    with LegacyReader() as reader:
        job = _Import(store, reader, run)
        for path in files:
            on_file(job.take(path))
    return job.summary


def dumps_of(store: Store, pickles: Sequence[Path]) -> list[Path]:
    """Return the dump of each pickle, imported into the store unless it is there. CorruptDump for a pickle that is refused."""
    store.create()
    with LegacyReader() as reader:
        job = _Import(store, reader, None)
        ids = [job.take(path) for path in pickles]
    if job.summary.refused:
        first = job.summary.refused[0]
        raise CorruptDump(
            f"{first.path} is refused: {first.reason}", hint="`actordbg dump import` names every bad file of a folder"
        )
    where = {dump_id_of(place): place for place in places_of(store)}
    return [Path(where[dump_id]) for dump_id in ids if dump_id is not None]


def find_pickles(paths: Sequence[Path]) -> list[Path]:
    """List the files to import: files as given, folders searched for `*.pkl`, each once, in order of name."""
    files: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist", hint="name a pickle, or a folder of pickles")
        matches = sorted(path.rglob("*.pkl")) if path.is_dir() else [path]
        files.update(dict.fromkeys(file for file in matches if not file.is_dir()))
    if not files:
        raise UsageError(f"no *.pkl below {', '.join(map(str, paths))}", hint="name the folder that holds the pickles")
    return list(files)


def run_name(path: Path) -> str:
    """Return the default run of a pickle: its folder's name, with characters that a run's name cannot have replaced by `-`."""
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", path.resolve().parent.name).lstrip("._+-")[:128]
    return name if is_plain_name(name) else "import"


def import_id(timestamp: str, sha256: str) -> str:
    """Return the dump id of a pickle: the same for the same file, whenever and wherever it is imported."""
    return make_dump_id(timestamp, 0, 0, sha256[:16])


class _Import:
    """An import in progress: the dumps known to be in the store, and the summary so far."""

    def __init__(self, store: Store, reader: LegacyReader, run: str | None) -> None:
        self.store, self.reader, self.run = store, reader, run
        self.known = {dump_id_of(place) for place in places_of(store)}
        self.summary = ImportSummary()

    def take(self, path: Path) -> str | None:
        """Import one file, find it already there, or note why it is refused. Return its dump's id; None if refused."""
        try:
            data = self.reader.load(path)
            sha256 = hashlib.sha256(data).hexdigest()
            named = _NAME.search(path.name)
            timestamp = parse_stamp(named[2]) if named else None
            if timestamp and (expected := import_id(timestamp, sha256)) in self.known:
                self.summary.present += 1
                return expected
            return self._add(path, data, sha256)
        except ActordbgError as error:
            if error.code in (StoreProblem.code, LaunchProblem.code):
                raise
            self.summary.refused.append(Damaged(str(path), error.code, error.message))
        return None

    def _add(self, path: Path, data: bytes, sha256: str) -> str:
        from actordbg.store.payload import encode_plain

        dump = self.reader.decode(data)
        dump_id = import_id(dump.timestamp, sha256)
        if dump_id in self.known:
            self.summary.present += 1
            return dump_id
        run = self.run or run_name(path)
        tensors = to_tensors(data, dump)
        mask, action = tensors.get("attention_mask"), dump.tensors.get("action_mask")
        batch, length = dump.tensors["sequences"].shape
        record, blob = encode_plain(
            DumpRecord(
                dump_id=dump_id,
                run=run,
                rank=dump.rank,
                timestamp=dump.timestamp,
                batch_size=batch,
                seq_len=length,
                tokens=mask.nonzero if mask is not None else batch * length,
                source=IMPORTED,
                action_len=action.shape[1] if action is not None else None,
                arguments=dict(dump.arguments),
                origin={"name": path.name},  # the id holds the first 16 digits of its SHA-256
            ),
            tensors,
            LEVEL,
        )
        hint = "make room or correct the permissions, and run the same import again: it continues where it stopped"
        self.store.create().put_dump(record, blob, hint)
        self.known.add(dump_id)
        self.summary.added += 1
        self.summary.bytes_read += len(data)
        self.summary.bytes_stored += len(blob)
        if run not in self.summary.runs:
            self.summary.runs.append(run)
        return dump_id


def to_tensors(data: bytes, dump: LegacyDump) -> dict[str, PlainTensor]:
    """Return the tensors of a decoded pickle (dtype, shape and strides as pickled) over the file's bytes."""
    import numpy as np

    from actordbg.formats.encoding import PlainTensor, array_dtype

    tensors = {}
    for name, tensor in dump.tensors.items():
        raw, kind = data[tensor.start : tensor.start + tensor.span * tensor.itemsize], array_dtype(tensor.dtype)
        if tensor.dtype == "bool" and raw and max(raw) > 1:
            raise corrupt(f"{name} is boolean and holds something other than 0 and 1")
        if raw:
            strides = tuple(step * kind.itemsize for step in tensor.strides)
            values = np.lib.stride_tricks.as_strided(np.frombuffer(raw, kind), tensor.shape, strides, writeable=False)
        else:
            values = np.empty(tensor.shape, kind)
        tensors[name] = PlainTensor(tensor.dtype, values, tensor.strides)
    return tensors
