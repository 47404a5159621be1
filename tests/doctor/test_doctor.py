"""doctor: what it finds in environments where something is missing, broken, hanging, or as it should be."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import tomllib
import typer
from fakepython import FakePython, known_good_python
from roots import ROOT
from typer.testing import CliRunner

from actordbg.base.errors import EnvironmentProblem
from actordbg.capture.control import Control, write_control
from actordbg.catalog import migrate
from actordbg.cli import patch as command
from actordbg.cli.patch import render
from actordbg.doctor import checkup
from actordbg.doctor import python_environment as environment
from actordbg.doctor import store_check as machine
from actordbg.doctor.check import Check, Level, bad, ok, warn
from actordbg.doctor.python_environment import examined
from actordbg.install import trailer
from actordbg.store.layout import Store
from actordbg.trainers.trainer import TRAINER


@pytest.fixture
def python(tmp_path: Path) -> FakePython:
    """An environment in which everything is known to be good."""
    return known_good_python(tmp_path / "env")


def imports(python: FakePython, gpus: int = 0, timeout: float = 30.0) -> dict[str, Check]:
    """The import checks, by module."""
    env = examined(str(python.executable))
    return {check.name.removeprefix("import "): check for check in checkup.imports(env, gpus, timeout)}


def packages(python: FakePython) -> dict[str, Check]:
    """The checks of Python and its packages, by name."""
    return {check.name: check for check in environment.check(examined(str(python.executable)))}


def quick(python: FakePython, store: Store) -> dict[str, Check]:
    """Everything that takes no seconds, by name."""
    return {check.name: check for check in checkup.examine(store, str(python.executable), quick=True)}


def test_every_dependency_of_the_package_is_examined():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[<>=\[;]", line)[0] for line in project["dependencies"] if "python_version" not in line}
    here = (environment.Need.CAPTURE, environment.Need.DESK)
    assert {package.name for package in environment.PACKAGES if package.need in here} == required


def test_the_known_good_versions_are_the_pinned_ones():
    pinned = dict(re.findall(r"^([A-Za-z0-9_.-]+)(?:\[.*\])?==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    known = {package.name: package.version for package in environment.PACKAGES if package.version}
    differing = {name: (version, pinned[name]) for name, version in known.items() if name in pinned and pinned[name] != version}
    assert differing == {}
    assert len(known.keys() & pinned.keys()) >= 8


def test_nothing_is_bad_where_everything_is_known_to_be_good(python: FakePython, store: Store):
    checks = quick(python, store)
    assert {name for name, check in checks.items() if check.status is Level.BAD} == set()
    assert checks["torch"] == ok("torch", "2.13.0")
    assert checkup.exit_code(checks.values()) == 0


def test_every_module_that_matters_is_imported(python: FakePython):
    checks = imports(python)
    assert list(checks) == ["torch", *TRAINER.modules]
    assert {check.status for check in checks.values()} == {Level.OK}


@pytest.mark.parametrize(
    ("package", "version", "level", "told"),
    [
        ("transformers", "5.23.0", Level.WARN, "known good: 5.15.0"),
        ("transformers", "4.52.4", Level.WARN, "silently wrong"),
        ("torch", "2.13.0+cpu", Level.OK, "2.13.0+cpu"),
        ("torch", None, Level.BAD, "replay, check and actor init need it"),
        ("zstandard", None, Level.BAD, "capture needs it"),
        ("pylatexenc", None, Level.BAD, "-m pip install pylatexenc==2.11"),
        ("debugpy", None, Level.WARN, "-m pip install 'debugpy>=1.8.22', here and on every node of the cluster"),
        ("debugpy", "1.8.2", Level.WARN, "above the frames that failed"),
        ("debugpy", "1.8.22", Level.OK, "1.8.22"),
    ],
)
def test_a_package_is_judged_by_its_version(python: FakePython, package: str, version: str | None, level: Level, told: str):
    if version:
        python.install(package, version)
    elif package != "debugpy":
        python.uninstall(package)
    check = packages(python)[package]
    assert check.status is level and told in check.detail + check.remedy


def test_debugpy_is_looked_for_where_ray_is(python: FakePython):
    python.uninstall("ray")
    assert "debugpy" not in packages(python)


DIES = "import os, sys\nsys.stderr.write('libcuda is broken')\nsys.stderr.flush()\nos._exit(3)\n"
CATCHES = "try:\n    import einops\nexcept ImportError as e:\n    raise RuntimeError('no') from e\n"


@pytest.mark.parametrize(
    ("module", "text", "level", "told"),
    [
        ("openrlhf.models.actor", CATCHES, Level.BAD, ("No module named 'einops'", "actor.py:2", "pip install einops==0.8.2")),
        ("openrlhf.models.actor", "from transformers import gone\n", Level.BAD, ("transformers==5.15.0",)),
        ("openrlhf.cli.train_ppo_ray", "import vllm\n", Level.WARN, ("needs vllm", "pip install vllm")),
        ("openrlhf.trainer.sft_trainer", "import time\ntime.sleep(600)\n", Level.BAD, ("no end in",)),
        ("openrlhf.utils.deepspeed", "import os\nos.kill(os.getpid(), 9)\n", Level.BAD, ("signal 9",)),
        ("openrlhf.utils.deepspeed", DIES, Level.BAD, ("exit code 3): libcuda is broken",)),
        ("openrlhf.cli.train_sft", "print('hello')\nraise SystemExit('a program')\n", Level.BAD, ("a program",)),
    ],
)
def test_a_module_that_does_not_import_is_named_with_its_cause_and_costs_no_other_finding(
    python: FakePython, module: str, text: str, level: Level, told: tuple[str, ...]
):
    python.module("transformers", "")
    python.module(module, text)
    checks = imports(python, timeout=1.5 if "sleep" in text else 30.0)
    assert list(checks) == ["torch", *TRAINER.modules]
    assert {name: check.status for name, check in checks.items() if check.status is not Level.OK} == {module: level}
    assert all(words in checks[module].detail + checks[module].remedy for words in told)


def test_a_missing_package_is_bad_with_the_command_that_installs_it(python: FakePython):
    python.uninstall("pylatexenc")
    python.module("openrlhf.models.actor", "from openrlhf.utils import math\n")
    python.module("openrlhf.utils.math", "from pylatexenc import latex2text\n")
    check = imports(python)["openrlhf.models.actor"]
    assert (check.status, check.remedy) == (Level.BAD, f"{python.executable} -m pip install pylatexenc==2.11")
    assert "math.py:1" in check.detail


def test_a_module_that_this_openrlhf_does_not_have_is_a_warning(python: FakePython):
    (python.site / "openrlhf" / "cli" / "train_dpo.py").unlink()
    check = imports(python)["openrlhf.cli.train_dpo"]
    assert (check.status, check.detail) == (Level.WARN, "this OpenRLHF has no openrlhf.cli.train_dpo")


def test_a_torch_that_kills_the_process_ends_the_import_checks(python: FakePython):
    python.module("torch", "import os\nos._exit(1)\n")
    assert imports(python)["torch"].status is Level.BAD


def test_a_torch_without_cuda_beside_a_gpu_is_a_warning(python: FakePython):
    check = imports(python, gpus=1)["torch and the GPU"]
    assert check.status is Level.WARN and "a build without CUDA" in check.detail


def test_where_nothing_can_be_replayed_that_is_bad(python: FakePython, store: Store):
    for package in environment.PACKAGES:
        if package.need in (environment.Need.REPLAY, environment.Need.TRAINING):
            python.uninstall(package.name)
    checks = quick(python, store)
    assert checkup.exit_code(checks.values()) == 4
    assert not any("No module named 'torch'" in check.detail for check in checks.values())
    assert imports(python)["imports"].status is Level.WARN


@pytest.mark.parametrize(
    ("version", "gpus", "level"),
    [(None, 0, Level.OK), (None, 1, Level.WARN), ("2.8.0", 1, Level.OK), ("2.8.0", 0, Level.WARN)],
)
def test_flash_attn_is_wanted_exactly_where_there_is_a_gpu(python: FakePython, version: str | None, gpus: int, level: Level):
    if version:
        python.install("flash-attn", version)
    assert environment.flash_attention(examined(str(python.executable)), gpus).status is level


def test_an_interpreter_that_is_none_is_refused(tmp_path: Path):
    for python in (str(tmp_path / "nothing"), "/bin/false"):
        with pytest.raises(EnvironmentProblem):
            examined(python)


# ---- the machine ----


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "level", "told"),
    [
        (None, Level.WARN, "--compile"),
        ("echo 'probe.cpp:1:10: fatal error: Python.h: No such file' >&2; exit 1", Level.WARN, "python3-dev"),
        ("exit 0", Level.OK, "builds with Python.h"),
    ],
)
def test_a_compiler_has_to_build(python: FakePython, monkeypatch, tmp_path: Path, text: str | None, level: Level, told: str):
    monkeypatch.setenv("CXX", script(tmp_path / "cxx", text) if text else str(tmp_path / "none"))
    check = machine.compiler(examined(str(python.executable)))
    assert check.status is level and told in check.detail + check.remedy


def test_the_launcher_has_to_start(python: FakePython, tmp_path: Path):
    env = replace(examined(str(python.executable)), scripts=str(tmp_path))
    script(tmp_path / "deepspeed", 'test "$1" = --help')
    assert machine.launcher(env).status is Level.OK
    script(tmp_path / "deepspeed", "echo 'No module named deepspeed' >&2; exit 1")
    check = machine.launcher(env)
    assert (check.status, "No module named deepspeed" in check.detail) == (Level.BAD, True)


def test_a_disk_below_the_floor_of_capture_is_a_warning(tmp_path: Path):
    assert machine.disk(tmp_path / "not" / "there", floor=0).status is Level.OK
    assert machine.disk(tmp_path, floor=2**60).status is Level.WARN


def test_little_memory_is_a_warning(tmp_path: Path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4000000 kB\nMemAvailable: 1000000 kB\n")
    assert machine.memory(meminfo).status is Level.WARN
    meminfo.write_text("MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\n")
    assert machine.memory(meminfo).status is Level.OK
    assert "unknown" in machine.memory(tmp_path / "none").detail


# ---- what actordbg left here ----


def left(python: FakePython, store: Store) -> dict[str, Check]:
    """The checks of store, disk, catalog, dump switch and patch, by name."""
    return {check.name: check for check in machine.check(examined(str(python.executable)), store)}


def test_no_store_yet_is_fine_and_makes_none(python: FakePython, tmp_path: Path):
    checks = left(python, Store(tmp_path / "none"))
    assert list(checks) == ["store", "disk", "catalog", "dumping", "patch"]
    assert checks["store"].status is Level.OK and not (tmp_path / "none").exists()


def test_a_store_of_a_newer_format_is_bad_and_one_that_others_can_read_a_warning(python: FakePython, store: Store):
    store.root.chmod(0o755)
    assert left(python, store)["store"].status is Level.WARN
    store.format_path.write_text('{"format": 99}')
    checks = left(python, store)
    assert checks["store"].status is Level.BAD and "upgrade" in checks["store"].remedy
    assert checkup.exit_code(checks.values()) == 4


@pytest.mark.parametrize(("number", "level"), [(migrate.HEAD, Level.OK), ("0000", Level.WARN), ("9999", Level.BAD)])
def test_the_catalogs_revision(python: FakePython, store: Store, number: str, level: Level):
    migrate.ensure(store)
    with contextlib.closing(sqlite3.connect(store.catalog_path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (number,))
    assert left(python, store)["catalog"].status is level


def test_a_damaged_catalog_is_bad_with_its_remedy(python: FakePython, store: Store):
    store.catalog_path.write_bytes(b"no database" * 100)
    check = left(python, store)["catalog"]
    assert (check.status, "index --rebuild" in check.remedy) == (Level.BAD, True)


def test_the_dump_switch(python: FakePython, store: Store, monkeypatch):
    assert left(python, store)["dumping"].detail == "disabled"
    write_control(store, Control(enabled=True, run="r", since="2026-01-01T00:00:00.000000Z"))
    assert "enabled" in left(python, store)["dumping"].detail
    store.control_path.write_text("{")
    assert left(python, store)["dumping"].status is Level.BAD
    monkeypatch.setenv("ACTORDBG_DISABLE", "1")
    assert left(python, store)["dumping"].status is Level.WARN


def test_the_patch_state_of_the_examined_environment(python: FakePython, store: Store, tmp_path: Path):
    path = python.site / "openrlhf" / "models" / "actor.py"
    original = path.read_bytes()
    assert left(python, store)["patch"].detail.startswith("clean")
    path.write_bytes(trailer.append(original, str(store.root)))
    assert left(python, store)["patch"].detail.startswith("patched")
    path.write_bytes(trailer.append(original, str(tmp_path / "other")))
    assert left(python, store)["patch"].status is Level.WARN
    path.write_text("class Critic: pass\n")
    assert left(python, store)["patch"].status is Level.BAD


# ---- the command ----


def invoke(*arguments: str):
    app = typer.Typer()
    app.callback()(lambda store=typer.Option(None): None)
    app.command("doctor")(command.doctor)
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_the_json_is_one_array_of_findings(python: FakePython, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("ACTORDBG_STORE", str(tmp_path / "store"))
    done = invoke("--quick", "--json", "--python", str(python.executable))
    assert {"name": "torch", "status": "ok", "detail": "2.13.0", "remedy": ""} in json.loads(done.stdout)
    assert done.exit_code == 0
    python.uninstall("safetensors")
    done = invoke("--quick", "--python", str(python.executable))
    assert done.exit_code == 4 and "pip install" in done.stdout, "something bad ends with 4, and its remedy is shown"


def test_the_text_fits_80_columns_and_keeps_paths_whole():
    path = "/a/" + "x" * 40 + "/actor.py"
    checks = (ok("import openrlhf.cli.train_ppo_ray", "word " * 40), warn("patch", path, "do " * 60), bad("disk", "a", "b"))
    text = "\n".join(map(render, checks))
    assert max(map(len, text.splitlines())) <= 80 and path in text
