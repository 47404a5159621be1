"""Import files into a store: `actordbg dump import PATH...`. What a file is, its content says (`containers`), not its name.

Files of rows become dumps by `rows_import`; what follows is of pickles of the old recorder. Each becomes one ordinary dump file.
Its id is made of the call's timestamp and the pickle's SHA-256, so it is the same wherever and whenever the file is imported: a
second import finds the id in the store, under whatever run, and adds nothing; it does not even decode. A bad file is reported by
name and skipped, and the others continue.

Names: the run is named after the folder of the files, unless given. The rank and the timestamp come from the
pickle; the file's name (`actor_inputs_rank3_20250619_052608_430740.pkl`) only helps to recognize a known file early.

The record has only facts from the pickle. Unknown there, and so None or empty here: role, training and grad
mode, model, host, pid and world size. `origin` keeps the pickle's file
name. An import has time, so it compresses harder (`LEVEL`) than a training process does; reading costs the same. No torch is
needed.

Example::

    summary = import_paths(store, [Path("input_dumps"), Path("rollout_data/0.pt")])
    summary.added, summary.present, [r.path for r in summary.refused]       # 257, 0, []
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from actordbg.base.errors import ActordbgError, Conflict, CorruptDump, LaunchProblem, StoreProblem, Unsupported, UsageError
from actordbg.base.units import listed, plural
from actordbg.catalog.tables import Damaged
from actordbg.dumps.archives import LISTS, pickle_value
from actordbg.dumps.child_pool import LegacyReader
from actordbg.dumps.containers import JSON_LINES, PICKLE, UNKNOWN, container_of, other_at
from actordbg.dumps.decode import REQUIRED, old_call, parse_stamp
from actordbg.dumps.pickle_notes import corrupt
from actordbg.dumps.rows_import import MOST_JUDGED, MOST_REPLAYED, RowFile, problem_of
from actordbg.formats.dump_record import DumpRecord, is_plain_name, make_dump_id
from actordbg.formats.dumpfile import IMPORTED
from actordbg.store.layout import Store, require_run_name
from actordbg.store.places import dump_id_of, places_of

if TYPE_CHECKING:
    from actordbg.formats.encoding import PlainTensor

LEVEL = 12
"""zstd level of imported dumps: 2.4% smaller than level 3 for 1 ms more each; level 19 gives 1.5% more for 3 ms more."""
MOST_WAITING, WAITING_BYTES = 1024, 2**25
"""Dumps of a file, and their bytes, that are written at once."""
PACKED = 64
"""Dumps that become a pack; fewer become a file each."""
Give: TypeAlias = "Callable[[DumpRecord, Mapping[str, PlainTensor]], object]"
"""What is done with a dump: its record, without what writing it fills in, and its tensors."""
PICKLES = (".pkl", ".pickle")
"""Suffixes of files of which the reason is told why they are not pickles."""
_NAME = re.compile(r"rank(\d{1,6})_(?:.*_)?(\d{8}_\d{6}_\d{6})\.pkl\Z", re.ASCII)


@dataclass
class ImportSummary:
    """What an import did. `bytes_read` and `bytes_stored` count the added files only; `refused` names what was not imported, and
    `notes` what to know of files of rows; `left_out` which of their rows were not. dump_ids: the dumps of all files, added or
    already there.
    """

    added: int = 0
    present: int = 0
    refused: list[Damaged] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    dump_ids: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_stored: int = 0


def import_paths(
    store: Store | None,
    paths: Sequence[Path],
    *,
    run: str | None = None,
    columns: Mapping[str, str] = MappingProxyType({}),
    on_file: Callable[[str | None], object] = lambda dump_id: None,
    give: Give | None = None,
) -> ImportSummary:
    """Import files, and every file below folders that may have rows, into `store`, which is made with the first dump. Without
    a store, `give` gets the dumps, of many rows each. `on_file` is called for each file that is done, with the id of its first
    dump, or None if the file was refused. columns: the user's names of the parts of a row (`layouts.columns_of`).

    Raises UsageError for a path that does not exist, no files at all or an impossible run name, StoreProblem when the
    store cannot be written, LaunchProblem when no decoding process starts. Bad files raise nothing: they are in the
    summary's `refused`.
    """
    require_run_name(run)
    files = find_files(paths)
    if store and store.exists():
        store.require()
    with LegacyReader() as trees:
        job = Import(store, trees, run, columns, give)
        for path in files:
            on_file(job.take(path))
    return job.summary


@contextlib.contextmanager
def reading(give: Give, columns: Mapping[str, str]) -> Iterator[Import]:
    """Open an import that hands the dumps of its files to `give`."""
    with LegacyReader() as trees:
        yield Import(None, trees, None, columns, give)


def dumps_of(store: Store, pickles: Sequence[Path]) -> list[Path]:
    """Return the dump of each pickle, imported into the store unless it is there. CorruptDump for a pickle that is refused."""
    store.create()
    with LegacyReader() as trees:
        job = Import(store, trees, None)
        ids = [job.take(path) for path in pickles]
    if job.summary.refused:
        first = job.summary.refused[0]
        raise CorruptDump(
            f"{first.path} is refused: {first.told}", hint="`actordbg dump import` names every bad file of a folder"
        )
    where = {dump_id_of(place): place for place in places_of(store)}
    return [Path(where[dump_id]) for dump_id in ids if dump_id is not None]


def files_below(path: Path) -> list[Path]:
    """List a file, or what is below a folder in order of name, but what is in a store there: no trainer wrote that."""
    if not path.is_dir():
        return [path]
    below = sorted(path.rglob("*"))
    stores = [each.parent for each in below if each.name == "FORMAT" and each.parent != path and _is_store(each.parent)]
    return [each for each in below if not any(store in each.parents for store in stores)]


def _is_store(folder: Path) -> bool:
    with contextlib.suppress(StoreProblem):
        return Store(folder).require().exists()
    return False


def find_files(paths: Sequence[Path]) -> list[Path]:
    """List the files to import, each once, in order of name: files as given; in folders those that may hold a dump or rows by
    their first bytes, and, so that a bad one is named, those with a pickle's suffix.
    """
    files: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise UsageError(
                f"{path} does not exist",
                hint="name a file of a run, or a folder of such files; `actordbg explain last` judges a replay",
            )
        files.update(dict.fromkeys(filter(_may_have_rows, files_below(path)) if path.is_dir() else [path]))
    if not files:
        below = (each for path in paths for each in files_below(path) if each.is_file())
        known = next(((each, other) for each in below if (other := other_at(each))), None)
        raise UsageError(
            f"no file below {listed(paths)} that can be imported",
            hint=f"{known[0].name}: {known[1].message}: {known[1].hint}"
            if known
            else "name the folder that holds the files; docs/reference/layouts.md lists what is read",
        )
    return list(files)


def _may_have_rows(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.is_file() and (path.suffix in PICKLES or container_of(path) != UNKNOWN)
    return False


def run_name(path: Path, above: int = 1) -> str:
    """Return the default run of a file: its folder's name, with characters that a run's name cannot have replaced by `-`.

    above: how many folders above the file that is.
    """
    folders = path.resolve().parents
    folder = folders[min(above, len(folders)) - 1]
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", folder.name).lstrip("._+-")[:128]
    return name if is_plain_name(name) else "import"


def import_id(timestamp: str, sha256: str) -> str:
    """Return the dump id of a pickle: the same for the same file, whenever and wherever it is imported."""
    return make_dump_id(timestamp, 0, 0, sha256[:16])


class Import:
    """An import in progress: the dumps known to be in the store, and the summary so far."""

    def __init__(
        self,
        store: Store | None,
        trees: LegacyReader,
        run: str | None,
        columns: Mapping[str, str] = MappingProxyType({}),
        give: Give | None = None,
    ) -> None:
        self.store, self.trees, self.run, self.columns = store, trees, run, dict(columns)
        self.give, self.most = give or self._publish, MOST_JUDGED if give else MOST_REPLAYED
        self.known = {dump_id_of(place) for place in places_of(store)} if store else set[str]()
        self.waiting: list[tuple[DumpRecord, bytes, bytes]] = []
        self.room = WAITING_BYTES
        self.by_content = {dump_id.partition("-")[2]: dump_id for dump_id in self.known}
        self.summary = ImportSummary()

    def take(self, path: Path, file: RowFile | None = None) -> str | None:
        """Import one file, find it already there, or note why it is refused. Return its first dump's id; None if refused.

        file: the file of rows, if lines of it were read before.
        """
        before = len(self.summary.dump_ids)
        try:
            kind = container_of(path) if path.is_file() else PICKLE
            if file is not None:
                self._rows(file)
            elif kind == PICKLE or (kind == UNKNOWN and path.suffix in PICKLES):
                self._pickle(path)
            elif kind == UNKNOWN:
                if not path.stat().st_size:
                    raise Unsupported("it is empty", hint="was it still being written, or on a disk that was full?")
                raise Unsupported("it is not a file that is read", hint="docs/reference/layouts.md lists those that are")
            else:
                self._rows(RowFile(path, kind, self.columns, self.trees))
        except (ActordbgError, OSError) as problem:
            error = problem_of(problem, path)
            if error.code in (StoreProblem.code, LaunchProblem.code):
                raise error from None
            hint = error.hint or "" if isinstance(error, Unsupported) else ""
            self.summary.refused.append(Damaged(str(path), error.code, error.message, hint))
        return next(iter(self.summary.dump_ids[before:]), None)

    def lines_of(self, path: Path) -> RowFile:
        """Return a file of JSON lines that is read bit by bit."""
        return RowFile(path, JSON_LINES, self.columns, self.trees)

    def _rows(self, file: RowFile) -> None:
        """Write the dumps of a file of rows."""
        before = self.summary.added
        try:
            for record, tensors in file.dumps(*self.most):
                if known := self.by_content.get(record.dump_id.partition("-")[2]):
                    self._there(known)
                    continue
                assert file.layout is not None
                run = self.run or run_name(file.path, file.layout.folder)
                self._put(replace(record, run=run), tensors)
        finally:
            self._flush()
            if self.summary.added > before:
                self.summary.bytes_read += file.path.stat().st_size
            if file.left_out:
                of = plural(len(file.left_out), "row")
                self.summary.left_out.append(f"{of} of {file.path.name} left out: {file.left_out[0]}")
                file.notes.append(f"{of} left out: {file.left_out[0]}")
            self.summary.notes += [f"{file.path}: {note}" for note in file.notes]

    def _publish(self, record: DumpRecord, tensors: Mapping[str, PlainTensor]) -> None:
        from actordbg.formats.encoding import checked_line, serialize

        record, payload = serialize(record, tensors)
        self.waiting.append((record, checked_line(record, payload), payload))
        self.room -= len(payload)
        if self.room < 0 or len(self.waiting) >= MOST_WAITING:
            self._flush()

    def _flush(self) -> None:
        """Write the dumps that wait, all of one run: many as a pack, for which the disk is flushed once."""
        from actordbg.formats.encoding import pack_line
        from actordbg.store.pack_build import PackWriter, exclusive

        waiting, self.waiting, self.room = self.waiting, [], WAITING_BYTES
        if self.store is None or not waiting:
            return
        store = self.store.create()
        try:
            if len(waiting) >= PACKED:
                with contextlib.suppress(Conflict, StoreProblem), exclusive(store):  # or files cannot be locked there
                    writer = PackWriter(store.packs / waiting[0][0].run)
                    writer.level = 3  # a pack shares what rows have in common: that is more than a higher level gives
                    try:
                        for each in waiting:
                            writer.add(*each)
                        self.summary.bytes_stored += writer.publish()[1].stored
                    finally:
                        writer.discard()
                    return
            for record, line, payload in waiting:
                blob = pack_line(line, payload, LEVEL)
                store.publish_dump(record, blob)
                self.summary.bytes_stored += len(blob)
        except OSError as error:
            hint = "make room or correct the permissions, and run the same import again: it continues where it stopped"
            raise StoreProblem(f"cannot write into {store.root}: {error.strerror}", hint=hint) from None

    def _put(self, record: DumpRecord, tensors: Mapping[str, PlainTensor]) -> None:
        self.give(record, tensors)
        self.known.add(record.dump_id)
        self.by_content[record.dump_id.partition("-")[2]] = record.dump_id
        self.summary.dump_ids.append(record.dump_id)
        self.summary.added += 1
        if record.run not in self.summary.runs:
            self.summary.runs.append(record.run)

    def _there(self, dump_id: str) -> None:
        self.summary.present += 1
        self.summary.dump_ids.append(dump_id)

    def _pickle(self, path: Path) -> None:
        """Import a pickle of the old recorder, or of rows."""
        if path.is_file() and path.stat().st_size > self.trees.limits.file_bytes:
            self._rows(RowFile(path, PICKLE, self.columns, self.trees))
            return
        data = self.trees.load(path)
        if data[:1] != b"\x80":
            raise corrupt("not a pickle: those of an actor dump begin with the byte 0x80")
        sha256 = hashlib.sha256(data).hexdigest()
        named = _NAME.search(path.name)
        timestamp = parse_stamp(named[2]) if named else None
        if timestamp and (expected := import_id(timestamp, sha256)) in self.known:
            self._there(expected)
            return
        content = pickle_value(self.trees, data)
        of_call = isinstance(content, dict) and REQUIRED & content.keys()
        if isinstance(content, LISTS) or (isinstance(content, dict) and not of_call):
            self._rows(RowFile(path, PICKLE, self.columns, self.trees))
            return
        call = old_call(content)
        dump_id = import_id(call.timestamp, sha256)
        if dump_id in self.known:
            self._there(dump_id)
            return
        run = self.run or run_name(path)
        mask, action = call.tensors.get("attention_mask"), call.tensors.get("action_mask")
        batch, length = call.tensors["sequences"].values.shape
        record = DumpRecord(
            dump_id=dump_id,
            run=run,
            rank=call.rank,
            timestamp=call.timestamp,
            batch_size=batch,
            seq_len=length,
            tokens=mask.nonzero if mask is not None else batch * length,
            source=IMPORTED,
            action_len=action.values.shape[1] if action is not None else None,
            arguments=dict(call.arguments),
            origin={"name": path.name},  # the id holds the first 16 digits of its SHA-256
        )
        self._put(record, call.tensors)
        self._flush()
        self.summary.bytes_read += len(data)
