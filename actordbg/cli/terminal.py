"""The store of a command as the API opens it, with the terminal as its client: notes, bars, questions, the typed command line."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from actordbg.api.client import Advance, Client
from actordbg.api.desk import Desk
from actordbg.api.planning import launched
from actordbg.api.store_commands import StoreCommands
from actordbg.base.owners import Owner
from actordbg.cli import options, output
from actordbg.cli.replay_options import EngineOptions
from actordbg.config.replay_config import TINY, ReplayConfig
from actordbg.document.command_result import CommandResult


class Terminal(Client):
    """The terminal of a command. ctx: the command. yes: whether --yes was given. machines: its options for a cluster."""

    select = "select dumps with --where or --input-file, or pass --allow-empty"

    def __init__(self, ctx: typer.Context, *, yes: bool = False, machines: EngineOptions | None = None) -> None:
        super().__init__(lambda *_, **__: None, yes)
        self.command, self.was_stopped = options.command_line(), False
        self.problem: Exception | None = None
        self._ctx, self._machines = ctx, machines

    def settings(self, given: Mapping[str, Any], lists: Collection[str] = ()) -> dict[str, Any]:
        """Return the settings as typed."""
        return dict(given)

    @contextmanager
    def consent(self, given: bool) -> Iterator[None]:
        """Leave the consent that the command line gave."""
        yield

    def note(self, text: str, *, minor: bool = False) -> None:
        """Print a note on standard error."""
        if not (minor and output.wanted.silent):
            output.note(text)

    @contextmanager
    def progress(self, label: str, total: int | None) -> Iterator[Advance]:
        """Show a progress bar."""
        with output.progress(label, total) as advance:
            yield advance

    def approve(self, what: str, owner: Owner) -> None:
        """Ask, unless --yes is given."""
        options.approve(what, owner, self.accept_others)

    def model_for(self, recorded: str) -> str | None:
        """Ask at a terminal which model to replay."""
        if output.wanted.silent:
            return None
        model = output.answered(f"The dumps were recorded with {recorded}. Which model to replay? ({TINY}: a toy)", recorded)
        if model in (None, TINY):
            return None
        self.command = options.command_line(("--model", str(model)))
        return model

    def begins(self, title: str, config: ReplayConfig | None = None) -> None:
        """Run worker groups on the cluster that the options name."""
        if self._machines is not None:
            self._machines.run(self._ctx, title)

    def ended(self, error: Exception) -> bool:
        """Print what there is before the error."""
        self.problem = error
        return True

    def stopped(self, how_to_continue: str) -> bool:
        """Note how to continue, and print what there is before exiting."""
        self.was_stopped = True
        output.note(how_to_continue)
        return True


def opened(
    ctx: typer.Context, *, yes: bool = False, machines: EngineOptions | None = None, terminal: Terminal | None = None
) -> StoreCommands:
    """Open the store of this invocation. terminal: its client, unless that is the usual one."""
    client = terminal or Terminal(ctx, yes=yes, machines=machines)
    return StoreCommands(Desk(options.store_of(ctx), options.settings_of(ctx), client))


def conclude(store: StoreCommands, answer: CommandResult, page: Path | None = None) -> None:
    """Print the answer, and exit with its code. page: where it has been written already."""
    output.say_answer(answer, page)
    client = store.client
    assert isinstance(client, Terminal)
    if client.problem is not None:
        raise client.problem
    if client.was_stopped:
        raise typer.Exit(options.INTERRUPTED)
    options.require_good(answer.ok)


def flags_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given settings plus those implied by a launcher around this command. The launcher's other ranks exit."""
    flags = launched(settings, os.environ)
    if flags is None:
        raise typer.Exit
    return flags
