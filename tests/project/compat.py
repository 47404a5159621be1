"""Which releases of OpenRLHF and transformers actordbg works with: one environment for each pair, and the whole way in each.

    python tests/project/compat.py [--envs DIR] [OPENRLHF+TRANSFORMERS ...]      (make compat)

Each environment is a small one on top of this one: its own openrlhf and transformers, and torch, deepspeed and the rest of the
interpreter that runs this; the newest pair also has the newest deepspeed and ray. In it: `patch`, four calls of OpenRLHF's Actor
with recording on, `unpatch`, a replay of what was recorded under each backend, and its comparison with the truth. The table is docs/reference/versions.md.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "versions.md"
NEWEST = "newest"
PAIRS = ("0.8.3+4.53.2", "0.9.9+4.57.1", "0.10.4+5.7.0", "0.11.2+5.15.0", f"{NEWEST}+{NEWEST}")
BACKENDS = {
    "plain": ["--backend", "plain"],
    "ZeRO 2": ["--backend", "deepspeed", "--zero-stage", "2", "--nproc", "2"],
    "ZeRO-3": ["--backend", "deepspeed", "--zero-stage", "3", "--nproc", "2"],
    "fsdp2": ["--backend", "fsdp2", "--nproc", "2"],
}
STEPS = ("capture", *BACKENDS)
PACKAGES = ("OpenRLHF", "transformers", "DeepSpeed", "Ray")
CALLS = 4
TRAINING = """
import os, sys, time
from actordbg.trainers.openrlhf.cpu import install_cpu_support
install_cpu_support()
import torch
from pathlib import Path
from actordbg.actor.models import ensure_tiny
from actordbg.config.choices import Choices
from actordbg.trainers.openrlhf.build import build_actor
torch.manual_seed(0)
path = str(ensure_tiny(Path(sys.argv[1])))
actor = build_actor(path, Choices(path, "bf16", "sdpa", packing=False, temperature=1.0, backward=False))
for call in range(int(sys.argv[2])):
    ids = torch.randint(0, 1000, (2, 64))
    mask = torch.ones_like(ids)
    mask[0, :9], mask[1, -5:] = 0, 0
    actor(ids, mask[:, -32:].bool(), attention_mask=mask, return_output=True)
