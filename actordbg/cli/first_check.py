"""`actordbg check`: the command that one types first. A sample of one's own dumps, judged by all that can judge them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from actordbg.cli import output
from actordbg.cli.input_options import ChosenInputs
from actordbg.cli.options import FormatOption, Json, Quiet, chosen_format, option, takes
from actordbg.cli.page_file import check_page, open_page, write_file
from actordbg.cli.setting_options import NONE, Given, takes_settings

_FOR = "For other programs"


@takes("inputs", ChosenInputs)
@takes_settings("check")
def check(
    ctx: typer.Context,
    inputs: ChosenInputs = ChosenInputs(),
    settings: Given = NONE,
    golden: bool = option(
        False, "Judge what the training run got, too (--with-outputs); --model has the weights of that moment.", "--golden"
    ),
    junit: Path | None = option(None, "Write JUnit's XML there, too.", metavar="FILE", rich_help_panel=_FOR),
    github: bool = option(False, "Annotate the GitHub workflow that runs this.", "--github", rich_help_panel=_FOR),
    html: Path | None = option(None, "Where the page goes (default: into the store's reports/).", "--html", "-o", metavar="FILE"),
    opened: bool = option(False, "Show the page in the browser.", "--open"),
    format: FormatOption = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check a sample of your own dumps: do they run, and right?

    Picks dumps that differ most (lengths, padding, roles, triggers; 8 unless told otherwise), replays them, asks the laws, and
    compares with the truth: each row alone, unpadded, eager, in fp32. Ends in one sentence that says what was not judged,
    three figures, the command that comes next, and a page to forward. The replay stays in the store.
    Exit code 1 if something is wrong or nothing could be judged, 5 if no dump was selected.

    Example: actordbg check --where "rank=0" --model /models/llama-3.1-8b --packing
    """
    from actordbg.catalog.query import count_dumps, open_fresh
    from actordbg.cli import chosen_inputs as choosing
    from actordbg.cli.first_check_work import annotate, print_check, run_with_bar, sampled, write_check_page
    from actordbg.cli.matrix_work import kept
    from actordbg.judge.check_document import answer_of_check
    from actordbg.judge.junit import junit_xml

    flags = dict(settings)
    if choosing.is_left_to_rank_0(flags):
        return
    how = chosen_format(format, as_json)
    check_page(junit)
    check_page(html)
    of_all = inputs.where
    store, inputs = choosing.opened(ctx, sampled(inputs))
    asked = choosing.asked_for(ctx, flags)
    order = choosing.chosen_order(inputs.order, False)
    plan = choosing.planned(store, kept(asked, flags), inputs, order)
    if not (quiet or how == "json") and (answers := choosing.ask_for_model(store, plan.spec, asked, flags)):
        asked = choosing.asked_for(ctx, flags)
        plan = choosing.planned(store, kept(asked, flags), inputs, order, answers)
    for reason, count in plan.skipped.items():
        output.note(f"left out {output.plural(count, 'dump')}: {reason}")
    if not plan.spec.inputs:
        raise choosing.nothing_to("check", store, inputs)
    of = len(plan.spec.inputs) if inputs.input_file else count_dumps(open_fresh(store), of_all)
    found = run_with_bar(store, plan.spec, golden, quiet=quiet or how == "json")
    recorded = choosing.recorded_model(store, plan.spec) if "model" not in flags.keys() | asked.sources.keys() else None
    answer = answer_of_check(found, of=of, recorded=recorded)
    answer = replace(answer, page=str(write_check_page(store, found, answer, html)))
    print_check(answer, how)
    if junit is not None:
        write_file(junit, junit_xml(found, answer).decode())
    if opened:
        open_page(Path(str(answer.page)))
    if github:
        annotate(found, answer, how)
    if not answer.good:
        raise typer.Exit(1)
