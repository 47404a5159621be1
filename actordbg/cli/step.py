"""`actordbg step`, `turns` and `weights`: recorded steps, token ids and weights, held against what was recorded elsewhere."""

from __future__ import annotations

import typer

from actordbg.cli.options import argument, option
from actordbg.cli.output import TokenizerFile
from actordbg.cli.setting_options import NONE, Given, takes_settings


@takes_settings("step")
def step(
    ctx: typer.Context,
    number: int = option(..., "The optimizer step, counted from 0 (`step` of a dump).", "--step", min=0, metavar="N"),
    run: str | None = option(None, "The run (default: the only one with losses of that step).", metavar="NAME"),
    settings: Given = NONE,
    tokenizer: TokenizerFile = None,
) -> object:
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
    from actordbg.cli.terminal import flags_of, opened

    return opened(ctx).step(number, run, tokenizer=tokenizer, **flags_of(settings))


def turns(
    ctx: typer.Context,
    dump: str | None = argument(None, "ID", "Only conversations that became rows of this dump."),
    run: str | None = option(None, "The run (default: the newest with recorded turns).", metavar="NAME"),
    tokenizer: TokenizerFile = None,
    template: str | None = option(None, "Judge the chat template of this model instead.", metavar="MODEL"),
) -> object:
    """Check that the sampled ids are those that were trained on.

    Needs a run recorded with `run --turns`. Compares what each turn was given with the turns before it, what the rollout handed
    to the trainer with all turns, and recorded calls with that. Names the first id that differs and its kind: retokenized, border
    lost, template drops text, extra BOS, two BOS, EOS appended. --tokenizer adds the text, which some kinds are known by.

    --template proves that a conversation's prefix stays a prefix as turns are added, on made-up and recorded conversations.

    Exit code: 1 if ids differ or no recorded call of the training has them; 5 if no turns were recorded.

    Example: actordbg turns --run agent --tokenizer /models/qwen3
    """
    from actordbg.cli.terminal import opened

    return opened(ctx).turns(dump, run=run, tokenizer=tokenizer, template=template)


def weights(
    ctx: typer.Context,
    run: str | None = option(None, "The run (default: the newest with recorded transfers).", metavar="NAME"),
) -> object:
    """Check that rollout engines got the weights that were sent.

    Needs a run recorded with `run --hash-weights`: each transfer of weights is hashed where it is sent, and where the engine's
    loader gets it. Names parameters that were never sent, never arrived, arrived as others, or were unknown to the engine, and
    since which step an engine has not changed. A parameter that did not move counts as right.

    Exit code: 1 if something is wrong or no engine was recorded; 5 if no transfer was recorded.

    Example: actordbg weights --run ppo-7b
    """
    from actordbg.cli.terminal import opened

    return opened(ctx).weights(run)
