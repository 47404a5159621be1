"""`actordbg compare`: how far a replay is from another one, from the truth, or from what the training run got."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from actordbg.base.errors import EnvironmentProblem, StoreProblem, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.base.ids import LAST
from actordbg.catalog.query import get_configuration, open_fresh, read_noise, select_dumps
from actordbg.cli import output
from actordbg.cli.completion import complete_others, complete_replays
from actordbg.cli.input_options import counting, replaying, settle
from actordbg.cli.options import (
    ConfirmOption,
    Format,
    FormatOption,
    Json,
    Power,
    Quiet,
    TrustRemoteCode,
    Where,
    approve,
    chosen_format,
    store_of,
    take_consent,
    takes,
)
from actordbg.cli.page_file import HtmlFile, TokenizerFile, check_page, texts_of, write_page
from actordbg.cli.setting_options import OldTruthDtype, TruthDtype, truth_dtype
from actordbg.compare.comparing import compare as compare_sides
from actordbg.compare.comparing import save
from actordbg.compare.find_truth import ensure_rounding, ensure_truth, find_truth, require_torch, wanted_truth
from actordbg.compare.noise_floor import newest_for
from actordbg.compare.thresholds import FLAGS, Thresholds
from actordbg.config import consent
from actordbg.config.as_ran import as_ran, label
from actordbg.config.replay_config import TINY
from actordbg.formats.comparison_record import ComparisonRecord
from actordbg.formats.noise_record import NoiseRecord
from actordbg.formats.weight_hashes import RECORDED_WEIGHTS
from actordbg.replay.live_catalog import LiveCatalog
from actordbg.replay.supervise import load_spec, spec_and_owner
from actordbg.replay.warm_groups import WarmGroups
from actordbg.report.blocks import Block, Paragraph, as_data
from actordbg.report.comparison_charts import comparison_charts
from actordbg.report.comparison_document import document
from actordbg.report.renderings import as_markdown, as_text
from actordbg.store.layout import Store

_PANEL = "Thresholds (inf: not judged)"


def _limit(name: str, help: str) -> Any:
    return typer.Option(name, metavar="X", help=help, rich_help_panel=_PANEL)


@dataclass(frozen=True)
class LimitOptions:
    """Thresholds, as typed."""

    max_abs: Annotated[float | None, _limit("--max-abs", "Largest difference of a log-prob, nats.")] = None
    p99_abs: Annotated[float | None, _limit("--p99-abs", "99th percentile of the differences, nats.")] = None
    mean_abs: Annotated[float | None, _limit("--mean-abs", "Mean difference, nats.")] = None
    clip_share: Annotated[float | None, _limit("--clip-share", "Share of tokens whose ratio is outside 0.8 to 1.2.")] = None
    entropy_max_abs: Annotated[float | None, _limit("--entropy-max-abs", "Largest difference of an entropy, nats.")] = None
    loss_abs: Annotated[float | None, _limit("--loss-abs", "Difference of the losses.")] = None
    grad_norm_rel: Annotated[float | None, _limit("--grad-norm-rel", "Relative difference of the gradient norms.")] = None
    gradient_distance: Annotated[float | None, _limit("--gradient-distance", "|a - b| / |b| of all kept gradients.")] = None
    parameter_distance: Annotated[float | None, _limit("--parameter-distance", "The same of the worst single parameter.")] = None


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
    noise: Annotated[
        str | None,
        typer.Option(
            "--noise",
            metavar="[ID|last]",
            help="Only what is outside a noise floor (`actordbg noise`) is real; last: the newest of A's configuration.",
        ),
    ] = None,
    truth: TruthDtype = None,
    oracle: OldTruthDtype = None,
    trust_remote_code: TrustRemoteCode = False,
    yes: ConfirmOption = False,
    thresholds: Annotated[
        Path | None, typer.Option("--thresholds", metavar="FILE", help="Thresholds from a TOML file; flags come first.")
    ] = None,
    flags: LimitOptions = LimitOptions(),
    flat: Annotated[
        bool,
        typer.Option(
            "--flat-limits",
            help="Judge bf16 and fp16 by the same limits for every model, not by what rounding does to each dump.",
            rich_help_panel=_PANEL,
        ),
    ] = False,
    power: Power = False,
    where: Where = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="How many of the worst dumps to show; 0 for all.")] = 10,
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
    take_consent(trust_remote_code)
    chosen, dtype = chosen_format(format, as_json), truth_dtype(truth, oracle)
    check_page(html)
    texts = texts_of(tokenizer)
    limits = (Thresholds.from_file(thresholds) if thresholds else Thresholds()).override(asdict(flags), FLAGS)
    store = store_of(ctx).require()
    silent = quiet or chosen == "json"
    if power and (flat or b != "truth"):
        raise UsageError("--power plants faults beside the truth", hint="compare REPLAY truth --power, without --flat-limits")
    if a in ("truth", "golden"):
        raise UsageError(f"A is the side that is judged, so it cannot be {a}", hint=f"turn them round: compare REPLAY {a}")
    judged = _meant(store, a, silent)
    floor = None if noise is None else _floor(store, judged, noise)
    only = _selected(store, where)
    rounding = None
    if b == "truth":
        with WarmGroups() as warm:
            b = _truth(store, judged, dtype, silent, yes, warm)
            rounding = None if flat else _rounding(store, judged, silent, warm, power)
    elif b != "golden":
        b = _meant(store, b, silent)
    with output.progress("comparing", None, quiet=silent) as advance:

        def on_progress(done: int, total: int) -> None:
            advance(1, total=total)

        record = compare_sides(
            store, judged, b, thresholds=limits, noise=floor, rounding=rounding, only=only, on_progress=on_progress
        )
    path = _kept(store, record)
    settle(store, LiveCatalog(store))
    moves = floor.floor.get("max_abs") if floor else None
    charts = comparison_charts(store, record, texts, moves) if html or chosen == "json" else []
    blocks = document(record, limit, charts)
    if b == "golden" and (said := _weights(store, judged)):
        blocks.insert(1, Paragraph(f"Weights: {said}."))
    write_page(html, blocks)
    told = vars(record) | as_data(blocks) if chosen == "json" else record
    output.emit(told, lambda _: _render(blocks, chosen, path), chosen == "json")
    if not record.good:
        raise typer.Exit(1)


def _meant(store: Store, name: str, silent: bool) -> str:
    """The replay that a name means. For `last` it is said which one that was: a store may be shared."""
    row = get_configuration(store, name)
    if name == LAST and not silent:
        what = label(as_ran(row.config, row.resolved))
        output.note(f"last is {row.replay_id}: {what}, {row.status}; {row.command or 'no command recorded'}")
    return row.replay_id


def _weights(store: Store, replay_id: str) -> str:
    """Whether a replay had the weights that the run recorded; "" where it recorded none."""
    return str((get_configuration(store, replay_id).resolved or {}).get(RECORDED_WEIGHTS, ""))


def _selected(store: Store, where: str | None) -> set[str] | None:
    """Ids of the dumps that --where selects, None without it. Asked first: a mistake in it must not cost a truth."""
    return None if where is None else {row.dump_id for row in select_dumps(open_fresh(store, where), where)}


def _floor(store: Store, replay_id: str, name: str) -> NoiseRecord:
    """The noise floor that was named; for "last" the newest that was measured under the configuration of this replay."""
    if name != "last":
        return read_noise(store, name)
    found = newest_for(store, replay_id)
    if found is None:
        raise UsageError(
            f"no noise floor was measured under the configuration of {replay_id}",
            hint=f"measure one: {_noise_command(store, replay_id)}",
        )
    return found


def _noise_command(store: Store, replay_id: str) -> str:
    """The replay's own command line, for `noise`."""
    words, mark = consent.words_of(load_spec(store, replay_id).command)
    taken = [word for word in words if word not in ("--keep-tensors", "--keep-gradients")]
    if "replay" not in taken:
        return "actordbg noise with the same options as that replay"
    taken[taken.index("replay")] = "noise"
    return " ".join(map(in_shell, taken)) + mark


