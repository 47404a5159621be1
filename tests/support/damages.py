"""Ways to damage a store of `storecases`: each function harms one thing and says what it harmed, by its path below the store."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import catalogcases

from actordbg.formats.dump_record import SUFFIX
from actordbg.formats.encoding import pack_line
from actordbg.store.layout import Store
from actordbg.store.places import Pack, places_of, read_payload


class Damage(NamedTuple):
    """`do` harms a store and returns the path that must be named; `kind` is what it must be called. `lost`: dumps it costs."""

    do: Callable[[Store], str]
    kind: str
    lost: int = 0


def dump(store: Store, number: int = 0) -> Path:
    return sorted(store.dumps.rglob(f"*{SUFFIX}"), key=lambda path: path.name)[number]


def pack(store: Store) -> Path:
    return next(iter(store.iter_packs()))


def only(store: Store, folder: str) -> Path:
    return next((store.root / folder).glob("*.json"))


def harmed(find: Callable[[Store], Path], harm: Callable[[Path], object]) -> Callable[[Store], str]:
    """Harms the file that `find` gives."""

    def do(store: Store) -> str:
        path = find(store)
        harm(path)
        return store.relative(path)

    return do


def flipped(at: float) -> Callable[[Path], None]:
    """One bit, at this part of the file."""

    def harm(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[min(int(at * len(data)), len(data) - 1)] ^= 0x10
        path.write_bytes(data)

    return harm


def cut(part: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(part * path.stat().st_size))


def told(text: str | bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(text.encode() if isinstance(text, str) else text) and None


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Something else in the place of the file."""

    def harm(path: Path) -> None:
        path.unlink()
        make(path)

    return harm


