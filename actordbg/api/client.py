"""Who asks for work: told of its progress, asked for approval. A program by default; the command line has one for a terminal."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from actordbg.base.errors import Refused
from actordbg.base.owners import Owner, is_own, name_of
from actordbg.config import consent
from actordbg.config.replay_config import SETTINGS, ReplayConfig
from actordbg.config.sources import settings_in

Advance = Callable[..., None]
"""Reports progress: `advance(steps, note="", total=None)`, with the steps that are done since the last call."""
NOTED = 5
"""Most notes of one kind."""


class Client:
    """A program. on_progress: called as `on_progress(steps, note="", total=None)`. accept_others: use what other users wrote."""

    command: str | None = None
    """What a record keeps as its command; None: the command line that does the same."""
    select, widen = "select dumps with where=... or files=[...]", "widen the selection: `dumps()` lists all dumps"
    """What to do if nothing was selected, and if what the user named is not there."""
    was_stopped = False
    """Whether to answer with what there is after Ctrl-C."""

    def __init__(self, on_progress: Advance, accept_others: bool = False) -> None:
        self._advance, self.accept_others = on_progress, accept_others

    def settings(self, given: Mapping[str, Any], lists: Collection[str] = ()) -> dict[str, Any]:
        """Return given settings by name; those of `lists` as comma lists. Raises UsageError for unknown or invalid ones.

        `accelerate_config` (a mapping, a file, or "default") adds the settings of an accelerate config.
        """
        plain = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in given.items()}
        accelerate = plain.pop("accelerate_config", None)
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}
        settings = settings_in(plain, "settings", SETTINGS.values(), lists)
        if accelerate is None:
            return settings
        from actordbg.config.accelerate_file import with_accelerate

        return with_accelerate(settings, accelerate, lists, self.note)

    @contextlib.contextmanager
    def consent(self, given: bool) -> Iterator[None]:
        """Let models run their own code while the block lasts."""
        (consent.give if given else consent.withhold)()
        try:
            yield
        finally:
            consent.withhold()

    def note(self, text: str, *, minor: bool = False) -> None:
        """Hear of something beside the result. minor: unless only the result is wanted."""
        self._advance(0, note=text)

    def found(self, text: str, data: Mapping[str, Any]) -> None:
        """Hear of a finding before the work ends, in words and as data."""
        self.note(text)

    def note_some(self, texts: Sequence[str]) -> None:
        """Hear of the first of many such things, and how many more there are."""
        for text in texts[:NOTED]:
            self.note(text)
        if len(texts) > NOTED:
            self.note(f"... and {len(texts) - NOTED:,} more")

    @contextlib.contextmanager
    def progress(self, label: str, total: int | None) -> Iterator[Advance]:
        """Provide what reports the progress of a piece of work with `total` steps."""
        self._advance(0, note=label, total=total)
        yield self._advance

    def approve(self, what: str, owner: Owner) -> None:
        """Raise Refused for what another user wrote, unless that is accepted."""
        if not (self.accept_others or is_own(owner)):
            hint = "review it, then open the store with accept_others=True"
            raise Refused(f"{name_of(owner)} wrote {what}; it controls what runs as you", hint=hint)

    def model_for(self, recorded: str) -> str | None:
        """Return the model to replay, which the dumps were recorded with, if the user chose one now."""
        return None

    def agrees_to_all(self, count: int, *, dry_run: bool) -> None:
        """Agree to replay a whole store, which has so many dumps. Raises UsageError to decline."""

    def begins(self, title: str, config: ReplayConfig | None = None) -> None:
        """Prepare the machines for a piece of work, by its name; config: that of a replay."""

    def watching(self, spec: Any, on_event: Callable[[Any], None]) -> tuple[Callable[[Any], None], dict[str, Any]]:
        """Return a replay's handler of events, and more options of `run_replay`, before it starts."""
        return on_event, {}

    def ended(self, error: Exception) -> bool:
        """Return whether to answer with what there is after a replay's early end, instead of raising the error."""
        return False

    def stopped(self, how_to_continue: str) -> bool:
        """Return whether to answer with what there is after Ctrl-C, instead of raising KeyboardInterrupt."""
        return False
