"""The three process zones: what runs in a training job stays light, and what runs at the desk does not load torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DESK_ONLY = {"typer", "rich", "pydantic", "sqlmodel", "sqlalchemy", "sqlite3", "alembic", "sqlglot", "click"}


def loaded_by(code: str, *arguments: str) -> set[str]:
    """Top-level names of the modules that a fresh interpreter has after running `code`."""
    tail = "\nimport sys\nprint('\\n' + '\\0'.join({m.partition('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code + tail, *arguments], check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines()[-1].split("\0"))


def test_the_capture_zone_loads_nothing_of_the_desk():
    added = loaded_by("import torch, safetensors.torch, zstandard, actordbg.capture.hook") - loaded_by("import torch")
    assert added & DESK_ONLY == set()


def command(*arguments: str) -> str:
    return f"import sys; sys.argv[1:] = {arguments!r}\nfrom actordbg.cli.app import main\ntry: main()\nexcept SystemExit: pass"


@pytest.mark.parametrize(
    "arguments", [("--help",), ("replay", "--help"), ("dump", "ls"), ("report",), ("dump", "status")]
)
def test_the_desk_does_not_load_torch(tmp_path: Path, arguments: tuple[str, ...]):
    assert "torch" not in loaded_by(command("--store", str(tmp_path), *arguments))


def test_help_loads_neither_the_catalog_nor_rich_tables():
    assert {"sqlmodel", "sqlalchemy", "alembic", "sqlglot"}.isdisjoint(loaded_by(command("--help")))
