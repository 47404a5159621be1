"""The first input of a replay, end to end, against a script that builds OpenRLHF's Actor and calls it once.

One dump of 2 x 64, tiny model, fp32, forward alone, one thread. Ours is `actordbg replay --all`: command, supervisor, worker,
journals, catalog, answer. The script imports torch and OpenRLHF's Actor, builds it from the same folder and calls it on
tensors of the same shape. The backends with processes of their own have no script beside them: they are held against `plain`.

CPU time (user and system) of all processes, in turn, medians. What a backend adds is told in imports of torch and transformers.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.rows import Row, cpu_seconds_of, scatter

BARE = """
import sys
import torch
from actordbg.trainers.trainer import TRAINER
TRAINER.prepare_process()  # without it OpenRLHF cannot be imported on a machine without CUDA
from openrlhf.models import Actor
actor = Actor(sys.argv[1], attn_implementation="sdpa", param_dtype="fp32", packing_samples=False).eval()
with torch.no_grad():
    ids = torch.ones(2, 64, dtype=torch.int64)
    actor(ids, action_mask=torch.ones(2, 32, dtype=torch.bool), attention_mask=torch.ones_like(ids))
"""
IMPORTS = (sys.executable, "-c", "import torch, transformers")
BACKENDS = ("plain", "fsdp2", "deepspeed")


def run(repeat: int = 2, backends: Sequence[str] = BACKENDS) -> list[Row]:
    """A row for each backend: the first against the bare script, the others against the first; and deepspeed against fsdp2."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        ours = [sys.executable, "-m", "actordbg", "--store", str(store)]
        _cpu_seconds([*ours, "dump", "create", "--batch-size", "2", "--seq-len", "64", "--vocab-size", "4000"])
        replay = [*ours, "replay", "--all", "--quiet", "--dtype", "fp32", "--no-backward"]
        _cpu_seconds(replay)  # builds the tiny model
        (model,) = (path.parent for path in (store / "models").rglob("config.json"))
        commands = [[*replay, "--backend", one] for one in backends]
        columns = _in_turn([*commands, [sys.executable, "-c", BARE, str(model)], IMPORTS], repeat)
    *took, bare, imports = map(median, columns)
    noise = f"plain {scatter(columns[0])}, script {scatter(columns[-2])}"
    note = f"2 x 64, tiny, fp32, forward, one thread; CPU time of all processes, median of {repeat} ({noise})"
    rows = [
        Row(
            "first input, plain / bare script",
            took[0],
            bare,
            "s",
            ratio=took[0] / bare,
            budget="<= 1.05",
            note=note,
            within=took[0] / bare <= 1.05,
        )
    ]
    for name, seconds in zip(backends[1:], took[1:], strict=True):
        later = (seconds - took[0]) / imports
        row = Row(
            f"first input, ({name} - plain) / import torch, transformers", seconds - took[0], imports, "s",
            ratio=later, budget="<= 0.2", note=note, within=later <= 0.2,
        )  # fmt: skip
        rows.append(row)
    if {"fsdp2", "deepspeed"} <= set(backends):
        ours, theirs = (took[list(backends).index(name)] for name in ("deepspeed", "fsdp2"))
        ratio = ours / theirs
        rows.append(
            Row("first input, deepspeed / fsdp2", ours, theirs, "s", ratio=ratio, budget="<= 1.1", note=note, within=ratio <= 1.1)
        )
    return rows


def _in_turn(commands: Sequence[Sequence[str]], repeat: int) -> list[tuple[float, ...]]:
    """CPU seconds of each command, round by round."""
    rounds = [[_cpu_seconds(command) for command in commands] for _ in range(repeat)]
    return list(zip(*rounds, strict=True))


def _cpu_seconds(command: Sequence[str]) -> float:
    return cpu_seconds_of(command, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


if __name__ == "__main__":
    for row in run():
        print(row)
