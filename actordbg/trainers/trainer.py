"""What actordbg asks of the trainer that it debugs, `TRAINER`, and of whatever else builds Actors.

Everything outside of this room knows an *Actor* with a `forward`, DeepSpeed, torch and transformers. What the trainer calls its
modules and arguments, how its Actor is built and called, how its log looks: all of that is asked of `TRAINER`.

| who asks | for |
|---|---|
| install, `run`, `doctor` | the module that holds the Actor, its package, the versions that are supported |
| `replay`, `actor init` | a process made ready, an Actor built, a captured call made again |
| the deepspeed backend | the trainer's own DeepSpeed strategy |
| `demo`, `train-check --trainer sft` | real training programs, and how their logs tell progress |

Another trainer is another class with the members of `openrlhf.adapter.OpenRlhf`, in a folder of its own beside `openrlhf/`. What
a member needs (torch, the trainer) it imports when it is called: training processes and every command load this module.

    TRAINER.prepare_process()
    actor = TRAINER.build_actor("path/to/model", choices, ds_config=None)
    call = TRAINER.make_call(actor, dump, vocab_size, device)
    log_probs, entropy = read_result(actor(**call.arguments), call.mask)      # of captured_call
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from actordbg.trainers.openrlhf.adapter import OpenRlhf

if TYPE_CHECKING:
    from actordbg.trainers.openrlhf.demo_programs import DemoProgram
    from actordbg.trainers.rows_actor import RowsActors


@dataclass(frozen=True)
class SftOrder:
    """A supervised training by the trainer's own program. keys: of a row, what is asked and what is answered.

    batch: rows of a step, over all processes; micro_batch: of a micro-batch, in each process. samples: rows that are used.
    """

    model: Path
    data: Path
    keys: tuple[str, str]
    processes: int
    zero_stage: int
    tp: int
    ring: int
    dtype: str
    attn: str
    batch: int
    micro_batch: int
    samples: int
    epochs: int
    max_len: int
    lr: float
    weight_decay: float
    max_norm: float
    seed: int
    gradient_checkpointing: bool = False


Actors: TypeAlias = "OpenRlhf | RowsActors"
"""How Actors are built and called: a trainer's own, or those of the rows alone; `RowsActors` says what each member promises."""
Program: TypeAlias = "DemoProgram"
"""A real training for the demo, small enough for a laptop."""
TRAINER = OpenRlhf()
"""The trainer of this installation."""
