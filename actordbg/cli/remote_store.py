"""`actordbg store pull|push`: sync a store behind a URL with a folder (`store.staging`).

`staged` serves the other commands: it gives a command a local mirror of such a store, or refuses commands that cannot use one.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from actordbg.base.errors import Refused, StoreProblem, UsageError
from actordbg.base.units import listed, some
from actordbg.cli.output import human_bytes, keep_answer, note, plural, say

if TYPE_CHECKING:
    from actordbg.store.layout import Store
    from actordbg.store.staging import Moved, Pusher


def pull(url: str, folder: Path) -> None:
    """Download new files of a remote store into a folder.

    Deletes nothing. With #RUN,..., downloads dumps and packs of these runs only, and all other files. Downloaded replay records
    count as another user's: continuing such a replay needs --yes.

    Exit code: 1 if a file could not be downloaded.

    Example: actordbg store pull s3://bucket/store#ppo-7b ./store

    Args:
        url (URL[#RUN,...]): Remote store: s3://bucket/store, hdfs://..., memory://...
        folder (DIR): Local folder that mirrors it.
    """
    _move(url, folder, "staged")


def push(folder: Path, url: str) -> None:
    """Upload a folder's new files to a remote store.

    Deletes nothing. Downloads new remote files first, to detect files that both sides changed.

    Exit code: 1 if a file could not be uploaded.

    Example: actordbg store push ./store s3://bucket/store

    Args:
        folder (DIR): Local store.
        url (URL): Destination.
    """
    from actordbg.store.layout import Store

    Store(folder).require()
    _move(url, folder, "pushed")


def _move(url: str, folder: Path, what: str) -> None:
    from actordbg.store.staging import Mirror, split_runs

    if "://" not in url:
        raise UsageError("bad URL: no ://", hint="pass s3://bucket/store or hdfs://host/store; for a folder, use cp -r")
    began = time.monotonic()
    address, runs = split_runs(url)
    if runs and what == "pushed":
        raise UsageError(f"push uploads every run, not only {listed(runs)[:60]}", hint=f"run store push {folder} {address}")
    mirror = Mirror(address, folder.absolute(), runs)
    moved = mirror.pull()
    if what == "pushed":
        moved = mirror.push()
    elif not mirror.is_there:
        raise StoreProblem(f"there is no store at {address}", hint="check the URL; `actordbg store push DIR URL` creates one")
    seconds = time.monotonic() - began
    answer = {"url": mirror.url, "folder": str(folder), "seconds": seconds} | vars(moved)
    keep_answer(answer)
    say(in_words(what, moved, mirror.url, seconds))
    if moved.skipped:
        raise typer.Exit(1)


_NAMED = 5
"""Number of skipped files to list."""
NOT_THERE = {
    "run": "training processes write to a local folder", "patch": "the hook writes to a local folder",
    "demo": "it records a training run", "attach": "it uses local sockets",
    "dump enable": "jobs poll a file in a local folder", "dump disable": "jobs poll a file in a local folder",
    "dump recover": "flight recorder files are local",
    "dump pack": "it moves dumps under a lock", "dump unpack": "it moves dumps under a lock", "dump prune": "it deletes dumps",
    "store fsck": "it checks a store in place, and moves files",
}  # fmt: skip
"""Commands that need a local store (rename, locks or deletion), and why."""


def staged(ctx: typer.Context, url: str, store: Store) -> None:
    """Update the mirror once per process, push new files while the command runs, and push the rest when it ends."""
    from actordbg.store.staging import Mirror, Pusher, split_runs

    root = ctx.find_root()
    if root.meta.get(__name__) is not None:
        return
    name = ctx.command_path.removeprefix(root.command_path).strip()
    if why := NOT_THERE.get(name):
        hint = f"work in a folder: `actordbg store pull {url} DIR`; later, `store push` uploads new files and deletes nothing"
        raise Refused(f"{name} does not work on a store behind a URL: {why}", hint=hint)
    address, runs = split_runs(url)
    mirror = Mirror(address, store.root, runs)
    began, moved = time.monotonic(), mirror.pull()
    if mirror.was_there and not mirror.is_there:
        hint = f"its mirror is {store.root}: upload it with `actordbg store push`, or remove it"
        raise StoreProblem(f"the store at {address} is gone", hint=hint)
    if not mirror.is_there:
        note(f"there is no store at {mirror.url} yet")
    if moved.files or moved.skipped:
        note(in_words("staged", moved, mirror.url, time.monotonic() - began))
    pusher = root.meta[__name__] = Pusher(mirror, note)
    root.call_on_close(lambda: _finish(pusher))


def push_now(ctx: typer.Context) -> None:
    """Upload new files now, because other machines are about to read them."""
    pusher = ctx.find_root().meta.get(__name__)
    if pusher is not None:
        pusher.mirror.push()


def _finish(pusher: Pusher) -> None:
    began, moved = time.monotonic(), pusher.close()
    if moved.files or moved.skipped:
        note(in_words("pushed", moved, pusher.mirror.url, time.monotonic() - began))


def in_words(what: str, moved: Moved, address: str, seconds: float) -> str:
    """Describe what was copied and how fast, and list what was not."""
    between, skipped = "from" if what == "staged" else "to", [f"{path} ({why})" for path, why in moved.skipped.items()]
    left = f"; {len(skipped)} not {what}: {some(skipped, _NAMED)}" if skipped else ""
    copied = f"{plural(moved.files, 'file')} ({human_bytes(moved.bytes)})"
    return f"{what} {copied} {between} {address} in {seconds:.1f} s{left}"
