"""`actordbg dump prune`: remove dumps that are no longer wanted."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from actordbg.base.errors import UsageError
from actordbg.base.units import parse_size
from actordbg.cli import output
from actordbg.cli.options import AllowEmpty, Json, OfRun, Where, Yes, require_selected, store_of

if TYPE_CHECKING:
    from actordbg.dumps.prune import PrunePlan


_SHOWN = 20


def prune(
    ctx: typer.Context,
    where: Where = None,
    older_than: Annotated[str | None, typer.Option("--older-than", metavar="AGE", help="Dumps older than this: 7d, 12h.")] = None,
    keep: Annotated[
        str | None, typer.Option("--keep", metavar="SIZE", help="The oldest dumps, until the rest takes at most this: 10GB.")
    ] = None,
    run: OfRun = None,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Broken files alone; not those of a newer actordbg, nor unreadable ones.")
    ] = False,
    pinned: Annotated[bool, typer.Option("--pinned", help="Pinned dumps too; without this they always stay.")] = False,
    allow_empty: AllowEmpty = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Remove dumps.

    Without --yes it only says what it would remove. A dump goes if it meets every condition given. The pack of a packed dump is
    written again without it. Pinned dumps (kept by a trigger, or recovered) stay unless --pinned is given. Unfinished files
    that dead writers left more than an hour ago go too. Results of replays stay. Exit code 5 if --where selects none.

    Example: actordbg dump prune --older-than 7d --keep 10GB --yes
    """
    from actordbg.catalog.query import open_fresh
    from actordbg.catalog.tables import parse_duration
    from actordbg.dumps import prune as pruning

    if where is None and older_than is None and keep is None and run is None and not damaged:
        raise UsageError("say what may go: --where, --older-than, --keep, --run or --damaged", hint="see --help")
    if damaged and not (where is None and older_than is None and keep is None):
        hint = "two commands: `dump prune --damaged`, and one with the other conditions"
        raise UsageError("a broken file has no record that a condition could ask: --damaged goes with --run alone", hint=hint)
    age = parse_duration(older_than).total_seconds() if older_than is not None else None
    size = parse_size("--keep", keep) if keep is not None else None
    store = store_of(ctx)
    if yes:
        store.require_writable(room=False)  # on a full disk this is what makes room
    catalog = open_fresh(store, where)
    choose = partial(
        pruning.plan_prune,
        where=where,
        older_than_s=age,
        keep_bytes=size,
        run=run,
        damaged=damaged,
        healthy=not damaged,
        pinned=pinned,
    )
    plan = choose(catalog)
    if yes:
        plan = pruning.apply(catalog.store, plan)
        catalog = open_fresh(catalog.store)
        while size is not None and not plan.failed and (more := choose(catalog)).files:
            plan = plan.followed_by(pruning.apply(catalog.store, more))
            catalog = open_fresh(catalog.store)
    output.emit(plan, _render, as_json)
    if plan.failed:
        raise typer.Exit(1)
    require_selected(catalog.store, where, len(plan.files), allow_empty)


def _render(plan: PrunePlan) -> None:
    if plan.spared:
        output.note(f"{output.plural(plan.spared, 'pinned dump')} among them stay; --pinned takes them too")
    if not plan.files and not plan.failed:
        output.say("nothing to remove")
        return
    verb = "removed" if plan.done else "would remove"
    for item in plan.files[:_SHOWN]:
        output.say(f"{verb} {item.path} ({output.human_bytes(item.bytes)}, {item.reason})")
    if len(plan.files) > _SHOWN:
        output.say(f"... and {len(plan.files) - _SHOWN:,} more")
    for path, reason in plan.failed:
        output.say(f"could not remove {path}: {reason}")
    output.say(f"{verb} {output.plural(len(plan.files), 'file')}, {output.human_bytes(plan.bytes)}")
    if not plan.done:
        output.note("nothing was changed; --yes does it")
