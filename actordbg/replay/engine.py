"""What a worker needs of the engine that runs its inputs, and what it keeps of an exception.

Standard library only; torch is behind `Engine`, so supervision is tested without it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from actordbg.actor.signatures import signature_of
from actordbg.base.errors import ActordbgError
from actordbg.base.fault import scrub
from actordbg.debug.prompt import StoppedByUser
from actordbg.records.replay_record import FAILED, STOPPED, ReplayInput, ReplaySpec
from actordbg.replay.worker_logs import EXCERPT


class Engine(Protocol):
    """Runs inputs. `actordbg.replay.actor_engine.ActorEngine` is the real one."""

    @property
    def collective(self) -> bool:
        """Whether a rank cannot run an input without its peers."""

    @property
    def tainted(self) -> bool:
        """Whether the last failure left this process unable to give right results."""

    def open(self) -> dict[str, Any]:
        """Build the actor; returns its resolved configuration."""

    def switch(self, folder: Path, spec: ReplaySpec) -> dict[str, Any]:
        """Go on with another replay on the loaded actor; returns its resolved configuration."""

    def load(self, item: ReplayInput) -> Any:
        """Read one input. Runs in another thread, while the input before it is computed."""

    @property
    def out_of_step(self) -> str:
        """Why this process has to be replaced after an input that has its result; "" if it can go on."""

    def run(
        self, item: ReplayInput, loaded: Any, *, recorded: bool, on_law: Callable[[str], None] | None = None
    ) -> dict[str, Any]:
        """Run one input; returns fields of its ResultRecord, `status` among them, and as `UNFLUSHED` a file that it wrote.

        `recorded`: this rank's result counts. Otherwise nothing is written to the store, but the rank takes part in every
        collective. on_law: ask the input for its laws too, and call this before each step of that.
        """

    def close(self) -> None:
        """Free the actor."""


@dataclass(frozen=True)
class Failure:
    """An exception as text, so that it keeps no tensors alive."""

    error_class: str
    error: str
    hint: str
    trace: str
    status: str = FAILED

    @classmethod
    def of(cls, error: Exception) -> Failure:
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        hint = error.hint if isinstance(error, ActordbgError) else ""
        status = STOPPED if isinstance(error, StoppedByUser) else FAILED
        frames = traceback.extract_tb(error.__traceback__)
        said = str(error) or (f"{frames[-1].line} ({frames[-1].filename}:{frames[-1].lineno})" if frames else "")
        return cls(name, scrub(said), scrub(hint), scrub("".join(traceback.format_exception(error))), status)

    def fields(self) -> dict[str, Any]:
        """The ResultRecord fields of an input that failed with it."""
        return {
            "status": self.status,
            "error_class": self.error_class,
            "error": self.error[:2000],
            "signature": signature_of(self.error_class, self.error, self.trace),
            "log_excerpt": self.trace[-EXCERPT:],
        }
