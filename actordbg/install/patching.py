"""patch and unpatch: combine the pure trailer, the file on disk, the interpreter and the store.

`patch` either ends with the target interpreter seeing the hook, or leaves the file unchanged. `unpatch` restores the
original (bytes, mode and modification time), or the user's edit of it without the trailer, or refuses. Both may be
repeated: "already patched" and "not patched" are not errors.

    target = find_target()
    patch(target, Store("store")).action      # "patched"; a second time "already patched"
    unpatch(target, Store("store")).action    # "unpatched"; a second time "not patched"

Decisions: a patched file whose trailer names another store or comes from another actordbg version gets a new trailer
(action "trailer renewed"); an edited file does not, since its original is no longer known. A proof that fails undoes
the patch, and so does an event that cannot be recorded. A folder whose fsync fails does not: the file is patched, the event
says so, and a note says what a power cut may do. If undoing fails as well, the error says so, and an event is recorded.

What the store keeps. Unpatching needs neither, since the patched file holds everything:

    store/backups/<sha256>/actor.py + origin.json    the original of a patched file, written before the file is changed
    store/events/<utc>-<pid>-<rand>.json             an immutable file for each patch or unpatch, written when it is proven

A file's state (`inspect_target`) follows from its bytes on disk, except "overwritten by an upgrade": the file has no trailer, yet
its last event in this store is a patch.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import json
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from actordbg import __version__
from actordbg.base.errors import ActordbgError, Conflict, EnvironmentProblem, StaysChanged, StoreProblem, Unsupported
from actordbg.capture.control import read_control
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import atomic_write, read_regular
from actordbg.install import replace_file as files
from actordbg.install import trailer
from actordbg.install.patch_target import Copy, Target, ask, require_hook, require_seen
from actordbg.install.trailer import Inspection, State
from actordbg.store.layout import Store
from actordbg.trainers.trainer import TRAINER

EVENT_FORMAT = 1
WITHOUT_A_PATCH = "`actordbg run -- COMMAND` records a job without a patch"


@dataclass(frozen=True)
class Outcome:
    """What `patch` or `unpatch` did, or with `dry_run` would do (`diff` shows it). Hashes are of the file's bytes."""

    action: str
    file: str
    state: State
    store: str | None
    sha256_before: str
    sha256_after: str
    python: str
    openrlhf_version: str | None
    backup: str | None = None
    dry_run: bool = False
    diff: str = ""
    notes: list[str] = field(default_factory=list)

    def event(self, name: str) -> Event:
        """Build the event to record, named "patch" or "unpatch"."""
        return Event(
            name, now_timestamp(), self.file, self.sha256_before, self.sha256_after, self.python, self.openrlhf_version,
            __version__, socket.gethostname(),
        )  # fmt: skip


@dataclass(frozen=True)
class Event:
    """A patch or unpatch of a file on a host. `timestamp` is ISO-8601 UTC; the hashes are the file's."""

    event: str
    timestamp: str
    target: str
    sha256_before: str
    sha256_after: str
    python: str
    openrlhf_version: str | None
    actordbg_version: str
    host: str
    format: int = EVENT_FORMAT


