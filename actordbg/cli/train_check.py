"""`actordbg train-check`: a few optimizer steps under each configuration, and where one parts from the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from actordbg.actor.model_code import require_consent
from actordbg.base import plotfile
from actordbg.base.errors import UsageError
from actordbg.cli import output
from actordbg.cli.engine_options import EngineOptions
from actordbg.cli.input_options import ChosenInputs, is_left_to_rank_0, opened
from actordbg.cli.new_train_check import HowToTrain, new_train_check
from actordbg.cli.options import (
    ConfirmOption,
    Format,
    FormatOption,
    Json,
    Quiet,
    approve,
    chosen_format,
    store_of,
    takes,
    typed_options,
)
from actordbg.cli.page_file import HtmlFile, check_page, write_page
from actordbg.cli.setting_options import NONE, Given, takes_settings
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.replay_record import ReplayInput
from actordbg.formats.train_check_record import OPEN, SFT, SFT_BASELINE, TrainCell, TrainCheckRecord
from actordbg.matrix.cell_logs import shown_path
from actordbg.replay.plan import new_replay_id
from actordbg.report.blocks import as_data
from actordbg.report.renderings import as_markdown, as_text
from actordbg.store.layout import Store
from actordbg.traincheck.run_train_check import load_train_check, log_of, run_train_check
from actordbg.traincheck.train_document import train_document
from actordbg.traincheck.train_plot import plot_check
from actordbg.traincheck.train_verdicts import CellVerdict, is_good, verdicts


@dataclass
class TrainAnswer:
    """A training check. good: every configuration that can run here agrees. logs: of each cell, by index."""

    check: TrainCheckRecord
    good: bool
    verdicts: list[CellVerdict]
    logs: dict[int, str]


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
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw losses and differences, too: .png, .svg or .pdf.")
    ] = None,
    html: HtmlFile = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="[CHECK|last]", help="Run what has not finished of a check.")
    ] = None,
    show: Annotated[
        str | None, typer.Option("--show", metavar="[CHECK|last]", help="Print a check that is there; run nothing.")
    ] = None,
    yes: ConfirmOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the configurations and run nothing.")] = False,
    format: FormatOption = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Take optimizer steps under each configuration, and compare.

    Real steps of AdamW over recorded inputs: the same initial weights, the same micro-batches in each step, gradients clipped.
    Without a list: the plain Actor, ZeRO 2, fsdp2, and fsdp2 with tensor parallelism, with a ring, with both. Each is judged at
    every step by loss, gradient norm and update norm, against the plain Actor in fp32. Takes NUM_GPUS, MODEL, TP_SIZE, SKIP_RING
    and the other variables of the trainer's backend test suite; a flag wins. --trainer sft runs the trainer's own program, too.
    Exit code 1 if a configuration fails, parts from the baseline, or its loss does not fall, or if none could run.

    Example: actordbg train-check --where "seq_len<512" --steps 20 --backend deepspeed,fsdp2 --zero-stage 2 --tp 1,2 --nproc 4
    """
    flags = dict(settings)
    if is_left_to_rank_0(flags):
        return
    form = chosen_format(format, as_json)
    check_page(html)
    if plot is not None:
        plotfile.check("--plot", plot)
    if show is not None or resume is not None:
        _alone(ctx, "show" if show is not None else "resume")
        store = store_of(ctx).require()
        record, owner = load_train_check(store, str(show or resume))
        if show is not None:
            return _print(record, form, Pictured(plot, html))
        models = ", ".join(sorted({repr(cell.config.get("model")) for cell in record.cells}))
        approve(f"training check {record.check_id}, whose model is {models} and whose logs go to {record.log_dir}", owner, yes)
        chosen = _inputs_again(store, record)
        machines.run(ctx, f"train-check {record.check_id}")
    else:
        store, inputs = opened(ctx, inputs)
        check_id = new_replay_id()
        if not dry_run:
            machines.run(ctx, f"train-check {check_id}")
        record, chosen = new_train_check(ctx, store, flags, inputs, how, check_id)
    if dry_run:
        output.emit(record, _say_plan, form == "json")
        return None
    _run(store, record, chosen, form, Pictured(plot, html), quiet=quiet or as_json)
    return None


