"""The part of the error tree (`actordbg.base.errors`) that a training process loads, and how exceptions are shown safely."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from typing import ClassVar, TypeVar

T = TypeVar("T")
_SECRET_NAMES = re.compile(rb"TOKEN|KEY|SECRET|PASS|CRED|AUTH", re.IGNORECASE)
_IN_URL = re.compile(r"""(://(?=[^\s/@:"]+@)|://[^\s/:@"]*:(?!\d+(?:[/"'\s,]|\Z)))(?:[^\s"@]|\n){0,200}[^\s"]{0,200}@""")
"""A password in a URL, up to the last "@"; not a port. A name alone may be a token. _SIGNED: in a query, or a header."""
_SIGNED = re.compile(r"""([?&][\w.-]*(?:token|key|secret|pass|cred|auth|sig)[\w.-]*=|\bBearer )[^\s&"']+""", re.IGNORECASE)
_known: tuple[dict[bytes, bytes], tuple[str, ...]] = ({}, ())


class ActordbgError(Exception):
    """Root of the tree: `message` says what and why, `hint` what to do next."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message, self.hint = without_password(message), without_password(hint)
        super().__init__(self.message)


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
    """Format an error in a line of at most 200 characters, without secrets and with control characters escaped."""
    text = scrub(f"{type(error).__name__}: {error}"[:4096]).replace("\n", " ")[:200]
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)[:200]


def from_outside(error: BaseException, own: type[BaseException] = Exception) -> bool:
    """Check whether an exception came from outside: Ctrl-C, an exit, or what a signal handler raised in our code. Raises nothing.

    A handler is known by its argument, the frame that it interrupted. own: what our code may raise itself.
    """
    try:
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            interrupted, at = at.tb_frame, at.tb_next
            for given in at.tb_frame.f_locals.values():
                if given is interrupted or (type(given) is tuple and any(each is interrupted for each in given)):
                    return True
    except Exception:  # noqa: BLE001  # no memory: then the first exception is taken for ours
        return False
    return not isinstance(error, own)


def complain(text: str) -> None:
    """Print a line to standard error. Raises nothing: that may be closed, or a log on a full disk, and the training continues."""
    with contextlib.suppress(Exception):
        sys.stderr.write(f"actordbg: {text}\n")


def scrub(text: str) -> str:
    """Replace every secret of the environment in `text`, and passwords in URLs: an exception's message may quote a secret.

    A value of 8 characters or more is one if its variable's name says so (TOKEN, ...), and so are its repr and each of its lines.
    """
    for value in _secrets() if len(text) >= 8 else ():
        text = text.replace(value, "[hidden]")
    return without_password(text)


def without_password(text: str) -> str:
    """Replace the passwords and tokens in a text's URLs: `sftp://me:[hidden]@host/store`, `https://host/file?token=[hidden]`."""
    text = _SIGNED.sub(r"\1[hidden]", text)
    return _IN_URL.sub(r"\1[hidden]@", text) if "://" in text else text


def clean_keys(named: Mapping[str, T]) -> dict[str, T]:
    """Return `named` without secrets in its keys. Keys that become equal get a number, so none is lost."""
    if scrub(text := "\n".join(named)) == text:
        return dict(named)
    clean: dict[str, T] = {}
    for key, value in named.items():
        name = scrub(key)
        while name in clean:
            name = f"{name} {len(clean) + 1}"
        clean[name] = value
    return clean


def _secrets() -> tuple[str, ...]:
    """Return the environment's secrets, longest first, so that none leaves part of another.

    Called for each text, so the environment is read again only if it changed.
    """
    global _known
    now: dict[bytes, bytes] = vars(os.environ).get("_data") or dict(os.environb)
    if now != _known[0]:
        seen = now.copy()
        values = (os.fsdecode(value) for name, value in seen.items() if _SECRET_NAMES.search(name))
        shown = {form for value in values for form in (value, ascii(value)[1:-1], *value.splitlines()) if len(form) >= 8}
        _known = seen, tuple(sorted(shown, key=len, reverse=True))
    return _known[1]
