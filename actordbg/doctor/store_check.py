"""What actordbg itself left on this machine: the store, its catalog, the dump switch, the patch of actor.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from actordbg.base.errors import ActordbgError
from actordbg.base.foreign_text import in_shell
from actordbg.base.owners import is_own, name_of
from actordbg.capture.control import DEFAULT_FREE_FLOOR, read_control
from actordbg.catalog import connections as engine
from actordbg.catalog import migrate, private_catalog
from actordbg.config.replay_config import SETTINGS
from actordbg.config.sources import find_file, from_environment, own_file
from actordbg.doctor import machine_check as machine
from actordbg.doctor.check import Check, Environment, bad, ok, warn
from actordbg.install.patch_target import find_target
from actordbg.install.patching import Status, inspect_target
from actordbg.install.trailer import State
from actordbg.store.layout import Store
from actordbg.trainers.trainer import TRAINER

PRIVATE = 0o077
"""Permission bits that nobody but the owner should have on a store: dumps hold training data."""


def check(env: Environment, store: Store) -> Iterator[Check]:
    """Store, disk, catalog, dump switch, settings of replays and patch, in this order."""
    yield _made("store", lambda: _store(store))
    yield machine.disk(store.root, _floor(store))
    yield _made("catalog", lambda: _catalog(store))
    yield _made("dumping", lambda: _control(store))
    for name, look in (("settings file", _file), ("replay settings", _settings)):
        if (found := _made(name, look)) is not None:
            yield found
    yield _made("patch", lambda: _patch(env, store))


T = TypeVar("T")


def _made(name: str, look: Callable[[], T]) -> T | Check:
    """What was seen; where that raised one of our errors, the error as a check."""
    try:
        return look()
    except ActordbgError as error:
        return bad(name, error.message, error.hint)


def _file() -> Check | None:
    """The actordbg.toml that commands in this folder use, and whose it is; nothing where there is none."""
    path, named = find_file()
    if path is None:
        return None
    owner = path.stat().st_uid
    why = "ACTORDBG_CONFIG names it" if named else f"its folder is listed in {own_file()}"
    return ok("settings file", f"{path}, {'yours' if is_own(owner) else f'of {name_of(owner)}: {why}'}")


def _settings() -> Check | None:
    """The environment variables that change what replays do; nothing where none is set."""
    found = from_environment()
    told = ", ".join(f"{source}={SETTINGS[name].typed(value)}" for name, (value, source) in found.items())
    return ok("replay settings", f"from the environment: {told}") if found else None


def _store(store: Store) -> Check:
    if not store.exists() and not (store.root.is_dir() and any(store.root.glob("dumps/*/rank*"))):
        return ok("store", f"none yet in {store.root}; the first dump makes it")
    store.require()
    if not os.access(store.root, os.W_OK | os.X_OK):
        detail = f"{store.root} is not writable for you: commands that only read work"
        return warn("store", detail, "for results name another store with --store DIR or ACTORDBG_STORE")
    mode = store.root.stat().st_mode
    if mode & PRIVATE:
        detail = f"{store.root} has mode {mode & 0o777:o}: others can look at the dumps"
        return warn("store", detail, f"chmod 700 {in_shell(str(store.root))}")
    kind = engine.file_system(store.root)
    return ok("store", f"{store.root}, format 1" + (f", on {kind}" if kind else ""))


def _catalog(store: Store) -> Check:
    path = store.catalog_path
    if store.exists() and not engine.is_writable(path):
        return ok("catalog", f"cannot be written here; reading commands keep one in {next(private_catalog.places(store))}")
    found = migrate.revision(path)
    if found is None:
        return ok("catalog", "none yet; the first command that reads dumps makes it")
    if migrate.earlier(path):
        return warn("catalog", f"revision {found}, of an earlier actordbg", "any reading command rebuilds it: actordbg index")
    return ok("catalog", f"revision {found}, up to date; journal {engine.journal_mode(path)}")


def _control(store: Store) -> Check:
    if os.environ.get("ACTORDBG_DISABLE", "") not in ("", "0"):
        return warn("dumping", "ACTORDBG_DISABLE is set: jobs started from this shell do not capture", "unset ACTORDBG_DISABLE")
    control = read_control(store)
    if control is None or not control.enabled:
        return ok("dumping", "disabled")
    return ok("dumping", f"enabled since {control.since}, run {control.run}")


def _floor(store: Store) -> int:
    try:
        control = read_control(store)
    except ActordbgError:
        control = None
    return control.free_floor_bytes if control else DEFAULT_FREE_FLOOR


def _patch(env: Environment, store: Store) -> Check:
    if not env.versions.get(TRAINER.package):
        return warn("patch", f"no {TRAINER.package} here to patch", "doctor --python EXE examines the training environment")
    return _patched(inspect_target(find_target(None if env.own else Path(env.python)), store), store)


def _patched(status: Status, store: Store) -> Check:
    if status.state is State.CLEAN:
        return ok("patch", f"clean, not patched: {status.file}")
    if status.state is State.OVERWRITTEN:
        return warn("patch", f"{status.reason}: {status.file}", "run `actordbg patch` again")
    if status.state is State.UNSUPPORTED:
        oldest, newest = (".".join(map(str, version)) for version in (TRAINER.oldest, TRAINER.newest))
        remedy = f"{TRAINER.name} {oldest} to {newest} have an Actor that can be patched"
        return bad("patch", f"{status.file}: {status.reason}", remedy)
    if status.state is State.EDITED:
        return warn("patch", f"{status.reason}: {status.file}", "`actordbg unpatch` keeps the edit and takes the hook away")
    if status.hooked is False:
        return bad("patch", f"patched, but the interpreter does not see it: {status.file}", "run `actordbg patch` for the reason")
    if status.store and Path(status.store) != store.root:
        remedy = f"actordbg --store {in_shell(str(status.store))} ..."
        return warn("patch", f"patched, capturing into another store: {status.store}", remedy)
    return ok("patch", f"patched: {status.file}")
