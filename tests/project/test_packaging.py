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


def test_a_plain_install_pulls_in_nothing_of_the_training_environment():
    assert names(PROJECT["dependencies"]).isdisjoint(HEAVY)


def test_nothing_is_pinned_for_the_user():
    assert [r for r in PROJECT["dependencies"] if "==" in r or "<" in r.split(";")[0]] == []


def test_the_heavy_packages_are_extras():
    extras = PROJECT["optional-dependencies"]
    assert {"torch", "deepspeed", "transformers"} <= names(extras["replay"])
    assert names(extras["openrlhf"]) == {"openrlhf"} and names(extras["flash-attn"]) == {"flash-attn"}


def test_every_dependency_is_pinned_for_the_project_itself():
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in (ROOT / "constraints.txt").read_text().splitlines()}
    wanted = names(PROJECT["dependencies"]) | names(PROJECT["optional-dependencies"]["replay"])
    assert wanted - {"tomli"} <= pinned


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return zipfile.ZipFile(next(folder.glob("*.whl")))


@pytest.mark.slow
def test_the_wheel_carries_the_migrations(wheel: zipfile.ZipFile):
    packed = {name for name in wheel.namelist() if name.startswith("actordbg/_migrations/versions/0")}
    assert {Path(name).name for name in packed} == {path.name for path in (ROOT / "migrations/versions").glob("0*.py")} != set()


@pytest.mark.slow
def test_the_wheel_carries_what_run_puts_on_the_path_alone_in_its_folder(wheel: zipfile.ZipFile):
    folder = "actordbg/install/pythonpath/"
    assert [name for name in wheel.namelist() if name.startswith(folder)] == [f"{folder}sitecustomize.py"]


@pytest.mark.slow
def test_the_wheel_installs_one_package(wheel: zipfile.ZipFile):
    assert {name.split("/")[0] for name in wheel.namelist() if "dist-info" not in name} == {"actordbg"}


@pytest.mark.slow
def test_an_installed_copy_alone_makes_a_catalog(wheel: zipfile.ZipFile, tmp_path: Path):
    wheel.extractall(tmp_path / "site")
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from actordbg.cli.app import main; main()"
    command = [sys.executable, "-c", code, str(tmp_path / "site"), "--store", str(tmp_path / "s"), "dump"]
    create = [*command, "create", "--batch-size", "1", "--seq-len", "8"]
    subprocess.run(create, check=True, cwd=tmp_path, capture_output=True)
    listed = subprocess.run([*command, "ls", "--json"], check=True, cwd=tmp_path, capture_output=True, text=True)
    assert '"seq_len": 8' in listed.stdout
