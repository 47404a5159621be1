"""`actordbg memory watch|show|compare|ls`: memory of processes over time, and where two recordings diverge."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from actordbg.base.errors import EnvironmentProblem, StoreProblem, UsageError
from actordbg.base.units import new_replay_id, parse_seconds
from actordbg.cli import output
from actordbg.cli.options import (
    Limit,
    argument,
    option,
    repeated,
    require_some,
    store_of,
)
from actordbg.cli.output import human_bytes, note, rows_as_json, say_answer, table

if TYPE_CHECKING:
    from actordbg.measure.watched import Watched
    from actordbg.measure.watching import Sample
    from actordbg.records.memory_record import MemoryRecord
    from actordbg.store.layout import Store

Name = Annotated[str, typer.Argument(metavar="FILE|ID", help="Sample file, an id from `memory ls`, or last.")]


def watch(
    ctx: typer.Context,
    pid: list[int] | None = option(None, "Watch this process; repeatable.", metavar="P", min=1),
    replay: str | None = option(None, "Watch the workers of a running replay.", metavar="ID|last"),
    run: str | None = option(None, "Watch the recording processes of a run.", metavar="NAME"),
    ray: bool = option(False, "Watch the actors on all nodes of a Ray cluster; --replay or --run add steps and dumps."),
    address: str = option("auto", "Address of the Ray cluster.", metavar="ADDRESS"),
    step_file: Path | None = option(None, "With --pid: a file to which the job adds a line per step."),
    interval: str = option("1s", "Time between samples, e.g. 500ms, 10s.", metavar="TIME"),
    lasting: str | None = option(None, "End after this time (default: when the processes end).", "--for", metavar="TIME"),
    no_uss: bool = option(False, "Skip USS, whose reading blocks a large process for milliseconds."),
    out: Path | None = option(None, "Alias of -o FILE.csv: the samples, instead of in the store.", hidden=True),
) -> None:
    """Sample the memory of running processes over time.

    Writes RSS, USS, and used and reserved CUDA memory of each process to a CSV file, tagged with the running step and dump. Ends
    with the processes, after --for, or on Ctrl-C, which keeps the samples. Then shows which processes grow, and by how much per
    step.

    Example: actordbg memory watch --replay last --interval 200ms
    """
    from actordbg.formats.dump_record import now_timestamp
    from actordbg.measure import watched, watching
    from actordbg.records.memory_record import MemoryRecord
    from actordbg.replay.supervise import load_spec

    announced = set[str]()

    def tell(samples: list[Sample]) -> None:
        """Print the names of newly watched processes."""
        new = sorted({sample.process for sample in samples} - announced)
        announced.update(new)
        if new and not output.wanted.silent:
            note(f"watching {', '.join(new[:8])}{f' and {len(new) - 8} more' * (len(new) > 8)}; Ctrl-C ends it")

    if tables := [path for path in output.wanted.files if output.form_of(path) == "csv"]:
        if len(tables) > 1 or out is not None:
            raise repeated("-o FILE.csv")
        out, output.wanted = tables[0], replace(output.wanted, files=tuple({*output.wanted.files} - {*tables}))
    most = None if lasting is None else parse_seconds("--for", lasting)
    interval_s = parse_seconds("--interval", interval)
    store = store_of(ctx)
    if step_file is not None and not pid:
        raise UsageError("--step-file needs --pid: a replay and a run count their own steps", hint="drop --step-file")
    given = [value for value in (pid, replay, run) if value]
    if len(given) > 1 or not (given or ray) or (ray and pid):
        raise UsageError("memory watch needs one of --pid, --replay and --run, or --ray", hint="for example --replay last")
    replay_id = load_spec(store.require(), replay).replay_id if replay else None
    kind, name = "replay" if replay_id else "run", replay_id or run or address
    source: Watched | None = None
    if pid:
        kind, name, source = "processes", ", ".join(map(str, pid)), watched.OfPids(pid, step_file)
    elif replay_id:
        source = watched.OfReplay(store.replays / replay_id)
    elif run:
        source = watched.OfRun(store.require(), run, anywhere=ray)
    if ray or source is None:
        kind, source = "ray", watched.OfRay(address, source)
    source.unshared = not no_uss
    record = MemoryRecord(new_replay_id(), now_timestamp(), None, kind, name, interval_s, replay_id)
    if out is None:
        watching.save(store.create().require_writable(), record)
    path = out or watching.samples_path(store, record)
    watching.watch_into(path, watching.rounds(source, interval_s, most), tell)
    record = watching.finished(record, path, source.notes())
    if out is None:
        watching.save(store, record)
    note(f"wrote {path}")
    _say_watched(record, path)


def show(ctx: typer.Context, name: Name = "last") -> None:
    """Show recorded samples: peaks and growth.

    Example: actordbg memory show last --html memory.html
    """
    from actordbg.measure import watching

    record, path = _known(store_of(ctx), name)
    record = record if record.processes else watching.finished(record, path, list(record.notes))
    _say_watched(record, path)


def compare(
    ctx: typer.Context,
    a: str = argument(..., "A", "Sample file, or an id from `memory ls`."),
    b: str = argument(..., "B", "Sample file or id to compare with A."),
    of: Literal["rss", "uss", "cuda_used", "cuda_reserved"] | None = option(
        None, "Compare only this quantity (default: all that both have)."
    ),
    threshold: float = option(0.05, "Relative difference of peaks above which they diverge.", min=0, max=1),
) -> object:
    """Find where two runs' memory diverges.

    Shows, per process and quantity: peaks, growth per step (per second if steps are unknown), and the step and dump where the
    recordings diverge.

    Exit code: 1 if they diverge, or have nothing in common.

    Example: actordbg memory compare before.csv after.csv --html memory.html
    """
    from actordbg.document.command_result import CommandResult
    from actordbg.measure.memory_document import ALIKE, compare_page, compare_samples
    from actordbg.measure.watching import read_samples

    store = store_of(ctx)
    ours, theirs = (read_samples(_known(store, name)[1]) for name in (a, b))
    answer = compare_samples((a, b), ours, theirs, threshold, [of] if of else ())
    return CommandResult(answer.verdict == ALIKE, vars(answer), compare_page(answer, ours, theirs))


def ls(ctx: typer.Context, limit: Limit = 20) -> None:
    """List memory recordings, newest first.

    Example: actordbg memory ls
    """
    from actordbg.records.memory_record import MemoryRecord

    rows = []
    for path in sorted(store_of(ctx).require().memory.glob("[!.]*.json"), reverse=True)[: limit or None]:
        try:
            rows.append(_summary(MemoryRecord.from_file(path)))
        except StoreProblem as error:
            note(f"skipped: {error.message}")
    columns = ("id", "what", "of", "processes", "samples", "steps", "peak RSS", "growth per step")
    names = ("memory_id", "kind", "watched", "processes", "samples", "steps")
    if not rows_as_json(rows):
        sizes = [(human_bytes(row["peak_rss"]), human_bytes(row["growth_per_step"])) for row in rows]
        table(columns, [(*map(row.get, names), *size) for row, size in zip(rows, sizes, strict=True)])
    require_some(len(rows))


def _summary(record: MemoryRecord) -> dict[str, Any]:
    """Return the record with the number of its processes, and their highest RSS and fastest growth of any size, in bytes."""
    sizes = [(name, size) for process in record.processes for name, size in process.sizes.items()]
    growths = [size.growth for _, size in sizes if size.growth is not None and size.growth.grows]
    return vars(record) | {
        "processes": len(record.processes),
        "samples": sum(process.samples for process in record.processes),
        "steps": max((process.steps for process in record.processes), default=0),
        "peak_rss": max((size.peak for name, size in sizes if name == "rss"), default=None),
        "growth_per_step": max((growth.slope for growth in growths if growth.unit == "step"), default=None),
    }


def _known(store: Store, name: str) -> tuple[MemoryRecord, Path]:
    """Resolve a sample file or a recording's id to its record and the path of its samples."""
    from actordbg.measure.watching import samples_path
    from actordbg.records.memory_record import MemoryRecord

    if "/" in name or name.endswith(".csv") or Path(name).is_file():
        return MemoryRecord("", "", None, "file", name, 0.0), Path(name)
    record = MemoryRecord.named(store.require().memory, name, "memory watch")
    path = samples_path(store, record)
    if not path.is_file():
        raise EnvironmentProblem(
            f"the samples of {record.memory_id} are gone: no {path}", hint="run `actordbg memory watch` to record new ones"
        )
    return record, path


def _say_watched(record: MemoryRecord, path: Path) -> None:
    from actordbg.document.command_result import CommandResult
    from actordbg.measure.memory_document import watch_page
    from actordbg.measure.watching import read_samples

    say_answer(CommandResult(True, vars(record), watch_page(record, read_samples(path))))
    require_some(len(record.processes))
