"""`actordbg check`, the command to start with: replay a sample of dumps and judge it by the laws and the truth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from actordbg.cli import output
from actordbg.cli.options import option, require_good
from actordbg.cli.output import open_page, write_file
from actordbg.cli.replay_options import ChosenInputs
from actordbg.cli.setting_options import NONE, Given, takes_settings

_FOR = "CI output"


@takes_settings("check")
def check(
    ctx: typer.Context,
    paths: list[Path] | None = typer.Argument(
        None, metavar="PATH", help="A store, a folder of old pickles, dump files or packs (default: the store's dumps)."
    ),
    inputs: ChosenInputs = ChosenInputs(),
    settings: Given = NONE,
    of_run: bool = option(
        False,
        "Also judge the run's own outputs (--with-outputs); --model must hold that step's weights.",
        "--recorded",
        "--golden",
    ),
    junit: Path | None = option(None, "Also write JUnit XML there.", heading=_FOR),
    github: bool = option(False, "Emit GitHub Actions annotations.", heading=_FOR, rank=30),
) -> None:
    """Replay a sample of dumps: do they run? Are they right?

    First checks the laws of the recorded data (`actordbg lint`). Picks the most diverse dumps (by length, padding, role and
    trigger; 8 by default), replays them, checks the laws (invariance checks), and compares the results with the truth: the same
    weights, one unpadded row at a time, eager, fp32. Prints one verdict, what was not checked, three figures and the next
    command, and writes an HTML page. The replay stays in the store.

    Exit code: 1 if anything is wrong or nothing could be checked; 5 if no dump was selected.

    Example: actordbg check input_dumps/ --open

    Example: actordbg check --where "rank=0" --model /models/llama-3.1-8b --packing
    """
    from actordbg.catalog.query import count_dumps, open_fresh
    from actordbg.cli import check_work as work
    from actordbg.cli import replaying
    from actordbg.document.blocks import Items
    from actordbg.document.page import check_place
    from actordbg.judge.check import check_data
    from actordbg.judge.explanation import explain
    from actordbg.judge.exports import junit_xml

    flags = replaying.flags_of(settings)
    check_place(junit)
    inputs = work.with_paths(ctx, paths or [], inputs)
    of_all = inputs.where
    store, inputs = replaying.opened(ctx, work.sampled(inputs))
    _, plan, recorded = replaying.asked_and_planned(ctx, store, flags, inputs, judged=True, ask=not output.wanted.silent)
    replaying.say_skipped(plan.skipped)
    if not plan.spec.inputs:
        raise replaying.nothing_to("check", store, inputs)
    of = len(plan.spec.inputs) if inputs.input_file else count_dumps(open_fresh(store), of_all)
    findings = None if inputs.input_file else work.lint_newest(store, of_all)
    checked = replace(work.run_with_bar(store, plan.spec, of_run), lint=findings)
    verdict = checked.verdict(of=of, recorded=recorded)
    explained = explain(store, checked, verdict)
    page, blocks = work.write_check_page(store, checked, verdict, explained)
    data = check_data(checked, verdict, of=of) | {"page": str(page), "explanation": explained.data}
    facts = Items((f"configuration: {data['configuration']}",))
    work.print_check([verdict, facts], blocks, data)
    if junit is not None:
        write_file(junit, junit_xml(checked, verdict).decode())
    if output.wanted.opened:
        open_page(page)
    if github:
        work.annotate(checked, [verdict, facts])
    require_good(verdict.good)
