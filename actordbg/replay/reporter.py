"""What a group of workers tells whoever runs it: the news of a replay, and the error of an actor that cannot be built."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from actordbg.base.errors import ActordbgError, LaunchProblem, error_named
from actordbg.formats.journal import Event
from actordbg.formats.replay_record import ResultRecord
from actordbg.replay.launch import Group, Launched


class Reporter(Protocol):
    """Where a group's news go; the supervisor is one."""

    @property
    def stays(self) -> bool:
        """Whether groups are wanted for another replay when they have done their work."""

    def launch(self, group: Group, work: Path) -> Launched:
        """Start the group's processes, or give the work to a group that waits for some."""

    def keep(self, group: Group, launched: Launched, work: Path) -> None:
        """Take over a group that has done its work and waits."""

    def on_ready(self, event: Event) -> None:
        """A worker built its actor."""

    def on_start(self, event: Event) -> None:
        """A worker starts an input."""

    def on_result(self, record: ResultRecord) -> None:
        """A worker finished an input."""

    def on_answer(self, event: Event) -> None:
        """A rank that follows in its lane finished an input."""

    def on_verdict(self, record: ResultRecord) -> None:
        """An input killed or hung its worker; the record has to be written down."""

    def on_attempt(self, group: Group, attempt: int, reason: str) -> None:
        """The group is being started, for the first time (`reason` is empty) or again."""


def as_error(broken: Event, log: str) -> ActordbgError:
    """The error of a worker that could not build its actor, as the same class here when it is one of ours."""
    ours = error_named(broken["error_class"], broken["error"], broken["hint"])
    return ours or LaunchProblem(
        f"the actor cannot be built: {broken['error_class']}: {broken['error']}\n{log}".rstrip(),
        hint="`actordbg actor init` with the same options tries only that",
    )
