"""`actordbg noise`: measure a configuration's own numerical noise, so that `compare` does not report it as a difference."""

from __future__ import annotations

import typer

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
    from actordbg.cli.terminal import conclude, flags_of, opened

    flags = flags_of(settings)
    store = opened(ctx, machines=machines)
    conclude(store, store.noise(chosen.selection, **flags))
