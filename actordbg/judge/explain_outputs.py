"""Name the cause of wrong log-probs of which there are only the numbers: those that a run recorded, or a rollout engine returned.

The truth is computed once more for at most `MOST` dumps, with every cause of the bank (`actordbg.causes.bank`): log-probs per
cause, and draws of what rounding does. With it come real computations in the run's dtype: each row alone, and the replay's own
results where they are right. `actordbg.causes.fit` then fits what was recorded.

    explained = explain_outputs(store, replay_id)
    explained.sentence     # "temperature 0.7 was not applied (0.518 -> 0.014 nats, noise 0.01)"
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actordbg.actor.hub_model import versions_of
from actordbg.actor.rules import LEAKED
from actordbg.base.errors import ActordbgError, Unsupported
from actordbg.base.units import first_line
from actordbg.causes.bank import (
    BY_NAME,
    DROPPED,
    NAN,
    OLDER,
    PLACEHOLDER,
    PRECISION,
    SHIFT,
    UNKNOWN_POLICY,
    UNKNOWN_PRECISION,
    all_causes,
    cause_and_part,
)
from actordbg.causes.fit import ACCEPTED, Array, CauseFit, FitResult, TokenSample, fit, fit_to, mean_apart, refined, rounds_as
from actordbg.causes.gather import PREFIX, Piece, sample_of
from actordbg.compare.comparing import OF_TOKENS
from actordbg.compare.find_truth import Wanted, ensure_lone_rows, wanted_rounding, wanted_truth
from actordbg.compare.sides import GOLDEN, GoldenSide, ReplaySide, Values, open_replay, why_not
from actordbg.compare.thresholds import measures
from actordbg.config.replay_config import WIDER
from actordbg.document.blocks import number
from actordbg.records.comparison_record import MISMATCH, ComparisonRecord, DumpComparison, ExplainedOutputs, NamedCause
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store

MOST = 8
"""Dumps that are fitted: each costs some fifty forwards of the truth."""
ROUNDS = 2
"""How often sizes around a fitted one are computed, for causes that are not linear."""


_COARSER = {"fp32": ("fp16", "bf16"), "fp16": ("bf16",)}
"""By the dtype of a replay, in which coarser ones a side may compute that is right."""
RECORDED, REPLAYED = "recorded", "replayed"
LOG_PROBS, ENTROPIES = "log_probs", "entropy"
"""What is explained: an attribute of `Values`."""


def explain_outputs(
    store: Store, replay_id: str, *, side: str = RECORDED, of: str = LOG_PROBS, only: Collection[str] | None = None, **more: Any
) -> ExplainedOutputs:
    """Fit the bank's causes to what the run recorded for the inputs of a replay of the same model, or to the replay's results.

    side: RECORDED or REPLAYED. of: LOG_PROBS, or ENTROPIES, which are only arranged in another way. only: ids of dumps to choose
    from. more: see `explain_sides`, which raises the same.
    """
    ours = open_replay(store, replay_id)
    source = GoldenSide(store, ours, ours.inputs) if side == RECORDED else ours
    given: dict[str, Array] = {}
    for dump_id in ours.inputs if only is None else [each for each in ours.inputs if each in only]:
        if len(given) < MOST and not isinstance(values := source.read(dump_id), str) and getattr(values, of) is not None:
            given[dump_id] = getattr(values, of)
    explained = explain_sides(store, replay_id, {side: given}, of=of, **more)[side]
    words = "entropies" if of == ENTROPIES else "log-probs"
    return replace(explained, what=f"recorded {words}" if side == RECORDED else words)


def explain_sides(
    store: Store,
    replay_id: str,
    sides: Mapping[str, Mapping[str, Array]],
    *,
    of: str = LOG_PROBS,
    models: Sequence[str] = (),
    temperature: float | None = None,
    coarser: Collection[str] = (),
    old: Mapping[str, Mapping[str, Array]] = {},
    trained: Collection[str] = (),
    **callbacks: Any,
) -> dict[str, ExplainedOutputs]:
    """Fit the bank's causes to each of several sides, such as a rollout engine and the run.

    sides: by name, values by dump id, of the shape of a replay's; the dumps that all have are fitted, at most `MOST`. models:
    further models (checkpoints of other steps, the base without its adapter) whose weights a side may have had. temperature: the
    configured one, if not the replay's. coarser: sides that may compute in a coarser dtype than the replay. trained: those in
    training mode. old: by side, what the run recorded of its policy, which may have been updated since. callbacks: passed to
    `run_replay`. Raises Unsupported if there is nothing to fit, and what `run_replay` raises.
    """
    ours = open_replay(store, replay_id)
    if REPLAYED not in sides and (blocked := why_not(ours, GoldenSide(store, ours, ours.inputs))):
        raise Unsupported(blocked, hint="replay the run's own model, whole")
    usable: dict[str, Values] = {}
    for dump_id in sorted(set.intersection(*map(set, sides.values())), key=[*ours.inputs].index):
        values = ours.read(dump_id)
        shapes = {side[dump_id].shape for side in sides.values()}
        if len(usable) < MOST and not isinstance(values, str) and shapes == {values.mask.shape}:
            usable[dump_id] = values
    if not usable:
        raise Unsupported("no dump has log-probs of both the run and the replay", hint="record with --with-outputs")
    spec = load_spec(store, replay_id)
    wanted, rounding = _lone(wanted_truth(store, spec), usable, temperature), wanted_rounding(store, spec)

    def computed(request: Wanted, what: str) -> ReplaySide:
        done = ensure_lone_rows(store, request, command=f"{what} of replay {replay_id}", **callbacks)
        return open_replay(store, done)

    def with_rounding(truth: Wanted, rounding: Wanted | None, models: Sequence[str] = ()) -> _Held:
        """Compute what sides are held against: the truth under every cause, each row alone, other models."""
        caused = replace(truth, config=replace(truth.config, causes=all_causes())) if of == LOG_PROBS else truth
        right = computed(caused, "causes")
        alone = computed(rounding, "the rounding") if rounding else None
        others = {model: computed(_of_model(truth, model), "other weights") for model in models}
        pieces = {
            dump_id: piece for dump_id, values in usable.items() if (piece := _piece(dump_id, values, of, right, alone, others))
        }
        if not pieces:
            hint = f"`actordbg report {right.info.replay_id}` says why; replay again to compute it anew"
            why = next((first_line(result.error) for result in right.results.values() if result.error), "nothing ran")
            raise Unsupported(f"none of the inputs has a truth: {why}", hint=hint)
        words = "entropies" if of == ENTROPIES else "log-probs"

        def finer(sizes: str) -> ReplaySide:
            return computed(replace(truth, config=replace(truth.config, causes=sizes)), "causes")

        return _Held(right, pieces, finer, words)

    rounding = _lone(rounding, usable, temperature) if rounding else None
    held, dtypes = with_rounding(wanted, rounding, models), _COARSER.get(ours.info.dtype or "", ())

    def judged(
        side: Mapping[str, Array], held: _Held, old: Mapping[str, Array] | None, dtypes: Sequence[str], *, trained: bool = False
    ) -> ExplainedOutputs:
        """Explain a side: by the truth, else as the old policy's, else in a coarser dtype, else by the old policy's truth."""
        sample, fitted = held.fit(side, beside=old)
        earlier = sample.truth if old is None else held.sample(old).recorded
        updated = mean_apart(earlier, sample.truth) > ACCEPTED * sample.noise
        wrong = fitted.unknown or fitted.named
        to_old = fit_to(sample, earlier) if updated and wrong else fitted
        if updated and wrong and not to_old.unknown and not to_old.named:
            return replace(held.told(to_old, OLDER), before=fitted.before)
        if not fitted.unknown:
            return held.told(fitted)
        if trained and (share := held.truth.resolved.get("undropped")):
            return replace(held.told(fitted, f"{DROPPED}: {share:g}"), unknown=False)
        for dtype in dtypes:
            if (explained := in_dtype(dtype, side, held, sample, fitted)) is not None:
                return explained
        for model in models if updated else ():
            if mean_apart(earlier, sample.weights[model]) <= ACCEPTED * sample.noise:
                of_model = with_rounding(_of_model(wanted, model), rounding and _of_model(rounding, model))
                return judged(side, of_model, None, dtypes)
        if updated and not to_old.named:
            return replace(held.told(to_old, UNKNOWN_POLICY), unknown=False)
        return held.told(to_old)

    def in_dtype(
        dtype: str, side: Mapping[str, Array], held: _Held, sample: TokenSample, fitted: FitResult
    ) -> ExplainedOutputs | None:
        """Explain a side by the truth of the weights in a coarser dtype, if it shares the rounding of that dtype."""
        config = replace(held.truth.spec.config, dtype=dtype, truth=WIDER[dtype], causes=None)
        truth = replace(_of_model(wanted, config.model or ""), config=config)
        alone = replace(truth, config=replace(config, truth=dtype))
        lone = computed(alone, "the rounding")
        rounded = {dump_id: values.log_probs for dump_id in held.pieces if not isinstance(values := lone.read(dump_id), str)}
        if held.pieces.keys() != rounded.keys():
            return None
        known = rounds_as(sample, fitted, held.sample(rounded).recorded)
        if known is False:
            return None
        of_dtype = with_rounding(truth, alone)
        found = of_dtype.fit(side)[1]
        if found.unknown or (found.named and not known):
            return None
        note = PRECISION if known else UNKNOWN_PRECISION
        return of_dtype.told(found, f"{note}: {dtype}")

    return {
        name: judged(side, held, old.get(name), dtypes if name in coarser else (), trained=name in trained)
        for name, side in sides.items()
    }


def _of_model(wanted: Wanted, model: str) -> Wanted:
    return replace(wanted, config=replace(wanted.config, model=model), versions=versions_of(model))


@dataclass
class _Held:
    """What a side is held against: the truth of a model in a dtype, under every cause, and real computations in that dtype.

    pieces: by dump id; their `recorded` is the replay's own. finer: computes the truth under further sizes, "NAME=SIZE,...".
    words: what is held.
    """

    truth: ReplaySide
    pieces: dict[str, Piece]
    finer: Callable[[str], ReplaySide]
    words: str

    @property
    def own(self) -> dict[str, float]:
        """By cause, the size at which nothing is wrong."""
        return dict(self.truth.resolved.get("causes") or {})

    def sample(self, side: Mapping[str, Array]) -> TokenSample:
        """Gather the tokens of a side."""
        return sample_of([replace(piece, recorded=side[dump_id]) for dump_id, piece in self.pieces.items()], self.own)

    def fit(self, side: Mapping[str, Array], *, beside: Mapping[str, Array] | None = None) -> tuple[TokenSample, FitResult]:
        """Fit the causes, and those sizes that may fit better. beside: log-probs that count as healthy within rounding."""
        for left in range(ROUNDS, -1, -1):
            sample = self.sample(side)
            if beside is not None:
                near = self.sample(beside).recorded - sample.truth
                healthy = mean_apart(near, 0.0) <= ACCEPTED * sample.noise
                sample = replace(sample, beside=near[None]) if healthy else sample
            fitted = fit(sample)
            sizes = ",".join(f"{cause}={size!r}" for cause, size in refined(sample, fitted))
            if not sizes or not left:
                break
            finer = self.finer(sizes)
            for dump_id, piece in self.pieces.items():
                self.pieces[dump_id] = replace(piece, causes={**piece.causes, **finer.arrays(dump_id, PREFIX)})
        return sample, fitted

    def told(self, fitted: FitResult, note: str = "") -> ExplainedOutputs:
        """Put a fit into words. note: a name of the bank, of what is not a fault; its amount is what is left."""
        temperatures = {self.truth.results[dump_id].extra.get("temperature") for dump_id in self.pieces}
        temperature = next(iter(temperatures)) if len(temperatures) == 1 else None
        if note:
            noted = CauseFit(note, fitted.before, None, np.zeros(0), fitted.before)
            fitted = replace(fitted, expected=(*fitted.expected, noted))
        return told(fitted, self.own, len(self.pieces), temperature, self.words)


def with_explanation(store: Store, record: ComparisonRecord, **callbacks: Any) -> ComparisonRecord:
    """Explain a mismatch of log-probs, or else of entropies, with recorded outputs or with the truth; where that is not possible,
    add the reason.

    Unchanged if no log-prob and no entropy is beyond its limit, and if a rule already names the cause.
    """
    side = RECORDED if record.b.kind == GOLDEN else REPLAYED
    if any(LEAKED in dump.reasons for dump in record.dumps):
        return record
    lost = [each.count for dump in record.dumps if (each := dump.log_probs) and 0 < each.count == each.nonfinite]
    if lost and side == RECORDED:
        nan = BY_NAME[NAN]
        also = (NamedCause(nan.name, nan.said, nan.remedy, nan.thread),)
        return _explained(record, ExplainedOutputs(math.inf, 0.0, sum(lost), len(lost), also=also))
    for of, names in ((LOG_PROBS, OF_TOKENS), (ENTROPIES, ("entropy_max_abs",))):
        if far := [dump.dump_id for dump in record.dumps if _is_beyond(record, dump, names)]:
            try:
                explained = explain_outputs(store, record.a.replay_id or "", side=side, of=of, only=far, **callbacks)
            except ActordbgError as problem:
                return replace(record, reasons=(*record.reasons, f"no cause was searched for: {problem.message}"))
            return _explained(record, explained)
    return record


def _explained(record: ComparisonRecord, explained: ExplainedOutputs) -> ComparisonRecord:
    before = record.explained.sentences if record.explained else ()
    reasons = (*explained.sentences, *(each for each in record.reasons if each not in before))
    return replace(record, explained=replace(explained, bank=all_causes()), reasons=reasons)


def _is_beyond(record: ComparisonRecord, dump: DumpComparison, names: Sequence[str]) -> bool:
    values, limits = measures(dump), dump.limits or record.thresholds
    return dump.verdict == MISMATCH and any(values.get(name, 0.0) > limits.get(name, math.inf) for name in names)


def _lone(wanted: Wanted, usable: Collection[str], temperature: float | None) -> Wanted:
    """Return what is wanted, for these dumps and without gradients."""
    config = replace(wanted.config, backward=False, keep_gradients=False)
    config = config if temperature is None else replace(config, temperature=temperature)
    inputs = tuple(each for each in wanted.inputs if each.dump_id in usable)
    return replace(wanted, config=config, inputs=inputs, with_gradients=frozenset())


def _piece(
    dump_id: str, own: Values, of: str, truth: ReplaySide, alone: ReplaySide | None, others: Mapping[str, ReplaySide]
) -> Piece | None:
    """Return a dump's log-probs; None if it has no truth. The replay's own count as healthy where they are as near as rounding
    is. alone: each row alone in the run's dtype. others: truths of other models, by name.
    """
    true = truth.read(dump_id)
    if isinstance(true, str):
        return None
    right, ours = getattr(true, of), getattr(own, of)
    weights = {name: each.log_probs for name, side in others.items() if not isinstance(each := side.read(dump_id), str)}
    piece = Piece(ours, true.mask, right, truth.arrays(dump_id, PREFIX), (), weights)
    rounded = alone.read(dump_id) if alone else ""
    if isinstance(rounded, str):
        return piece

    healthy = getattr(rounded, of)

    def away(values: Array) -> float:
        return float(np.abs(values - right)[true.mask].mean())

    near = away(ours) <= ACCEPTED * away(healthy)
    return replace(piece, healthy=(healthy, ours) if near else (healthy,))


def told(
    fitted: FitResult, own: Mapping[str, float], dumps: int, temperature: float | None, what: str = "log-probs"
) -> ExplainedOutputs:
    """Put a fit of `what` into words. temperature: that of the truth, if it is the same in all dumps; amounts of temperature are
    times this.
    """

    def in_words(each: CauseFit) -> NamedCause:
        return _named(each, own, temperature, what)

    beside = list(fitted.expected)
    if fitted.placeholders:
        beside.insert(0, CauseFit(PLACEHOLDER, fitted.placeholders, None, np.zeros(0), fitted.before))
    nearest = ""
    if fitted.nearest:
        nearest = f"{in_words(fitted.nearest).said}, leaves {number(fitted.nearest.left, 3)}"
    return ExplainedOutputs(
        fitted.before,
        fitted.noise,
        fitted.tokens,
        dumps,
        causes=tuple(map(in_words, fitted.named)),
        also=tuple(map(in_words, beside)),
        unknown=fitted.unknown,
        nearest=nearest,
    )


def _named(each: CauseFit, own: Mapping[str, float], temperature: float | None, what: str) -> NamedCause:
    """Describe a fit. An amount that has an error is given with it."""
    cause, part = cause_and_part(each.name)
    amount, error, none, said = each.amount, each.error, own.get(each.name), cause.said
    if each.name == "temperature" and temperature and amount:
        amount, error, none = amount * temperature, (error or 0.0) * temperature, temperature
        said = "temperature {own} was not applied" if none != 1.0 and abs(amount - 1.0) < 0.02 else said
    shown = f"{amount:+}" if cause.name == SHIFT else number(amount, 4) + (f" ± {number(error, 1)}" if error else "")
    said = said.format(amount=shown, own=number(none, 4), part=part, what=what)
    return NamedCause(each.name, said, cause.remedy, cause.thread, amount=amount, error=error, left=each.left, z=each.z)
