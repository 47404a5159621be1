"""The wrappers around ray.init and submit_job: what is passed on, what is left alone, and what a worker does with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from runkit import below_run, python

from actordbg.install import ray_hooks
from actordbg.install.ray_hooks import FOLDER, HOOK, JOB_CONFIG, NAMES, merged, prepared, take_along

OURS = {"ACTORDBG_STORE": "/s", "ACTORDBG_RUN": "r"}
OPENRLHF = {"env_vars": {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN"}}


@pytest.fixture(autouse=True)
def below(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is below `run`."""
    for name in (*NAMES, JOB_CONFIG, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in OURS.items():
        monkeypatch.setenv(name, value)


class FakeRay(ModuleType):
    """A `ray` whose init keeps what it was called with. Guarantees: nothing of it starts a process."""

    def __init__(self, known: tuple[str, ...] = (HOOK,)) -> None:
        super().__init__("ray")
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any], str | None]] = []
        self.runtime_env = SimpleNamespace(RuntimeEnv=SimpleNamespace(known_fields=set(known)))
        self.init = self._init
        take_along(self)

    def _init(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append((args, kwargs, os.environ.get(JOB_CONFIG)))
        return "context"

    @property
    def runtime_environment(self) -> dict[str, Any]:
        return dict(self.calls[-1][1]["runtime_env"])


def test_a_driver_passes_ours_on_with_its_own() -> None:
    ray = FakeRay()
    assert ray.init("auto", runtime_env=OPENRLHF, num_cpus=3) == "context"
    ((args, kwargs, _),) = ray.calls
    assert args == ("auto",) and kwargs["num_cpus"] == 3
    assert ray.runtime_environment["env_vars"] == merged(OPENRLHF, OURS)["env_vars"]
    assert callable(ray.runtime_environment[HOOK])
    assert OPENRLHF["env_vars"].keys() == {"TOKENIZERS_PARALLELISM", "NCCL_DEBUG"}


def test_init_is_wrapped_once_and_keeps_its_name() -> None:
    ray = FakeRay()
    once = ray.init
    take_along(ray)
    assert ray.init is once and ray.init.__name__ == "_init"


def test_the_environment_in_a_job_config_is_not_replaced() -> None:
    ray = FakeRay()
    ray.init(job_config=SimpleNamespace(runtime_env={"working_dir": "/w"}))
    assert ray.runtime_environment["working_dir"] == "/w" and ray.runtime_environment["env_vars"].items() >= OURS.items()


@pytest.mark.parametrize(
    ("given", "known"),
    [
        ({"address": "ray://h:10001"}, (HOOK,)),
        ({"job_config": SimpleNamespace(runtime_env={}, _client_job=True)}, (HOOK,)),
        ({"runtime_env": {"image_uri": "image"}}, (HOOK,)),
        ({"runtime_env": {"env_vars": {"__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "sent"}}}, (HOOK,)),
        ({}, ("env_vars",)),
    ],
    ids=["client", "client's server", "container", "sent already", "old ray"],
)
def test_where_ray_takes_no_hook_none_is_added(given: dict[str, Any], known: tuple[str, ...]) -> None:
    ray = FakeRay(known)
    ray.init(**given)
    assert HOOK not in ray.runtime_environment and ray.runtime_environment["env_vars"].items() >= OURS.items()


@pytest.mark.parametrize("job", ["{broken", '{"runtime_env": 1}'])
def test_a_failure_of_ours_calls_ray_as_the_user_did(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(JOB_CONFIG, job)
    ray = FakeRay()
    ray.init(runtime_env=OPENRLHF)
    assert ray.calls == [((), {"runtime_env": OPENRLHF}, job)]
    assert capsys.readouterr().err.count("\n") == 1


def test_rays_own_errors_pass_and_the_jobs_variable_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    job = json.dumps({"runtime_env": merged({}, OURS), "metadata": {"a": "b"}})
    monkeypatch.setenv(JOB_CONFIG, job)
    ray = FakeRay()
    seen = []

    def fails(**_: Any) -> None:
        seen.append(json.loads(os.environ[JOB_CONFIG]))
        raise ValueError("theirs")

    ray.init = fails
    take_along(ray)
    with pytest.raises(ValueError, match="theirs"):
        ray.init()
    assert os.environ[JOB_CONFIG] == job
    assert seen == [{"runtime_env": {}, "metadata": {"a": "b"}}]


# ---- inside a submitted job ----


def submitted(runtime_env: dict[str, Any]) -> dict[str, str]:
    return {JOB_CONFIG: json.dumps({"runtime_env": merged(runtime_env, OURS), "metadata": {}}), **OURS}


def test_what_the_job_has_of_ours_moves_to_the_driver() -> None:
    kwargs, job = prepared({"runtime_env": OPENRLHF}, submitted({"working_dir": "gcs://x"}), takes_hook=True)
    assert json.loads(job or "")["runtime_env"] == {"working_dir": "gcs://x"}
    assert kwargs["runtime_env"]["env_vars"] == merged(OPENRLHF, OURS)["env_vars"]


def test_a_path_that_the_job_sets_keeps_its_place_and_gets_ours() -> None:
    kwargs, job = prepared({}, submitted({"env_vars": {"PYTHONPATH": "/users"}}), takes_hook=True)
    assert json.loads(job or "")["runtime_env"] == {"env_vars": {"PYTHONPATH": f"{FOLDER}:/users"}}
    assert kwargs["runtime_env"]["env_vars"] == OURS


def test_a_hook_that_the_job_names_runs_after_ours(tmp_path: Path) -> None:
    environment = submitted({HOOK: "users_hooks.setup"})
    kwargs, job = prepared({}, environment, takes_hook=True)
    assert HOOK not in json.loads(job or "")["runtime_env"]
    (tmp_path / "users_hooks.py").write_text("def setup(): print('theirs')")
    assert in_worker(kwargs["runtime_env"][HOOK], tmp_path) == "theirs\nTrue\n"


def test_two_hooks_of_the_users_stay_their_conflict() -> None:
    kwargs, job = prepared({"runtime_env": {HOOK: print}}, submitted({HOOK: "users.setup"}), takes_hook=True)
    assert HOOK in json.loads(job or "")["runtime_env"] and HOOK in kwargs["runtime_env"]


def test_a_submission_gets_ours(tmp_path: Path) -> None:
    class Client:
        def submit_job(self, *, entrypoint: str, runtime_env: dict[str, Any] | None = None) -> Any:
            return entrypoint, runtime_env

    module = ModuleType("ray.job_submission")
    module.JobSubmissionClient = Client  # type: ignore[attr-defined]
    take_along(module)
    take_along(module)
    assert Client().submit_job(entrypoint="x") == ("x", merged({}, OURS))
    assert Client().submit_job(entrypoint="x", runtime_env=OPENRLHF)[1] == merged(OPENRLHF, OURS)


# ---- in a worker ----


def in_worker(hook: Callable[[], None], folder: Path, **more: str) -> str:
    """What a fresh process without our PYTHONPATH says when it runs the hook as Ray does: from its pickle."""
    from ray import cloudpickle

    file = folder / "hook.pickle"
    file.write_bytes(cloudpickle.dumps(hook))
    code = (
        "import pickle, sys\n"
        f"pickle.loads(open({str(file)!r}, 'rb').read())()\n"
        "print(any(type(f).__name__ == 'ActordbgFinder' for f in sys.meta_path))"
    )
    return python(code, below_run("/s") | {"PYTHONPATH": str(folder)} | more)


def test_a_worker_that_lost_the_path_is_hooked_and_the_users_function_runs(tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")
    out = in_worker(ray_hooks.worker_setup(lambda: open(mark, "w").close(), FOLDER), tmp_path)
    assert out == "True\n" and Path(mark).exists()


def test_a_worker_on_a_node_that_has_actordbg_elsewhere_is_hooked(tmp_path: Path) -> None:
    (tmp_path / "actordbg").symlink_to(Path(FOLDER).parents[1])
    assert in_worker(ray_hooks.worker_setup(None, "/not/on/this/node"), tmp_path) == "True\n"


def test_a_worker_on_a_node_without_actordbg_goes_on(tmp_path: Path) -> None:
    (tmp_path / "actordbg").mkdir()
    (tmp_path / "actordbg" / "__init__.py").touch()
    (tmp_path / "users_hooks.py").write_text("def setup(): print('theirs')")
    assert in_worker(ray_hooks.worker_setup("users_hooks.setup", "/nowhere"), tmp_path) == "theirs\nFalse\n"


def test_what_the_users_hook_raises_is_theirs(tmp_path: Path) -> None:
    def fails() -> None:
        raise ValueError("theirs")

    with pytest.raises(AssertionError, match="ValueError: theirs"):
        in_worker(ray_hooks.worker_setup(fails, FOLDER), tmp_path)
