"""The part of the error tree that a training process loads, and what may be told of an exception.

`actordbg.base.errors` has the whole tree, these errors included: whatever does not run in a trainer imports them from there.
"""

from __future__ import annotations

import os
import re
from typing import ClassVar

_SECRET_NAMES = re.compile(r"TOKEN|KEY|SECRET|PASS|CRED|AUTH", re.IGNORECASE)


class ActordbgError(Exception):
    """Root of the tree: `message` says what and why, `hint` what to do next."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class Refused(ActordbgError):
    code = "refused"
    exit_code = 3


class Unsupported(Refused):
    code = "unsupported"


class EnvironmentProblem(ActordbgError):
    code = "environment"
    exit_code = 4


class StoreProblem(EnvironmentProblem):
    code = "store"


class NewerFormat(StoreProblem):
    code = "newer-format"


def describe(error: BaseException) -> str:
    """An error in one line of at most 200 characters."""
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]


def scrub(text: str) -> str:
    """`text` with every secret of the environment replaced: an exception's message may quote one.

    A value counts as secret if its variable's name says so (TOKEN, KEY, ...) and it has at least 8 characters.
    """
    if len(text) < 8:
        return text
    for name, value in os.environ.items():
        if len(value) >= 8 and value in text and _SECRET_NAMES.search(name):
            text = text.replace(value, "[hidden]")
    return text
