"""The one error tree. Every failure a user can cause or meet is one of these.

    ActordbgError                 code                exit
    ├── UsageError                usage                 2   an option or argument makes no sense
    │   └── WhereError            where                 2   a --where expression is not allowed or not understood
    ├── Refused                   refused               3   doing it could lose or harm something
    │   ├── Conflict              conflict              3   the file on disk is not in the state this needs
    │   ├── UnsafeInput           unsafe-input          3   a file that asks to execute code, or lies about its size
    │   └── Unsupported           unsupported           3   a combination that cannot work here, with the reason
    └── EnvironmentProblem        environment           4   something outside actordbg is missing or broken
        ├── StoreProblem          store                 4   the store is missing, unreadable or of another format
        │   ├── CorruptDump       corrupt-dump          4   a dump file is not what its header says
        │   └── NewerFormat       newer-format          4   written by a newer actordbg
        ├── CatalogProblem        catalog               4   the catalog cannot be opened or upgraded
        └── LaunchProblem         launch                4   a replay's or a job's processes could not be started

Each carries a message (what and why) and a hint (what to do next). The command line catches the root once
(`actordbg.cli.app.main`), prints `error[code]: message` and `hint: ...`, and exits with `exit_code`.
Exit codes: 0 good, 1 the answer is bad (mismatch, failed replay), 2 usage, 3 refused, 4 environment, 130 interrupted.
`docs/reference/errors.md` has a section for each code.
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


class UsageError(ActordbgError):
    code = "usage"
    exit_code = 2


class WhereError(UsageError):
    code = "where"


class Refused(ActordbgError):
    code = "refused"
    exit_code = 3


class Conflict(Refused):
    code = "conflict"


class UnsafeInput(Refused):
    code = "unsafe-input"


class Unsupported(Refused):
    code = "unsupported"


class EnvironmentProblem(ActordbgError):
    code = "environment"
    exit_code = 4


class StoreProblem(EnvironmentProblem):
    code = "store"


class CorruptDump(StoreProblem):
    code = "corrupt-dump"


class NewerFormat(StoreProblem):
    code = "newer-format"


class CatalogProblem(EnvironmentProblem):
    code = "catalog"


class LaunchProblem(EnvironmentProblem):
    code = "launch"


def error_named(error_class: str, message: str, hint: str = "") -> ActordbgError | None:
    """The error that a worker raised, from its class's full name; None where it is none of this tree.

    Journals that were written before the tree moved say `actordbg.errors.X` for `actordbg.base.errors.X`.
    """
    module, _, name = error_class.rpartition(".")
    kind = globals().get(name) if module in (__name__, "actordbg.errors") else None
    return kind(message, hint=hint) if isinstance(kind, type) and issubclass(kind, ActordbgError) else None


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
