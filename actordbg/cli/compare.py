"""`actordbg compare`: how far a replay is from another replay, from the truth, or from the run's own outputs.
`actordbg compare-logs`: the losses of training runs, step by step, read from their logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from actordbg.base.option import Option
from actordbg.cli import output
from actordbg.cli.options import (
    ConfirmOption,
    Limit,
    Power,
    TrustRemoteCode,
    Where,
    take_consent,
)
from actordbg.cli.output import TokenizerFile
from actordbg.cli.setting_options import TruthDtype, truth_dtype


@dataclass(frozen=True)
class ComparisonLimits:
    """Limits for a comparison, as typed.

    Args:
        max_abs: Limit for the largest log-prob difference, nats.
        p99_abs: Limit for the 99th percentile of log-prob differences, nats.
        mean_abs: Limit for the mean log-prob difference, nats.
        clip_share: Limit for the share of tokens whose ratio is outside 0.8 to 1.2 (PPO's clip fraction).
        entropy_max_abs: Limit for the largest entropy difference, nats.
        loss_abs: Limit for the difference of the losses.
        grad_norm_rel: Limit for the relative difference of the gradient norms.
        gradient_distance: Limit for |a - b| / |b| over all kept gradients.
        parameter_distance: Limit for |a - b| / |b| of the worst single parameter.
    """

    panel: ClassVar[str] = "Thresholds (inf: not checked)"
    rank: ClassVar[int] = 30

    max_abs: float | None = None
    p99_abs: float | None = None
    mean_abs: float | None = None
    clip_share: float | None = None
    entropy_max_abs: float | None = None
    loss_abs: float | None = None
    grad_norm_rel: float | None = None
    gradient_distance: float | None = None
    parameter_distance: float | None = None


def compare(
    ctx: typer.Context,
    a: str,
    b: str,
    *,
    noise: str | None = None,
    truth: TruthDtype = None,
    trust_remote_code: TrustRemoteCode = False,
    yes: ConfirmOption = False,
    limits: ComparisonLimits = ComparisonLimits(),
    flat: Annotated[bool, Option("--flat-limits", heading=ComparisonLimits.panel, rank=30)] = False,
    power: Power = False,
    where: Where = None,
    limit: Annotated[int, Option(min=0)] = 10,
    tokenizer: TokenizerFile = None,
) -> object:
    """Compare a replay with another, or with the truth.

    B may also be `recorded`: the run's own recorded outputs. Compares each dump that both sides have: log-probs per token and per
    sequence, entropies, loss, gradient norm and kept gradients. Thresholds follow the less precise dtype of the two sides unless
    a flag sets them. Computes the truth if it does not exist yet; `last` is the newest replay that is not a truth. Saves the
    comparison in comparisons/, and `report` shows it.

    Exit code: 1 on a mismatch, if A failed on an input that B passed, or if nothing could be compared.

    Example: actordbg compare last truth --noise

    Args:
        a (A): Replay under test: an id, a name, `@1` or `last`.
        b (B): Another replay, `truth`, or `recorded`: the run's own outputs.
        noise ([ID|last]): Ignore differences within a noise floor (`actordbg noise`); last: the newest for A's settings.
        flat: Use fixed limits instead of rounding measured on each dump.
        limit: Show the N worst dumps; 0 for all.
    """
    from actordbg.cli.terminal import opened

    take_consent(trust_remote_code)
    store = opened(ctx, yes=yes)
    charts = output.wanted.whole or output.wanted.opened
    about: dict[str, Any] = {
        "truth": truth_dtype(truth),
        "flat": flat,
        "power": power,
        "worst": limit,
        "charts": charts,
        **vars(limits),
    }
    return store.compare(a, b, where=where, noise=noise, tokenizer=tokenizer, **about)


def compare_logs(
    logs: list[str],
    *,
    each: bool = False,
    metric: str | None = None,
    threshold: float = 0.05,
    rule: str = "first-mean-last",
    limit: Limit = 10,
) -> object:
    """Compare training losses step by step.

    Reads the losses from training logs (progress bars included) and from exports of trackers. Compares any number of logs
    with the first. A relative difference is |a - b| / max(|a|, |b|). Lists the steps that reach --threshold, the largest
    difference first, and says whether the losses fall.

    Exit code: 1 if the rule is not met, a value is NaN or infinite, or the logs have fewer than three steps in common.

    Example: actordbg compare-logs deepspeed.log fsdp2.log fsdp2_tp2.log --threshold 0.05 -o losses.png

    Args:
        logs (LOG): Logs, plain or .gz; - for standard input; exports as JSON, JSON lines or CSV; TensorBoard's event
            files; trackio's database. FILE#RUN selects a run.
        each: Compare every pair of logs (default: all with the first).
        metric (NAME): Metric to compare (default: the first that both logs have of gpt_loss, loss, policy_loss,
            act_loss, actor_loss, critic_loss, loss_mean, then any other loss).
        threshold: Relative difference at which values are too far apart.
        rule (first-mean-last|every-step): Pass rule: first, mean and last value; or every step.
    """
    from actordbg.api.measuring import compare_logs

    charts = bool(output.wanted.files) or output.wanted.opened
    return compare_logs(logs, each=each, metric=metric, threshold=threshold, rule=rule, worst=limit, charts=charts)
