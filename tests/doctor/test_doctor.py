"""doctor: what it finds in environments where something is missing, broken, hanging, or as it should be."""

from __future__ import annotations

import json
import re
import sqlite3
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
from actordbg.cli import doctor as command
from actordbg.cli.doctor import render
from actordbg.doctor import checkup
from actordbg.doctor import known_versions as known_good
from actordbg.doctor import machine_check as machine
from actordbg.doctor import python_environment as environment
from actordbg.doctor import store_check as state
from actordbg.doctor.check import Check, Level, bad, examined, ok, warn
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
    here = (known_good.Need.CAPTURE, known_good.Need.DESK)
    assert {package.name for package in known_good.PACKAGES if package.need in here} == required


def test_the_known_good_versions_are_the_pinned_ones():
    pinned = dict(re.findall(r"^([A-Za-z0-9_.-]+)(?:\[.*\])?==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    known = {package.name: package.version for package in known_good.PACKAGES if package.version}
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


def test_another_version_is_a_warning_and_never_bad(python: FakePython):
    python.install("transformers", "5.23.0")
    check = packages(python)["transformers"]
    assert (check.status, check.remedy) == (Level.WARN, "known good: 5.15.0")
    assert "5.23.0" in check.detail


def test_a_local_build_of_the_known_version_is_the_known_version(python: FakePython):
    python.install("torch", "2.13.0+cpu")
    assert packages(python)["torch"] == ok("torch", "2.13.0+cpu")


def test_transformers_that_pack_wrongly_are_named(python: FakePython):
    python.install("transformers", "4.52.4")
    assert "silently wrong" in packages(python)["transformers"].detail


def test_debugpy_is_looked_for_where_ray_is(python: FakePython):
    assert packages(python)["debugpy"].status is Level.WARN
    assert (
        packages(python)["debugpy"].remedy
        == f"{python.executable} -m pip install 'debugpy>=1.8.22', here and on every node of the cluster"
    )
    python.install("debugpy", "1.8.2")
    assert "above the frames that failed" in packages(python)["debugpy"].detail
    python.install("debugpy", "1.8.22")
    assert packages(python)["debugpy"] == ok("debugpy", "1.8.22")
    python.uninstall("ray")
    assert "debugpy" not in packages(python)


def test_a_missing_package_is_bad_with_the_command_that_installs_it(python: FakePython):
    python.uninstall("pylatexenc")
    python.module("openrlhf.models.actor", "from openrlhf.utils import math\n")
    python.module("openrlhf.utils.math", "from pylatexenc import latex2text\n")
    install = f"{python.executable} -m pip install pylatexenc==2.11"
    assert packages(python)["pylatexenc"].remedy == install
    check = imports(python)["openrlhf.models.actor"]
    assert (check.status, check.remedy) == (Level.BAD, install)
    assert "No module named 'pylatexenc'" in check.detail
    assert "math.py:1" in check.detail


def test_the_first_cause_is_told_not_the_last(python: FakePython):
    python.module(
        "openrlhf.models.actor",
        "try:\n    import einops\nexcept ImportError as e:\n    raise RuntimeError('no') from e\n",
    )
    check = imports(python)["openrlhf.models.actor"]
    assert "No module named 'einops'" in check.detail
    assert check.remedy.endswith("pip install einops==0.8.2")


def test_vllm_is_a_warning_since_only_ppo_needs_it(python: FakePython):
    python.module("openrlhf.cli.train_ppo_ray", "import vllm\n")
    check = imports(python)["openrlhf.cli.train_ppo_ray"]
    assert check.status is Level.WARN
    assert "vllm" in check.remedy


def test_a_module_that_this_openrlhf_does_not_have_is_a_warning(python: FakePython):
    (python.site / "openrlhf" / "cli" / "train_dpo.py").unlink()
    check = imports(python)["openrlhf.cli.train_dpo"]
    assert (check.status, check.detail) == (Level.WARN, "this OpenRLHF has no openrlhf.cli.train_dpo")


def test_versions_that_do_not_fit_are_named_as_such(python: FakePython):
    python.module("transformers", "")
    python.module("openrlhf.models.actor", "from transformers import gone\n")
    check = imports(python)["openrlhf.models.actor"]
    assert check.status is Level.BAD
    assert "transformers==5.15.0" in check.remedy


def test_a_module_that_hangs_costs_its_timeout_and_no_other_finding(python: FakePython):
    python.module("openrlhf.trainer.sft_trainer", "import time\ntime.sleep(600)\n")
    checks = imports(python, timeout=1.5)
    assert "no end in" in checks["openrlhf.trainer.sft_trainer"].detail
    others = {name: f.status for name, f in checks.items() if f.status is not Level.OK}
    assert others == {"openrlhf.trainer.sft_trainer": Level.BAD}
    assert list(checks) == ["torch", *TRAINER.modules]


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n", "signal 9"),
        (
            "import os, sys\nsys.stderr.write('libcuda is broken')\nsys.stderr.flush()\nos._exit(3)\n",
            "exit code 3): libcuda is broken",
        ),
    ],
)
def test_a_module_that_kills_the_process_is_named_and_the_others_are_still_tried(python: FakePython, text: str, how: str):
    python.module("openrlhf.utils.deepspeed", text)
    checks = imports(python)
    assert checks["openrlhf.utils.deepspeed"].status is Level.BAD
    assert how in checks["openrlhf.utils.deepspeed"].detail
    assert checks["openrlhf.cli.train_ppo_ray"].status is Level.OK
    assert list(checks) == ["torch", *TRAINER.modules]


