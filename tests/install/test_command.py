"""The COMMAND of `run`: the terminal's signals reach it once, others are handed on, its end is ours; a submission is known."""

import os
import shlex
import signal
import subprocess
import sys

import pexpect
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


def start(*command, **more):
    return subprocess.Popen(
        [sys.executable, "-c", WRAPPER, *command], env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, **more,  # type: ignore[call-overload]
    )  # fmt: skip


def wait_for(process, text):
    line = process.stdout.readline()
    assert text in line, line


def test_our_own_signal_mask_is_as_before_and_the_program_has_it_too():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    code = "import signal, sys; sys.exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    assert run_in_foreground([sys.executable, "-c", code], os.environ) == (len(before), False)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_a_signal_to_us_alone_is_handed_on_once(name):
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


def in_terminal(*command):
    """The wrapper in a terminal of its own, as its session's leader and foreground group."""
    around = os.environ | {"PYTHONPATH": str(ROOT)}
    return pexpect.spawn(sys.executable, ["-c", WRAPPER, *command], env=around, timeout=30)


def ends(terminal, text):
    """With this text, and well."""
    terminal.expect_exact(f"{text}\r\n")
    terminal.expect(pexpect.EOF)
    assert terminal.wait() == 0


def test_ctrl_c_reaches_the_program_once_each_time_and_does_not_end_us():
    terminal = in_terminal(sys.executable, "-c", COUNTS, "2")
    terminal.expect_exact("ready")
    for count in (1, 2):
        terminal.sendintr()
        terminal.expect_exact(f"took SIGINT {count}")
    ends(terminal, "sum SIGINT SIGINT\r\nend 0 True")


def test_a_program_that_ctrl_c_ends_ends_with_130_and_may_read_the_terminal():
    terminal = in_terminal(sys.executable, "-c", "print('got', input()); import signal, time\n"
                           "signal.signal(signal.SIGINT, signal.SIG_DFL); print('ready', flush=True); time.sleep(60)")  # fmt: skip
    terminal.sendline("hello")
    terminal.expect_exact("got hello\r\nready")
    terminal.sendintr()
    ends(terminal, "end 130 True")


def test_ctrl_z_stops_both_and_both_go_on():
    terminal = in_terminal("sh", "-c", f"{sys.executable} -c 'print(\"ready\", flush=True); import time; time.sleep(1)'; exit 5")
    terminal.expect_exact("ready")
    terminal.kill(signal.SIGTSTP)
    terminal.kill(signal.SIGCONT)
    ends(terminal, "end 5 False")


@pytest.mark.parametrize(
    "words, options",
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
def test_a_submission_is_known_with_its_options(words, options):
    assert submission(shlex.split(words)) == options
