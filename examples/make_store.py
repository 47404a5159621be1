"""Makes a store to play with: a small PPO-like run on two ranks, recorded by the hook, and two replays of it.

    python examples/make_store.py [STORE]        STORE is examples/store unless it is named; an older one is replaced

What is in it:

* run `ppo-tiny`: OpenRLHF's own Actor around `tiny`, a random Llama, on two ranks. Each rank makes a log-prob pass and a training
  pass for each micro-batch, of lengths from 24 to 160. Outputs and generator states are recorded with every call, so that
  a replay can say whether it comes to what the run came to.
* one call of rank 1 that the trigger `nan` kept: a weight was not finite for one call.
* two replays of the short calls, one with sdpa and one with eager attention, and their comparison.

Lengths and token ids follow from a seed; ids and times of dumps are those of the day. It takes half a minute on two cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RUN = "ppo-tiny"
RANKS = 2
LENGTHS = (24, 40, 64, 104, 160)
"""Positions of the micro-batches of a rank: prompt and response, padded to the longest of two."""
ROWS = 2
VOCABULARY = 4096
REPLAYED = f"run='{RUN}' and seq_len<=70 and triggered is null and not grad_enabled"
NAN_AT = (1, 3)
"""The rank and the micro-batch at which a weight is not a number."""


def main(words: list[str]) -> None:
    """Make the store."""
    if words[:1] == ["--rank"]:
        train(Path(words[2]), int(words[1]))
        return
    store = Path(words[0] if words else HERE / "store").resolve()
    if store.exists() and not (store / "MADE_BY_EXAMPLES").exists():
        raise SystemExit(f"{store} already exists and was not made by this program: name another folder")
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir(parents=True)
    (store / "MADE_BY_EXAMPLES").touch()
    kept = ("--every", "1", "--on", "nan", "--with-outputs", "--with-rng")
    actordbg(store, "dump", "enable", "--run", RUN, *kept, "--free-floor", "0")
    record(store)
    actordbg(store, "dump", "disable")
    configuration = ("--model", str(model_of(store)), "--dtype", "fp32", "--quiet")
    for attention in ("sdpa", "eager"):
        actordbg(store, "replay", "--where", REPLAYED, "--attn", attention, *configuration)
    actordbg(store, "compare", *sorted(path.name for path in (store / "replays").iterdir()))
    print(f"made {store}")


def environment() -> dict[str, str]:
    """The user's, without settings of actordbg, with this checkout on the path."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith("ACTORDBG_")}
    path = os.pathsep.join(filter(None, [str(HERE.parent), usual.get("PYTHONPATH")]))
    return usual | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def actordbg(store: Path, *words: str) -> None:
    """Run a command on the store; a failure ends the program with what the command said."""
    command = [sys.executable, "-m", "actordbg", "--store", str(store), *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"actordbg {' '.join(words)}\n{done.stdout}{done.stderr}")


def record(store: Path) -> None:
    """Run all ranks at the same time, as a training job does."""
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), str(store)],
            env=environment() | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)},
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    said = [process.communicate()[1] for process in ranks]
    for process, errors in zip(ranks, said, strict=True):
        if process.returncode:
            raise SystemExit(f"a rank failed\n{errors}")


def model_of(store: Path) -> Path:
    """The model that the run used, kept in the store."""
    from actordbg.actor.models import ensure_tiny

    return ensure_tiny(store / "models")


def train(store: Path, rank: int) -> None:
    """Run a rank: a log-prob pass and a training pass for each micro-batch, as PPO does."""
    from actordbg.capture import hook
    from actordbg.trainers.trainer import TRAINER

    TRAINER.prepare_process()
    import torch
    from openrlhf.models import Actor

    hook.install(Actor, store=str(store))
    actor = Actor(str(model_of(store)), attn_implementation="sdpa", param_dtype="fp32")
    generator = torch.Generator().manual_seed(rank)
    for number, length in enumerate(LENGTHS):
        batch = inputs(generator, length + 4 * rank)
        weight = next(actor.parameters())
        kept = weight.detach().clone()
        if (rank, number) == NAN_AT:
            weight.data[:] = float("nan")
        with torch.no_grad():
            actor.eval()(**batch)
        weight.data.copy_(kept)
        actor.train()(**batch, return_output=True)
        time.sleep(0.05)


def inputs(generator: Any, length: int) -> dict[str, Any]:
    """Token ids [ROWS, length] padded on both sides, and the masks of a PPO call; half of a row is the response."""
    import torch

    ids = torch.randint(0, VOCABULARY, (ROWS, length), generator=generator)
    mask = torch.ones(ROWS, length, dtype=torch.int64)
    mask[0, : length // 8] = 0
    mask[1, -(length // 10) :] = 0
    return {"sequences": ids, "attention_mask": mask, "action_mask": mask[:, -(length // 2) :].bool()}


if __name__ == "__main__":
    main(sys.argv[1:])
