"""The sides of a comparison: a replay, the truth (also a replay), or the run's recorded outputs ("golden" in files).

A side reads the values of one dump from disk, or returns the reason why it has none. It never holds more than one dump's
tensors. They are numpy arrays, so finished replays can be compared without torch.

Example::

    side = open_replay(catalog, "last")
    values = side.read(dump_id)         # Values, or a str: why not
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from actordbg.actor.rules import LEAKED, leaked
from actordbg.base.errors import ActordbgError, StoreProblem
from actordbg.base.owners import whose
from actordbg.catalog import query
from actordbg.compare.thresholds import weaker
from actordbg.config.as_ran import as_ran, label, telling
from actordbg.config.choices import short_dtype
from actordbg.config.replay_config import TINY, TRUTHS
from actordbg.formats.dump_record import OUTPUT_PREFIX
from actordbg.formats.dumpfile import DEFAULT_CAP
from actordbg.records.comparison_record import ComparisonRecord, SideInfo
from actordbg.records.journal import SPEC, TENSORS
from actordbg.records.replay_record import PASSED, ReplayInput, ReplaySpec, ResultRecord
from actordbg.records.run_files import met_weights, weights_of
from actordbg.store.layout import Store, known_regular

if TYPE_CHECKING:
    from actordbg.catalog.lab_columns import ComparisonRun, ReplayRow
    from actordbg.formats.encoding import Array

GOLDEN, RECORDED, TRUTH = "golden", "recorded", "truth"
RECORDED_NAMES = (RECORDED, GOLDEN)
"""What names the run's recorded outputs as B; files have "golden"."""
PLANTED = "planted/"
"""Prefix of the names of log-probs under a planted fault (`actordbg.actor.truth_model`)."""
NON_FINITE = "non-finite-output"
"""Signature of inputs that finished with a NaN: their tensors were kept, and a NaN on both sides is a match."""
OTHER_WEIGHTS = "its weights were not this model's"
_NONE = object()
NO_OUTPUTS = "the run's own log-probs were not recorded (`--with-outputs` records those that forward returns)"


@dataclass(frozen=True)
class Values:
    """A side's values of one dump. log_probs: float [B, A] or [B, S-1]. mask (bool) and entropy have the same shape.

    gradients: safetensors files; the gradients are their mean; () if none were kept. gradient_over: the dumps whose gradients
    were averaged. dtype: the compute dtype. trained: computed in training mode. undropped: for a truth, which drops nothing, the
    share that the model drops in training mode. fault: a known fault in how the values were computed, or "".
    """

    log_probs: Array
    mask: Array
    entropy: Array | None = None
    loss: float | None = None
    grad_norm: float | None = None
    gradients: tuple[Path, ...] = ()
    gradient_over: tuple[str, ...] = ()
    dtype: str | None = None
    folded: bool | None = None
    temperature: float | None = None
    trained: bool = False
    undropped: float = 0.0
    fault: str = ""


def opened(path: Path) -> Any:
    """Open a file of kept tensors: a context manager with `keys` and `get_tensor` (numpy arrays)."""
    return safe_open(known_regular(path, DEFAULT_CAP), framework="np")


def recorded_arrays(store: Store, path: str) -> dict[str, Array]:
    """Read the recorded tensors of the dump at this path below the store; {} if it is gone or damaged."""
    from actordbg.store.payload import load_plain

    try:
        return {name: tensor.values for name, tensor in load_plain(store.root / path)[1].items()}
    except (ActordbgError, OSError):
        return {}


def tensors_path(store: Store, replay_id: str, dump_id: str) -> Path:
    """Return the path of the file with a dump's tensors in a replay."""
    return store.replays / replay_id / TENSORS / f"{dump_id}.safetensors"


