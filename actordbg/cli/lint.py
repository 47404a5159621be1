"""`actordbg lint`: check the laws of the recorded data, without a model."""

from __future__ import annotations

import typer

from actordbg.cli.options import Where, option


def lint(
    ctx: typer.Context,
    where: Where = None,
    max_inputs: int | None = option(None, "At most N dumps, the newest.", min=1),
) -> object:
    """Check recorded data against laws, without a model.

    Reads dumps, forwards and losses, and checks what must hold in every healthy run: no placeholder log-prob under the mask, no
    log-prob above 0, lengths, masks, end tokens, truncation, duplicated rows, the ratio before the first update, the
    normalization of a step. Names the first law that fails, with a public thread and the remedy. Most laws need losses:
    `dump enable --calls forward,loss`.

    Takes seconds for a thousand dumps.

    Exit code: 1 if a law fails or nothing could be checked; 5 if no dump was selected.

    Example: actordbg lint --where "timestamp > now() - '2h'"
    """
    from actordbg.cli.terminal import opened

    return opened(ctx).lint(where, max_inputs=max_inputs)
