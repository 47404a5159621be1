"""`actordbg dump create`: make synthetic actor inputs where none were recorded yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from actordbg.cli import output
from actordbg.cli.options import Json, Quiet, store_of


@dataclass
class CreateAnswer:
    """The dumps that were made: their ids, and bytes on disk."""

    store: str
    run: str
    created: int
    bytes_stored: int
    dump_ids: list[str]


def create(
    ctx: typer.Context,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Calls to make for each rank.")] = 1,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Rows of each input, B.")] = 2,
    seq_len: Annotated[int, typer.Option("--seq-len", help="Positions of each row, S, padding included.")] = 512,
    action_len: Annotated[
        int | None,
        typer.Option("--action-len", help="Last positions that are actions, A (default S/2; 0: no action mask)."),
    ] = None,
    padding: Annotated[
        str, typer.Option("--padding", metavar="SIDE", help="left (prompts), right (responses), both or none.")
    ] = "both",
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Ranks to make them for.")] = 1,
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Token ids are below this.")] = 128_256,
    seed: Annotated[int, typer.Option("--seed", help="The same seed makes the same tensors.")] = 0,
    run: Annotated[str, typer.Option("--run", help="Name of the run.")] = "created",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make random inputs of chosen shapes.

    The dumps have the format of recorded ones, so every command takes them.

    Example: actordbg dump create --count 4 --batch-size 2 --seq-len 1024 --padding both --ranks 2
    """
    from actordbg.dumps.create import create_dumps
    from actordbg.formats.dump_record import SUFFIX

    store = store_of(ctx)
    with output.progress("creating", count * ranks, quiet=quiet or as_json) as advance:
        paths = create_dumps(
            store, count, batch_size, seq_len, action_len, padding, ranks, vocab_size, seed, run,
            on_progress=lambda done, total: advance(1),
        )  # fmt: skip
    ids = [path.name.removesuffix(SUFFIX) for path in paths]
    size = sum(path.stat().st_size for path in paths)
    output.emit(CreateAnswer(str(store.root), run, len(paths), size, ids), _render, as_json)


def _render(answer: CreateAnswer) -> None:
    output.say(
        f"{output.plural(answer.created, 'dump')} of run {answer.run} created, {output.human_bytes(answer.bytes_stored)}"
    )
    output.say(f"see them with: actordbg dump ls --where \"run='{answer.run}'\"")
