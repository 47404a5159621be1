"""What `pip install actordbg` brings: nothing that could move a training environment's own packages."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from replaycases import old_pickle
from roots import ROOT, run_program

from actordbg.config.sources import parse_toml

PROJECT = parse_toml((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = {"torch", "deepspeed", "transformers", "openrlhf", "flash-attn", "ray", "vllm", "accelerate", "peft"}


def names(requirements):
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
def test_the_wheel_is_one_package_that_imports_lists_and_replays_in_an_environment_of_its_own(tmp_path):
    """It carries types (`mypy` reads `typed_user.py` with the package), the migrations, and what `run` puts on the path alone in
    its folder. Dependencies are those installed here.
    """
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in packed if "dist-info" not in name} == {"actordbg"}
    migrations = {Path(name).name for name in packed if name.startswith("actordbg/_migrations/versions/")}
    assert migrations == {path.name for path in (ROOT / "migrations/versions").glob("*.py")} != set()
    package = [path for path in (ROOT / "actordbg").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {str(path.relative_to(ROOT)) for path in package} <= {*packed} and "actordbg/py.typed" in packed
    (entries,) = (name for name in packed if name.endswith("entry_points.txt"))
    assert b"[pytest11]" in zipfile.ZipFile(wheel).read(entries)
    folder = "actordbg/install/pythonpath/"
    assert [name for name in packed if name.startswith(folder)] == [f"{folder}sitecustomize.py"]

    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, capture_output=True)
    (packages,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files are not read there
    for number in range(3):
        old_pickle(tmp_path / "pickles", stamp=f"20250619_05260{number}_430740")

    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("ACTORDBG_")}

    def actordbg(*arguments):
        command = [str(python.with_name("actordbg")), *arguments]
        done = run_program(command, cwd=tmp_path, env=clean)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    place = [str(python), "-c", "import actordbg; print(actordbg.__file__)"]
    assert Path(subprocess.check_output(place, cwd=tmp_path, env=clean, text=True)).is_relative_to(packages)
    assert actordbg("--version").split() == ["actordbg", wheel.name.split("-")[1]]
    assert "3 dumps added" in actordbg("dump", "import", "pickles")
    assert len(json.loads(actordbg("dump", "ls", "--json"))) == 3
    assert "1 passed" in actordbg("replay", "--max-inputs", "1", "--no-backward")
