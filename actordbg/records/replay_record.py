"""The specification of a replay and its results: the contract between supervisor, workers, catalog and report.

A replay lives in `store/replays/<replay_id>/`:

* `spec.json`: one ReplaySpec. Written once, before anything starts.
* `rank<N>.jsonl`: what worker N appended, one JSON object a line, `event` says which:
  `ready` (pid, attempt, resolved configuration), `start` (dump_id, slot, attempt), `end` (a ResultRecord), `done`;
  `stop` and `go` around a prompt, during which no clock runs.
* `supervisor.jsonl`: what the supervisor appended: `end` for inputs that killed or hung a worker, and for those that
  several ranks ran together, once all of them reported; `resolved`; and `finished` with the replay's status ("complete",
  "interrupted", "failed").

Results are read from these files alone, so the catalog can always be rebuilt. For one dump the *last* `end` counts.

A result's status: `passed`, forward (and backward) ran and every log-prob is finite; `failed`, an exception or a
non-finite output; `crashed`, the worker process died in it; `hung`, it did not finish within the timeout; `stopped`, the
user ended it at a prompt.

The verdicts of the laws (invariance checks) on an input are plain data in its result's `extra["laws"]`, one object for each law
(`answers_of` reads them):

    kept              nothing changed that must not change
    within-rounding   something moved, by no more than rounding moves this input (`limit`)
    nondeterministic  a rerun gave different numbers
    broken            something changed that must not change
    not-checked       the law could not be checked here, and `words` says why; `raised`: because the check raised

Workers read this too, so it needs only the standard library; the types of a specification are checked if msgspec is installed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from actordbg.base.errors import CorruptDump, NewerFormat
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import is_plain_name
from actordbg.records.finding import BROKEN, NOT_CHECKED
from actordbg.records.stored_record import StoredRecord, stored_json

SPEC_VERSION = 1

PASSED = "passed"
FAILED = "failed"
CRASHED = "crashed"
HUNG = "hung"
STOPPED = "stopped"
GOES_ON = "goes_on"
"""In a result's `extra`: its worker ran other inputs of the replay before, so its first input here is not a warm-up."""
KEPT_BYTES = "kept_bytes"
"""In a result's `extra`: the size of the file of its tensors, if it kept them."""


@dataclass(frozen=True)
class ReplayInput:
    """A dump to replay: its id, its path relative to the store, and what reports group by."""

    dump_id: str
    path: str
    rank: int
    batch_size: int
    seq_len: int
    tokens: int


@dataclass(frozen=True)
class ReplaySpec(StoredRecord):
    """Specification of a replay: what selected the inputs, their order, and the configuration under which they run.

    locate: the model is compared with transformers' own, and judged place by place on this many inputs (`actordbg.locate`).
    """

    replay_id: str
    created_at: str
    config: ReplayConfig
    inputs: tuple[ReplayInput, ...]
    where: str | None = None
    order: str = "time"
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    locate: int = 0
    format: int = SPEC_VERSION

    def __post_init__(self) -> None:
        """Refuse ids and paths that could lead out of the store (CorruptDump): they become names of files and folders."""
        bad = [name for name in (self.replay_id, *(item.dump_id for item in self.inputs)) if not is_plain_name(name)]
        bad += [item.path for item in self.inputs if ".." in item.path.split("/") and item.path[:1] != "/"]
        if bad:
            raise CorruptDump(f"{bad[0]!r:.80} is not an id of a replay or a dump, or its path", hint="nothing was written there")

    def to_json(self) -> str:
        """Return the specification as indented JSON."""
        return json.dumps(asdict(self) | {"config": self.config.to_dict()}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "") -> ReplaySpec:
        """Parse a spec.json; CorruptDump if it is damaged, NewerFormat for another version."""
        try:
            data = stored_json(text)
            if data["format"] != SPEC_VERSION:
                raise NewerFormat(
                    f"spec.json has format {data['format']!r:.40}, this actordbg reads {SPEC_VERSION}",
                    hint="upgrade actordbg",
                )
            inputs = tuple(ReplayInput(**each) for each in data.pop("inputs"))
            spec = cls(**data | {"config": ReplayConfig.from_dict(data["config"]), "inputs": inputs})
            try:  # a cluster node may lack msgspec: its supervisor has checked what it reads
                from msgspec.json import decode, encode
            except ImportError:
                return spec
            return decode(encode(spec), type=cls)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptDump(f"spec.json is damaged: {error}", hint="remove this replay's folder") from None


