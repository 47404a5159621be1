"""Consent to run code that a model brings along: `--trust-remote-code`.

It is a fact of a process, not a setting: no file, no variable and no store can hold it. A command has it from its own command
line, for every model that it names. A worker has it from the argument list that the command gave it, for one model: whatever
a file in the store says by then, no other model's code runs.

Example::

    give("/models/mine")                      # in a worker; a command calls give() without a model
    is_given("/models/mine")                  # True
    arguments("/models/mine")                 # ["--trust-remote-code", "/models/mine"]: for the processes that this one starts
"""

from __future__ import annotations

import shlex

FLAG = "--trust-remote-code"
NEEDED = f"needs {FLAG}: the model brings code of its own"
_ANY = "*"
_given: str | None = None


def words_of(command: str) -> tuple[list[str], str]:
    """The words of a command line that a file keeps, to be quoted anew, and its remark that consent is needed, or "".

    No words for one that is not of actordbg: nobody is told to paste what somebody else wrote.
    """
    line, mark, _ = command.partition(f"  # {NEEDED}")
    try:
        words = shlex.split(line)
    except ValueError:  # a quotation that does not end
        return [], ""
    return (words, mark) if words[:1] == ["actordbg"] else ([], "")


def give(model: str = _ANY) -> None:
    """From now on this process may run the code of `model`; without one, of every model that it is told to load."""
    global _given
    _given = model


def withhold() -> None:
    """This process runs no model's code: how each starts."""
    global _given
    _given = None


def is_given(model: str) -> bool:
    """Whether the code of this model may run here. The tiny model has none."""
    from actordbg.config.replay_config import TINY

    return model != TINY and _given in (_ANY, model)


def arguments(model: str) -> list[str]:
    """What a worker for this model has in its argument list."""
    return [FLAG, model] if is_given(model) else []
