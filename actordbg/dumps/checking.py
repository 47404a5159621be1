"""All checks of a store, in one table. A check is a name and a function from the store to findings; it writes nothing.

    findings = check(store)                    # every byte
    findings = check(store, deep=False)        # names, headers and records only

The catalog is sound if its rows match the files: a copy of it is refreshed in a temporary folder, whose `dumps`, `packs` and so
on are links to the store's, and a second catalog is built there from scratch. Both must have the same rows. No refresh will ever
fix a difference. `verify` has the checks of dumps and packs.
"""

import contextlib
import os
import re
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from actordbg.base.errors import CatalogProblem, NewerFormat, StoreProblem
from actordbg.capture.control import LARGEST, Control
from actordbg.catalog import connections as engine, migrate
from actordbg.catalog.indexer import FOLDERS, refresh
from actordbg.dumps import verify
from actordbg.dumps.finding import StoreFault, unusable
from actordbg.dumps.recover import is_forsaken
from actordbg.formats.dumpfile import DEFAULT_CAP, payload_entries
from actordbg.formats.recording_reading import read_ring
from actordbg.formats.ringfile import place, ring_paths
from actordbg.formats.store_files import KINDS, TEMPORARY, read_regular
from actordbg.formats.turn_record import TURNS
from actordbg.formats.weight_hashes import WEIGHTS
from actordbg.formats.weight_syncs import SYNCS
from actordbg.records.comparison_record import ComparisonRecord, LintRecord, NoiseRecord
from actordbg.records.journal import SPEC, TENSORS, read_chunks, result_of
from actordbg.records.matrix_record import MatrixRecord
from actordbg.records.replay_record import PASSED, ReplaySpec
from actordbg.records.run_files import read_counters, read_sync, read_trajectory, read_weights
from actordbg.store.layout import UNPRINTABLE, Store, known_regular

_FILES = re.compile(
    r"FORMAT|control\.json|catalog\.db(-wal|-shm|-journal)?|catalog\.lock|catalog\.\w+\.bak\.db|controls/[^/]+\.json"
    r"|(counters|weights|syncs|turns)/[^/]+/[^/]+\.json|dumps/[^/]+/rank\d{4,}/[^/]+\.safetensors\.zst|packs/\.lock|packs/[^/]+/[^/]+\.pack"
    r"|replays/[^/]+/(?!tensors$)[^/]+|replays/[^/]+/tensors/[^/]+\.safetensors|(comparisons|noise|lints|matrices|events)/[^/]+\.json"
    r"|memory/[^/]+\.(json|csv)|trainchecks/[^/]+/check\.json|trainchecks/[^/]+/cell-\d+\.\d+/(?!tensors$)[^/]+|trainchecks/[^/]+/logs/[^/]+\.log"
    r"|backups/[0-9a-f]{64}/(actor\.py|origin\.json)"
)
_FOLDERS = re.compile(
    r"(controls|comparisons|noise|lints|matrices|memory|events|models|reports|reductions|rings|quarantine|cache)|(counters|weights|syncs|turns|packs|backups)(/[^/]+)?"
    r"|dumps(/[^/]+(/rank\d{4,})?)?|replays(/[^/]+(/tensors)?)?|trainchecks(/[^/]+(/logs|/cell-\d+\.\d+(/tensors)?)?)?"
)
"""What a store may hold. `events`, `backups` and `memory` are those of earlier versions."""
_OWN_CHECKS = ("FORMAT", "catalog.db")
"""Files whose type is left to their own checks."""
_NOT_LOOKED_INTO = ("models", "reports", "reductions", "rings", "quarantine", "cache")
_OTHERS, _OWNERS_FILE, _OWNERS_FOLDER = 0o007, 0o400, 0o500
Faults = Iterator[StoreFault]


def format_file(store: Store, deep: bool) -> Faults:
    """Check FORMAT: this program reads the store's format."""
    if not os.path.lexists(store.format_path):
        yield StoreFault(store.format_path, "no-format")
        return
    try:
        store.require()
    except StoreProblem as error:
        kind = "newer-store" if isinstance(error, NewerFormat) else "bad-format"
        yield StoreFault(store.format_path, kind, error.message)


