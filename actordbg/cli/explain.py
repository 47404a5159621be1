"""`actordbg explain`: what is wrong with a replay, where, since when, what to do, and what was ruled out."""

from __future__ import annotations

from typing import Literal

import typer

from actordbg.cli.options import ConfirmOption, TrustRemoteCode, option, stored, take_consent


def explain(
    ctx: typer.Context,
    replay: str = typer.Argument(
        "last",
        metavar="REPLAY",
        help="The replay to explain: an id, a name, `@1` or `last`.",
        autocompletion=stored("replay"),
    ),
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
) -> None:
    """Explain what is wrong with a replay, and since when.

    Puts together what the store knows of the replay: its model bit for bit, its modules, the laws, the ranks, and the log-probs
    against the truth and the run's own outputs. Says which tokens are wrong by the smallest rule that covers them, since which
    recorded input, what to do, what was ruled out, and what was not checked. Computes the truth and runs `locate` on one input if
    that was not done yet.

    Exit code: 1 if anything is wrong or nothing could be checked.

    Example: actordbg explain last -o why.html
    """
    from actordbg.cli.terminal import conclude, opened

    take_consent(trust_remote_code)
    store = opened(ctx, yes=yes)
    conclude(store, store.explain(replay, against=against, other_models=other_model))
