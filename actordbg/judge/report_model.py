"""A report as data. `summary` fills these dataclasses; text, Markdown and JSON render them.

`actordbg report --format json` prints a Summary field by field, so these names are the JSON's names. Times are in
seconds, memory in bytes, log-probs in nats. A figure that was not measured is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actordbg.judge.agreement import Generators, Golden, LawSummary, NotCompared, RankAgreement
from actordbg.records.replay_record import Spread

if TYPE_CHECKING:
    from actordbg.catalog.lab_columns import ComparisonRun
    from actordbg.locate.verdict import LocalVerdict


@dataclass(frozen=True)
class Counts:
    """A replay's inputs by outcome. The last six counts add up to `inputs`."""

    inputs: int
    passed: int
    failed: int
    crashed: int
    hung: int
    not_run: int
    stopped: int = 0


@dataclass(frozen=True)
class Inputs:
    """The range of a replay's inputs: seq_len counts padding, tokens do not."""

    seq_len_min: int | None
    seq_len_median: float | None
    seq_len_max: int | None
    tokens: int


@dataclass(frozen=True)
class FailureGroup:
    """Inputs that failed in the same way: a known signature, or else the same kind of error.

    `cause` is the first input's error, `log_excerpt` what its worker printed, `examples` the first few dump ids.
    `explanation` and `ways_out` are filled for known signatures.
    """

    name: str
    known: bool
    count: int
    statuses: dict[str, int]
    error_class: str | None
    cause: str
    log_excerpt: str | None
    explanation: str
    ways_out: tuple[str, ...]
    examples: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The name beside the error itself, whose varying parts a name that is not known leaves out."""
        return self.name if self.known else self.name.partition(":")[0]


@dataclass(frozen=True)
class Throughput:
    """Non-padding tokens per second of forward in one worker: the median over inputs, and total tokens / total seconds."""

    median: float | None
    total: float | None


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Times of steady inputs, and the largest memory peak of all inputs."""

    forward: Spread
    backward: Spread
    tokens_per_s: Throughput
    peak_memory_bytes: int | None


@dataclass(frozen=True)
class BucketFigures(Timed):
    """The figures of one range of seq_len: `inputs` have a result, `steady` of them count for the times."""

    label: str
    inputs: int
    passed: int
    steady: int


@dataclass(frozen=True)
class WarmUp:
    """Inputs outside steady timing: the first measured input of each worker start, and inputs that compiled a graph."""

    first_inputs: int
    first_forward: Spread
    compiling_inputs: int
    compiling_forward: Spread


@dataclass(frozen=True)
class SlowInput:
    """A slow input, ranked by forward plus backward seconds."""

    dump_id: str
    rank: int
    batch_size: int
    seq_len: int
    tokens: int
    forward_s: float
    backward_s: float | None


@dataclass(frozen=True)
class LogProbs:
    """Log-probs over all results that have them, weighted by token count; `nonfinite` counts NaN and infinite values."""

    results: int
    count: int
    mean: float | None
    lowest: float | None
    highest: float | None
    nonfinite: int
    entropy_mean: float | None
    folded_ids: int


@dataclass(frozen=True)
class Compiled:
    """Graphs built and graph breaks of torch.compile, over all results that counted them."""

    results: int
    graphs: int
    graph_breaks: int


@dataclass(frozen=True)
class ReplaySummary(Timed):
    """A replay: its inputs, the configuration that ran, and its results.

    comparisons: the newest comparison (as A) with each other replay, the truth and the run's recorded outputs. local: the verdict
    on its model, module by module; None if no result judged it. run_on: inputs whose positions never restart. why: what stopped
    it, and the end of its log. whose: who else wrote it; "" if it is this user's.
    """

    label: str
    replay_id: str
    created_at: str
    status: str
    command: str
    where: str | None
    order: str
    asked: dict[str, Any]
    resolved: dict[str, Any]
    versions: dict[str, str]
    inputs: Inputs
    counts: Counts
    worker_starts: int
    failures: tuple[FailureGroup, ...]
    buckets: tuple[BucketFigures, ...]
    warm_up: WarmUp
    slowest: tuple[SlowInput, ...]
    slowest_are_steady: bool
    logprobs: LogProbs | None
    golden: Golden | None
    golden_entropy: Golden | None
    generators: Generators | None
    not_compared: tuple[NotCompared, ...]
    compiled: Compiled | None
    comparisons: tuple[ComparisonRun, ...] = ()
    ranks: RankAgreement | None = None
    laws: LawSummary | None = None
    local: LocalVerdict | None = None
    run_on: int = 0
    why: str = ""
    whose: str = ""

    @property
    def truth(self) -> ComparisonRun | None:
        """The newest comparison with the truth."""
        return self._newest("truth")

    @property
    def recorded(self) -> ComparisonRun | None:
        """The newest comparison with the run's recorded outputs."""
        return self._newest("golden")

    def _newest(self, kind: str) -> ComparisonRun | None:
        return next((row for row in self.comparisons if row.against_kind == kind), None)


@dataclass(frozen=True)
class Against:
    """A replay compared with the baseline (the report's first replay), over the inputs that both ran.

    `forward_ratio`: median over inputs steady in both of this replay's forward seconds / the baseline's (below 1: faster); None
    without such an input. Digests are compared on inputs that passed in both; equal means bit-identical float32 log-probs.
    `mean_moved`: the largest difference of an input's mean log-prob over the same inputs, in nats; a small value does not prove
    that no single log-prob moved.
    """

    label: str
    replay_id: str
    differs: dict[str, Any]
    common: int
    timed: int
    forward_ratio: float | None
    digests_equal: int
    digests_differ: int
    mean_moved: float | None


@dataclass(frozen=True)
class SideBySide:
    """Several replays side by side: the settings that all share, and each replay against the baseline."""

    baseline: str
    shared: dict[str, Any]
    rows: tuple[Against, ...]


@dataclass(frozen=True)
class Summary:
    """A whole report. selection: how the replays were chosen, in words. replays: empty if nothing was replayed."""

    selection: str
    generated_at: str
    percentile: str
    replays: tuple[ReplaySummary, ...]
    totals: Counts
    comparison: SideBySide | None = None
    notes: tuple[str, ...] = ()