"""


def main(words=None):
    """Try the pairs; write the page if it was all of them. Exit code 1 if a step of any failed."""
    parser = argparse.ArgumentParser(description="Try releases of OpenRLHF and transformers.")
    parser.add_argument("pairs", nargs="*", help="OPENRLHF+TRANSFORMERS, such as 0.11.2+5.15.0; default: the table's")
    parser.add_argument("--envs", type=Path, help="where the environments are kept; default: a folder that goes with the run")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        envs = options.envs or Path(scratch) / "envs"
        tried = []
        for pair in options.pairs or PAIRS:
            tried.append(try_pair(*pair.split("+"), envs, Path(scratch) / pair.replace("+", "_")))
            print(json.dumps(tried[-1]), flush=True)
    page = page_of(tried)
    if options.pairs:
        print(page)
    else:
        PAGE.write_text(page)
    return int(any(answer not in ("yes", "refused") for steps in tried for name, answer in steps.items() if name not in PACKAGES))


def try_pair(openrlhf, transformers, envs, folder):
    """The whole way in one environment."""
    python = environment(envs / f"{openrlhf}_{transformers}", openrlhf, transformers)
    if isinstance(python, str):
        return {"OpenRLHF": openrlhf, "transformers": transformers, "install": python}
    folder.mkdir(parents=True)
    code = f"from importlib.metadata import version as v; print(*map(v, {[*map(str.lower, PACKAGES)]}))"
    found = run([str(python), "-c", code], Path.cwd()).stdout.split()
    steps = dict(zip(PACKAGES, found, strict=True)) | {"capture": captured(python, folder)}
    return steps | {name: replayed(python, folder, flags) for name, flags in BACKENDS.items()}


def environment(folder, openrlhf, transformers):
    """Its interpreter, with the two packages over this interpreter's; or what pip says."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        own = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).stdout.strip())
        own.joinpath("zz_below.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    # openrlhf is the environment's own, even where the same release lies below: `patch` writes into it
    wanted = [("openrlhf", openrlhf, "--no-deps", "--ignore-installed"), ("transformers", transformers)]
    if transformers == NEWEST:  # with what stands below it
        wanted += [(package, NEWEST, "--no-deps") for package in ("deepspeed", "ray")]
    for package, version, *flags in wanted:
        arguments = [*flags, package if version == NEWEST else f"{package}=={version}"]
        done = run([str(python), "-m", "pip", "install", "--quiet", "--upgrade", *arguments], folder)
        if done.returncode:
            return first_line(done)
    return python


def captured(python, folder):
    """Patch, record each of the calls, unpatch: "yes" if all were recorded and the file is what it was."""
    where = "import importlib.util as u; print(u.find_spec('openrlhf').submodule_search_locations[0])"
    actor = Path(run([str(python), "-c", where], folder).stdout.strip()) / "models" / "actor.py"
    before = hashlib.sha256(actor.read_bytes()).hexdigest()
    for words in (["patch"], ["dump", "enable"]):
        if (done := actordbg(python, folder, *words)).returncode:
            return first_line(done)
    trained = run([str(python), "-c", TRAINING, str(folder / "cache"), str(CALLS)], folder)
    unpatched = actordbg(python, folder, "unpatch")
    for done in (trained, unpatched):
        if done.returncode:
            return first_line(done)
    if hashlib.sha256(actor.read_bytes()).hexdigest() != before:
        return "actor.py is not what it was"
    dumps = json.loads(actordbg(python, folder, "dump", "ls", "--json").stdout)
    return "yes" if len(dumps) == CALLS else f"{len(dumps)} of {CALLS} calls were recorded"


def replayed(python, folder, flags):
    """A replay with backward of what was recorded, and its comparison with the truth: "yes", "refused", or what went wrong."""
    for words in (
        ["replay", "--dtype", "fp32", "--backward", "--keep-gradients", "--quiet", *flags],
        ["compare", "last", "truth"],
    ):
        if (done := actordbg(python, folder, *words)).returncode:
            line = first_line(done)
            return "refused" if line.startswith("error[unsupported]") else line  # a known failure of these versions
    return "yes"


def actordbg(python, folder, *words):
    """A command of the product, in this environment, on its store."""
    return run([str(python), "-m", "actordbg", *words], folder)


def run(words, folder):
    """A program to its end."""
    environ = os.environ | {"ACTORDBG_STORE": str(folder / "store"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=900)


def first_line(done):
    """What went wrong: the error's line, else the last one."""
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("error", "ERROR")) or "Error: " in line]
    return (told or lines or [f"exit code {done.returncode}"])[-1][:200].replace("|", "/")


def page_of(tried):
    """The table as Markdown."""
    from importlib.metadata import version

    below, head = f"torch {version('torch')}", [*PACKAGES, *STEPS]
    rows = [[steps.get(name, steps.get("install", "-")) for name in head] for steps in tried]
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return TEXT.format(below=below, table="\n".join(lines))


TEXT = """\
<!-- Generated by `make compat`: do not edit. -->

# Versions that were tried

Each row is an environment of its own, with {below} (CPU build), Python 3.11. *capture*: `patch`, four calls of OpenRLHF's Actor, all
recorded, and `unpatch` byte for byte. A backend: these calls replayed with backward in fp32 (all but plain on two processes), and
log-probs, loss and gradients within the limits of the truth. "refused": OpenRLHF 0.10.3 to 0.11.2 load no model under ZeRO-3 with
transformers 5.23 or later, which a replay says before it starts.

{table}

For other pairs: `python tests/project/compat.py 0.9.5+4.56.2`.
"""


if __name__ == "__main__":
    sys.exit(main())
