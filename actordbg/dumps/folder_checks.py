"""Checks of what lies where: FORMAT, the layout, permissions, leftovers, and what is no file of a store.

Of contents only FORMAT is read.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from actordbg.dumps.finding import Finding
from actordbg.dumps.prune import LEFTOVER_AGE_S
from actordbg.dumps.recover import is_left_over
from actordbg.formats.store_files import FORMAT, KINDS, TEMPORARY, read_regular
from actordbg.store.layout import UNPRINTABLE, Store

_FILES = re.compile(
    r"FORMAT|control\.json|catalog\.db(-wal|-shm|-journal)?|catalog\.lock|catalog\.\w+\.bak\.db|controls/[^/]+\.json"
    r"|(counters|weights)/[^/]+/[^/]+\.json|dumps/[^/]+/rank\d{4,}/[^/]+\.safetensors\.zst|packs/\.lock|packs/[^/]+/[^/]+\.pack"
    r"|replays/[^/]+/(?!tensors$)[^/]+|replays/[^/]+/tensors/[^/]+\.safetensors|(comparisons|noise|matrices|events)/[^/]+\.json"
    r"|memory/[^/]+\.(json|csv)|trainchecks/[^/]+/check\.json|trainchecks/[^/]+/cell-\d+\.\d+/(?!tensors$)[^/]+|trainchecks/[^/]+/logs/(sft/)?[^/]+\.log"
    r"|backups/[0-9a-f]{64}/(actor\.py|origin\.json)"
)
_FOLDERS = re.compile(
    r"(controls|comparisons|noise|matrices|memory|events|models|reports|rings|quarantine|cache)|(counters|weights|packs|backups)(/[^/]+)?"
    r"|dumps(/[^/]+(/rank\d{4,})?)?|replays(/[^/]+(/tensors)?)?|trainchecks(/[^/]+(/logs(/sft)?|/cell-\d+\.\d+(/tensors)?)?)?"
)
_OWN_CHECKS = ("FORMAT", "catalog.db")
"""Whose type their own checks look at."""
_NOT_LOOKED_INTO = ("models", "reports", "rings", "quarantine", "cache")
_OTHERS, _OWNERS_FILE, _OWNERS_FOLDER = 0o007, 0o400, 0o500


def format_file(store: Store) -> Iterator[Finding]:
    """FORMAT: a store of a format that this program reads."""
    path = store.format_path
    try:
        version = json.loads(read_regular(path))["format"]
    except FileNotFoundError:
        yield Finding(path, "no-format")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        yield Finding(path, "bad-format", str(error))
    else:
        if type(version) is not int or version < FORMAT:
            yield Finding(path, "bad-format", f"it says format {version!r:.40}")
        elif version > FORMAT:
            yield Finding(path, "newer-store", f"it has format {version}, this actordbg reads {FORMAT}")


def layout(store: Store) -> Iterator[Finding]:
    """Every name of the store: is it one of a store, of the right type, and private?"""
    owner = os.stat(store.root).st_uid
    mode = os.stat(store.root).st_mode
    if mode & stat.S_IWOTH:
        yield Finding(store.root, "open-mode", f"it has mode {stat.S_IMODE(mode):o}: anybody may put files into it")
    yield from _listed(store, store.root, "", owner)


def _listed(store: Store, folder: Path, below: str, owner: int) -> Iterator[Finding]:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        yield Finding(folder, "unreadable", f"cannot be listed: {error.strerror}")
        return
    for name in names:
        path, relative = folder / name, f"{below}{name}"
        try:
            state = os.lstat(path)
        except FileNotFoundError:
            continue
        yield from _entry(store, path, relative, state, owner)


def _entry(store: Store, path: Path, relative: str, state: os.stat_result, owner: int) -> Iterator[Finding]:
    """What is to be said of one name, and of what lies below it."""
    folder, regular = os.path.isdir(path), stat.S_ISREG(state.st_mode)
    if not path.name.isprintable():
        yield Finding(path, "odd-name", UNPRINTABLE)
    elif _unfinished(path.name):
        dead = regular and (is_left_over(path.name) or time.time() - state.st_mtime > LEFTOVER_AGE_S)
        yield Finding(path, "temporary-file" if dead else "unfinished-file")
    elif folder and _FOLDERS.fullmatch(relative):
        if relative not in _NOT_LOOKED_INTO:
            yield from _modes(path, os.stat(path), owner)
            yield from _listed(store, path, f"{relative}/", owner)
    elif regular and _FILES.fullmatch(relative):
        yield from _modes(path, state, owner)
    elif relative in _OWN_CHECKS:
        return
    elif _FILES.fullmatch(relative) or not (folder or regular) or (_FOLDERS.fullmatch(relative) and "/" not in relative):
        what = KINDS.get(stat.S_IFMT(state.st_mode), "a file" if regular else "a device")
        yield Finding(path, "odd-file", f"it is {what}, not {'a file' if _FILES.fullmatch(relative) else 'a folder'}")
    elif path.name[0] != ".":
        yield Finding(path, "foreign-file")


def _unfinished(name: str) -> bool:
    return name.startswith(TEMPORARY) or (name.startswith("catalog.") and name.endswith(".part"))


def _modes(path: Path, state: os.stat_result, owner: int) -> Iterator[Finding]:
    wanted = _OWNERS_FOLDER if stat.S_ISDIR(state.st_mode) else _OWNERS_FILE
    if state.st_mode & _OTHERS or state.st_mode & wanted != wanted:
        yield Finding(path, "open-mode", f"it has mode {stat.S_IMODE(state.st_mode):o}")
    if state.st_uid != owner:
        yield Finding(path, "foreign-owner", f"it belongs to user {state.st_uid}, the store to {owner}")
