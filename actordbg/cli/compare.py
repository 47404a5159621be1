"""`actordbg compare`: how far a replay is from another replay, from the truth, or from the run's own outputs.
`actordbg compare-logs`: the losses of training runs, step by step, read from their logs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import typer

from actordbg.cli import output
from actordbg.cli.options import (
    ConfirmOption,
    Limit,
    Power,
    TrustRemoteCode,
    Where,
    argument,
    option,
    parameter,
    take_consent,
    takes_options,
)
from actordbg.cli.output import TokenizerFile
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
    a: str = argument(..., "A", "Replay under test: an id, a name, `@1` or `last`."),
    b: str = argument(..., "B", "Another replay, `truth`, or `recorded`: the run's own outputs."),
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
) -> object:
    """Compare a replay with another, or with the truth.

    B may also be `recorded`: the run's own recorded outputs. Compares each dump that both sides have: log-probs per token and per
    sequence, entropies, loss, gradient norm and kept gradients. Thresholds follow the less precise dtype of the two sides unless
    a flag sets them. Computes the truth if it does not exist yet; `last` is the newest replay that is not a truth. Saves the
    comparison in comparisons/, and `report` shows it.

    Exit code: 1 on a mismatch, if A failed on an input that B passed, or if nothing could be compared.

    Example: actordbg compare last truth --noise
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
        **limits,
    }
    return store.compare(a, b, where=where, noise=noise, tokenizer=tokenizer, **about)


def compare_logs(
    logs: list[str] = argument(
        ...,
        "LOG",
        "Logs, plain or .gz; - for standard input; exports as JSON, JSON lines or CSV; TensorBoard's event files; trackio's "
        "database. FILE#RUN selects a run.",
    ),
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
) -> object:
    """Compare training losses step by step.

    Reads the losses from training logs (progress bars included) and from exports of trackers. Compares any number of logs
    with the first. A relative difference is |a - b| / max(|a|, |b|). Lists the steps that reach --threshold, the largest
    difference first, and says whether the losses fall.

    Exit code: 1 if the rule is not met, a value is NaN or infinite, or the logs have fewer than three steps in common.

    Example: actordbg compare-logs deepspeed.log fsdp2.log fsdp2_tp2.log --threshold 0.05 -o losses.png
    """
    from actordbg.api.measuring import compare_logs

    charts = bool(output.wanted.files) or output.wanted.opened
    return compare_logs(logs, each=each, metric=metric, threshold=threshold, rule=rule, worst=limit, charts=charts)
