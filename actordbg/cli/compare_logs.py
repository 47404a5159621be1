"""`actordbg compare-logs`: compares the losses of trainings, step by step, by their logs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from actordbg.base.errors import UsageError
from actordbg.cli import output
from actordbg.cli.options import Json, Limit
from actordbg.cli.page_file import HtmlFile, check_page, write_page


def compare_logs(
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG LOG...",
            help="Logs, plain or .gz; - for standard input; TensorBoard's event files or their folder; W&B's .csv (FILE#RUN for "
            "one run of it) or .jsonl.",
        ),
    ],
    each: Annotated[bool, typer.Option("--each", help="Each against each (default: all against the first).")] = False,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="What to compare (default: the first that both have of gpt_loss, loss, policy_loss, act_loss, actor_loss, "
            "critic_loss, loss_mean, then any other loss).",
        ),
    ] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", metavar="X", help="Values that differ relatively by this or more are too far apart.")
    ] = 0.05,
    rule: Annotated[
        str,
        typer.Option(
            "--rule",
            metavar="first-mean-last|every-step|compare-backends",
            help="What decides: first value, mean and last value; every step; or exactly what the script compare_backends.py "
            "decides.",
        ),
    ] = "first-mean-last",
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw the curves: .svg, .png or .pdf.")] = None,
    html: HtmlFile = None,
    limit: Limit = 10,
    as_json: Json = False,
) -> None:
    """Compare the losses of trainings, step by step.

    Reads the losses out of the trainings' logs, progress bars included, out of TensorBoard's files and W&B's exports. Any number
    of logs: all are compared with the first. A relative difference is |a - b| / max(|a|, |b|). Names the steps that reach
    --threshold, the largest first, and says whether the losses fall.
    Exit code 1 if the rule is not met, a value is NaN or infinite, or the logs have fewer than three steps in common.

    Example: actordbg compare-logs deepspeed.log fsdp2.log fsdp2_tp2.log --threshold 0.05 --plot losses.png
    """
    from actordbg.document import chart_file
    from actordbg.document.renderings import as_text
    from actordbg.measure.align_logs import compare_many, together
    from actordbg.measure.exported_logs import is_exported, read_exported
    from actordbg.measure.log_document import log_charts, logs_page
    from actordbg.measure.log_lines import read_log

    check_page(html)
    chart_file.check("--plot", plot)
    if len(logs) < 2:
        raise UsageError("one log has nothing to be compared with", hint="name two or more")
    if logs.count("-") > 1:
        raise UsageError("standard input cannot be both logs", hint="name a file for one of them")
    read = [read_exported(path, metric) if is_exported(path) else read_log(path, metric) for path in logs]
    pairs = compare_many(read, each=each, metric=metric, threshold=threshold, rule=rule, limit=limit)
    charts = log_charts(pairs, read) if html or plot else []
    page = logs_page(pairs, charts)
    whole = together(pairs)
    output.emit(pairs[0] if len(logs) == 2 else whole, lambda _: output.say_lines(as_text(page)), as_json)
    write_page(html, page)
    if plot is not None and chart_file.save(charts, plot):
        output.note(f"wrote {plot}")
    if not whole.good:
        raise typer.Exit(1)
