"""patch and unpatch: the pure trailer, the file on disk, the interpreter and the store put together.

`patch` either ends with the target interpreter seeing the hook, or leaves the file as it was. `unpatch` gives back the
original (bytes, mode and modification time), or the user's edit of it without the trailer, or refuses. Both may be
repeated; what is already so is said and is no error.

    target = find_target()
    patch(target, Store("store")).action      # "patched"; a second time "already patched"
    unpatch(target, Store("store")).action    # "unpatched"; a second time "not patched"

Decisions: a patched file whose trailer names another store or comes from another actordbg version gets a new trailer
(action "trailer renewed"); an edited one does not, since its original is no longer known. A proof that fails undoes
the patch, and so does an event that cannot be recorded. A folder whose fsync fails does not: the file is patched, the event
says so, and a note says what a power cut may do. If undoing fails as well, the error says so, and an event is recorded.
"""

from __future__ import annotations

import difflib
import itertools
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from actordbg import __version__
from actordbg.base.errors import ActordbgError, Conflict, EnvironmentProblem, StaysChanged, Unsupported
from actordbg.install import patch_state, trailer
from actordbg.install import replace_file as files
from actordbg.install.patch_target import Target, require_clean, require_hook, require_hooked
from actordbg.install.trailer import Inspection, State
from actordbg.store.layout import Store
from actordbg.trainers.trainer import TRAINER

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


def patch(target: Target, store: Store, *, dry_run: bool = False) -> Outcome:
    """Append the trailer to the target, prove that its interpreter sees it, and record the event.

    Raises EnvironmentProblem (the interpreter cannot import the hook, the folder cannot be written), Unsupported (no
    Actor), Conflict (edited, hidden by a .pyc, changed meanwhile); the file is untouched after each of them.
    """
    require_hook(target.python)
    with files.locked(target.path):
        old = files.read(target.path)
        found = trailer.inspect(old.data)
        action, source, mtime_ns = _plan_patch(found, old, store)
        outcome = _outcome(target, old, action, State.PATCHED, str(store.root), dry_run)
        if old.stat.st_nlink > 1:
            outcome.notes.append("the file is hard-linked: its other names (caches, environments) keep the original")
        if source is None:
            if not dry_run:
                require_hooked(target.python, target.path, str(store.root))
                if found.trailer and not patch_state.standing_patch(store, target.path):  # an earlier patch could not record it
                    missing = _event("patch", target, replace(outcome, sha256_before=found.trailer.sha256))
                    outcome.notes.extend(_noted(missing, [store]))
            reasons = [found.reason] if found.reason else []
            return replace(outcome, state=found.state, notes=[*outcome.notes, *reasons])
        data = trailer.append(source, str(store.root), mtime_ns=mtime_ns)
        outcome = _with_change(outcome, old.data, data)
        if dry_run:
            return outcome
        store.create()
        backup = _back_up(store, target, old, source, mtime_ns)
        event = _event("patch", target, outcome)
        with _told_if_it_stays(event, store), files.replaced(old, data, way_out=WITHOUT_A_PATCH) as notes:
            require_hooked(target.python, target.path, str(store.root))
            patch_state.record(store, event)
        outcome.notes.extend(notes)
        if found.trailer and found.trailer.store != str(store.root):
            outcome.notes.extend(_noted(_event("unpatch", target, outcome), filter(Store.exists, [Store(found.trailer.store)])))
        return replace(outcome, backup=str(backup))


def unpatch(target: Target, store: Store, *, dry_run: bool = False) -> Outcome:
    """Cut the trailer off: the original with its modification time, or the user's edit without it.

    Raises Conflict where the cut would be guesswork (the file is untouched) and where a .pyc still holds the hook.
    """
    with files.locked(target.path):
        old = files.read(target.path)
        found = trailer.inspect(old.data)
        if found.state is State.UNSUPPORTED:
            raise Unsupported(f"{target.path}: {found.reason}", hint=f"name {TRAINER.name}'s actor.py with --target")
        if found.source is None:
            raise Conflict(f"{target.path} is left as it is: {found.reason}", hint=_remedy(found, old.data))
        if found.trailer is None:
            return _nothing_to_cut(target, old, store, dry_run)
        outcome = _outcome(target, old, "unpatched", State.CLEAN, found.trailer.store, dry_run)
        outcome = _with_change(outcome, old.data, found.source)
        if found.state is State.EDITED:
            outcome.notes.append(f"{found.reason}: that edit is kept, only the trailer was cut off")
        if not dry_run:
            mtime_ns = found.trailer.mtime_ns if found.state is State.PATCHED else None
            told = _told_if_it_stays(_event("unpatch", target, outcome), Store(found.trailer.store))
            with told, files.replaced(old, found.source, mtime_ns=mtime_ns) as notes:
                pass
            outcome.notes.extend(notes)
            outcome.notes.extend(_after_unpatch(target, outcome, [Store(found.trailer.store), store]))
        return outcome


