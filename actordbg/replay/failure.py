"""The only place of a replay where any exception at all is caught: around the model that is being debugged."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from actordbg.actor.signatures import signature_of
from actordbg.base.errors import ActordbgError
from actordbg.formats.replay_record import FAILED

T = TypeVar("T")

EXCERPT = 6000
"""Characters of a traceback that a result keeps (its end)."""


@dataclass(frozen=True)
class Failure:
    """An exception as text: nothing of it keeps tensors alive."""

    error_class: str
    error: str
    hint: str
    trace: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        kind = type(error)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        hint = error.hint if isinstance(error, ActordbgError) else ""
        return cls(name, str(error), hint, "".join(traceback.format_exception(error)))

    def fields(self) -> dict[str, Any]:
        """The ResultRecord fields of an input that failed so."""
        return {
            "status": FAILED,
            "error_class": self.error_class,
            "error": self.error[:2000],
            "signature": signature_of(self.error_class, self.error, self.trace),
            "log_excerpt": self.trace[-EXCERPT:],
        }


def guarded(call: Callable[[], T]) -> T | Failure:
    """Run what is being debugged. A model may raise anything at all, and that is a result, so everything is caught here."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - the failure of the model under test is the answer, not a fault of ours
        return Failure.of(error)
