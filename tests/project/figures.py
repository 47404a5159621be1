"""Print the figures of the house, one checkout beside another: `make figures`, or `python tests/project/figures.py [ROOT...]`.

Each ROOT is a checkout (this one if none is named). Nothing of actordbg is imported into this process: sources are read, and what
has to run runs in processes with ROOT on their path. So an older checkout, with other rooms, can stand beside a newer one::

    $ make figures FIGURES_OF="/path/to/before ."
    code tokens of the product                           427,134      349,870
    ...
      compare                                             14,201       11,950

A code token is one token of Python's `tokenize`, without comments, docstrings and layout (new lines, indentation). An f-string is one
token, and each token of the expressions in it is one more, on each Python alike. Lines can be made fewer by making them denser, and code
can be moved into texts; tokens cannot. A room is a package directly under `actordbg/`; the floors are the rooms on the longest
path of imports between them, imports inside functions included. How long `--help` takes is a row of `make bench`.
"""

import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
LARGE = 400
"""A file of more lines than this is counted as large."""
DENSE = ("conditions in f-strings", "texts times a condition", "calls of seven positional arguments")
MANY = 7


@dataclass(frozen=True)
class Weight:
    """The weight of some Python files."""

    files: int
    lines: int
    tokens: int
    large_files: int


def starts(source):
    """Returns where the tokens of a source begin, without layout. An f-string is one token, as it was until Python 3.11."""
    found, depth = [], 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if token.type not in LAYOUT and not depth:
            found.append(token.start)
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
    return found


def code_tokens(source):
    """Counts the tokens of a source that are neither comments, docstrings nor layout."""
    nodes = list(ast.walk(ast.parse(source)))
    alone = (node.value for node in nodes if isinstance(node, ast.Expr))
    texts = (value for value in alone if isinstance(value, ast.Constant) and isinstance(value.value, str))
    documentation = {(text.lineno, text.col_offset) for text in texts}
    # An f-string within an f-string is among the nodes itself.
    in_texts = sum(len(starts(ast.unparse(node.value))) for node in nodes if isinstance(node, ast.FormattedValue))
    return in_texts + sum(start not in documentation for start in starts(source))


def dense(source):
    """Returns the lines where control flow hides in an expression, by its kind.

    A condition in an f-string is `a if b else c`, `and` or `or`, a fallback (`x or "none"`) too. What a list or a text is multiplied by
    is a condition by its form, or a name or an attribute that holds one; an attribute that is a number needs a name first.
    """
    found = {name: [] for name in DENSE}
    tree = ast.parse(source)
    flags = flags_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside = [part for value in node.values if isinstance(value, ast.FormattedValue) for part in ast.walk(value.value)]
            if any(isinstance(part, ast.IfExp | ast.BoolOp) for part in inside):
                found["conditions in f-strings"].append(node.lineno)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for one, other in ((node.left, node.right), (node.right, node.left)):
                text = isinstance(one, ast.JoinedStr | ast.List | ast.Tuple) or isinstance(getattr(one, "value", None), str)
                if text and (is_condition(other) or isinstance(other, ast.Attribute) or getattr(other, "id", None) in flags):
                    found["texts times a condition"].append(node.lineno)
        if isinstance(node, ast.Call) and len(node.args) >= MANY:
            found["calls of seven positional arguments"].append(node.lineno)
    return found


def flags_of(tree):
    """Returns the names that hold a condition somewhere in a file: by what is assigned to them, or by their type."""
    pairs = []
    flags = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                together = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs += zip(target.elts, node.value.elts, strict=False) if together else [(target, node.value)]
        elif isinstance(node, ast.NamedExpr | ast.AnnAssign):
            pairs.append((node.target, node.value))
        if getattr(getattr(node, "annotation", None), "id", None) == "bool":
            flags |= {getattr(node, "arg", None) or getattr(getattr(node, "target", None), "id", "")}
    return flags | {target.id for target, value in pairs if isinstance(target, ast.Name) and value and is_condition(value)}


ASKING = ("bool", "any", "all", "hasattr", "isinstance", "callable")
"""Functions that answer yes or no, beside those that begin with `is_` or `has_`."""


def is_condition(node):
    """Whether an expression is a condition by its form."""
    called = getattr(node, "func", None)
    name = str(getattr(called, "id", None) or getattr(called, "attr", ""))
    constant = isinstance(getattr(node, "value", None), bool)
    asks = name in ASKING or name.startswith(("is_", "has_"))
    return constant or asks or isinstance(node, ast.Compare | ast.BoolOp) or isinstance(getattr(node, "op", None), ast.Not)


def depth(node):
    """How deeply expressions are nested below a node."""
    return isinstance(node, ast.expr) + max(map(depth, ast.iter_child_nodes(node)), default=0)


def depths(paths):
    """How deeply each statement's own expressions are nested, in order of size."""
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt))
    own = ([part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)] for node in nodes)
    return sorted(max(map(depth, parts)) for parts in own if parts)


