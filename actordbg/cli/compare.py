"""`actordbg compare`: how far a replay is from another one, from the truth, or from what the training run got."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from actordbg.base.errors import UsageError
from actordbg.cli import output
from actordbg.cli.completion import complete_others, complete_replays
from actordbg.cli.options import (
    ConfirmOption,
    FormatOption,
    Json,
    Power,
    Quiet,
    TrustRemoteCode,
    Where,
    chosen_format,
    option,
    option_field,
    store_of,
    take_consent,
    takes,
)
from actordbg.cli.page_file import HtmlFile, TokenizerFile, check_page, texts_of, write_page
from actordbg.cli.setting_options import TruthDtype, truth_dtype

_PANEL = "Thresholds (inf: not judged)"


@dataclass(frozen=True)
class LimitOptions:
    """Thresholds, as typed."""

    panel: ClassVar[str] = _PANEL

    max_abs: float | None = option_field(None, "Largest difference of a log-prob, nats.", metavar="X")
    p99_abs: float | None = option_field(None, "99th percentile of the differences, nats.", metavar="X")
    mean_abs: float | None = option_field(None, "Mean difference, nats.", metavar="X")
    clip_share: float | None = option_field(None, "Share of tokens whose ratio is outside 0.8 to 1.2.", metavar="X")
    entropy_max_abs: float | None = option_field(None, "Largest difference of an entropy, nats.", metavar="X")
    loss_abs: float | None = option_field(None, "Difference of the losses.", metavar="X")
    grad_norm_rel: float | None = option_field(None, "Relative difference of the gradient norms.", metavar="X")
    gradient_distance: float | None = option_field(None, "|a - b| / |b| of all kept gradients.", metavar="X")
    parameter_distance: float | None = option_field(None, "The same of the worst single parameter.", metavar="X")


@takes("flags", LimitOptions)
def compare(
    ctx: typer.Context,
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="The replay that is judged: an id, a name, `@1` or `last`.", autocompletion=complete_replays
        ),
    ],
    b: Annotated[
        str,
        typer.Argument(
            metavar="B",
            help="Another replay, `truth`, or `golden`: what the training run itself got.",
            autocompletion=complete_others,
        ),
    ],
    noise: str | None = option(
        None,
        "Only what is outside a noise floor (`actordbg noise`) is real; last: the newest of A's configuration.",
        metavar="[ID|last]",
    ),
    truth: TruthDtype = None,
    trust_remote_code: TrustRemoteCode = False,
    yes: ConfirmOption = False,
    thresholds: Path | None = option(None, "Thresholds from a TOML file; flags come first.", metavar="FILE"),
    flags: LimitOptions = LimitOptions(),
    flat: bool = option(
        False,
        "Judge bf16 and fp16 by the same limits for every model, not by what rounding does to each dump.",
        "--flat-limits",
        rich_help_panel=_PANEL,
    ),
    power: Power = False,
    where: Where = None,
    limit: int = option(10, "How many of the worst dumps to show; 0 for all.", min=0),
    format: FormatOption = None,
    html: HtmlFile = None,
    tokenizer: TokenizerFile = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare a replay with another one, or with the truth.

    B may also be `golden`: what the training run itself got. Compares dump by dump, over the dumps that both sides have:
    log-probs per token and per sequence, entropies, loss, gradient norm and kept gradients. Thresholds follow the weaker
    dtype of the two sides unless a file or a flag sets them. Computes the truth if it is not there yet; `last` is the newest
    replay that is no truth. The comparison is kept in comparisons/, and `report` shows it. Exit code 1 on a mismatch, if A
    failed on an input that B passed, and if nothing could be compared.

    Example: actordbg compare last truth --noise
    """
    from actordbg.catalog.query import open_fresh
    from actordbg.cli.compare_work import kept, meant, render, selected, weights
    from actordbg.cli.live_progress import settle
    from actordbg.document.blocks import Paragraph, as_data
    from actordbg.judge.comparing import compare as compare_sides
    from actordbg.judge.comparison_charts import comparison_charts
    from actordbg.judge.comparison_document import document
    from actordbg.judge.thresholds import FLAGS, Thresholds
    from actordbg.replay.replay_data import LiveCatalog

    take_consent(trust_remote_code)
    chosen, dtype = chosen_format(format, as_json), truth_dtype(truth)
    check_page(html)
    texts = texts_of(tokenizer)
    limits = (Thresholds.from_file(thresholds) if thresholds else Thresholds()).override(asdict(flags), FLAGS)
    store = store_of(ctx).require()
    silent = quiet or chosen == "json"
    if power and (flat or b != "truth"):
        raise UsageError("--power plants faults beside the truth", hint="compare REPLAY truth --power, without --flat-limits")
    if a in ("truth", "golden"):
        raise UsageError(f"A is the side that is judged, so it cannot be {a}", hint=f"turn them round: compare REPLAY {a}")
    catalog = open_fresh(store)
    judged = meant(catalog, a, silent)
    floor = None
    if noise is not None:
        from actordbg.cli.compare_truth import noise_of

        floor = noise_of(store, judged, noise)
    only = selected(store, where)
    rounding = None
    if b == "truth":
        from actordbg.cli.compare_truth import truth_and_rounding

        b, rounding = truth_and_rounding(store, judged, dtype, flat=flat, planted=power, quiet=silent, yes=yes)
    elif b != "golden":
        b = meant(catalog, b, silent)
    with output.progress("comparing", None, quiet=silent) as advance:

        def on_progress(done: int, total: int) -> None:
            advance(1, total=total)

        record = compare_sides(
            store, judged, b, thresholds=limits, noise=floor, rounding=rounding, only=only, on_progress=on_progress
        )
    path = kept(store, record)
    settle(store, LiveCatalog(store))
    moves = floor.floor.get("max_abs") if floor else None
    charts = comparison_charts(store, record, texts, moves) if html or chosen == "json" else []
    blocks = document(record, limit, charts)
    if b == "golden" and (said := weights(store, judged)):
        blocks.insert(1, Paragraph(f"Weights: {said}."))
    write_page(html, blocks)
    told = vars(record) | as_data(blocks) if chosen == "json" else record
    output.emit(told, lambda _: render(blocks, chosen, path), chosen == "json")
    if not record.good:
        raise typer.Exit(1)
