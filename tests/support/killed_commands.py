"""Runs commands of actordbg on copies of a store, and interferes with each system call that changes a file, one run after the other.

    python killed_commands.py all|COMMAND... [--every N [--offset M]]       each Nth run only

Prints a JSON object for each command: how many runs there were, in which states they left the store, and `wrong`: everything that does not hold. The
store that a run left is looked at (`Look`), and the command runs again, undisturbed. Two runs that leave the same bytes are
looked at once. What must hold:

- every dump that was there reads back with the same bytes, once; a command that removes has removed only what it was told to;
- the catalog opens, and `index` brings it to what an index made from nothing has;
- the second run comes to the same files and the same rows as a run that nobody disturbed, and nothing is left over but
  temporary files of backups, and one in the store itself, which `dump recover` takes;
- where the disk failed, the command ended with a documented exit code and a message, never with a traceback.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import os
import re
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import catalogcases
import packcases
import torch
from patchkit import OLD, facts_of, written
from roots import MEMORY, write_json
from syscall_killer import traced, why_not
from victims import Job, Victims

from actordbg.capture.control import Control
from actordbg.capture.switch_file import write_control
from actordbg.catalog import migrate
from actordbg.catalog.indexer import refresh
from actordbg.cli.app import main as command_line
from actordbg.dumps import packing
from actordbg.dumps.recover import find_rings, recover
from actordbg.formats import dumpfile
from actordbg.formats.ringfile import DATA
from actordbg.install import patching
from actordbg.store.layout import Store
from actordbg.store.places import dump_id_of, places_of, read_payload

SINCE = "2026-11-20T12:00:00.000000Z"
_TEMPORARY = re.compile(r"(?<=\.tmp-)[0-9a-f]{8}-\d+-[0-9a-f]{8}|(?<=actor\.py-)\d+-[0-9a-f]{8}|(?<=\.db\.)\d+(?=\.part)")
_LIVE = re.compile(r"(catalog\.db-(wal|shm|journal)|\.lock|catalog\.lock)\Z")
"""Names that come and go with a process that has the catalog open, and locks."""
_UNFINISHED = re.compile(r"\.tmp-.*-probe\Z")


# ---- the commands, and stores for them ----


@dataclass
class Command:
    """One command line on one kind of store. `removes`: it may take dumps away; `adds`: it may bring some."""

    words: list[str]
    prepare: Callable[[Store], object]
    removes: bool = False
    adds: bool = False


def _loose(store):
    rows = packcases.samples(2)
    for number in range(4):
        packcases.publish(store, number, packcases.batch(rows, number, 2))
    packcases.publish(store, 4, packcases.batch(rows, 4, 2), run="other")
    refresh(store)


def _packed(store):
    _loose(store)
    packing.pack_dumps(store)
    packcases.publish(store, 8, packcases.batch(packcases.samples(2), 3, 2))
    refresh(store)


def _changed(store):
    """A catalog that knows four dumps; since then a pack, new and vanished dumps, a damaged one and a replay came."""
    catalogcases.fill(store, 6)
    refresh(store)
    catalogcases.settle(store)
    packing.pack_dumps(store, "rank = 0")
    gone, torn = list(store.iter_dumps())[:2]
    gone.unlink()
    torn.write_bytes(torn.read_bytes()[:20])
    records = catalogcases.fill(store, 9)[6:]
    folder = catalogcases.write_spec(store, catalogcases.spec("20250701T000000-000001", records, dtype="bf16", attn="eager"))
    catalogcases.append(folder / "rank0.jsonl", catalogcases.result("20250701T000000-000001", records[0].dump_id, forward_s=0.5))


def _without_catalog(store):
    _changed(store)
    _remove_catalog(store)


def _without_a_setting(store):
    """A catalog of a version that did not have two of the settings yet: it is made anew."""
    _changed(store)
    refresh(store)
    with contextlib.closing(sqlite3.connect(store.catalog_path, isolation_level=None)) as connection:
        for name in ("attn", "dtype"):
            connection.execute(f"ALTER TABLE replay DROP COLUMN {name}")


def _dead(store):
    """The ring of a process that was killed in its fourth call, and two dumps that it had written, indexed."""
    write_control(store, Control(True, "r", SINCE, free_floor_bytes=0))
    with tempfile.TemporaryDirectory() as shared, Victims(Path(shared)) as victims:
        victims.run(Job("dies_inside", str(store.root), calls=3))
    (store.root / "rings").mkdir()
    for ring in find_rings(store):
        with open(ring, "rb") as file:  # a ring is a sparse file of hundreds of megabytes
            (store.root / "rings" / ring.name).write_bytes(file.read(DATA + 2**20))
        ring.unlink()
    scratch = Store(store.root.parent / "scratch")
    _copy(store, scratch)
    reports = list(recover(scratch, find_rings(scratch)))
    for dump in reports[0].dumps[:2]:  # these had been written before the process died
        record, data = read_payload(scratch.root / dump.path)
        record = replace(record, recovered=None, pinned=False)
        store.publish_dump(record, dumpfile.pack(record, data))
    refresh(store)
    catalogcases.settle(store)
    assert len(list(store.iter_dumps())) == 2


def _actor(store):
    written(Path(f"{store.root}.models/actor.py"))


def _patched(store):
    _actor(store)
    _run(store, ["patch", "--target", "ACTOR"])


HALF = ["--where", "rank < 2"]
COMMANDS = {
    "pack": Command(["dump", "pack"], _loose),
    "unpack": Command(["dump", "unpack", *HALF], _packed),
    "prune": Command(["dump", "prune", *HALF, "--yes", "--allow-empty"], _packed, removes=True),
    "index": Command(["index"], _changed),
    "index-new": Command(["index"], _without_catalog),
    "index-rebuild": Command(["index", "--rebuild"], _changed),
    "index-earlier": Command(["dump", "ls"], _without_a_setting),
    "recover": Command(["dump", "recover"], _dead, adds=True),
    "patch": Command(["patch", "--target", "ACTOR"], _actor),
    "unpatch": Command(["unpatch", "--target", "ACTOR"], _patched),
}


def _run(store, words):
    """One command in this process; its exit code. What is not an exit code is a traceback."""
    actor = f"{store.root}.models/actor.py"
    sys.argv = ["actordbg", "--store", str(store.root), *(actor if word == "ACTOR" else word for word in words)]
    try:
        command_line()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


# ---- what is looked at ----


@dataclass
class Look:
    """What the files of a store hold, what the catalog makes of them, and everything that lies about."""

    files: dict[str, tuple[str, str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    rows: Any = None
    rebuilt: Any = None
    names: list[str] = field(default_factory=list)
    actor: Any = None
    catalog: Any = None


def look(store, template, rebuilt=None):
    """Read everything: the dumps first, then the catalog as `index` leaves it, and (unless known) one that is made from nothing."""
    found = Look(names=_names(store))
    for place in places_of(store):
        try:
            record, data = read_payload(place)
        except Exception as error:  # noqa: BLE001  whatever it is, it is shown
            found.problems.append(f"{dump_id_of(place)}: {type(error).__name__}")
        else:
            found.files[record.dump_id] = (record.to_json(), hashlib.sha256(data).hexdigest())
    if store.catalog_path.exists():
        found.catalog = _catalog(store)
    refresh(store)
    found.rows = catalogcases.contents(store)
    if rebuilt is None:
        _remove_catalog(store)
        shutil.copy(template, store.catalog_path)
        refresh(store)
    found.rebuilt = rebuilt or catalogcases.contents(store)
    actor = Path(f"{store.root}.models/actor.py")
    if actor.exists():
        data, mode, _, mtime_ns = facts_of(actor)
        found.actor = [hashlib.sha256(data).hexdigest(), mode, mtime_ns == OLD]
        found.actor += [sorted(os.listdir(actor.parent))]
    return found


def _catalog(store):
    """Whether SQLite finds the catalog whole, before anybody fixes it; its revision, and how many rows and columns it has."""
    with contextlib.closing(sqlite3.connect(store.catalog_path)) as connection:
        (answer,) = connection.execute("PRAGMA integrity_check").fetchone()
        tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        sizes = [
            connection.execute(
                f"SELECT (SELECT count(*) FROM {name}), (SELECT count(*) FROM pragma_table_info('{name}'))"
            ).fetchone()
            for name in tables
        ]
    return [answer, migrate.look(store.catalog_path), tables, sizes]


def state_of(root, *, catalog=True):
    """A digest of everything below a folder and its neighbour with the patched file: equal for stores that are alike.

    Left out is what nobody reads after a crash: of SQLite's log what comes after the last commit, its salts (drawn at random) and
    shared memory; the bytes of copies that an upgrade did not finish. Without `catalog`: of all other files.
    """
    digest = hashlib.sha256()
    for top in (root, Path(f"{root}.models")):
        for path in sorted(top.rglob("*")):
            if path.is_dir() or path.name.endswith("-shm") or (path.name.startswith("catalog.") and not catalog):
                continue
            data = path.read_bytes() if ".part" not in path.name else b""
            if path.name.endswith("-wal"):
                data = _committed(data)
            name = _TEMPORARY.sub("", path.relative_to(top).as_posix())
            digest.update(name.encode() + b"%d\0" % len(data) + data)
    return digest.hexdigest()


def _committed(log):
    """The pages of a write-ahead log, as far as they are of its newest round and committed."""
    pages, end = [], 0
    for at in range(32, len(log) - 4096 - 23, 4096 + 24):
        if log[at + 8 : at + 16] != log[16:24]:
            break
        pages.append(log[at : at + 8] + log[at + 24 : at + 24 + 4096])
        if log[at + 4 : at + 8] != bytes(4):
            end = len(pages)
    return b"".join(pages[:end])


def _names(store):
    found = (path.relative_to(store.root).as_posix() for path in store.root.rglob("*") if not path.is_dir())
    return sorted(name for name in found if not _LIVE.search(name) and not _UNFINISHED.match(name))


def _remove_catalog(store):
    for path in store.root.glob("catalog.db*"):
        path.unlink()


def observed(work, report):
    """The answer of `work` in a child of its own, so that no open pack or connection is shared."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            write_json(report, asdict(work()))
            code = 0
        except BaseException as error:  # noqa: BLE001  the parent reports it
            report.write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    text = report.read_text()
    return Look(**json.loads(text)) if status == 0 else Look(problems=[f"could not be looked at: {text}"])


