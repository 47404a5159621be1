"""Records of comparisons, noise floors and lints, each one JSON file (`actordbg.records.stored_record`).

    store/comparisons/<comparison_id>.json    one ComparisonRecord, written once
    store/noise/<noise_id>.json               one NoiseRecord, written once
    store/lints/<lint_id>.json                one LintRecord, written once

The catalog has rows of comparisons and lints alone; every other record is read from its file. Ids have the form of a replay's
(`20250619T052608-9f3a2c`), so they sort by time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from actordbg.records.finding import Finding, NotChecked, Rule
from actordbg.records.stored_record import Real, StoredRecord

MATCH = "match"
"""Within the thresholds."""
WITHIN_NOISE = "within-noise"
"""Outside the thresholds, but no further than the configuration moves on its own."""
MISMATCH = "mismatch"
NOT_COMPARED = "not-compared"
"""Nothing could be compared. This is never a success."""

GOOD = (MATCH, WITHIN_NOISE)
"""Verdicts that count as success."""


@dataclass(frozen=True)
class Figures:
    """Distance of values `a` from values `b`, over `count` of them. None: not defined here, or not finite.

    Absolute differences in the values' own unit (nats for log-probs). `p95_*` and `p99_*` are percentiles. Equal values differ
    by 0 even if both are infinite or NaN. `nonfinite` counts values that are not finite on one side only, or not the same on
    both: unless it is 0, all figures but clip_share (which counts them) are None. cosine: of the two vectors; distance: |a - b| /
    |b| of the two vectors; gain: the factor of b that is nearest to a. For log-probs only: kl_k1 = mean(b - a) and
    kl_k3 = mean(exp(a - b) - 1 - (a - b)), Schulman's estimators of KL(b || a) from samples of b
    (http://joschu.net/blog/kl-approx.html), in nats; clip_share: share of tokens whose ratio exp(a - b) is outside 0.8 to 1.2,
    PPO's usual clip band; rms_abs: root mean square of the differences.
    """

    count: int
    max_abs: float | None = None
    mean_abs: float | None = None
    p95_abs: float | None = None
    p99_abs: float | None = None
    cosine: float | None = None
    kl_k1: float | None = None
    kl_k3: float | None = None
    clip_share: float | None = None
    distance: float | None = None
    nonfinite: int = 0
    rms_abs: float | None = None
    gain: float | None = None


@dataclass(frozen=True)
class WorstToken:
    """A token of a row, by its position in the padded row, prompt included: both sides' values and their difference, in nats.

    `token_id`: the captured token that the log-prob belongs to; None if the dump is gone. `difference` is None if a side is not
    finite.
    """

    row: int
    position: int
    a: float | None
    b: float | None
    difference: float | None
    token_id: int | None = None


@dataclass(frozen=True)
class ParameterFigures:
    """Distance between the gradients of one parameter. `sampled`: over a fixed sample of its elements, not all of them."""

    name: str
    figures: Figures
    sampled: bool = False


@dataclass(frozen=True)
class DumpComparison:
    """Comparison of a dump. `reasons`: what made it a mismatch, in words; above: the measures above their thresholds, where no
    other reason made it one, the furthest first. `not_compared`: by quantity, why it was not compared.
    A mismatch without figures is a dump on which A failed and B did not.

    loss_abs: |a - b|. grad_norm_rel: |a - b| / |b|. gradients: over
    all parameters together; `parameters`: the worst ones; parameter_distance: the largest of a single one, `worst_parameter`
    (`compare.dump_figures`). worst_tokens: by absolute difference. beyond_noise: measures that exceed the noise floor but not the
    thresholds: a real difference, small enough; empty without a noise floor. limits: those measured on this dump, if any.
    parameter_seen: the relative error of a single parameter's gradient that would have been a mismatch. distances: for the worst
    dumps, the distance between each parameter's gradients. scales: while it is judged, what each of these is relative to, in
    units of the whole gradient's scale.
    """

    dump_id: str
    verdict: str
    reasons: tuple[str, ...] = ()
    beyond_noise: tuple[str, ...] = ()
    seq_len: int | None = None
    log_probs: Figures | None = None
    entropy: Figures | None = None
    loss_abs: float | None = None
    grad_norm_rel: float | None = None
    gradients: Figures | None = None
    parameter_distance: float | None = None
    worst_parameter: str = ""
    parameters: tuple[ParameterFigures, ...] = ()
    worst_tokens: tuple[WorstToken, ...] = ()
    not_compared: dict[str, str] = field(default_factory=dict)
    limits: dict[str, Real] = field(default_factory=dict)
    parameter_seen: float | None = None
    distances: dict[str, Real] = field(default_factory=dict)
    scales: dict[str, Real] = field(default_factory=dict)
    above: tuple[str, ...] = ()


@dataclass(frozen=True)
class SideInfo:
    """A side of a comparison. kind: "replay", "truth" or "golden" (recorded outputs); `replay_id`: None for golden; `label`: the
    configuration in words; `settings`: the configuration by setting.
    """

    kind: str
    replay_id: str | None
    label: str
    dtype: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NamedCause:
    """A cause that explains recorded log-probs. said: in words, with its amount. amount: in the cause's own unit; error: its
    standard error. left: mean of |recorded - truth under the cause|, nats. z: for a cause that no single token shows, how many
    standard errors its amount is from none.
    """

    name: str
    said: str
    remedy: str
    thread: str
    amount: Real | None = None
    error: Real | None = None
    left: Real | None = None
    z: Real | None = None


UNKNOWN_CAUSE = Rule(
    "unknown cause",
    "values are the truth's to rounding",
    remedy="compare the attention kernel first, then dtype and weights, of the job with those of this replay",
    fails="log-probs differ from plain PyTorch's (the truth); no known cause fits",
)
TRUTH = Rule(
    "truth",
    "log-probs and losses are the truth's to rounding",
    fails="log-probs differ from plain PyTorch's (the truth)",
)
RECORDED = Rule(
    "recorded outputs",
    "the run's outputs are what its model gives",
    fails="the outputs that training recorded differ from this model's",
)
SAME = Rule(
    "same",
    "two replays have the same results to rounding",
    remedy="compare each of them with the truth: `actordbg compare REPLAY truth`",
    fails="the two replays give different results for the same inputs",
)
OF_B = {"truth": TRUTH, "golden": RECORDED, "replay": SAME}
"""The rule of a comparison, by what B is."""
NAMES_OF_B = {"truth": "the truth", "golden": "the run's recorded outputs"}
"""What B is called, unless it is a replay."""
GRADIENTS = Rule(
    "gradients",
    "gradients are the truth's to rounding",
    remedy="look at kernels with a backward of their own, at hooks and patches: run them in plain PyTorch",
    fails="gradients differ from plain PyTorch's (the truth)",
)
OF_GRADIENTS = frozenset({"grad_norm_rel", "gradient_distance", "parameter_distance"})
"""Measures of gradients alone."""
MODEL = Rule("model", "the model is the checkpoint's, bit for bit and module by module")


@dataclass(frozen=True)
class ExplainedOutputs:
    """Why values, `what`, are not the truth's. before: the mean of |recorded - truth|, nats; noise: that of rounding, on the
    same tokens.

    causes: those that the data cannot tell apart; `also`: what is wrong, or usual in a rollout, besides. unknown: there is a
    difference, and none of the bank's causes explains it; nearest: the best of them, in words. bank: which causes there were.
    """

    before: Real
    noise: Real
    tokens: int
    dumps: int
    causes: tuple[NamedCause, ...] = ()
    also: tuple[NamedCause, ...] = ()
    unknown: bool = False
    nearest: str = ""
    what: str = "recorded log-probs"
    bank: str = ""

    @property
    def wrong(self) -> bool:
        """Check whether the values are further from the truth than rounding, or have a cause."""
        return bool(self.causes) or self.unknown

    def found(self, side: str) -> list[Finding]:
        """Return what is wrong with the values of a side: its causes, or that none is known."""
        size, limit = self.before, self.noise
        if self.unknown:
            return [Finding(UNKNOWN_CAUSE, self.sentences[0], side=side, size=size, limit=limit)]
        fails = f"{self.what}: {self.names}".replace("{", "{{").replace("}", "}}")  # a path may have braces
        rules = [Rule(cause.name, remedy=cause.remedy, thread=cause.thread, fails=fails) for cause in self.causes]
        return [Finding(rule, self.sentences[0], side=side, size=size, limit=limit) for rule in rules]

    @property
    def names(self) -> str:
        """The causes, which the data cannot tell apart."""
        return " or ".join(cause.said for cause in self.causes)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The causes, with what each explains; () if recorded log-probs are the truth's to rounding."""
        return self.told(self.what)

    def told(self, what: str) -> tuple[str, ...]:
        """Return the sentences with another name of the values."""
        noise = f"noise {self.noise:.2g}"
        also = tuple(f"{what}: {cause.said}" for cause in self.also)
        if self.unknown:
            near = f"; the nearest: {self.nearest}" if self.nearest else ""
            return (f"{what}: unknown cause ({self.before:.3g} nats, {noise}{near})", *also)
        if not self.causes:
            return also
        best = self.causes[0]
        if best.left is None:
            return (f"{what}: {self.names}", *also)
        size = f"{self.before:.3g} -> {best.left:.3g} nats, {noise}"
        if best.z is not None:
            size = f"{abs(best.z):.0f} standard errors over {self.tokens:,} tokens; no single token shows it, {noise} nats"
        return (f"{what}: {self.names} ({size})", *also)


@dataclass(frozen=True)
class ComparisonRecord(StoredRecord):
    """`actordbg compare A B`: both sides, the thresholds that were applied, a verdict overall and for each dump, worst
    dumps first. rounding_id: the replay that measured the effect of the dtype's rounding on each dump, if limits follow it; each
    dump then has its own `limits`. excludes: the smallest faults that would have been a mismatch (`compare.measured_limits`).
    explained: what the causes of a mismatch with recorded outputs, or with the truth, are. left: what of A's model was not
    judged.
    """

    what: ClassVar[str] = "comparison"

    comparison_id: str
    created_at: str
    a: SideInfo
    b: SideInfo
    thresholds: dict[str, Real]
    verdict: str
    dumps: tuple[DumpComparison, ...]
    thresholds_from: str = ""
    rounding_id: str | None = None
    noise_id: str | None = None
    reasons: tuple[str, ...] = ()
    excludes: dict[str, float | None] = field(default_factory=dict)
    explained: ExplainedOutputs | None = None
    left: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Check whether something was compared, and nothing is a mismatch."""
        return self.verdict in GOOD

    @property
    def mismatches(self) -> list[DumpComparison]:
        """The dumps that differ."""
        return [dump for dump in self.dumps if dump.verdict == MISMATCH]

    @property
    def differing(self) -> list[Finding]:
        """Return what is wrong in each dump that differs, by the rule of side B, or of gradients where only they do."""
        found = []
        for dump in self.mismatches:
            rule = OF_B[self.b.kind]
            if rule == TRUTH and dump.above and OF_GRADIENTS.issuperset(dump.above):
                rule = GRADIENTS
            size = dump.log_probs.max_abs if dump.log_probs else None
            found.append(Finding(rule, "; ".join(dump.reasons) or dump.verdict, {"dump": dump.dump_id}, size=size))
        return found

    @property
    def compared(self) -> tuple[DumpComparison, ...]:
        """The dumps that have a verdict, the worst first, including those on which A failed."""
        return tuple(dump for dump in self.dumps if dump.verdict != NOT_COMPARED)

    @property
    def furthest(self) -> tuple[float, str] | None:
        """The largest difference of a log-prob, in nats, and the id of its dump; None if no dump has a finite one."""
        known = ((dump.log_probs.max_abs, dump.dump_id) for dump in self.dumps if dump.log_probs)
        return max(((size, dump_id) for size, dump_id in known if size is not None), default=None)

    @property
    def unjudged(self) -> list[NotChecked]:
        """The parts that the verdict does not cover: dumps, gradients, gradients with their norm only, A's model."""
        of = f"of {len(self.dumps)} dumps"
        unjudged = []
        if left := [dump for dump in self.dumps if dump.verdict == NOT_COMPARED]:
            why = next((reason for dump in left for reason in dump.not_compared.values()), "")
            unjudged.append(NotChecked(TRUTH, f"{len(left)} {of}: {why}"))
        if without := [why for dump in self.dumps if (why := _gradients_left(dump))]:
            unjudged.append(NotChecked(GRADIENTS, f"the gradients of {len(without)} {of}: {without[0]}"))
        if by_norm := sum(dump.grad_norm_rel is not None and dump.gradients is None for dump in self.dumps):
            said = f"the gradients of {by_norm} {of}, but for their norm"
            unjudged.append(NotChecked(GRADIENTS, said, "--keep-gradients keeps them"))
        return [*unjudged, *(NotChecked(MODEL, text) for text in self.left)]


def _gradients_left(dump: DumpComparison) -> str:
    """Return why A's gradients of a compared dump were not checked; "" if they were, or if A has none."""
    if dump.log_probs is None or dump.grad_norm_rel is not None or dump.gradients is not None:
        return ""
    return next((why for what, why in dump.not_compared.items() if what.startswith("gradient")), "")


@dataclass(frozen=True)
class NoiseVariant:
    """A way of running the same inputs again, and how far the outputs moved. `name`: repeat, repad, rebatch or reorder."""

    name: str
    replay_id: str
    log_probs: Figures | None = None
    grad_norm_rel: float | None = None


@dataclass(frozen=True)
class DumpNoise:
    """The noise floor of a dump: the largest movement over all variants, by the names of `Figures` and DumpComparison."""

    dump_id: str
    floor: dict[str, Real]


@dataclass(frozen=True)
class NoiseRecord(StoredRecord):
    """`actordbg noise`: how far one configuration moves on its own. `replay_id`: the unchanged run. `config`: as requested.

    `floor`: over all dumps, by the same names as a dump's. `reasons`: what could not be measured, or is a fault rather than
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
    floor: dict[str, Real]
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class LintRecord(StoredRecord):
    """What a lint says of dumps that no earlier one said. broken, kept: dumps by law; kept are those that an earlier lint calls
    broken. looked_at: how often each of the laws was judged: a narrower lint takes nothing back.
    """

    what: ClassVar[str] = "lint"

    lint_id: str
    created_at: str
    broken: dict[str, list[str]]
    kept: dict[str, list[str]]
    looked_at: dict[str, int]
