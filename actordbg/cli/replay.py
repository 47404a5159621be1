"""`actordbg replay`: run recorded inputs through a standalone actor, and save the result of each."""

from __future__ import annotations

from typing import Any

import typer

from actordbg.cli import output
from actordbg.cli.options import (
    approve,
    option,
    refuse_beside,
    require_good,
    settings_of,
    stored,
)
from actordbg.cli.output import emit, note, say_answer, say_lines
from actordbg.cli.replay_options import ChosenInputs, EngineOptions, StopOptions
from actordbg.cli.setting_options import NONE, Given, takes_settings


@takes_settings("replay")
def replay(
    ctx: typer.Context,
    inputs: ChosenInputs = ChosenInputs(),
    settings: Given = NONE,
    stopping: StopOptions = StopOptions(),
    machines: EngineOptions = EngineOptions(),
    everything: bool = option(False, "Replay every dump without asking.", "--all", heading="Inputs", rank=20),
    resume: str | None = option(
        None,
        "Continue a stopped replay under its own configuration.",
        metavar="[REPLAY|last]",
        rank=11,
        autocompletion=stored("replay"),
    ),
    yes: bool = option(
        False,
        "Accept what another user wrote or what came from a URL, and let nodes listen for an editor.",
        "--yes",
        "-y",
        rank=30,
    ),
    dry_run: bool = option(False, "Print the plan; start nothing.", rank=12),
    print_config: bool = option(False, "Print settings and inputs as a file for --config; start nothing.", rank=30),
) -> None:
    """Replay recorded inputs outside the job.

    Runs the selected dumps through OpenRLHF's Actor under one configuration, and starts the workers itself. An input that crashes
    or hangs a worker loses only its own result. Results are saved as they arrive: Ctrl-C keeps them, and --resume continues.
    --break pauses at a breakpoint with a prompt.

    Exit code: 1 if an input failed, crashed, hung or was stopped at a prompt, if a law fails, or if ranks disagree under --align
    same; 5 if no dump was selected.

    Example: actordbg replay --where "seq_len>1800 and rank=0" --max-inputs 3 --backend deepspeed --zero-stage 3
    """
    from actordbg.actor.model_code import require_consent
    from actordbg.cli import replaying
    from actordbg.cli.replay_work import ask_for_all, run_planned, say_plan
    from actordbg.config.sources import FSDP_OFF, as_toml, fsdp_is_off
    from actordbg.replay.plan import Plan
    from actordbg.replay.supervise import spec_and_owner

    flags = replaying.flags_of(settings)
    if print_config and resume is None:
        return emit(replaying.config_of(ctx, flags), lambda tables: say_lines(as_toml(tables)))
    store, inputs = replaying.opened(ctx, inputs, writes=not dry_run)
    of_asked: dict[str, Any] = {"settings_from": {}, "recorded_model": None}
    if resume is not None:
        why = "--resume keeps the replay's own configuration"  # settings implied by a surrounding launcher do not count as typed
        refuse_beside(ctx, why, "resume", "yes", "dry_run", groups=(StopOptions, EngineOptions))
        spec, owner = spec_and_owner(store, resume)
        if spec.config.backend == "fsdp2" and fsdp_is_off():
            note(f"{FSDP_OFF} has no effect: --resume keeps the replay's own configuration")
        approve(f"replay {spec.replay_id}, whose model is {spec.config.model!r}", owner, yes)
        require_consent(spec.config.model, store.models)
        plan = Plan(spec)
    else:
        ask = not (dry_run or output.wanted.silent)
        requested, plan, own = replaying.asked_and_planned(ctx, store, flags, inputs, judged=False, ask=ask)
        of_asked = {"settings_from": requested.sources, "recorded_model": own}
        if not (everything or inputs.where is not None or inputs.max_inputs or inputs.input_file):
            ask_for_all(store, plan.spec, dry_run=dry_run)
    if not dry_run and plan.spec.inputs:
        apart, spans = settings_of(ctx).url is not None, machines.spans_nodes(plan.spec.config)
        stopping = stopping.on(machines.engine, several_nodes=spans, apart=apart, yes=yes)
        machines.run(ctx, f"replay {plan.spec.replay_id}")
    answer, problem = run_planned(store, plan, stopping, dry_run=dry_run, **of_asked)
    if answer.blocks:
        say_answer(answer)
    elif answer["selected"] or output.wanted.json:
        emit(answer.data, say_plan)
    if not answer["selected"]:
        raise replaying.nothing_to("replay", store, inputs)
    if problem is not None:
        raise problem
    if answer["status"] == "interrupted":
        raise typer.Exit(130)
    return require_good(answer.ok)
