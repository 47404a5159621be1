"""`actordbg locate`: name the module in which a configuration goes wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from actordbg.cli.options import ConfirmOption, approve, refuse_beside, require_good, stored
from actordbg.cli.output import say_answer
from actordbg.cli.replay_options import ChosenInputs
from actordbg.cli.setting_options import NONE, Given, takes_settings

if TYPE_CHECKING:
    from actordbg.records.replay_record import ReplaySpec, ResultRecord
    from actordbg.store.layout import Store


@takes_settings("locate")
def locate(
    ctx: typer.Context,
    replay: str | None = typer.Argument(
        None,
        metavar="REPLAY",
        help="Use the configuration and inputs of this replay: an id, a name, `@1` or `last`.",
        autocompletion=stored("replay"),
    ),
    chosen: ChosenInputs = ChosenInputs(),
    settings: Given = NONE,
    yes: ConfirmOption = False,
) -> None:
    """Name the module in which a configuration goes wrong.

    Loads transformers' own model of the same checkpoint beside the Actor's. Compares what both are, bit for bit: parameters,
    buffers, ties, attributes. Then runs one input (most rows, most padding) with the truth's values in front of every module, and
    measures what each module adds, in units of what the dtype costs a healthy model there: 1.00 everywhere if all is right.

    Exit code: 1 if anything is wrong or nothing could be checked; 5 if no dump was selected.

    Example: actordbg locate last

    Example: actordbg locate --where "rank=0" --model /models/llama-3.1-8b --dtype bf16 --packing
    """
    from actordbg.api.locating import locate_answer
    from actordbg.cli import replaying

    flags = replaying.flags_of(settings)
    if replay is not None:
        refuse_beside(ctx, "a replay has its own configuration and inputs", "replay", "yes")
    store, chosen = replaying.opened(ctx, chosen)
    if replay is not None:
        spec = spec_of(store, replay, yes)
    else:
        spec = replaying.planned(store, replaying.asked_for(ctx, flags).config, chosen).spec
    if not spec.inputs:
        raise replaying.nothing_to("locate a fault with", store, chosen)
    spec, results = run_located(store, spec)
    answer = locate_answer(spec, results)
    say_answer(answer)
    require_good(answer.ok)


def run_located(store: Store, spec: ReplaySpec, command: str = "") -> tuple[ReplaySpec, Sequence[ResultRecord]]:
    """Judge the model of `spec` module by module on one of its inputs, in another replay; return that and its results.

    command: what the replay records as its command, "" for this command line.
    """
    from actordbg.api.locating import of_one_input
    from actordbg.api.planning import counting
    from actordbg.cli import replaying
    from actordbg.cli.options import command_line
    from actordbg.replay.replay_data import data_of
    from actordbg.replay.supervise import run_replay

    spec = of_one_input(spec, command or command_line())
    replaying.require_runnable(store, spec)
    with replaying.replaying(store, "locating", 1) as advance:
        run_replay(store, spec, on_event=counting(advance))
    return spec, data_of(store, spec).results


def spec_of(store: Store, name: str, yes: bool) -> ReplaySpec:
    """Read a replay's specification. Raises UsageError for a truth; asks before another user's model is loaded."""
    from actordbg.actor.model_code import require_consent
    from actordbg.base.errors import UsageError
    from actordbg.catalog.query import open_fresh
    from actordbg.cli.compare_work import meant
    from actordbg.replay.supervise import spec_and_owner

    spec, owner = spec_and_owner(store, meant(open_fresh(store), name))
    if spec.config.truth is not None:
        raise UsageError(f"replay {spec.replay_id} is itself a truth", hint="name a replay of the configuration to check")
    approve(f"replay {spec.replay_id}, whose model is {spec.config.model!r}", owner, yes)
    require_consent(spec.config.model, store.models)
    return spec
