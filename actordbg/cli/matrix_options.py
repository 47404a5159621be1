"""The options of `actordbg matrix` that are its own; the axes come from the table of settings."""

from __future__ import annotations

from typing import Annotated

import typer

SkipKnown = Annotated[bool, typer.Option("--skip-known", help="Leave out cells that are known to fail; they are run otherwise.")]
NoTruth = Annotated[
    bool, typer.Option("--no-truth", help="Do not compare passed cells with the truth: green then means finished.")
]
BaselineOption = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="REPLAY|MATRIX",
        help="Exit 1 if a cell got worse than this replay, or than this matrix's cell with the same settings; "
        "failures that it has too are then no reason.",
    ),
]
Slower = Annotated[
    float | None,
    typer.Option("--slower", metavar="FACTOR", help="A cell this many times slower than the baseline has got worse."),
]
ResumeMatrix = Annotated[
    str | None,
    typer.Option("--resume", metavar="MATRIX|last", help="Go on with a matrix where it stopped."),
]
Show = Annotated[str | None, typer.Option("--show", metavar="MATRIX|last", help="Print a matrix that is there; run nothing.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the cells and run nothing.")]
