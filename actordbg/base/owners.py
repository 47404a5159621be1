"""Whose file is it? What decides which code runs is taken from one's own files only.

A folder that others may write (/tmp, a shared disk) is where somebody else's file lies in one's way. Who wrote a file is asked
of the open descriptor, so it cannot be exchanged between the question and the reading. A record that came from a URL is a file
of this user's, but who wrote it is unknown: whoever brings one writes its `origin_file` first. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from pathlib import Path

NOT_FROM_HERE = {"PYTHONSAFEPATH": "1"}
"""In the environment of a Python: it imports nothing from the current folder, which may be anybody's (3.11 and later)."""
_MOST_BYTES = 2**26
Owner = int | str
"""Who wrote a file: a user, or, where that is unknown, words for whoever it may have been."""


def own_uids() -> frozenset[int]:
    """The users whose files are one's own: this one, and under sudo the one who typed it."""
    me, behind = os.geteuid(), os.environ.get("SUDO_UID", "")
    return frozenset({me, int(behind)} if me == 0 and behind.isdecimal() else {me})


def is_own(owner: Owner) -> bool:
    """Whether a file of this owner is one's own."""
    return owner in own_uids()


def is_mine(path: Path) -> bool:
    """Whether what lies there is one's own: a store may be shared, and `last` should not be somebody else's."""
    with contextlib.suppress(OSError):
        return is_own(path.stat().st_uid)
    return False


def name_of(owner: Owner) -> str:
    """An owner in words: "alice (uid 1001)"."""
    try:
        return owner if isinstance(owner, str) else f"{pwd.getpwuid(owner).pw_name} (uid {owner})"
    except (KeyError, OverflowError):
        return f"uid {owner}"


def origin_file(path: Path) -> Path:
    """The hidden file beside a record that was brought from elsewhere, which says from where. It stays when the folder moves."""
    return path.with_name(f".{path.name}.from")


def read_owned(path: Path, *, links: bool = True) -> tuple[bytes, Owner]:
    """Read a regular file; return its bytes and its owner, who is unknown where an `origin_file` says that it was brought.

    OSError for what cannot be opened, is not a regular file, or is larger than any file of ours; without `links` for a link.
    """
    data, owner = _read(path, links)
    if not is_own(owner):
        return data, owner
    try:
        origin = _read(origin_file(path), False)[0][:300].decode(errors="replace")
    except FileNotFoundError:
        return data, owner
    except OSError:
        origin = "elsewhere"
    return data, f"somebody with access to {origin}"


def _read(path: Path, links: bool) -> tuple[bytes, int]:
    """The bytes of a regular file and the user whose they are: where another user's link leads there, the link's owner.

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
    """A folder for what is executed later (compiled kernels, a model's code): in the user's cache, writable by nobody else.

    Where there can be none, a new temporary folder. A store will not do: others may write there.
    """
    from tempfile import mkdtemp  # every command imports this module, and this one needs a folder

    folder = user_folder("XDG_CACHE_HOME", "~/.cache") / name
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = os.lstat(folder)
        if stat.S_ISDIR(state.st_mode) and is_own(state.st_uid) and not state.st_mode & 0o022:
            return folder
    return Path(mkdtemp(prefix="actordbg-"))


def user_folder(variable: str, usual: str) -> Path:
    """actordbg's folder below one of the user's base folders; a path that cannot be made where the user has no home."""
    base = Path(os.environ.get(variable, ""))
    if not base.is_absolute():
        base = Path(os.path.expanduser(usual))  # noqa: PTH111 - it raises nothing where there is no home
    return (base if base.is_absolute() else Path(os.devnull)) / "actordbg"
