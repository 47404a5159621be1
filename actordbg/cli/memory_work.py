"""The work of `actordbg memory`: which processes are watched, and how the answer is said."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from actordbg.base.errors import EnvironmentProblem, UsageError
from actordbg.base.ids import resolve
from actordbg.cli import output
from actordbg.cli.page_file import write_page
from actordbg.document.blocks import Block, as_data
from actordbg.document.renderings import as_markdown, as_text
from actordbg.measure import watched as sources
from actordbg.measure import watching
from actordbg.measure.watched import Watched
from actordbg.measure.watching import Sample
from actordbg.records.memory_record import MemoryRecord
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store


@dataclass(frozen=True)
class WatchedSource:
    """What is watched, how it is read, and what it is called."""

    kind: str
    name: str
    watched: Watched
    read: watching.Reader
    replay_id: str | None = None


def chosen_source(
    store: Store,
    pids: list[int],
    replay: str | None,
    run: str | None,
    address: str | None,
    step_file: Path | None,
    rhythm: watching.Rhythm,
) -> WatchedSource:
    given = [name for name, value in (("--pid", pids), ("--replay", replay), ("--run", run)) if value]
    if len(given) > 1 or not (given or address) or (address and pids):
        raise UsageError("memory watch takes one of --pid, --replay and --run, or --ray", hint="name what to watch")
    if step_file is not None and not pids:
        raise UsageError("--step-file is for --pid: a replay and a run count their own steps", hint="leave it out")
    read = watching.local_reader(rhythm.unshared)
    if pids:
        return WatchedSource("processes", ", ".join(map(str, pids)), sources.OfPids(pids, step_file), read)
    replay_id = load_spec(store.require(), replay).replay_id if replay else None
    if address is not None:
        from actordbg.measure.watched import OfRay

        marks: Watched | None = sources.OfReplay(store.replays / replay_id) if replay_id else None
        on_ray = OfRay(address, rhythm.unshared, marks or (sources.OfRun(store.require(), run, anywhere=True) if run else None))
        return WatchedSource("ray", replay_id or run or address, on_ray, on_ray.read, replay_id)
    if replay_id:
        return WatchedSource("replay", replay_id, sources.OfReplay(store.replays / replay_id), read, replay_id)
    return WatchedSource("run", str(run), sources.OfRun(store.require(), str(run)), read)


def tell(silent: bool) -> Callable[[list[Sample]], None]:
    """Says once who is watched."""
    told: set[str] = set()

    def tell(samples: list[Sample]) -> None:
        if new := sorted({one.process for one in samples} - told):
            told.update(new)
            if not silent:
                output.note(f"watching {', '.join(new[:8])}{f' and {len(new) - 8} more' if len(new) > 8 else ''}; Ctrl-C ends it")

    return tell


def known(store: Store, name: str) -> tuple[MemoryRecord, Path]:
    """The record and the samples that a name means: a file, or an id in the store."""
    if "/" in name or name.endswith(".csv") or Path(name).is_file():
        return MemoryRecord("", "", None, "file", name, 0.0), Path(name)
    ids = sorted(path.stem for path in store.require().memory.glob("[!.]*.json"))
    found = resolve(name, ids, "watching of memory", made_by="memory watch")
    record = MemoryRecord.from_file(store.memory / f"{found}.json")
    path = watching.samples_path(store, record)
    if not path.is_file():
        raise EnvironmentProblem(
            f"the samples of {found} are gone: there is no {path}", hint="`actordbg memory watch` makes new ones"
        )
    return record, path


def say_answer(answer: object, blocks: Sequence[Block], chosen: str, html: Path | None) -> None:
    write_page(html, blocks)
    written = as_markdown if chosen == "md" else as_text
    told = vars(answer) | as_data(blocks) if chosen == "json" else answer
    output.emit(told, lambda _: output.say_lines(written(blocks)), chosen == "json")
