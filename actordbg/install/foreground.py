"""Run a program in the foreground, as the shell would have without us, and know how it ended.

It keeps our terminal, our process group and our standard streams, so job control (Ctrl-Z, `fg`) and terminal programs work as
they do without us. Signals:

- What the **terminal** sends (Ctrl-C, Ctrl-\\, a hang-up) goes to the whole process group, so the program has it already: we
  wait for what it does with it. A second Ctrl-C reaches it just the same.
- What **somebody** sends to us alone (`kill`, a batch system) is handed on to it.

Which of the two a signal is, Linux says (`si_code`): only a signal sent by a process has one that is not positive. So we do not
install handlers, but block these signals and take them one at a time. Signals that were ignored when we started stay ignored.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from actordbg.base.errors import LaunchProblem

_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class End:
    """How a program ended: `code` as a shell has it (128 + n after signal n), and whether it was asked to stop."""

    code: int
    interrupted: bool


def run_in_foreground(command: Sequence[str], environment: Mapping[str, str]) -> End:
    """Run `command` to its end. Raises LaunchProblem if it cannot be started."""
    watched = {number for number in _HANDED_ON if signal.getsignal(number) is not signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched | {signal.SIGCHLD})
    try:
        try:
            child = subprocess.Popen(
                list(command), env=dict(environment), preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before)
            )
        except OSError as error:
            raise LaunchProblem(
                f"cannot start {command[0]}: {error.strerror}", hint="what follows `--` is a program and its arguments"
            ) from None
        interrupted = _wait(child, watched)
        while signal.sigtimedwait(watched, 0) is not None:  # what came with the end belongs to it
            interrupted = True
        return End(child.returncode if child.returncode >= 0 else 128 - child.returncode, interrupted)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(child: subprocess.Popen[bytes], watched: set[signal.Signals]) -> bool:
    """Until the child is gone; whether a signal came meanwhile."""
    interrupted = False
    while child.poll() is None:
        info = signal.sigtimedwait(watched | {signal.SIGCHLD}, _LOOK_SECONDS)
        if info is None or info.si_signo == signal.SIGCHLD:
            continue
        interrupted = True
        if info.si_code <= 0 and info.si_pid != child.pid:
            child.send_signal(info.si_signo)
    return interrupted
