"""Turn the rings (flight-recorder buffers) of dead processes into dumps, and settle their counters.

A ring (`actordbg.formats.ringfile`) holds the inputs of a process's last calls, and of the call in flight, as they were when
it died. Each becomes a dump of the store, marked `recovered`:

    in_flight   the call ran when the process died, or it was the process's last call and raised
    recent      one of the calls before

A call that was already recorded keeps its file, with the mark in its record. Calls that waited in the ring to be written now
count as captured, for their trigger if one had fired; calls that are in no ring count as dropped, `killed`. So calls = captured +
dropped + sampled out also holds for a process that was killed, or that had no time to write everything.

Dumps are published first, then the counters, and the ring is removed last: recovering again after a crash in between gives the
same. A live process's ring is only read on request (a hang): then nothing is settled, and the ring stays.
"""

import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actordbg.base.errors import ActordbgError, CorruptDump, StoreProblem, Unsupported
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.encoding import record_of, serialize, tensors_in
from actordbg.formats.record_reading import parse_record
from actordbg.formats.recording_reading import RingFile, RingSlot, read_ring
from actordbg.formats.ringfile import (
    COUNTERS_FORMAT,
    DONE,
    OPEN,
    RAISED,
    head_bytes,
    host_name,
    is_held,
    place,
    remove_unfinished,
    ring_paths,
)
from actordbg.formats.store_files import TEMPORARY, atomic_write, processes, remove
from actordbg.records.run_files import read_counters
from actordbg.store import places
from actordbg.store.layout import Store
from actordbg.store.payload import widen_plain

IN_FLIGHT, RECENT = "in_flight", "recent"
"""`recovered` of a dump from a dead process's ring: the call was running, or it was one of the last calls."""
UNWRITTEN = "unwritten"
"""Shown for a call without such a mark: its process was ended on purpose, before it had written the call."""

LEFTOVER_AGE_S = 3600.0
"""A temporary file older than this belongs to a dead writer; a dead process of this machine is recognized at once."""
HINT = "run `actordbg dump recover --discard` to remove it"


@dataclass
class Recovered:
    """A dump from a ring. `recorded`: it had been written before. `error`: what the call raised, if it did."""

    dump_id: str
    recovered: str
    run: str
    rank: int
    role: str | None
    batch_size: int
    seq_len: int
    timestamp: str
    path: str
    recorded: bool
    error: str | None = None


@dataclass
class RingReport:
    """The result of recovering a ring. `problem`: why it could not be used. `killed`: selected calls that are lost."""

    path: str
    host: str
    pid: int
    alive: bool
    dumps: list[Recovered] = field(default_factory=list)
    killed: int = 0
    removed: bool = False
    problem: str | None = None


def find_rings(store: Store) -> list[Path]:
    """List the rings of a store on this machine: in the default places, and where switches and counters say."""
    from actordbg.capture.switch_file import read_control

    folders = {place(store), store.root / "rings"}
    for job in (None, *(path.stem for path in store.controls.glob("[!.]*.json"))):
        with contextlib.suppress(ActordbgError):
            control = read_control(store, job)
            if control is not None:
                folders.add(place(store, control.ring_dir))
    for folder in folders:
        remove_unfinished(folder)
    rings = {path for folder in folders for path in ring_paths(folder)}
    for path in store.counters.glob("*/[!.]*.json"):
        with contextlib.suppress(CorruptDump):
            data = read_counters(path)
            if data["host"] == host_name() and (named := (data.get("ring") or {}).get("path")) and Path(named).is_file():
                rings.add(Path(named))
    return sorted(rings)


def recover(store: Store, paths: Sequence[Path], *, live: bool = False) -> Iterator[RingReport]:
    """Recover rings one after another, after removing unfinished files of dead processes. A damaged ring is reported (`problem`)
    and stays; its undamaged calls are recovered.
    """
    remove_unfinished_files(store)
    for path in paths:
        report = RingReport(str(path), "", 0, False)
        try:
            ring = read_ring(path)
            report.host, report.pid, report.alive = (str(ring.facts.get("host")), int(ring.facts.get("pid", 0)), ring.alive)
            if live or not ring.alive:
                _recover(store, ring, report)
        except (ActordbgError, OSError) as error:
            if path.exists():
                report.problem = error.message if isinstance(error, ActordbgError) else str(error)
            else:  # another `dump recover` was quicker, or its process ended well
                report.removed = True
        yield report


