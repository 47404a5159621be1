"""`actordbg noise`: how far one configuration moves by itself, so that nobody takes that for a difference."""

from __future__ import annotations

from dataclasses import replace

import typer

from actordbg.cli import output
from actordbg.cli.engine_options import EngineOptions
from actordbg.cli.input_options import ChosenInputs, Shuffle
from actordbg.cli.options import Json, Quiet, takes
from actordbg.cli.page_file import HtmlFile, check_page, write_page
from actordbg.cli.setting_options import NONE, Given, takes_settings


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
    from actordbg.cli.noise_work import answer_of, render, run
    from actordbg.report.other_pages import noise_page

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
    record = run(store, plan.spec, quiet=quiet or as_json)
    answer = answer_of(record, plan.skipped)
    write_page(html, noise_page(record, answer.deterministic, answer.conclusion))
    output.emit(answer, render, as_json)