# ---- one run after the other ----


@dataclass
class Report:
    """All runs of one command."""

    command: str
    calls: int = 0
    runs: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


class Loop:
    """One command, interfered with at one call after the other, on copies of one store."""

    def __init__(self, name, work):
        self.name, self.command, self.work = name, COMMANDS[name], work
        self.report = Report(name)
        self.seen = {}
        self.finished = set()
        self.rebuilt = {}
        self.original, self.store = Store(work / "original"), Store(work / "store").create()
        self.template = work / "template.db"
        made = Store(work / "made").create()
        refresh(made)
        shutil.copy(made.catalog_path, self.template)
        self.command.prepare(self.store)
        _copy(self.store, self.original)
        self.before = self._look()
        if _run(self.store, self.command.words):  # in this process: what the runs need is imported now
            raise RuntimeError(f"{name} fails undisturbed")
        self.final = self._look()
        if self.final.problems or self.final.rows != self.final.rebuilt:
            self.report.wrong.append(f"undisturbed: {self.final.problems} {_difference(self.final.rows, self.final.rebuilt)}")

    def run(self, every, offset):
        gc.freeze()
        _copy(self.original, self.store)
        seen = traced(self._quietly, self._folders())
        if seen.code:
            raise RuntimeError(f"{self.name} fails when it is traced: {seen.code}: {self._said()}")
        self.report.calls = len(seen.calls)
        for number, (way, at) in enumerate(_ways(seen.calls)):
            if (number + offset) % every == 0:
                self._try(way, at, len(seen.calls))
        return self.report

    def _try(self, way, at, calls):
        _copy(self.original, self.store)
        end = traced(self._quietly, self._folders(), way, at)
        where = f"{way} {at} of {calls}: {end.calls[at - 1] if at <= len(end.calls) else 'never came to it'}"
        self.report.runs[way] += 1
        if way in ("fail", "full"):
            if end.code not in (0, 1, 3, 4) or (end.code > 1 and "error[" not in self._said()):
                self.report.wrong.append(f"{where}: exit code {end.code}: {self._said()[-400:]}")
        elif not end.killed:
            self.report.wrong.append(f"{where}: it was not killed")
        key = state_of(self.store.root)
        if key not in self.seen:
            self.seen[key] = self._judged()
        state, wrong = self.seen[key]
        self.report.states[state] += 1
        self.report.wrong += [f"{where}: {problem}" for problem in wrong]

    def _judged(self):
        """The state that a run left, and what does not hold of it and of the next run."""
        after = self._look()
        wrong = list(self._problems(after))
        again = traced(self._quietly, [])
        if again.code != 0:
            wrong.append(f"the second run ends with {again.code}: {self._said()[-400:]}")
        key = state_of(self.store.root)
        if key not in self.finished:
            late = [f"after the second run, {problem}" for problem in _differences(self._look(), self.final)]
            wrong += late
            if not late:
                self.finished.add(key)
        return self._state(after), wrong

    def _problems(self, after):
        yield from after.problems
        if after.rows != after.rebuilt:
            yield f"index does not come to what the files hold: {_difference(after.rows, after.rebuilt)}"
        known = self.before.files | (self.final.files if self.command.adds else {})
        for dump_id, (record, sha256) in self.before.files.items():
            if dump_id not in after.files:
                if not self.command.removes or dump_id in self.final.files:
                    yield f"{dump_id} is lost"
            elif after.files[dump_id][1] != sha256 or after.files[dump_id][0] not in (
                record,
                self.final.files.get(dump_id, [""])[0],
            ):
                yield f"{dump_id} has changed"
        yield from (f"{dump_id} came from nowhere" for dump_id in after.files if dump_id not in known)
        if after.actor and after.actor[:3] not in (self.before.actor[:3], self.final.actor[:3]):
            yield f"actor.py is in a third state: {after.actor}"
        if after.catalog and after.catalog[0] != "ok":
            yield f"the catalog is damaged: {after.catalog[0]}"

    def _state(self, after):
        """Before, after, or between."""
        kept = [(one.names, one.actor, one.catalog, one.files) for one in (self.before, self.final, after)]
        return "as before" if kept[2] == kept[0] else "as after it" if kept[2] == kept[1] else "between"

    def _quietly(self):
        """The command, with its words in a file outside of the store."""
        out = os.open(self.work / "said", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        return _run(self.store, self.command.words)

    def _said(self):
        return (self.work / "said").read_text()

    def _folders(self):
        return [self.store.root, Path(f"{self.store.root}.models")]

    def _look(self):
        copy = Store(self.work / "copy")
        _copy(self.store, copy)
        files = state_of(copy.root, catalog=False)
        found = observed(lambda: look(copy, self.template, self.rebuilt.get(files)), self.work / "look")
        self.rebuilt[files] = found.rebuilt
        return found


def _copy(store, target):
    """Put a store, and the file that it patches, at another place, instead of what lies there."""
    for end in ("", ".models"):
        shutil.rmtree(f"{target.root}{end}", ignore_errors=True)
        if os.path.exists(f"{store.root}{end}"):
            shutil.copytree(f"{store.root}{end}", f"{target.root}{end}")


def _ways(calls):
    """Every way to interfere with every call."""
    for at, call in enumerate(calls, 1):
        words = call.split()
        yield "kill", at
        if words[0] in ("write", "pwrite64") and int(words[-1]) > 1:
            yield "torn", at
        yield "fail", at
        if words[0] in ("openat", "write", "pwrite64", "mkdir"):
            yield "full", at
    yield "after", len(calls)


def _differences(found, wanted):
    yield from found.problems
    for name in ("files", "rows", "names", "actor"):
        if getattr(found, name) != getattr(wanted, name):
            yield f"{name} differ: {_difference(getattr(found, name), getattr(wanted, name))}"


def _difference(found, wanted):
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]
        return "; ".join(f"{key}: {_difference(found.get(key), wanted.get(key))}" for key in keys)[:900]
    if isinstance(found, list) and isinstance(wanted, list):
        return f"more: {[x for x in found if x not in wanted]!r:.400}, missing: {[x for x in wanted if x not in found]!r:.400}"
    return f"{found!r:.200} instead of {wanted!r:.200}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("commands", nargs="+", choices=["all", *COMMANDS])
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--offset", type=int, default=0)
    asked = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    torch.set_num_threads(1)
    for name in ("require_hook", "require_seen"):
        setattr(patching, name, lambda *_: None)  # another interpreter's matter, and 50 ms each
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the commands say goes to standard error
    bad = False
    for command in COMMANDS if "all" in asked.commands else asked.commands:
        with tempfile.TemporaryDirectory(dir=MEMORY) as name:
            os.environ["ACTORDBG_RING_DIR"] = f"{name}/elsewhere"
            report = Loop(command, Path(os.path.realpath(name))).run(asked.every, asked.offset)
        print(json.dumps(vars(report)), file=out, flush=True)
        bad = bad or bool(report.wrong)
    sys.exit(bad)


if __name__ == "__main__":
    main()
