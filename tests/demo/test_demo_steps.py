"""`actordbg demo`: every step is the command it shows; the first failure ends it, with a reason; nothing is left behind.

The demo at the end is slow and real: it trains with OpenRLHF, replays what was recorded, unpatches and checks.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import roots
from amounts import WHOLE
from commandline import run_here

from actordbg.base.errors import EnvironmentProblem, LaunchProblem, UsageError
from actordbg.base.processes import session_members
from actordbg.demo import demo_training as steps
from actordbg.demo.demo_training import Demo, file_state, require_modules
from actordbg.formats.dumpfile import read_record
from actordbg.store.layout import Store


class Recorded(Demo):
    """A demo that notes the commands instead of running them: `ran` holds their arguments, in order."""

    def __init__(self, trainer, directory):
        self.said = []
        self.ran = []
        super().__init__(trainer, directory, self.said.append)  # type: ignore[arg-type]

    def _actordbg(self, *arguments):
        self.ran.append(arguments)


def test_dumping_is_switched_on_once_after_the_first_step_and_a_long_training_is_told_as_typed_in_few_lines(tmp_path):
    demo = Recorded("sft", tmp_path)
    demo._follow("starting", 0, "")
    demo._follow("loading", 0, "")
    assert demo.ran == []
    for step in range(1, 121):
        demo._follow("step", step, "")
        assert demo.ran == [("dump", "enable", "--calls", "forward,loss")]
    assert len(demo.said) < 12
    command = [sys.executable, "-m", "a.driver", "ppo", "--", "--a", str(tmp_path / "training" / "model")]
    assert Recorded("ppo", tmp_path)._as_typed(command) == "python -m openrlhf.cli.train_ppo_ray --a training/model"


def test_a_command_is_run_with_the_words_that_are_shown_without_settings_of_the_users_and_ends_the_demo_if_it_fails(
    monkeypatch, tmp_path, capfd
):
    said = []
    monkeypatch.setenv("ACTORDBG_STORE", "/users/store")
    demo = Demo("sft", tmp_path, said.append)
    demo._actordbg("--version")
    assert said == ["$ actordbg --store store --version"] and re.match(r"actordbg \d", capfd.readouterr().out)
    assert not [name for name in demo._environment() if name.startswith("ACTORDBG_")]
    with pytest.raises(LaunchProblem, match=r"actordbg --store store no-such-command.* exit code 2"):
        demo._actordbg("no-such-command")
    Demo("sft", tmp_path, said.append, "/own/store")._actordbg("--version")
    assert said[-1] == "$ actordbg --store /own/store --version"
    with pytest.raises(LaunchProblem, match="selected no recorded call"):
        Recorded("sft", tmp_path)._replay()


def test_a_file_that_came_back_different_is_not_called_the_same(tmp_path):
    actor = tmp_path / "actor.py"
    actor.write_text("class Actor: ...\n")
    before = file_state(actor)
    demo = Recorded("sft", tmp_path)
    demo._unpatch(actor, before)
    os.utime(actor, ns=(1, 1))
    with pytest.raises(EnvironmentProblem, match="did not restore the file"):
        demo._unpatch(actor, before)


def test_what_the_training_needs_and_lacks_is_said_before_anything_starts(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(steps.importlib.util, "find_spec", lambda name: None if name == "ray" else found("json"))
    require_modules("sft")
    with pytest.raises(EnvironmentProblem, match=r"not installed: ray$"):
        require_modules("ppo")


SHORTER = """
import sys
from actordbg.cli.app import main
from actordbg.trainers.openrlhf import demo_programs
demo_programs._SFT = demo_programs._SFT.replace("max_epochs 5", "max_epochs 3")
sys.argv[0] = "actordbg"
main()
"""


def _demo(*options, cwd, start=("-m", "actordbg"), **environment):
    command = [sys.executable, *start, "demo", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=roots.environment(**environment), **pipes)


needs_openrlhf = pytest.mark.skipif(
    importlib.util.find_spec("openrlhf") is None or importlib.util.find_spec("deepspeed") is None,
    reason="openrlhf and deepspeed are not installed here (make test installs them)",
)


@needs_openrlhf
@pytest.mark.slow
def test_a_demo_that_is_told_to_end_leaves_no_process_and_no_file(tmp_path):
    demo = _demo("--trainer", "ppo", cwd=tmp_path, TMPDIR=str(tmp_path))
    assert demo.stdout is not None
    for line in demo.stdout:
        if "starting processes" in line:
            break
    sessions = _child_sessions(demo.pid)
    assert len(sessions) == 1
    deadline = time.monotonic() + 90
    while len(session_members(sessions[0])) < 6:  # the driver, Ray's daemons and its first workers
        assert time.monotonic() < deadline and demo.poll() is None
        time.sleep(0.1)
    demo.send_signal(signal.SIGTERM)
    demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert session_members(sessions[0]) == []
    assert list(tmp_path.iterdir()) == []


def _child_sessions(parent):
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(child) for child in children if os.getsid(int(child)) == int(child)]


@needs_openrlhf
@pytest.mark.forked
def test_the_whole_way_from_a_real_training_to_an_unpatched_file(tmp_path):
    """The steps are the same for both trainers; in `make whole` it is PPO under Ray, which takes twice as long.

    SFT has three epochs of its five.
    """
    kept, ppo = tmp_path / "kept", WHOLE
    demo = _demo("--trainer", "ppo" if ppo else "sft", "--keep", str(kept), cwd=tmp_path, start=("-c", SHORTER))
    output = demo.communicate(timeout=900)[0]
    assert demo.returncode == 0, output[-4000:]
    commands = [line for line in output.splitlines() if line.startswith("$ actordbg --store store ")]
    verbs = [re.sub(r"^\$ actordbg --store store ", "", line).split(" --")[0] for line in commands]
    assert ", ".join(verbs) == "patch, dump enable, dump status, index, dump ls, replay, report, unpatch, check"
    records = [read_record(path) for path in Store(kept / "store").iter_dumps()]
    assert len(records) >= 10 and {record.grad_enabled for record in records} == ({True, False} if ppo else {True})
    assert not ppo or {record.role for record in records} == {"policy", "policy loss", "reference"}
    assert "4 passed" in output
    checked = output.partition("[7/7]")[2]
    assert re.search(r"^RIGHT: 2 dumps, a sample of \d+, match the truth", checked, re.M)
    (following,), (page,) = (re.findall(rf"^ *{word}: (.+)$", checked, re.M) for word in ("next", "page"))
    assert following.startswith("actordbg ") and Path(page).is_file()
    before, after = (re.search(rf"sha256 {word} +(\w{{64}})", output) for word in ("before", "after"))
    assert before and after and before[1] == after[1]


def test_the_store_that_is_typed_is_the_demos_and_what_is_not_empty_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Demo, "run", lambda demo: said.append(demo.store))
    said = []
    own = str(tmp_path / "own")
    assert run_here("--store", own, "demo", "--keep", tmp_path / "work").exit_code == 0 and said == [own]
    (mine := tmp_path / "own" / "FORMAT").mkdir(parents=True)
    for typed in (["--store", own, "demo"], ["demo", "--keep", own]):
        refused = run_here(*typed)
        assert isinstance(refused.exception, UsageError) and "is not empty" in refused.exception.message and len(said) == 1
        assert mine.exists()
