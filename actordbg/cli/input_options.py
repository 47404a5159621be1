"""The options that choose inputs, for the commands that replay them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from actordbg.base.units import MOST_NAMED
from actordbg.cli.options import Where, option_field

MOST_UNASKED = 50
"""Inputs that are replayed without a question where nothing selects them."""

Shuffle = Annotated[
    bool,
    typer.Option("--shuffle-inputs", rich_help_panel="The inputs", help="The same as --order shuffle: every worker in its own."),
]


@dataclass(frozen=True)
class ChosenInputs:
    """Which dumps to replay, as typed."""

    panel: ClassVar[str] = "The inputs"

    where: Where = None
    max_inputs: int | None = option_field(None, "At most N inputs, in all workers together.", min=1, metavar="N")
    input_file: list[Path] | None = option_field(
        None, "Replay this dump file, pack, PACK#ID, or old pickle (imported first); may be repeated.", metavar="FILE"
    )
    order: str | None = option_field(None, "In which order (default: time).", metavar="time|length|shuffle")
    allow_empty: bool = option_field(False, "Exit code 0, not 5, if nothing is selected.")
    failed: bool = option_field(False, "Only those whose last result is no pass.", "--failed", "--lf")
    longest: int | None = option_field(None, "The N longest.", min=1, max=MOST_NAMED, metavar="N")
    slowest: int | None = option_field(None, "The N slowest last forwards.", min=1, max=MOST_NAMED, metavar="N")
    diverse: int | None = option_field(None, "N that differ most.", min=1, max=MOST_NAMED, metavar="N")
    random_seed: int = option_field(42, "Of the shuffled order.")
