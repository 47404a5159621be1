"""What the hook does to the step time of a real training: OpenRLHF's SFT of a tiny model, as the demo runs it.

One process trains; blocks of steps alternate between the hook's states (see `training_child`), so each block with recording
on has a block with recording off right before it and right after it. A block's figure is the median of its steps, a
comparison's the block over the mean of its two neighbours (a machine that gets slower evenly cancels), and the row's the
median of the comparisons. Where the two neighbours differ by more than a tenth, something else was going on, and the
comparison is left out (all are taken where fewer than three are left: then the machine is too busy for an answer).
The same done with blocks that do not differ (off against off) is the noise: smaller differences mean nothing.

- *on / off*: every call is recorded. Budget: 1 % more at most.
- *armed / off*: `--on nan,exception,slow:10x --before 4`, and nothing happens: every call is copied and judged. The same budget.
- *off / not installed*: what a patched `actor.py` costs while nobody records. Budget: not to be told from the noise.
- *on, slow disk / off*: as the first, while every fsync takes 10 s.

All conversations are equally long (batches of 4 x 171), so that steps are alike; bf16, ZeRO-2, one rank, one thread.

    python -m benchmarks.bench_training [ROUNDS [STEPS]]
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from actordbg.base.errors import LaunchProblem
from actordbg.demo.demo_training import TrainingJob, build_assets, tasks
from actordbg.replay.launch import free_port
from actordbg.store.layout import Store
from actordbg.trainers.openrlhf.demo_programs import PROGRAMS
from benchmarks.rows import Row
from benchmarks.training_child import Plan

CALM = 0.1
CONVERSATIONS = 96
BATCH = 4
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Comparison:
    """Blocks of one state over their neighbours of another: median ratio, its error (1 sigma), and both medians in seconds."""

    ratio: float
    error: float
    ours: float
    theirs: float
    calm: int
    pairs: int

    def turned(self) -> Comparison:
        """The same the other way round."""
        return Comparison(1 / self.ratio, self.error, self.theirs, self.ours, self.calm, self.pairs)


def run(rounds: int = 12, steps: int = 24) -> list[Row]:
    """Five rows. A round is a block each of off, on, off and not installed; half as many with triggers and the slow disk."""
    with tempfile.TemporaryDirectory() as folder:
        blocks, dumps = train(Path(folder) / "fast", ["off", "on", "off", "bare"] * rounds + ["off"], steps)
        slow, late = train(Path(folder) / "slow", ["off", "armed", "off", "slow"] * (rounds // 2) + ["off"], steps)
    noise = compare(blocks, "off", "off")
    idle = compare(blocks, "bare", "off").turned()
    return [
        _row("step time, off / off (the noise)", noise, None, ""),
        _row("step time, recording on / off", compare(blocks, "on", "off"), 1.01, f"{dumps} dumps; "),
        _row("step time, armed with triggers / off", compare(slow, "armed", "off"), 1.01, "nothing kept; "),
        _row("step time, hook off / not installed", idle, 1 + 2 * math.hypot(noise.error, idle.error), ""),
        _row("step time, on with 10 s an fsync / off", compare(slow, "slow", "off"), 1.01, f"{late} dumps; "),
    ]


def train(work: Path, states: list[str], steps: int) -> tuple[list[tuple[str, float]], int]:
    """Run one training through these states: (state, median seconds of a step) of each block, and how many dumps there are."""
    work.mkdir(parents=True)
    plan = Plan(str(work / "store"), str(work / "blocks.jsonl"), states, steps)
    (work / "plan.json").write_text(json.dumps(asdict(plan)))
    with _start(work, len(states) * steps * 3 + 1000) as job:
        job.wait(timeout=1200)
    blocks = [json.loads(line) for line in Path(plan.result).read_text().splitlines()]
    if [block["state"] for block in blocks] != states:
        raise LaunchProblem(f"the training ended after {len(blocks)} of {len(states)} blocks", hint=f"see {job.log}")
    return [(block["state"], median(block["times"])) for block in blocks], len(list(Store(plan.store).iter_dumps()))


def _start(work: Path, steps: int) -> TrainingJob:
    """The demo's SFT, long enough for `steps`, with the meter in place of the demo's driver."""
    model, data = build_assets(work, CONVERSATIONS)
    _make_alike(data)
    command = PROGRAMS["sft"].command(model, data, work / "checkpoint", free_port())
    command[command.index("actordbg.trainers.openrlhf.demo_programs") : command.index("--") + 1] = ["benchmarks.training_child"]
    command[command.index("--train.max_epochs") + 1] = str(-(-steps * BATCH // CONVERSATIONS))
    log, temporary = work / "training.log", work / "tmp"
    temporary.mkdir()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    usual = {name: value for name, value in os.environ.items() if not name.startswith("ACTORDBG_")}
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env = {**usual, **quiet, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "BENCH_PLAN": str(work / "plan.json")}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=temporary, env=env, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    return TrainingJob(process, PROGRAMS["sft"], command, log, temporary)


def _make_alike(path: Path) -> None:
    """Only conversations that sort forty numbers, which are equally long but for a token or two."""
    chosen = (pair for pair in tasks(20 * CONVERSATIONS) if pair[0].startswith("Sort") and pair[0].count(",") == 40)
    rows = [{"prompt": task, "answer": answer} for (task, answer), _ in zip(chosen, range(CONVERSATIONS), strict=False)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def compare(blocks: list[tuple[str, float]], ours: str, theirs: str) -> Comparison:
    """Every block of `ours` over the mean of the blocks of `theirs` that are nearest on both sides, at most two places away."""
    pairs = []
    for index, (state, value) in enumerate(blocks):
        before = _nearest(blocks, range(index - 1, index - 3, -1), theirs)
        after = _nearest(blocks, range(index + 1, index + 3), theirs)
        if state == ours and before is not None and after is not None:
            pairs.append((value, before, after))
    calm = [pair for pair in pairs if abs(pair[1] - pair[2]) <= CALM * min(pair[1:])]
    kept = calm if len(calm) >= 3 else pairs
    ratios = [2 * mine / (before + after) for mine, before, after in kept]
    middle = median(ratios)
    spread = 1.4826 * median(abs(ratio - middle) for ratio in ratios)
    error = 1.2533 * spread / math.sqrt(len(ratios))
    beside = median((before + after) / 2 for _, before, after in kept)
    return Comparison(middle, error, median(pair[0] for pair in kept), beside, len(calm), len(pairs))


def _nearest(blocks: list[tuple[str, float]], places: Iterable[int], state: str) -> float | None:
    found = (blocks[place][1] for place in places if 0 <= place < len(blocks) and blocks[place][0] == state)
    return next(found, None)


def _row(name: str, found: Comparison, budget: float | None, note: str) -> Row:
    ours, theirs, within = found.ours * 1e3, found.theirs * 1e3, None if budget is None else found.ratio <= budget
    said = "-" if budget is None else f"<= {budget:.4g}"
    note = f"{note}{found.calm} of {found.pairs} comparisons calm, +- {found.error:.4f}"
    return Row(name, ours, theirs, "ms", ratio=found.ratio, budget=said, note=note, within=within)


if __name__ == "__main__":
    for row in run(*map(int, sys.argv[1:])):
        print(row)
