"""`actordbg compare`: how far a replay is from another replay, from the truth, or from the run's own outputs.
`actordbg compare-logs`: the losses of training runs, step by step, read from their logs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

import typer

from actordbg.base.errors import UsageError
from actordbg.cli import output
from actordbg.cli.options import (
    ConfirmOption,
    Limit,
    Power,
    TrustRemoteCode,
    Where,
    option,
    parameter,
    require_good,
    store_of,
    stored,
    take_consent,
    takes_options,
)
from actordbg.cli.output import TokenizerFile, note, progress, say_document, texts_of
from actordbg.cli.setting_options import TruthDtype, truth_dtype

_PANEL = "Thresholds (inf: not checked)"
_LIMITS = {
    "max_abs": "Limit for the largest log-prob difference, nats.",
    "p99_abs": "Limit for the 99th percentile of log-prob differences, nats.",
    "mean_abs": "Limit for the mean log-prob difference, nats.",
    "clip_share": "Limit for the share of tokens whose ratio is outside 0.8 to 1.2 (PPO's clip fraction).",
    "entropy_max_abs": "Limit for the largest entropy difference, nats.",
    "loss_abs": "Limit for the difference of the losses.",
    "grad_norm_rel": "Limit for the relative difference of the gradient norms.",
    "gradient_distance": "Limit for |a - b| / |b| over all kept gradients.",
    "parameter_distance": "Limit for |a - b| / |b| of the worst single parameter.",
}
_LIMIT_OPTIONS = [
    parameter(name, float | None, option(None, told, f"--{name.replace('_', '-')}", metavar="X", heading=_PANEL, rank=30))
    for name, told in _LIMITS.items()
]


@takes_options("limits", _LIMIT_OPTIONS, dict)
def compare(
    ctx: typer.Context,
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="Replay under test: an id, a name, `@1` or `last`.",
            autocompletion=stored("replay"),
        ),
    ],
    b: Annotated[
        str,
        typer.Argument(
            metavar="B",
            help="Another replay, `truth`, or `recorded`: the run's own outputs.",
            autocompletion=stored("replay", "truth", "recorded"),
        ),
    ],
    noise: str | None = option(
        None,
        "Ignore differences within a noise floor (`actordbg noise`); last: the newest for A's settings.",
        metavar="[ID|last]",
    ),
    truth: TruthDtype = None,
    trust_remote_code: TrustRemoteCode = False,
    yes: ConfirmOption = False,
    limits: Mapping[str, float | None] = MappingProxyType({}),
    flat: bool = option(
        False,
        "Use fixed limits instead of rounding measured on each dump.",
        "--flat-limits",
        heading=_PANEL,
        rank=30,
    ),
    power: Power = False,
    where: Where = None,
    limit: int = option(10, "Show the N worst dumps; 0 for all.", min=0),
    tokenizer: TokenizerFile = None,
) -> None:
    """Compare a replay with another, or with the truth.

    B may also be `recorded`: the run's own recorded outputs. Compares each dump that both sides have: log-probs per token and per
    sequence, entropies, loss, gradient norm and kept gradients. Thresholds follow the less precise dtype of the two sides unless
    a flag sets them. Computes the truth if it does not exist yet; `last` is the newest replay that is not a truth. Saves the
    comparison in comparisons/, and `report` shows it.

    Exit code: 1 on a mismatch, if A failed on an input that B passed, or if nothing could be compared.

    Example: actordbg compare last truth --noise
    """
    from actordbg.catalog.query import open_fresh, select_dumps
    from actordbg.cli import compare_work as work
    from actordbg.cli.replaying import settle
    from actordbg.document.blocks import Paragraph
    from actordbg.judge.comparing import compare as compare_sides
    from actordbg.judge.comparison_document import comparison_charts, document
    from actordbg.judge.sides import RECORDED_NAMES
    from actordbg.judge.thresholds import asked
    from actordbg.judge.wrong_tokens import wrong_tokens
    from actordbg.records.comparison_record import MISMATCH

    take_consent(trust_remote_code)
    dtype = truth_dtype(truth)
    texts = texts_of(tokenizer)
    thresholds = asked(limits)
    store = store_of(ctx).require()
    if power and (flat or b != "truth"):
        raise UsageError("--power needs a truth comparison", hint="compare REPLAY truth --power, without --flat-limits")
    if a in ("truth", *RECORDED_NAMES):
        raise UsageError(f"A is the side under test; it cannot be {a}", hint=f"swap them: compare REPLAY {a}")
    catalog = open_fresh(store)
    judged = work.meant(catalog, a)
    floor = None if noise is None else work.noise_of(store, judged, noise)
    # evaluated first: a typo in --where must not cost the computation of a truth
    only = None if where is None else {row.dump_id for row in select_dumps(open_fresh(store, where), where)}
    rounding = None
    if b == "truth":
        b, rounding = work.truth_and_rounding(store, judged, dtype, flat=flat, planted=power, yes=yes)
    elif b not in RECORDED_NAMES:
        b = work.meant(catalog, b)
    with progress("comparing", None) as advance:
        record = compare_sides(
            store,
            judged,
            b,
            thresholds=thresholds,
            noise=floor,
            rounding=rounding,
            only=only,
            on_progress=lambda done, total: advance(1, total=total),
        )
    if b in RECORDED_NAMES and record.verdict == MISMATCH:
        record = work.explained(store, record, yes)
    path = work.kept(store, record)
    settle(store)
    moves = floor.floor.get("max_abs") if floor else None
    charts = comparison_charts(store, record, texts, moves) if output.wanted.whole or output.wanted.opened else []
    blocks = document(record, limit, charts)
    if (pattern := wrong_tokens(store, record)) is not None:
        blocks.insert(2, Paragraph(f"Wrong tokens: {pattern.sentence}."))
    if b in RECORDED_NAMES and (weights := work.recorded_weights(store, judged)):
        blocks.insert(2, Paragraph(f"Weights: {weights}."))
    say_document(blocks, data={**vars(record), "good": record.good})
    if path is not None and not output.wanted.json:
        note(f"saved as {path}")
    require_good(record.good)


def compare_logs(
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG",
            help="Logs, plain or .gz; - for standard input; TensorBoard event files or their folder; W&B exports as .csv "
            "(FILE#RUN selects a run) or .jsonl.",
        ),
    ],
    each: bool = option(False, "Compare every pair of logs (default: all with the first)."),
    metric: str | None = option(
        None,
        (
            "Metric to compare (default: the first that both logs have of gpt_loss, loss, policy_loss, act_loss, "
            "actor_loss, critic_loss, loss_mean, then any other loss)."
        ),
        metavar="NAME",
    ),
    threshold: float = option(0.05, "Relative difference at which values are too far apart."),
    rule: str = option(
        "first-mean-last",
        "Pass rule: first, mean and last value; or every step.",
        metavar="first-mean-last|every-step",
    ),
    limit: Limit = 10,
) -> None:
    """Compare training losses step by step.

    Reads the losses from training logs (progress bars included), TensorBoard files and W&B exports. Compares any number of logs
    with the first. A relative difference is |a - b| / max(|a|, |b|). Lists the steps that reach --threshold, the largest
    difference first, and says whether the losses fall.

    Exit code: 1 if the rule is not met, a value is NaN or infinite, or the logs have fewer than three steps in common.

    Example: actordbg compare-logs deepspeed.log fsdp2.log fsdp2_tp2.log --threshold 0.05 --plot losses.png
    """
    from actordbg.measure.align_logs import compare_many, together
    from actordbg.measure.log_document import log_charts, logs_page
    from actordbg.measure.log_lines import read_log

    if len(logs) < 2:
        raise UsageError("compare-logs needs at least two logs", hint="name two or more")
    if logs.count("-") > 1:
        raise UsageError("standard input can be only one of the logs", hint="pass - once, and files for the others")
    read = [read_log(path, metric) for path in logs]
    pairs = compare_many(read, each=each, metric=metric, threshold=threshold, rule=rule, limit=limit)
    charts = log_charts(pairs, read) if output.wanted.files or output.wanted.opened else []
    whole = together(pairs)
    say_document(logs_page(pairs, charts), data=vars(pairs[0] if len(logs) == 2 else whole))
    require_good(whole.good)