def layout(store: Store, deep: bool) -> Faults:
    """Check every name in the store: it belongs to a store, has the right type, and is private."""
    state = os.stat(store.root)
    if state.st_mode & stat.S_IWOTH:
        yield StoreFault(store.root, "open-mode", f"it has mode {stat.S_IMODE(state.st_mode):o}: anybody can put files into it")
    yield from _listed(store.root, "", state.st_uid)


def _listed(folder: Path, below: str, owner: int) -> Faults:
    """Report what is wrong with each name of a folder, and with what lies below it."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        yield StoreFault(folder, "unreadable", f"cannot be listed: {error.strerror}")
        return
    for name in names:
        path, relative = folder / name, f"{below}{name}"
        with contextlib.suppress(FileNotFoundError):
            yield from _entry(path, relative, os.lstat(path), owner)


def _entry(path: Path, relative: str, state: os.stat_result, owner: int) -> Faults:
    """Report what is wrong with a name."""
    folder, regular = os.path.isdir(path), stat.S_ISREG(state.st_mode)
    file_name, folder_name = _FILES.fullmatch(relative), _FOLDERS.fullmatch(relative)
    if not path.name.isprintable():
        yield StoreFault(path, "odd-name", UNPRINTABLE)
    elif path.name.startswith(TEMPORARY) or (path.name.startswith("catalog.") and path.name.endswith(".part")):
        yield StoreFault(path, "temporary-file" if regular and is_forsaken(path.name, state) else "unfinished-file")
    elif folder and folder_name:
        if relative not in _NOT_LOOKED_INTO:
            yield from _modes(path, os.stat(path), owner)
            yield from _listed(path, f"{relative}/", owner)
    elif regular and file_name:
        yield from _modes(path, state, owner)
    elif relative in _OWN_CHECKS:
        return
    elif file_name or not (folder or regular) or (folder_name and "/" not in relative):
        what = KINDS.get(stat.S_IFMT(state.st_mode), "a file" if regular else "a device")
        belongs = "a file" if file_name else "a folder"
        yield StoreFault(path, "odd-file", f"it is {what}, not {belongs}")
    elif path.name[0] != ".":
        yield StoreFault(path, "foreign-file")


def _modes(path: Path, state: os.stat_result, owner: int) -> Faults:
    required = _OWNERS_FOLDER if stat.S_ISDIR(state.st_mode) else _OWNERS_FILE
    if state.st_mode & _OTHERS or state.st_mode & required != required:
        yield StoreFault(path, "open-mode", f"it has mode {stat.S_IMODE(state.st_mode):o}")
    if state.st_uid != owner:
        yield StoreFault(path, "foreign-owner", f"it belongs to user {state.st_uid}, the store to {owner}")


_UNLIKE = ("alembic_version", "scanned_folder", "read_file", "caller")
"""Tables of the index's own bookkeeping, and the callers, whose columns are compared as those of their dumps."""
_NUMBERS = ("id", "last_result", "caller")
"""Columns that hold numbers of rows."""


def catalog(store: Store, deep: bool) -> Faults:
    """Check the catalog: it is a database, of this program's revision, and with `deep` its rows match the files."""
    invalid = engine.odd_parts(store.catalog_path)
    yield from (StoreFault(path, "damaged-catalog", "it is not a file") for path in invalid)
    if invalid or not os.path.lexists(store.catalog_path):
        return
    with tempfile.TemporaryDirectory(prefix="actordbg-fsck-") as folder:
        copy = _beside(store, Path(folder, "copy"))
        try:
            yield from _copied(store, copy, Path(folder), deep)
        except (CatalogProblem, StoreProblem, OSError) as error:
            yield StoreFault(store.catalog_path, "damaged-catalog", str(error).replace(str(copy.root), str(store.root)))