def _kept(store: Store, record: ComparisonRecord) -> Path | None:
    """Where the comparison is kept. In a store that cannot be written it is shown all the same, and not kept."""
    try:
        return save(store, record)
    except StoreProblem as problem:
        output.note(f"this comparison is not kept: {problem.message}")
        return None


def _truth(store: Store, replay_id: str, dtype: str, quiet: bool, yes: bool, warm: WarmGroups) -> str:
    """The id of the truth of a replay's inputs, computed now if it is not there; a foreign replay's model is confirmed."""
    spec, owner = spec_and_owner(store, replay_id)
    wanted = wanted_truth(store, spec, dtype)
    if (found := find_truth(store, wanted)) is not None:
        return found
    require_torch(wanted)
    if spec.config.model != TINY:
        approve(f"replay {spec.replay_id}, whose model {spec.config.model!r} would be loaded", owner, yes)
    store.require_writable()
    with replaying(store, "computing the truth", len(wanted.inputs), quiet=quiet) as (catalog, advance):
        return ensure_truth(store, replay_id, dtype=dtype, on_event=counting(catalog, advance), on_tick=catalog.tick, warm=warm)


def _rounding(store: Store, replay_id: str, quiet: bool, warm: WarmGroups, planted: bool) -> str | None:
    """The replay that says what the dtype costs each dump, computed now if it is not there; None for flat limits."""
    total = len(load_spec(store, replay_id).inputs)
    try:
        with replaying(store, "measuring what the dtype costs", total, quiet=quiet) as (catalog, advance):
            on_event = counting(catalog, advance)
            return ensure_rounding(store, replay_id, planted=planted, on_event=on_event, on_tick=catalog.tick, warm=warm)
    except (
        StoreProblem,
        EnvironmentProblem,
    ) as problem:  # a store that cannot be written, or read without torch, may have its truth
        output.note(f"what the dtype costs is not measured: {problem.message}")
        return None


def _render(blocks: list[Block], chosen: Format, path: Path | None) -> None:
    output.say_lines(as_markdown(blocks) if chosen == "md" else as_text(blocks))
    if path is not None:
        output.note(f"kept as {path}")
