"""The commands patch, unpatch and status as a user types them: text, JSON, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import actordbg
from actordbg.store.layout import Store

ACTOR = b"class Actor:\n    def forward(self, sequences, attention_mask=None):\n        return sequences\n"
PROGRAM = """
import sys
from pathlib import Path
from typing import Annotated
import typer
from actordbg.cli import patch, status
from actordbg.base.errors import ActordbgError
app = typer.Typer(pretty_exceptions_enable=False)
for command in (patch.patch, patch.unpatch, status.status):
    app.command(command.__name__)(command)
@app.callback()
def root(store: Annotated[Path | None, typer.Option()] = None) -> None: ...
try:
    app()
except ActordbgError as error:
    print(f"error[{error.code}]: {error.message}\\nhint: {error.hint}", file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def actor(tmp_path: Path) -> Path:
    """An actor.py, and beside it an actordbg with a light hook in front of the real package's folders."""
    path = tmp_path / "actor.py"
    path.write_bytes(ACTOR)
    (tmp_path / "light" / "actordbg" / "capture").mkdir(parents=True)
    real = Path(actordbg.__file__).parent
    (tmp_path / "light" / "actordbg" / "__init__.py").write_text(f"__version__ = '0'\n__path__.append({str(real)!r})\n")
    (tmp_path / "light" / "actordbg" / "capture" / "__init__.py").write_text(f"__path__.append({str(real / 'capture')!r})\n")
    (tmp_path / "light" / "actordbg" / "capture" / "hook.py").write_text("def install(cls, *, store): ...\n")
    return path


def _run(actor: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACTORDBG")}
    environment["PYTHONPATH"] = str(actor.parent / "light")
    command = [sys.executable, "-c", PROGRAM, "--store", str(actor.parent / "store"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=actor.parent, timeout=120)


@pytest.mark.slow
def test_patch_status_unpatch_as_text(actor: Path):
    done = _run(actor, "patch", "--target", str(actor))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"patched: {actor}\n") and "dump enable" in done.stderr
    seen = _run(actor, "status", "--target", str(actor))
    assert seen.returncode == 0 and seen.stdout.startswith(f"patched: {actor}\n")
    assert "hook seen   yes" in seen.stdout and "capture     off" in seen.stdout
    again = _run(actor, "patch", "--target", str(actor))
    assert again.returncode == 0 and again.stdout.startswith("already patched")
    undone = _run(actor, "unpatch", "--target", str(actor))
    assert undone.returncode == 0 and undone.stdout.startswith(f"unpatched: {actor}\n")
    assert actor.read_bytes() == ACTOR


@pytest.mark.slow
def test_json_has_the_same_answer_and_nothing_else(actor: Path):
    shown = json.loads(_run(actor, "patch", "--target", str(actor), "--dry-run", "--json").stdout)
    assert shown["dry_run"] and shown["diff"] and shown["action"] == "patched" and actor.read_bytes() == ACTOR
    done = json.loads(_run(actor, "patch", "--target", str(actor), "--json").stdout)
    assert (done["state"], done["file"], done["diff"]) == ("patched", str(actor), "")
    seen = json.loads(_run(actor, "status", "--target", str(actor), "--json").stdout)
    assert (seen["state"], seen["hooked"], seen["armed"]) == ("patched", True, False)
    assert seen["original_sha256"] == done["sha256_before"] and seen["sha256"] == done["sha256_after"]
    assert seen["store"] == str(Store(actor.parent / "store").root) and seen["patched_at"]
    undone = json.loads(_run(actor, "unpatch", "--target", str(actor), "--json").stdout)
    assert (undone["action"], undone["state"], undone["sha256_after"]) == ("unpatched", "clean", done["sha256_before"])


@pytest.mark.slow
def test_an_edited_trailer_ends_with_exit_code_3(actor: Path):
    _run(actor, "patch", "--target", str(actor))
    actor.write_bytes(actor.read_bytes() + b"mine = 1\n")
    for command in ("patch", "unpatch"):
        done = _run(actor, command, "--target", str(actor))
        assert done.returncode == 3 and "error[conflict]" in done.stderr and "Traceback" not in done.stderr
    seen = _run(actor, "status", "--target", str(actor))
    assert seen.returncode == 0 and seen.stdout.startswith("patched and edited since")


@pytest.mark.slow
def test_exit_codes_of_wrong_targets(actor: Path):
    (actor.parent / "other.py").write_text("x = 1\n")
    assert _run(actor, "patch", "--target", "other.py").returncode == 3
    assert _run(actor, "patch", "--target", "missing.py").returncode == 4
    assert _run(actor, "patch", "--target", "other.py", "--python", sys.executable).returncode == 2
    assert _run(actor, "status", "--python", "/missing/python").returncode == 4
    (actor.parent / "light" / "actordbg" / "capture" / "hook.py").write_text("import missing_module\n")
    done = _run(actor, "patch", "--target", str(actor))
    assert done.returncode == 4 and "pip install actordbg" in done.stderr and actor.read_bytes() == ACTOR


@pytest.mark.parametrize("command", ["patch", "unpatch", "status"])
def test_help_has_an_example(actor: Path, command: str):
    done = _run(actor, command, "--help")
    assert done.returncode == 0 and "Example: actordbg" in done.stdout and "--json" in done.stdout
