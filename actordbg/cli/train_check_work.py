"""The work of `actordbg train-check`: the inputs of one that goes on, the run, and its answer."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import typer

from actordbg.actor.model_code import require_consent
from actordbg.base.errors import UsageError
from actordbg.campaign.cell_outcomes import shown_path
from actordbg.campaign.run_train_check import TrainRun, load_train_check, log_of
from actordbg.campaign.train_document import is_good, train_charts, train_document, verdicts
from actordbg.cli import output
from actordbg.cli.engine_options import EngineOptions
from actordbg.cli.options import Format, typed_options
from actordbg.cli.page_file import write_page
from actordbg.config.replay_config import ReplayConfig
from actordbg.document import chart_file
from actordbg.document.blocks import as_data
from actordbg.document.renderings import as_markdown, as_text
from actordbg.records.replay_record import ReplayInput
from actordbg.records.train_check_record import OPEN, SFT, SFT_BASELINE, TrainCell, TrainCheckRecord
from actordbg.store.layout import Store


def require_alone(ctx: typer.Context, option: str) -> None:
    """Refuse what was typed beside --resume or --show and would have no effect."""
    beside = {option, "quiet", "as_json", "format", "plot", "html", "yes", "dry_run", "trust_remote_code", "dist_plugin"}
    if option == "resume":
        beside |= {one.name for one in fields(EngineOptions)}
    if named := typed_options(ctx, beside):
        raise UsageError(
            f"--{option} takes a check as it is, so {named} cannot be given", hint="leave it out, or start a new one"
        )


def inputs_again(store: Store, record: TrainCheckRecord) -> tuple[ReplayInput, ...]:
    for cell in record.cells:
        require_consent(str(cell.config.get("model")), store.models)
    return tuple(ReplayInput(**item) for item in record.options.get("inputs", []))


def run_cells_of(
    store: Store,
    record: TrainCheckRecord,
    chosen: tuple[ReplayInput, ...],
    form: Format,
    plot: Path | None,
    html: Path | None,
    *,
    quiet: bool,
) -> None:
    units = sum(  # micro-batches, of the trainer's own program steps
        record.steps * (1 if cell.role in (SFT, SFT_BASELINE) else record.batch) for cell in record.cells if cell.status == OPEN
    )
    try:
        with output.progress("training", units, quiet=quiet) as advance:

            def on_event(cell: TrainCell, what: str) -> None:
                advance(what == "micro-batch", note=cell.name if what != "starts" else f"{cell.name}: starting")

            record = TrainRun(store, record, chosen, on_event).run()
    except KeyboardInterrupt:
        output.note(
            f"interrupted; finished trainings are kept, `actordbg train-check --resume {record.check_id}` runs the others"
        )
        print_train_check(load_train_check(store, record.check_id)[0], form, plot, html, judge=False)
        raise typer.Exit(130) from None
    print_train_check(record, form, plot, html)


def print_train_check(
    record: TrainCheckRecord, form: Format, plot: Path | None, html: Path | None, *, judge: bool = True
) -> None:
    """The answer in one of the formats, and the picture; exit code 1 for a bad one."""
    paths = {cell.index: log_of(record, cell) for cell in record.cells if cell.steps}
    logs = {index: shown_path(path) for index, path in paths.items() if path.is_file()}
    good, blocks = is_good(record), train_document(record, logs)
    if form == "json":
        answer = {"check": record, "good": good, "verdicts": verdicts(record), "logs": logs}
        output.emit(answer | as_data(blocks), lambda _: None, True)
    else:
        output.say_lines(as_markdown(blocks) if form == "md" else as_text(blocks))
    write_page(html, blocks)
    if plot is not None and chart_file.save(train_charts(record), plot):
        output.note(f"wrote {plot}")
    if judge and not good:
        raise typer.Exit(1)


def say_plan(record: TrainCheckRecord) -> None:
    inputs = output.plural(len(record.dump_ids), "input")
    output.say(
        f"{record.steps} steps of {record.batch} micro-batches over {inputs}, {record.dtype}, lr {record.training['lr']:g}:"
    )
    for cell in record.cells:
        config = ReplayConfig.from_dict(cell.config)
        plan = f"{cell.status} ({cell.reason})" if cell.reason else output.plural(config.nproc, "process")
        if not cell.reason and cell.role not in (SFT, SFT_BASELINE):
            plan += f", accumulates {record.batch // config.lanes}"
        output.say_wrapped(f"  {cell.name}: {plan}", "      ")
