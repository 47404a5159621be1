"""Run the COMMAND of `actordbg run` in the foreground, as the shell would have without us, and recognize a submitted Ray job.

COMMAND keeps our terminal, our process group and our standard streams, so job control (Ctrl-Z, `fg`) and terminal programs
work as they do without us. What the *terminal* sends (Ctrl-C, Ctrl-\\, a hang-up) goes to the whole process group, so COMMAND
has it already: we wait for what it does. What *somebody* sends to us alone (`kill`, a batch system) is forwarded to COMMAND.
Linux says which of the two a signal is: `si_code` is positive unless a process sent it. So we do not
install handlers, but block these signals and take them one at a time. Ignored signals stay ignored.

A job that `ray job submit [OPTIONS] -- ENTRYPOINT` submits runs on the cluster, not below us. `ray_hooks`, in the process of
`ray`, adds our variables to its runtime environment.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from actordbg.base.errors import LaunchProblem

_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOOK_SECONDS = 1.0


def run_in_foreground(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, bool]:
    """Run `command` to its end. Return its exit code as a shell reports it (128 + n after signal n), and whether a signal
    interrupted it.

    Raises LaunchProblem if it cannot be started.
    """
    watched = {number for number in _HANDED_ON if signal.getsignal(number) is not signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched | {signal.SIGCHLD})
    interrupted = False
    try:
        try:
            child = subprocess.Popen(
                list(command), env=dict(environment), preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before)
            )
        except OSError as error:
            raise LaunchProblem(
                f"cannot start {command[0]}: {error.strerror}", hint="write a program and its arguments after `--`"
            ) from None
        while child.poll() is None:
            info = signal.sigtimedwait(watched | {signal.SIGCHLD}, _LOOK_SECONDS)
            if info is None or info.si_signo == signal.SIGCHLD:
                continue
            interrupted = True
            if info.si_code <= 0 and info.si_pid != child.pid:
                child.send_signal(info.si_signo)
        while signal.sigtimedwait(watched, 0) is not None:  # signals that arrived together with the exit
            interrupted = True
        return child.returncode if child.returncode >= 0 else 128 - child.returncode, interrupted
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def submission(command: Sequence[str]) -> Sequence[str] | None:
    """Return the options of `ray job submit`, also after another program (`uv run ray job submit`); None for other commands."""
    for index, word in enumerate(command[:-2]):
        if word == "--" and index:
            break
        if Path(word).name == "ray" and tuple(command[index + 1 : index + 3]) == ("job", "submit"):
            options = command[index + 3 :]
            return options[: options.index("--")] if "--" in options else options
    return None
