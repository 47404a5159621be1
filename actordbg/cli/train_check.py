"""`actordbg train-check`: a few optimizer steps under each configuration, and where one parts from the others."""

from __future__ import annotations

from pathlib import Path

import typer

from actordbg.cli import output
from actordbg.cli.engine_options import EngineOptions
from actordbg.cli.input_options import ChosenInputs
from actordbg.cli.options import ConfirmOption, FormatOption, Json, Quiet, approve, chosen_format, option, store_of, takes
from actordbg.cli.page_file import HtmlFile, check_page
from actordbg.cli.setting_options import NONE, Given, takes_settings
from actordbg.cli.training_options import HowToTrain


@takes("inputs", ChosenInputs)
@takes("how", HowToTrain)
@takes("machines", EngineOptions)
@takes_settings("train-check")
def train_check(
    ctx: typer.Context,
    inputs: ChosenInputs = ChosenInputs(),
    how: HowToTrain = HowToTrain(),
    settings: Given = NONE,
    machines: EngineOptions = EngineOptions(),
    plot: Path | None = option(None, "Also draw losses and differences: .svg, .png or .pdf.", metavar="FILE"),
    html: HtmlFile = None,
    resume: str | None = option(None, "Run what has not finished of a check.", metavar="[CHECK|last]"),
    show: str | None = option(None, "Print a check that is there; run nothing.", metavar="[CHECK|last]"),
    yes: ConfirmOption = False,
    dry_run: bool = option(False, "Print the configurations and run nothing.", "--dry-run"),
    format: FormatOption = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Take optimizer steps under each configuration, and compare.

    Real steps of AdamW over recorded inputs: the same initial weights, the same micro-batches in each step, gradients clipped.
    Without a list: the plain Actor, ZeRO 2, fsdp2, and fsdp2 with tensor parallelism, with a ring, with both. Each is judged at
    every step by loss, gradient norm and update norm, against the plain Actor in fp32. Takes NUM_GPUS, MODEL, TP_SIZE, SKIP_RING
    and the other variables of the trainer's backend test suite; a flag wins. --trainer sft runs the trainer's own program, too.
    Takes as many inputs as its steps take twice, so that the loss over the same inputs says whether it falls. Exit code 1 if a
    configuration fails, parts from the baseline, or its loss is not known to fall, or if none could run.

    Example: actordbg train-check --where "seq_len<512" --steps 20 --backend deepspeed,fsdp2 --zero-stage 2 --tp 1,2 --nproc 4
    """
    from actordbg.actor.find_trainer import require_torch
    from actordbg.base.ids import new_replay_id
    from actordbg.campaign.run_train_check import load_train_check
    from actordbg.cli.chosen_inputs import is_left_to_rank_0, opened
    from actordbg.cli.new_train_check import new_train_check
    from actordbg.cli.train_check_work import inputs_again, print_train_check, require_alone, run_cells_of, say_plan
    from actordbg.document import chart_file

    flags = dict(settings)
    if is_left_to_rank_0(flags):
        return
    form = chosen_format(format, as_json)
    check_page(html)
    chart_file.check("--plot", plot)
    if show is not None or resume is not None:
        require_alone(ctx, "show" if show is not None else "resume")
        store = store_of(ctx).require()
        record, owner = load_train_check(store, str(show or resume))
        if show is not None:
            return print_train_check(record, form, plot, html)
        models = ", ".join(sorted({repr(cell.config.get("model")) for cell in record.cells}))
        approve(f"training check {record.check_id}, whose model is {models} and whose logs go to {record.log_dir}", owner, yes)
        chosen = inputs_again(store, record)
        machines.run(ctx, f"train-check {record.check_id}")
        require_torch()
    else:
        store, inputs = opened(ctx, inputs)
        check_id = new_replay_id()
        if not dry_run:
            machines.run(ctx, f"train-check {check_id}")
        record, chosen = new_train_check(ctx, store, flags, inputs, how, check_id)
    if dry_run:
        output.emit(record, say_plan, form == "json")
        return None
    run_cells_of(store, record, chosen, form, plot, html, quiet=quiet or as_json)
    return None