def _plan_patch(found: Inspection, old: files.FileRead, store: Store) -> tuple[str, bytes | None, int | None]:
    """The action, the text to append to (None: nothing to do) and the modification time to remember for it."""
    same_store = found.trailer is not None and found.trailer.store == str(store.root)
    if found.state is State.PATCHED and found.trailer:
        if same_store and found.trailer.actordbg == __version__:
            return "already patched", None, None
        return "trailer renewed", found.source, found.trailer.mtime_ns
    if found.state is State.EDITED:
        if found.source is not None and same_store:
            return "already patched", None, None
        hint = "run `actordbg unpatch` (it keeps the edit), then `actordbg patch`"
        if found.source is None:
            hint = _remedy(found, old.data)
        raise Conflict(f"{old.path} is left as it is: {found.reason}", hint=hint)
    return "patched", old.data, old.stat.st_mtime_ns


@contextmanager
def _told_if_it_stays(event: patch_state.Event, store: Store) -> Iterator[None]:
    """Where a change failed and could not be undone: record it, and say how the file stands."""
    try:
        yield
    except StaysChanged as problem:
        state = "patched" if event.event == "patch" else "without the hook"
        told = "or as before: it could not be looked at"
        if problem.seen:
            told = "no event could be recorded" if _noted(event, [store]) else "the event is recorded"
        raise StaysChanged(f"{event.target} stays {state} ({told}): {problem.message}", hint=problem.hint) from None


def _noted(event: patch_state.Event, stores: Iterable[Store]) -> list[str]:
    """Record an event in the first of these stores; a note where that cannot be."""
    try:
        for store in itertools.islice(stores, 1):
            patch_state.record(store, event)
    except (ActordbgError, OSError) as problem:
        return [f"the event is not recorded: {problem.message if isinstance(problem, ActordbgError) else problem.strerror}"]
    return []


def _nothing_to_cut(target: Target, old: files.FileRead, store: Store, dry_run: bool) -> Outcome:
    outcome = _outcome(target, old, "not patched", State.CLEAN, None, dry_run)
    known = patch_state.standing_patch(store, target.path)
    if known:
        outcome.notes.append(patch_state.overwritten(known, old))
    if not dry_run:
        outcome.notes.extend(_after_unpatch(target, outcome, [store] if known else []))
    return outcome


def _after_unpatch(target: Target, outcome: Outcome, stores: list[Store]) -> list[str]:
    """Check that the interpreter no longer sees the hook and record the event; what goes wrong here undoes nothing.

    Conflict if a .pyc still holds the hook. An interpreter or store that is gone is only worth a note.
    """
    notes = _noted(_event("unpatch", target, outcome), filter(Store.exists, stores))
    try:
        require_clean(target.python, target.path)
    except EnvironmentProblem as problem:
        notes.append(f"not checked what the interpreter sees: {problem.message}")
    return notes


def _back_up(store: Store, target: Target, old: files.FileRead, source: bytes, mtime_ns: int | None) -> Path:
    sha256 = trailer.sha256_of(source)
    facts = {
        "format": 1,
        "target": str(target.path),
        "sha256": sha256,
        "length": len(source),
        "mode": stat.S_IMODE(old.stat.st_mode),
        "mtime_ns": mtime_ns,
        "uid": old.stat.st_uid,
        "gid": old.stat.st_gid,
        "openrlhf_version": target.trainer_version,
        "python": target.python,
        "timestamp": patch_state.now(),
    }
    return patch_state.back_up(store, source, sha256, facts)


def _outcome(target: Target, old: files.FileRead, action: str, state: State, store: str | None, dry_run: bool) -> Outcome:
    return Outcome(
        action=action,
        file=str(target.path),
        state=state,
        store=store,
        sha256_before=old.sha256,
        sha256_after=old.sha256,
        python=target.python,
        openrlhf_version=target.trainer_version,
        dry_run=dry_run,
        notes=target.notes,
    )


def _with_change(outcome: Outcome, before: bytes, after: bytes) -> Outcome:
    diff = ""
    if outcome.dry_run:
        old, new = (data.decode("utf-8", "backslashreplace").splitlines() for data in (before, after))
        name = outcome.file.lstrip("/")
        diff = "\n".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm=""))
    return replace(outcome, sha256_after=trailer.sha256_of(after), diff=diff)


def _event(name: str, target: Target, outcome: Outcome) -> patch_state.Event:
    return patch_state.Event(
        event=name,
        timestamp=patch_state.now(),
        target=outcome.file,
        sha256_before=outcome.sha256_before,
        sha256_after=outcome.sha256_after,
        python=target.python,
        openrlhf_version=target.trainer_version,
        actordbg_version=__version__,
        host=socket.gethostname(),
    )


def _remedy(found: Inspection, data: bytes) -> str:
    backup = patch_state.original_of(found)
    return trailer.remedy(data) + (f"; the original: {backup}" if backup else "")
