"""`actordbg check`, the command to start with: replay a sample of dumps and judge it by the laws and the truth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from actordbg.cli import output
from actordbg.cli.options import option, require_good
from actordbg.cli.output import say_answer, write_file
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
    from actordbg.api.checks import check_answer, lint_newest
    from actordbg.catalog.query import count_dumps, open_fresh
    from actordbg.cli import check_work as work
    from actordbg.cli import replaying
    from actordbg.document.blocks import verdict_in
    from actordbg.document.page import check_place
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
    with output.progress("reading", None) as advance:
        findings = None if inputs.input_file else lint_newest(store, of_all, on_dump=advance)
    checked = replace(work.run_with_bar(store, plan.spec, of_run), lint=findings)
    answer = check_answer(store, checked, of=of, recorded=recorded)
    page = work.write_check_page(store, answer)
    say_answer(replace(answer, data={**answer.data, "page": str(page)}), page)
    if junit is not None:
        verdict = verdict_in(answer.blocks)
        assert verdict is not None
        write_file(junit, junit_xml(checked, verdict).decode())
    if github:
        work.annotate(checked, answer.blocks)
    require_good(answer.ok)
