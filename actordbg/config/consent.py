"""Consent to run code that ships with a model: `--trust-remote-code`.

It is a fact of a process, not a setting: no file, no variable and no store can hold it. A command gets it from its own command
line, for every model that it names. A worker gets it from the argument list that the command gave it, for a single model:
whatever a file in the store says by then, no other model's code runs.

Example::

    give("/models/mine")                      # in a worker; a command calls give() without a model
    is_given("/models/mine")                  # True
    arguments("/models/mine")                 # ["--trust-remote-code", "/models/mine"]: for child processes
"""

from __future__ import annotations

import shlex

FLAG = "--trust-remote-code"
NEEDED = f"needs {FLAG}: the model brings code of its own"
_ANY = "*"
_given: str | None = None


def words_of(command: str) -> tuple[list[str], str]:
    """Split a stored command line into its words, to be quoted again, and its remark that consent is needed, or "".

    Returns no words for a command of another program: nobody is told to paste what somebody else wrote.
    """
    line, mark, _ = command.partition(f"  # {NEEDED}")
    try:
        words = shlex.split(line)
    except ValueError:  # a quotation that does not end
        return [], ""
    return (words, mark) if words[:1] == ["actordbg"] else ([], "")


def give(model: str = _ANY) -> None:
    """Let this process run the code of `model`; by default, of every model that it is told to load."""
    global _given
    _given = model


def withhold() -> None:
    """Withdraw the consent: this process runs no model's code, which is how each process starts."""
    global _given
    _given = None


def is_given(model: str) -> bool:
    """Return whether the code of this model may run here. The tiny model has none."""
    from actordbg.config.replay_config import TINY

    return model != TINY and _given in (_ANY, model)


def arguments(model: str) -> list[str]:
    """Return the arguments that give a worker the consent for this model."""
    return [FLAG, model] if is_given(model) else []
