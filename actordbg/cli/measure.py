"""`actordbg noise` and `train-check`: what a configuration does, beside replaying and judging dumps."""

from __future__ import annotations

from dataclasses import asdict

import typer

from actordbg.cli.options import (
    NONE,
    ConfirmOption,
    Given,
    refuse_beside,
)
from actordbg.cli.replay_options import ChosenInputs, EngineOptions, HowToTrain


def noise(
    ctx: typer.Context,
    chosen: ChosenInputs = ChosenInputs(),
    settings: Given = NONE,
    machines: EngineOptions = EngineOptions(),
) -> object:
    """Measure a configuration's own numerical noise.

    Replays the same inputs unchanged, a second time, with more padding, with every row twice and with rows reversed; and row by
    row in the configuration's dtype and in a wider dtype. Results should not depend on any of that, so every change is noise.
    `actordbg compare A B --noise` then reports only differences beyond this noise floor. Runs up to seven replays, which stay in
    the store.

    Example: actordbg noise --max-inputs 5 --dtype bf16 --packing
    """
    from actordbg.cli.terminal import flags_of, opened

    flags = flags_of(settings)
    return opened(ctx, machines=machines).noise(chosen.selection, **flags)


def train_check(
    ctx: typer.Context,
    *,
    inputs: ChosenInputs = ChosenInputs(),
    how: HowToTrain = HowToTrain(),
    settings: Given = NONE,
    machines: EngineOptions = EngineOptions(),
    resume: str | None = None,
    show: str | None = None,
    yes: ConfirmOption = False,
    dry_run: bool = False,
) -> object:
    """Train a few steps under each configuration and compare.

    Real steps of AdamW over recorded inputs: the same initial weights, the same micro-batches in each step, gradients clipped.
    Without a list: the plain Actor, ZeRO 2, fsdp2, and fsdp2 with tensor parallelism, with a ring, with both. Each is judged at
    every step by loss, gradient norm and update norm, against the plain Actor in fp32. Takes NUM_GPUS, MODEL, TP_SIZE, SKIP_RING
    and the other variables of the trainer's backend test suite; a flag wins.
    Takes as many inputs as its steps take twice, so that the loss over the same inputs says whether it falls. Exit code 1 if a
    configuration fails, diverges from the baseline, or its loss is not known to fall, or if none could run.

    Example: actordbg train-check --where "seq_len<512" --steps 20 --backend deepspeed,fsdp2 --zero-stage 2 --tp 1,2 --nproc 4

    Args:
        resume ([CHECK|last]): Continue a stopped check.
        show ([CHECK|last]): Print an existing check; run nothing.
        dry_run: Print the configurations; run nothing.
    """
    from actordbg.cli.terminal import flags_of, opened

    flags = flags_of(settings)
    store = opened(ctx, yes=yes, machines=machines)
    if (again := resume if show is None else show) is not None:
        word, groups = ("resume", [EngineOptions]) if show is None else ("show", [])
        refuse_beside(ctx, f"--{word} keeps the check's settings", word, "yes", "dry_run", groups=groups)
        return store.train_check_again(again, run=show is None, dry_run=dry_run)
    return store.train_check(inputs.selection, training=asdict(how), dry_run=dry_run, **flags)
