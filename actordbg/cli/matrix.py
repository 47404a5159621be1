"""`actordbg matrix`: the same inputs under every combination of some settings, and which of them work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from actordbg.actor.hub_model import find_model
from actordbg.actor.model_code import require_consent
from actordbg.base.errors import UsageError
from actordbg.cli import output
from actordbg.cli.engine_options import EngineOptions
from actordbg.cli.input_options import ChosenInputs, asked_for, chosen_order, is_left_to_rank_0, nothing_to, opened, replaying
from actordbg.cli.matrix_answer import MatrixAnswer, MatrixPlan, follow, print_answer, print_plan, steps_of
from actordbg.cli.options import (
    ConfirmOption,
    Explain,
    Format,
    FormatOption,
    Json,
    Power,
    Quiet,
    approve,
    chosen_format,
    command_line,
    takes,
    typed_options,
)
from actordbg.cli.page_file import HtmlFile, check_page
from actordbg.cli.setting_options import NONE, Given, OldTruthDtype, TruthDtype, takes_settings, truth_dtype
from actordbg.config.choices import gather_facts
from actordbg.config.replay_config import AXES, TINY, USUAL_LAWS, ReplayConfig
from actordbg.config.sources import Asked
from actordbg.formats.journal import SPEC
from actordbg.formats.matrix_record import MatrixRecord
from actordbg.matrix import matrix_files as matrices
from actordbg.matrix.axes import combinations, parse_axes
from actordbg.matrix.cell_outcomes import context_of
from actordbg.matrix.cell_verdicts import Baseline, open_baseline, require_common
from actordbg.matrix.cells import batches, is_open, make_cells
from actordbg.matrix.matrix_document import explanations
from actordbg.matrix.matrix_files import Selection, select, select_again
from actordbg.matrix.run_matrix import Surroundings, new_matrix, run_matrix
from actordbg.replay.plan import new_replay_id
from actordbg.replay.selection import require_one_trainer
from actordbg.replay.supervise import spec_and_owner
from actordbg.report.renderings import as_text
from actordbg.store.layout import Store


@takes("inputs", ChosenInputs)
@takes("machines", EngineOptions)
@takes_settings("matrix")
def matrix(
    ctx: typer.Context,
    inputs: ChosenInputs = ChosenInputs(),
    settings: Given = NONE,
    machines: EngineOptions = EngineOptions(),
    skip_known: Annotated[
        bool, typer.Option("--skip-known", help="Leave out cells that are known to fail; they are run otherwise.")
    ] = False,
    no_truth: Annotated[
        bool, typer.Option("--no-truth", help="Do not compare passed cells with the truth: green then means finished.")
    ] = False,
    power: Power = False,
    truth: TruthDtype = None,
    oracle: OldTruthDtype = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            metavar="REPLAY|MATRIX",
            help="Exit 1 if a cell got worse than this replay, or than this matrix's cell with the same settings; "
            "failures that it has too are then no reason.",
        ),
    ] = None,
    slower: Annotated[
        float | None,
        typer.Option("--slower", metavar="FACTOR", help="A cell this many times slower than the baseline has got worse."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="MATRIX|last", help="Go on with a matrix where it stopped.")
    ] = None,
    show: Annotated[
        str | None, typer.Option("--show", metavar="MATRIX|last", help="Print a matrix that is there; run nothing.")
    ] = None,
    yes: ConfirmOption = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the cells and run nothing.")] = False,
    format: FormatOption = None,
    html: HtmlFile = None,
    explained: Explain = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find the combinations of settings that work and are right.

    Replays the same inputs under every combination of the listed settings, and says which work, which fail and why, and which
    are wrong.

    Without an option that lists several values: flash_attention_2 and sdpa, compiled or not, packed or not. Each combination
    is a replay of its own; those that can share a loaded Actor do. The laws are asked of some inputs, and a passed cell
    is compared with the truth. What cannot run here is unavailable, with the way out, and nothing is started for it.
    Exit code 1 if a cell failed, is wrong, or got worse than --baseline, or if none could be run.

    Example: actordbg matrix --where "seq_len>1800" --max-inputs 3 --attn sdpa,eager --packing both --compile off
    """
    if explained:
        return output.say_lines(as_text(explanations()))
    flags = dict(settings)
    if is_left_to_rank_0(flags):
        return None
    store, inputs = opened(ctx, inputs, writes=not dry_run and show is None)
    how = chosen_format(format, as_json)
    check_page(html)
    if show is not None:
        _alone(ctx, "show")
        return print_answer(_answer(store, matrices.load(store, show)), how, html)
    if power and no_truth:
        raise UsageError("--power plants faults beside the truth", hint="leave --no-truth out")
    axes = {name: str(flags.pop(name)) for name in AXES if name in flags}
    if resume is not None:
        _alone(ctx, "resume")
    matrix_id = new_replay_id() if resume is None else matrices.load(store, resume).matrix_id
    if not dry_run:
        machines.run(ctx, f"matrix {matrix_id}")
    if resume is not None:
        record, chosen, held = _resumed(store, resume, yes)
    else:
        base = kept(asked_for(ctx, flags), flags)
        chosen = _selected(store, base, inputs)
        held = _baseline(store, baseline, slower)
        options: dict[str, Any] = {
            "order": inputs.order or "time",
            "shuffle_seed": inputs.random_seed,
            "skip_known": skip_known,
            "slower": slower,
            "power": power,
            "oracle": None if no_truth else truth_dtype(truth, oracle),
            "input_files": [str(path.absolute()) for path in inputs.input_file or []],
        }
        record = replace(_new(base, axes, chosen, options, inputs.where, held), matrix_id=matrix_id)
    _run(store, record, chosen, held, how, html, quiet=quiet or as_json, dry_run=dry_run)
    return None


