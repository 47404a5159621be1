"""`actordbg compare`: how far a replay is from another replay, from the truth, or from the run's own outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from actordbg.base.option import Option
from actordbg.cli import output
from actordbg.cli.options import (
    ConfirmOption,
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
    limits: ComparisonLimits,
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
    return store.compare(
        a,
        b,
        where=where,
        noise=noise,
        truth=truth_dtype(truth),
        flat=flat,
        power=power,
        worst=limit,
        tokenizer=tokenizer,
        charts=output.wanted.whole or output.wanted.opened,
        **vars(limits),
    )
