"""`actordbg fsck`: check everything in a store, and repair what can be."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import typer

from actordbg.cli import output
from actordbg.cli.options import Json, Quiet, option, store_of

if TYPE_CHECKING:
    from actordbg.dumps.finding import Finding
    from actordbg.store.layout import Store


@dataclass(frozen=True)
class Found:
    """One finding. path: below the store. meaning: of its kind. repair: what --repair does, or did; empty for nothing."""

    path: str
    kind: str
    severity: str
    meaning: str
    detail: str
    repair: str


@dataclass
class FsckAnswer:
    """What was found, and what stays of it; `repaired`: what --repair mended, `failed`: what it could not."""

    store: str
    deep: bool
    findings: list[Found]
    repaired: list[Found] = field(default_factory=list)
    failed: list[Found] = field(default_factory=list)


def fsck(
    ctx: typer.Context,
    repair: bool = option(False, "Mend what can be mended; nothing is lost by it.", "--repair"),
    quick: bool = option(False, "Read names, headers and records, but no payload whole.", "--quick"),
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Check everything in a store.

    FORMAT, names and permissions, every dump, pack, replay, comparison, switch, counter, ring, event and backup, and the catalog.
    Without --repair nothing is written. With it, damaged files are moved to store/quarantine, good dumps are taken out
    of damaged packs first, and the catalog is made again if it is wrong. A store that cannot be written can be checked, and
    --repair refuses. Exit code 1 if damage or leftovers remain; notes are no fault.

    Example: actordbg fsck --repair
    """
    from actordbg.dumps.finding import NOTE
    from actordbg.dumps.repairing import repair as mend

    store = store_of(ctx)
    if repair and store.root.is_dir():
        store.probed(room=False)  # on a full disk it removes unfinished files
    found = _look(store, not quick, quiet or as_json)
    answer = FsckAnswer(str(store.root), not quick, [_said(store, one) for one in found])
    if repair and any(one.repair.value for one in found):
        done, failed = mend(store, found)
        answer.repaired = [_said(store, one, what) for one, what in done]
        answer.failed = [_said(store, one, what) for one, what in failed]
        answer.findings = [_said(store, one) for one in _look(store, not quick, quiet or as_json)]
    output.emit(answer, _render, as_json)
    if any(one.severity != NOTE for one in answer.findings):
        raise typer.Exit(1)


def _look(store: Store, deep: bool, quiet: bool) -> list[Finding]:
    from actordbg.dumps.checking import CHECKS, check

    with output.progress("checking", len(CHECKS), quiet=quiet) as advance:
        return check(store, deep=deep, on_start=lambda name: advance(1, note=name))


def _said(store: Store, one: Finding, did: str | None = None) -> Found:
    from actordbg.dumps.finding import KINDS
    from actordbg.store.layout import printable

    inside = one.place.is_relative_to(store.root)
    path = printable(os.path.relpath(one.place, store.root) if inside else os.fspath(one.place))
    return Found(path, one.kind, one.severity, KINDS[one.kind].meaning, one.detail, one.repair.value if did is None else did)


def _render(answer: FsckAnswer) -> None:
    from actordbg.dumps.finding import DAMAGE, LEFTOVER, NOTE

    for one in answer.repaired:
        output.say(f"repaired: {one.kind}: {one.path}: {one.repair}")
    for one in answer.failed:
        output.say(f"could not repair {one.path}: {one.repair}")
    for one in answer.findings:
        output.say(f"{one.severity}: {one.kind}: {one.path}: {one.detail or one.meaning}")
    counts = Counter(one.severity for one in answer.findings)
    how = "every byte" if answer.deep else "headers and records"
    told = ", ".join(output.plural(counts[one], one if one != DAMAGE else "damaged file") for one in (DAMAGE, LEFTOVER, NOTE))
    output.say(f"{answer.store}: {how} checked: {told}" if answer.findings else f"{answer.store}: {how} checked: all is well")
    if not answer.repaired and any(one.repair for one in answer.findings):
        output.note("nothing was changed; --repair mends what can be mended, and loses nothing")