def weigh(paths):
    """Weighs these files together."""
    sources = [path.read_text() for path in paths]
    lines = [source.count("\n") for source in sources]
    return Weight(
        files=len(paths),
        lines=sum(lines),
        tokens=sum(map(code_tokens, sources)),
        large_files=sum(count > LARGE for count in lines),
    )


def product(root):
    """Returns the product's Python files."""
    return sorted((root / "actordbg").rglob("*.py"))


def tests(root):
    """Returns the Python files of the tests and their helpers."""
    return sorted((root / "tests").rglob("*.py"))


def rooms(root):
    """Returns the names of the packages directly under `actordbg/`."""
    return sorted(path.parent.name for path in (root / "actordbg").glob("*/__init__.py"))


IMPORTS = """
import grimp, json, sys
graph, rooms = grimp.build_graph("actordbg", cache_dir=None), sys.argv[1:]
for room in rooms:
    graph.squash_module(room)
print(json.dumps({room: sorted(graph.find_modules_directly_imported_by(room) & {*rooms} - {room}) for room in rooms}))
"""


def room_imports(root):
    """Returns for each room the other rooms that its files import."""
    imported = json.loads(python(root, "-c", IMPORTS, *(f"actordbg.{room}" for room in rooms(root))))
    return imported


def floors(root):
    """Counts the rooms on the longest path of imports. Raises RecursionError if rooms import each other in a circle."""
    imports = room_imports(root)

    @cache
    def height(room):
        return 1 + max(map(height, imports[room]), default=0)

    return max(map(height, imports))


def markdown_words(root):
    """Counts the words of all Markdown of a checkout, separated by white space as `wc -w` does."""
    parts = {path: path.relative_to(root).parts for path in root.rglob("*.md")}
    pages = (path for path in parts if not any(part.startswith(".") or part in ("build", "node_modules") for part in parts[path]))
    return sum(len(page.read_text().split()) for page in pages)


TRAINER = """
import sys, time
from pathlib import Path
import torch
from actordbg.capture.hook import install

class Actor(torch.nn.Module):
    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False, return_logprobs=False):
        return sequences.float()

install(Actor, store=sys.argv[1])
actor, ids, deadline = Actor(), torch.ones(2, 8, dtype=torch.int64), time.monotonic() + 30
def dumps():
    return [path for path in Path(sys.argv[1], "dumps").rglob("*") if path.is_file() and not path.name.startswith(".")]
while not dumps() and time.monotonic() < deadline:
    actor(ids)
    time.sleep(0.05)
texts = [Path(module.__file__).read_text() for name, module in sys.modules.items() if name.partition(".")[0] == "actordbg"]
print(sum(map(bool, texts)), sum(text.count("\\n") for text in texts), len(dumps()))
"""
"""A training that records calls: prints our modules that it loaded, without empty ones, their lines, and its dumps."""


def python(root, *arguments):
    """What an interpreter with this checkout on its path prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACTORDBG_")}
    environment |= {"PYTHONPATH": str(root), "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, check=True
        )
    return done.stdout


def trainer(root):
    """What a training that records has loaded of us: modules, without empty `__init__.py`, and lines."""
    with tempfile.TemporaryDirectory() as folder:
        python(root, "-m", "actordbg", "--store", folder, "dump", "enable")
        modules, loaded, dumps = map(int, python(root, "-c", TRAINER, folder).split())
    if not dumps:
        raise RuntimeError("the training recorded nothing, so what it loaded says nothing")
    return modules, loaded


def figures(root):
    """Returns every figure of one checkout, in words, by its name; the rooms' tokens last, each under its room's name."""
    of_product, of_tests, (modules, loaded) = weigh(product(root)), weigh(tests(root)), trainer(root)
    hidden = [dense(path.read_text()) for path in product(root)]
    nested = depths(product(root))
    return {
        "code tokens of the product": f"{of_product.tokens:,}",
        "code tokens of the tests": f"{of_tests.tokens:,}",
        "words in all Markdown": f"{markdown_words(root):,}",
        "product lines": f"{of_product.lines:,}",
        "product files": f"{of_product.files:,}",
        f"  of over {LARGE} lines": str(of_product.large_files),
        "rooms": str(len(rooms(root))),
        "floors": str(floors(root)),
        **{name: str(sum(len(of_file[name]) for of_file in hidden)) for name in DENSE},
        "depth of an expression, 90th percentile": str(nested[len(nested) * 9 // 10]),
        "our modules in the trainer's process": str(modules),
        "  their lines": f"{loaded:,}",
    } | {f"  {room}": f"{weigh(sorted((root / 'actordbg' / room).rglob('*.py'))).tokens:,}" for room in rooms(root)}


def main(roots):
    """Print the figures of these checkouts side by side."""
    for root in roots:
        if not (Path(root) / "actordbg").is_dir():
            raise SystemExit(f"{root} is not a checkout: it has no folder actordbg")
    checkouts = [figures(Path(root).resolve()) for root in roots or [str(Path(__file__).resolve().parents[2])]]
    for name in dict.fromkeys(name for checkout in checkouts for name in checkout):
        print(f"{name:<46}" + "".join(f"{checkout.get(name, '-'):>14}" for checkout in checkouts))


if __name__ == "__main__":
    main(sys.argv[1:])
