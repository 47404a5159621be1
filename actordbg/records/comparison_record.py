"""What `actordbg compare A B` finds: figures for each dump, a verdict for each dump, and one verdict for both replays.

A record is one file, `store/comparisons/<comparison_id>.json` (`actordbg.records.stored_record`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from actordbg.records.stored_record import StoredRecord

MATCH = "match"
"""Within the thresholds."""
WITHIN_NOISE = "within-noise"
"""Outside the thresholds, but no further than the configuration moves by itself."""
MISMATCH = "mismatch"
NOT_COMPARED = "not-compared"
"""Nothing could be compared. Never a success."""

GOOD = (MATCH, WITHIN_NOISE)
"""The verdicts that are a success."""


@dataclass(frozen=True)
class Figures:
    """How far values `a` are from values `b`, over `count` of them. None: not defined here, or not finite.

    Absolute differences in the values' own unit (nats for log-probs), relative ones to |b| (where b is not 0). `p95_*`
    and `p99_*` are percentiles. Equal values differ by 0 also where both are infinite or NaN. `nonfinite` values are not finite
    on one side only, or not the same: where there are any, every other figure but clip_share (which counts them) is None.
    cosine: of the two vectors; distance: |a - b| / |b| of the two vectors. For log-probs only: kl_k1 = mean(b - a) and
    kl_k3 = mean(exp(a - b) - 1 - (a - b)), Schulman's estimators of KL(b || a) from samples of b
    (http://joschu.net/blog/kl-approx.html), in nats; clip_share: share of tokens whose ratio exp(a - b) is outside 0.8 to 1.2,
    PPO's usual clip band. max_ulp: largest distance in units of last place of the dtype that both were computed in (see
    `numerics.ulp`); None for unequal dtypes. rms_abs: root mean square of the differences, for log-probs.
    """

    count: int
    max_abs: float | None = None
    mean_abs: float | None = None
    p95_abs: float | None = None
    p99_abs: float | None = None
    max_rel: float | None = None
    mean_rel: float | None = None
    p95_rel: float | None = None
    p99_rel: float | None = None
    cosine: float | None = None
    kl_k1: float | None = None
    kl_k3: float | None = None
    clip_share: float | None = None
    max_ulp: int | None = None
    distance: float | None = None
    nonfinite: int = 0
    rms_abs: float | None = None


@dataclass(frozen=True)
class WorstToken:
    """One token of one row, by its place in the mask's shape: the values on both sides and their difference, in nats.

    `token_id`: the token that the log-prob is of, as it was captured; None where the dump is gone. `difference` is None where
    one side is not finite.
    """

    row: int
    position: int
    a: float | None
    b: float | None
    difference: float | None
    token_id: int | None = None


@dataclass(frozen=True)
class ParameterFigures:
    """How far one parameter's gradients are apart. `sampled`: over a fixed sample of its elements, not all of them."""

    name: str
    figures: Figures
    sampled: bool = False


