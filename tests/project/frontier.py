"""What a new release changes of that which this project relies on: `make frontier RELEASES="transformers==5.24.0 trl==1.17.0"`.

The sources of the release and of the version that was tried are downloaded and parsed; nothing is installed or imported, so each takes
seconds. Of each place (`contracts.toml`, the seams of the adapters, OpenRLHF's losses) it prints whether it is gone, whether its
signature or what it returns is another, or only its body. Exit code 1 if a place is gone, or lacks an argument that was there.
"""

import argparse
import ast
import functools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actordbg.config.sources import parse_toml
from actordbg.trainers.find_adapter import installed, places
from actordbg.trainers.openrlhf import adapter

CONTRACTS = Path(__file__).with_name("contracts.toml")
LOSSES = Path(adapter.__file__).with_name("losses.json")


@dataclass(frozen=True)
class Contract:
    """What is relied on of a package: the version that was tried, and what relies on each place."""

    tried: str
    places: Mapping[str, str]


@dataclass(frozen=True)
class Change:
    """What a release changed of a place, in words. breaks: what relies on the place cannot work as it is."""

    place: str
    relied_on: str
    what: str
    breaks: bool = False


def contracts():
    """Return the contract of each package: the table's places, the adapters' seams, and OpenRLHF's losses."""
    table = parse_toml(CONTRACTS.read_text())
    found = {package: dict(entry.get("places", {})) for package, entry in table.items()}
    for name in places():
        for seam in installed(name).seams:
            package = seam.where.partition(".")[0]
            if package in found:
                found[package].setdefault(seam.where, f"the adapter {name}")
    for loss in json.loads(LOSSES.read_text())["losses"]:
        found["openrlhf"].setdefault(f"{loss['where']}.forward", "recorded losses")
    return {package: Contract(entry["tried"], found[package]) for package, entry in table.items()}


def compared(contract, before, after):
    """Yield what differs between two folders of sources, place by place."""
    for place, relied_on in contract.places.items():
        old, new = definition(before, place), definition(after, place)
        if old is None:
            yield Change(place, relied_on, "not in the version that was tried: correct the table", breaks=True)
        elif new is None:
            yield Change(place, relied_on, "gone", breaks=True)
        else:
            yield from (Change(place, relied_on, what, breaks) for what, breaks in differences(old, new))


def differences(old, new):
    """Yield in words how a definition differs, and whether an argument that was there is missing."""
    had, has = arguments(old), arguments(new)
    if lost := [name for name in had if name not in has]:
        yield f"no longer takes {', '.join(lost)}", True
    if added := [name for name in has if name not in had]:
        yield f"takes {', '.join(added)}", False
    if (before := returned(old)) != (after := returned(new)):
        yield f"returns {'; '.join(after) or 'nothing'} (was {'; '.join(before) or 'nothing'})", False
    elif body(old) != body(new) and not lost and not added:
        yield "another body", False


@functools.cache
def parsed(file):
    """Read a file of sources once for all its places."""
    return ast.parse(file.read_bytes())


def definition(folder, place):
    """Return the definition of `module:name` or `module:Class.name` in a folder of sources; None if there is none."""
    module, _, name = place.partition(":")
    path = folder.joinpath(*module.split("."))
    file = next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
    if file is None:
        return None
    found = parsed(file)
    for part in name.split("."):
        named = [node for node in getattr(found, "body", ()) if part in names(node)]
        if not named:
            return None
        found = named[-1]
    return found


def names(node):
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def arguments(node):
    """Return the names of the arguments of a function, or of a class's `__init__`, in their order."""
    if isinstance(node, ast.ClassDef):
        made = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
        return arguments(made[-1]) if made else []
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    given = node.args
    more = [f"*{part.arg}" for part in (given.vararg, given.kwarg) if part]
    return [part.arg for part in (*given.posonlyargs, *given.args, *given.kwonlyargs)] + more


def returned(node):
    """Return the expressions that a function returns; [] for another definition."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    texts = (ast.unparse(part.value) for part in ast.walk(node) if isinstance(part, ast.Return) and part.value)
    return list(dict.fromkeys(texts))


def body(node):
    """Return a definition as text, without docstrings and comments."""
    text = ast.parse(ast.unparse(node))
    for part in ast.walk(text):
        holds = getattr(part, "body", None)
        if isinstance(holds, list):
            part.body = [item for item in holds if not is_text(item)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(text)


def is_text(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def sources(package, version, folder):
    """Download a release, and return the folder that holds its package. Raises CalledProcessError if there is none."""
    place = folder / f"{package}-{version}"
    if not place.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--dest"]
        with tempfile.TemporaryDirectory() as scratch:
            environ = os.environ | {"DS_ACCELERATOR": "cpu"}  # DeepSpeed asks while pip reads its name
            subprocess.run([*command, scratch, f"{package}=={version}"], check=True, env=environ)
            (archive,) = Path(scratch).iterdir()
            if archive.suffix == ".whl":
                zipfile.ZipFile(archive).extractall(place)
            else:
                with tarfile.open(archive) as sdist:
                    sdist.extractall(place, filter="data")
    # In a wheel it lies at the top or below `.data/purelib`, in an sdist in a folder of its own.
    holders = [found.parent for found in place.rglob(package) if found.is_dir()]
    return min(holders, key=lambda holder: len(holder.parts), default=place)


def main(words=None):
    """Compare releases with what was tried."""
    parser = argparse.ArgumentParser(description="What new releases change of that which this project relies on.")
    parser.add_argument("releases", nargs="+", help="PACKAGE==VERSION")
    parser.add_argument("--keep", type=Path, help="where sources are kept; default: a folder that goes with the run")
    options = parser.parse_args(words)
    known, broken = contracts(), False
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        for release in options.releases:
            package, _, version = release.partition("==")
            if package not in known:
                parser.error(f"{package}: nothing is declared of it in {CONTRACTS.name}")
            contract = known[package]
            found = list(compared(contract, sources(package, contract.tried, folder), sources(package, version, folder)))
            print(
                f"\n{release} beside {contract.tried}: {len({change.place for change in found})} of {len(contract.places)} places changed"
            )
            for change in found:
                print(f"  {change.place} ({change.relied_on})\n    {change.what}")
            broken |= any(change.breaks for change in found)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
