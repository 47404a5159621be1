"""The file that every Python process below `actordbg run` executes: it waits, records, lends, and gets out of the way."""

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest
from patchkit import HANDLER, SIGNALLED, stand_in
from roots import ROOT, run_program
from runkit import below_run, clean_environment, ended, fake_openrlhf, python

from actordbg.install.ray_hooks import FOLDER

INSTALLED = "import sys; print(any(type(f).__name__ == 'ActordbgFinder' for f in sys.meta_path))"
PLAIN_ACTOR = "class Actor:\n    def forward(self, sequences, attention_mask=None):\n        return sequences\n"
HOOK = """
def install(actor_cls, *, store=None):
    original = actor_cls.forward
    if not hasattr(original, "original"):
        def forward(self, *args):
            return "wrapped", store
        forward.original = original
        actor_cls.forward = forward
    actor_cls.installed = getattr(actor_cls, "installed", 0) + 1
    return True
"""


@pytest.fixture
def light(tmp_path):
    """A folder with an OpenRLHF without torch, and an `actordbg` of the training environment's own whose hook is a stand-in."""
    folder = tmp_path / "light"
    fake_openrlhf(folder, PLAIN_ACTOR)
    stand_in(folder, HOOK)
    return folder


USE = "from openrlhf.models.actor import Actor\nprint(Actor().forward(1), Actor.installed)"


def test_the_actor_is_wrapped_with_its_module_and_anew_when_it_is_made_anew(light):
    code = (
        "import importlib, inspect, openrlhf.models.actor as m\n"
        "first = m.Actor; print(first().forward(1), first.installed, 'return sequences' in inspect.getsource(m))\n"
        "importlib.reload(m); print(first is m.Actor, m.Actor().forward(1)[0], m.Actor.installed, type(m.__spec__.loader).__name__)"
    )
    assert python(code, below_run(light)) == "('wrapped', '/s') 1 True\nFalse wrapped 1 SourceFileLoader\n"


def test_an_actor_that_is_wrapped_already_is_not_wrapped_again(light):
    actor = light / "openrlhf" / "models" / "actor.py"
    actor.write_text(f"{PLAIN_ACTOR}from actordbg.capture.hook import install\ninstall(Actor, store='/patched')\n")
    assert python(USE, below_run(light)) == "('wrapped', '/patched') 2\n"


def test_an_actor_that_an_editable_installation_serves_is_wrapped(light, tmp_path):
    """Such an installation has no folder on the path, but a finder of its own."""
    code = f"""
import sys
from importlib.machinery import PathFinder
class Editable:
    def find_spec(self, name, path=None, target=None):
        return PathFinder.find_spec(name, [{str(light)!r}]) if name == "openrlhf" else None
sys.meta_path.insert(1, Editable())
{USE}
"""
    (tmp_path / "lib").mkdir()
    (light / "actordbg").rename(tmp_path / "lib" / "actordbg")
    assert python(code, below_run(tmp_path / "lib")) == "('wrapped', '/s') 1\n"


@pytest.mark.parametrize("in_front", ["ours", "theirs"])
def test_it_shares_a_module_with_the_import_hook_of_replays(light, in_front):
    """CPU support waits for the same module, with a finder of its own."""
    root = str(ROOT)
    code = f"""
import sys
import actordbg
actordbg.__path__.append({root + "/actordbg"!r})
from actordbg.trainers.importhook import after_import
after_import("openrlhf.models.actor", lambda module: setattr(module, "seen", True))
if {in_front == "ours"}:
    sys.meta_path.insert(1, sys.meta_path.pop(0))
print(type(sys.meta_path[0]).__name__)
{USE}
import openrlhf.models.actor
print(openrlhf.models.actor.seen)
"""
    first = {"ours": "ActordbgFinder", "theirs": "_WaitingFinder"}[in_front]
    assert python(code, below_run(light)) == f"{first}\n('wrapped', '/s') 1\nTrue\n"


def test_what_is_imported_already_is_wrapped_when_the_file_is_executed_later(light):
    code = f"""
import importlib.util, sys
from openrlhf.models.actor import Actor
before = Actor().forward(1)
spec = importlib.util.spec_from_file_location("actordbg_in_worker", {os.path.join(FOLDER, "sitecustomize.py")!r})
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print(before, Actor().forward(1))
"""
    environment = below_run(light) | {"PYTHONPATH": str(light)}
    assert python(code, environment) == "1 ('wrapped', '/s')\n"


@pytest.mark.parametrize(
    "hook, said",
    [
        ("import no_such_module_at_all", "pip install no_such_module_at_all"),
        ("raise SystemExit(7)", "SystemExit: 7"),
    ],
)
def test_a_failure_is_one_line_and_the_program_runs_on(light, hook, said):
    (light / "actordbg" / "capture" / "hook.py").write_text(hook)
    code = "from openrlhf.models.actor import Actor; print(Actor().forward(5))"
    done = ended(code, below_run(light))
    assert (done.returncode, done.stdout) == (0, "5\n")
    (line,) = done.stderr.splitlines()
    assert line.startswith("actordbg: not recording in process ") and said in line


@pytest.mark.parametrize("error", SIGNALLED)
def test_what_a_signal_handler_of_the_program_raises_passes(light, error):
    (light / "actordbg" / "capture" / "hook.py").write_text(HANDLER.format(error=error))
    done = ended("from openrlhf.models.actor import Actor; print(5)", below_run(light))
    assert done.returncode and not done.stdout
    assert "not recording" not in done.stderr and done.stderr.splitlines()[-1].endswith("over")


