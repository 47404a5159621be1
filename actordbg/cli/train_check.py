"""`actordbg train-check`: run a few optimizer steps under each configuration, and show where one diverges."""

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
    dry_run: bool = option(False, "Print the configurations; run nothing.", "--dry-run"),
) -> None:
    """Train a few steps under each configuration and compare.

    Takes real AdamW steps on recorded inputs, with the same initial weights and micro-batches and with gradient clipping. Default
    configurations: the plain Actor, ZeRO 2, fsdp2, and fsdp2 with tensor parallelism, with ring attention, and with both.
    Compares loss, gradient norm and update norm at every step with the plain Actor in fp32.

    Reads NUM_GPUS, MODEL, TP_SIZE, SKIP_RING and the other variables of OpenRLHF's backend test suite; flags win. --trainer sft
    also runs OpenRLHF's own program. By default, selects so few inputs that the steps use each twice: the loss over the same
    inputs then shows whether it falls.

    Exit code: 1 if a configuration fails, diverges from the baseline, or its loss is not known to fall, or if none could run.

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