def patch(target: Target, store: Store, *, dry_run: bool = False) -> Outcome:
    """Append the trailer to the target, prove that its interpreter sees it, and record the event.

    Raises EnvironmentProblem (the interpreter cannot import the hook, the folder cannot be written), Unsupported (no
    Actor), Conflict (edited, hidden by a .pyc, changed meanwhile); after any of these the file is unchanged.
    """
    require_hook(target.python)
    with files.locked(target.path):
        old = files.read(target.path)
        inspection, root = trailer.inspect(old.data), str(store.root)
        here = inspection.trailer is not None and inspection.trailer.store == root
        if inspection.state is State.EDITED and not (here and inspection.source is not None):
            keeps = "run `actordbg unpatch` (it keeps the edit), then `actordbg patch`"
            hint = _remedy(inspection, old.data) if inspection.source is None else keeps
            raise Conflict(f"{old.path} is left as it is: {inspection.reason}", hint=hint)
        hard_linked = "the file is hard-linked: its other names (caches, environments) keep the original"
        links = [hard_linked] if old.stat.st_nlink > 1 else []
        if here and inspection.trailer and (inspection.state is State.EDITED or inspection.trailer.actordbg == __version__):
            outcome = _outcome(target, old, dry_run, "already patched", inspection.state, root, links)
            if not dry_run:
                require_seen(target.python, target.path, root)
                if not standing_patch(store, target.path):  # an earlier patch could not record it
                    outcome.notes.extend(
                        _noted(replace(outcome, sha256_before=inspection.trailer.sha256).event("patch"), [store])
                    )
            outcome.notes.extend(filter(None, [inspection.reason]))
            return outcome
        mtime_ns: int | None = old.stat.st_mtime_ns
        action, source = "patched", old.data
        if inspection.trailer and inspection.source is not None:
            action, source, mtime_ns = "trailer renewed", inspection.source, inspection.trailer.mtime_ns
        data = trailer.append(source, root, mtime_ns=mtime_ns)
        outcome = _outcome(target, old, dry_run, action, State.PATCHED, root, links, data)
        if dry_run:
            return outcome
        store.create()
        facts = {
            "format": 1, "target": outcome.file, "sha256": trailer.sha256_of(source), "length": len(source),
            "mode": stat.S_IMODE(old.stat.st_mode), "mtime_ns": mtime_ns, "uid": old.stat.st_uid, "gid": old.stat.st_gid,
            "openrlhf_version": target.trainer_version, "python": target.python, "timestamp": now_timestamp(),
        }  # fmt: skip
        outcome = replace(outcome, backup=str(back_up(store, source, facts)))
        event = outcome.event("patch")
        with _reporting_failed_undo(event, store), files.replaced(old, data, way_out=WITHOUT_A_PATCH) as notes:
            require_seen(target.python, target.path, root)
            record(store, event)
        outcome.notes.extend(notes)
        if inspection.trailer and not here:
            outcome.notes.extend(_noted(outcome.event("unpatch"), filter(Store.exists, [Store(inspection.trailer.store)])))
        return outcome


def unpatch(target: Target, store: Store, *, dry_run: bool = False) -> Outcome:
    """Remove the trailer: restore the original with its modification time, or keep the user's edit without the trailer.

    Raises Conflict if the cut would be guesswork (the file is unchanged), or if a .pyc still holds the hook.
    """
    with files.locked(target.path):
        old = files.read(target.path)
        inspection = trailer.inspect(old.data)
        if inspection.state is State.UNSUPPORTED:
            raise Unsupported(f"{target.path}: {inspection.reason}", hint=f"name {TRAINER.name}'s actor.py with --target")
        if inspection.source is None:
            raise Conflict(f"{target.path} is left as it is: {inspection.reason}", hint=_remedy(inspection, old.data))
        if inspection.trailer is None:
            known = standing_patch(store, target.path)
            gone = [overwritten(known, old)] if known else []
            outcome, stores = _outcome(target, old, dry_run, "not patched", State.CLEAN, None, gone), [store] if known else []
        else:
            there = Store(inspection.trailer.store)
            edited = inspection.state is State.EDITED
            kept = [f"{inspection.reason}: that edit is kept, only the trailer was cut off"] if edited else []
            outcome = _outcome(target, old, dry_run, "unpatched", State.CLEAN, inspection.trailer.store, kept, inspection.source)
            if not dry_run:
                mtime_ns = None if edited else inspection.trailer.mtime_ns
                reporting = _reporting_failed_undo(outcome.event("unpatch"), there)
                with reporting, files.replaced(old, inspection.source, mtime_ns=mtime_ns) as notes:
                    pass
                outcome.notes.extend(notes)
            stores = [there, store]
        if not dry_run:  # errors from here on undo nothing; only a .pyc that still holds the hook is a Conflict
            outcome.notes.extend(_noted(outcome.event("unpatch"), filter(Store.exists, stores)))
            try:
                require_seen(target.python, target.path, None)
            except EnvironmentProblem as problem:
                outcome.notes.append(f"not checked what the interpreter sees: {problem.message}")
        return outcome


