"""The page of the Python API, read from the source of the names that `import actordbg` offers: signatures and docstrings."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from actordbg.api import plain_commands
from actordbg.cli.app import CONTENTS
from actordbg.cli.lazy import every_command

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("examples/check_model.py", "examples/use_store.py")
"""Scripts that the page shows, and a test runs."""
BEGINNING = """\
`import actordbg` loads nothing until a name is used. Errors are [the exceptions](errors.md) that commands report, with `message`,
`hint` and `code`. Nothing here prints or exits. Settings are [those of the command line](replay-settings.md), with underscores:
`store.check(model="/models/llama", packing=True)`. What an answer's `record` holds has [schemas](json/answer.schema.json).
"""
EXAMPLE_CI = "`examples/trainer_ci` is a trainer's CI in twelve lines: two GRPO steps of TRL on a CPU."
BASES = {"OpenStore": (("api/store_commands.py", "StoreCommands"), ("api/plain_commands.py", "PlainCommands"))}
"""The classes whose members a class inherits."""
MORE = {"OpenStore.dumps": ("api/dump_list.py", "DumpList"), "OpenStore.record": ("api/recording.py", "CallRecording"),
        "OpenStore.check": ("api/checks.py", "CheckResult"), "OpenStore.report": ("api/reports.py", "Report"),
        "truth": ("api/own_model.py", "Truth")}  # fmt: skip
"""Classes whose instances a name returns, shown after it."""


def api_markdown() -> str:
    """The page."""
    lines = ["# Python API", "", *BEGINNING.splitlines(), ""]
    for path in EXAMPLES:
        lines += ["```python", (ROOT / path).read_text().strip(), "```", ""]
    homes = _homes()
    for name in ("open", "OpenStore", "CommandResult", "check_model", "truth", "record", "StoredDump"):
        lines += _of(homes[name], name)
        lines += [line for after, (path, kind) in MORE.items() if after.partition(".")[0] == name for line in _of(path, kind)]
    plugin = ast.parse((ROOT / "actordbg" / "api" / "pytest_plugin.py").read_text())
    lines += ["## The pytest plugin", "", *_docstring(plugin), "", EXAMPLE_CI]
    return "\n".join(lines).rstrip() + "\n"


def _docstring(module: ast.Module) -> list[str]:
    """Return a module's docstring with its indented lines as a block of code."""
    blocks = re.split(r"\n\n(?=\S)", ast.get_docstring(module) or "")
    first, *others = (re.split(r"(?m)^\n?(?=    )", block, maxsplit=1) for block in blocks)
    lines: list[str] = []
    for prose, *code in (first, *others):
        lines += [prose.strip(), ""] + (["```python", inspect.cleandoc(code[0]), "```", ""] if code else [])
    return lines[:-1]


def _homes() -> dict[str, str]:
    """Return the file of each name, by the imports of the package's root."""
    tree = ast.parse((ROOT / "actordbg" / "__init__.py").read_text())
    imports = [
        node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("actordbg.")
    ]
    return {name.name: node.module.removeprefix("actordbg.").replace(".", "/") + ".py" for node in imports for name in node.names}


def _of(path: str, name: str) -> list[str]:
    """Return the section of a function, or of a class and its public members."""
    node = _class(path, name)
    title = f"actordbg.{name}" if path in _homes().values() and name in _homes() else name
    if not isinstance(node, ast.ClassDef):
        return [f"## {title}", "", *_signature(node), ""]
    lines = [f"## {title}", "", _text(node), ""]
    inherited = [_class(*base) for base in BASES.get(name, ())]
    members = itertools.chain.from_iterable(map(_members, (node, *inherited)))
    for member in sorted(members, key=lambda each: not _has(each, "property")):
        if _has(member, "property"):
            lines += [f"- `.{member.name}`: {' '.join(_text(member).split())}"]
        else:
            lines += ["", f"### {name}.{member.name}", "", *_signature(member)]
    return [*lines, ""]


def _class(path: str, name: str) -> Any:
    tree = ast.parse((ROOT / "actordbg" / path).read_text())
    return next(node for node in tree.body if getattr(node, "name", "") == name)


def _members(node: Any) -> Iterator[ast.FunctionDef]:
    members = (member for member in node.body if isinstance(member, ast.FunctionDef) and member.name[0] != "_")
    yield from (each for each in members if not _has(each, "classmethod"))


def _has(member: ast.FunctionDef, decorator: str) -> bool:
    return any(isinstance(mark, ast.Name) and decorator in mark.id for mark in member.decorator_list)


def _signature(node: ast.AST) -> list[str]:
    assert isinstance(node, ast.FunctionDef)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg) and argument.annotation:
            argument.annotation = _plain(argument.annotation)
    shown = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    return ["```text", f"{node.name}({shown}){returns}", "```", "", _described(node)]


def _plain(annotation: ast.expr) -> ast.expr:
    """Return a type without the mark that says how the command line shows it."""
    marked = getattr(plain_commands, annotation.id, annotation) if isinstance(annotation, ast.Name) else annotation
    if get_origin(marked) is Annotated:
        kind = get_args(marked)[0]
        return ast.Name(getattr(kind, "__name__", str(kind)))
    if isinstance(marked, ast.Subscript) and ast.unparse(marked.value) == "Annotated" and isinstance(marked.slice, ast.Tuple):
        return marked.slice.elts[0]
    return annotation


def _described(node: ast.FunctionDef) -> str:
    """Return a function's docstring; of a command's, the first sentence, and where its arguments are explained."""
    command = next((name for name, command in every_command(CONTENTS) if command.target == f":{node.name}"), None)
    if command is None:
        return _text(node)
    place = f"[`actordbg {command}`](cli.md#actordbg-{command.replace(' ', '-')})"
    return f"{_text(node).splitlines()[0]} Its arguments are those of {place}."


def _text(node: ast.AST) -> str:
    return inspect.cleandoc(ast.get_docstring(node) or "")  # type: ignore[arg-type]