def kept(asked: Asked, flags: Mapping[str, Any]) -> ReplayConfig:
    """The configuration with what a cell is judged by: outputs; gradients and laws unless that was said otherwise."""
    config = asked.config
    said = flags.keys() | asked.sources.keys()
    gradients = config.keep_gradients if "keep_gradients" in said else config.backward is not False
    laws = config.laws if "laws" in said else USUAL_LAWS
    return replace(config, keep_tensors=True, keep_gradients=gradients, laws=laws, truth=None, vary=None)


def _alone(ctx: typer.Context, option: str) -> None:
    """Refuse what was typed beside --resume or --show and would have no effect."""
    means = {"yes", "trust_remote_code", "dist_plugin", *(one.name for one in fields(EngineOptions))}
    means = means if option == "resume" else set()
    if named := typed_options(ctx, {option, "quiet", "as_json", "format", "html", *means}):
        raise UsageError(
            f"--{option} takes a matrix as it is, so {named} cannot be given", hint="leave it out, or start a new matrix"
        )


def _selected(store: Store, base: ReplayConfig, inputs: ChosenInputs) -> Selection:
    where, order, seed = inputs.where, chosen_order(inputs.order, False), inputs.random_seed
    chosen = select(store, base, where, inputs.input_file or [], order, inputs.max_inputs, seed)
    for reason, count in chosen.skipped.items():
        output.note(f"left out {output.plural(count, 'dump')}: {reason}")
    if not chosen.rows:
        raise nothing_to("replay", store, inputs)
    return chosen


def _baseline(store: Store, name: str | None, slower: float | None) -> Baseline | None:
    if name is None:
        if slower is not None:
            raise UsageError("--slower has nothing to measure against", hint="add --baseline REPLAY")
        return None
    if slower is not None and not slower >= 1:
        raise UsageError(f"--slower {slower:g} calls what is as fast as the baseline slower", hint="for example --slower 1.5")
    return open_baseline(store, name, slower)


def _new(
    base: ReplayConfig,
    given: Mapping[str, str],
    chosen: Selection,
    options: dict[str, Any],
    where: str | None,
    held: Baseline | None,
) -> MatrixRecord:
    axes = parse_axes(given)
    configs = combinations(base, axes)
    require_one_trainer(chosen.rows, (one.config for one in configs))
    cells = make_cells(configs, gather_facts(), chosen.defaults, skip_known=bool(options["skip_known"]))
    baseline = held.name if held else None
    return new_matrix(cells, axes, chosen.rows, options, selection=where, command=command_line(), baseline=baseline)


def _resumed(store: Store, name: str, yes: bool) -> tuple[MatrixRecord, Selection, Baseline | None]:
    record, owner = matrices.load_with_owner(store, name)
    models = sorted({str(cell.config.get("model", TINY)) for cell in record.cells})
    approve(f"matrix {record.matrix_id}, whose model is {', '.join(map(repr, models))}", owner, yes)
    for cell in record.cells:
        if cell.replay_id is not None and (store.replays / cell.replay_id / SPEC).is_file():
            spec, owner = spec_and_owner(store, cell.replay_id)
            approve(f"replay {spec.replay_id} of that matrix, whose model is {spec.config.model!r}", owner, yes)
            models.append(spec.config.model)
    for model in models:
        require_consent(model, store.models)
    held = _baseline(store, record.baseline, record.options.get("slower"))
    return record, select_again(store, record), held


def _answer(store: Store, record: MatrixRecord) -> MatrixAnswer:
    return MatrixAnswer(record, record.good, context_of(store, record))


def _run(
    store: Store,
    record: MatrixRecord,
    chosen: Selection,
    held: Baseline | None,
    how: Format,
    html: Path | None,
    *,
    quiet: bool,
    dry_run: bool,
) -> None:
    """Run the cells that are open and print the matrix, after an interruption too; exit code 1 for a bad one."""
    around = Surroundings(chosen.defaults)
    for model in {str(cell.config.get("model", TINY)) for cell in record.cells if is_open(cell)}:
        find_model(model)
    if dry_run:
        shared = tuple(one.cells for one in batches(record.cells, around.facts, chosen.defaults))
        output.emit(MatrixPlan(len(chosen.rows), record.cells, shared), print_plan, how == "json")
        return
    if held is not None:
        require_common(store, held, record.cells, record.dump_ids)
    interrupted = False
    try:
        with replaying(store, "matrix", steps_of(record), quiet=quiet) as (catalog, advance):
            around.on_tick = catalog.tick
            around.on_event = follow(catalog, advance, record)
            run_matrix(store, record, chosen.rows, around, held)
    except KeyboardInterrupt:
        interrupted = True
        output.note(f"interrupted; what is done is kept, `actordbg matrix --resume {record.matrix_id}` goes on")
    answer = _answer(store, matrices.load(store, record.matrix_id))
    print_answer(answer, how, html)
    if interrupted:
        raise typer.Exit(130)
    if not answer.good:
        raise typer.Exit(1)
