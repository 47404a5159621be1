"""`actordbg memory watch|show|compare|ls`: memory of processes over time, and where two series part."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from actordbg.base.units import parse_seconds
from actordbg.cli import output
from actordbg.cli.options import FormatOption, Json, Limit, Quiet, chosen_format, require_some, store_of
from actordbg.cli.page_file import HtmlFile, check_page

Name = Annotated[str, typer.Argument(metavar="[FILE|ID|last]", help="A file of samples, or what `memory ls` lists.")]


def watch(
    ctx: typer.Context,
    pid: Annotated[list[int] | None, typer.Option("--pid", metavar="P", min=1, help="A process; may be repeated.")] = None,
    replay: Annotated[str | None, typer.Option("--replay", metavar="ID|last", help="The workers of a running replay.")] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help="The recording processes of a run.")] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="The actors of a Ray cluster on all its nodes; --replay or --run add steps and dumps.")
    ] = False,
    address: Annotated[str, typer.Option("--address", metavar="ADDRESS", help="The Ray cluster.")] = "auto",
    step_file: Annotated[
        Path | None, typer.Option("--step-file", metavar="FILE", help="With --pid: a file that gets a line for each step.")
    ] = None,
    interval: Annotated[str, typer.Option("--interval", metavar="TIME", help="Between two rounds, e.g. 500ms, 10s.")] = "1s",
    lasting: Annotated[
        str | None, typer.Option("--for", metavar="TIME", help="End after this time (default: when the processes end).")
    ] = None,
    no_uss: Annotated[
        bool, typer.Option("--no-uss", help="Leave USS out; reading it holds a large process up for milliseconds.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the samples here, and nothing into the store.")
    ] = None,
    html: HtmlFile = None,
    format: FormatOption = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Sample the memory of running processes over time.

    RSS, USS, CUDA memory in use and in reserve of each process, tagged with the step and the dump that was running, as a CSV
    file. Ends with the processes, after --for, or with Ctrl-C; what was sampled stays. Says who grows, and by how much a step.

    Example: actordbg memory watch --replay last --interval 200ms
    """
    from actordbg.cli.memory_work import chosen_source, say_answer, tell
    from actordbg.measure import watching
    from actordbg.measure.memory_document import watch_page
    from actordbg.measure.memory_samples import read_samples

    check_page(html)
    chosen = chosen_format(format, as_json)
    most = None if lasting is None else parse_seconds("--for", lasting)
    rhythm = watching.Rhythm(parse_seconds("--interval", interval), most, not no_uss)
    store = store_of(ctx)
    what = chosen_source(store, pid or [], replay, run, address if ray else None, step_file, rhythm)
    record = watching.new_record(what.kind, what.name, rhythm, what.replay_id)
    if out is None:
        watching.save(store.create().require_writable(), record)
    path = out or watching.samples_path(store, record)
    watching.watch_into(path, watching.rounds(what.watched, what.read, rhythm), tell(quiet or chosen == "json"))
    record = watching.finished(record, path, what.watched.notes())
    if out is None:
        watching.save(store, record)
    output.note(f"wrote {path}")
    say_answer(record, watch_page(record, read_samples(path)), chosen, html)
    require_some(len(record.processes), False)


def show(
    ctx: typer.Context, name: Name = "last", html: HtmlFile = None, format: FormatOption = None, as_json: Json = False
) -> None:
    """Show what was sampled: peaks, and who grows.

    Example: actordbg memory show last --html memory.html
    """
    from actordbg.cli.memory_work import known, say_answer
    from actordbg.measure import watching
    from actordbg.measure.memory_document import watch_page
    from actordbg.measure.memory_samples import read_samples

    check_page(html)
    record, path = known(store_of(ctx), name)
    record = watching.finished(record, path, list(record.notes)) if not record.processes else record
    say_answer(record, watch_page(record, read_samples(path)), chosen_format(format, as_json), html)
    require_some(len(record.processes), False)


def compare(
    ctx: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="A file of samples, or what `memory ls` lists.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    of: Annotated[
        Literal["rss", "uss", "cuda_used", "cuda_reserved"] | None,
        typer.Option("--of", help="Only this quantity (default: all that both have)."),
    ] = None,
    threshold: Annotated[
        float, typer.Option("--threshold", metavar="X", min=0, max=1, help="Peaks that differ by more than this share part.")
    ] = 0.05,
    html: HtmlFile = None,
    format: FormatOption = None,
    as_json: Json = False,
) -> None:
    """Say where the memory of two runs parts.

    For each process and quantity: peaks, growth by step (by second where steps are not known), and the step and dump from
    which on they are apart. Exit code 1 if they part, or have nothing in common.

    Example: actordbg memory compare before.csv after.csv --html memory.html
    """
    from actordbg.cli.memory_work import known, say_answer
    from actordbg.measure.memory_compare import ALIKE, compare_samples
    from actordbg.measure.memory_document import compare_page
    from actordbg.measure.memory_samples import read_samples

    check_page(html)
    store = store_of(ctx)
    ours, theirs = (read_samples(known(store, name)[1]) for name in (a, b))
    answer = compare_samples((a, b), ours, theirs, threshold, [of] if of else ())
    say_answer(answer, compare_page(answer, ours, theirs), chosen_format(format, as_json), html)
    if answer.verdict != ALIKE:
        raise typer.Exit(1)


def ls(ctx: typer.Context, limit: Limit = 20, as_json: Json = False) -> None:
    """List what was watched, the newest first.

    Example: actordbg memory ls
    """
    from actordbg.catalog.query import open_fresh, table_rows

    newest = f"1 ORDER BY created_at DESC, memory_id DESC LIMIT {limit or -1}"
    rows = table_rows(open_fresh(store_of(ctx)), "memory_watch", newest)
    columns = ("id", "what", "of", "processes", "samples", "steps", "peak RSS", "growth a step")
    shown = [
        (one.memory_id, one.kind, one.watched, one.processes, one.samples, one.steps, output.human_bytes(one.peak_rss),
         output.human_bytes(one.growth_per_step))
        for one in rows
    ]  # fmt: skip
    output.emit(rows, lambda _: output.table(columns, shown), as_json)
    require_some(len(rows), False)