def discard(store: Store, paths: Iterable[Path]) -> Iterator[RingReport]:
    """Remove rings of dead processes, and count the calls that only they had as lost."""
    for path in paths:
        report = RingReport(str(path), socket.gethostname(), 0, False)
        try:
            report.alive = is_held(path)
            if not report.alive:
                with contextlib.suppress(StoreProblem):
                    _settle_all(store, replace(read_ring(path), slots=[]), [], report)
                _remove(path, report)
        except OSError as error:
            report.problem = f"cannot discard {path}: {error.strerror}"
        yield report


def _recover(store: Store, ring: RingFile, report: RingReport) -> None:
    last = max((slot.sequence for slot in ring.slots), default=0)
    before = None if ring.ended_by_ray else RECENT  # nothing went wrong: recover only what it had no time to write
    marks = {
        slot.place: before if slot.state == DONE or (slot.state == RAISED and slot.sequence != last) else IN_FLIGHT
        for slot in ring.slots
    }
    ring.slots = [slot for slot in ring.slots if slot.book == OPEN or marks[slot.place]]
    written: list[int] = []
    for slot in ring.slots:
        try:
            recovered, nbytes = _dump(store, ring, slot, marks[slot.place])
        except CorruptDump as error:
            ring.damaged.append(error.message)
            continue
        report.dumps.append(recovered)
        written.append(nbytes if slot.book == OPEN else 0)
    if ring.alive:
        return  # what looks damaged was overwritten meanwhile
    if ring.damaged:
        more = f" ({len(ring.damaged)} calls in it are damaged)" if len(ring.damaged) > 1 else ""
        raise CorruptDump(ring.damaged[0] + more, hint=HINT)
    _settle_all(store, ring, written, report)
    _remove(ring.path, report)


def remove_unfinished_files(store: Store) -> None:
    """Remove the unfinished files of this machine's dead processes from a store."""
    folders = (
        store.root,
        store.controls,
        *store.counters.glob("*"),
        *store.dump_folders(),
        *store.packs.glob("*"),
    )
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for name in [entry.name for entry in entries if is_left_over(entry.name)]:
                with contextlib.suppress(OSError):
                    remove(folder / name)


def is_left_over(name: str) -> bool:
    """Return whether the writer of a file of this name is a dead process of this machine (and container, and boot)."""
    writers, _, rest = name.removeprefix(TEMPORARY).partition("-")
    pid = rest.partition("-")[0]
    if not name.startswith(TEMPORARY) or writers != processes() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
        text = Path(f"/proc/{pid}/stat").read_text()
        state = text.rpartition(")")[2].split()
        return state[0] in "ZX"  # killed, and not yet reaped
    except (ProcessLookupError, FileNotFoundError):
        return True
    except (OSError, OverflowError, IndexError):
        return False


def is_forsaken(name: str, state: os.stat_result) -> bool:
    """Return whether the writer of an unfinished file is dead: a dead process of this machine, or no write for an hour."""
    return is_left_over(name) or time.time() - state.st_mtime > LEFTOVER_AGE_S


