"""`actordbg replay`: run recorded inputs through a standalone actor, and save the result of each."""

from __future__ import annotations

from typing import Annotated

import typer

from actordbg.base.option import Option
from actordbg.cli.options import Given, refuse_beside
from actordbg.cli.replay_options import ChosenInputs, EngineOptions, StopOptions


def replay(
    ctx: typer.Context,
    *,
    inputs: ChosenInputs,
    settings: Given,
    stopping: StopOptions,
    machines: EngineOptions,
    everything: Annotated[bool, Option("--all", heading="Inputs", rank=20)] = False,
    resume: Annotated[str | None, Option(rank=11)] = None,
    yes: Annotated[bool, Option("-y", rank=30)] = False,
    dry_run: Annotated[bool, Option(rank=12)] = False,
) -> object:
    """Replay recorded inputs outside the job.

    Runs the selected dumps through OpenRLHF's Actor under one configuration, and starts the workers itself. An input that crashes
    or hangs a worker loses only its own result. Results are saved as they arrive: Ctrl-C keeps them, and --resume continues.
    --break pauses at a breakpoint with a prompt.

    Exit code: 1 if an input failed, crashed, hung or was stopped at a prompt, if a law fails, or if ranks disagree under --align
    same; 5 if no dump was selected.

    Example: actordbg replay --where "seq_len>1800 and rank=0" --max-inputs 3 --backend deepspeed --zero-stage 3

    Args:
        everything: Replay every dump without asking.
        resume ([REPLAY|last]): Continue a stopped replay under its own configuration.
        yes: Accept what another user wrote or what came from a URL, and let nodes listen for an editor.
        dry_run: Print the plan; start nothing.
    """
    from actordbg.cli.terminal import ReplayTerminal, opened

    store = opened(ctx, terminal=ReplayTerminal(ctx, machines, stopping, yes=yes, everything=everything))
    if resume is not None:
        why = "--resume keeps the replay's own configuration"  # settings implied by a surrounding launcher do not count as typed
        refuse_beside(ctx, why, "resume", "yes", "dry_run", groups=(StopOptions, EngineOptions))
        return store.replay_again(resume, dry_run=dry_run)
    return store.replay(inputs.selection, dry_run=dry_run, **settings)
