"""`actordbg train-check`: a few optimizer steps under each configuration, and where one parts from the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from actordbg.actor.hub_model import find_model
from actordbg.actor.model_code import require_consent
from actordbg.base import plotfile
from actordbg.base.errors import StoreProblem, UsageError
from actordbg.cli import output
from actordbg.cli.input_options import ChosenInputs, asked_for, chosen_order, is_left_to_rank_0, opened, planned, what_there_is
from actordbg.cli.options import (
    ConfirmOption,
    Format,
    FormatOption,
    Json,
    Quiet,
    approve,
    chosen_format,
    command_line,
    store_of,
    takes,
    typed_options,
)
from actordbg.cli.page_file import HtmlFile, check_page, write_page
from actordbg.cli.setting_options import NONE, TRAINING_AXES, Given, takes_settings
from actordbg.config.choices import choose, gather_facts
from actordbg.config.replay_config import AXES, ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.replay_record import ReplayInput
from actordbg.formats.train_check_record import OPEN, TrainCell, TrainCheckRecord
from actordbg.matrix.axes import Axes
from actordbg.replay.plan import new_replay_id
from actordbg.replay.selection import defaults_of
from actordbg.report.blocks import as_data
from actordbg.report.renderings import as_markdown, as_text
from actordbg.store.layout import Store
from actordbg.traincheck.ancestor_names import AncestorNames, read_names
from actordbg.traincheck.run_train_check import folder_of, load_train_check, run_train_check
from actordbg.traincheck.train_document import train_document
from actordbg.traincheck.train_plan import batch_of, configurations, make_train_cells
from actordbg.traincheck.train_plot import plot_check
from actordbg.traincheck.train_verdicts import CellVerdict, is_good, verdicts

_PANEL = "The training"
MOST_BY_DEFAULT = 32
"""Inputs, where --max-inputs does not say: a check should take minutes."""


@dataclass(frozen=True)
class HowToTrain:
    """The optimizer's numbers, as typed."""

    steps: Annotated[int, typer.Option("--steps", min=1, rich_help_panel=_PANEL, help="Optimizer steps (default 10).")] = 10
    lr: Annotated[
        float, typer.Option("--lr", rich_help_panel=_PANEL, help="Learning rate, constant (default 5e-6, the test suite's).")
    ] = 5e-6
    gradient_accumulation: Annotated[
        int,
        typer.Option(
            "--gradient-accumulation",
            min=1,
            rich_help_panel=_PANEL,
            help="Micro-batches in each step of the configuration with most lanes; others take as many in all (default 1).",
        ),
    ] = 1
    max_norm: Annotated[
        float,
        typer.Option("--max-norm", min=0, rich_help_panel=_PANEL, help="Clip gradients to this norm; 0: never (default 1)."),
    ] = 1.0
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0, rich_help_panel=_PANEL, help="AdamW's (default 0).")] = (
        0.0
    )
    threshold: Annotated[
        float,
        typer.Option(
            "--threshold", metavar="X", rich_help_panel=_PANEL, help="First, mean and last loss must be nearer (default 0.05)."
        ),
    ] = 0.05


@dataclass
class TrainAnswer:
    """A training check. good: every configuration that can run here agrees. logs: of each cell, by index."""

    check: TrainCheckRecord
    good: bool
    verdicts: list[CellVerdict]
    logs: dict[int, str]


@takes("inputs", ChosenInputs)
@takes("how", HowToTrain)
@takes_settings("train-check")
def train_check(
    ctx: typer.Context,
    inputs: ChosenInputs = ChosenInputs(),
    how: HowToTrain = HowToTrain(),
    settings: Given = NONE,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw losses and differences, too: .png, .svg or .pdf.")
    ] = None,
    html: HtmlFile = None,
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", metavar="DIR", help="Where each configuration's log goes (default: in the store).")
    ] = None,
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
    and the other variables of the trainer's backend test suite; a flag wins.
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
    else:
        store, inputs = opened(ctx, inputs)
        names = _names(ctx, flags)
        record, chosen = _new(ctx, store, flags, inputs, how, names, log_dir)
    if dry_run:
        output.emit(record, _say_plan, form == "json")
        return None
    _run(store, record, chosen, form, Pictured(plot, html), quiet=quiet or as_json)
    return None


def _alone(ctx: typer.Context, option: str) -> None:
    """Refuse what was typed beside --resume or --show and would have no effect."""
    beside = {option, "quiet", "as_json", "format", "plot", "html", "yes", "dry_run", "trust_remote_code", "dist_plugin"}
    if named := typed_options(ctx, beside):
        raise UsageError(
            f"--{option} takes a check as it is, so {named} cannot be given", hint="leave it out, or start a new one"
        )


