"""patch and unpatch: combine the pure trailer, the file on disk, the interpreter and the store.

`patch` either ends with the target interpreter seeing the hook, or leaves the file unchanged. `unpatch` restores the
original (bytes, mode and modification time), or the user's edit of it without the trailer, or refuses. Both may be
repeated: "already patched" and "not patched" are not errors.

    target = find_target()
    patch(target, Store("store")).action      # "patched"; a second time "already patched"
    unpatch(target).action                    # "unpatched"; a second time "not patched"

Decisions: a patched file whose trailer names another store or comes from another actordbg version gets a new trailer
(action "trailer renewed"); an edited file does not, since its original is no longer known. A proof that fails undoes
the patch. A folder whose fsync fails does not: the file is patched, and a note says what a power cut may do. If undoing fails
as well, the error says so.

A file's state (`inspect_target`) follows from its bytes alone, and so does its original: nothing is kept elsewhere.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from actordbg import __version__
from actordbg.base.errors import Conflict, EnvironmentProblem, StoreProblem, Unsupported
from actordbg.capture.switch_file import read_control
from actordbg.install import replace_file as files, trailer
from actordbg.install.patch_target import Copy, Target, ask, require_hook, require_seen
from actordbg.install.trailer import State
from actordbg.store.layout import Store
from actordbg.trainers.find_adapter import host_of
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
    dry_run: bool = False
    diff: str = ""
    notes: list[str] = field(default_factory=list)


def patch(target: Target, store: Store, *, dry_run: bool = False) -> Outcome:
    """Append the trailer to the target, and prove that its interpreter sees it.

    Raises EnvironmentProblem (the interpreter cannot import the hook, the folder cannot be written), Unsupported (no
    Actor), Conflict (edited, hidden by a .pyc, changed meanwhile); after any of these the file is unchanged.
    """
    require_hook(target.python)
    with files.locked(target.path):
        old = files.read(target.path)
        inspection, root = _supported(target, old), str(store.root)
        here = inspection.trailer is not None and inspection.trailer.store == root
        if inspection.state is State.EDITED and not (here and inspection.source is not None):
            keeps = "run `actordbg unpatch` (it keeps the edit), then `actordbg patch`"
            hint = trailer.remedy(old.data) if inspection.source is None else keeps
            raise Conflict(f"{old.path} is left as it is: {inspection.reason}", hint=hint)
        hard_linked = "the file is hard-linked: its other names (caches, environments) keep the original"
        links = [hard_linked] if old.stat.st_nlink > 1 else []
        if here and inspection.trailer and (inspection.state is State.EDITED or inspection.trailer.actordbg == __version__):
            outcome = _outcome(target, old, dry_run, "already patched", inspection.state, store=root, notes=links)
            if not dry_run:
                require_seen(target.python, target.path, root)
            outcome.notes.extend(filter(None, [inspection.reason]))
            return outcome
        mtime_ns: int | None = old.stat.st_mtime_ns
        action, source = "patched", old.data
        if inspection.trailer and inspection.source is not None:
            action, source, mtime_ns = "trailer renewed", inspection.source, inspection.trailer.mtime_ns
        data = trailer.append(source, root, mtime_ns=mtime_ns, adapter=host_of(target.path))
        outcome = _outcome(target, old, dry_run, action, State.PATCHED, store=root, notes=links, data=data)
        if dry_run:
            return outcome
        store.create()
        with files.replaced(old, data, way_out=WITHOUT_A_PATCH) as notes:
            require_seen(target.python, target.path, root)
        outcome.notes.extend(notes)
        return outcome


def unpatch(target: Target, *, dry_run: bool = False) -> Outcome:
    """Remove the trailer: restore the original with its modification time, or keep the user's edit without the trailer.

    Raises Conflict if the cut would be guesswork (the file is unchanged), or if a .pyc still holds the hook.
    """
    with files.locked(target.path):
        old = files.read(target.path)
        inspection = _supported(target, old)
        if inspection.source is None:
            raise Conflict(f"{target.path} is left as it is: {inspection.reason}", hint=trailer.remedy(old.data))
        if inspection.trailer is None:
            outcome = _outcome(target, old, dry_run, "not patched", State.CLEAN)
        else:
            edited = inspection.state is State.EDITED
            kept = [f"{inspection.reason}: that edit is kept, only the trailer was cut off"] if edited else []
            was, data = inspection.trailer.store, inspection.source
            outcome = _outcome(target, old, dry_run, "unpatched", State.CLEAN, store=was, notes=kept, data=data)
            if not dry_run:
                mtime_ns = None if edited else inspection.trailer.mtime_ns
                with files.replaced(old, inspection.source, mtime_ns=mtime_ns) as notes:
                    pass
                outcome.notes.extend(notes)
        if not dry_run:  # errors from here on undo nothing; only a .pyc that still holds the hook is a Conflict
            try:
                require_seen(target.python, target.path, None)
            except EnvironmentProblem as problem:
                outcome.notes.append(f"not checked what the interpreter sees: {problem.message}")
        return outcome


def _supported(target: Target, old: files.FileRead) -> trailer.Inspection:
    """Inspect the target's bytes. Raises Unsupported, with its path, if they are not an actor.py."""
    inspection = trailer.inspect(old.data)
    if inspection.state is State.UNSUPPORTED:
        hint = f"name {TRAINER.name}'s own file with --target .../{TRAINER.actor_file}; `actordbg adapters` has other trainers"
        raise Unsupported(f"{target.path}: {inspection.reason}", hint=hint)
    return inspection


