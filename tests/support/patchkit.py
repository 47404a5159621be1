"""What the tests of patch and unpatch share: an actor.py as it is installed, and an interpreter that need not import the real hook."""

import os
import shutil
import stat

import pytest
from roots import ROOT

ACTOR = b'class Actor:\n    """An actor."""\n\n    def forward(self, sequences, attention_mask=None):\n        return sequences\n'
OLD = 1_600_000_000_123_456_789
"""The file's modification time, in nanoseconds."""


def written(path, data=ACTOR, mode=0o640):
    """Write a file with an unusual mode and an old time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
    os.utime(path, ns=(OLD, OLD))
    return path


def facts_of(path):
    """Bytes, mode, owner, and modification time in nanoseconds."""
    found = path.stat()
    return path.read_bytes(), stat.S_IMODE(found.st_mode), found.st_uid, found.st_mtime_ns


def stand_in(folder, hook):
    """An `actordbg` in `folder` that is only a hook, and knows what a signal handler raised; returns the hook's file."""
    file = folder / "actordbg" / "capture" / "hook.py"
    file.parent.mkdir(parents=True)
    file.write_text(hook)
    file.with_name("__init__.py").touch()
    (file.parents[1] / "__init__.py").write_text('__version__ = "0"\n')
    (file.parents[1] / "base").mkdir()
    for name in ("__init__.py", "fault.py"):
        shutil.copy(ROOT / "actordbg" / "base" / name, file.parents[1] / "base" / name)
    return file


SIGNALLED = ("TimeoutError", "SystemExit", "KeyboardInterrupt")
HANDLER = """import signal
def over(number, frame):
    raise {error}("over")
signal.signal(signal.SIGUSR1, over)
signal.raise_signal(signal.SIGUSR1)
"""
"""A hook that is interrupted by a signal of the job while it is imported, whose handler raises one of SIGNALLED."""


@pytest.fixture
def light_hook(tmp_path, monkeypatch):
    """An actordbg on the interpreter's path whose hook imports at once; returns that hook's file. Nothing of ours is in the environment."""
    for name in ("ACTORDBG_STORE", "ACTORDBG_DISABLE", "ACTORDBG_RUN", "PYTHONPYCACHEPREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "light"))
    return stand_in(tmp_path / "light", "def install(cls, *, store):\n    cls.store = store\n")