def _names(ctx: typer.Context, flags: Mapping[str, Any]) -> AncestorNames:
    """The variables of the ancestor; what each does is said on standard error."""
    typed = {name for name in ("max_inputs", "log_dir") if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")}
    found = read_names(os.environ, set(flags) | typed)
    for name, value in found.took.items():
        output.note(f"taken from the environment: {name}={value}")
    for name, why in found.idle.items():
        output.note(f"{name} has no effect: {why}")
    return found


def _new(
    ctx: typer.Context, store: Store, flags: dict[str, Any], inputs: ChosenInputs, how: HowToTrain, names: AncestorNames,
    log_dir: Path | None,
) -> tuple[TrainCheckRecord, tuple[ReplayInput, ...]]:  # fmt: skip
    axes = _axes(flags, names)
    base = _base(ctx, {name: value for name, value in flags.items() if name not in TRAINING_AXES}, names, axes)
    configs = configurations(
        base, axes, names.skips, {name: names.values[name] for name in ("tp", "ring") if name in names.values}
    )
    if not configs:
        raise UsageError("every configuration is skipped", hint="unset a SKIP_ variable")
    most = inputs.max_inputs or names.values.get("max_inputs") or MOST_BY_DEFAULT
    narrowed = replace(inputs, max_inputs=most, where=_where(inputs.where, names.values.get("max_len")))
    plan = planned(store, base, narrowed, chosen_order(inputs.order, False))
    for reason, count in plan.skipped.items():
        output.note(f"left out {output.plural(count, 'dump')}: {reason}")
    if not plan.spec.inputs:
        raise StoreProblem(f"nothing to train on: {what_there_is(store, narrowed.where)}", hint="choose dumps with --where")
    defaults, facts, check_id = defaults_of(store.root, plan.spec.inputs), gather_facts(), new_replay_id()
    find_model(base.model)
    logs = log_dir or (Path(names.values["log_dir"]) if "log_dir" in names.values else folder_of(store, check_id) / "logs")
    record = TrainCheckRecord(
        check_id=check_id,
        created_at=now_timestamp(),
        status=OPEN,
        cells=tuple(make_train_cells(configs, base, facts, defaults)),
        dump_ids=tuple(item.dump_id for item in plan.spec.inputs),
        steps=how.steps,
        batch=batch_of(configs, how.gradient_accumulation),
        dtype=choose(base, defaults, facts).dtype,
        threshold=_threshold(how.threshold),
        training=_training(how),
        log_dir=str(logs.absolute()),
        selection=narrowed.where,
        command=command_line(),
        names=names.took,
        options={"inputs": [asdict(item) for item in plan.spec.inputs]},
    )
    return record, plan.spec.inputs


def _axes(flags: Mapping[str, Any], names: AncestorNames) -> Axes:
    """The lists that were given; a size of the ancestor's beside its absence, where other lists were given."""
    given = {name: AXES[name].list_of(str(flags[name])) for name in TRAINING_AXES if name in flags}
    for name in ("tp", "ring"):
        if given and name in names.values:
            given[name] = sorted({1, names.values[name]})
    return {name: given[name] for name in AXES if name in given}


def _base(ctx: typer.Context, flags: dict[str, Any], names: AncestorNames, axes: Axes) -> ReplayConfig:
    """The configuration that all cells share, with as many processes as the widest needs."""
    widest = max(axes.get("tp", [names.values.get("tp", 2)])) * max(axes.get("ring", [names.values.get("ring", 2)]))
    ours = {name: names.values[name] for name in ("model", "nproc") if name in names.values}
    flags = {"nproc": widest, "zero_stage": 0, "backend": "plain", "tp": 1, "ring": 1} | ours | flags
    distributed = {name: flags.pop(name) for name in ("dist_backend",) if name in flags}
    config = asked_for(ctx, flags).config
    return replace(config, **distributed, backward=True, keep_tensors=False, truth=None, vary=None)


def _where(where: str | None, longest: int | None) -> str | None:
    if longest is None:
        return where
    return f"seq_len <= {longest}" if where is None else f"({where}) and seq_len <= {longest}"


def _threshold(value: float) -> float:
    if not 0 < value < 1:
        raise UsageError(f"--threshold {value:g} is no share", hint="0.05 allows 5 % of difference")
    return value


def _training(how: HowToTrain) -> dict[str, Any]:
    """The optimizer's numbers, as `training.json` has them."""
    if not 0 < how.lr < 10:
        raise UsageError(f"--lr {how.lr:g} is no learning rate", hint="for example 5e-6")
    numbers = {"lr": how.lr, "max_norm": how.max_norm, "weight_decay": how.weight_decay}
    return {"betas": [0.9, 0.95], "eps": 1e-8} | numbers


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
    open_cells = sum(cell.status == OPEN for cell in record.cells)
    interrupted = False
    try:
        with _following(open_cells * record.steps * record.batch, quiet) as (on_event, on_tick):
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


@contextmanager
def _following(total: int, quiet: bool) -> Iterator[tuple[Callable[[TrainCell, str], None], Callable[[], None]]]:
    """A bar of micro-batches, with the cell's name beside it."""
    with output.progress("training", total, quiet=quiet) as advance:

        def on_event(cell: TrainCell, what: str) -> None:
            advance(1 if what == "micro-batch" else 0, note=cell.name if what != "starts" else f"{cell.name}: starting")

        yield on_event, lambda: None


def _print(record: TrainCheckRecord, form: Format, drawn: Pictured, *, judge: bool = True) -> None:
    """The answer in one of the formats, and the picture; exit code 1 for a bad one."""
    paths = {cell.index: Path(record.log_dir) / cell.log_name for cell in record.cells if cell.steps}
    logs = {index: os.path.relpath(path) for index, path in paths.items() if path.is_file()}
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
        lanes = f"{output.plural(config.nproc, 'process')}, accumulates {record.batch // config.lanes}" if not cell.reason else ""
        output.say(f"  {cell.name}: {f'{cell.status} ({cell.reason})' if cell.reason else lanes}")
