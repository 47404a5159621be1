"""One name for one thing: the name of a class stands for one place in the product."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from roots import ROOT

PRODUCT = sorted((ROOT / "actordbg").rglob("*.py"))


def twice(places: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_classes_have_the_same_name():
    places: dict[str, list[str]] = defaultdict(list)
    for path in PRODUCT:
        if path.parent.name == "catalog" and path.stem.endswith("models"):
            continue  # a table is called as what its rows are about
        for name in classes_of(path):
            places[name].append(str(path.relative_to(ROOT)))
    assert twice(places) == {}


def classes_of(path: Path) -> list[str]:
    """Names of the classes of a module, and of classes in classes; not of those inside a function."""
    found: list[str] = []
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in todo:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                found.append(child.name)
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                todo.append(child)
    return found
