"""`actordbg attach`: this terminal at the prompt of a rank that stopped, in a replay or in a running training on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.base.ids import LAST
from actordbg.cli import output
from actordbg.cli.completion import complete_replays
from actordbg.cli.options import store_of

if TYPE_CHECKING:
    from actordbg.store.layout import Store


def attach(
    ctx: typer.Context,
    name: str = typer.Argument(
        LAST, metavar="[REPLAY|RUN]", help="A replay's id, `last`, or the name of a run.", autocompletion=complete_replays
    ),
) -> None:
    """Take the prompt of a rank that stopped.

    For replays under --break-wait, and for training code with `actordbg.debug.breakpoint()` (or any breakpoint() under `actordbg
    run --break`), from another terminal of the machine where the rank runs. Waits for the next stop. Ends with the replay, or
    with Ctrl-C.

    Example: actordbg attach ppo-7b
    """
    from actordbg.debug import stops
    from actordbg.debug.meeting import attend

    store, run = store_of(ctx), stops.root() / name
    if run.is_dir():
        output.note(f"waiting for the stops of run {name}; Ctrl-C leaves")
        with _announced(run / "attach"):
            attend(lambda: sorted(one for one in run.iterdir() if one.is_dir()), lambda: True, output.note)
        return
    folder = _replay(store, name)
    if not _runs(folder):
        raise UsageError(
            f"replay {folder.name} is over", hint="`actordbg replay --break before --break-wait 600` waits at each input"
        )
    output.note(f"waiting for the stops of replay {folder.name}; Ctrl-C leaves")
    attend(lambda: [folder], lambda: _runs(folder), output.note)


def _replay(store: Store, name: str) -> Path:
    from actordbg.debug import stops
    from actordbg.replay.supervise import load_spec

    try:
        return store.replays / load_spec(store.require(), name).replay_id
    except StoreProblem as error:
        runs = sorted(one.name for one in stops.root().glob("*")) if stops.root().is_dir() else []
        known = f"; runs on this machine that stopped before: {', '.join(runs[:8])}" if runs else ""
        raise UsageError(f"{name} is no replay here, and no run that stops on this machine{known}", hint=error.hint) from None


def _runs(folder: Path) -> bool:
    """Whether the replay is running: its supervisor has not said that it finished."""
    from actordbg.records.journal import SUPERVISOR, read_events

    said = [event["event"] for event in read_events(folder / SUPERVISOR) if event["event"] in ("supervisor", "finished")]
    return said[-1:] == ["supervisor"]


@contextlib.contextmanager
def _announced(mark: Path) -> Iterator[None]:
    """A file that tells the run's ranks that somebody waits."""
    mark.touch(mode=0o600)
    try:
        yield
    finally:
        mark.unlink(missing_ok=True)
