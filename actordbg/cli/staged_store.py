"""A store behind a URL, for a command that can work on a mirror of it (`store.staging`); the others are refused here."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from actordbg.base.errors import Refused, StoreProblem
from actordbg.cli.output import human_bytes, note, plural

if TYPE_CHECKING:
    from actordbg.store.layout import Store
    from actordbg.store.staging import Moved, Pusher

_NAMED = 5
"""Skipped files that are named."""
NOT_THERE = {
    "run": "training processes write into a folder", "patch": "the hook writes into a folder",
    "unpatch": "backups lie in a folder",
    "demo": "it records a training", "attach": "its sockets are this machine's", "dump enable": "jobs watch a file of a folder",
    "dump disable": "jobs watch a file of a folder", "dump recover": "rings are this machine's",
    "dump pack": "it moves dumps under a lock", "dump unpack": "it moves dumps under a lock", "dump prune": "it deletes dumps",
    "fsck": "it looks at a store where it lies, and moves files",
}  # fmt: skip
"""Commands that need rename, locks or deletion in the store itself, and what for."""


def staged(ctx: typer.Context, url: str, store: Store) -> None:
    """Bring the mirror up to date once in a process, push while the command runs, and push the rest when it ends."""
    from actordbg.store.staging import Mirror, Pusher, split_runs

    root = ctx.find_root()
    if root.meta.get(__name__) is not None:
        return
    name = ctx.command_path.removeprefix(root.command_path).strip()
    if why := NOT_THERE.get(name):
        hint = f"work in a folder: `actordbg store pull {url} DIR`; `store push` puts back what is new, and deletes nothing"
        raise Refused(f"{name} does not work on a store behind a URL: {why}", hint=hint)
    address, runs = split_runs(url)
    mirror = Mirror(address, store.root, runs)
    began, moved = time.monotonic(), mirror.pull()
    if mirror.was_there and not mirror.is_there:
        hint = f"its mirror is {store.root}: `actordbg store push` puts it there again; or remove it"
        raise StoreProblem(f"there is no store at {address} any more", hint=hint)
    if moved.files or moved.skipped:
        note(in_words("staged", moved, address, time.monotonic() - began))
    pusher = root.meta[__name__] = Pusher(mirror, note)
    root.call_on_close(lambda: _finish(pusher, address))


def push_now(ctx: typer.Context) -> None:
    """Put there what is here, since other machines are about to read it."""
    pusher = ctx.find_root().meta.get(__name__)
    if pusher is not None:
        pusher.mirror.push()


def _finish(pusher: Pusher, address: str) -> None:
    began, moved = time.monotonic(), pusher.close()
    if moved.files or moved.skipped:
        note(in_words("pushed", moved, address, time.monotonic() - began))


def in_words(what: str, moved: Moved, address: str, seconds: float) -> str:
    """What was copied and how fast, and by name what was not."""
    between, told = "from" if what == "staged" else "to", [f"{path} ({why})" for path, why in moved.skipped.items()]
    left = f"; {len(told)} not {what}: {', '.join(told[:_NAMED])}{', ...' * (len(told) > _NAMED)}" if told else ""
    copied = f"{plural(moved.files, 'file')} ({human_bytes(moved.bytes)})"
    return f"{what} {copied} {between} {address} in {seconds:.1f} s{left}"
