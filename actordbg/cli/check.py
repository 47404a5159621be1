"""`actordbg check`, the command to start with: replay a sample of dumps and judge it by the laws and the truth."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actordbg.base.option import Option
from actordbg.cli import output
from actordbg.cli.options import Given, require_good, store_of
from actordbg.cli.output import say, say_answer, write_file
from actordbg.cli.replay_options import ChosenInputs

if TYPE_CHECKING:
    from actordbg.api.checks import CheckResult

_FOR = "CI output"


def check(
    ctx: typer.Context,
    paths: list[Path] | None = None,
    *,
    inputs: ChosenInputs,
    settings: Given,
    of_run: Annotated[bool, Option("--recorded")] = False,
    columns: Annotated[list[str] | None, Option("--column", rank=30)] = None,
    watch: Annotated[bool, Option(rank=30)] = False,
    junit: Annotated[Path | None, Option(heading=_FOR)] = None,
    github: Annotated[bool, Option(heading=_FOR, rank=30)] = False,
) -> None:
    """Replay a few dumps: do they run? Are they right?

    First checks the laws of the recorded data (`actordbg lint`). Picks the most diverse dumps (by length, padding, role and
    trigger; 8 by default), replays them, checks the laws (invariance checks), and compares the results with the truth: the same
    weights, one unpadded row at a time, eager, fp32. Prints one verdict, what was not checked, three figures and the next
    command, and writes an HTML page. The replay stays in the store.

    Exit code: 1 if anything is wrong or nothing could be checked; 5 if no dump was selected.

    Example: actordbg check input_dumps/ --open

    Example: actordbg check --where "rank=0" --model /models/llama-3.1-8b --packing

    Args:
        paths (PATH): A store, dump files or packs; or old pickles, files and folders of a run, which are imported first (default:
            the store's dumps).
        of_run: Also judge the run's own outputs (--with-outputs); --model must hold that step's weights.
        columns (PART=NAME): The name of a part of a row in a table, such as ids=input_ids, tokenizer=MODEL; repeatable.
        watch: Follow the files of a run as `lint --watch` does: replay nothing.
        junit: Also write JUnit XML there.
        github: Emit GitHub Actions annotations.
    """
    from actordbg.api.run_files import store_of_paths
    from actordbg.cli.terminal import Terminal, opened
    from actordbg.document.page import check_place

    if watch:
        seen = opened(ctx).lint(*map(str, paths or []), columns=columns or [], watch=True)
        say_answer(seen)
        return require_good(seen.ok)
    check_place(junit)
    usual, chosen = store_of_paths(store_of(ctx), paths or [], inputs.selection, Terminal(ctx), columns or [])
    if usual.root != store_of(ctx).root:
        output.wanted = replace(output.wanted, store=str(usual.root))
    ctx.find_root().params["store"] = str(usual.root)
    store = opened(ctx)
    answer = store.check(chosen, recorded=of_run, **settings)
    page = output.wanted.page or store.keep_page(answer.with_commands(output.on_typed_store))
    say_answer(replace(answer, data={**answer.data, "page": str(page)}), page)
    if junit is not None:
        write_file(junit, answer.to_junit())
    if github:
        _annotate(answer)
    require_good(answer.ok)


def _annotate(answer: CheckResult) -> None:
    """Print GitHub annotations, and append the result to the workflow's summary page if there is one."""
    for line in answer.to_annotations():
        (output.note if output.wanted.json else say)(line)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(answer.to_markdown())
