"""What the tests of `actordbg run` share: a training environment with a pretended OpenRLHF, and ways to start a job in it."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from roots import FORKED, ROOT, run_program

from actordbg.install.ray_hooks import FOLDER

ACTOR = """
import torch


class Actor(torch.nn.Module):
    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False):
        return sequences.float()
"""
TRAIN = """
import os, sys
import torch
from openrlhf.models.actor import Actor

actor = Actor()
for number in range(int(os.environ.get("CALLS", "5"))):
    actor(torch.arange(16).reshape(2, 8) + number)
sys.exit(int(os.environ.get("CODE", "0")))
"""


def fake_openrlhf(folder, actor=ACTOR):
    """An `openrlhf` in `folder` that is only an Actor without weights, and a program `train.py`; returns its actor.py."""
    models = folder / "openrlhf" / "models"
    models.mkdir(parents=True)
    (folder / "openrlhf" / "__init__.py").touch()
    (models / "__init__.py").touch()
    (models / "actor.py").write_text(actor)
    (folder / "train.py").write_text(TRAIN)
    return models / "actor.py"


def clean_environment(**more):
    """The environment of a user who set nothing of ours (but rings lie where tests keep them), whose python writes no .pyc."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACTORDBG_", "RAY_", "PYTHON"))}
    rings = {name: os.environ[name] for name in ("ACTORDBG_RING_DIR",) if name in os.environ}
    return {**kept, **rings, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "NO_COLOR": "1", **more}


def below_run(*path, **more):
    """The environment of a process below `actordbg --store /s run --run r`, with the user's PYTHONPATH behind ours."""
    entries = os.pathsep.join([FOLDER, *map(str, path)])
    return clean_environment(ACTORDBG_STORE="/s", ACTORDBG_RUN="r", PYTHONPATH=entries, **more)


def python(code, environment, *arguments, cwd=None):
    """Standard output of a program that has to end well."""
    done = ended(code, environment, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ended(code, environment, *arguments, cwd=None):
    """A program that has ended. It runs in `/`, where there is nothing to import."""
    command = [sys.executable, "-c", code, *arguments]
    return run_program(command, env=dict(environment), cwd=cwd or "/", timeout=120)


def run_job(store, line, *words, path=None, cwd=None, code="", **more):
    """`actordbg --store STORE run LINE WORDS`, with `path` on the user's PYTHONPATH; `code` runs before it at the desk.

    FORKED_PROGRAM: the job's program, if it may be a fork (`forked_workers`).
    """
    program = f"{code}\nimport sys; sys.argv[0] = 'actordbg'\nfrom actordbg.cli.app import main; main()"
    entries = [str(ROOT), *([str(path)] if path else []), *([str(FORKED)] if "FORKED_PROGRAM" in more else [])]
    environment = clean_environment(PYTHONPATH=os.pathsep.join(entries), **more)
    command = [sys.executable, "-c", program, "--store", str(store.root), "run", *line.split(), *words]
    return run_program(command, env=environment, cwd=cwd, timeout=300)


class TrainingEnvironment:
    """A virtual environment with everything that is installed here except the distributions and modules in `without`.

    Guarantees: actordbg can be imported in it only if somebody lends it.
    """

    def __init__(self, folder, without=()):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.python = str(folder / "bin" / "python")
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site = Path(run_program([self.python, "-c", code]).stdout.strip())
        absent = ("actordbg", "_editable_impl_actordbg", "__editable__", *without)
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if entry.suffix != ".pth" and not entry.name.lower().startswith(absent):
                (self.site / entry.name).symlink_to(entry)
