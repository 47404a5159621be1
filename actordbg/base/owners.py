"""Owners of files. Only the user's own files decide which code runs.

In a folder that others may write (/tmp, a shared disk), a file may be somebody else's. The owner is read from the open
descriptor, so that the file cannot be swapped between the check and the read. A record that came from a URL is a file of this
user's, but its author is unknown: the code that downloads a record first writes its `origin_file`. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path

NOT_FROM_HERE = {"PYTHONSAFEPATH": "1"}
"""Environment of a Python that imports nothing from the current folder, which may be anybody's (3.11 and later)."""
_MOST_BYTES = 2**26
Owner = int | str
"""Who wrote a file: a user, or, where that is unknown, words for whoever it may have been."""


def own_uids() -> frozenset[int]:
    """Return the users whose files count as this user's own: this user, and under sudo also the user who ran sudo."""
    me, behind = os.geteuid(), os.environ.get("SUDO_UID", "")
    return frozenset({me, int(behind)} if me == 0 and behind.isdecimal() else {me})


def is_own(owner: Owner) -> bool:
    """Check whether a file of this owner counts as this user's own."""
    return owner in own_uids()


def is_mine(path: Path) -> bool:
    """Check whether `path` is this user's own: a store may be shared, and `last` should not be somebody else's."""
    with contextlib.suppress(OSError):
        return is_own(path.stat().st_uid)
    return False


def name_of(owner: Owner) -> str:
    """Describe an owner: "alice (uid 1001)"."""
    try:
        return owner if isinstance(owner, str) else f"{pwd.getpwuid(owner).pw_name} (uid {owner})"
    except (KeyError, OverflowError):
        return f"uid {owner}"


def origin_file(path: Path) -> Path:
    """Return the hidden file that names the origin of a downloaded record. It moves with the record's folder."""
    return path.with_name(f".{path.name}.from")


def whose(*paths: Path) -> str:
    """Describe who else wrote the first of these files that is not this user's own; "" if all are. Missing files are nobody's."""
    for path in paths:
        with contextlib.suppress(OSError):
            owner = os.lstat(path).st_uid
            if words := (origin_of(path) if is_own(owner) else name_of(owner)):
                return words
    return ""


def marked(verdict: str, whose: str) -> str:
    """Return a verdict as lists show it: "theirs: RIGHT" where somebody else (`whose`) says so."""
    return f"theirs: {verdict}" if whose else verdict


def read_owned(path: Path, *, links: bool = True) -> tuple[bytes, Owner]:
    """Read a regular file; return its bytes and its owner, who is unknown if an `origin_file` says that it was downloaded.

    Raises OSError if it cannot be opened, is not a regular file, is larger than any file of ours, or is a link without `links`.
    """
    data, owner = _read(path, links)
    return data, (origin_of(path) or owner) if is_own(owner) else owner


def origin_of(path: Path) -> str | None:
    """Describe who wrote an imported or downloaded file, by its `origin_file`; None if it was made here."""
    try:
        origin = _read(origin_file(path), False)[0][:300].decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError:
        origin = "elsewhere"
    return f"somebody with access to {origin}"


def _read(path: Path, links: bool) -> tuple[bytes, int]:
    """Read a regular file; return its bytes and its owner, or the link's owner if another user's link leads to it.

    Without `links` the file is not a link, but its folder may be one.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if links else os.O_NOFOLLOW))
    with open(descriptor, "rb") as file:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(22, "it is not a regular file", os.fspath(path))
        data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise OSError(27, f"it has more than {_MOST_BYTES} bytes", os.fspath(path))
    link = os.lstat(path if links else path.parent)
    return data, link.st_uid if stat.S_ISLNK(link.st_mode) and not is_own(link.st_uid) else state.st_uid


def own_cache(name: str) -> Path:
    """Return a folder for code that runs later (compiled kernels, a model's code): in the user's cache, writable by nobody else.

    Falls back to a new temporary folder, which goes with this process. A store is not safe: others may write there.
    """
    import atexit  # imported here: every command imports this module
    import shutil
    from tempfile import mkdtemp

    folder = user_cache() / name
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = os.lstat(folder)
        if stat.S_ISDIR(state.st_mode) and is_own(state.st_uid) and not state.st_mode & 0o022:
            return folder
    folder = Path(mkdtemp(prefix="actordbg-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def user_cache() -> Path:
    """Return actordbg's folder in the user's cache; a path that cannot be made if the user has no home."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(os.path.expanduser("~/.cache"))  # noqa: PTH111 - it raises nothing where there is no home
    return (base if base.is_absolute() else Path(os.devnull)) / "actordbg"