def _alone(ctx: typer.Context, option: str) -> None:
    """Refuse what was typed beside --resume or --show and would have no effect."""
    beside = {option, "quiet", "as_json", "format", "plot", "html", "yes", "dry_run", "trust_remote_code", "dist_plugin"}
    if option == "resume":
        beside |= {one.name for one in fields(EngineOptions)}
    if named := typed_options(ctx, beside):
        raise UsageError(
            f"--{option} takes a check as it is, so {named} cannot be given", hint="leave it out, or start a new one"
        )


def _inputs_again(store: Store, record: TrainCheckRecord) -> tuple[ReplayInput, ...]:
    for cell in record.cells:
        require_consent(str(cell.config.get("model")), store.models)
    return tuple(ReplayInput(**item) for item in record.options.get("inputs", []))


@dataclass(frozen=True)
class Pictured:
    """Where pictures of the answer go, as typed."""

    plot: Path | None = None
    html: Path | None = None


def _run(
    store: Store, record: TrainCheckRecord, chosen: tuple[ReplayInput, ...], form: Format, drawn: Pictured, *, quiet: bool
) -> None:
    units = sum(_units(cell, record) for cell in record.cells if cell.status == OPEN)
    interrupted = False
    try:
        with _following(units, quiet) as (on_event, on_tick):
            record = run_train_check(store, record, chosen, on_event=on_event, on_tick=on_tick)
    except KeyboardInterrupt:
        interrupted = True
        record = load_train_check(store, record.check_id)[0]
        output.note(
            f"interrupted; finished trainings are kept, `actordbg train-check --resume {record.check_id}` runs the others"
        )
    if interrupted:
        _print(record, form, drawn, judge=False)
        raise typer.Exit(130)
    _print(record, form, drawn)


def _units(cell: TrainCell, record: TrainCheckRecord) -> int:
    """What the bar counts of a cell: micro-batches, of the trainer's own program steps."""
    own = cell.role in (SFT, SFT_BASELINE)
    return record.steps * (1 if own else record.batch)


@contextmanager
def _following(total: int, quiet: bool) -> Iterator[tuple[Callable[[TrainCell, str], None], Callable[[], None]]]:
    """A bar of micro-batches, with the cell's name beside it."""
    with output.progress("training", total, quiet=quiet) as advance:

        def on_event(cell: TrainCell, what: str) -> None:
            advance(1 if what == "micro-batch" else 0, note=cell.name if what != "starts" else f"{cell.name}: starting")

        yield on_event, lambda: None


def _print(record: TrainCheckRecord, form: Format, drawn: Pictured, *, judge: bool = True) -> None:
    """The answer in one of the formats, and the picture; exit code 1 for a bad one."""
    paths = {cell.index: log_of(record, cell) for cell in record.cells if cell.steps}
    logs = {index: shown_path(path) for index, path in paths.items() if path.is_file()}
    answer = TrainAnswer(record, is_good(record), verdicts(record), logs)
    blocks = train_document(record, logs)
    if form == "json":
        output.emit(vars(answer) | as_data(blocks), lambda _: None, True)
    else:
        output.say_lines(as_markdown(blocks) if form == "md" else as_text(blocks))
    write_page(drawn.html, blocks)
    if drawn.plot is not None:
        plot_check(record, drawn.plot)
        output.note(f"wrote {drawn.plot}")
    if judge and not answer.good:
        raise typer.Exit(1)


def _say_plan(record: TrainCheckRecord) -> None:
    inputs = output.plural(len(record.dump_ids), "input")
    output.say(
        f"{record.steps} steps of {record.batch} micro-batches over {inputs}, {record.dtype}, lr {record.training['lr']:g}:"
    )
    for cell in record.cells:
        config = ReplayConfig.from_dict(cell.config)
        own = "" if cell.role in (SFT, SFT_BASELINE) else f", accumulates {record.batch // config.lanes}"
        lanes = f"{output.plural(config.nproc, 'process')}{own}" if not cell.reason else ""
        output.say(f"  {cell.name}: {f'{cell.status} ({cell.reason})' if cell.reason else lanes}")