def _outcome(
    target: Target, old: files.FileRead, dry_run: bool, action: str, state: State, *, store: str | None = None,
    notes: Sequence[str] = (), data: bytes | None = None,
) -> Outcome:  # fmt: skip
    """Build the Outcome, with a diff if `dry_run`. `data`: the file's new bytes; None if it stays."""
    file, after, diff = str(target.path), old.data if data is None else data, ""
    if dry_run:
        name = file.lstrip("/")
        mine, new = (text.decode("utf-8", "backslashreplace").splitlines() for text in (old.data, after))
        diff = "\n".join(difflib.unified_diff(mine, new, f"a/{name}", f"b/{name}", lineterm=""))
    return Outcome(
        action, file, state, store, old.sha256, trailer.sha256_of(after), python=target.python,
        openrlhf_version=target.trainer_version, dry_run=dry_run, diff=diff, notes=[*target.notes, *notes],
    )  # fmt: skip


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
    copies: list[Copy]
    notes: list[str]


def inspect_target(target: Target, store: Store) -> Status:
    """Return the target's state and whether it would capture. Only reads."""
    old = files.read(target.path)
    inspection = trailer.inspect(old.data)
    chosen = Store(inspection.trailer.store) if inspection.trailer else store
    try:
        hooked = bool(ask(target.python, "prove", str(target.path))["hooked"])
    except EnvironmentProblem:
        hooked = None
    enabled, notes = False, [*target.notes]
    try:
        control = read_control(Store(os.environ.get("ACTORDBG_STORE") or chosen.root))
        enabled = control is not None and control.enabled
    except StoreProblem as problem:
        notes.append(f"recording is off: {problem.message}")
    there, disabled = inspection.trailer, os.environ.get("ACTORDBG_DISABLE", "") not in ("", "0")
    if there and hooked is False:
        notes.append("the interpreter does not see the hook: run `actordbg patch` for the reason")
    if not there and enabled and not hooked:
        notes.append("recording is on, but this file has no hook (an upgrade removes it): only `actordbg run` records jobs here")
    if not there and hooked:
        notes.append("the interpreter still sees the hook, through a .pyc: run `actordbg unpatch`")
    if there and disabled:
        notes.append("ACTORDBG_DISABLE is set: jobs started from this shell do not capture")
    if there and os.environ.get("ACTORDBG_STORE"):
        notes.append("ACTORDBG_STORE is set: jobs started from this shell capture into that store")
    return Status(
        file=str(target.path), state=inspection.state, reason=inspection.reason, openrlhf_version=target.trainer_version,
        python=target.python,
        sha256=old.sha256, original_sha256=there.sha256 if there else None, store=there.store if there else None, hooked=hooked,
        enabled=enabled, armed=bool(hooked) and enabled and not disabled, copies=target.copies, notes=notes,
    )  # fmt: skip
