"""The wrappers around ray.init and submit_job: what a process below `run` carries, is passed on, and does in a worker."""

import copy
import json
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, strategies as st
from patchkit import stand_in
from runkit import below_run, python

from actordbg.base.errors import EnvironmentProblem
from actordbg.install import ray_hooks
from actordbg.install.ray_hooks import (
    FOLDER,
    HOOK,
    JOB_CONFIG,
    NAMES,
    child_environment,
    merged,
    prepared,
    reconciled,
    take_along,
)

OURS = {"ACTORDBG_STORE": "/s", "ACTORDBG_RUN": "r"}
OPENRLHF = {"env_vars": {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN"}}


@pytest.fixture(autouse=True)
def below(monkeypatch):
    """This process is below `run`."""
    for name in (*NAMES, JOB_CONFIG, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in OURS.items():
        monkeypatch.setenv(name, value)


class FakeRay(ModuleType):
    """A `ray` whose init keeps what it was called with. Guarantees: nothing of it starts a process."""

    def __init__(self, known=(HOOK,)):
        super().__init__("ray")
        self.calls = []
        self.runtime_env = SimpleNamespace(RuntimeEnv=SimpleNamespace(known_fields=set(known)))
        self.init = self._init
        take_along(self)

    def _init(self, *args, **kwargs):
        self.calls.append((args, kwargs, os.environ.get(JOB_CONFIG)))
        return "context"

    @property
    def runtime_environment(self):
        return dict(self.calls[-1][1]["runtime_env"])


def test_a_driver_passes_ours_on_with_its_own():
    ray = FakeRay()
    take_along(ray)
    assert ray.init("auto", runtime_env=OPENRLHF, num_cpus=3) == "context"
    ((args, kwargs, _),) = ray.calls
    assert args == ("auto",) and kwargs["num_cpus"] == 3
    assert ray.runtime_environment["env_vars"] == merged(OPENRLHF, OURS)["env_vars"]
    assert callable(ray.runtime_environment[HOOK])
    assert OPENRLHF["env_vars"].keys() == {"TOKENIZERS_PARALLELISM", "NCCL_DEBUG"}


def test_the_environment_in_a_job_config_is_not_replaced():
    ray = FakeRay()
    ray.init(job_config=SimpleNamespace(runtime_env={"working_dir": "/w"}))
    assert ray.runtime_environment["working_dir"] == "/w" and ray.runtime_environment["env_vars"].items() >= OURS.items()


@pytest.mark.parametrize(
    "given, known",
    [
        ({"address": "ray://h:10001"}, (HOOK,)),
        ({"job_config": SimpleNamespace(runtime_env={}, _client_job=True)}, (HOOK,)),
        ({"runtime_env": {"image_uri": "image"}}, (HOOK,)),
        ({"runtime_env": {"env_vars": {"__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "sent"}}}, (HOOK,)),
        ({}, ("env_vars",)),
    ],
    ids=["client", "client's server", "container", "sent already", "old ray"],
)
def test_where_ray_takes_no_hook_none_is_added(given, known):
    ray = FakeRay(known)
    ray.init(**given)
    assert HOOK not in ray.runtime_environment and ray.runtime_environment["env_vars"].items() >= OURS.items()


@pytest.mark.parametrize("job", ["{broken", '{"runtime_env": 1}'])
def test_a_failure_of_ours_calls_ray_as_the_user_did(job, monkeypatch, capsys):
    monkeypatch.setenv(JOB_CONFIG, job)
    ray = FakeRay()
    ray.init(runtime_env=OPENRLHF)
    assert ray.calls == [((), {"runtime_env": OPENRLHF}, job)]
    assert capsys.readouterr().err.count("\n") == 1


def test_rays_own_errors_pass_and_the_jobs_variable_comes_back(monkeypatch):
    job = json.dumps({"runtime_env": merged({}, OURS), "metadata": {"a": "b"}})
    monkeypatch.setenv(JOB_CONFIG, job)
    ray = FakeRay()
    seen = []

    def fails(**_):
        seen.append(json.loads(os.environ[JOB_CONFIG]))
        raise ValueError("theirs")

    ray.init = fails
    take_along(ray)
    with pytest.raises(ValueError, match="theirs"):
        ray.init()
    assert os.environ[JOB_CONFIG] == job
    assert seen == [{"runtime_env": {}, "metadata": {"a": "b"}}]


# ---- inside a submitted job ----


def submitted(runtime_env):
    return {JOB_CONFIG: json.dumps({"runtime_env": merged(runtime_env, OURS), "metadata": {}}), **OURS}


def test_a_hook_that_the_job_names_runs_after_ours(tmp_path):
    environment = submitted({HOOK: "users_hooks.setup"})
    kwargs, job = prepared({}, environment, takes_hook=True)
    assert HOOK not in json.loads(job or "")["runtime_env"]
    (tmp_path / "users_hooks.py").write_text("def setup(): print('theirs')")
    assert in_worker(kwargs["runtime_env"][HOOK], tmp_path) == "theirs\nTrue\n"


def test_two_hooks_of_the_users_stay_their_conflict():
    kwargs, job = prepared({"runtime_env": {HOOK: print}}, submitted({HOOK: "users.setup"}), takes_hook=True)
    assert HOOK in json.loads(job or "")["runtime_env"] and HOOK in kwargs["runtime_env"]


def test_a_submission_gets_ours(tmp_path):
    class Client:
        def submit_job(self, *, entrypoint, runtime_env=None):
            return entrypoint, runtime_env

    module = ModuleType("ray.job_submission")
    module.JobSubmissionClient = Client  # type: ignore[attr-defined]
    take_along(module)
    take_along(module)
    assert Client().submit_job(entrypoint="x") == ("x", merged({}, OURS))
    assert Client().submit_job(entrypoint="x", runtime_env=OPENRLHF)[1] == merged(OPENRLHF, OURS)


# ---- in a worker ----


def in_worker(hook, folder, **more):
    """What a fresh process without our PYTHONPATH says when it runs the hook as Ray does: from its pickle."""
    from ray import cloudpickle

    file = folder / "hook.pickle"
    file.write_bytes(cloudpickle.dumps(hook))
    code = (
        "import pickle, sys\n"
        f"pickle.loads(open({str(file)!r}, 'rb').read())()\n"
        "print(any(type(f).__name__ == 'ActordbgFinder' for f in sys.meta_path))"
    )
    return python(code, below_run() | {"PYTHONPATH": str(folder)} | more)


def test_a_worker_that_lost_the_path_is_hooked_and_the_users_function_runs_with_its_own_errors(tmp_path):
    def fails():
        raise ValueError("theirs")

    mark = str(tmp_path / "mark")
    out = in_worker(ray_hooks.worker_setup(lambda: open(mark, "w").close(), FOLDER), tmp_path)
    assert out == "True\n" and Path(mark).exists()
    with pytest.raises(AssertionError, match="ValueError: theirs"):
        in_worker(ray_hooks.worker_setup(fails, FOLDER), tmp_path)


@pytest.mark.parametrize("there", [True, False])
def test_a_worker_is_hooked_where_actordbg_lies_elsewhere_and_goes_on_where_it_does_not(tmp_path, there):
    (tmp_path / "users_hooks.py").write_text("def setup(): print('theirs')")
    if there:
        (tmp_path / "actordbg").symlink_to(Path(FOLDER).parents[1])
    else:
        stand_in(tmp_path, "")
    assert in_worker(ray_hooks.worker_setup("users_hooks.setup", "/nowhere"), tmp_path) == f"theirs\n{there}\n"


NODES = f"{FOLDER}{os.pathsep}${{PYTHONPATH}}"


@pytest.mark.parametrize(
    "users, path",
    [
        (None, FOLDER),
        ("", FOLDER),
        (":/a", f"{FOLDER}::/a"),
        (f"{FOLDER}:/a", f"{FOLDER}:/a"),
        ("/other/actordbg/install/pythonpath", FOLDER),
    ],
)
def test_our_folder_stands_once_in_front_of_the_users_path(users, path):
    environ = {"HOME": "/h"} | ({} if users is None else {"PYTHONPATH": users})
    assert child_environment(environ, "/s", "r") == {"HOME": "/h", **OURS, "PYTHONPATH": path}


def test_a_folder_that_cannot_stand_in_a_path_is_refused(monkeypatch):
    monkeypatch.setattr(ray_hooks, "FOLDER", "/a:b/pythonpath")
    with pytest.raises(EnvironmentProblem, match="PYTHONPATH"):
        child_environment({}, "/s", "r")


@pytest.mark.parametrize(
    "given, variables",
    [
        (None, {"PYTHONPATH": NODES}),
        ({"env_vars": None, "working_dir": "."}, {"PYTHONPATH": NODES}),
        ({"env_vars": {"NCCL_DEBUG": "INFO"}}, {"NCCL_DEBUG": "INFO", "PYTHONPATH": NODES}),
        ({"env_vars": {"PYTHONPATH": "/a"}}, {"PYTHONPATH": f"{FOLDER}:/a"}),
        ({"env_vars": {"ACTORDBG_RUN": "theirs"}}, {"PYTHONPATH": NODES}),
    ],
)
def test_a_runtime_environment_keeps_what_is_the_users(given, variables):
    before = copy.deepcopy(given)
    result = merged(given, OURS)
    assert result == {**(given or {}), "env_vars": {**variables, **OURS}}
    assert given == before and merged(result, OURS) == result


variables = st.dictionaries(
    st.sampled_from(["PYTHONPATH", "ACTORDBG_STORE", "ACTORDBG_RUN", "A", "B"]), st.sampled_from(["/x", "/x:/y", "1"])
)


@pytest.mark.slow
@given(job=variables, own=variables, submitted=st.booleans())
def test_ray_merges_what_was_reconciled_unless_the_user_had_a_conflict(job, own, submitted):
    """`submitted`: the job was submitted below `run`, so that its runtime environment holds ours already."""
    from ray.runtime_env.runtime_env import _merge_runtime_env

    theirs = {"env_vars": dict(job)}
    plain = _merge_runtime_env(
        {"env_vars": {n: v for n, v in job.items() if n not in OURS}},
        {"env_vars": {n: v for n, v in own.items() if n not in OURS}},
    )
    changed_job, changed_own = reconciled(merged(theirs, OURS) if submitted else theirs, {"env_vars": own}, OURS)
    result = _merge_runtime_env(changed_job, changed_own)
    if plain is None:
        assert result is None
        return
    came = result["env_vars"]
    users = plain.get("env_vars", {})
    assert {n: came[n] for n in OURS} == OURS
    assert {n: v for n, v in came.items() if n not in (*OURS, "PYTHONPATH")} == {
        n: v for n, v in users.items() if n != "PYTHONPATH"
    }
    assert came["PYTHONPATH"] == (f"{FOLDER}:{users['PYTHONPATH']}" if "PYTHONPATH" in users else NODES)
