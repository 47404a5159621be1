"""`actordbg unpatch`: take the capture hook away again."""

from __future__ import annotations

import typer

from actordbg.cli.options import Json, store_of
from actordbg.cli.output import emit
from actordbg.cli.patch import DryRun, Python, TargetFile, render


def unpatch(
    ctx: typer.Context,
    python: Python = None,
    target: TargetFile = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Take the capture hook out again, byte for byte.

    Restores the bytes, mode and modification time that OpenRLHF's actor.py had. Keeps an edit that was made to the file
    since. Where cutting the hook off would be guesswork, leaves the file as it is, names a way out and ends with exit code 3.
    A running job keeps its hook until it ends.

    Example: actordbg unpatch --dry-run
    """
    from actordbg.install import patching as operate
    from actordbg.install.patch_target import find_target

    emit(operate.unpatch(find_target(python, target), store_of(ctx), dry_run=dry_run), render, as_json)
