"""What a replay is asked to do and what came of it: the contract between supervisor, workers, catalog and report.

A replay lives in `store/replays/<replay_id>/`:

* `spec.json`: one ReplaySpec. Written once, before anything starts.
* `rank<N>.jsonl`: what worker N appended, one JSON object a line, `event` says which:
  `ready` (pid, attempt, resolved configuration), `start` (dump_id, slot, attempt), `end` (a ResultRecord), `done`;
  `stop` and `go` around a prompt, during which no clock runs.
* `supervisor.jsonl`: what the supervisor found out: `end` for inputs that killed or hung a worker, and for those that
  several ranks ran together once all of them answered, `resolved`, and
  `finished` with the replay's status ("complete", "interrupted", "failed").

Results are read from these files alone, so the catalog can always be rebuilt. For one dump the *last* `end` counts.

A result's status: `passed`, forward (and backward) ran and every log-prob is finite; `failed`, an exception or a
non-finite output; `crashed`, the worker process died in it; `hung`, it did not finish within the timeout; `stopped`, the
user ended it at a prompt.

What a law said about an input is plain data in its result's `extra["laws"]`, one object for each law (`answers_of` reads them):

    kept              nothing changed that must not change
    within-rounding   something moved, by no more than rounding moves this input (`limit`)
    nondeterministic  a rerun gave different numbers
    broken            something changed that must not change
    not-checked       the law could not be asked here, and `words` says why; `raised`: because asking it raised

Workers read this too, so that it needs nothing but the standard library; a specification's types are checked where msgspec is.
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
from actordbg.records.comparison_record import StoredRecord, strict_json

SPEC_VERSION = 1

PASSED = "passed"
FAILED = "failed"
CRASHED = "crashed"
HUNG = "hung"
STOPPED = "stopped"
GOES_ON = "goes_on"
"""In a result's `extra`: its worker ran other inputs of the replay before, so its first one here is not a warm-up."""
KEPT_BYTES = "kept_bytes"
"""In a result's `extra`: the size of the file of its tensors, where it kept them."""


@dataclass(frozen=True)
class ReplayInput:
    """One dump to replay: its id, its path relative to the store, and what reports group by."""

    dump_id: str
    path: str
    rank: int
    batch_size: int
    seq_len: int
    tokens: int


@dataclass(frozen=True)
class ReplaySpec(StoredRecord):
    """One replay: what selected the inputs, their order, and under which configuration they run."""

    replay_id: str
    created_at: str
    config: ReplayConfig
    inputs: tuple[ReplayInput, ...]
    where: str | None = None
    order: str = "time"
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    format: int = SPEC_VERSION

    def __post_init__(self) -> None:
        """Ids become names of files and folders: CorruptDump for one that could name another place."""
        for name in (self.replay_id, *(item.dump_id for item in self.inputs)):
            if not is_plain_name(name):
                raise CorruptDump(f"{name!r:.80} is not an id of a replay or a dump", hint="nothing is written under such a name")

    def to_json(self) -> str:
        """The specification as indented JSON."""
        return json.dumps(asdict(self) | {"config": self.config.to_dict()}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "") -> ReplaySpec:
        """Parse a spec.json; CorruptDump when it is not one, NewerFormat for another version."""
        try:
            data = strict_json(text)
            if data["format"] != SPEC_VERSION:
                raise NewerFormat(
                    f"spec.json has format {data['format']!r:.40}, this actordbg reads {SPEC_VERSION}",
                    hint="upgrade actordbg",
                )
            inputs = tuple(ReplayInput(**each) for each in data.pop("inputs"))
            spec = cls(**data | {"config": ReplayConfig.from_dict(data["config"]), "inputs": inputs})
            try:  # a node of a cluster may be without msgspec: what it reads its supervisor has checked
                from msgspec.json import decode, encode
            except ImportError:
                return spec
            return decode(encode(spec), type=cls)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptDump(f"spec.json is damaged: {error}", hint="remove this replay's folder") from None


@dataclass
class ResultRecord:
    """What became of one dump in one replay. Times in seconds, memory in bytes, log-probs in nats.

    Log-prob figures are over the tokens that the action mask selects (all real tokens without one). `loss` and
    `grad_norm` are None without backward. `output_digest` is the SHA-256 of the log-probs' bytes in float32.
    `golden_*` compare with the log-probs (and entropies) that the training run itself recorded, where it did: a value that is
    not finite is equal to the same value only. `rng_match` says whether the generators, restored to the states that it
    recorded,
    ended in those that it recorded.
    `graphs` and `graph_breaks` count what torch.compile did for this input; `extra` holds what has no column:
    `not_compared`, by what was recorded, says why it was not compared; `lane`, of an input that several ranks ran
    together, which ranks did and what came out in those that differ from `worker` (`actordbg.replay.work_order`); `laws`, of an
    input that was asked, the answers (`actordbg.records.replay_record`).
    """

    replay_id: str
    dump_id: str
    status: str
    attempt: int = 1
    worker: int = 0
    slot: int = 0
    started_at: str = ""
    finished_at: str = ""
    error_class: str | None = None
    error: str | None = None
    signature: str | None = None
    log_excerpt: str | None = None
    load_s: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    logprob_count: int | None = None
    logprob_mean: float | None = None
    logprob_std: float | None = None
    logprob_min: float | None = None
    logprob_max: float | None = None
    nonfinite: int | None = None
    entropy_mean: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    output_digest: str | None = None
    graphs: int | None = None
    graph_breaks: int | None = None
    folded_ids: bool | None = None
    golden_count: int | None = None
    golden_max_abs: float | None = None
    golden_mean_abs: float | None = None
    golden_entropy_count: int | None = None
    golden_entropy_max_abs: float | None = None
    golden_entropy_mean_abs: float | None = None
    rng_match: bool | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; non-finite numbers, those in `extra` too, become None. `nonfinite` counts those of the output."""
        return {name: _finite(value) for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ResultRecord:
        """From plain data; unknown keys are kept in `extra`, so that a newer worker's figures are not lost."""
        values = {k: v for k, v in data.items() if k in _OF_RESULT}
        extra = dict(values.pop("extra", None) or {}) | {k: v for k, v in data.items() if k not in _OF_RESULT}
        return cls(**values, extra=extra)


