"""`actordbg explain` and `locate`: what is wrong with a replay, where, since when, and in which module."""

from __future__ import annotations

from typing import Literal

import typer

from actordbg.cli.options import ConfirmOption, TrustRemoteCode, argument, option, refuse_beside, take_consent
from actordbg.cli.replay_options import ChosenInputs
from actordbg.cli.setting_options import NONE, Given, takes_settings


def explain(
    ctx: typer.Context,
    replay: str = argument("last", "REPLAY", "The replay to explain: an id, a name, `@1` or `last`."),
    against: Literal["rollout"] | None = option(
        None, "Say which side is wrong, the run or the engine's recorded log-probs (needs `dump enable --calls forward,loss`)."
    ),
    other_model: list[str] = option(
        [],
        "With --against, also a model whose weights a side may have had, such as an earlier checkpoint; repeatable.",
        metavar="PATH",
    ),
    trust_remote_code: TrustRemoteCode = False,
    yes: ConfirmOption = False,
) -> object:
    """Explain what is wrong with a replay, and since when.

    Puts together what the store knows of the replay: its model bit for bit, its modules, the laws, the ranks, and the log-probs
    against the truth and the run's own outputs. Says which tokens are wrong by the smallest rule that covers them, since which
    recorded input, what to do, what was ruled out, and what was not checked. Computes the truth and runs `locate` on one input if
    that was not done yet.

    Exit code: 1 if anything is wrong or nothing could be checked.

    Example: actordbg explain last -o why.html
    """
    from actordbg.cli.terminal import opened

    take_consent(trust_remote_code)
    store = opened(ctx, yes=yes)
    return store.explain(replay, against=against, other_models=other_model)


@takes_settings("locate")
def locate(
    ctx: typer.Context,
    replay: str | None = argument(
        None, "REPLAY", "Use the configuration and inputs of this replay: an id, a name, `@1` or `last`."
    ),
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
    """
    from actordbg.cli.terminal import flags_of, opened

    flags = flags_of(settings)
    if replay is not None:
        refuse_beside(ctx, "a replay has its own configuration and inputs", "replay", "yes")
    store = opened(ctx, yes=yes)
    return store.locate(where=chosen.selection, **flags) if replay is None else store.locate(replay)
