"""`actordbg store pull|push`: a store behind a URL into a folder, and back (`store.staging`).

`staged` is for the other commands: those that can work on a mirror of such a store get one, the others are refused.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from actordbg.base.errors import Refused, StoreProblem, UsageError
from actordbg.cli.output import as_json, human_bytes, note, plural, say
from actordbg.store.layout import Store
from actordbg.store.staging import Mirror, Moved, Pusher, split_runs


def pull(
    url: Annotated[str, typer.Argument(metavar="URL[#RUN,...]", help="The store: s3://bucket/store, hdfs://..., memory://...")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that mirrors it.")],
) -> None:
    """Download new files of a remote store into a folder.

    Deletes nothing. With #RUN,... dumps and packs of these runs only; everything else comes whole. Exit code 1 if something
    could not be brought. Records of replays are as another user's from then on: continuing with one takes --yes.

    Example: actordbg store pull s3://bucket/store#ppo-7b ./store
    """
    _move(url, folder, "staged")


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder: a store of this machine.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to put it.")],
) -> None:
    """Upload a folder's new files to a remote store.

    Deletes nothing. What is there already comes in first, so what both sides changed is found. Exit code 1 if something
    could not be put there.

    Example: actordbg store push ./store s3://bucket/store
    """
    Store(folder).require()
    _move(url, folder, "pushed")


def _move(url: str, folder: Path, what: str) -> None:
    if "://" not in url:
        raise UsageError(f"bad URL {url!r:.60}", hint="s3://bucket/store, hdfs://host/store; a folder needs no staging: cp -r")
    began = time.monotonic()
    address, runs = split_runs(url)
    if runs and what == "pushed":
        raise UsageError(f"a push puts every run there, not {', '.join(runs)[:60]} alone", hint=f"store push {folder} {address}")
    mirror = Mirror(address, folder.absolute(), runs)
    moved = mirror.pull()
    if what == "pushed":
        moved = mirror.push()
    elif not mirror.is_there:
        raise StoreProblem(f"there is no store at {address}", hint="check the URL; `actordbg store push DIR URL` puts one there")
    seconds = time.monotonic() - began
    answer = {"url": address, "folder": str(folder), "seconds": seconds} | vars(moved)
    if not as_json(answer):
        say(in_words(what, moved, address, seconds))
    if moved.skipped:
        raise typer.Exit(1)


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
    between, skipped = "from" if what == "staged" else "to", [f"{path} ({why})" for path, why in moved.skipped.items()]
    left = f"; {len(skipped)} not {what}: {', '.join(skipped[:_NAMED])}{', ...' * (len(skipped) > _NAMED)}" if skipped else ""
    copied = f"{plural(moved.files, 'file')} ({human_bytes(moved.bytes)})"
    return f"{what} {copied} {between} {address} in {seconds:.1f} s{left}"
