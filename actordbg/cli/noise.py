"""`actordbg noise`: how far one configuration moves by itself, so that nobody takes that for a difference."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from actordbg.cli import output
from actordbg.cli.engine_options import EngineOptions
from actordbg.cli.input_options import ChosenInputs, Shuffle
from actordbg.cli.options import Json, Quiet, takes
from actordbg.cli.page_file import HtmlFile, check_page, write_page
from actordbg.cli.setting_options import NONE, Given, takes_settings

if TYPE_CHECKING:
    from actordbg.records.comparison_record import NoiseRecord
    from actordbg.records.replay_record import ReplaySpec
    from actordbg.store.layout import Store


@takes("chosen", ChosenInputs)
@takes("machines", EngineOptions)
@takes_settings("noise")
def noise(
    ctx: typer.Context,
    chosen: ChosenInputs = ChosenInputs(),
    shuffle_inputs: Shuffle = False,
    settings: Given = NONE,
    machines: EngineOptions = EngineOptions(),
    html: HtmlFile = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure how far a configuration moves by itself.

    Replays the same inputs unchanged, again, with more padding, with every row twice and with rows reversed; and row by row
    in the configuration's dtype against a wider one. Results must not depend on any of that, so a movement is noise. `actordbg
    compare A B --noise` then calls a difference real only outside of it. Runs up to seven replays, which stay in the store.

    Example: actordbg noise --max-inputs 5 --dtype bf16 --packing
    """
    from actordbg.cli.chosen_inputs import asked_for, chosen_order, is_left_to_rank_0, nothing_to, opened, planned
    from actordbg.document.renderings import as_text
    from actordbg.judge.noise_floor import conclusion, deterministic, moves_most, noise_page, tokens_of

    check_page(html)
    flags = dict(settings)
    if is_left_to_rank_0(flags):
        return
    store, chosen = opened(ctx, chosen)
    order = chosen_order(chosen.order, shuffle_inputs)
    config = asked_for(ctx, flags).config
    config = replace(config, keep_tensors=True, keep_gradients=config.backward is not False)
    plan = planned(store, config, chosen, order)
    if not plan.spec.inputs:
        raise nothing_to("measure noise on", store, chosen)
    machines.run(ctx, f"noise of {plan.spec.replay_id}")
    record = _measured(store, plan.spec, quiet=quiet or as_json)
    most, page = moves_most(record), noise_page(record)
    write_page(html, page)
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
    output.emit(answer, lambda _: output.say_lines(as_text(page)), as_json)


def _measured(store: Store, spec: ReplaySpec, *, quiet: bool) -> NoiseRecord:
    """Check the configuration, run all its replays with a progress bar, and leave the catalog up to date."""
    from actordbg.actor.hub_model import find_model
    from actordbg.actor.known_failures import check_config, find_trainer, refuse_hits
    from actordbg.cli.live_progress import counting, replaying
    from actordbg.judge.noise_floor import measure_noise, runs_of
    from actordbg.replay.selection import defaults_of

    defaults = defaults_of(store.root, spec.inputs)
    refuse_hits(check_config(spec.config, defaults=defaults))
    find_trainer(spec.config, defaults)
    find_model(spec.config.model)
    with replaying(store, "measuring noise", len(spec.inputs) * runs_of(spec), quiet=quiet) as (catalog, advance):
        return measure_noise(
            store,
            spec,
            on_run=lambda name: advance(0, note=name),
            on_event=counting(catalog, advance),
            on_tick=catalog.tick,
            on_passed_over=advance,
        )
