"""`actordbg status`: is actor.py patched, and would a job that starts now capture?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from actordbg.cli.options import Json, store_of
from actordbg.cli.output import cell, emit, note, say
from actordbg.cli.patch import Python, TargetFile

if TYPE_CHECKING:
    from actordbg.install.patch_state import Status


def render(answer: Status) -> None:
    """One line for the state, one for each fact; notes on standard error."""
    say(f"{answer.state.value}: {answer.file}")
    if answer.reason:
        say(f"  {answer.reason}")
    facts = {
        "openrlhf": answer.openrlhf_version,
        "python": answer.python,
        "sha256": answer.sha256,
        "original": answer.original_sha256,
        "store": answer.store,
        "patched at": answer.patched_at,
        "hook seen": answer.hooked,
        "dumping": "enabled" if answer.enabled else "disabled",
        "capture": "armed" if answer.armed else "off",
    }
    for name, value in facts.items():
        say(f"  {name:<10}  {cell(value)}")
    for line in answer.notes:
        note(f"note: {line}")


def status(
    ctx: typer.Context,
    python: Python = None,
    target: TargetFile = None,
    as_json: Json = False,
) -> None:
    """Say whether actor.py is patched and dumping is enabled.

    Also names the interpreter, the version of OpenRLHF and the store that the hook captures into.

    Example: actordbg status --json
    """
    from actordbg.install.patch_state import inspect_target
    from actordbg.install.patch_target import find_target

    emit(inspect_target(find_target(python, target), store_of(ctx)), render, as_json)
