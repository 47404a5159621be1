"""`actordbg step`: replay a recorded optimizer step, and hold its loss and gradient norm against what was recorded."""

from __future__ import annotations

import typer

from actordbg.cli.options import option, require_good, store_of
from actordbg.cli.output import TokenizerFile, say_answer, texts_of
from actordbg.cli.setting_options import NONE, Given, takes_settings


@takes_settings("step")
def step(
    ctx: typer.Context,
    number: int = option(..., "The optimizer step, counted from 0 (`step` of a dump).", "--step", min=0, metavar="N"),
    run: str | None = option(None, "The run (default: the only one with losses of that step).", metavar="NAME"),
    settings: Given = NONE,
    tokenizer: TokenizerFile = None,
) -> None:
    """Replay a recorded optimizer step: loss, gradient norm, clipping and KL against what was recorded.

    Runs the recorded micro-batches of all ranks through forward, loss and backward: the trainer's own loss under a configuration,
    and the formula over the whole step as one batch in fp32. Names known faults: a wrong accumulation factor, dp_size or token
    count, DeepSpeed's accumulation beside the trainer's, only the last micro-batch applied, a gradient applied twice, a missing
    term. Needs losses (`dump enable --calls forward,loss`), and a --model with the weights of that step; with other weights the
    norm is not checked.

    Exit code: 1 if anything is wrong or was not checked.

    Example: actordbg step --step 0 --model /models/policy

    Example: actordbg step --run ppo-7b --step 12 --model ckpt/step12 --backend deepspeed --zero-stage 2 --nproc 2
    """
    from actordbg.api.planning import counting
    from actordbg.api.steps import step_answer
    from actordbg.cli import replaying

    flags, texts = replaying.flags_of(settings), texts_of(tokenizer)
    store = store_of(ctx).require_writable()
    config = replaying.asked_for(ctx, flags).config
    with replaying.replaying(store, "replaying the step", 0) as advance:
        answer = step_answer(store, run, number, config, counting(advance), lambda total: advance(0, total=total), texts)
    say_answer(answer)
    require_good(answer.ok)