@dataclass(frozen=True)
class ReplaySide:
    """A replay: `inputs` and `results` (from its journals) by dump id, tensors from its folder.

    autocast: by dump id, the autocast dtype of the recorded call, if the replay also used it.
    """

    store: Store
    row: ReplayRow
    spec: ReplaySpec
    results: dict[str, ResultRecord]
    autocast: dict[str, str]
    inputs: Mapping[str, ReplayInput]

    @property
    def info(self) -> SideInfo:
        """The side as a comparison record describes it."""
        kind = TRUTH if self.spec.config.truth in TRUTHS else "replay"
        ran = as_ran(self.row.config, self.row.resolved)
        return SideInfo(kind, self.row.replay_id, label(ran), weaker(map(self.dtype_of, self.inputs or [""])), telling(ran))

    @property
    def resolved(self) -> dict[str, Any]:
        """The settings and facts that the workers reported."""
        return self.row.resolved or {}

    def dtype_of(self, dump_id: str) -> str | None:
        """Return the compute dtype of a dump: the truth's dtype, else the reported dtype, or autocast's if weaker."""
        dtype = self.row.config.get("oracle") or self.resolved.get("compute_dtype") or self.resolved.get("dtype")
        return weaker([_dtype(dtype or self.row.config.get("dtype")), _dtype(self.autocast.get(dump_id))])

    @property
    def weights_dtype(self) -> str | None:
        """The dtype of the weights (for a truth: the dtype they were rounded to); None if unknown."""
        config = self.spec.config
        return config.dtype if config.truth or config.dtype else _dtype(self.resolved.get("dtype"))

    @property
    def model(self) -> tuple[Any, Any]:
        """The model and its number of layers, which must be the same on both sides."""
        config = self.spec.config
        return self.resolved.get("model", config.model), self.resolved.get("num_layers", config.num_layers)

    def failed(self, dump_id: str) -> bool:
        """Return whether the input ran without a result: it raised, crashed or hung."""
        result = self.results.get(dump_id)
        return result is not None and result.status != PASSED and result.signature != NON_FINITE

    def arrays(self, dump_id: str, prefix: str) -> dict[str, Array]:
        """Read the kept arrays of a dump whose names begin with `prefix`, by the rest of their names."""
        with opened(tensors_path(self.store, self.row.replay_id, dump_id)) as file:
            return {name.removeprefix(prefix): file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118

    def read(self, dump_id: str) -> Values | str:
        """Read the values of a dump, or return why there are none."""
        result = self.results.get(dump_id)
        if result is None:
            return "it was not run"
        if self.failed(dump_id):
            what = (result.signature or result.error_class or "").strip()
            return f"it {result.status}" + (f" ({what})" if what else "")
        path = tensors_path(self.store, self.row.replay_id, dump_id)
        try:
            with opened(path) as file:
                names = set(file.keys())
                log_probs, mask = file.get_tensor("log_probs"), file.get_tensor("mask")
                entropy = file.get_tensor("entropy") if "entropy" in names else None
        except FileNotFoundError:
            return "its tensors are gone" if self.spec.config.keep_tensors else "it kept no tensors (--no-keep-tensors)"
        except (SafetensorError, OSError) as error:
            return f"its kept tensors cannot be read ({error})"
        return Values(
            log_probs=log_probs,
            mask=mask.astype(bool),
            entropy=entropy,
            loss=_figure(result, result.loss),
            grad_norm=_figure(result, result.grad_norm),
            gradients=(path,) if any(name.startswith("grad/") for name in names) else (),
            gradient_over=tuple(sorted(result.extra.get("gradient_over") or [dump_id])),
            dtype=self.dtype_of(dump_id),
            folded=result.folded_ids,
            temperature=result.extra.get("temperature"),
            trained=bool(result.extra.get("training")),
            undropped=float(self.resolved.get("undropped") or 0.0),
        )


@dataclass(frozen=True)
class GoldenSide:
    """The training run's outputs, as its dumps recorded them. beside: the replay to compare with."""

    store: Store
    beside: ReplaySide
    inputs: Mapping[str, ReplayInput]
    dtypes: list[str | None] = field(default_factory=list)

    @property
    def info(self) -> SideInfo:
        """The side as a comparison record describes it."""
        return SideInfo(GOLDEN, None, "the training run's own results", weaker(self.dtypes))

    def read(self, dump_id: str) -> Values | str:
        """Read the outputs that a dump recorded, or return why it has none."""
        from actordbg.replay.output_figures import log_probs_of, of_the_masked
        from actordbg.store.payload import load_plain, numbers_of
        from actordbg.trainers.captured_call import summary_mask

        try:
            record, tensors = load_plain(self.store.root / self.inputs[dump_id].path)
        except StoreProblem as error:
            return f"the dump cannot be read ({error.message})"
        numbers = {name: numbers_of(tensor) for name, tensor in tensors.items()}
        outputs = {name.removeprefix(OUTPUT_PREFIX): values for name, values in numbers.items() if name.startswith(OUTPUT_PREFIX)}
        log_probs, entropy = log_probs_of(outputs), outputs.get("entropy")
        if log_probs is None:
            return NO_OUTPUTS
        others = met_weights(self.beside.resolved).get("other", {})
        path = weights_of(self.store.root, record) if others else None
        if path is not None and others.get(f"{record.run}/{path.name}", _NONE) in (None, record.step):
            return OTHER_WEIGHTS
        mask = summary_mask(numbers)
        self.dtypes.append(weaker([_dtype(record.model_dtype), _dtype(record.autocast_dtype)]))
        return Values(
            log_probs=log_probs,
            mask=mask,
            entropy=None if entropy is None else of_the_masked(entropy, mask, record.seq_len),
            gradient_over=(dump_id,),
            dtype=self.dtypes[-1],
            temperature=record.temperature,
            fault=LEAKED if leaked(record) else "",
        )


Side = ReplaySide | GoldenSide


def averaged(side: Side, values: Values, over: tuple[str, ...]) -> Values:
    """Replace the gradient in `values` by the mean over the dumps `over`, if the side has a separate gradient of each.

    `grad_norm` is then None: a mean's norm does not follow from norms. Otherwise returns `values` unchanged.
    """
    if isinstance(side, GoldenSide) or len(over) < 2 or over == values.gradient_over:
        return values
    files: list[Path] = []
    for dump_id in over:
        lone = side.read(dump_id)
        if isinstance(lone, str) or lone.gradient_over != (dump_id,) or lone.grad_norm is None or not lone.gradients:
            return values
        files += lone.gradients
    return replace(values, gradients=tuple(files), gradient_over=over, grad_norm=None)


def open_replay(source: Store | query.Catalog, name: str) -> ReplaySide:
    """Open a replay by id, id prefix, or `last`. Raises UsageError if there is none, StoreProblem if it is damaged."""
    catalog = query.catalog_of(source)
    row = query.get_replay(catalog, name)
    spec = ReplaySpec.from_file(catalog.store.replays / row.replay_id / SPEC)
    results = {result.dump_id: result for result in query.results_for(catalog, row.replay_id)}
    inputs = {item.dump_id: item for item in spec.inputs}
    follows = spec.config.dtype is None and spec.config.truth is None
    return ReplaySide(catalog.store, row, spec, results, query.autocast_dtypes(catalog, [*inputs]) if follows else {}, inputs)


def both_sides(source: Store | query.Catalog, a: str, b: str) -> tuple[ReplaySide, Side]:
    """Open a replay, and what it is compared with: another replay, or what the run recorded. Errors as of `open_replay`."""
    catalog = query.catalog_of(source)
    ours = open_replay(catalog, a)
    return ours, GoldenSide(catalog.store, ours, ours.inputs) if b in RECORDED_NAMES else open_replay(catalog, b)


def rests_on_others(store: Store, comparison: ComparisonRun | ComparisonRecord, *, subject: bool = True) -> str:
    """Say who else wrote a comparison or what it rests on: a side, the rounding, the noise floor; "" if all is this user's.

    subject: A too, the side that is judged.
    """
    if isinstance(comparison, ComparisonRecord):
        a, b = comparison.a.replay_id, comparison.b.replay_id
    else:
        a, b = comparison.replay_id, comparison.against
    replays = [a if subject else None, b, comparison.rounding_id]
    noise = [store.noise / f"{comparison.noise_id}.json"] if comparison.noise_id else []
    specs = [store.replays / replay_id / SPEC for replay_id in replays if replay_id]
    return whose(store.comparisons / f"{comparison.comparison_id}.json", *specs, *noise)


def own_comparisons(catalog: query.Catalog, replay_id: str | None = None) -> list[ComparisonRun]:
    """Return the newest comparison of each pair, the newest first; of `replay_id` only, as A.

    Of this user's replays, only those that rest on nothing that others wrote.
    """
    store, rows = catalog.store, query.comparisons(catalog, replay_id)
    return [row for row in rows if whose(store.replays / row.replay_id / SPEC) or not rests_on_others(store, row)]


def why_not(a: ReplaySide, b: Side) -> str | None:
    """Return why the two sides cannot be compared at all; None if they can."""
    model, layers = a.model
    if not isinstance(b, ReplaySide):
        if model == TINY:
            return "the embedded tiny model is not the run's model: replay with --model"
        num_layers = a.spec.config.num_layers
        return None if num_layers is None else f"the replay has the first {num_layers} layers only, the run had all"
    if model != b.model[0]:
        return f"A ran the model {model}, B {b.model[0]}"
    if None not in (layers, b.model[1]) and layers != b.model[1]:
        return f"A ran {layers} layers, B {b.model[1]}"
    return None


def _figure(result: ResultRecord, value: float | None) -> float | None:
    """Return a figure of the backward; NaN if the backward ran but the journal has null, which stands for NaN."""
    return math.nan if value is None and result.backward_s is not None else value


def _dtype(name: Any) -> str | None:
    """Return the short name of a torch dtype ("fp64" for float64), and any other name unchanged."""
    plain = name.removeprefix("torch.") if isinstance(name, str) else ""
    return "fp64" if plain in ("float64", "fp64") else short_dtype(plain) or plain or None
