"""MY TRAINER: where its policy's forward is, and how a call of it is read as rows.

Replace what is in capitals. `actordbg adapters MODULE:MyTrainer` says whether it fits what is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actordbg.trainers.seam import Rows, Scores, Seam, Unreadable


def read_call(call: Mapping[str, Any]) -> Rows | None:
    """A call's arguments by name, `self` among them, as rows. Views only, and no question to a GPU tensor's values."""
    if call["INPUT_IDS"].dim() != 2:
        raise Unreadable("its rows are packed")  # told once; the call runs unrecorded. None: no policy's forward, nothing is told
    return Rows(
        model=call["MODEL"],  # the module whose weights count; named by its class, never stored
        sequences=call["INPUT_IDS"],  # [B, S]
        attention_mask=call["ATTENTION_MASK"],  # [B, S]; leave it out where all tokens are real
        action_mask=call["ATTENTION_MASK"][:, -call["KEEP"] :],  # [B, A]: which of the last A tokens count
        temperature=1.0,
        step=None,  # the optimizer's step, where the trainer knows it
    )


def read_result(output: Any) -> Scores:
    """What the function returned: log-probs, and entropies if it has them, [B, A] as `action_mask`."""
    return Scores(log_probs=output)


class MyTrainer:
    """MY TRAINER 1.0."""

    name = "MY-TRAINER"
    package = "MY-TRAINER"  # the distribution whose version counts
    tried = ()  # versions of it that you recorded and replayed
    seams = (
        Seam(
            where="MY_TRAINER.MODULE:CLASS.METHOD",  # or module:function
            needs=("MODEL", "INPUT_IDS", "ATTENTION_MASK", "KEEP"),  # arguments that read_call reads
            rows=read_call,
            result=read_result,
        ),
    )