def _copied(store: Store, copy: Store, folder: Path, deep: bool) -> Faults:
    try:
        for suffix in ("", "-wal", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"{store.catalog_path}{suffix}", f"{copy.catalog_path}{suffix}", follow_symlinks=False)
    except OSError as error:
        yield StoreFault(store.catalog_path, "unreadable", f"it cannot be copied, so it was not checked: {error.strerror}")
        return
    _, usable = migrate.look(copy.catalog_path)
    with engine.catalog_errors(copy.catalog_path), contextlib.closing(sqlite3.connect(copy.catalog_path)) as connection:
        wrong = [row[0] for row in connection.execute("PRAGMA integrity_check")]
    if wrong != ["ok"]:
        yield StoreFault(store.catalog_path, "damaged-catalog", wrong[0][:200])
    elif usable and deep:  # the next command rebuilds a catalog of another program
        yield from _compared(store, copy, folder)


def _beside(store: Store, root: Path) -> Store:
    """Create a store without a catalog whose folders are links to the store's."""
    made = Store(root).create()
    for name in FOLDERS:
        if os.path.isdir(store.root / name):
            (root / name).symlink_to(store.root / name)
    return made


def _compared(store: Store, copy: Store, folder: Path) -> Faults:
    refresh(copy)
    fresh = _beside(store, folder / "fresh")
    refresh(fresh)
    ours, expected = _rows(copy.catalog_path), _rows(fresh.catalog_path)
    unlike = sorted(name for name in expected if ours.get(name) != expected[name])
    if unlike:
        yield StoreFault(store.catalog_path, "stale-catalog", f"other rows in {', '.join(unlike)}")


def _rows(path: Path) -> dict[str, set[tuple[object, ...]]]:
    """Return the rows of every table that is built from files, without row ids."""
    tables = {}
    with engine.catalog_errors(path), contextlib.closing(sqlite3.connect(path)) as connection:
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in (name for name in names if name not in _UNLIKE and not name.startswith("sqlite_")):
            joined = "dump JOIN caller ON caller.id = dump.caller" if table == "dump" else f'"{table}"'
            columns = {name for name, *_ in connection.execute(f"SELECT * FROM {joined} LIMIT 0").description}
            plain = ", ".join(f'"{name}"' for name in sorted(columns.difference(_NUMBERS)))
            tables[table] = set(connection.execute(f"SELECT {plain} FROM {joined}"))
    return tables


_TENSORS = ".safetensors"


def replays(store: Store, deep: bool) -> Faults:
    """Check every replay: its spec, its journals, and that results and kept tensors belong to its inputs."""
    for name in store.folder_names("replays", {}):
        folder = store.replays / name
        try:
            spec = ReplaySpec.from_file(folder / SPEC)
        except StoreProblem as error:
            yield unusable(folder / SPEC if isinstance(error, NewerFormat) else folder, "damaged-spec", error)
            continue
        if spec.replay_id != name:
            yield StoreFault(folder, "damaged-spec", f"its spec.json belongs to {spec.replay_id!r:.80}")
            continue
        yield from _replay(store, folder, spec, deep)


def _replay(store: Store, folder: Path, spec: ReplaySpec, deep: bool) -> Faults:
    inputs, passed = {item.dump_id for item in spec.inputs}, set()
    for path in (store.root / relative for relative in store.files(f"replays/{folder.name}", ".jsonl", {})):
        try:
            chunks = [*read_chunks(path)]
        except OSError as error:
            yield unusable(path, "damaged-journal", error)
            continue
        if skipped := sum(chunk.skipped for chunk in chunks):
            yield StoreFault(path, "damaged-journal", f"{skipped} lines cannot be read")
        results = [result_of(event) for chunk in chunks for event in chunk.events if event["event"] == "end"]
        passed |= {result.dump_id for result in results if result.status == PASSED}
        for result in results:
            if result.replay_id != spec.replay_id:
                yield StoreFault(path, "foreign-result", f"it has a result of replay {result.replay_id!r:.80}")
                break
            if result.dump_id not in inputs:
                yield StoreFault(path, "foreign-result", f"it has a result of {result.dump_id!r:.80}, which is not an input")
                break
    for path in (store.root / name for name in store.files(f"replays/{folder.name}/{TENSORS}", _TENSORS, {})):
        if deep:
            try:
                payload_entries(read_regular(known_regular(path, DEFAULT_CAP), DEFAULT_CAP), path.name)
            except (OSError, StoreProblem) as error:
                yield unusable(path, "damaged-tensors", error)
    if spec.config.keep_tensors:
        for dump_id in sorted(passed & inputs):
            path = folder / TENSORS / f"{dump_id}{_TENSORS}"
            if not os.path.lexists(path):
                yield StoreFault(path, "missing-tensors")


