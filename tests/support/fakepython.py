"""A Python environment made of stubs: an interpreter without its site-packages, and a folder of pretended packages."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from roots import script

from actordbg.doctor.python_environment import KNOWN_GOOD
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

    def __init__(self, folder: Path) -> None:
        self.site = folder / "site"
        self.site.mkdir(parents=True)
        start = f'PYTHONPATH={shlex.quote(str(self.site))} exec {shlex.quote(sys.executable)} -S "$@"'
        self.executable = script(folder / "python", start)

    def install(self, name: str, version: str) -> None:
        """Metadata of a distribution; an earlier version of it is gone."""
        self.uninstall(name)
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def version(self, name: str) -> str:
        """Like `importlib.metadata.version`."""
        for info in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            return info.name.removesuffix(".dist-info").partition("-")[2]
        raise PackageNotFoundError(name)

    def uninstall(self, name: str) -> None:
        for info in self.site.glob(f"{name.replace('-', '_')}-*.dist-info"):
            (info / "METADATA").unlink()
            info.rmdir()

    def module(self, name: str, text: str = "") -> Path:
        """A module by its dotted name; its packages are made where they are missing."""
        path = self.site.joinpath(*name.split(".")).with_suffix(".py")
        for folder in path.relative_to(self.site).parents:
            if folder.name:
                (self.site / folder).mkdir(parents=True, exist_ok=True)
                (self.site / folder / "__init__.py").touch()
        path.write_text(text)
        return path


def known_good_python(folder: Path) -> FakePython:
    """Every package at its known-good version, a torch without CUDA, and an OpenRLHF whose modules import."""
    python = FakePython(folder)
    for name, version in KNOWN_GOOD.items():
        python.install(name, version or "1.0")
    python.module("torch", TORCH)
    python.module("actordbg.trainers.trainer", "class TRAINER:\n    support_cpu = staticmethod(lambda: None)\n")
    for name in TRAINER.modules:
        python.module(name, ACTOR)
    return python
