"""Stops a forked process at its N-th system call that changes the file system below some folders, and kills it there.

A kill can come between any two system calls, so N runs with a kill at each of N calls are all the states that a SIGKILL can leave
(a power cut can leave others). The kernel does the counting: a seccomp filter stops the child (ptrace) at the calls of `CALLS` only, so a
run costs what the operation costs. The child is forked from a process that has everything imported. No tool is needed.

Ways to interfere with call N (`Way`):

    kill    SIGKILL before it happens. (Killing after N leaves what killing before N + 1 leaves.)
    torn    half of a write happens, then SIGKILL
    after   SIGKILL when it has happened: for the last call
    fail    it does not happen, and the child gets the error that a bad disk gives (ENOSPC, EIO)
    full    from N on, everything that needs space gets ENOSPC; removing and renaming work

Guarantee: the same operation on the same files makes the same calls in the same order, as long as it uses one thread.
x86-64 Linux only: numbers and registers are that machine's. `why_not()` says what is missing elsewhere.

Example::

    seen = traced(work, [store.root])                      # how many calls there are
    end = traced(work, [store.root], "kill", 7)
    assert end.killed and len(end.calls) == 7
"""

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Way = Literal["kill", "torn", "after", "fail", "full"]

Files = list[tuple[str | None, str | None]]
"""The registers that name a file: with a descriptor, its own or a folder's, and with the address of a path."""
FD, PATH, AT, MAPPED = [("rdi", None)], [(None, "rdi")], [("rdi", "rsi")], [("r8", None)]
TWO, TWO_AT = [(None, "rdi"), (None, "rsi")], [("rdi", "rsi"), ("rdx", "r10")]
CALLS = {
    1: ("write", FD, errno.ENOSPC), 18: ("pwrite64", FD, errno.ENOSPC), 20: ("writev", FD, errno.ENOSPC),
    296: ("pwritev", FD, errno.ENOSPC), 40: ("sendfile", FD, errno.ENOSPC), 326: ("copy_file_range", FD, errno.ENOSPC),
    77: ("ftruncate", FD, errno.EIO), 285: ("fallocate", FD, errno.ENOSPC), 9: ("mmap", MAPPED, errno.ENOMEM),
    74: ("fsync", FD, errno.EIO), 75: ("fdatasync", FD, errno.EIO), 91: ("fchmod", FD, errno.EIO), 93: ("fchown", FD, errno.EIO),
    190: ("fsetxattr", FD, errno.EIO), 76: ("truncate", PATH, errno.EIO),
    2: ("open", PATH, errno.ENOSPC), 85: ("creat", PATH, errno.ENOSPC), 257: ("openat", AT, errno.ENOSPC),
    82: ("rename", TWO, errno.EIO), 264: ("renameat", TWO_AT, errno.EIO), 316: ("renameat2", TWO_AT, errno.EIO),
    86: ("link", TWO, errno.EMLINK), 265: ("linkat", TWO_AT, errno.EMLINK), 88: ("symlink", TWO, errno.ENOSPC),
    87: ("unlink", PATH, errno.EIO), 263: ("unlinkat", AT, errno.EIO), 84: ("rmdir", PATH, errno.EIO),
    83: ("mkdir", PATH, errno.ENOSPC), 258: ("mkdirat", AT, errno.ENOSPC), 90: ("chmod", PATH, errno.EIO),
    268: ("fchmodat", AT, errno.EIO), 280: ("utimensat", AT, errno.EIO),
}  # fmt: skip
"""The calls that stop a child, by number: name, the files that it is about, the error that it fails with."""
_WRITES = ("write", "pwrite64")
_MAKES = os.O_CREAT | os.O_TRUNC

TRACEME, CONT, GETREGS, SETREGS, SYSCALL, SETOPTIONS = 0, 7, 12, 13, 24, 0x4200
OPTIONS = 0x100000 | 0x80 | 0x0E | 0x02 | 0x04 | 0x08  # EXITKILL, TRACESECCOMP, and what is forked or cloned, too
EVENT_SECCOMP = 7
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2
RET_ALLOW, RET_TRACE, X86_64 = 0x7FFF0000, 0x7FF00000, 0xC000003E
_REGISTERS = "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss fs_base gs_base ds es fs gs"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class Registers(ctypes.Structure):
    """Guarantees: the fields lie where PTRACE_GETREGS of an x86-64 kernel puts them."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in _REGISTERS.split()]


@dataclass
class End:
    """How a traced run ended: its wait status, and the calls that it came to, each as "name file bytes"."""

    status: int = 0
    calls: list[str] = field(default_factory=list)

    @property
    def killed(self):
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL

    @property
    def code(self):
        return os.waitstatus_to_exitcode(self.status)


def why_not():
    """Why this machine cannot do it; "" if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"system calls are counted on x86-64 Linux only, and this is {platform.machine()} {sys.platform}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            seen = traced(lambda: Path(folder, "x").write_text("x") and None, [Path(folder)])
    except OSError as error:
        return f"this machine lets no process trace its child: {error}"
    return "" if seen.code == 0 and len(seen.calls) == 2 else f"a traced child made other calls than it should: {seen}"


def traced(work, folders, way=None, at=0):
    """Run `work` in a forked child and interfere with call number `at` (from 1) in one way; without one only count."""
    child = os.fork()
    if child == 0:
        _be_traced(work)
    return _Tracer(child, [f"{os.path.realpath(folder)}/" for folder in folders], way, at).run()


