"""What `pip install actordbg` brings: nothing that could move a training environment's own packages."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib
from roots import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = {"torch", "deepspeed", "transformers", "openrlhf", "flash-attn", "ray", "vllm", "accelerate", "peft"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in requirements}


def test_a_plain_install_pins_nothing_and_leaves_the_training_environment_to_extras():
    extras = PROJECT["optional-dependencies"]
    assert names(PROJECT["dependencies"]).isdisjoint(HEAVY)
    assert [r for r in PROJECT["dependencies"] if "==" in r or "<" in r.split(";")[0]] == []
    assert {"torch", "deepspeed", "transformers"} <= names(extras["replay"])
    assert names(extras["openrlhf"]) == {"openrlhf"} and names(extras["flash-attn"]) == {"flash-attn"}


def test_every_dependency_is_pinned_for_the_project_itself():
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()}
    wanted = names(PROJECT["dependencies"]) | names(PROJECT["optional-dependencies"]["replay"])
    assert wanted - {"tomli"} <= pinned


@pytest.mark.slow
def test_the_wheel_is_one_package_that_makes_a_catalog_alone(tmp_path: Path):
    """It carries the migrations, and what `run` puts on the path alone in its folder."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    wheel = zipfile.ZipFile(next(tmp_path.glob("*.whl")))
    packed = wheel.namelist()
    assert {name.split("/")[0] for name in packed if "dist-info" not in name} == {"actordbg"}
    migrations = {Path(name).name for name in packed if name.startswith("actordbg/_migrations/versions/")}
    assert migrations == {path.name for path in (ROOT / "migrations/versions").glob("*.py")} != set()
    folder = "actordbg/install/pythonpath/"
    assert [name for name in packed if name.startswith(folder)] == [f"{folder}sitecustomize.py"]
    wheel.extractall(tmp_path / "site")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from actordbg.cli.app import main; main()"
    command = [sys.executable, "-c", code, str(tmp_path / "site"), "--store", str(tmp_path / "s"), "dump"]
    create = [*command, "create", "--batch-size", "1", "--seq-len", "8"]
    subprocess.run(create, check=True, cwd=tmp_path, capture_output=True)
    listed = subprocess.run([*command, "ls", "--json"], check=True, cwd=tmp_path, capture_output=True, text=True)
    assert '"seq_len": 8' in listed.stdout
