"""`actordbg turns`: whether the token ids that were sampled are those that were trained on."""

from __future__ import annotations

import typer

from actordbg.cli.options import option, stored
from actordbg.cli.output import TokenizerFile


def turns(
    ctx: typer.Context,
    dump: str | None = typer.Argument(
        None, metavar="ID", help="Only conversations that became rows of this dump.", autocompletion=stored("dump")
    ),
    run: str | None = option(None, "The run (default: the newest with recorded turns).", metavar="NAME"),
    tokenizer: TokenizerFile = None,
    template: str | None = option(None, "Judge the chat template of this model instead.", metavar="MODEL"),
) -> None:
    """Check that the sampled ids are those that were trained on.

    Needs a run recorded with `run --turns`. Compares what each turn was given with the turns before it, what the rollout handed
    to the trainer with all turns, and recorded calls with that. Names the first id that differs and its kind: retokenized, border
    lost, template drops text, extra BOS, EOS appended. --tokenizer adds the text, which some kinds are known by.

    --template proves that a conversation's prefix stays a prefix as turns are added, on made-up and recorded conversations.

    Exit code: 1 if ids differ or no recorded call of the training has them; 5 if no turns were recorded.

    Example: actordbg turns --run agent --tokenizer /models/qwen3
    """
    from actordbg.cli.terminal import conclude, opened

    store = opened(ctx)
    conclude(store, store.turns(dump, run=run, tokenizer=tokenizer, template=template))
