"""doctor: what it finds in environments where something is missing, broken, hanging, or as it should be."""

import contextlib
import json
import re
import shlex
import sqlite3
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from casefiles import cases_of
from commandline import run_here
from roots import ROOT, json_of, script

from actordbg.capture.control import Control
from actordbg.capture.switch_file import write_control
from actordbg.catalog import migrate
from actordbg.catalog.indexer import refresh
from actordbg.cli.patch import render
from actordbg.config.sources import parse_toml
from actordbg.doctor import checkup, python_environment as environment
from actordbg.doctor.python_environment import bad, known_findings, ok, warn
from actordbg.install import trailer
from actordbg.store.layout import Store
from actordbg.trainers.molt_adapter import Molt
from actordbg.trainers.trainer import TRAINER

TORCH = """
__version__ = "2.13.0+cpu"
class version: cuda = None
class cuda:
    @staticmethod
    def is_available(): return False
"""
ACTOR = "class Actor:\n    def forward(self, sequences, attention_mask=None):\n        return sequences\n"


class FakePython:
    """`executable` runs the real interpreter with `-S` (no site-packages) and the stubs on its path.

    So what it has is exactly what `install` and `module` put there: that is the property that the doctor's tests need.
    """

    def __init__(self, folder):
        self.site = folder / "site"
        self.site.mkdir(parents=True)
        start = f'PYTHONPATH={shlex.quote(str(self.site))} exec {shlex.quote(sys.executable)} -S "$@"'
        self.executable = script(folder / "python", start)

    def install(self, name, version):
        """Metadata of a distribution; an earlier version of it is gone."""
        self.uninstall(name)
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def version(self, name):
        """Like `importlib.metadata.version`."""
        for info in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            return info.name.removesuffix(".dist-info").partition("-")[2]
        raise PackageNotFoundError(name)

    def uninstall(self, name):
        for info in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            (info / "METADATA").unlink()
            info.rmdir()

    def module(self, name, text=""):
        """A module by its dotted name; its packages are made where they are missing."""
        path = self.site.joinpath(*name.split(".")).with_suffix(".py")
        for folder in path.relative_to(self.site).parents:
            if folder.name:
                (self.site / folder).mkdir(parents=True, exist_ok=True)
                (self.site / folder / "__init__.py").touch()
        path.write_text(text)
        return path


def known_good_python(folder):
    """Every package at its known-good version, a torch without CUDA, and an OpenRLHF whose modules import."""
    python = FakePython(folder)
    for name, version in environment.KNOWN_GOOD.items():
        python.install(name, version or "1.0")
    python.module("torch", TORCH)
    python.module("actordbg.trainers.trainer", f"class TRAINER:\n    modules, support_cpu = {[*TRAINER.modules]}, print\n")
    for name in TRAINER.modules:
        python.module(name, ACTOR)
    return python


@dataclass
class Here:
    """An environment in which everything is known to be good, and a store; its programs stand before those of the machine."""

    python: FakePython
    store: Store
    programs: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def actor(self):
        return self.python.site / "openrlhf" / "models" / "actor.py"

    def program(self, name, text):
        script(self.programs / name, text)

    def checks(self, quick=True):
        """Everything by name; with `quick`, only what takes no seconds."""
        return {check.name: check for check in checkup.examine(self.store, quick=quick)}

    def imports(self, gpus=0, timeout=30.0):
        """The import checks, by module."""
        found = checkup.imports(environment.installed(), gpus, timeout)
        return {check.name.removeprefix("import "): check for check in found}

    def catalog(self, revision):
        refresh(self.store)
        with contextlib.closing(sqlite3.connect(self.store.catalog_path)) as connection, connection:
            connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))


@pytest.fixture
def here(tmp_path, store, monkeypatch):
    made = Here(known_good_python(tmp_path / "env"), store, tmp_path / "env", monkeypatch)
    made.program("g++", "exit 0")
    monkeypatch.chdir(tmp_path)  # a Python without PYTHONSAFEPATH imports from there first
    monkeypatch.setenv("PATH", f"{made.programs}:/usr/bin:/bin")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sys.executable", str(made.python.executable))
    monkeypatch.setattr("importlib.metadata.version", made.python.version)
    return made


