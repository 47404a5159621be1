"""`actordbg actor init`: build only the actor, try it once, and say what it is."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import typer

from actordbg.cli import output
from actordbg.cli.options import Json, option, settings_of
from actordbg.cli.setting_options import NONE, Given, takes_settings


@takes_settings("actor init")
def init(
    ctx: typer.Context,
    settings: Given = NONE,
    batch_size: int = option(2, "Rows of the dummy input.", min=1),
    seq_len: int = option(128, "Positions of the dummy input, padding included.", min=4),
    save: Path | None = option(None, "Write the model there with save_pretrained.", metavar="DIR"),
    as_json: Json = False,
) -> None:
    """Build the actor alone and run one forward.

    The input is a dummy. Prints the settings that the built actor has, which may differ from those that were asked for.

    Example: actordbg actor init --backend deepspeed --zero-stage 2 --packing --backward
    """
    from actordbg.actor.find_trainer import find_trainer
    from actordbg.actor.hub_model import find_model
    from actordbg.actor.known_failures import check_config, refuse_hits
    from actordbg.base.owners import own_cache
    from actordbg.cli.actor_init_work import answer_of, render, run_init
    from actordbg.cli.chosen_inputs import asked_for
    from actordbg.replay.init_program import InitOrder

    config = asked_for(ctx, settings).config
    findings = check_config(config)
    refuse_hits(findings)
    find_trainer(config)
    find_model(config.model)
    for finding in findings:
        output.note(f"{finding.severity}[{finding.id}]: {finding.message}")
    target = None if save is None else str(save.absolute())
    store = settings_of(ctx).store
    models = own_cache("models") if store.is_dir() and not os.access(store, os.W_OK | os.X_OK) else store / "models"
    order = InitOrder(config.to_dict(), str(models), batch_size, seq_len, target)
    answer = answer_of(order, run_init(config, order), [asdict(finding) for finding in findings])
    output.emit(answer, render, as_json)
    if not answer.ok:
        raise typer.Exit(1)
