"""`actordbg weights`: whether the rollout engines got the weights that the trainer sent."""

from __future__ import annotations

import typer

from actordbg.cli.options import option


def weights(
    ctx: typer.Context,
    run: str | None = option(None, "The run (default: the newest with recorded transfers).", metavar="NAME"),
) -> None:
    """Check that rollout engines got the weights that were sent.

    Needs a run recorded with `run --hash-weights`: each transfer of weights is hashed where it is sent, and where the engine's
    loader gets it. Names parameters that were never sent, never arrived, arrived as others, or were unknown to the engine, and
    since which step an engine has not changed. A parameter that did not move counts as right.

    Exit code: 1 if something is wrong or no engine was recorded; 5 if no transfer was recorded.

    Example: actordbg weights --run ppo-7b
    """
    from actordbg.cli.terminal import conclude, opened

    store = opened(ctx)
    conclude(store, store.weights(run))