def records_check(folder: str, kind: Any, id_field: str) -> Callable[[Store, bool], Faults]:
    """Make a check that reads every record of a folder; `id_field` of a record names its file."""

    def read(path: Path) -> None:
        own: str = getattr(kind.from_json(read_regular(path)), id_field)
        if f"{own}.json" != path.name:
            raise StoreProblem(f"it belongs to {own!s:.80}")

    return files_check(folder, "damaged-record", read)


def files_check(
    folder: str, kind: str, read: Callable[[Path], Any], *, by_run: bool = False, beside: str = ""
) -> Callable[[Store, bool], Faults]:
    """Make a check that reads every JSON file of a folder, or of its folders for each run, and one file `beside` it."""

    def look(store: Store, deep: bool) -> Faults:
        folders = [f"{folder}/{run}" for run in store.folder_names(folder, {})] if by_run else [folder]
        for path in (*([beside] if beside else ()), *(path for name in folders for path in store.files(name, ".json", {}))):
            try:
                read(store.root / path)
            except FileNotFoundError:
                continue
            except (OSError, StoreProblem, ValueError, TypeError, RecursionError) as error:
                yield unusable(store.root / path, kind, error)

    return look


def rings(store: Store, deep: bool) -> Faults:
    """Report this machine's rings that are damaged, or that belong to dead processes and hold calls."""
    for path in (path for folder in {place(store), store.root / "rings"} for path in ring_paths(folder)):
        try:
            ring = read_ring(path)
        except (StoreProblem, OSError) as error:
            yield unusable(path, "damaged-ring", error)
            continue
        if ring.damaged:
            yield StoreFault(path, "damaged-ring", "; ".join(ring.damaged)[:200])
        if ring.slots and not ring.alive:
            yield StoreFault(path, "calls-in-ring", f"{len(ring.slots)} calls")


Check = Callable[[Store, bool], Iterable[StoreFault]]
"""Gets the store, and whether to read files whole."""
CHECKS: dict[str, Check] = {
    "format": format_file,
    "layout": layout,
    "dumps": verify.loose_dumps,
    "packs": verify.packs,
    "doubles": verify.doubles,
    "replays": replays,
    "comparisons": records_check("comparisons", ComparisonRecord, "comparison_id"),
    "noise": records_check("noise", NoiseRecord, "noise_id"),
    "lints": records_check("lints", LintRecord, "lint_id"),
    "matrices": records_check("matrices", MatrixRecord, "matrix_id"),
    "switches": files_check(
        "controls", "damaged-control", lambda path: Control.from_json(read_regular(path, LARGEST)), beside="control.json"
    ),
    "counters": files_check("counters", "damaged-counters", read_counters, by_run=True),
    "weights": files_check(WEIGHTS, "damaged-weights", read_weights, by_run=True),
    "turns": files_check(TURNS, "damaged-turns", read_trajectory, by_run=True),
    "syncs": files_check(SYNCS, "damaged-weights", read_sync, by_run=True),
    "rings": rings,
    "catalog": catalog,
}
"""Every check by its name, in its order."""


def check(
    store: Store, *, deep: bool = True, without: Collection[str] = (), on_start: Callable[[str], None] = lambda name: None
) -> list[StoreFault]:
    """Run all checks and return their findings, each once, damage first. `without`: checks to skip. `on_start` gets their names.

    Raises StoreProblem if the store does not exist.
    """
    known = ("dumps", "packs", "replays")
    if not os.path.lexists(store.format_path) and not any(os.path.isdir(store.root / name) for name in known):
        raise StoreProblem(f"there is no store in {store.root}", hint="pass --store DIR")
    newer = any(finding.kind == "newer-store" for finding in format_file(store, False))
    findings: dict[tuple[str, str, str], StoreFault] = {}
    for name, look in CHECKS.items():
        if name not in without and (not newer or name == "format"):
            on_start(name)
            for finding in look(store, deep):
                key = (finding.severity, os.fspath(finding.place), finding.kind)
                findings.setdefault(key, finding)
    return [findings[key] for key in sorted(findings)]