def test_a_torch_that_kills_the_process_ends_the_import_checks(python: FakePython):
    python.module("torch", "import os\nos._exit(1)\n")
    checks = imports(python)
    assert checks["torch"].status is Level.BAD


def test_a_module_that_exits_or_prints_is_no_problem_for_doctor(python: FakePython):
    python.module("openrlhf.cli.train_sft", "print('hello')\nraise SystemExit('use me as a program')\n")
    checks = imports(python)
    assert "use me as a program" in checks["openrlhf.cli.train_sft"].detail
    assert checks["openrlhf.cli.train_dpo"].status is Level.OK


def test_a_torch_without_cuda_beside_a_gpu_is_a_warning(python: FakePython):
    check = imports(python, gpus=1)["torch and the GPU"]
    assert check.status is Level.WARN
    assert "a build without CUDA" in check.detail


def test_where_nothing_can_be_replayed_that_is_bad(python: FakePython, store: Store):
    for package in known_good.PACKAGES:
        if package.need in (known_good.Need.REPLAY, known_good.Need.TRAINING):
            python.uninstall(package.name)
    checks = quick(python, store)
    assert checkup.exit_code(checks.values()) == 4
    assert checks["torch"].status is Level.BAD and "replay" in checks["torch"].detail
    assert not any("No module named 'torch'" in check.detail for check in checks.values())
    assert imports(python)["imports"].status is Level.WARN


def test_torch_missing_beside_openrlhf_is_bad(python: FakePython):
    python.uninstall("torch")
    assert packages(python)["torch"].status is Level.BAD


def test_the_capture_hooks_own_needs_are_bad_when_missing(python: FakePython):
    python.uninstall("zstandard")
    assert packages(python)["zstandard"].status is Level.BAD


@pytest.mark.parametrize(
    ("version", "gpus", "level"),
    [(None, 0, Level.OK), (None, 1, Level.WARN), ("2.8.0", 1, Level.OK), ("2.8.0", 0, Level.WARN)],
)
def test_flash_attn_is_wanted_exactly_where_there_is_a_gpu(python: FakePython, version: str | None, gpus: int, level: Level):
    if version:
        python.install("flash-attn", version)
    assert environment.flash_attention(examined(str(python.executable)), gpus).status is level


def test_an_interpreter_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(EnvironmentProblem):
        examined(str(tmp_path / "nothing"))
    with pytest.raises(EnvironmentProblem):
        examined("/bin/false")


