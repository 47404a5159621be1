"""What a process below `actordbg run` carries: its environment, and Ray's runtime environments with it merged in."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actordbg.base.errors import EnvironmentProblem
from actordbg.install import ray_hooks
from actordbg.install.ray_hooks import FOLDER, child_environment, merged, reconciled

OURS = {"ACTORDBG_STORE": "/s", "ACTORDBG_RUN": "r"}
NODES = f"{FOLDER}{os.pathsep}${{PYTHONPATH}}"


@pytest.mark.parametrize(
    ("users", "path"),
    [
        (None, FOLDER),
        ("", FOLDER),
        ("/a:/b", f"{FOLDER}:/a:/b"),
        (":/a", f"{FOLDER}::/a"),
        (f"{FOLDER}:/a", f"{FOLDER}:/a"),
        ("/other/actordbg/install/pythonpath", FOLDER),
    ],
)
def test_our_folder_stands_once_in_front_of_the_users_path(users: str | None, path: str):
    environ = {"HOME": "/h"} | ({} if users is None else {"PYTHONPATH": users})
    assert child_environment(environ, "/s", "r") == {"HOME": "/h", **OURS, "PYTHONPATH": path}


def test_a_folder_that_cannot_stand_in_a_path_is_refused(monkeypatch):
    monkeypatch.setattr(ray_hooks, "FOLDER", "/a:b/pythonpath")
    with pytest.raises(EnvironmentProblem, match="PYTHONPATH"):
        child_environment({}, "/s", "r")


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        (None, {"PYTHONPATH": NODES}),
        ({}, {"PYTHONPATH": NODES}),
        ({"env_vars": None}, {"PYTHONPATH": NODES}),
        ({"env_vars": {"NCCL_DEBUG": "INFO"}}, {"NCCL_DEBUG": "INFO", "PYTHONPATH": NODES}),
        ({"env_vars": {"PYTHONPATH": "/a"}}, {"PYTHONPATH": f"{FOLDER}:/a"}),
        ({"env_vars": {"ACTORDBG_RUN": "theirs"}}, {"PYTHONPATH": NODES}),
    ],
)
def test_a_runtime_environment_keeps_what_is_the_users(given: dict[str, Any] | None, variables: dict[str, str]):
    before = copy.deepcopy(given)
    result = merged(given, OURS)
    assert result == {"env_vars": {**variables, **OURS}}
    assert given == before and merged(result, OURS) == result


def test_other_keys_of_a_runtime_environment_stay():
    assert merged({"working_dir": ".", "pip": ["a"]}, OURS).items() >= {"working_dir": "."}.items()


variables = st.dictionaries(
    st.sampled_from(["PYTHONPATH", "ACTORDBG_STORE", "ACTORDBG_RUN", "A", "B"]), st.sampled_from(["/x", "/x:/y", "1"])
)


@pytest.mark.slow
@settings(deadline=None)  # the first example imports ray
@given(job=variables, own=variables, submitted=st.booleans())
def test_ray_merges_what_was_reconciled_unless_the_user_had_a_conflict(job: dict[str, str], own: dict[str, str], submitted: bool):
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
