"""Commands of somebody who may not write the store: as another user, or on a mount that is read-only or full.

Before the commands run, a file is tried to be made in the store: so the way that was taken works. As root the commands run as the
user `nobody`, since permission bits do not bind root (by util-linux's `setpriv`, with the right to read everything: an interpreter
below /root would not start). As anybody else the store loses its write bits. A mount needs rights that a container may not
have: `mounted` then gives None, and the test goes by permission bits.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from roots import ROOT

NOBODY = 65534
PROGRAM = """
import io, json, os, sys
sys.path.insert(0, sys.argv[1])
import actordbg.cli.app, actordbg.catalog.query, actordbg.cli.report, actordbg.cli.replay, actordbg.api.store_commands
store, done = sys.argv[2], []
try:
    os.close(os.open(store + "/may-not-write", os.O_CREAT | os.O_WRONLY)); os.unlink(store + "/may-not-write"); done.append("writable")
except OSError:
    done.append("unwritable")
for number, command in enumerate(json.loads(sys.argv[3])):
    outs = [os.open(f"{sys.argv[4]}/{number}.{name}", os.O_CREAT | os.O_RDWR, 0o600) for name in ("out", "err")]
    child = os.fork()
    if not child:
        os.dup2(outs[0], 1), os.dup2(outs[1], 2)
        sys.argv = ["actordbg", "--store", store, *command]
        try:
            actordbg.cli.app.main()
        except SystemExit as end:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        except BaseException:
            import traceback; traceback.print_exc(); sys.stderr.flush(); os._exit(99)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    done.append([code, *(os.pread(one, 2**24, 0).decode() for one in outs)])
print(json.dumps(done))
"""


@dataclass(frozen=True)
class Said:
    """What one command answered."""

    code: int
    out: str
    err: str


class Reader:
    """Somebody with a home of his own, in which his caches lie."""

    def __init__(self, home, user=None, store=Path()):
        self.home, self._user, self._store = home, user, store

    @property
    def catalogs(self):
        """The private catalogs in his cache."""
        return sorted((self.home / "cache" / "actordbg" / "catalogs").glob("*/catalog.db"))

    def start(self, *commands, **variables):
        """Run commands in a process of his, one after the other."""
        work = Path(tempfile.mkdtemp(dir=self.home))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACTORDBG_", "XDG_"))}
        environment |= {"HOME": str(self.home), "XDG_CACHE_HOME": str(self.home / "cache"), "TMPDIR": str(self.home)} | variables
        if self._user is not None:
            os.chown(work, self._user, self._user)
        line = [sys.executable, "-c", PROGRAM, str(ROOT), str(self._store), json.dumps(commands), str(work)]
        if self._user is not None:
            rights = "--inh-caps=-all,+dac_read_search --ambient-caps=-all,+dac_read_search"
            line[:0] = f"setpriv --reuid={self._user} --regid={self._user} --clear-groups {rights}".split()
        return subprocess.Popen(line, env=environment, cwd=self.home, stdout=subprocess.PIPE, text=True)

    def run(self, *commands, may_write=False, **variables):
        """What commands of his answer."""
        process = self.start(*commands, **variables)
        out, _ = process.communicate(timeout=120)
        first, *done = json.loads(out)
        assert (first == "writable") == may_write, "the way that makes this store unwritable does not work here"
        return [Said(*one) for one in done]


@contextlib.contextmanager
def another_user(store):
    """Somebody who may read the store and write nothing in it."""
    root = os.geteuid() == 0
    home = Path(tempfile.mkdtemp(prefix="actordbg-reader-", dir="/tmp"))
    home.chmod(0o700)
    if root:
        os.chown(home, NOBODY, NOBODY)
    before = {path: path.stat().st_mode for path in (store, *store.rglob("*"))}
    for path, mode in before.items():
        path.chmod((mode | 0o055 if path.is_dir() else mode | 0o044) if root else mode & ~0o222)
    try:
        yield Reader(home, NOBODY if root else None, store)
    finally:
        for path, mode in before.items():
            if path.exists():
                path.chmod(mode)
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def public_folder():
    """A folder that others can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="actordbg-public-", dir="/tmp", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextlib.contextmanager
def mounted(store, then=""):
    """The store copied into a small file system of its own; `then`, a shell command about $MOUNT, is run when it is there.

    None where this process may not mount, as in many containers.
    """
    point = store.parent / "mount"
    point.mkdir()
    script = f'mount -t tmpfs -o size=4m tmpfs "$MOUNT" && cp -rp "$STORE" "$MOUNT/store" && {{ {then or "true"}; }}'
    done = subprocess.run(
        ["sh", "-c", script], env=os.environ | {"MOUNT": str(point), "STORE": str(store)}, capture_output=True, check=False
    )
    try:
        yield point / "store" if done.returncode == 0 else None
    finally:
        subprocess.run(["umount", "-l", str(point)], capture_output=True, check=False)
