"""`actordbg noise`: measure a configuration's own numerical noise, so that `compare` does not report it as a difference."""

from __future__ import annotations

from dataclasses import replace

import typer

from actordbg.cli.output import say_document
from actordbg.cli.replay_options import ChosenInputs, EngineOptions
from actordbg.cli.setting_options import NONE, Given, takes_settings


@takes_settings("noise")
def noise(
    ctx: typer.Context,
    chosen: ChosenInputs = ChosenInputs(),
    settings: Given = NONE,
    machines: EngineOptions = EngineOptions(),
) -> None:
    """Measure a configuration's own numerical noise.

    Replays the same inputs unchanged, a second time, with more padding, with every row twice and with rows reversed; and row by
    row in the configuration's dtype and in a wider dtype. Results should not depend on any of that, so every change is noise.
    `actordbg compare A B --noise` then reports only differences beyond this noise floor. Runs up to seven replays, which stay in
    the store.

    Example: actordbg noise --max-inputs 5 --dtype bf16 --packing
    """
    from actordbg.api.planning import counting
    from actordbg.cli import replaying
    from actordbg.judge.noise_floor import conclusion, deterministic, measure_noise, moves_most, noise_page, runs_of, tokens_of

    flags = replaying.flags_of(settings)
    store, chosen = replaying.opened(ctx, chosen)
    config = replaying.asked_for(ctx, flags).config
    config = replace(config, keep_tensors=True, keep_gradients=config.backward is not False)
    plan = replaying.planned(store, config, chosen)
    spec = plan.spec
    if not spec.inputs:
        raise replaying.nothing_to("measure noise on", store, chosen)
    machines.run(ctx, f"noise of {spec.replay_id}")
    replaying.require_runnable(store, spec, announce=False)
    steps = len(spec.inputs) * runs_of(spec)
    with replaying.replaying(store, "measuring noise", steps) as advance:
        record = measure_noise(
            store,
            spec,
            on_run=lambda name: advance(0, note=name),
            on_event=counting(advance),
            on_passed_over=advance,
        )
    most = moves_most(record)
    answer = {name: getattr(record, name) for name in ("noise_id", "replay_id", "label", "dtype")} | {
        "dumps": len(record.dumps),
        "tokens": tokens_of(record),
        "floor": record.floor,
        "variants": record.variants,
        "moves_most": most.name if most else None,
        "deterministic": deterministic(record),
        "conclusion": conclusion(record),
        "reasons": record.reasons,
        "skipped": plan.skipped,
    }
    say_document(noise_page(record), data=answer)
