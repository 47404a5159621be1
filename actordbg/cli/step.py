"""`actordbg step`: replay a recorded optimizer step, and hold its loss and gradient norm against what was recorded."""

from __future__ import annotations

import typer

from actordbg.cli.options import option
from actordbg.cli.output import TokenizerFile
from actordbg.cli.setting_options import NONE, Given, takes_settings


@takes_settings("step")
def step(
    ctx: typer.Context,
    number: int = option(..., "The optimizer step, counted from 0 (`step` of a dump).", "--step", min=0, metavar="N"),
    run: str | None = option(None, "The run (default: the only one with losses of that step).", metavar="NAME"),
    settings: Given = NONE,
    tokenizer: TokenizerFile = None,
) -> None:
    """Replay an optimizer step: loss, norm, known faults.

    Loss, gradient norm, clipping and KL are held against what was recorded.

    Runs the recorded micro-batches of all ranks through forward, loss and backward: the trainer's own loss under a configuration,
    and the formula over the whole step as one batch in fp32. Names known faults: a wrong accumulation factor, dp_size or token
    count, DeepSpeed's accumulation beside the trainer's, only the last micro-batch applied, a gradient applied twice, a missing
    term. Needs losses (`dump enable --calls forward,loss`), and a --model with the weights of that step; with other weights the
    norm is not checked.

    Exit code: 1 if anything is wrong or was not checked.

    Example: actordbg step --step 0 --model /models/policy

    Example: actordbg step --run ppo-7b --step 12 --model ckpt/step12 --backend deepspeed --zero-stage 2 --nproc 2
    """
    from actordbg.cli.terminal import conclude, flags_of, opened

    store = opened(ctx)
    conclude(store, store.step(number, run, tokenizer=tokenizer, **flags_of(settings)))
