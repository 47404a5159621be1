"""`actordbg memory watch|compare`: memory of processes over time as a CSV file, and where two such files diverge."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from actordbg.base.errors import UsageError
from actordbg.base.option import Option
from actordbg.base.units import listed, new_replay_id, parse_seconds
from actordbg.cli import output
from actordbg.cli.options import repeated, require_some, store_of

if TYPE_CHECKING:
    from actordbg.measure.watched import Watched
    from actordbg.measure.watching import Sample


def watch(
    ctx: typer.Context,
    *,
    pid: Annotated[list[int] | None, Option(min=1)] = None,
    run: str | None = None,
    ray: bool = False,
    address: str | None = None,
    interval: str = "1s",
    lasting: Annotated[str | None, Option("--for")] = None,
    no_uss: bool = False,
) -> None:
    """Sample the memory of running processes over time.

    Writes RSS, USS, and used CUDA memory of each process to a CSV file (-o FILE.csv; default: memory-ID.csv here), tagged with
    the running step. Ends with the processes, after --for, or on Ctrl-C, which keeps the samples. Then
    shows which processes grow, and by how much per step.

    Example: actordbg memory watch --run ppo-7b --interval 200ms -o before.csv

    Args:
        pid (P): Watch this process; repeatable.
        run (NAME): Watch the recording processes of a run.
        ray: Watch the actors on all nodes of a Ray cluster; --run adds ranks and steps.
        address (auto|HOST:PORT|ray://...): Ray cluster (default: RAY_ADDRESS, else the cluster of this machine).
        interval (TIME): Time between samples, e.g. 500ms, 10s.
        lasting (TIME): End after this time (default: when the processes end).
        no_uss: Skip USS, whose reading blocks a large process for milliseconds.
    """
    from actordbg.measure import watched, watching

    announced = set[str]()

    def tell(samples: list[Sample]) -> None:
        """Print the names of newly watched processes."""
        new = sorted({sample.process for sample in samples} - announced)
        announced.update(new)
        more = f" and {len(new) - 8} more" if len(new) > 8 else ""
        if new and not output.wanted.silent:
            output.note(f"watching {listed(new[:8])}{more}; Ctrl-C ends it")

    path = Path(f"memory-{new_replay_id()}.csv")
    if tables := [path for path, form in output.wanted.files.items() if form == "csv"]:
        if len(tables) > 1:
            raise repeated("-o FILE.csv")
        path = tables[0]
        output.wanted = replace(output.wanted, files={file: form for file, form in output.wanted.files.items() if file != path})
    most = None if lasting is None else parse_seconds("--for", lasting)
    interval_s = parse_seconds("--interval", interval)
    if bool(pid) == bool(run or ray):
        raise UsageError("memory watch needs one of --pid, --run and --ray", hint="for example --run ppo-7b")
    recording = watched.OfRun(store_of(ctx).require(), run, anywhere=ray) if run else None
    source: Watched | None = watched.OfPids(pid) if pid else recording
    if ray or source is None:
        source = watched.OfRay(address, recording)
    source.unshared = not no_uss
    watching.watch_into(path, watching.rounds(source, interval_s, most), tell)
    output.note(f"wrote {path}")
    _one(path, source.notes())


def compare(
    a: Path,
    b: Path | None = None,
    *,
    of: Literal["rss", "uss", "cuda_used"] | None = None,
    threshold: Annotated[float, Option(min=0, max=1)] = 0.05,
) -> object:
    """Find where two runs' memory diverges.

    With one file, shows which processes grow. Shows, per process and quantity: peaks, growth per step (per second if steps are
    unknown), and the step where the recordings diverge.

    Exit code: 1 if they diverge, or have nothing in common.

    Example: actordbg memory compare before.csv after.csv

    Args:
        a (A): Sample file of `memory watch`.
        b (B): Sample file to compare with A (default: show A alone).
        of: Compare only this quantity (default: all that both have).
        threshold: Relative difference of peaks above which they diverge.
    """
    from actordbg.document.command_result import CommandResult
    from actordbg.measure.memory_document import ALIKE, compare_page, compare_samples
    from actordbg.measure.watching import read_samples

    if b is None:
        _one(a, [])
        return None
    answer = compare_samples((str(a), str(b)), read_samples(a), read_samples(b), threshold, [of] if of else ())
    return CommandResult(answer.verdict == ALIKE, vars(answer), compare_page(answer))


def _one(path: Path, notes: list[str]) -> None:
    """Print what a sample file shows: figures of each process, and which grow."""
    from actordbg.document.command_result import CommandResult
    from actordbg.measure.memory_document import watch_page
    from actordbg.measure.watching import figures, read_samples, unknown_of

    processes = figures(read_samples(path))
    notes += unknown_of(processes)
    data = {"samples": str(path), "processes": processes, "notes": notes}
    output.say_answer(CommandResult(True, data, watch_page(str(path), processes, notes)))
    require_some(len(processes))