def _settle_all(store: Store, ring: RingFile, written: list[int], report: RingReport) -> None:
    """Publish the final counters of a dead process whose calls became dump files of these sizes."""
    from actordbg.capture.ledger import Identity

    for books in ring.books.values():
        who = books.identity
        mine = [
            (slot, nbytes)
            for slot, nbytes in zip(ring.slots, written, strict=True)
            if all(slot.kind["fields"][name] == who[name] for name in ("run", "instance"))
        ]
        saved = [(slot, nbytes) for slot, nbytes in mine if slot.book == OPEN]
        triggers = Counter(slot.kept["triggered"] for slot, _ in saved if "triggered" in slot.kept)
        counts, killed = books.as_counters(), max(0, books.unresolved - len(saved))
        report.killed += killed
        names = ("run", "rank", "world_size", "host", "pid", "instance")
        path = Identity(*(counts.get(name) for name in names)).counters(store)  # type: ignore[arg-type]
        data: dict[str, Any] = {"generation": 0, "last_error": None}
        with contextlib.suppress(CorruptDump):
            data = read_counters(path)
        data |= counts
        if mine:
            data["role"] = mine[-1][0].kind["fields"].get("role")
        data |= {
            "format": COUNTERS_FORMAT,
            "state": ring.state_of(books),
            "heartbeat": now_timestamp(),
            "captured": counts["captured"] + min(len(saved), books.unresolved),
            "dropped": counts["dropped"] | ({"killed": killed} if killed else {}),
            "triggered": dict(triggers + Counter(counts["triggered"])),
            "bytes": counts["bytes"] + sum(nbytes for _, nbytes in saved),
            "pending": 0,
            "queue_bytes": 0,
            "ring": None,
        }
        atomic_write(path, json.dumps(data, sort_keys=True))


def _dump(store: Store, ring: RingFile, slot: RingSlot, mark: str | None) -> tuple[Recovered, int]:
    """Publish a slot as a dump, or mark its existing dump; return it with the size of its file. CorruptDump, and nothing is
    published, if the slot does not give a readable dump.
    """
    try:
        names, numbers, kept = slot.kind["tensors"], slot.numbers, slot.kept
        tensors = tensors_in(ring.bytes_at(slot.offset, slot.size), head_bytes(len(numbers)), numbers, names)
        record = record_of(
            slot.kind["fields"], numbers, tensors, ring.facts.get("versions", {}), recovered=mark,
            pinned=mark == IN_FLIGHT or "triggered" in kept, triggered=kept.get("triggered"), trigger_facts=slot.end,
            rng=kept.get("rng", {}),
        )  # fmt: skip
        record = parse_record(record.to_json())
        path, existing, packed = store.dump_path(record), None, None
        with contextlib.suppress(StoreProblem):
            existing = dumpfile.read_payload(path) if path.is_file() else None
        if existing is None:
            in_packs = (Path(places.packed_place(str(pack), record.dump_id)) for pack in store.iter_packs(record.run))
            packed = next(filter(places.is_there, in_packs), None)
        if existing is not None:
            before, data = existing
            record = replace(
                before, recovered=mark, pinned=before.pinned or record.pinned, triggered=before.triggered or record.triggered,
                trigger_facts=before.trigger_facts or slot.end,
            )  # fmt: skip
        else:
            record, data = serialize(record, tensors)
            widen_plain(record, data, record.dump_id)  # what cannot be read must not be published
        blob = dumpfile.pack(record, data)
    except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError, Unsupported) as error:
        raise CorruptDump(f"{ring.path}: a call in it is damaged: {error}", hint=HINT) from None
    if ring.alive and not ring.still_has(slot):
        raise CorruptDump(f"{ring.path}: its process overwrote a call", hint="")
    if packed is None:
        if existing is not None and store.catalog_path.exists():
            # before the file is replaced, so that the next `index` reads it, even if we are killed right afterwards
            from actordbg.catalog.indexer import forget_dumps

            with contextlib.suppress(ActordbgError):  # a read-only catalog must not stop the recovery of a call
                forget_dumps(store, [record.dump_id], [store.relative(path.parent)])
        store.publish_dump(record, blob)
    path = packed or path  # packs are immutable: the dump is there, without the mark
    recorded = existing is not None or packed is not None
    raised = f"{slot.end['error']}: {slot.end.get('message', '')}" if "error" in slot.end else None
    shown = {name: getattr(record, name) for name in ("run", "rank", "role", "batch_size", "seq_len", "timestamp")}
    path_below = store.relative(path)
    return Recovered(record.dump_id, mark or UNWRITTEN, **shown, path=path_below, recorded=recorded, error=raised), len(blob)


def _remove(path: Path, report: RingReport) -> None:
    """Remove a ring, and its folder if nothing else lies there."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    report.removed = True
