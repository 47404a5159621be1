"""The store of a command as the API opens it, with the terminal as its client: notes, bars, questions, the typed command line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from actordbg.api.client import Advance, Client
from actordbg.api.desk import Desk
from actordbg.api.store_commands import StoreCommands
from actordbg.base.errors import UsageError
from actordbg.base.owners import Owner
from actordbg.cli import options, output
from actordbg.cli.output import note
from actordbg.cli.replay_options import MOST_UNASKED, EngineOptions, StopOptions
from actordbg.config.replay_config import TINY, ReplayConfig
from actordbg.debug.meeting import Relay
from actordbg.debug.replay_stops import StopOrder


class Terminal(Client):
    """The terminal of a command. ctx: the command. yes: whether --yes was given. machines: its options for a cluster."""

    select = "select dumps with --where or --input-file, or pass --allow-empty"
    widen = "widen the selection (`actordbg dump ls` lists all dumps), or pass --allow-empty"

    def __init__(self, ctx: typer.Context, *, yes: bool = False, machines: EngineOptions | None = None) -> None:
        super().__init__(lambda *_, **__: None, yes)
        self.command = options.command_line()
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

    def found(self, text: str, data: Mapping[str, Any]) -> None:
        """Print a finding as a line of text or of JSON."""
        if output.wanted.json:
            output.emit_json(data, None)
        else:
            output.say(text)

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

    def conclude(self) -> None:
        """Exit as an early end demands, after the answer was printed."""
        if self.problem is not None:
            raise self.problem
        if self.was_stopped:
            raise typer.Exit(options.INTERRUPTED)

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
    client = ctx.meta[options.TERMINAL] = terminal or Terminal(ctx, yes=yes, machines=machines)
    return StoreCommands(Desk(options.store_of(ctx), options.settings_of(ctx), client))


class ReplayTerminal(Terminal):
    """everything: replay a whole store without asking. stopping: breakpoints, as typed."""

    def __init__(
        self, ctx: typer.Context, machines: EngineOptions, stopping: StopOptions, *, yes: bool, everything: bool
    ) -> None:
        super().__init__(ctx, yes=yes, machines=machines)
        self._engine, self._stopping, self._everything, self._bare = machines, stopping, everything, False

    def agrees_to_all(self, count: int, *, dry_run: bool) -> None:
        """Ask before replaying a whole store of many dumps. Raises UsageError if the user declines, or there is no terminal.

        At a terminal, a dry run only prints that the replay will ask; without one it is refused, as the replay would be.
        """
        if self._everything or count <= MOST_UNASKED:
            return
        if dry_run and output.can_ask():
            return note(f"without --dry-run, this asks before it replays {count:,} dumps; --all skips the question")
        if output.agreed(f"This replays all {count:,} dumps of the store"):
            return
        raise UsageError(
            f"refusing to replay {count:,} dumps",
            hint="narrow it with --diverse 8, --where or --max-inputs, or pass --all",
        )

    def begins(self, title: str, config: ReplayConfig | None = None) -> None:
        """Adapt the breakpoints to the engine, and run worker groups there."""
        apart, spans = options.settings_of(self._ctx).url is not None, config is not None and self._engine.spans_nodes(config)
        yes = self.accept_others
        self._stopping = self._stopping.on(self._engine.engine, several_nodes=spans, apart=apart, yes=yes)
        super().begins(title, config)

    @contextmanager
    def progress(self, label: str, total: int | None) -> Iterator[Advance]:
        """Show a progress bar, unless it would draw over prompts and lines."""
        with output.progress(label, total, quiet=self._bare) as self._advance:
            yield self._advance

    def watching(self, spec: Any, on_event: Callable[[Any], None]) -> tuple[Callable[[Any], None], dict[str, Any]]:
        """Print the ranks' lines, and give the terminal to a rank at a breakpoint."""
        stops = self._stopping.order(spec)
        lines: list[str] = []
        prompts = Relay() if stops.terminal and stops.debugpy is None else None
        self._bare = bool(stops.at) or stops.level != StopOrder().level

        def watched(event: Any) -> None:
            if event.kind == "line":
                lines.append(event.text)
            elif event.kind == "stop" and (prompts is None or event.at):
                node = f" on the node {event.at}" if event.at else ""
                who = f"`actordbg attach {spec.replay_id}`{node}" if stops.debugpy is None else f"an editor, at {event.at}"
                note(f"{event.text}; it waits for {who}")
            elif event.kind == "stop":
                self._advance(0, drawn=False)  # the terminal is the prompt's
            on_event(event)

        def on_tick() -> None:
            """Print the waiting lines and show the bar, unless a prompt is on the screen."""
            if prompts is None or prompts.at is None:
                while lines:
                    note(lines.pop(0))
                self._advance(0, drawn=True)

        return watched, {"on_tick": on_tick, "stops": stops, "prompts": prompts}
