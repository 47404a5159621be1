"""How long commands take: their help, what the catalog answers when nothing is new, and a comparison.

* `actordbg --help`, and each command's own help, against `python -c "import typer"`.
* `dump ls`, with a condition too, `status`, `replay ls`, `dump show` and `index` on a store that is indexed,
  against `import typer`.
* `compare` of two replays of 20 dumps, 2 x 256 log-probs and 30 gradients of 4,096, its page of text included, against
  reading the same tensors with safetensors.

CPU time (user and system) of whole processes, interleaved, medians: seconds of a busy machine say less than ratios. All have
bytecode, as an installed package has it: without (`PYTHONDONTWRITEBYTECODE`, a read-only checkout) every start compiles anew.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from actordbg.cli.app import CONTENTS
from actordbg.cli.lazy import every_command
from benchmarks.kept_replays import two_replays
from benchmarks.rows import Row, cpu_seconds_of

NOTHING_NEW = (
    ("dump", "ls"), ("dump", "ls", "--where", "seq_len > 1"), ("status",), ("replay", "ls"), ("dump", "show", "last"), ("index",),
)  # fmt: skip
_TYPER = ("-c", "import typer")
_READ = """
import sys, pathlib
import safetensors.numpy
for path in pathlib.Path(sys.argv[1]).rglob("*.safetensors"):
    safetensors.numpy.load_file(path)
"""


def run(repeat: int = 5, helps: int = 3, dumps: int = 20) -> list[Row]:
    """Four rows. `helps`: how often each command's own help is asked for."""
    with tempfile.TemporaryDirectory() as folder, with_bytecode(Path(folder) / "bytecode"):
        store = Path(folder) / "store"
        a, b = two_replays(store, dumps, shape=(2, 256), gradients=30)
        at_store = ("-m", "actordbg", "--store", str(store))
        _cpu_seconds((*at_store, "index"))
        return [
            _help_row(repeat),
            _own_help_row(helps),
            _nothing_new_row(at_store, repeat),
            _compare_row((*at_store, "compare", a, b, "--quiet"), store / "replays", dumps, repeat),
        ]


def _help_row(repeat: int) -> Row:
    ours, theirs = _in_turn([("-m", "actordbg", "--help"), _TYPER], repeat)
    note = f"CPU time, median of {repeat}"
    ratio = ours / theirs
    return Row("actordbg --help / import typer", ours, theirs, "s", ratio=ratio, budget="<= 1.2", note=note, within=ratio <= 1.2)


def _own_help_row(repeat: int) -> Row:
    names = [name for name, _ in every_command(CONTENTS)]
    helps = [("-m", "actordbg", *name.split(), "--help") for name in names]
    *took, a, b, c = _in_turn([*helps, _TYPER, _TYPER, _TYPER], repeat)
    theirs = median([a, b, c])
    slowest = max(zip(took, names, strict=True))
    over = sum(one > 2 * theirs for one in took)
    note = f"slowest of {len(names)}: {slowest[1]}; median x{median(took) / theirs:.2f}; {over} are over 2.0; CPU time"
    ratio = slowest[0] / theirs
    return Row(
        "a command's own help / import typer", slowest[0], theirs, "s", ratio=ratio, budget="<= 2.0", note=note, within=ratio <= 2
    )


def _nothing_new_row(at_store: Sequence[str], repeat: int) -> Row:
    *took, theirs = _in_turn([*((*at_store, *words) for words in NOTHING_NEW), _TYPER], repeat)
    slowest, words = max(zip(took, NOTHING_NEW, strict=True))
    note = f"slowest of {len(took)}: {' '.join(words)}; median x{median(took) / theirs:.2f}; CPU time"
    ratio = slowest / theirs
    return Row(
        "a catalog command, nothing new / import typer", slowest, theirs, "s",
        ratio=ratio, budget="<= 4", note=note, within=ratio <= 4,
    )  # fmt: skip


def _compare_row(command: Sequence[str], replays: Path, dumps: int, repeat: int) -> Row:
    ours, theirs = _in_turn([command, ("-c", _READ, str(replays))], repeat)
    note = "2 x 256 log-probs and 30 gradients of 4,096 each; CPU time, which the new record's row is part of"
    ratio = ours / theirs
    return Row(
        f"compare of {dumps} dumps / reading them by safetensors", ours, theirs, "s",
        ratio=ratio, budget="<= 2", note=note, within=ratio <= 2,
    )  # fmt: skip


@contextmanager
def with_bytecode(folder: Path) -> Iterator[None]:
    """Inside the block the Pythons that are started keep their bytecode, in this folder."""
    before = {name: os.environ.pop(name, None) for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")}
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    try:
        yield
    finally:
        del os.environ["PYTHONPYCACHEPREFIX"]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _in_turn(commands: Sequence[Sequence[str]], repeat: int) -> list[float]:
    """Median CPU seconds of each, after one run of each to warm up."""
    rounds = [[_cpu_seconds(command) for command in commands] for _ in range(repeat + 1)][1:]
    return [median(column) for column in zip(*rounds, strict=True)]


def _cpu_seconds(command: Sequence[str]) -> float:
    return cpu_seconds_of([sys.executable, *command], good=(0, 1), COLUMNS="80")  # 1: the comparison found a mismatch


if __name__ == "__main__":
    for row in run():
        print(row)