@dataclass
class ResultRecord:
    """Result of a dump in a replay. Times in seconds, memory in bytes, log-probs in nats.

    Each field is a column of the catalog's `result`; the text below it says what it holds. Log-prob figures are over the tokens
    that the action mask selects (all real tokens without one). A recorded value that is not finite equals the same value only.
    `not_compared`: by recorded quantity, why it was not compared. `lane`: for an input that several ranks ran together, the
    ranks, and the results of those that differ from `worker` (`actordbg.replay.work_order`). `laws`: for an input whose laws
    were checked, the verdicts (`answers_of`). `identity`, `located`: what the model is and where it goes wrong
    (`actordbg.records.locate_record`).
    """

    replay_id: str
    """the replay"""
    dump_id: str
    """the dump, which may have been pruned since"""
    status: str
    """passed, failed, crashed or hung"""
    attempt: int = 1
    """number of the workers' start, from 1"""
    worker: int = 0
    """rank of the worker"""
    slot: int = 0
    """position in the worker's list"""
    started_at: str = ""
    """UTC time of its start"""
    finished_at: str = ""
    """UTC time of its end"""
    error_class: str | None = None
    """class of the exception"""
    error: str | None = None
    """message of the exception"""
    signature: str | None = None
    """short name of the kind of failure, equal for dumps that fail alike"""
    log_excerpt: str | None = None
    """last lines of the worker's log"""
    load_s: float | None = None
    """seconds to read and decompress the dump"""
    forward_s: float | None = None
    """seconds of the forward pass"""
    backward_s: float | None = None
    """seconds of the backward pass"""
    tokens: int | None = None
    """real tokens of the input"""
    tokens_per_s: float | None = None
    """tokens / (forward_s + backward_s)"""
    peak_memory_bytes: int | None = None
    """peak memory of the worker while it ran, in bytes"""
    logprob_count: int | None = None
    """log-probs that the statistics cover"""
    logprob_mean: float | None = None
    """mean log-prob, nats"""
    logprob_std: float | None = None
    """standard deviation of the log-probs, nats"""
    logprob_min: float | None = None
    """smallest log-prob, nats"""
    logprob_max: float | None = None
    """largest log-prob, nats"""
    nonfinite: int | None = None
    """log-probs that are NaN or infinite"""
    entropy_mean: float | None = None
    """mean entropy, nats"""
    loss: float | None = None
    """loss; NULL without backward"""
    grad_norm: float | None = None
    """gradient norm; NULL without backward"""
    output_digest: str | None = None
    """SHA-256 of the log-probs' bytes in float32"""
    graphs: int | None = None
    """graphs that torch.compile made for this input"""
    graph_breaks: int | None = None
    """graph breaks for this input"""
    folded_ids: bool | None = None
    """whether token ids were wrapped (modulo) into a smaller vocabulary"""
    golden_count: int | None = None
    """log-probs compared with those that the run recorded"""
    golden_max_abs: float | None = None
    """largest absolute difference from the log-probs that the run recorded, nats"""
    golden_mean_abs: float | None = None
    """mean absolute difference from them, nats"""
    golden_entropy_count: int | None = None
    """entropies compared with those that the run recorded"""
    golden_entropy_max_abs: float | None = None
    """largest absolute difference from the entropies that the run recorded, nats"""
    golden_entropy_mean_abs: float | None = None
    """mean absolute difference from them, nats"""
    rng_match: bool | None = None
    """whether the RNG ended in the run's recorded state; NULL if not comparable"""
    extra: dict[str, Any] = field(default_factory=dict)
    """values without a column"""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; non-finite numbers become None, also in `extra`. `nonfinite` counts those of the output."""
        return {name: _finite(value) for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ResultRecord:
        """Build from plain data; unknown keys are kept in `extra`, so that a newer worker's figures are not lost."""
        values = {k: v for k, v in data.items() if k in _OF_RESULT}
        extra = dict(values.pop("extra", None) or {}) | {k: v for k, v in data.items() if k not in _OF_RESULT}
        return cls(**values, extra=extra)


_OF_RESULT = frozenset(each.name for each in fields(ResultRecord))
"""A set, since it is looked up for each field of each result: an index of many replays reads 100,000 results."""


def _finite(value: Any) -> Any:
    """Return the value with None for every number in it that is not finite."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


WITHIN_ROUNDING, NONDETERMINISTIC = "within-rounding", "nondeterministic"
LAWS = "laws"
"""The key in a result's `extra`."""


@dataclass(frozen=True)
class LawAnswer:
    """Verdict of a law on an input. size: the largest change, nats (for a gradient: relative). limit: the change that rounding
    may cause. row, position, token: the first place that changed. count: how many of `looked_at` values changed. words: what it
    means, or why it was not checked.
    """

    law: str
    verdict: str
    words: str = ""
    size: float | None = None
    limit: float | None = None
    row: int | None = None
    position: int | None = None
    token: int | None = None
    count: int | None = None
    looked_at: int | None = None
    raised: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, without values that are None or not finite."""
        return {name: value for name, value in vars(self).items() if _finite(value) is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LawAnswer:
        """Build from plain data; keys that this version does not know are left out."""
        return cls(**{each.name: data[each.name] for each in fields(cls) if each.name in data})


def answers_of(extra: Mapping[str, Any]) -> list[LawAnswer]:
    """Return the verdicts of laws in a result's `extra`; anything else in there is skipped."""
    answers = extra.get(LAWS)
    listed = answers if isinstance(answers, list) else []
    return [LawAnswer.from_dict(each) for each in listed if isinstance(each, Mapping) and {"law", "verdict"} <= each.keys()]