def changed(**values: object) -> Callable[[Path], None]:
    """A JSON file with other values."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | values)) and None


def added(name: str, make: Callable[[Path], object]) -> Callable[[Store], str]:
    """Something new in the store; the name may be bytes that are not text."""

    def do(store: Store) -> str:
        make(store.root / name)
        return name

    return do


def named(path: Path, name: str) -> Path:
    return path.rename(path.with_name(name))


def swapped(store: Store) -> str:
    """Two dumps of one folder with each other's names."""
    first, second = dump(store, 0), dump(store, 4)
    aside = first.with_name(".aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)
    return store.relative(first)


def other_run(store: Store) -> str:
    """A dump in the folder of another run."""
    path = dump(store)
    target = store.dumps / "ppo-3" / "rank0000" / path.name
    target.parent.mkdir(parents=True, mode=0o700)
    target.parent.parent.chmod(0o700)
    path.rename(target)
    return store.relative(target)


def forged_record(old: bytes, new: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(catalogcases.with_record(path.read_bytes(), old, new)) and None


def copied_out(changed: bool) -> Callable[[Store], str]:
    """A packed dump as a file too, the same or with another record."""

    def do(store: Store) -> str:
        place = next(one for one in places_of(store) if "#" in str(one))
        record, payload = read_payload(place)
        line = Pack(pack(store)).line(record.dump_id)
        if changed:
            line = line.replace(b'"host":"node-', b'"host":"elsewhere-')
        path = store.dump_path(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in (path.parent, path.parent.parent):
            folder.chmod(0o700)
        path.write_bytes(pack_line(line, payload))
        path.chmod(0o600)
        return store.relative(path)

    return do


def moved_pack(store: Store) -> str:
    """A pack in the folder of another run: each of its dumps is out of place."""
    path = pack(store)
    target = store.packs / "ppo-9" / path.name
    target.parent.mkdir(mode=0o700)
    path.rename(target)
    return f"{store.relative(target)}#{Pack(target).dump_ids[0]}"


def packed_bits(store: Store) -> str:
    """A bit of the first block of the pack: all dumps that use it."""
    path = pack(store)
    first = Pack(path).dump_ids[0]
    flipped(40 / path.stat().st_size)(path)
    return f"{store.relative(path)}#{first}"


def sql(statement: str) -> Callable[[Store], str]:
    """The catalog, changed behind the program's back."""

    def do(store: Store) -> str:
        with contextlib.closing(sqlite3.connect(store.catalog_path, isolation_level=None)) as connection:
            connection.execute(statement)
        return "catalog.db"

    return do


def old_temporary(store: Store) -> str:
    path = dump(store).with_name(f".tmp-1-abc{SUFFIX}")
    path.write_bytes(b"half")
    path.chmod(0o600)
    os.utime(path, (time.time() - 7200,) * 2)
    return store.relative(path)


def journal(store: Store) -> Path:
    return store.replays / "r-01" / "rank0.jsonl"


def spec(store: Store) -> Path:
    return store.replays / "r-01" / "spec.json"


def tensors(store: Store) -> Path:
    return sorted((store.replays / "r-01" / "tensors").iterdir())[0]


def in_replay(do: Callable[[Store], str]) -> Callable[[Store], str]:
    """The same, but the whole replay's folder is what is named."""
    return lambda store: do(store) and "replays/r-01"


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


DAMAGES = {
    # dumps
    "a bit of a dump's record": Damage(harmed(dump, flipped(0.3)), "damaged-dump", 1),
    "a bit of a dump's payload": Damage(harmed(dump, flipped(0.97)), "damaged-dump", 1),
    "a dump whose record has a wrong run": Damage(harmed(dump, forged_record(b'"run":"ppo-1"', b'"run":"ppo-7"')), "damaged-dump", 1),
    "a dump whose record has a wrong type": Damage(
        harmed(dump, forged_record(b'"batch_size":2', b'"batch_size":"two"')), "damaged-dump", 1
    ),
    "a dump of a newer version": Damage(
        harmed(dump, forged_record(b'"format_version":1', b'"format_version":9')), "newer-format", 1
    ),
    "two dumps with each other's names": Damage(swapped, "misplaced-dump"),
    "a dump in another run": Damage(other_run, "misplaced-dump"),
    "a FIFO for a dump": Damage(harmed(dump, instead(fifo)), "odd-file", 1),
    "a link for a dump": Damage(harmed(dump, instead(lambda path: path.symlink_to("/dev/zero"))), "odd-file", 1),
    "a folder for a dump": Damage(harmed(dump, instead(lambda path: path.mkdir(mode=0o700))), "odd-file", 1),
    "a run's name that is not text": Damage(added(os.fsdecode(b"dumps/\xff"), lambda path: path.mkdir(mode=0o700)), "odd-name"),
    "a line break in a name": Damage(added("dumps/ppo-1/rank0000/a\nb", told("x")), "odd-name"),
    "a dump that all may read": Damage(harmed(dump, lambda path: path.chmod(0o644)), "open-mode"),
    "a run that all may enter": Damage(added("dumps/ppo-1", lambda path: path.chmod(0o755)), "open-mode"),
    "a file of a dead writer": Damage(old_temporary, "temporary-file"),
    "notes among dumps": Damage(added("dumps/ppo-1/rank0000/notes.txt", told("hello")), "foreign-file"),
    # packs
    "a pack's index": Damage(harmed(pack, flipped(0.8)), "damaged-pack", 6),
    "a pack's foot": Damage(harmed(pack, flipped(0.99)), "damaged-pack", 6),
    "a bit of a pack's block": Damage(packed_bits, "damaged-packed-dump", 6),
    "a pack in another run": Damage(moved_pack, "damaged-packed-dump"),
    "a dump in a file and a pack": Damage(copied_out(False), "double-dump"),
    "two dumps of one id": Damage(copied_out(True), "double-differs"),
    # replays
    "no spec": Damage(in_replay(harmed(spec, Path.unlink)), "damaged-spec"),
    "the spec of another replay": Damage(in_replay(harmed(spec, changed(replay_id="r-99"))), "damaged-spec"),
    "a spec of a newer version": Damage(harmed(spec, changed(format=9)), "newer-format"),
    "a journal with junk": Damage(harmed(journal, lambda path: path.write_bytes(b"junk\n" + path.read_bytes())), "damaged-journal"),
    "results of another replay": Damage(
        harmed(journal, lambda path: path.write_text(path.read_text().replace('"replay_id":"r-01"', '"replay_id":"r-55"'))),
        "foreign-result",
    ),
    "results of no input": Damage(
        harmed(journal, lambda path: path.write_text(path.read_text().replace('"dump_id":"2025', '"dump_id":"2024'))), "foreign-result"
    ),
    "a FIFO for a journal": Damage(harmed(journal, instead(fifo)), "odd-file"),
    "deleted tensors": Damage(harmed(tensors, Path.unlink), "missing-tensors"),
    "broken tensors": Damage(harmed(tensors, cut(0.7)), "damaged-tensors"),
    # records
    "a broken matrix": Damage(harmed(lambda store: only(store, "matrices"), cut(0.4)), "damaged-record"),
    "a comparison under another name": Damage(
        lambda store: store.relative(named(only(store, "comparisons"), "other.json")), "damaged-record"
    ),
    # the rest
    "no FORMAT": Damage(harmed(lambda store: store.format_path, Path.unlink), "no-format"),
    "a FORMAT that is none": Damage(harmed(lambda store: store.format_path, told("hello")), "bad-format"),
    "a newer FORMAT": Damage(harmed(lambda store: store.format_path, told('{"format": 2}')), "newer-store"),
    "a broken switch": Damage(harmed(lambda store: store.control_path, cut(0.5)), "damaged-control"),
    "broken counters": Damage(harmed(lambda store: only(store, "counters/ppo-1"), cut(0.01)), "damaged-counters"),
    "broken hashes of weights": Damage(
        added("weights/ppo-1/0000-h-7-a-000000.json", lambda path: (path.parent.mkdir(parents=True, mode=0o700), path.parent.parent.chmod(0o700), told("{}")(path))),
        "damaged-weights",
    ),
    "broken turns": Damage(
        added("turns/ppo-1/0-h-7-a.json", lambda path: (path.parent.mkdir(parents=True, mode=0o700), path.parent.parent.chmod(0o700), told("{}")(path))),
        "damaged-turns",
    ),
    # the catalog
    "a catalog that is none": Damage(harmed(lambda store: store.catalog_path, told(b"junk" * 4000)), "damaged-catalog"),
    "a folder for the catalog's journal": Damage(
        harmed(lambda store: store.root / "catalog.db-wal", instead(Path.mkdir)), "damaged-catalog"
    ),
    "a row of a dump that is not there": Damage(sql("UPDATE dump SET seq_len = 4711 WHERE call_index = 3"), "stale-catalog"),
}  # fmt: skip
