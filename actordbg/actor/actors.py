"""Which Actor replays a call: the trainer's own, or one on the rows alone. The choice follows the dump's adapter.

| Recorded from | `--through` left open, or rows | `--through trainer` |
|---|---|---|
| the home trainer's Actor | left open: that Actor; rows: an Actor of ours | that Actor |
| another trainer, by an adapter | an Actor of ours, no trainer imported | the trainer's function, if its adapter can call it |

The answer says which: `through` among what a replay ran with (`resolved`).
"""

from __future__ import annotations

from actordbg.config.choices import Choices
from actordbg.host.rows_actor import ROWS
from actordbg.host.trainer import TRAINER, Actors


def actors_of(choices: Choices) -> Actors:
    """What builds and calls the Actors of this configuration."""
    return ROWS if choices.through == "rows" else TRAINER
