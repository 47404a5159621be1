"""`actordbg noise`, `train-check` and `locate`: what a configuration does, beside replaying and judging dumps."""

from __future__ import annotations

from dataclasses import asdict

import typer

from actordbg.cli.options import (
    ConfirmOption,
    Given,
    refuse_beside,
)
from actordbg.cli.replay_options import ChosenInputs, EngineOptions
from actordbg.config.training_options import TrainingOptions


def noise(
    ctx: typer.Context,
    *,
    chosen: ChosenInputs,
    settings: Given,
    machines: EngineOptions,
) -> object:
    """Measure a configuration's own numerical noise.

    Replays the same inputs unchanged, a second time, with more padding, with every row twice and with rows reversed; and row by
    row in the configuration's dtype and in a wider dtype. Results should not depend on any of that, so every change is noise.
    `actordbg compare A B --noise` then reports only differences beyond this noise floor. Runs up to seven replays, which stay in
    the store.

    Example: actordbg noise --max-inputs 5 --dtype bf16 --packing
    """
    from actordbg.cli.terminal import opened

    return opened(ctx, machines=machines).noise(chosen.selection, **settings)


def train_check(
    ctx: typer.Context,
    *,
    inputs: ChosenInputs,
    how: TrainingOptions,
    settings: Given,
    machines: EngineOptions,
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
    from actordbg.cli.terminal import opened

    store = opened(ctx, yes=yes, machines=machines)
    if (again := resume if show is None else show) is not None:
        word, groups = ("resume", [EngineOptions]) if show is None else ("show", [])
        refuse_beside(ctx, f"--{word} keeps the check's settings", word, "yes", "dry_run", groups=groups)
        return store.train_check_again(again, run=show is None, dry_run=dry_run)
    return store.train_check(inputs.selection, training=asdict(how), dry_run=dry_run, **settings)


def locate(
    ctx: typer.Context,
    replay: str | None = None,
    *,
    chosen: ChosenInputs,
    settings: Given,
    yes: ConfirmOption = False,
) -> object:
    """Name the module in which a configuration goes wrong.

    Loads transformers' own model of the same checkpoint beside the Actor's. Compares what both are, bit for bit: parameters,
    buffers, ties, attributes. Then runs one input (most rows, most padding) with the truth's values in front of every module, and
    measures what each module adds, in units of what the dtype costs a healthy model there: 1.00 everywhere if all is right.

    Exit code: 1 if anything is wrong or nothing could be checked; 5 if no dump was selected.

    Example: actordbg locate last

    Example: actordbg locate --where "rank=0" --model /models/llama-3.1-8b --dtype bf16 --packing

    Args:
        replay (REPLAY): Use the configuration and inputs of this replay: an id, a name, `@1` or `last`.
    """
    from actordbg.cli.terminal import opened

    if replay is not None:
        refuse_beside(ctx, "a replay has its own configuration and inputs", "replay", "yes")
    store = opened(ctx, yes=yes)
    return store.locate(where=chosen.selection, **settings) if replay is None else store.locate(replay)
