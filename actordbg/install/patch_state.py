"""Which state a file is in, and whether a training job that started now would capture: `actordbg status`.

Everything but "overwritten by an upgrade" follows from the bytes on disk; that one needs the store's events as well:
the file has no trailer, yet its last event in this store is a patch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from actordbg.base.errors import EnvironmentProblem, StoreProblem
from actordbg.capture.control import read_control
from actordbg.install import patch_history as history
from actordbg.install import replace_file as files
from actordbg.install import trailer
from actordbg.install.patch_target import Copy, Target, ask
from actordbg.install.trailer import Inspection, State
from actordbg.store.layout import Store


@dataclass(frozen=True)
class Status:
    """A file's state, and whether a training job started now would capture.

    `hooked`: the interpreter sees the hook (None: it could not be asked). `enabled`: the store's dump switch. `armed`:
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
    """The target's state and whether it would capture; reads only."""
    old = files.read(target.path)
    found = trailer.inspect(old.data)
    chosen = Store(found.trailer.store) if found.trailer else store
    known = history.standing_patch(chosen, target.path)
    state, reason = found.state, found.reason
    if state is State.CLEAN and known:
        state, reason = State.OVERWRITTEN, overwritten(known, old)
    hooked = _hooked(target)
    enabled, notes = False, [*target.notes]
    try:
        control = read_control(Store(os.environ.get("ACTORDBG_STORE") or chosen.root))
        enabled = control is not None and control.enabled
    except StoreProblem as problem:
        notes.append(f"dumping is off: {problem.message}")
    disabled = os.environ.get("ACTORDBG_DISABLE", "") not in ("", "0")
    return Status(
        file=str(target.path),
        state=state,
        reason=reason,
        openrlhf_version=target.openrlhf_version,
        python=target.python,
        sha256=old.sha256,
        original_sha256=found.trailer.sha256 if found.trailer else None,
        store=found.trailer.store if found.trailer else None,
        hooked=hooked,
        enabled=enabled,
        armed=bool(hooked) and enabled and not disabled,
        patched_at=known.timestamp if known and found.trailer else None,
        copies=target.copies,
        notes=[*notes, *_status_notes(found, hooked, disabled)],
    )


def overwritten(known: history.Event, old: files.Snapshot) -> str:
    """The line that tells a user that a patch is gone, and how."""
    what = "the original is back" if old.sha256 == known.sha256_before else "another version was installed"
    return f"patched on {known.timestamp}, then overwritten without the trailer ({what})"


def _hooked(target: Target) -> bool | None:
    try:
        return bool(ask(target.python, "prove", str(target.path))["hooked"])
    except EnvironmentProblem:
        return None


def _status_notes(found: Inspection, hooked: bool | None, disabled: bool) -> list[str]:
    notes = []
    if found.trailer and hooked is False:
        notes.append("the interpreter does not see the hook: run `actordbg patch` for the reason")
    if not found.trailer and hooked:
        notes.append("the interpreter still sees the hook, through a .pyc: run `actordbg unpatch`")
    if found.trailer and disabled:
        notes.append("ACTORDBG_DISABLE is set: jobs started from this shell do not capture")
    if found.trailer and os.environ.get("ACTORDBG_STORE"):
        notes.append("ACTORDBG_STORE is set: jobs started from this shell capture into that store")
    return notes
