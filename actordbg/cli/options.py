"""Options that several commands share, as `Annotated` types, and the store that a command works on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from actordbg.base.errors import UsageError
from actordbg.config.sources import Settings, load_settings
from actordbg.store.layout import Store

Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Limit = Annotated[int, typer.Option("--limit", min=0, help="At most this many rows; 0 for all.")]
Where = Annotated[
    str | None,
    typer.Option("--where", metavar="EXPR", help='Select dumps by an SQL expression, e.g. "seq_len>4096 and rank=0".'),
]
OfRun = Annotated[str | None, typer.Option("--run", metavar="NAME", help="Only dumps of this training run.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it; without this the command only says what it would do.")]
Format = Literal["text", "md", "json", "csv"]
"""How an answer is written; only a report is written as CSV."""
FormatOption = Annotated[
    Literal["text", "md", "json"] | None,
    typer.Option("--format", "-f", help="How to write the answer (default: text). md can be pasted into an issue."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the answer.")]


def chosen_format(asked: Format | None, as_json: bool, usual: Format = "text") -> Format:
    """The format that --format and --json come to; UsageError where they contradict each other."""
    if as_json and asked not in (None, "json"):
        raise UsageError(f"--json and --format {asked} exclude each other", hint="name one of them")
    return "json" if as_json else asked or usual


def settings_of(ctx: typer.Context) -> Settings:
    """The merged settings of this invocation (`actordbg --store DIR COMMAND` comes first)."""
    root = ctx.find_root()
    flag: Path | None = root.params.get("store")
    return load_settings(Path(flag) if flag is not None else None)


def store_of(ctx: typer.Context) -> Store:
    """The store of this invocation; it may not exist yet (`Store.create`, `Store.require`)."""
    return Store(settings_of(ctx).store)
