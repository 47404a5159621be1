"""`actordbg dump verify`: read dumps whole, and name every one that is not what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from actordbg.base.errors import CorruptDump
from actordbg.cli import output
from actordbg.cli.index import damage_line
from actordbg.cli.options import Json, Quiet, Where, store_of

if TYPE_CHECKING:
    from actordbg.catalog.damage import Damaged


@dataclass
class VerifyAnswer:
    """How many files were read whole, and which of them are damaged."""

    checked: int
    bytes: int
    damaged: list[Damaged]


def verify(
    ctx: typer.Context,
    where: Where = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=0, help="Threads; 0 for one for each processor.")] = 0,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check dump files for damage.

    Reads each dump whole: header, decompression, SHA-256, safetensors, tensor specs. Without --where it checks every file,
    those that could not be indexed too. Exit code 1 if a dump is damaged.

    Example: actordbg dump verify --where "run='ppo-1'"
    """
    from actordbg.catalog.query import open_fresh
    from actordbg.dumps.verify import paths_to_verify, verify_files

    catalog = open_fresh(store_of(ctx), where)
    paths = paths_to_verify(catalog, where)
    damaged, size = [], 0
    with output.progress("verifying", len(paths), quiet=quiet or as_json) as advance:
        for _, count, problem in verify_files(catalog.store, paths, jobs):
            advance(1)
            size += count
            damaged += [problem] if problem else []
    output.emit(VerifyAnswer(len(paths), size, sorted(damaged, key=lambda item: item.path)), _render, as_json)
    if damaged:
        raise typer.Exit(1)


def _render(answer: VerifyAnswer) -> None:
    for item in answer.damaged:
        output.say(damage_line(item))
    good = answer.checked - len(answer.damaged)
    output.say(
        f"{output.plural(answer.checked, 'dump')} checked ({output.human_bytes(answer.bytes)}): "
        f"{good:,} good, {len(answer.damaged):,} damaged"
    )
    if any(item.code == CorruptDump.code for item in answer.damaged):
        output.note("`actordbg dump prune --damaged` removes those whose header is broken")