def test_every_dependency_of_the_package_is_examined_and_known_good_is_what_is_pinned():
    project = parse_toml((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[<>=\[;]", line)[0] for line in project["dependencies"] if "python_version" not in line}
    assert environment.PACKAGES["capture"].keys() | environment.PACKAGES[environment.DESK].keys() == required
    pinned = dict(re.findall(r"^([A-Za-z0-9_.-]+)(?:\[.*\])?==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    known = {name: version for name, version in environment.KNOWN_GOOD.items() if version and name in pinned}
    assert len(known) >= 8 and known == {name: pinned[name] for name in known}


def test_nothing_is_bad_where_everything_is_known_to_be_good(here):
    checks, imports = here.checks(), here.imports()
    assert {name for name, check in checks.items() if check.status == "bad"} == set() and checks["torch"] == ok("torch", "2.13.0")
    assert checkup.exit_code(checks.values()) == 0
    assert list(imports) == ["torch", *TRAINER.modules] and {check.status for check in imports.values()} == {"ok"}


def test_each_finding_is_a_script_that_runs_the_first_and_the_last_version():
    known = {finding.name: finding for finding in known_findings()}
    assert sorted(known) == sorted(path.stem for path in (ROOT / "findings").glob("*.sh"))
    for name, finding in known.items():
        text = (ROOT / "findings" / f"{name}.sh").read_text()
        assert all(
            re.search(rf"{package}.*{last}", text) and first in text for package, (first, last) in finding.versions.items()
        )


def test_findings_are_listed_and_those_that_are_installed_come_first(here):
    here.python.install("deepspeed", "0.19.7")
    listed = run_here("doctor", "--findings").output
    first, *others = re.findall(r"^\S+ \((.*)\)$", listed, re.MULTILINE)
    assert len(others) == len(known_findings()) - 1 and first.endswith(", installed")
    assert "deepspeed 0.19.6 to 0.19.8, installed" in listed and others[-1].endswith(", not installed")
    rows = json.loads(run_here("doctor", "--findings", "--json").output)
    assert {row["name"] for row in rows if row["here"]} >= {"zero-keeps-the-last-backward", "merged-twice"}


ON = Control(enabled=True, run="r", since="2026-01-01T00:00:00.000000Z")


def prepare(here, what):
    """Change the environment as a case of `doctor.test` says."""
    verb, _, rest = what.partition(" ")
    name, _, value = rest.partition(" ")
    if verb == "install":
        here.python.install(name, value)
    elif verb == "uninstall":
        here.python.uninstall(name)
    elif verb == "program":
        here.program(name, value)
    elif verb == "variable":
        here.monkeypatch.setenv(name, value)
    elif verb == "mode":
        here.store.root.chmod(int(rest, 8))
    elif verb == "store":
        (here.store.root / name).write_text(value)
    elif verb == "catalog":
        here.catalog(migrate.HEAD if rest == "HEAD" else rest)
    elif verb == "record":
        write_control(here.store, ON)
    elif verb == "patch":
        here.actor.write_bytes(trailer.append(here.actor.read_bytes(), rest or str(here.store.root)))
    elif verb == "molt":
        (info := here.programs / "beside" / "molt_rl-0.2.1.dist-info").mkdir(parents=True)
        (info / "METADATA").write_text(
            "\n".join(["Name: molt-rl", "Version: 0.2.1", *(f"Requires-Dist: {need}" for need in rest.split())])
        )
        for seam in Molt.seams[:2]:
            here.python.module(seam.module, ACTOR)
        here.monkeypatch.syspath_prepend(info.parent)
    elif verb == "actor":
        here.actor.write_text(f"{rest}\n")


FINDINGS = cases_of("doctor")


@pytest.mark.parametrize("case", FINDINGS)
def test_what_is_found(here, case):
    changes, told = FINDINGS[case]
    for change in changes:
        prepare(here, change)
    checks = here.checks(quick=not any(line.startswith("import ") for line in told))
    for line in told:
        name, status, words = re.fullmatch(r"(.*) (ok|warn|bad|silent): ?(.*)", line).groups()
        if status == "silent":
            assert name not in checks
            continue
        assert checks[name].status == status and words in f"{checks[name].detail} {checks[name].remedy}"


DIES = "import os, sys\nsys.stderr.write('libcuda is broken')\nsys.stderr.flush()\nos._exit(3)\n"
CATCHES = "try:\n    import einops\nexcept ImportError as e:\n    raise RuntimeError('no') from e\n"


@pytest.mark.parametrize(
    "module, text, status, told",
    [
        ("openrlhf.models.actor", CATCHES, "bad", ("No module named 'einops'", "actor.py:2", "pip install einops==0.8.2")),
        ("openrlhf.models.actor", "from transformers import gone\n", "bad", ("transformers==5.15.0",)),
        ("openrlhf.cli.train_ppo_ray", "import vllm\n", "warn", ("needs vllm", "pip install vllm")),
        ("openrlhf.cli.train_dpo", "", "warn", ("this OpenRLHF has no openrlhf.cli.train_dpo",)),
        ("openrlhf.trainer.sft_trainer", "import time\ntime.sleep(600)\n", "bad", ("did not finish in",)),
        ("openrlhf.utils.deepspeed", DIES, "bad", ("exit code 3): libcuda is broken",)),
        ("openrlhf.cli.train_sft", "print('hello')\nraise SystemExit('a program')\n", "bad", ("a program",)),
    ],
)
def test_a_module_that_does_not_import_is_named_with_its_cause_and_costs_no_other_finding(here, module, text, status, told):
    here.python.module("transformers", "")
    path = here.python.module(module, text)
    if not text:
        path.unlink()
    checks = here.imports(timeout=1.5 if "sleep" in text else 30.0)
    assert list(checks) == ["torch", *TRAINER.modules]
    assert {name: check.status for name, check in checks.items() if check.status != "ok"} == {module: status}
    assert all(words in checks[module].detail + checks[module].remedy for words in told)


def test_torch_is_imported_first(here):
    check = here.imports(gpus=1)["torch and the GPU"]
    assert check.status == "warn" and "a build without CUDA" in check.detail
    here.python.module("torch", "import os\nos.kill(os.getpid(), 9)\n")
    assert (end := here.imports()["torch"]).status == "bad" and "signal 9" in end.detail
    for package in (*environment.PACKAGES[environment.REPLAY], *environment.PACKAGES[environment.TRAINING]):
        here.python.uninstall(package)
    checks = here.checks()
    assert checkup.exit_code(checks.values()) == 4 and here.imports()["imports"].status == "warn"
    assert "debugpy" not in checks and "No module named 'torch'" not in str(checks)


def test_little_room_is_a_warning(tmp_path):
    assert checkup.disk(tmp_path / "not" / "there", floor=0).status == "ok"
    assert checkup.disk(tmp_path, floor=2**60).status == "warn"
    meminfo = tmp_path / "meminfo"
    for kilobytes, status in ((1_000_000, "warn"), (32_000_000, "ok")):
        meminfo.write_text(f"MemTotal: 64000000 kB\nMemAvailable: {kilobytes} kB\n")
        assert checkup.memory(meminfo).status == status
    assert "unknown" in checkup.memory(tmp_path / "none").detail


def test_no_store_yet_is_fine_and_makes_none(here, tmp_path):
    here.store = Store(tmp_path / "none")
    assert here.checks()["store"].status == "ok" and not here.store.root.exists()


def test_the_command_ends_with_4_where_something_is_bad_and_says_what_installs_it(here):
    here.monkeypatch.setenv("ACTORDBG_STORE", str(here.store.root))
    arguments = ["doctor", "--quick"]
    done = run_here(*arguments, "--json")
    assert {"name": "torch", "status": "ok", "detail": "2.13.0", "remedy": ""} in json_of(done)["checks"] and done.exit_code == 0
    here.python.uninstall("safetensors")
    done = run_here(*arguments)
    assert done.exit_code == 4 and "pip install" in done.stdout
    path = "/a/" + "x" * 40 + "/actor.py"
    checks = (ok("import openrlhf.cli.train_ppo_ray", "word " * 40), warn("patch", path, "do " * 60), bad("disk", "a", "b"))
    text = "\n".join(map(render, checks))
    assert max(map(len, text.splitlines())) <= 80 and path in text
