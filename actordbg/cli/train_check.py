"""`actordbg train-check`: a few optimizer steps under each configuration, and where they diverge."""

from __future__ import annotations

import typer

from actordbg.cli.options import (
    ConfirmOption,
    approve,
    option,
    refuse_beside,
    store_of,
)
from actordbg.cli.output import emit
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
    from actordbg.actor.rules import require_torch
    from actordbg.base.units import new_replay_id
    from actordbg.campaign.run_train_check import load_train_check
    from actordbg.cli import train_check_work as work
    from actordbg.cli.replaying import flags_of, opened

    flags = flags_of(settings)
    if show is not None or resume is not None:
        word, groups = ("show", []) if show is not None else ("resume", [EngineOptions])
        refuse_beside(ctx, f"--{word} keeps the check's settings", word, "yes", "dry_run", groups=groups)
        store = store_of(ctx).require()
        record, owner = load_train_check(store, str(show or resume))
        if show is not None:
            return work.print_train_check(record)
        models = ", ".join(sorted({repr(cell.config.get("model")) for cell in record.cells}))
        approve(f"training check {record.check_id}, whose model is {models} and whose logs go to {record.log_dir}", owner, yes)
        chosen = work.inputs_again(store, record)
        machines.run(ctx, f"train-check {record.check_id}")
        require_torch()
    else:
        store, inputs = opened(ctx, inputs)
        check_id = new_replay_id()
        if not dry_run:
            machines.run(ctx, f"train-check {check_id}")
        record, chosen = work.new_train_check(ctx, store, flags, inputs, how, check_id)
    if dry_run:
        return emit(record, work.say_plan)
    return work.run_cells_of(store, record, chosen)
