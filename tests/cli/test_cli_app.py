"""The command line's root: every failure is a message, a hint and an exit code, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from actordbg.store.layout import Store


def actordbg(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    program = f"{code}\nimport sys; sys.argv[0] = 'actordbg'\nfrom actordbg.cli.app import main; main()"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)


def test_the_version_is_one_line():
    done = actordbg("--version")
    assert done.returncode == 0 and done.stdout.startswith("actordbg ")


@pytest.mark.parametrize("command", [("dump", "create"), ("dump", "export", "--where", "rank=0")])
def test_without_torch_a_command_that_needs_it_says_so(tmp_path: Path, command: tuple[str, ...]):
    store = str(tmp_path / "store")
    actordbg("--store", store, "dump", "create", "--quiet", "--seq-len", "8")
    done = actordbg("--store", store, *command, code="import sys; sys.modules['torch'] = None")
    assert done.returncode == 4
    assert "error[environment]: this command needs torch" in done.stderr and "hint:" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_store_that_cannot_be_made_is_a_message(tmp_path: Path):
    (tmp_path / "file").write_text("")
    done = actordbg("--store", str(tmp_path / "file" / "store"), "dump", "enable")
    assert done.returncode == 4
    assert "error[" in done.stderr and "Traceback" not in done.stderr


def test_an_oserror_that_nobody_expected_is_a_message(tmp_path: Path):
    code = """
import actordbg.cli.status as module
def broken(*_, **__): raise PermissionError(13, "Permission denied", "/somewhere")
import actordbg.cli.app as app
app.app.registered_commands[:] = []
app.app.command("status")(lambda: broken())
"""
    done = actordbg("status", code=code)
    assert done.returncode == 4
    assert "error[environment]: /somewhere: Permission denied" in done.stderr and "Traceback" not in done.stderr


def test_a_missing_module_of_a_plain_installation_is_a_defect_and_not_hidden(store: Store):
    done = actordbg(
        "--store", str(store.root), "dump", "ls", "--where", "rank=0", code="import sys; sys.modules['sqlglot'] = None"
    )
    assert done.returncode == 1 and "ModuleNotFoundError" in done.stderr


def test_an_unknown_command_is_a_usage_error():
    assert actordbg("rpelay").returncode == 2
