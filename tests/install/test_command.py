"""The COMMAND of `run`: the terminal's signals reach it once, others are handed on, its end is ours; a submission is known."""

from __future__ import annotations

import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time

import pytest
from roots import ROOT

from actordbg.install.command import run_in_foreground, submission

WRAPPER = """
import sys
from actordbg.install.command import run_in_foreground
end = run_in_foreground(sys.argv[1:], __import__("os").environ)
print("end", *end, flush=True)
"""
COUNTS = """
import signal, sys, time
seen = []
def take(number, frame):
    seen.append(signal.Signals(number).name)
    print("took", seen[-1], len(seen), flush=True)
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), take)
print("ready", flush=True)
while len(seen) < int(sys.argv[1]):
    time.sleep(0.01)
time.sleep(0.3)
print("sum", *seen, flush=True)
"""


def start(*command: str, **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRAPPER, *command], env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, **more,  # type: ignore[call-overload]
    )  # fmt: skip


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    line = process.stdout.readline()
    assert text in line, line


def test_our_own_signal_mask_is_as_before_and_the_program_has_it_too():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    code = "import signal, sys; sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    assert run_in_foreground([sys.executable, "-c", code], os.environ) == (len(before), False)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_a_signal_to_us_alone_is_handed_on_once(name: str):
    process = start(sys.executable, "-c", COUNTS, "1")
    wait_for(process, "ready")
    process.send_signal(getattr(signal, name))
    out, _ = process.communicate(timeout=30)
    assert f"sum {name}\nend 0 True\n" in out


def test_a_program_that_signals_its_own_group_is_not_signalled_again():
    code = COUNTS + "import os; os.kill(0, signal.SIGTERM); time.sleep(0.5); print('sum', *seen, flush=True)"
    process = start(sys.executable, "-c", code, "0", start_new_session=True)
    out, _ = process.communicate(timeout=30)
    assert "sum SIGTERM\nend 0 True\n" in out


def test_an_ignored_signal_stays_ignored():
    process = start(sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)",
                    preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))  # fmt: skip
    assert process.communicate(timeout=30)[0] == "True\nend 0 False\n"


class Terminal:
    """The wrapper in a terminal of its own, as its session's leader and foreground group."""

    def __init__(self, *command: str) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.environ["PYTHONPATH"] = str(ROOT)
            os.execv(sys.executable, [sys.executable, "-c", WRAPPER, *command])
        self.text = ""

    def read_until(self, text: str) -> str:
        deadline = time.monotonic() + 30
        while text not in self.text and time.monotonic() < deadline:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.master, 4096).decode()
                except OSError:  # the other side is closed
                    break
        assert text in self.text, self.text
        return self.text

    def type(self, key: bytes) -> None:
        os.write(self.master, key)

    def end(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.master)  # not before: that would hang up
        return code


def test_ctrl_c_reaches_the_program_once_each_time_and_does_not_end_us():
    terminal = Terminal(sys.executable, "-c", COUNTS, "2")
    terminal.read_until("ready")
    for count in (1, 2):
        terminal.type(b"\x03")
        terminal.read_until(f"took SIGINT {count}")
    text = terminal.read_until("end 0 True")
    assert "sum SIGINT SIGINT" in text and text.count("took") == 2
    assert terminal.end() == 0


def test_a_program_that_ctrl_c_ends_ends_with_130_and_may_read_the_terminal():
    terminal = Terminal(sys.executable, "-c", "print('got', input()); import signal, time\n"
                        "signal.signal(signal.SIGINT, signal.SIG_DFL); print('ready', flush=True); time.sleep(60)")  # fmt: skip
    terminal.type(b"hello\n")
    terminal.read_until("ready")
    assert "got hello" in terminal.text
    terminal.type(b"\x03")
    terminal.read_until("end 130 True")
    assert terminal.end() == 0


def test_ctrl_z_stops_both_and_both_go_on():
    terminal = Terminal("sh", "-c", f"{sys.executable} -c 'print(\"ready\", flush=True); import time; time.sleep(1)'; exit 5")
    terminal.read_until("ready")
    os.kill(terminal.pid, signal.SIGTSTP)
    os.kill(terminal.pid, signal.SIGCONT)
    terminal.read_until("end 5 False")
    assert terminal.end() == 0


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("ray job submit --no-wait -- python train.py", ["--no-wait"]),
        ("uv run /envs/bin/ray job submit --address http://h:8265 -- python train.py --no-wait", ["--address", "http://h:8265"]),
        ("ray job submit --no-wait", ["--no-wait"]),
        ("ray job list", None),
        ("bash -c 'ray job submit -- x'", None),
        ("torchrun -- ray job submit", None),
        ("x", None),
    ],
)
def test_a_submission_is_known_with_its_options(words: str, options: list[str] | None):
    assert submission(shlex.split(words)) == options