@pytest.mark.parametrize(
    "changed, installed",
    [
        ({}, True),
        ({"ACTORDBG_DISABLE": "1"}, False),
        ({"ACTORDBG_STORE": ""}, False),
    ],
)
def test_it_waits_only_where_there_is_a_store_and_nobody_disabled_it(changed, installed):
    assert python(INSTALLED, below_run() | changed) == f"{installed}\n"


def test_a_process_that_imports_no_openrlhf_loads_nothing_of_ours():
    code = "import sys; print('\\n'.join(sys.modules))"
    added = set(python(code, below_run()).split()) - set(python(code, clean_environment()).split())
    assert added <= {"sitecustomize"}


def test_the_program_sees_the_path_that_it_would_have_had(tmp_path):
    code = "import sys; print(sys.path)"
    plain = python(code, clean_environment(PYTHONPATH=str(tmp_path)))
    assert python(code, below_run(tmp_path)) == plain
    assert python(code, below_run()) == python(code, clean_environment())


def test_an_empty_rest_of_the_path_does_not_become_the_working_directory(tmp_path):
    code = "import os, sys; print(sys.path, os.environ['PYTHONPATH'])"
    given = below_run() | {"PYTHONPATH": FOLDER + os.pathsep}
    assert python(code, given, cwd=tmp_path) == python(code, below_run(), cwd=tmp_path)


def test_the_waiting_goes_on_in_grandchildren_and_spawned_processes(light):
    program = light / "spawns.py"
    program.write_text(
        "import multiprocessing, subprocess, sys\n"
        "def work():\n"
        "    from openrlhf.models.actor import Actor\n"
        "    print(Actor().forward(1), flush=True)\n"
        "if __name__ == '__main__':\n"
        "    for how in ('spawn', 'forkserver', 'fork'):\n"
        "        child = multiprocessing.get_context(how).Process(target=work); child.start(); child.join()\n"
        "    subprocess.run([sys.executable, '-m', 'spawns_module'], check=True)\n"
    )
    (light / "spawns_module.py").write_text("from spawns import work\nwork()\n")
    done = run_program([sys.executable, str(program)], env=below_run(light), timeout=120, cwd="/")
    assert done.stdout == "('wrapped', '/s')\n" * 4, done.stderr


def test_the_deepspeed_launcher_hands_our_variables_to_other_nodes(light):
    package = light / "deepspeed" / "launcher"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "runner.py").write_text("EXPORT_ENVS = ['MLFLOW', 'PYTHON']\n")
    code = "from deepspeed.launcher.runner import EXPORT_ENVS; print(EXPORT_ENVS)"
    assert python(code, below_run(light)) == "['MLFLOW', 'PYTHON', 'ACTORDBG_']\n"
    (installed,) = importlib.metadata.distribution("deepspeed").locate_file("deepspeed/launcher").glob("runner.py")
    (line,) = [line for line in installed.read_text().splitlines() if line.startswith("EXPORT_ENVS = ")]
    assert "'PYTHON'" in line, "what our addition to this list rests on"


# ---- the user's own sitecustomize ----

USERS = {
    "works": "import sys; mark = 'theirs'; sys.users = __name__; sys.path.insert(0, '/theirs')",
    "misses a module": "import no_such_module_at_all",
    "says that it is not there": "raise ImportError('theirs', name='sitecustomize')",
    "ends the process": "raise SystemExit(9)",
}


@pytest.mark.parametrize("kind", USERS)
def test_a_sitecustomize_of_the_users_behaves_as_without_us(tmp_path, kind):
    (tmp_path / "sitecustomize.py").write_text(USERS[kind])
    code = """
import sys
module = sys.modules.get("sitecustomize")
print(getattr(module, "mark", None), getattr(sys, "users", None), sys.path)
"""

    def outcome(environment):
        done = ended(code, environment)
        last = done.stderr.splitlines()[-1:]  # above it, a traceback through our frames where the interpreter gives up
        return done.returncode, done.stdout, done.stderr if done.returncode == 0 else "".join(last)

    plain = outcome(clean_environment(PYTHONPATH=str(tmp_path)))
    assert outcome(below_run(tmp_path)) == plain
    assert kind != "works" or plain[1].startswith("theirs sitecustomize")


def test_with_two_copies_of_actordbg_on_the_path_one_waits(tmp_path):
    other = tmp_path / "actordbg" / "install" / "pythonpath"
    other.mkdir(parents=True)
    (other / "sitecustomize.py").write_text((Path(FOLDER) / "sitecustomize.py").read_text())
    (tmp_path / "sitecustomize.py").write_text("print('theirs')")
    code = "import sys; print(sum(type(f).__name__ == 'ActordbgFinder' for f in sys.meta_path), sys.path[1:2])"
    plain = python("import sys; print(sys.path[1:2])", clean_environment(PYTHONPATH=str(tmp_path)))
    assert python(code, below_run(other, tmp_path)) == f"theirs\n1 {plain.splitlines()[1]}\n"


STOPPED = """
import os, sys, types
import actordbg.debug as debug
def breakpoint_(*arguments, frame, **named):
    print("stopped", arguments, named, frame.f_code.co_name, "secret" in frame.f_locals)
debug.breakpoint = breakpoint_
os.environ["PYTHONBREAKPOINT"] = "ray.util.rpdb.set_trace"  # as Ray does in each of its processes
def train():
    secret = 1
    breakpoint(1, timeout=2)
train()
"""


def test_below_run_with_stops_a_breakpoint_is_ours_though_ray_sets_its_own(tmp_path):
    with_stops = below_run(ROOT) | {"PYTHONBREAKPOINT": "actordbg.debug.breakpoint"}
    assert python(STOPPED, with_stops) == "stopped (1,) {'timeout': 2} train True\n"
    without = below_run(ROOT)
    assert python("import sys; print(sys.breakpointhook is sys.__breakpointhook__)", without) == "True\n"
