"""The COMMAND of `actordbg run`: run in the foreground, as the shell would have without us; `ray job submit` with what is ours.

**Foreground** (`run_in_foreground`). COMMAND keeps our terminal, our process group and our standard streams, so job control
(Ctrl-Z, `fg`) and terminal programs work as they do without us. What the *terminal* sends (Ctrl-C, Ctrl-\\, a hang-up) goes to
the whole process group, so COMMAND has it already: we wait for what it does with it. What *somebody* sends to us alone (`kill`,
a batch system) is handed on to it. Which of the two a signal is, Linux says (`si_code`): only a signal sent by a process has
one that is not positive. So we do not install handlers, but block these signals and take them one at a time. Ignored signals
stay ignored.

**Submission** (`rewritten`). A job that `ray job submit [OPTIONS] -- ENTRYPOINT` submits runs on the cluster, not below us; its
driver and its workers get an environment only from the runtime environment. So the command line that is executed says it, and a
look at the process shows what is submitted::

    ray job submit --runtime-env-json '{"working_dir": "."}' -- python train.py
    ray job submit --runtime-env-json '{"working_dir": ".", "env_vars": {"ACTORDBG_RUN": ...}}' -- python train.py

`--runtime-env FILE` becomes `--runtime-env-json` where PyYAML can read it here. Where not (and where a script calls `ray job
submit`), the `ray` process merges it itself (`ray_hooks`). What cannot be understood is left for Ray to complain about.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actordbg.base.errors import LaunchProblem
from actordbg.install.ray_hooks import merged

_JSON, _FILE = "--runtime-env-json", "--runtime-env"
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


def is_submission(command: Sequence[str]) -> bool:
    """Whether this is `ray job submit`, perhaps behind another program (`uv run ray job submit`)."""
    return bool(_parted(command)[0])


def goes_on(command: Sequence[str]) -> bool:
    """Whether the job that this submits is still to run when the command has ended."""
    return "--no-wait" in _parted(command)[1]


def rewritten(command: Sequence[str], ours: Mapping[str, str]) -> list[str]:
    """The command with what is ours in its runtime environment; as it is, if it is no submission or cannot be read."""
    submit, options, entrypoint = _parted(command)
    given, kept = [], []
    words = iter(options)
    for word in words:
        name, equals, value = word.partition("=")
        if name in (_JSON, _FILE):
            given.append((name, value if equals else next(words, "")))
        else:
            kept.append(word)
    runtime_env = _read(given)
    if not submit or runtime_env is None:
        return list(command)
    return [*submit, *kept, f"{_JSON}={json.dumps(merged(runtime_env, ours))}", *entrypoint]


def _parted(command: Sequence[str]) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    """A command as [..., "ray", "job", "submit"], its options, and "--" with what follows; nothing thrice if it is no
    submission.
    """
    for index, word in enumerate(command[:-2]):
        if word == "--" and index:
            break
        if Path(word).name == "ray" and tuple(command[index + 1 : index + 3]) == ("job", "submit"):
            start = index + 3
            end = command.index("--", start) if "--" in command[start:] else len(command)
            return command[:start], command[start:end], command[end:]
    return (), (), ()


def _read(given: list[tuple[str, str]]) -> dict[str, Any] | None:
    """The runtime environment that the options name; None if that is not to be known here."""
    if len({name for name, _ in given}) > 1:
        return None
    if not given:
        return {}
    name, value = given[-1]
    try:
        if name == _JSON:
            read = json.loads(value)
        else:
            import yaml

            read = yaml.safe_load(Path(value).read_text(encoding="utf-8"))
    except Exception:  # noqa: BLE001  # no such file, not JSON, not YAML, no PyYAML: Ray says what is wrong
        return None
    return read if isinstance(read, dict) and isinstance(read.get("env_vars") or {}, dict) else None
