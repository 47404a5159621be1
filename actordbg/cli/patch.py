"""`actordbg patch` and `unpatch`: put the capture hook into the trainer's actor.py, and take it out.

Both find the file, as `status` does, in the same way: by --target, in the environment of --python, or in this interpreter's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from actordbg.cli.options import Json, store_of
from actordbg.cli.output import emit, note, say, say_lines

if TYPE_CHECKING:
    from actordbg.install.patching import Outcome


Python = Annotated[
    Path | None, typer.Option("--python", metavar="EXE", help="The interpreter of the training environment (default: this one).")
]
TargetFile = Annotated[
    Path | None, typer.Option("--target", metavar="FILE", help="The actor.py itself, instead of an interpreter.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would change as a diff; change nothing.")]


def patch(
    ctx: typer.Context, python: Python = None, target: TargetFile = None, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Append the capture hook to OpenRLHF's actor.py.

    Jobs that start from now on can record actor inputs; nothing is recorded until `actordbg dump enable`. The existing lines
    stay as they are, and `actordbg unpatch` takes the hook out again. The command succeeds only if the interpreter was seen to
    run the hook.

    Example: actordbg --store /data/store patch --python /opt/train/bin/python
    """
    from actordbg.install import patching as operate
    from actordbg.install.patch_target import find_target

    answer = operate.patch(find_target(python, target), store_of(ctx), dry_run=dry_run)
    emit(answer, _say_outcome, as_json)
    if not as_json and not dry_run:
        note("next: actordbg dump enable, before or while the job runs")


def unpatch(
    ctx: typer.Context, python: Python = None, target: TargetFile = None, dry_run: DryRun = False, as_json: Json = False
) -> None:
    """Take the capture hook out again, byte for byte.

    Restores the bytes, mode and modification time that OpenRLHF's actor.py had. Keeps an edit that was made to the file
    since. Where cutting the hook off would be guesswork, leaves the file as it is, names a way out and ends with exit code 3.
    A running job keeps its hook until it ends.

    Example: actordbg unpatch --dry-run
    """
    from actordbg.install import patching as operate
    from actordbg.install.patch_target import find_target

    emit(operate.unpatch(find_target(python, target), store_of(ctx), dry_run=dry_run), _say_outcome, as_json)


def _say_outcome(outcome: Outcome) -> None:
    """The outcome of patch or unpatch as text: the diff (dry run), one line, details, notes on standard error."""
    if outcome.diff:
        say_lines(outcome.diff)
    say(f"{'dry run, ' if outcome.dry_run else ''}{outcome.action}: {outcome.file}")
    if outcome.openrlhf_version:
        say(f"  openrlhf  {outcome.openrlhf_version}")
    if outcome.store:
        say(f"  store     {outcome.store}")
    if outcome.backup:
        say(f"  backup    {outcome.backup}")
    if outcome.sha256_before == outcome.sha256_after:
        say(f"  sha256    {outcome.sha256_after} (unchanged)")
    else:
        say(f"  sha256    {outcome.sha256_before}")
        say(f"         -> {outcome.sha256_after}")
    for line in outcome.notes:
        note(f"note: {line}")
