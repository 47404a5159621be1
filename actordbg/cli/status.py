"""`actordbg status`: the patch, the switch, and what the store holds, with the command that each asks for. It changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from actordbg.base.errors import EnvironmentProblem
from actordbg.base.units import ago
from actordbg.cli.options import Json, store_of
from actordbg.cli.output import cell, emit, human_bytes, note, plural, say, say_fact, say_wrapped
from actordbg.cli.patch import Python, TargetFile

if TYPE_CHECKING:
    from actordbg.catalog.selections import Holdings
    from actordbg.install.patch_state import Status


def status(ctx: typer.Context, python: Python = None, target: TargetFile = None, as_json: Json = False) -> None:
    """Say how patch, switch, dumps and replays stand.

    Names the interpreter, the version of OpenRLHF and the store that the hook captures into; then what this store holds, what
    was replayed last, what failed, and what to do about it. Names the step of the newest run in which ranks made unequal numbers
    of calls, also while the job runs.

    Example: actordbg status --json
    """
    from actordbg.catalog.query import open_fresh
    from actordbg.catalog.selections import holdings
    from actordbg.install.patch_state import inspect_target
    from actordbg.install.patch_target import find_target

    store = store_of(ctx)
    patch, why = None, ""
    try:
        patch = inspect_target(find_target(python, target), store)
    except EnvironmentProblem as problem:
        if python is not None or target is not None or not store.exists():
            raise
        why = problem.message
    held = holdings(open_fresh(store)) if store.exists() else None
    answer = (vars(patch) if patch else {"state": None, "reason": why}) | {"holds": held}
    emit(answer, lambda _: _say(patch, why, held), as_json)


def _say(patch: Status | None, no_patch: str, held: Holdings | None) -> None:
    if patch is not None:
        _say_patch(patch)
    else:
        say(f"no patch to look at: {no_patch}")
    if held is None:
        note("there is no store here yet: `actordbg dump enable`, `dump import` or `dump create` makes one")
    else:
        say()
        for name, text in _held_in_words(held):
            say_fact(f"  {name}", text, 13)
    for line in patch.notes if patch else ():
        note(f"note: {line}")


def _say_patch(answer: Status) -> None:
    """One line for the state, one for each fact."""
    say(f"{answer.state.value}: {answer.file}")
    if answer.reason:
        say_wrapped(f"  {answer.reason}", "    ")
    facts = {
        "openrlhf": answer.openrlhf_version,
        "python": answer.python,
        "sha256": answer.sha256,
        "original": answer.original_sha256,
        "store": answer.store,
        "patched at": answer.patched_at,
        "hook seen": answer.hooked,
        "dumping": "enabled" if answer.enabled else "disabled",
        "capture": "armed" if answer.armed else "off",
    }
    for name, value in facts.items():
        say_fact(f"  {name}", cell(value), 13)


def _held_in_words(one: Holdings) -> Iterator[tuple[str, str]]:
    """What the store holds, and what each line asks for."""
    yield "store", one.store
    newest = f", the newest {ago(one.newest)}" if one.newest else ""
    yield "dumps", f"{one.dumps:,} in {human_bytes(one.bytes)}{newest}" + (f"; {one.in_packs:,} in packs" if one.in_packs else "")
    if len(one.trainers) > 1:
        yield "trainers", ", ".join(f"{name} {count:,}" for name, count in one.trainers.items())
    if one.unequal:
        since = f", no call for {ago(one.unequal.newest).removesuffix(' ago')}" if one.unequal.open else ""
        yield (
            "ranks",
            f"{one.unequal.in_words}{since}: ranks that compute together wait for the call that one of them never makes",
        )
    loose = one.dumps - one.in_packs
    if loose >= 100:
        yield "unpacked", f"{plural(loose, 'dump')} in files of their own: `actordbg dump pack` makes them much smaller"
    if one.damaged:
        yield "damaged", f"{plural(one.damaged, 'file')}: `actordbg fsck` names each"
    others = f", and {one.other_replays:,} that other commands ran" if one.other_replays else ""
    yield "replays", f"{one.replays:,}{others}" + (": `actordbg replays`" if one.replays else "")
    if one.last:
        ended = "" if one.last_status == "complete" else f", {one.last_status}: `actordbg replay --resume {one.last}`"
        yield "last", f"{one.last}, {ago(one.last_at or '')}, {one.last_passed} of {one.last_inputs} passed{ended}"
    if one.failed:
        yield "failed", f"{plural(one.failed, 'dump')} in the last replay of each: `actordbg replay --failed`"
    if one.dumps and one.never_replayed == one.dumps:
        yield "next", "actordbg check"
    elif one.never_replayed:
        yield "not yet", f"{plural(one.never_replayed, 'dump')} never replayed"