@dataclass(frozen=True)
class DumpComparison:
    """One dump on both sides. `reasons`: what made it a mismatch, in words. `not_compared`: by what, why it was not.
    A mismatch without figures is a dump that A failed on and B did not.

    sequences: figures over the rows' sums of log-probs. loss_abs: |a - b|. grad_norm_rel: |a - b| / |b|. gradients: over
    all parameters together; `parameters`: the worst ones; parameter_distance: the largest of a single one, `worst_parameter`
    (`judge.dump_figures`). worst_tokens: by absolute difference. beyond_noise: what is above the noise floor though
    within the thresholds: real, and small enough; empty without a floor. limits: measured on this dump, where they were.
    parameter_seen: a relative error of any one parameter's gradient that would have been outside. distances: of the worst dumps,
    how far each parameter's gradients are apart.
    """

    dump_id: str
    verdict: str
    reasons: tuple[str, ...] = ()
    beyond_noise: tuple[str, ...] = ()
    seq_len: int | None = None
    log_probs: Figures | None = None
    sequences: Figures | None = None
    entropy: Figures | None = None
    loss_abs: float | None = None
    grad_norm_rel: float | None = None
    gradients: Figures | None = None
    parameter_distance: float | None = None
    worst_parameter: str = ""
    parameters: tuple[ParameterFigures, ...] = ()
    worst_tokens: tuple[WorstToken, ...] = ()
    not_compared: dict[str, str] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    parameter_seen: float | None = None
    distances: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SideInfo:
    """One side of a comparison. kind: "replay", "truth" or "golden"; `replay_id` None for golden; `label`: its
    configuration in words; `settings`: the same by name, {} in files of earlier versions.
    """

    kind: str
    replay_id: str | None
    label: str
    dtype: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ComparisonRecord(StoredRecord):
    """`actordbg compare A B`: both sides, the thresholds that were applied, a verdict overall and for each dump, worst
    dumps first. rounding_id: the replay that says what the dtype's rounding does to each dump, where limits follow it; a dump
    then has `limits` of its own. excludes: the smallest faults that would have been a mismatch (`judge.measured_limits`).
    """

    what: ClassVar[str] = "comparison"

    comparison_id: str
    created_at: str
    a: SideInfo
    b: SideInfo
    thresholds: dict[str, float]
    verdict: str
    dumps: tuple[DumpComparison, ...]
    thresholds_from: str = ""
    rounding_id: str | None = None
    noise_id: str | None = None
    reasons: tuple[str, ...] = ()
    excludes: dict[str, float | None] = field(default_factory=dict)

    @property
    def good(self) -> bool:
        """Something was compared, and none of it is a mismatch."""
        return self.verdict in GOOD

    @property
    def unjudged(self) -> tuple[str, ...]:
        """What the verdict says nothing about, in words: dumps, gradients, and gradients of which only the norm was judged."""
        said = []
        left = [dump for dump in self.dumps if dump.verdict == NOT_COMPARED]
        if left:
            why = next((reason for dump in left for reason in dump.not_compared.values()), "")
            said.append(f"{len(left)} of {len(self.dumps)} dumps: {why}")
        without = [why for dump in self.dumps if (why := _gradients_left(dump))]
        if without:
            said.append(f"the gradients of {len(without)} of {len(self.dumps)} dumps: {without[0]}")
        by_norm = sum(dump.grad_norm_rel is not None and dump.gradients is None for dump in self.dumps)
        if by_norm:
            said.append(
                f"the gradients of {by_norm} of {len(self.dumps)} dumps, but for their norm (--keep-gradients keeps them)"
            )
        return tuple(said)


def _gradients_left(dump: DumpComparison) -> str:
    """Why A's gradients of a compared dump were not judged; "" if they were, or if A has none."""
    if dump.log_probs is None or dump.grad_norm_rel is not None or dump.gradients is not None:
        return ""
    reasons = (why for what, why in dump.not_compared.items() if what.startswith("gradient"))
    return next((why for why in reasons if not why.startswith("only B")), "")


# What `actordbg noise` measures: how far one configuration moves by itself, for each dump and each measure.
#
# A record is one file, `store/noise/<noise_id>.json` (`actordbg.records.stored_record`).


@dataclass(frozen=True)
class NoiseVariant:
    """One way of running the same inputs again, and how far that moved them. `name`: repeat, repad, rebatch or reorder."""

    name: str
    replay_id: str
    log_probs: Figures | None = None
    grad_norm_rel: float | None = None


@dataclass(frozen=True)
class DumpNoise:
    """The floor for one dump: the largest movement over all variants, by the names of `Figures` and DumpComparison."""

    dump_id: str
    floor: dict[str, float]


@dataclass(frozen=True)
class NoiseRecord(StoredRecord):
    """`actordbg noise`: how far one configuration moves by itself. `replay_id`: the unchanged run. `config`: as asked for.

    `floor`: over all dumps, by the same names as a dump's. `reasons`: what could not be measured, or is a fault and no
    noise, and why.
    """

    what: ClassVar[str] = "noise floor"

    noise_id: str
    created_at: str
    replay_id: str
    config: dict[str, Any]
    label: str
    dtype: str | None
    variants: tuple[NoiseVariant, ...]
    dumps: tuple[DumpNoise, ...]
    floor: dict[str, float]
    reasons: tuple[str, ...] = ()
