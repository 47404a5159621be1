"""`actordbg train-check`: a few optimizer steps under each configuration, and where they diverge."""

from __future__ import annotations

from dataclasses import asdict

import typer

from actordbg.cli.options import (
    ConfirmOption,
    option,
    refuse_beside,
)
from actordbg.cli.replay_options import ChosenInputs, EngineOptions, HowToTrain
from actordbg.cli.setting_options import NONE, Given, takes_settings


@takes_settings("train-check")
def train_check(
    ctx: typer.Context,
    inputs: ChosenInputs = ChosenInputs(),
    how: HowToTrain = HowToTrain(),
    settings: Given = NONE,
    machines: EngineOptions = EngineOptions(),
    resume: str | None = option(None, "Continue a stopped check.", metavar="[CHECK|last]"),
    show: str | None = option(None, "Print an existing check; run nothing.", metavar="[CHECK|last]"),
    yes: ConfirmOption = False,
    dry_run: bool = option(False, "Print the configurations; run nothing."),
) -> None:
    """Train a few steps under each configuration and compare.

    Real steps of AdamW over recorded inputs: the same initial weights, the same micro-batches in each step, gradients clipped.
    Without a list: the plain Actor, ZeRO 2, fsdp2, and fsdp2 with tensor parallelism, with a ring, with both. Each is judged at
    every step by loss, gradient norm and update norm, against the plain Actor in fp32. Takes NUM_GPUS, MODEL, TP_SIZE, SKIP_RING
    and the other variables of the trainer's backend test suite; a flag wins.
    Takes as many inputs as its steps take twice, so that the loss over the same inputs says whether it falls. Exit code 1 if a
    configuration fails, diverges from the baseline, or its loss is not known to fall, or if none could run.

    Example: actordbg train-check --where "seq_len<512" --steps 20 --backend deepspeed,fsdp2 --zero-stage 2 --tp 1,2 --nproc 4
    """
    from actordbg.cli.terminal import conclude, flags_of, opened

    flags = flags_of(settings)
    store = opened(ctx, yes=yes, machines=machines)
    if (again := resume if show is None else show) is not None:
        word, groups = ("resume", [EngineOptions]) if show is None else ("show", [])
        refuse_beside(ctx, f"--{word} keeps the check's settings", word, "yes", "dry_run", groups=groups)
        return conclude(store, store.train_check_again(again, run=show is None, dry_run=dry_run))
    return conclude(store, store.train_check(inputs.selection, training=asdict(how), dry_run=dry_run, **flags))
