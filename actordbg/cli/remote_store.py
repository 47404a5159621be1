"""`actordbg store pull|push`: a store behind a URL into a folder, and back (`store.staging`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from actordbg.base.errors import StoreProblem, UsageError
from actordbg.cli.options import require_good
from actordbg.cli.output import emit, say


def pull(
    url: Annotated[str, typer.Argument(metavar="URL[#RUN,...]", help="The store: s3://bucket/store, hdfs://..., memory://...")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that mirrors it.")],
) -> None:
    """Bring what is new of a store behind a URL into a folder.

    Deletes nothing. With #RUN,... dumps and packs of these runs only; everything else comes whole. Exit code 1 if something
    could not be brought. Records of replays are as another user's from then on: going on with one takes --yes.

    Example: actordbg store pull s3://bucket/store#ppo-7b ./store
    """
    _move(url, folder, "staged")


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder: a store of this machine.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to put it.")],
) -> None:
    """Put what is new in a store's folder behind a URL.

    Deletes nothing. What is there already comes in first, so what both sides changed is found. Exit code 1 if something
    could not be put there.

    Example: actordbg store push ./store s3://bucket/store
    """
    from actordbg.store.layout import Store

    Store(folder).require()
    _move(url, folder, "pushed")


def _move(url: str, folder: Path, what: str) -> None:
    from actordbg.cli.staged_store import in_words
    from actordbg.store.staging import Mirror, split_runs

    if "://" not in url:
        raise UsageError(f"{url!r:.60} is no URL", hint="s3://bucket/store, hdfs://host/store; a folder needs no staging: cp -r")
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
    emit(answer, lambda _: say(in_words(what, moved, address, seconds)))
    require_good(not moved.skipped)