_OF_RESULT = frozenset(each.name for each in fields(ResultRecord))
"""Asked for each field of each result that is read: an index of many replays reads 100,000."""


def _finite(value: Any) -> Any:
    """The value with None for every number in it that is not finite."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


KEPT, WITHIN_ROUNDING, NONDETERMINISTIC = "kept", "within-rounding", "nondeterministic"
BROKEN, NOT_CHECKED = "broken", "not-checked"
LAWS = "laws"
"""The key in a result's `extra`."""


@dataclass(frozen=True)
class LawAnswer:
    """size: the largest change, nats (of a gradient: relative). limit: what rounding may do. row, position, token: the first
    place that changed. count of `looked_at` values changed. words: what it means, or why it was not checked.
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
        """Plain data for JSON, without what is not there; a size that is not finite is left out."""
        return {name: value for name, value in vars(self).items() if _finite(value) is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LawAnswer:
        """From plain data; what this version does not know is left out."""
        return cls(**{each.name: data[each.name] for each in fields(cls) if each.name in data})


def answers_of(extra: Mapping[str, Any]) -> list[LawAnswer]:
    """The answers in a result's `extra`; what is not an answer is passed over."""
    answers = extra.get(LAWS)
    listed = answers if isinstance(answers, list) else []
    return [LawAnswer.from_dict(each) for each in listed if isinstance(each, Mapping) and {"law", "verdict"} <= each.keys()]


def violations(answers: Iterable[LawAnswer], accepted: str | None = None) -> list[LawAnswer]:
    """The answers that forbid a green verdict. `accepted`: a verdict that was accepted by name, `nondeterministic`."""
    bad = {BROKEN, NONDETERMINISTIC} - {accepted}
    return [answer for answer in answers if answer.verdict in bad or answer.raised]


def in_words(answer: LawAnswer) -> str:
    """One answer as a sentence: "neighbour broken: row 1 sees row 0 (198 of 199, from position 3, token 17, up to 0.04)"."""
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
    return f"{answer.law} {'failed' if answer.raised else answer.verdict}{': ' + answer.words if answer.words else ''}{suffix}"


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
    """Seconds (or another unit) over several inputs: number measured, median, 95th percentile, largest, sum."""

    count: int
    median: float | None
    p95: float | None
    largest: float | None
    total: float


def bucket_of(seq_len: int) -> tuple[int, int]:
    """The least and the largest seq_len of the bucket that this one falls into."""
    high = max(FIRST_BUCKET, 1 << seq_len.bit_length())
    return (high // 2 if high > FIRST_BUCKET else 0), high - 1


def finite(values: Iterable[float | None]) -> list[float]:
    """The values that are neither None nor infinite nor NaN."""
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile of `values` (any order), None of nothing. See the module's docstring for the definition."""
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    return ordered[low] + (ordered[math.ceil(position)] - ordered[low]) * (position - low)


def median(values: Sequence[float]) -> float | None:
    """The 50th percentile."""
    return percentile(values, 50)


def spread(values: Iterable[float | None]) -> Spread:
    """Count, median, p95, largest and sum of the finite values."""
    known = finite(values)
    return Spread(len(known), median(known), percentile(known, 95), max(known, default=None), sum(known))


def weighted_mean(pairs: Iterable[tuple[float | None, int | None]]) -> float | None:
    """The mean of (mean, count) pairs, each weighted by its count; None when nothing was counted."""
    known = [(mean, count) for mean, count in pairs if mean is not None and count and math.isfinite(mean)]
    total = sum(count for _, count in known)
    return sum(mean * count for mean, count in known) / total if total else None


def warm_up_of(results: Iterable[ResultRecord]) -> tuple[set[str], set[str]]:
    """Dump ids of the first measured input of each worker start, and of the other inputs that built a graph."""
    first: dict[tuple[int, int], ResultRecord] = {}
    compiling: set[str] = set()
    measured = (result for result in results if result.forward_s is not None)
    for result in sorted(measured, key=lambda result: (result.started_at, result.slot)):
        warm = result.extra.get(GOES_ON) or first.setdefault((result.worker, result.attempt), result) is not result
        if warm and result.graphs:
            compiling.add(result.dump_id)
    return {result.dump_id for result in first.values()}, compiling