@contextlib.contextmanager
def _reporting_failed_undo(event: Event, store: Store) -> Iterator[None]:
    """Record a change that failed and could not be undone, and raise StaysChanged with the state of the file."""
    try:
        yield
    except StaysChanged as problem:
        state = "patched" if event.event == "patch" else "without the hook"
        recorded = "or unchanged: it could not be read"
        if problem.seen:
            recorded = "no event could be recorded" if _noted(event, [store]) else "the event is recorded"
        raise StaysChanged(f"{event.target} stays {state} ({recorded}): {problem.message}", hint=problem.hint) from None


def _noted(event: Event, stores: Iterable[Store]) -> list[str]:
    """Record an event in the first of these stores; return a note for the user if that fails."""
    try:
        for store in itertools.islice(stores, 1):
            record(store, event)
    except (ActordbgError, OSError) as problem:
        return [f"the event is not recorded: {problem.message if isinstance(problem, ActordbgError) else problem.strerror}"]
    return []


def _outcome(
    target: Target, old: files.FileRead, dry_run: bool, action: str, state: State, store: str | None, notes: list[str],
    data: bytes | None = None,
) -> Outcome:  # fmt: skip
    """Build the Outcome, with a diff if `dry_run`. `data`: the file's new bytes; None if it stays."""
    file, after, diff = str(target.path), old.data if data is None else data, ""
    if dry_run:
        name = file.lstrip("/")
        mine, new = (text.decode("utf-8", "backslashreplace").splitlines() for text in (old.data, after))
        diff = "\n".join(difflib.unified_diff(mine, new, f"a/{name}", f"b/{name}", lineterm=""))
    return Outcome(
        action, file, state, store, old.sha256, trailer.sha256_of(after), target.python, target.trainer_version,
        dry_run=dry_run, diff=diff, notes=[*target.notes, *notes],
    )  # fmt: skip


def _remedy(inspection: Inspection, data: bytes) -> str:
    """Say how to repair a damaged trailer, and name the trailer's backup if it has exactly the original's bytes."""
    hint = trailer.remedy(data)
    with contextlib.suppress(OSError):
        if inspection.trailer is not None:
            path = Store(inspection.trailer.store).backups / inspection.trailer.sha256 / "actor.py"
            if trailer.sha256_of(read_regular(path)) == inspection.trailer.sha256:
                return f"{hint}; the original: {path}"
    return hint


# --- what the store keeps -------------------------------------------------------------------------------------------------


def back_up(store: Store, original: bytes, facts: dict[str, Any]) -> Path:
    """Keep `original` under its hash, with `facts` on where it came from, and return its path."""
    path = store.backups / trailer.sha256_of(original) / "actor.py"
    _write(path, original)
    _write(path.with_name("origin.json"), json.dumps(facts, indent=2).encode() + b"\n")
    return path


def record(store: Store, event: Event) -> Path:
    """Write an event file and return its path; its name sorts by time. If that fails or is interrupted, no file is left."""
    stamp = event.timestamp.replace("-", "").replace(":", "")
    path = store.events / f"{stamp}-{os.getpid()}-{os.urandom(4).hex()}.json"
    try:
        _write(path, json.dumps(asdict(event)).encode() + b"\n")
    except BaseException:  # the caller undoes the change
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise
    return path


