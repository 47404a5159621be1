"""`actordbg dump recover`: the inputs that processes had in hand when they died, as dumps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from actordbg.base.errors import UsageError
from actordbg.cli.options import option, require_good, store_of
from actordbg.cli.output import emit, note, plural, say, table

if TYPE_CHECKING:
    from actordbg.dumps.recover import RingReport
    from actordbg.store.layout import Store


def recover(
    ctx: typer.Context,
    rings: list[Path] | None = typer.Argument(None, metavar="[RING]...", help="Ring files; default: all on this machine."),
    live: bool = option(False, "Read rings of living processes too (a hang); these rings stay.", "--live"),
    keep_rings: bool = option(False, "Leave the ring files where they are.", "--keep-rings"),
    discard: bool = option(False, "Remove the rings of dead processes, and make no dumps.", "--discard"),
) -> None:
    """Turn what dead processes had in hand into dumps.

    Reads the flight recorder's rings: the call in flight, and the last calls before it. A ring lies in the shared memory of the
    machine that its process ran on, so run this there, before the machine goes. --where "recovered='in_flight'" selects the
    calls that were running. Exit code 1 if a ring could not be read.

    Example: actordbg dump recover
    """
    if discard and (live or keep_rings):
        raise UsageError("--discard goes without --live and --keep-rings", hint="leave one of them out")
    store = store_of(ctx).require() if discard else store_of(ctx).require_writable()
    answer = recovered_from(store, rings, live=live, keep_rings=keep_rings, discard=discard)
    emit(answer, _render)
    require_good(not any(report.problem for report in answer["rings"]))


def recovered_from(
    store: Store, rings: list[Path] | None = None, *, live: bool = False, keep_rings: bool = False, discard: bool = False
) -> dict[str, Any]:
    """Recover rings, all of this machine's by default, and let the catalog know.

    `recovered` counts dumps, `in_flight` those whose call was running.
    """
    from actordbg.catalog.indexer import forget_dumps
    from actordbg.dumps import recover as recovering
    from actordbg.formats.ringfile import host_name

    for path in rings or []:
        if not path.is_file():
            raise UsageError(f"{path} is not a file", hint="`actordbg dump status` names the rings")
    paths = rings or recovering.find_rings(store)
    if discard:
        reports = list(recovering.discard(store, paths))
    else:
        reports = list(recovering.recover(store, paths, live=live, keep_rings=keep_rings))
    dumps = [dump for report in reports for dump in report.dumps]
    if dumps:
        folders = {str(Path(dump.path).parent) for dump in dumps}
        forget_dumps(store, [dump.dump_id for dump in dumps if dump.recorded], folders)
    flying = sum(dump.recovered == "in_flight" for dump in dumps)
    return {"store": str(store.root), "host": host_name(), "recovered": len(dumps), "in_flight": flying, "rings": reports}


def _render(answer: dict[str, Any]) -> None:
    for report in answer["rings"]:
        _say_ring(report)
    dumps = [dump for report in answer["rings"] for dump in report.dumps]
    if dumps:
        say()
        rows = [(d.rank, d.role, d.recovered, d.batch_size, d.seq_len, d.dump_id) for d in dumps]
        table(("rank", "role", "was", "B", "S", "dump"), rows, tight=True)
        for dump in dumps:
            if dump.error:
                say(f"{dump.dump_id} raised {dump.error}")
        say(f"{plural(len(dumps), 'dump')} recovered, {answer['in_flight']} of a call in flight")
        note("next: actordbg replay --where \"recovered='in_flight'\"")
    elif not answer["rings"]:
        say(f"No process left a ring on {answer['host']}.")
        note("rings lie where the process ran: run this on that machine; `actordbg dump status` names them")


def _say_ring(report: RingReport) -> None:
    who = f"pid {report.pid}" if report.pid else Path(report.path).name
    if report.problem:
        return say(f"{who}: {report.problem}")
    if report.alive and not report.dumps:
        return say(f"{who} is alive: its ring is left alone (--live reads it)")
    if not report.dumps and report.removed:
        return say(f"{who}: removed {report.path}")
    lost = f", {plural(report.killed, 'wanted call')} lost with the process" if report.killed else ""
    return say(f"{who}: {plural(len(report.dumps), 'input')}{lost}")
