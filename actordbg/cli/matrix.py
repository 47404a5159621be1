"""`actordbg matrix`: the same inputs under every combination of some settings, and which of them work."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from actordbg.base.errors import UsageError
from actordbg.cli import output
from actordbg.cli.engine_options import EngineOptions
from actordbg.cli.input_options import ChosenInputs
from actordbg.cli.options import ConfirmOption, Explain, FormatOption, Json, Power, Quiet, chosen_format, takes
from actordbg.cli.page_file import HtmlFile, check_page
from actordbg.cli.setting_options import NONE, Given, TruthDtype, takes_settings, truth_dtype


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
    Exit code 1 if a cell failed, is wrong, must still run, or got worse than --baseline, or if none could be run.

    Example: actordbg matrix --where "seq_len>1800" --max-inputs 3 --attn sdpa,eager --packing both --compile off
    """
    from actordbg.base.ids import new_replay_id
    from actordbg.campaign import run_matrix as matrices
    from actordbg.campaign.matrix_document import explanations
    from actordbg.cli.chosen_inputs import asked_for, is_left_to_rank_0, opened
    from actordbg.cli.matrix_work import baseline_of, kept, new_record, print_answer, require_alone, resumed, run_cells, selected
    from actordbg.config.replay_config import AXES
    from actordbg.document.renderings import as_text

    if explained:
        return output.say_lines(as_text(explanations()))
    flags = dict(settings)
    if is_left_to_rank_0(flags):
        return None
    store, inputs = opened(ctx, inputs, writes=not dry_run and show is None)
    how = chosen_format(format, as_json)
    check_page(html)
    if show is not None:
        require_alone(ctx, "show")
        return print_answer(store, matrices.load(store, show), how, html)
    if power and no_truth:
        raise UsageError("--power plants faults beside the truth", hint="leave --no-truth out")
    axes = {name: str(flags.pop(name)) for name in AXES if name in flags}
    if resume is not None:
        require_alone(ctx, "resume")
    matrix_id = new_replay_id() if resume is None else matrices.load(store, resume).matrix_id
    if not dry_run:
        machines.run(ctx, f"matrix {matrix_id}")
    if resume is not None:
        record, chosen, held = resumed(store, resume, yes)
    else:
        base = kept(asked_for(ctx, flags), flags)
        chosen = selected(store, base, inputs)
        held = baseline_of(store, baseline, slower)
        options: dict[str, Any] = {
            "order": inputs.order or "time",
            "shuffle_seed": inputs.random_seed,
            "skip_known": skip_known,
            "slower": slower,
            "power": power,
            "oracle": None if no_truth else truth_dtype(truth),
            "input_files": [str(path.absolute()) for path in inputs.input_file or []],
        }
        about = {"matrix_id": matrix_id, "selection": inputs.where, "baseline": held and held.name}
        record = new_record(base, axes, chosen, options, **about)
    run_cells(store, record, chosen, held, how, html, quiet=quiet or as_json, dry_run=dry_run)
    return None