def events(store: Store, target: Path | None = None) -> list[Event]:
    """Read all events of the store, or those of one file, oldest first; files of another format are skipped."""
    matches = []
    for path in sorted(store.events.glob("[!.]*.json")):
        try:
            event = Event(**json.loads(read_regular(path)))
        except (OSError, ValueError, TypeError):
            continue
        if event.format == EVENT_FORMAT and target in (None, Path(event.target)):
            matches.append(event)
    return matches


def standing_patch(store: Store, target: Path) -> Event | None:
    """Return this file's last patch on this host, if no unpatch followed it. Hosts may share a store, not their disks."""
    known = [event for event in events(store, target) if event.host == socket.gethostname()]
    return known[-1] if known and known[-1].event == "patch" else None


def _write(path: Path, data: bytes) -> None:
    with contextlib.suppress(OSError):
        if read_regular(path) == data:
            return
    try:
        atomic_write(path, data)
    except OSError as error:
        raise StoreProblem(
            f"cannot write {path}: {error.strerror}", hint="name a store that you can write to, with --store DIR"
        ) from None


@dataclass(frozen=True)
class Status:
    """A file's state, and whether a training job started now would capture.

    `hooked`: the interpreter sees the hook (None: it did not run). `enabled`: the store's dump switch. `armed`:
    hooked, enabled and not ACTORDBG_DISABLE. `store` and `original_sha256` are the trailer's; None without one.
    """

    file: str
    state: State
    reason: str
    openrlhf_version: str | None
    python: str
    sha256: str
    original_sha256: str | None
    store: str | None
    hooked: bool | None
    enabled: bool
    armed: bool
    patched_at: str | None
    copies: list[Copy]
    notes: list[str]


def inspect_target(target: Target, store: Store) -> Status:
    """Return the target's state and whether it would capture. Only reads."""
    old = files.read(target.path)
    inspection = trailer.inspect(old.data)
    chosen = Store(inspection.trailer.store) if inspection.trailer else store
    known = standing_patch(chosen, target.path)
    state, reason = inspection.state, inspection.reason
    if state is State.CLEAN and known:
        state, reason = State.OVERWRITTEN, overwritten(known, old)
    try:
        hooked = bool(ask(target.python, "prove", str(target.path))["hooked"])
    except EnvironmentProblem:
        hooked = None
    enabled, notes = False, [*target.notes]
    try:
        control = read_control(Store(os.environ.get("ACTORDBG_STORE") or chosen.root))
        enabled = control is not None and control.enabled
    except StoreProblem as problem:
        notes.append(f"dumping is off: {problem.message}")
    there, disabled = inspection.trailer, os.environ.get("ACTORDBG_DISABLE", "") not in ("", "0")
    if there and not known:
        notes.append(f"no event in {there.store} records this patch: run `actordbg patch` to record it")
    if there and hooked is False:
        notes.append("the interpreter does not see the hook: run `actordbg patch` for the reason")
    if not there and hooked:
        notes.append("the interpreter still sees the hook, through a .pyc: run `actordbg unpatch`")
    if there and disabled:
        notes.append("ACTORDBG_DISABLE is set: jobs started from this shell do not capture")
    if there and os.environ.get("ACTORDBG_STORE"):
        notes.append("ACTORDBG_STORE is set: jobs started from this shell capture into that store")
    return Status(
        file=str(target.path), state=state, reason=reason, openrlhf_version=target.trainer_version, python=target.python,
        sha256=old.sha256, original_sha256=there.sha256 if there else None, store=there.store if there else None, hooked=hooked,
        enabled=enabled, armed=bool(hooked) and enabled and not disabled,
        patched_at=known.timestamp if known and there else None, copies=target.copies, notes=notes,
    )  # fmt: skip


def overwritten(known: Event, old: files.FileRead) -> str:
    """Say that a patch was overwritten, and by what."""
    what = "the original is back" if old.sha256 == known.sha256_before else "another version was installed"
    return f"patched on {known.timestamp}, then overwritten without the trailer ({what})"
