"""`actordbg locate`: the module in which a configuration goes wrong."""

from __future__ import annotations

import typer

from actordbg.cli.options import NONE, ConfirmOption, Given, refuse_beside
from actordbg.cli.replay_options import ChosenInputs


def locate(
    ctx: typer.Context,
    replay: str | None = None,
    *,
    chosen: ChosenInputs = ChosenInputs(),
    settings: Given = NONE,
    yes: ConfirmOption = False,
) -> object:
    """Name the module in which a configuration goes wrong.

    Loads transformers' own model of the same checkpoint beside the Actor's. Compares what both are, bit for bit: parameters,
    buffers, ties, attributes. Then runs one input (most rows, most padding) with the truth's values in front of every module, and
    measures what each module adds, in units of what the dtype costs a healthy model there: 1.00 everywhere if all is right.

    Exit code: 1 if anything is wrong or nothing could be checked; 5 if no dump was selected.

    Example: actordbg locate last

    Example: actordbg locate --where "rank=0" --model /models/llama-3.1-8b --dtype bf16 --packing

    Args:
        replay (REPLAY): Use the configuration and inputs of this replay: an id, a name, `@1` or `last`.
    """
    from actordbg.cli.terminal import flags_of, opened

    flags = flags_of(settings)
    if replay is not None:
        refuse_beside(ctx, "a replay has its own configuration and inputs", "replay", "yes")
    store = opened(ctx, yes=yes)
    return store.locate(where=chosen.selection, **flags) if replay is None else store.locate(replay)