# ---- the machine ----


def compiler(python: FakePython, monkeypatch: pytest.MonkeyPatch, cxx: str) -> Check:
    monkeypatch.setenv("CXX", cxx)
    return machine.compiler(examined(str(python.executable)))


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_no_compiler_is_a_warning_for_compile(python: FakePython, monkeypatch, tmp_path: Path):
    check = compiler(python, monkeypatch, str(tmp_path / "none"))
    assert check.status is Level.WARN
    assert "--compile" in check.detail


def test_a_compiler_without_pythons_headers_says_so(python: FakePython, monkeypatch, tmp_path: Path):
    broken = script(tmp_path / "cxx", "echo 'probe.cpp:1:10: fatal error: Python.h: No such file' >&2; exit 1")
    assert "python3-dev" in compiler(python, monkeypatch, broken).remedy


def test_a_compiler_that_builds_is_fine(python: FakePython, monkeypatch, tmp_path: Path):
    assert compiler(python, monkeypatch, script(tmp_path / "cxx", "exit 0")).status is Level.OK


def launcher(python: FakePython, tmp_path: Path, text: str) -> Check:
    env = examined(str(python.executable))
    script(tmp_path / "deepspeed", text)
    return machine.launcher(environment.Environment(env.python, env.python_version, env.versions, env.include, str(tmp_path)))


def test_the_launcher_has_to_start(python: FakePython, tmp_path: Path):
    assert launcher(python, tmp_path, 'test "$1" = --help').status is Level.OK
    check = launcher(python, tmp_path, "echo 'No module named deepspeed' >&2; exit 1")
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
    return {check.name: check for check in state.check(examined(str(python.executable)), store)}


def test_no_store_yet_is_fine_and_makes_none(python: FakePython, tmp_path: Path):
    store = Store(tmp_path / "none")
    checks = left(python, store)
    assert checks["store"].status is Level.OK
    assert not store.root.exists()


def test_a_store_of_a_newer_format_is_bad(python: FakePython, store: Store):
    store.format_path.write_text('{"format": 99}')
    checks = left(python, store)
    assert checks["store"].status is Level.BAD
    assert "upgrade" in checks["store"].remedy
    assert checkup.exit_code(checks.values()) == 4


def test_a_store_that_others_can_read_is_a_warning(python: FakePython, store: Store):
    store.root.chmod(0o755)
    assert left(python, store)["store"].status is Level.WARN


def revision(store: Store, number: str) -> None:
    migrate.ensure(store)
    with sqlite3.connect(store.catalog_path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (number,))
    connection.close()


@pytest.mark.parametrize(("number", "level"), [(migrate.HEAD, Level.OK), ("0000", Level.WARN), ("9999", Level.BAD)])
def test_the_catalogs_revision(python: FakePython, store: Store, number: str, level: Level):
    revision(store, number)
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
    checks = json.loads(done.stdout)
    assert {"name": "torch", "status": "ok", "detail": "2.13.0", "remedy": ""} in checks
    assert done.exit_code == 0


def test_something_bad_ends_with_4_and_shows_the_remedy(python: FakePython, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("ACTORDBG_STORE", str(tmp_path / "store"))
    python.uninstall("safetensors")
    done = invoke("--quick", "--python", str(python.executable))
    assert done.exit_code == 4
    assert "pip install" in done.stdout


def test_the_text_fits_80_columns_and_keeps_paths_whole():
    path = "/a/" + "x" * 40 + "/actor.py"
    text = "\n".join(
        render(check)
        for check in (
            ok("import openrlhf.cli.train_ppo_ray", "word " * 40),
            warn("patch", path, "do " * 60),
            bad("disk", "a", "b"),
        )
    )
    assert max(map(len, text.splitlines())) <= 80
    assert path in text


def test_findings_of_the_store_come_without_torch(python: FakePython, store: Store):
    names = [check.name for check in state.check(examined(str(python.executable)), store)]
    assert names == ["store", "disk", "catalog", "dumping", "patch"]
