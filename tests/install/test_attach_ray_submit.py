"""`ray job submit` as the command of `actordbg run`: its runtime environment gets what is ours, and the rest stays."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from actordbg.install.command import goes_on, is_submission, rewritten
from actordbg.install.ray_hooks import merged

OURS = {"ACTORDBG_STORE": "/s", "ACTORDBG_RUN": "r"}
USERS = {"working_dir": ".", "env_vars": {"NCCL_DEBUG": "INFO"}}


def expected(runtime_env: object) -> str:
    return f"--runtime-env-json={json.dumps(merged(runtime_env, OURS))}"  # type: ignore[arg-type]


@pytest.mark.parametrize("program", ["ray", "/envs/rlhf/bin/ray", "uv run ray", "env A=1 ray"])
def test_a_submission_without_a_runtime_environment_gets_one(program: str) -> None:
    words = shlex.split(f"{program} job submit --address http://h:8265 -- python train.py --runtime-env-json x")
    cut = words.index("--")
    assert rewritten(words, OURS) == [*words[:cut], expected({}), *words[cut:]]


@pytest.mark.parametrize("joined", [True, False])
def test_a_runtime_environment_in_json_is_merged(joined: bool) -> None:
    text = json.dumps(USERS)
    option = [f"--runtime-env-json={text}"] if joined else ["--runtime-env-json", text]
    words = ["ray", "job", "submit", *option, "--no-wait", "--", "python", "train.py"]
    assert rewritten(words, OURS) == ["ray", "job", "submit", "--no-wait", expected(USERS), "--", "python", "train.py"]


def test_a_runtime_environment_in_a_file_is_merged(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    file = tmp_path / "env.yaml"
    file.write_text("working_dir: .\nenv_vars:\n  NCCL_DEBUG: INFO\n")
    words = ["ray", "job", "submit", "--runtime-env", str(file), "--", "python", "train.py"]
    assert rewritten(words, OURS) == ["ray", "job", "submit", expected(USERS), "--", "python", "train.py"]


def test_without_pyyaml_a_file_is_left_to_the_ray_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_everything_else_stays_as_it_is(words: str) -> None:
    assert rewritten(shlex.split(words), OURS) == shlex.split(words)


def test_a_job_that_nobody_waits_for_goes_on() -> None:
    assert goes_on(shlex.split("ray job submit --no-wait -- python train.py"))
    assert not goes_on(shlex.split("ray job submit -- python train.py --no-wait"))
    assert not goes_on(shlex.split("python train.py --no-wait"))
    assert is_submission(["uv", "run", "ray", "job", "submit", "--", "x"]) and not is_submission(["ray", "job", "stop"])