def violations(answers: Iterable[LawAnswer]) -> list[LawAnswer]:
    """Return the answers that forbid a green verdict."""
    return [answer for answer in answers if answer.verdict in (BROKEN, NONDETERMINISTIC) or answer.raised]


def in_words(answer: LawAnswer) -> str:
    """Put a verdict into words: "neighbour broken: row 1 depends on row 0 (198 of 199; first: row 1, position 3; up to 0.1)"."""
    details = []
    if answer.count is not None and answer.looked_at:
        details.append(f"{answer.count:,} of {answer.looked_at:,}")
    if answer.row is not None and answer.position is not None:
        token = "" if answer.token is None else f", token {answer.token}"
        details.append(f"first: row {answer.row}, position {answer.position}{token}")
    if answer.size is not None:
        limit = "" if answer.limit is None else f", limit {answer.limit:.2g}"
        details.append(f"up to {answer.size:.2g}{limit}")
    suffix = f" ({'; '.join(details)})" if details and answer.verdict != NOT_CHECKED else ""
    verdict = "failed" if answer.raised else answer.verdict
    words = f": {answer.words}" if answer.words else ""
    return f"{answer.law} {verdict}{words}{suffix}"


# The arithmetic of a report: what "median", "p95", "tokens per second" and "seq_len bucket" mean here. Stated once, so that two
# reports can be compared:
#
# * percentile: linear interpolation between the two closest ranks (Hyndman and Fan's type 7, numpy's default). With fewer than 20
#   values the 95th percentile is close to the largest one.
# * bucket: seq_len by powers of two from 128 on: 0-127, 128-255, 256-511, ... seq_len counts padding.
# * tokens per second: real tokens (sum of the attention mask) per second of forward, in one worker process. `median` is over
#   inputs, `total` is all tokens by all seconds.
# * warm-up is not part of steady timing: the first measured input of each worker start (a worker that started again after a crash
#   warms up again), and every later input during which torch.compile built a graph.
# * values that are missing or not finite are left out, never counted as zero; no value at all gives None.


PERCENTILE_DEFINITION = "linear interpolation between the closest ranks (type 7, numpy's default)"
FIRST_BUCKET = 128


@dataclass(frozen=True)
class Spread:
    """Statistics over several inputs, in seconds or another unit: number measured, median, 95th percentile, largest, sum."""

    count: int
    median: float | None
    p95: float | None
    largest: float | None
    total: float


def bucket_of(seq_len: int) -> tuple[int, int]:
    """Return the least and the largest seq_len of the bucket that `seq_len` falls into."""
    high = max(FIRST_BUCKET, 1 << seq_len.bit_length())
    return (high // 2 if high > FIRST_BUCKET else 0), high - 1


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the values that are neither None nor infinite nor NaN."""
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the percentile of `values` (any order); None without values. `PERCENTILE_DEFINITION` says how."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    return ordered[low] + (ordered[math.ceil(position)] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float | None:
    """Return the 50th percentile."""
    return percentile(values, 50)


def spread(values: Iterable[float | None]) -> Spread:
    """Return count, median, p95, largest and sum of the finite values."""
    known = finite(values)
    return Spread(len(known), median(known), percentile(known, 95), max(known, default=None), sum(known))


def weighted_mean(pairs: Iterable[tuple[float | None, int | None]]) -> float | None:
    """Return the mean of (mean, count) pairs, weighted by count; None if nothing was counted."""
    known = [(mean, count) for mean, count in pairs if mean is not None and count and math.isfinite(mean)]
    total = sum(count for _, count in known)
    return sum(mean * count for mean, count in known) / total if total else None


def warm_up_of(results: Iterable[ResultRecord]) -> tuple[set[str], set[str]]:
    """Return the dump ids of the first measured input of each worker start, and of later inputs that built a graph."""
    first: dict[tuple[int, int], ResultRecord] = {}
    compiling: set[str] = set()
    measured = (result for result in results if result.forward_s is not None)
    for result in sorted(measured, key=lambda result: (result.started_at, result.slot)):
        warm = result.extra.get(GOES_ON) or first.setdefault((result.worker, result.attempt), result) is not result
        if warm and result.graphs:
            compiling.add(result.dump_id)
    return {result.dump_id for result in first.values()}, compiling
