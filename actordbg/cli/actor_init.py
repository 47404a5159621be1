"""`actordbg actor init`: build only the actor, and replay one synthetic input in a temporary store."""

from __future__ import annotations

import typer

from actordbg.cli.options import option
from actordbg.cli.setting_options import NONE, Given, takes_settings


@takes_settings("actor init")
def init(
    ctx: typer.Context,
    settings: Given = NONE,
    batch_size: int = option(2, "Rows of the synthetic input.", min=1),
    seq_len: int = option(128, "Length of the synthetic input, padding included.", min=4),
) -> None:
    """Build the actor alone and run one forward.

    The input is synthetic. Prints the settings that the built actor has, which may differ from those that were requested.

    Example: actordbg actor init --backend deepspeed --zero-stage 2 --packing --backward
    """
    from actordbg.cli.terminal import conclude, opened

    store = opened(ctx)
    conclude(store, store.build_actor(batch_size=batch_size, seq_len=seq_len, **settings))
