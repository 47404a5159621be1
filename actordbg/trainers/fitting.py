"""Check whether an adapter fits the installed trainer, without importing the trainer.

A seam fits if its file has the function, and the function takes the arguments that the adapter reads. Files are parsed, not run.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from actordbg.base.errors import Unsupported
from actordbg.trainers.find_adapter import installed, look_here, of_user, places
from actordbg.trainers.seam import Adapter, Seam

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Fit:
    """How an adapter fits the installed trainer.

    there: the trainer is installed. version: of its package; None for code without a package. tried: versions that were recorded
    and replayed. differs: what the adapter expects and the trainer lacks, in words. missed: how many of `functions` differ.
    """

    name: str
    place: str
    package: str
    there: bool
    version: str | None
    tried: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    missed: int = 0

    @property
    def fits(self) -> bool:
        return self.there and not self.differs

    @property
    def answer(self) -> str:
        """Summarize the fit: "yes", "no", "not installed" or "N of M functions"."""
        if not self.there:
            return "no" if self.differs else "not installed"
        if 0 < self.missed < len(self.functions):
            return f"{len(self.functions) - self.missed} of {len(self.functions)} functions"
        return "no" if self.differs else "yes"


def fits() -> list[Fit]:
    """Check every installed adapter, sorted by name; an adapter that cannot be imported says so in `differs`."""
    known = []
    for name, place in sorted(places().items()):
        try:
            known.append(fit(installed(name), place))
        except Unsupported as problem:
            known.append(Fit(name, place, "", False, None, differs=(problem.message,)))
    return known


def fit_of(named: str) -> Fit:
    """Check the adapter of this name, or a `module:Class`. Raises Unsupported like `of_user`."""
    look_here()
    return fit(of_user(named), places().get(named, named))


def fit(adapter: Adapter, place: str = "") -> Fit:
    """Check this adapter against the installed trainer."""
    installed = None
    with contextlib.suppress(PackageNotFoundError):
        installed = version(adapter.package)
    shared = ("transformers.", "nemo_automodel.")  # which may be there without the trainer
    own = [seam for seam in adapter.seams if not seam.module.startswith(shared)]
    there = installed is not None or any(_file_of(seam.module) for seam in own)
    problems = [tuple(differences(seam)) for seam in adapter.seams] if there else []
    differs = tuple(why for reasons in problems for why in reasons)
    names = tuple(seam.where for seam in adapter.seams)
    missed = sum(map(bool, problems))
    who = (adapter.name, place, adapter.package)
    return Fit(*who, there, installed, tuple(adapter.tried), functions=names, differs=differs, missed=missed)


def differences(seam: Seam) -> Iterator[str]:
    """Yield what the installed trainer lacks for a seam, in words."""
    path = _file_of(seam.module)
    if path is None:
        yield f"{seam.where}: there is no module {seam.module}"
        return
    try:
        definition = _function(ast.parse(path.read_bytes()), seam.function)
    except (OSError, SyntaxError, ValueError) as error:
        yield f"{seam.where}: {path} cannot be read: {type(error).__name__}"
        return
    if definition is None:
        yield f"{seam.where}: there is no such function in {path}"
        return
    given = definition.args
    if why := seam.differs(argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)):
        yield f"{seam.where}: {why}"


def _file_of(module: str) -> Path | None:
    """Return the file of a module without importing its package."""
    top, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not parts:
        return Path(spec.origin) if spec.origin else None
    folders = [Path(folder).joinpath(*parts) for folder in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in (folder.with_suffix(".py"), folder / "__init__.py")]
    return next((file for file in files if file.is_file()), None)


def _function(tree: ast.Module, name: str) -> _Function | None:
    """Return the function of this name (or `Class.method`); the last definition, as an import would."""
    body: list[ast.stmt] = tree.body
    *classes, last = name.split(".")
    for class_name in classes:
        holder = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == class_name), None)
        if holder is None:
            return None
        body = holder.body
    return next((node for node in reversed(body) if isinstance(node, _Function) and node.name == last), None)
