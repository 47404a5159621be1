"""What the commands that replay inputs share: options that choose the inputs, and the configuration that they run under."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from actordbg.base.errors import Unsupported, UsageError
from actordbg.catalog.query import dump_extent, open_fresh
from actordbg.cli import output
from actordbg.cli.options import settings_of
from actordbg.config.choices import installed_versions
from actordbg.config.replay_config import ReplayConfig
from actordbg.config.sources import Asked, build_config
from actordbg.replay.launch import surrounding_launcher
from actordbg.replay.plan import ORDERS, Plan, Row, make_plan
from actordbg.replay.selection import rows_of_catalog, rows_of_files
from actordbg.store.layout import Store

_PANEL = "The inputs"

MaxInputs = Annotated[
    int | None,
    typer.Option("--max-inputs", min=1, metavar="N", rich_help_panel=_PANEL, help="At most N inputs, in all workers together."),
]
InputFile = Annotated[
    list[Path] | None,
    typer.Option(
        "--input-file",
        metavar="FILE",
        rich_help_panel=_PANEL,
        help="Replay this dump file, pack, or PACK#ID; may be repeated.",
    ),
]
Order = Annotated[
    str | None,
    typer.Option("--order", metavar="time|length|shuffle", rich_help_panel=_PANEL, help="In which order (default: time)."),
]
Shuffle = Annotated[
    bool,
    typer.Option("--shuffle-inputs", rich_help_panel=_PANEL, help="The same as --order shuffle: every worker in its own."),
]
RandomSeed = Annotated[int, typer.Option("--random-seed", rich_help_panel=_PANEL, help="Of the shuffled order.")]


def chosen_order(order: str | None, shuffle: bool) -> str:
    """The order that --order and --shuffle-inputs come to; UsageError where they contradict each other."""
    if shuffle and order not in (None, "shuffle"):
        raise UsageError(f"--shuffle-inputs and --order {order} contradict each other", hint="give one of them")
    chosen = "shuffle" if shuffle else order or "time"
    if chosen not in ORDERS:
        raise UsageError(f"--order {chosen} is not known", hint=f"one of: {', '.join(ORDERS)}")
    return chosen


def is_left_to_rank_0(flags: dict[str, Any]) -> bool:
    """Under `deepspeed -m actordbg replay ...` this command runs once for each rank. Rank 0 supervises; the others leave.

    Rank 0 starts workers of its own, as many as the launcher started processes, with deepspeed where deepspeed did.
    """
    around = surrounding_launcher(os.environ)
    if around is None:
        return False
    if around.local_size < around.world_size:
        raise Unsupported(
            "a replay runs on one machine, and this launcher started processes on several",
            hint="run `actordbg replay --nproc N` on one of them, without a launcher",
        )
    if around.rank > 0:
        return True
    flags["nproc"] = flags.get("nproc") or around.world_size
    if around.deepspeed:
        flags["backend"] = flags.get("backend") or "deepspeed"
    return False


def asked_for(ctx: typer.Context, flags: Mapping[str, Any]) -> Asked:
    """The configuration of this invocation. What came from outside of the command line is said on standard error."""
    asked = build_config(settings_of(ctx), flags)
    if asked.sources:
        output.note(f"not from the command line: {asked.in_words}")
    return asked


def planned(
    store: Store,
    config: ReplayConfig,
    where: str | None,
    files: Sequence[Path],
    order: str,
    max_inputs: int | None,
    shuffle_seed: int,
) -> Plan:
    """The plan of the dumps that --where, --input-file and --max-inputs select."""
    if files and where is not None:
        raise UsageError("--where and --input-file exclude each other", hint="give one of them")
    rows: Sequence[Row]
    enough = None if config.align == "rank" else max_inputs  # of whole calls nobody knows how many rows they take
    rows = rows_of_files(store, files) if files else rows_of_catalog(open_fresh(store, where), where, order, enough)
    return make_plan(
        rows,
        config,
        order=order,
        max_inputs=max_inputs,
        shuffle_seed=shuffle_seed,
        where=where,
        command=shlex.join(["actordbg", *sys.argv[1:]]),
        versions=installed_versions(),
    )


def what_there_is(store: Store, where: str | None) -> str:
    """Why nothing matched, in terms of what the store holds."""
    count, shortest, longest = dump_extent(store)
    if not count:
        return "the store holds no dumps: `actordbg dump enable`, `dump import` or `dump create` bring some"
    what = f"no dump matches {where}" if where else "no dump can be replayed"
    return f"{what}; the store holds {output.plural(count, 'dump')} with seq_len {shortest} to {longest}"
