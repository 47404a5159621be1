"""verl#6176, #6178, PR#5591: ranks make unequal numbers of micro-batches, and the training hangs.

With micro-batches by tokens, each rank counted its own: the group was not passed on, so the ranks did not agree on a number.
Users saw an all-gather that times out after half an hour, without a word about counts. Here two real ranks (gloo) hang in
the same way. `actordbg dump status` runs meanwhile, minutes or hours before any timeout.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import padded
import stand_in
import torch
import torch.distributed as dist

COMMAND, WORDS = ("dump", "status"), "unequal numbers of calls"
TOKENS = 48
"""Most tokens of a micro-batch."""


def prepare_dynamic_batch(lengths: list[int], dp_group: Any = None) -> int:
    """Return the number of micro-batches for rows of these lengths; with a group, the most that any rank needs."""
    count = torch.tensor([-(-sum(lengths) // TOKENS)])
    if dp_group is not None:
        dist.all_reduce(count, op=dist.ReduceOp.MAX, group=dp_group)
    return int(count)


class Sharded(padded.HFModelWrapper):
    """Gathers the shards of the weights in each forward, as FSDP does: all ranks wait for all."""

    shards: Any = None

    def mask_of(self, attention_mask: torch.Tensor, num_actions: int) -> torch.Tensor:
        dist.barrier(group=self.shards)
        return attention_mask


def update_policy(wrapper: Sharded, lengths: list[int], dp_group: Any) -> None:
    """Run a step: forward and backward of each micro-batch, then all ranks sum their gradients."""
    for _ in range(prepare_dynamic_batch(lengths, dp_group)):
        padded.train(wrapper)
    dist.barrier()
    wrapper.step += 1


def rank(model: Path, planted: bool) -> None:
    dist.init_process_group("gloo")
    wrapper = Sharded(stand_in.loaded(model))
    wrapper.shards = dist.new_group(backend="gloo")
    for lengths in ([24, 24, 24, 24], [24, 24, 24, 40 if dist.get_rank() else 24]):
        with torch.no_grad():
            update_policy(wrapper, lengths, None if planted else dist.group.WORLD)
    dist.destroy_process_group()


def answer(folder: Path) -> tuple[Any, ...]:
    """Record both jobs, and run the command while they run. Then end the job that hangs."""
    from run import actordbg, environment, in_words

    model, said = stand_in.model_in(folder), []
    for planted in (False, True):
        with subprocess.Popen(job(folder, model, planted), env=environment(), cwd=folder, stderr=subprocess.PIPE) as running:
            result = actordbg(folder, *COMMAND)
            while running.poll() is None and WORDS not in result.stdout:
                time.sleep(1)
                result = actordbg(folder, *COMMAND)
            running.terminate()
        said.append(actordbg(folder, *COMMAND) if not planted else result)
    return in_words(COMMAND), said[1], said[0], WORDS


def job(folder: Path, model: Path, planted: bool) -> list[str]:
    """Two ranks, recorded."""
    recorded = ("--run", f"planted-{planted}", "--adapter", "padded:Adapter", "--free-floor", "0")
    ranks = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        __file__,
        str(model),
        "planted"[: 7 * planted],
    )
    return [sys.executable, "-m", "actordbg", "--store", str(folder / "store"), "run", *recorded, "--", sys.executable, *ranks]


if __name__ == "__main__":
    rank(Path(sys.argv[1]), bool(sys.argv[2]))
