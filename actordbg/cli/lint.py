"""`actordbg lint`: check the laws of the recorded data, without a model."""

from __future__ import annotations

import typer

from actordbg.cli.options import Where, option, require_good, store_of
from actordbg.cli.output import say_document


def lint(
    ctx: typer.Context,
    where: Where = None,
    max_inputs: int | None = option(None, "At most N dumps, the newest.", min=1),
) -> None:
    """Check recorded data against laws, without a model.

    Reads dumps, forwards and losses, and checks what must hold in every healthy run: no placeholder log-prob under the mask, no
    log-prob above 0, lengths, masks, end tokens, truncation, duplicated rows, the ratio before the first update, the
    normalization of a step. Names the first law that fails, with a public thread and the remedy. Most laws need losses:
    `dump enable --calls forward,loss`.

    Takes seconds for a thousand dumps.

    Exit code: 1 if a law fails or nothing could be checked; 5 if no dump was selected.

    Example: actordbg lint --where "last 2h"
    """
    from actordbg.api.checks import lint_newest
    from actordbg.base.errors import NothingToDo
    from actordbg.catalog.query import open_fresh
    from actordbg.catalog.selections import no_match
    from actordbg.cli import output
    from actordbg.judge.lint import lint_blocks, lint_data

    store = store_of(ctx).require()
    with output.progress("reading", None) as advance:
        findings = lint_newest(store, where, max_inputs, advance)
    if not findings.dumps and not findings.unreadable:
        if output.wanted.allow_empty:
            raise typer.Exit(0)
        why = no_match(open_fresh(store), where) if where else "the store has no dumps"
        raise NothingToDo(f"nothing to lint: {why}", hint="select dumps with --where, or pass --allow-empty")
    output.note_some(findings.unreadable, 5)
    say_document(lint_blocks(findings), data=lint_data(findings))
    require_good(findings.good)
