"""The COMMAND of `run`: the terminal's signals reach it once, others are handed on, its end is ours; a submission has what is ours."""

from __future__ import annotations

import json
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

from actordbg.install.command import goes_on, is_submission, rewritten, run_in_foreground
from actordbg.install.ray_hooks import merged

WRAPPER = """
import sys
from actordbg.install.command import run_in_foreground
end = run_in_foreground(sys.argv[1:], __import__("os").environ)
print("end", end.code, end.interrupted, flush=True)
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
    assert run_in_foreground([sys.executable, "-c", code], os.environ).code == len(before)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
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


def test_nothing_is_left_of_the_program():
    code = f"{WRAPPER}\nimport os\ntry: os.waitpid(-1, os.WNOHANG); print('a child is left')\nexcept ChildProcessError: print('none')"
    done = subprocess.run(
        [sys.executable, "-c", code, sys.executable, "-c", "pass"], env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "end 0 False\nnone\n"


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


OURS = {"ACTORDBG_STORE": "/s", "ACTORDBG_RUN": "r"}
USERS = {"working_dir": ".", "env_vars": {"NCCL_DEBUG": "INFO"}}


def expected(runtime_env: object) -> str:
    return f"--runtime-env-json={json.dumps(merged(runtime_env, OURS))}"  # type: ignore[arg-type]


@pytest.mark.parametrize("program", ["ray", "/envs/rlhf/bin/ray", "uv run ray", "env A=1 ray"])
def test_a_submission_without_a_runtime_environment_gets_one(program: str):
    words = shlex.split(f"{program} job submit --address http://h:8265 -- python train.py --runtime-env-json x")
    cut = words.index("--")
    assert rewritten(words, OURS) == [*words[:cut], expected({}), *words[cut:]]


@pytest.mark.parametrize("joined", [True, False])
def test_a_runtime_environment_in_json_is_merged(joined: bool):
    text = json.dumps(USERS)
    option = [f"--runtime-env-json={text}"] if joined else ["--runtime-env-json", text]
    words = ["ray", "job", "submit", *option, "--no-wait", "--", "python", "train.py"]
    assert rewritten(words, OURS) == ["ray", "job", "submit", "--no-wait", expected(USERS), "--", "python", "train.py"]


def test_a_runtime_environment_in_a_file_is_merged(tmp_path):
    pytest.importorskip("yaml")
    file = tmp_path / "env.yaml"
    file.write_text("working_dir: .\nenv_vars:\n  NCCL_DEBUG: INFO\n")
    words = ["ray", "job", "submit", "--runtime-env", str(file), "--", "python", "train.py"]
    assert rewritten(words, OURS) == ["ray", "job", "submit", expected(USERS), "--", "python", "train.py"]


def test_without_pyyaml_a_file_is_left_to_the_ray_process(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "env.yaml").write_text("working_dir: .\n")
    words = ["ray", "job", "submit", f"--runtime-env={tmp_path / 'env.yaml'}", "--", "python", "train.py"]
    assert rewritten(words, OURS) == words


@pytest.mark.parametrize(
    "words",
    [
        "ray job submit --runtime-env-json {broken -- python train.py",
        "ray job submit --runtime-env-json [] -- python train.py",
        "ray job submit --runtime-env-json '{\"env_vars\": 1}' -- python train.py",
        "ray job submit --runtime-env /no/such/file -- python train.py",
        "ray job submit --runtime-env-json {} --runtime-env x.yaml -- python train.py",
        "ray job submit --runtime-env-json",
        "ray job list",
        "ray start --head",
        "python train.py",
        "bash -c 'ray job submit -- x'",
        "torchrun -- ray job submit",
        "x",
    ],
)
def test_everything_else_stays_as_it_is(words: str):
    assert rewritten(shlex.split(words), OURS) == shlex.split(words)


def test_a_job_that_nobody_waits_for_goes_on():
    assert goes_on(shlex.split("ray job submit --no-wait -- python train.py"))
    assert not goes_on(shlex.split("ray job submit -- python train.py --no-wait"))
    assert not goes_on(shlex.split("python train.py --no-wait"))
    assert is_submission(["uv", "run", "ray", "job", "submit", "--", "x"]) and not is_submission(["ray", "job", "stop"])
