"""Fixtures that several test files share."""

import fcntl
import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import heavy
import pytest
import roots
import torch
from hypothesis import HealthCheck, settings
from roots import FORKED, MEMORY

from actordbg.document.blocks import WRONG, Verdict
from actordbg.store.layout import Store

SHARED_DUMPS = Path(__file__).resolve().parents[2] / "shared" / "data" / "input_dumps"


def pytest_configure():
    """One thread for each process, signals as a terminal has them, and no width, color or launcher from where the tests run.

    A test run in the background inherits an ignored SIGINT (nohup: SIGHUP), and so would the commands that tests interrupt, which
    leave ignored signals alone. Typer colors its help on GitHub's machines.
    """
    for name in (
        "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY",
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_SIZE",
    ):  # fmt: skip
        os.environ.pop(name, None)
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    as_before_the_fork()
    settings.register_profile(
        "no clock", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )  # a busy machine is no fault
    settings.load_profile("no clock")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes share two cores
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else each process that compiles builds ten programs to ask for that


def pytest_itemcollected(item):
    if item.get_closest_marker("forked"):
        item.add_marker("slow")
        item.fixturenames[:0] = ["forked_workers"]  # before what a module's fixtures replay


def pytest_collection_modifyitems(items):
    if "PYTEST_XDIST_WORKER" in os.environ:
        heavy.first(items)


def pytest_collection_finish():
    """What was imported stays: no collection looks at these hundreds of thousands of objects again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def wrong_has_a_finding():
    """No verdict of a test is WRONG without a rule that is broken: code, lists and pages read that, and not the sentence."""

    made = Verdict.__init__

    def make(verdict, *given, **named):
        made(verdict, *given, **named)
        assert verdict.word != WRONG or verdict.findings, verdict

    with patch.object(Verdict, "__init__", make):
        yield


@pytest.fixture(scope="session", autouse=True)
def ring_folder():
    """Rings of this test process and of the processes that it starts lie in a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix="actordbg-tests-", dir=MEMORY, ignore_cleanup_errors=True) as folder:
        os.environ["ACTORDBG_RING_DIR"] = folder
        yield Path(folder)


def as_a_worker():
    """The environment of a worker. Where a variable that torch reads differs, no worker would be forked, and each would take long."""
    from actordbg.config.replay_config import ReplayConfig
    from actordbg.replay.launch import child_environment

    return child_environment(ReplayConfig(), roots.environment())


def the_template(folder):
    """The socket of a process that forks workers, one for all processes of a test run, and the pipe that keeps it alive: the template ends
    when the last of them has closed it."""
    path, alive = folder / "template", folder / "alive"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not alive.exists():
            os.mkfifo(alive)
        held = os.open(alive, os.O_RDWR)
        if not path.exists():
            command = [sys.executable, str(FORKED / "template_of_workers.py"), str(path)]
            with open(alive, "rb") as end:
                template = subprocess.Popen(command, env=as_a_worker(), stdin=end, start_new_session=True)
            while not path.exists() and template.poll() is None:  # it imports torch; if it fails, workers start as usual
                time.sleep(0.05)
    return path, held


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config):
    """The test processes themselves are forks: each would import torch and transformers, for eight seconds of a core."""
    path, _ = the_template(config._tmp_path_factory.getbasetemp())  # type: ignore[attr-defined]
    os.environ["BEFORE_THE_FORK"] = os.environ.get("PYTHONPATH", "")
    os.environ |= {"TEMPLATE_OF_WORKERS": str(path), "FORKED_PROGRAM": "-c"}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(FORKED), os.environ["BEFORE_THE_FORK"])))


def as_before_the_fork():
    """What a test process starts knows nothing of the template."""
    if (path := os.environ.pop("BEFORE_THE_FORK", None)) is not None:
        for name in ("TEMPLATE_OF_WORKERS", "FORKED_PROGRAM", "PYTHONPATH"):
            os.environ.pop(name, None)
        os.environ |= {"PYTHONPATH": path} if path else {}


@pytest.fixture(scope="session")
def template_of_workers(tmp_path_factory):
    own = tmp_path_factory.getbasetemp()
    path, held = the_template(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)
    yield path
    os.close(held)


@pytest.fixture(scope="module")
def forked_workers(request):
    """Replays of this file start their workers in a tenth of the time; other files start them as a user does."""
    if torch.cuda.is_available():  # a fork cannot use CUDA
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEMPLATE_OF_WORKERS", str(request.getfixturevalue("template_of_workers")))
        patch.setenv("PYTHONPATH", str(FORKED), prepend=os.pathsep)
        yield


@pytest.fixture
def longest_s():
    """The longest test, a whole demo, takes two minutes and a half on two busy cores; a file may have a limit of its own."""
    return 600.0


@pytest.fixture(autouse=True)
def ends_some_time(longest_s):
    """A test that hangs fails where it is: otherwise the whole run would wait for it for ever."""

    def late(*_):
        pytest.fail(f"it was still running after {longest_s:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, longest_s)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def recording_as_before():
    """A truth or an actor that a test computes in this process turns recording off for the process: only for that test."""
    before = os.environ.get("ACTORDBG_DISABLE")
    yield
    os.environ.pop("ACTORDBG_DISABLE", None)
    if before is not None:
        os.environ["ACTORDBG_DISABLE"] = before


@pytest.fixture
def store(tmp_path):
    """A new, empty store."""
    return Store(tmp_path / "store").create()


@pytest.fixture(scope="session")
def shared_dumps():
    """The folder of real training pickles beside the checkout; tests that need it are skipped where it is absent."""
    if not SHARED_DUMPS.is_dir():
        pytest.skip("the real training dumps (../shared/data/input_dumps) are not on this machine")
    return SHARED_DUMPS
