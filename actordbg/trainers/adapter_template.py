"""MY TRAINER: where its policy's forward is, and how to read its calls as rows.

Replace everything in capitals. `actordbg adapters MODULE:MyTrainer` checks it against the installed trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actordbg.trainers.seam import Rows, Scores, Seam, Unreadable


def read_call(call: Mapping[str, Any]) -> Rows | None:
    """Read a call's arguments, by name and including `self`, as rows. Return views only, and never read a GPU tensor's values."""
    if call["INPUT_IDS"].dim() != 2:
        raise Unreadable("its rows are packed")  # reported once; the call runs unrecorded. Return None to skip a call silently
    return Rows(
        model=call["MODEL"],  # the module that computes; recorded by its class name, never stored
        sequences=call["INPUT_IDS"],  # [B, S]
        attention_mask=call["ATTENTION_MASK"],  # [B, S]; leave it out if no token is padding
        action_mask=call["ATTENTION_MASK"][:, -call["KEEP"] :],  # [B, A]: which of the last A tokens count
        temperature=1.0,
        step=None,  # the optimizer's step, if the trainer knows it
    )


def read_result(output: Any) -> Scores:
    """Read the function's result: log-probs, and entropies if it has them, [B, A] like `action_mask`."""
    return Scores(log_probs=output)


class MyTrainer:
    """MY TRAINER 1.0."""

    name = "MY-TRAINER"
    package = "MY-TRAINER"  # its distribution, for the version
    tried = ()  # versions that you recorded and replayed
    seams = (
        Seam(
            where="MY_TRAINER.MODULE:CLASS.METHOD",  # or module:function
            needs=("MODEL", "INPUT_IDS", "ATTENTION_MASK", "KEEP"),  # arguments that read_call reads
            rows=read_call,
            result=read_result,
        ),
    )
