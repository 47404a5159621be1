"""`actordbg families`: which families of models this trainer and these libraries compute rightly, on small random models."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from actordbg.actor.family_models import FAMILIES, build_families
from actordbg.base.errors import UsageError
from actordbg.cli import output
from actordbg.cli.input_options import asked_for
from actordbg.cli.matrix import kept
from actordbg.cli.options import Format, FormatOption, Json, Quiet, chosen_format, command_line
from actordbg.cli.setting_options import NONE, Given, takes_settings
from actordbg.config.replay_config import AXES, ReplayConfig
from actordbg.formats.store_files import atomic_write
from actordbg.matrix.axes import Axes, combinations
from actordbg.matrix.family_document import families_document
from actordbg.matrix.family_matrix import (
    SHAPES,
    USUAL_AXES,
    FamilyResult,
    Subject,
    make_inputs,
    not_built,
    run_family,
    subject_of,
)
from actordbg.matrix.run_matrix import MatrixEvent, Surroundings
from actordbg.replay.warm_groups import WarmGroups
from actordbg.report.renderings import as_markdown, as_text
from actordbg.store.layout import Store


@dataclass
class FamiliesAnswer:
    """What became of each family; `good`: every one is right in every cell that could run."""

    good: bool
    families: tuple[FamilyResult, ...]


@takes_settings("families")
def families(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME|DIR]...", help="Families, or folders with a config.json (default: all that are known)."),
    ] = None,
    settings: Given = NONE,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="DIR", help="Work in DIR (new or empty) and keep it; otherwise all is removed."),
    ] = None,
    write: Annotated[Path | None, typer.Option("--write", metavar="PAGE", help="Write the answer as Markdown there too.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the families that are known, and run nothing.")] = False,
    format: FormatOption = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Find the families of models that go through this trainer rightly.

    Builds a small random model of each family, without a network, and runs a matrix on small made-up inputs: fp32 and bf16, sdpa
    and eager, packed and not. Every cell is asked for its laws and compared with the truth. A folder's config.json gives a small
    model of that configuration, with your own windows, scalings and flags; its weights are not read.

    Seconds for a family. Exit code 1 if one of them is wrong or fails.

    Example: actordbg families qwen3_5 mixtral --packing on
    """
    how = chosen_format(format, as_json)
    if list_:
        output.table(["family", "model type", "models"], [(name, one.model_type, one.known_as) for name, one in FAMILIES.items()])
        return
    subjects = {one.name: one for one in map(subject_of, names or FAMILIES)}
    flags = dict(settings)
    given = {name: AXES[name].list_of(str(flags.pop(name))) for name in AXES if name in flags}
    axes = {name: values for name in AXES if (values := given.get(name) or USUAL_AXES.get(name))}
    base = kept(asked_for(ctx, flags), flags)
    base = replace(base, backward=base.backward is not False)
    signal.signal(signal.SIGTERM, _interrupt)
    with _folder(keep) as folder:
        results = _run(folder, tuple(subjects.values()), base, axes, quiet=quiet or how == "json")
    answer = FamiliesAnswer(all(one.good for one in results), tuple(results))
    _print(answer, how)
    if write is not None:
        atomic_write(write, as_markdown(families_document(results)).encode())
    if not answer.good:
        raise typer.Exit(1)


def _run(folder: Path, subjects: tuple[Subject, ...], base: ReplayConfig, axes: Axes, *, quiet: bool) -> list[FamilyResult]:
    """Build the models, then run one family after the other in the same worker process."""
    store, results = Store(folder / "store"), []
    make_inputs(store)
    models = {one.name: folder / "models" / one.name for one in subjects}
    total = len(subjects) * len(SHAPES) * len(combinations(base, axes))
    with output.progress("families", total, quiet=quiet) as advance, WarmGroups(reopen=True) as warm:
        advance(0, note="building small models")
        problems = build_families({models[one.name]: one.config for one in subjects})
        for one in subjects:
            if why := problems.get(models[one.name]):
                results.append(not_built(one, why))
                continue
            around = Surroundings(None, on_event=_follow(one.name, advance), warm=warm)
            results.append(run_family(store, one, models[one.name], base, axes, around, command_line()))
    return results


def _follow(name: str, advance: Callable[..., None]) -> Callable[[MatrixEvent], None]:
    def on_event(event: MatrixEvent) -> None:
        if event.kind == "input":
            advance(1, note=f"{name}: {event.cell.name}")

    return on_event


def _print(answer: FamiliesAnswer, how: Format) -> None:
    if how == "json":
        output.emit(answer, lambda _: None, True)
    else:
        blocks = families_document(answer.families)
        output.say_lines(as_markdown(blocks) if how == "md" else as_text(blocks))


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """The folder to work in; it is removed afterwards unless it is to be kept."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="actordbg-families-") as folder:
            yield Path(folder)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise UsageError(f"{keep} is not empty", hint="name a new folder: this command writes only where nothing is")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()
    output.note(f"kept: {keep}  (its store is {keep / 'store'})")


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """Being asked to end is an interruption: processes and files go first."""
    raise KeyboardInterrupt
