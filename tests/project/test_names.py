"""One name for one thing: the name of a class stands for one place in the product."""

import ast
from collections import defaultdict

from roots import ROOT


def test_no_two_classes_have_the_same_name():
    """A table is called as what its rows are about."""
    places = defaultdict(list)
    for path in sorted((ROOT / "actordbg").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not (
                path.parent.name == "catalog" and path.stem.endswith(("models", "columns"))
            ):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
