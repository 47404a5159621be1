"""What the lab finds out, as files of the store: comparisons, noise floors and matrices.

    store/comparisons/<comparison_id>.json    one ComparisonRecord, written once
    store/noise/<noise_id>.json               one NoiseRecord, written once
    store/matrices/<matrix_id>.json           one MatrixRecord, replaced as cells finish

The catalog's tables `comparison`, `noise_floor`, `matrix` and `matrix_cell` are made from these files alone. Ids are made
as a replay's are
(`20250619T052608-9f3a2c`), so they sort by time. A float that is not finite is stored as None.

Standard library only: read at the desk without torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from actordbg.base.errors import CorruptDump, NewerFormat, StoreProblem

FORMAT = 1

MATCH = "match"
"""Within the thresholds."""
WITHIN_NOISE = "within-noise"
"""Outside the thresholds, but no further than the configuration moves by itself."""
MISMATCH = "mismatch"
NOT_COMPARED = "not-compared"
"""Nothing could be compared. Never a success."""

GOOD = (MATCH, WITHIN_NOISE)
"""The verdicts that are a success."""

T = TypeVar("T", bound="_Stored")


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
    `numerics.ulp`); None for unequal dtypes.
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
    all parameters together;
    `parameters`: the worst ones. worst_tokens: by absolute difference. beyond_noise: what is above the noise floor though
    within the thresholds: real, and small enough; empty without a floor.
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
    parameters: tuple[ParameterFigures, ...] = ()
    worst_tokens: tuple[WorstToken, ...] = ()
    not_compared: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SideInfo:
    """One side of a comparison. kind: "replay", "truth" or "golden"; `replay_id` None for golden; `label`: its
    configuration in words.
    """

    kind: str
    replay_id: str | None
    label: str
    dtype: str | None = None


class _Stored:
    """JSON both ways for the records below."""

    what: ClassVar[str]

    def to_json(self) -> str:
        """The record as JSON; what is not finite becomes null."""
        return json.dumps({"format": FORMAT} | _plain(asdict(self)), indent=1, sort_keys=True)  # type: ignore[call-overload]

    @classmethod
    def from_file(cls: type[T], path: Path) -> T:
        """The record in this file. What it raises names the file: StoreProblem where it cannot be read, else as `from_json`."""
        try:
            text = path.read_bytes()
        except OSError as error:
            raise StoreProblem(f"cannot read {path}: {error.strerror}", hint="check its permissions") from None
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls: type[T], text: str | bytes, source: str = "") -> T:
        """Parse what `to_json` wrote; CorruptDump when it is not one, NewerFormat for another version. `source`: its file."""
        try:
            data = json.loads(text)
            version = data.pop("format")
            if version != FORMAT:
                raise NewerFormat(
                    f"this {cls.what} has format {version}, this actordbg reads {FORMAT}", hint="upgrade actordbg"
                )
            return cls._build(data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            file = f"the {cls.what}'s file {source}".rstrip()
            raise CorruptDump(f"{file} is damaged: {error}", hint="remove the file") from None

    @classmethod
    def _build(cls: type[T], data: dict[str, Any]) -> T:
        return cls(**data)


@dataclass(frozen=True)
class ComparisonRecord(_Stored):
    """`actordbg compare A B`: both sides, the thresholds that were applied, a verdict overall and for each dump, worst
    dumps first.
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
    noise_id: str | None = None
    reasons: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Something was compared, and none of it is a mismatch."""
        return self.verdict in GOOD

    @classmethod
    def _build(cls, data: dict[str, Any]) -> ComparisonRecord:
        dumps = tuple(_dump_comparison(item) for item in data.pop("dumps"))
        a, b = (SideInfo(**data.pop(side)) for side in ("a", "b"))
        return cls(dumps=dumps, reasons=tuple(data.pop("reasons", ())), a=a, b=b, **data)


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
class NoiseRecord(_Stored):
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

    @classmethod
    def _build(cls, data: dict[str, Any]) -> NoiseRecord:
        variants = tuple(
            NoiseVariant(**item | {"log_probs": _figures(item.get("log_probs"))}) for item in data.pop("variants")
        )
        dumps = tuple(DumpNoise(**item) for item in data.pop("dumps"))
        return cls(variants=variants, dumps=dumps, reasons=tuple(data.pop("reasons", ())), **data)


@dataclass(frozen=True)
class MatrixCell:
    """One combination. status: passed, failed, unavailable, not run. `verdict`: against the truth (see `truth_id`), None
    where not compared.

    `settings`: by axis. `replay_id`: its replay, None where nothing was started. `reason`: why it is unavailable, was
    not run, is wrong, or was judged in part only. `signature`,
    `error`: the first failure. `counts`: inputs by result status. `max_abs`: largest difference of a log-prob from the
    truth, nats. `known`: ids of the rules
    that speak about it. `load_s`: seconds that building its Actor took; 0 where it was there already (`shared_with` says
    from which cell).
    `regressed`: what got worse than the baseline; empty where nothing did. `loads`: Actors that were built for it: one for each
    group of processes that starts together, again after a crash.
    """

    index: int
    name: str
    settings: dict[str, Any]
    status: str
    config: dict[str, Any]
    replay_id: str | None = None
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    signature: str | None = None
    error: str | None = None
    log: str | None = None
    verdict: str | None = None
    comparison_id: str | None = None
    max_abs: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    peak_memory_bytes: int | None = None
    load_s: float | None = None
    shared_with: int | None = None
    known: tuple[str, ...] = ()
    regressed: tuple[str, ...] = ()
    loads: int = 0


@dataclass(frozen=True)
class MatrixRecord(_Stored):
    """`actordbg matrix`. status: running, complete, interrupted, failed. `axes`: values by axis. `dump_ids`: what each
    cell replays. `options`: what else was asked for, for `--resume`; `runner` in it is the pid and start time of who runs it.
    """

    what: ClassVar[str] = "matrix"

    matrix_id: str
    created_at: str
    status: str
    axes: dict[str, list[Any]]
    cells: tuple[MatrixCell, ...]
    dump_ids: tuple[str, ...]
    selection: str | None = None
    command: str = ""
    finished_at: str | None = None
    truth_id: str | None = None
    baseline: str | None = None
    loads: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def _build(cls, data: dict[str, Any]) -> MatrixRecord:
        cells = tuple(_tuples(MatrixCell, item) for item in data.pop("cells"))
        return cls(cells=cells, dump_ids=tuple(data.pop("dump_ids")), **data)


def _dump_comparison(item: dict[str, Any]) -> DumpComparison:
    figures = {name: _figures(item.pop(name, None)) for name in ("log_probs", "sequences", "entropy", "gradients")}
    parameters = tuple(
        ParameterFigures(p["name"], Figures(**p["figures"]), p["sampled"]) for p in item.pop("parameters", ())
    )
    tokens = tuple(WorstToken(**token) for token in item.pop("worst_tokens", ()))
    found: DumpComparison = _tuples(DumpComparison, item | figures | {"parameters": parameters, "worst_tokens": tokens})
    return found


def _figures(item: dict[str, Any] | None) -> Figures | None:
    return None if item is None else Figures(**item)


def _tuples(kind: Any, item: dict[str, Any]) -> Any:
    """`kind(**item)`, with JSON's lists as tuples."""
    names = {f.name for f in fields(kind)}
    return kind(**{k: tuple(v) if isinstance(v, list) and k in names else v for k, v in item.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