def _be_traced(work):
    code = 70
    try:
        _ptrace(TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        _install_filter()
        answer = work()
        code = answer if isinstance(answer, int) else 0
    except BaseException as error:  # noqa: BLE001  a child of the harness must not return into its caller
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        code = 71
    finally:
        os._exit(code)


class _Tracer:
    """Follows one child to its end."""

    def __init__(self, child, folders, way, at):
        self.child, self.folders, self.way, self.at = child, tuple(folders), way, at
        self.end = End()

    def run(self):
        _, status = os.waitpid(self.child, 0)
        if not os.WIFSTOPPED(status):
            raise OSError(f"the child did not stop: {status}")
        _ptrace(SETOPTIONS, self.child, OPTIONS)
        _ptrace(CONT, self.child)
        alive = {self.child}
        while True:
            pid, status = os.waitpid(-1, 0x40000000)  # __WALL: threads too
            if not os.WIFSTOPPED(status):
                alive.discard(pid)
                if pid == self.child:
                    self.end.status = status
                if not alive:
                    return self.end
                continue
            alive.add(pid)
            with contextlib.suppress(ProcessLookupError):
                self._stopped(pid, status)

    def _stopped(self, pid, status):
        event, number = status >> 16, os.WSTOPSIG(status)
        if event == EVENT_SECCOMP:
            self._called(pid)
        elif event or number in (signal.SIGSTOP, signal.SIGTRAP):
            _ptrace(CONT, pid)
        else:
            _ptrace(CONT, pid, number)

    def _called(self, pid):
        registers = Registers()
        _ptrace(GETREGS, pid, ctypes.addressof(registers))
        name, files, failure = CALLS[registers.orig_rax]
        target = None if name == "open" and not registers.rsi & _MAKES else self._target(pid, files, registers)
        if target is None:
            _ptrace(CONT, pid)
            return
        self.end.calls.append(f"{name} {target}" + (f" {registers.rdx}" if name in _WRITES else ""))
        number = len(self.end.calls)
        if self.way == "full":
            now = number >= self.at and failure == errno.ENOSPC
        else:
            now = number == self.at
        if now:
            self._interfere(pid, registers, failure)
        else:
            _ptrace(CONT, pid)

    def _interfere(self, pid, registers, failure):
        if self.way in ("fail", "full"):  # skipped: a number that no call has, and the answer that it would have given
            registers.orig_rax, registers.rax = 2**64 - 1, 2**64 - failure
            _ptrace(SETREGS, pid, ctypes.addressof(registers))
            _ptrace(CONT, pid)
            return
        if self.way == "torn":
            registers.rdx //= 2
            _ptrace(SETREGS, pid, ctypes.addressof(registers))
        if self.way != "kill":
            _ptrace(SYSCALL, pid)
            os.waitpid(pid, 0x40000000)
        os.kill(self.child, signal.SIGKILL)

    def _target(self, pid, files, registers):
        """The file that a call is about, below one of the folders; None for any other call."""
        for names in files:
            path = _path(pid, *(name and getattr(registers, name) for name in names))
            for folder in self.folders:
                if f"{path}/".startswith(folder):
                    return path.removeprefix(folder)
        return None


def _file_of(pid, descriptor):
    try:
        return os.readlink(f"/proc/{pid}/fd/{ctypes.c_int(descriptor & 0xFFFFFFFF).value}")
    except OSError:
        return ""


def _path(pid, folder, address):
    """The absolute path at an address, below an open folder if it is relative; without an address, that of the open file itself."""
    if not address:
        return _file_of(pid, folder or 0)
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        try:
            text = os.pread(memory.fileno(), 4096, address)
        except OSError:
            text = os.pread(memory.fileno(), 4096 - address % 4096, address)
    path = os.fsdecode(text.partition(b"\0")[0])
    if path.startswith("/"):
        return path
    at = None if folder is None else ctypes.c_int(folder & 0xFFFFFFFF).value
    start = os.readlink(f"/proc/{pid}/cwd") if at in (None, -100) else _file_of(pid, at)
    return os.path.normpath(os.path.join(start, path))


def _ptrace(request, pid, data=0):
    if _libc.ptrace(request, pid, None, data) == -1:
        code = ctypes.get_errno()
        if code == errno.ESRCH:
            raise ProcessLookupError(code, "the child is gone")
        raise OSError(code, f"ptrace {request}: {os.strerror(code)}")


def _install_filter():
    """Stop at the calls of `CALLS`: of openat only those that make or empty a file, of mmap only shared ones."""

    def statement(code, value, yes=0, no=0):
        return struct.pack("HBBI", code, yes, no, value)

    load, equal, any_bit, answer = 0x20, 0x15, 0x45, 0x06
    program = [statement(load, 4), statement(equal, X86_64, 1, 0), statement(answer, RET_ALLOW), statement(load, 0)]
    for number, argument, bits in ((257, 2, _MAKES), (9, 3, 1)):
        program += [
            statement(equal, number, 0, 4),
            statement(load, 16 + 8 * argument),
            statement(any_bit, bits, 0, 1),
            statement(answer, RET_TRACE),
            statement(answer, RET_ALLOW),
        ]
    for number in CALLS:
        program += [statement(equal, number, 0, 1), statement(answer, RET_TRACE)]
    program.append(statement(answer, RET_ALLOW))
    code = ctypes.create_string_buffer(b"".join(program))
    packed = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(packed), 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter can be set")
