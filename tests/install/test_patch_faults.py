"""Every call of patch and unpatch fails, and then every call of the undoing as well: the file has one of two states, and is told of."""

import contextlib
import errno
import os
import stat
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from amounts import amount
from deathcases import folder
from patchkit import ACTOR, OLD, facts_of, written

from actordbg.base.errors import ActordbgError, Conflict, StaysChanged
from actordbg.install import patching, trailer
from actordbg.install.patch_target import Target
from actordbg.store.layout import Store

__all__ = ["folder"]
CALLS = (
    "open", "fdopen", "close", "read", "fsync", "replace", "link", "unlink", "stat", "fstat", "fchmod", "utime", "listxattr",
    "mkdir", "scandir",
)  # fmt: skip
PROOFS = ("require_hook", "require_seen")


class Interrupted:
    """An interrupt that comes when the call was made."""


def _eio():
    return OSError(errno.EIO, os.strerror(errno.EIO))


class FaultyCalls:
    """Counts the calls that touch a file, and makes chosen ones fail: an I/O error instead of a call, or Ctrl-C behind it.

    `faults`: kind ("io", "interrupt") by the call's number; `from_then`: every call from this one on fails with an I/O error.
    """

    def __init__(self):
        self.count, self.faults, self.from_then = 0, dict[int, str](), sys.maxsize
        self.names = []

    def begin(self, faults, from_then=sys.maxsize):
        self.count, self.faults, self.from_then, self.names = 0, faults, from_then, []

    def wrapped(self, name, real):
        def call(*words, **options):
            self.count += 1
            self.names.append(name)
            kind = "io" if self.count >= self.from_then else self.faults.get(self.count)
            if kind == "io":
                if name == "close":
                    real(*words)  # Linux frees the descriptor whatever close says
                raise _eio() if name not in PROOFS else Conflict("played", hint="none")
            answer = real(*words, **options)
            if kind == "interrupt":
                if name == "fdopen":
                    answer.close()
                raise KeyboardInterrupt
            return answer

        return call


@pytest.fixture(autouse=True)
def no_proofs(monkeypatch):
    """Nobody asks an interpreter: that takes 50 ms."""
    for name in PROOFS:
        monkeypatch.setattr(patching, name, lambda *_: None)
    monkeypatch.setattr(patching, "ask", lambda *_: {"hooked": False})


@pytest.fixture
def faulty(monkeypatch, no_proofs):
    """Calls that can fail, and an interpreter that sees what the file says."""
    calls = FaultyCalls()
    for name in PROOFS:
        monkeypatch.setattr(patching, name, calls.wrapped(name, lambda *_: None))
    monkeypatch.setattr(trailer, "_require_same_meaning", lambda *_: None)  # a matter of bytes, and a third of the time
    with monkeypatch.context() as patched:
        for name in CALLS:
            patched.setattr(os, name, calls.wrapped(name, getattr(os, name)))
        yield calls


class Case:
    """An installed actor.py and a store, and one operation that is about to change it."""

    def __init__(self, folder, operation):
        self.actor, self.store = folder / "models" / "actor.py", Store(folder / "store")
        self.target = Target(self.actor, self.actor, sys.executable, None)
        written(self.actor)
        if operation != "patch":
            patching.patch(self.target, Store(folder / "first") if operation == "renew" else self.store)
        self.unpatches = operation == "unpatch"
        self.before = facts_of(self.actor)
        data = ACTOR if operation == "unpatch" else trailer.append(ACTOR, str(self.store.root), mtime_ns=OLD)
        self.after = (data, 0o640, os.getuid())

    def operate(self):
        return patching.unpatch(self.target) if self.unpatches else patching.patch(self.target, self.store)

    def run(self):
        try:
            self.operate()
        except (ActordbgError, OSError, KeyboardInterrupt) as error:
            return error
        return None

    def check(self, error):
        """The state that the file has, after everything that must hold of it was looked at."""
        now = facts_of(self.actor)
        changed = now != self.before
        if changed:
            assert now[:3] == self.after
            assert (now[3] == OLD) == (now[0] == ACTOR)
        assert changed or error is not None, "nothing is done, and nothing said"
        stays = isinstance(error, StaysChanged)
        if isinstance(error, StaysChanged):
            assert f"{self.actor} stays changed" in error.message and error.exit_code == 4
            assert changed or "could not be read" in error.message
        if changed and not stays:
            assert error is None or isinstance(error, KeyboardInterrupt) or self.unpatches
        assert all(path.name.startswith(".actordbg-") for path in self.actor.parent.iterdir() if path != self.actor)
        return "changed" if changed else "as before"

    def finish(self):
        """The next commands work, and clean up."""
        patching.patch(self.target, self.store)
        assert facts_of(self.actor)[:3] == (trailer.append(ACTOR, str(self.store.root), mtime_ns=OLD), 0o640, os.getuid())
        patching.unpatch(self.target)
        assert facts_of(self.actor) == (ACTOR, 0o640, os.getuid(), OLD)
        assert os.listdir(self.actor.parent) == ["actor.py"]


def _tried(faulty, folder, operation, faults, from_then):
    """The state after one run with faults, and how many calls it made."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        faulty.begin({})
        case = Case(Path(name), operation)
        faulty.begin(faults, from_then)
        error = case.run()
        count, names = faulty.count, faulty.names
        faulty.begin({})
        with contextlib.ExitStack() as told:
            told.callback(lambda: print("faults:", {names[n - 1]: kind for n, kind in faults.items()}, from_then, repr(error)))
            state = case.check(error)
            case.finish()
            told.pop_all()
        return state, count


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["patch", "renew", "unpatch"])
def test_a_fault_anywhere_and_a_second_one_while_undoing_leave_one_of_two_states(faulty, folder, operation):
    _, calls = _tried(faulty, folder, operation, {}, sys.maxsize)
    states = Counter()
    for first in range(1, calls + 1):
        for kind, other in (("io", "interrupt"), ("interrupt", "io")):
            state, count = _tried(faulty, folder, operation, {first: kind}, sys.maxsize)
            states[f"one fault: {state}"] += 1
            end = count + 1 if operation != "renew" else 0  # renewing undoes as `patch` does
            seconds = range(first + 1, end, amount(120, 1))
            for second in seconds:
                state, _ = _tried(faulty, folder, operation, {first: kind, second: other}, sys.maxsize)
                states[f"two faults: {state}"] += 1
                if kind == "io":
                    state, _ = _tried(faulty, folder, operation, {first: kind}, second)
                    states[f"a disk that fails from then on: {state}"] += 1
    print(f"{operation}: {calls} calls, {states.total()} runs, {dict(states)}")
    assert states.total() > 2 * calls - 1 and states["one fault: as before"] > 20 and states["one fault: changed"] > 10


@pytest.mark.parametrize("operation", ["patch", "unpatch"])
def test_a_folder_that_the_disk_does_not_confirm_is_a_note(folder, monkeypatch, operation):
    case, real = Case(folder, operation), os.fsync

    def refuse(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise _eio()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    outcome = case.operate()
    assert case.check(None) == "changed" and outcome.action == f"{operation}ed"
    assert [line for line in outcome.notes if "did not confirm" in line and "power cut" in line]
