"""Print the figures of the house, one checkout beside another: `make figures`, or `python tests/project/figures.py [ROOT...]`.

Each ROOT is a checkout (this one if none is named). Nothing of actordbg is imported into this process: sources are read, and what
has to run runs in processes with ROOT on their path. So an older checkout, with other rooms, can stand beside a newer one::

    $ make figures FIGURES_OF="/path/to/before ."
    code tokens of the product                           427,134      349,870
    ...
      compare                                             14,201       11,950

`weight.py` says what a code token, a room and a floor are; how long `--help` takes is a row of `make bench`.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import weight

BROAD = {"Exception", "BaseException"}

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
files = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "actordbg"]
texts = [text for text in map(Path.read_text, map(Path, files)) if text]
print(len(texts), len(files), sum(text.count("\\n") for text in texts), len(dumps()))
"""
"""A training that records calls: prints our modules that it loaded, without and with empty ones, their lines, and its dumps."""


def sources(root: Path) -> Iterator[Path]:
    """Yields the product's files."""
    return (root / "actordbg").rglob("*.py")


def broad_excepts(path: Path) -> int:
    """`except:`, `except Exception` and `except BaseException` of a file, also in a tuple."""
    handlers = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ExceptHandler)]
    return sum(one.type is None or bool(BROAD & {n.id for n in ast.walk(one.type) if isinstance(n, ast.Name)}) for one in handlers)  # fmt: skip


def settings(root: Path) -> int:
    """How many settings a replay has: the fields of ReplayConfig."""
    for path in sources(root):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == "ReplayConfig":
                return sum(isinstance(field, ast.AnnAssign) for field in node.body)
    return 0


def python(root: Path, *arguments: str) -> str:
    """What an interpreter with this checkout on its path prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ACTORDBG_")}
    environment |= {"PYTHONPATH": str(root), "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, check=True
        )
    return done.stdout


def trainer(root: Path) -> tuple[int, int, int]:
    """What a training that records has loaded of us: modules, the same with empty `__init__.py`, and lines."""
    with tempfile.TemporaryDirectory() as folder:
        python(root, "-m", "actordbg", "--store", folder, "dump", "enable")
        modules, every, loaded, dumps = map(int, python(root, "-c", TRAINER, folder).split())
    if not dumps:
        raise RuntimeError("the training recorded nothing, so what it loaded says nothing")
    return modules, every, loaded


def weights(root: Path) -> dict[str, str]:
    """Returns what a checkout weighs, by the figure's name; the rooms' tokens last, each under its room's name."""
    product, tests = weight.weigh(weight.product(root)), weight.weigh(weight.tests(root))
    by_room = {room: weight.weigh(sorted((root / "actordbg" / room).rglob("*.py"))) for room in weight.rooms(root)}
    return {
        "code tokens of the product": f"{product.tokens:,}",
        "code tokens of the tests": f"{tests.tokens:,}",
        "words in all Markdown": f"{weight.markdown_words(root):,}",
        "product lines": f"{product.lines:,}",
        "  of them docstrings": f"{product.docstring_lines:,}",
        "product files": f"{product.files:,}",
        f"  of over {weight.LARGE} lines": str(product.large_files),
        "rooms": str(len(by_room)),
        "floors": str(weight.floors(root)),
    } | {f"  {room}": f"{of_room.tokens:,}" for room, of_room in by_room.items()}


def figures(root: Path) -> dict[str, str]:
    """Returns every figure of one checkout, in words, by its name."""
    modules, every, loaded = trainer(root)
    capture = root / "actordbg" / "capture"
    broad = {path: broad_excepts(path) for path in sources(root)}
    inside = sum(count for path, count in broad.items() if capture in path.parents)
    return weights(root) | {
        "our modules in the trainer's process": str(modules),
        "  with empty __init__.py": str(every),
        "  their lines": f"{loaded:,}",
        "broad excepts in capture/": str(inside),
        "broad excepts elsewhere": str(sum(broad.values()) - inside),
        "settings of a replay": str(settings(root)),
    }


def main(roots: list[str]) -> None:
    """Print the figures of these checkouts side by side."""
    for root in roots:
        if not (Path(root) / "actordbg").is_dir():
            raise SystemExit(f"{root} is no checkout: it has no folder actordbg")
    checkouts = [figures(Path(root).resolve()) for root in roots or [str(Path(__file__).resolve().parents[2])]]
    for name in dict.fromkeys(name for checkout in checkouts for name in checkout):
        print(f"{name:<46}" + "".join(f"{checkout.get(name, '-'):>14}" for checkout in checkouts))


if __name__ == "__main__":
    main(sys.argv[1:])
