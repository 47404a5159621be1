"""`actordbg replay`: run captured inputs through a standalone actor, and keep what came of each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from actordbg.base.errors import UsageError
from actordbg.cli import output
from actordbg.cli.completion import complete_replays
from actordbg.cli.engine_options import EngineOptions
from actordbg.cli.input_options import MOST_UNASKED, ChosenInputs, Shuffle
from actordbg.cli.options import Json, Quiet, approve, option, settings_of, takes, typed_options
from actordbg.cli.setting_options import NONE, Given, takes_settings
from actordbg.cli.stop_options import StopOptions

if TYPE_CHECKING:
    from actordbg.config.sources import Asked


@takes("inputs", ChosenInputs)
@takes("stopping", StopOptions)
@takes("machines", EngineOptions)
@takes_settings("replay")
def replay(
    ctx: typer.Context,
    inputs: ChosenInputs = ChosenInputs(),
    shuffle_inputs: Shuffle = False,
    settings: Given = NONE,
    stopping: StopOptions = StopOptions(),
    machines: EngineOptions = EngineOptions(),
    everything: bool = option(
        False, f"Every dump, where they are more than {MOST_UNASKED}.", "--all", rich_help_panel="The inputs"
    ),
    resume: str | None = option(
        None,
        "Go on with a replay where it stopped, under its own configuration.",
        metavar="[REPLAY|last]",
        autocompletion=complete_replays,
    ),
    yes: bool = option(
        False, "Go on with what another user wrote or came from a URL, and let nodes listen for an editor.", "--yes", "-y"
    ),
    dry_run: bool = option(False, "Print the plan and start nothing.", "--dry-run"),
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Replay recorded inputs, without the training.

    Runs them through OpenRLHF's Actor under a configuration. Starts the workers itself (with deepspeed's own launcher for
    --backend deepspeed). An input that crashes or hangs a worker costs only itself. Results are kept as they come; Ctrl-C keeps
    what is done, and --resume goes on.
    --break stops in it, with a prompt. Exit code 1 if an input failed, crashed, hung or was stopped at a prompt, if a law is
    broken, or if ranks differ on the same input under --align same; 5 if nothing was selected.

    Example: actordbg replay --where "seq_len>1800 and rank=0" --max-inputs 3 --backend deepspeed --zero-stage 3
    """
    from actordbg.actor.model_code import require_consent
    from actordbg.cli.chosen_inputs import (
        ask_for_model,
        asked_for,
        chosen_order,
        is_left_to_rank_0,
        nothing_to,
        opened,
        planned,
        recorded_model,
    )
    from actordbg.cli.replay_answer import render
    from actordbg.cli.replay_work import BESIDE_RESUME, ask_for_all, narrowed, run_planned
    from actordbg.config.replay_config import TINY
    from actordbg.config.sources import FSDP_OFF, fsdp_is_off
    from actordbg.replay.plan import Plan
    from actordbg.replay.supervise import spec_and_owner

    flags = dict(settings)
    if is_left_to_rank_0(flags):
        return
    store, inputs = opened(ctx, inputs, writes=not dry_run)
    chosen = chosen_order(inputs.order, shuffle_inputs)
    asked: Asked | None = None
    if resume is not None:
        if named := typed_options(ctx, BESIDE_RESUME):  # what a launcher around us implies was not typed
            raise UsageError(
                f"--resume goes on under the replay's own configuration, so {named} cannot be given",
                hint="leave it out, or start a new replay",
            )
        spec, owner = spec_and_owner(store, resume)
        if spec.config.backend == "fsdp2" and fsdp_is_off():
            output.note(f"{FSDP_OFF} has no effect: a replay goes on under its own configuration")
        approve(f"replay {spec.replay_id}, whose model is {spec.config.model!r}", owner, yes)
        require_consent(spec.config.model, store.models)
        plan = Plan(spec)
    else:
        asked = asked_for(ctx, flags)
        plan = planned(store, asked.config, inputs, chosen)
        if not (dry_run or quiet or as_json) and (answers := ask_for_model(store, plan.spec, asked, flags)):
            asked = asked_for(ctx, flags)
            plan = planned(store, asked.config, inputs, chosen, answers)
        if not (everything or narrowed(inputs)):
            ask_for_all(store, plan.spec, dry_run=dry_run)
    if not dry_run and plan.spec.inputs:
        apart = settings_of(ctx).url is not None
        spans = machines.spans_nodes(plan.spec.config)
        stopping = stopping.on(machines.engine, several_nodes=spans, apart=apart, yes=yes)
        machines.run(ctx, f"replay {plan.spec.replay_id}")
    answer, problem = run_planned(store, plan, stopping, dry_run=dry_run, quiet=quiet or as_json)
    if asked is not None:
        given = flags.keys() | asked.sources.keys()
        own = recorded_model(store, plan.spec) if asked.config.model == TINY and "model" not in given else None
        answer = replace(answer, settings_from=asked.sources, recorded_model=own)
    if answer.selected or as_json:
        output.emit(answer, render, as_json)
    if not answer.selected:
        raise nothing_to("replay", store, inputs)
    if problem is not None:
        raise problem
    if answer.status == "interrupted":
        raise typer.Exit(130)
    if not answer.good and not dry_run:
        raise typer.Exit(1)
