"""A catalog that follows running replays, and the progress bar beside it: what the commands that replay share while they wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from actordbg.cli import output
from actordbg.replay.replay_data import LiveCatalog

if TYPE_CHECKING:
    from actordbg.replay.supervise import Progress
    from actordbg.store.layout import Store


@contextmanager
def replaying(store: Store, label: str, total: int, *, quiet: bool) -> Iterator[tuple[LiveCatalog, Callable[..., None]]]:
    """A catalog that follows running replays, and a progress bar (`output.progress`). The catalog is up to date afterwards,
    also after a Ctrl-C; why it is not goes to standard error."""
    catalog = LiveCatalog(store)
    try:
        with output.progress(label, total, quiet=quiet) as advance:
            yield catalog, advance
    finally:
        settle(store, catalog)


def settle(store: Store, catalog: LiveCatalog) -> None:
    """Index what is new. What cannot be indexed now will be by the next command."""
    catalog.flush()
    if catalog.problem is not None:
        output.note(f"the catalog could not be updated ({catalog.problem}); the results are in {store.root}")


def counting(catalog: LiveCatalog, advance: Callable[..., None]) -> Callable[[Progress], None]:
    """What to do with a replay's news: each result is a step of the bar, and beside it stands what goes on."""
    return lambda event: show(catalog, advance, event)


def show(catalog: LiveCatalog, advance: Callable[..., None], event: Progress) -> None:
    """The same for one event."""
    if event.kind == "attempt":
        advance(0, note=f"starting again: {event.text[:100]}" if event.text else "starting the workers")
    elif event.kind in ("start", "leaving"):
        advance(0, note=event.text)
    elif event.kind == "result":
        catalog.touch()
        advance(1, note="" if event.text == "passed" else f"last: {event.text}")
