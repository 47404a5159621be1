"""The interface of the trainer that actordbg debugs, `TRAINER`, and of anything else that builds Actors.

All other packages know only an *Actor* with a `forward`, DeepSpeed, torch and transformers. `TRAINER` knows the names of the
trainer's modules and arguments, how to build and call its Actor, and the format of its log.

| user | needs |
|---|---|
| install, `run`, `doctor` | the module that holds the Actor, its package, the supported versions |
| `replay`, `actor init` | to prepare a process, build an Actor, repeat a captured call |
| the deepspeed backend | the trainer's own DeepSpeed strategy |
| `demo` | real training programs, and how to read progress from their logs |

Another trainer is another class with the members of `openrlhf.adapter.OpenRlhf`, in a separate folder beside `openrlhf/`. Members
import what they need (torch, the trainer) when they are called: training processes and every command load this module.

    TRAINER.prepare_process()
    actor = TRAINER.build_actor("path/to/model", choices, ds_config=None)
    call = TRAINER.make_call(actor, dump, vocab_size, device)
    log_probs, entropy = read_result(actor(**call.arguments), call.mask)      # of captured_call
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from actordbg.trainers.openrlhf.adapter import OpenRlhf

if TYPE_CHECKING:
    from actordbg.trainers.openrlhf.demo_programs import DemoProgram
    from actordbg.trainers.rows_actor import RowsActors


Actors: TypeAlias = "OpenRlhf | RowsActors"
"""Builds and calls Actors: a trainer's own, or `RowsActor`s; `RowsActors` documents each member."""
Program: TypeAlias = "DemoProgram"
"""A real training for the demo, small enough for a laptop."""
TRAINER = OpenRlhf()
"""The trainer of this installation."""
