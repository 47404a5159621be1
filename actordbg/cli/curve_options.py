"""The options of `actordbg curve`, which both of its commands take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

from actordbg.cli.completion import complete_replays
from actordbg.cli.options import ConfirmOption, Explain, Json, Quiet, Where, option_field
from actordbg.cli.page_file import HtmlFile


@dataclass(frozen=True)
class Question:
    """What both commands take."""

    replays: list[str] | None = typer.Argument(
        None, metavar="[REPLAY...|last|all]", help="Replays by id, name or @1 (default: all).", autocompletion=complete_replays
    )
    matrix: str | None = option_field(None, "The replays of this matrix's cells.", metavar="ID|last")
    where: Where = None
    at: list[int] | None = option_field(
        None, "What this length needs, and whether it fits; may be repeated.", metavar="LEN", min=1, max=2**53
    )
    by: Literal["seq_len", "padded", "tokens"] = option_field(
        "seq_len", "Length is seq_len (a curve for each batch size), padded (batch size x seq_len), or real tokens."
    )
    measure: str | None = option_field(
        None,
        (
            "First make inputs of these lengths and replay them under the configuration of each REPLAY, changed by the "
            "settings below."
        ),
        metavar="LEN,LEN,...",
    )
    batch_size: int | None = option_field(None, "Rows of the inputs of --measure (default: as in REPLAY).", min=1)
    plot: Path | None = option_field(None, "Also draw the curves: .svg, .png or .pdf.", metavar="FILE")
    limit: int = option_field(24, "At most this many lengths of each curve; 0 for all.", min=0)
    html: HtmlFile = None
    explained: Explain = False
    format: Literal["text", "md", "json", "csv"] | None = option_field(
        None, "How to write the answer (default: text). csv: a row for each measured length.", "--format", "-f"
    )
    yes: ConfirmOption = False
    quiet: Quiet = False
    as_json: Json = False
