"""Name the cause of wrong log-probs of which there are only the numbers: those that a run recorded, or a rollout engine returned.

The truth is computed once more for at most `MOST` dumps, with every cause of the bank (`actordbg.causes.bank`): log-probs per
cause, and draws of what rounding does. With it come real computations in the run's dtype: each row alone, and the replay's own
results where they are right. `actordbg.causes.fit` then fits what was recorded.

    explained = explain_outputs(store, replay_id)
    explained.sentence     # "temperature 0.7 was not applied (0.518 -> 0.014 nats, noise 0.01)"
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from actordbg.actor.hub_model import versions_of
from actordbg.actor.rules import LEAKED
from actordbg.base.errors import ActordbgError, Unsupported
from actordbg.catalog import query
from actordbg.causes.bank import BY_NAME, NAN, PLACEHOLDER, SHIFT, WEIGHTS
from actordbg.causes.fit import ACCEPTED, Array, CauseFit, FitResult, fit, refined
from actordbg.causes.gather import PREFIX, Piece, sample_of
from actordbg.document.blocks import number
from actordbg.judge.comparing import OF_TOKENS
from actordbg.judge.find_truth import Wanted, ensure_lone_rows, wanted_rounding, wanted_truth
from actordbg.judge.sides import GOLDEN, GoldenSide, ReplaySide, Values, open_replay, why_not
from actordbg.judge.thresholds import measures
from actordbg.records.comparison_record import MISMATCH, ComparisonRecord, DumpComparison, ExplainedOutputs, NamedCause
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store

MOST = 8
"""Dumps that are fitted: each costs some fifty forwards of the truth."""
ROUNDS = 2
"""How often sizes around a fitted one are computed, for causes that are not linear."""


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
    ours = open_replay(query.open_fresh(store), replay_id)
    source = GoldenSide(store, ours, ours.inputs) if side == RECORDED else ours
    given: dict[str, Array] = {}
    for dump_id in ours.inputs if only is None else [each for each in ours.inputs if each in only]:
        if len(given) < MOST and not isinstance(values := source.read(dump_id), str) and getattr(values, of) is not None:
            given[dump_id] = getattr(values, of)
    explained = explain_sides(store, replay_id, {side: given}, of=of, **more)[side]
    words = "entropies" if of == ENTROPIES else "log-probs"
    causes = tuple(replace(cause, said=cause.said.replace("log-probs", words)) for cause in explained.causes)
    return replace(explained, what=f"recorded {words}" if side == RECORDED else words, causes=causes)


def explain_sides(
    store: Store,
    replay_id: str,
    sides: Mapping[str, Mapping[str, Array]],
    *,
    of: str = LOG_PROBS,
    models: Sequence[str] = (),
    temperature: float | None = None,
    **callbacks: Any,
) -> dict[str, ExplainedOutputs]:
    """Fit the bank's causes to each of several sides, such as a rollout engine and the run.

    sides: by name, values by dump id, of the shape of a replay's; the dumps that all have are fitted, at most `MOST`. models:
    further models (checkpoints of other steps, the base without its adapter) whose weights a side may have had. temperature: the
    configured one, if not the replay's. callbacks: passed to `run_replay`. Raises Unsupported if there is nothing to fit, and
    what `run_replay` raises.
    """
    ours = open_replay(query.open_fresh(store), replay_id)
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
        return open_replay(query.open_fresh(store), done)

    with_causes = replace(wanted, config=replace(wanted.config, causes="all")) if of == LOG_PROBS else wanted
    of_models = {
        model: replace(wanted, config=replace(wanted.config, model=model), versions=versions_of(model)) for model in models
    }
    truth = computed(with_causes, "causes")
    alone = computed(_lone(rounding, usable, temperature), "the rounding") if rounding else None
    others = {model: computed(request, "other weights") for model, request in of_models.items()}
    own = dict(truth.resolved.get("causes") or {})
    pieces = {
        dump_id: piece for dump_id, values in usable.items() if (piece := _piece(dump_id, values, of, truth, alone, others))
    }
    if not pieces:
        hint = f"`actordbg report {truth.info.replay_id}` says why; replay again to compute it anew"
        raise Unsupported("none of the inputs has a truth", hint=hint)
    temperatures = {truth.results[dump_id].extra.get("temperature") for dump_id in pieces}
    explained = {}
    for name, side in sides.items():
        for left in range(ROUNDS, -1, -1):
            sample = sample_of([replace(piece, recorded=side[dump_id]) for dump_id, piece in pieces.items()], own)
            fitted = fit(sample)
            near = ",".join(f"{cause}={size!r}" for cause, size in refined(sample, fitted))
            if not near or not left:
                break
            finer = computed(replace(wanted, config=replace(wanted.config, causes=near)), "causes")
            pieces = {
                dump_id: replace(piece, causes={**piece.causes, **finer.arrays(dump_id, PREFIX)})
                for dump_id, piece in pieces.items()
            }
        explained[name] = told(fitted, own, len(pieces), next(iter(temperatures)) if len(temperatures) == 1 else None)
    return explained


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
    return replace(record, explained=explained, reasons=(*explained.sentences, *record.reasons))


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


def told(fitted: FitResult, own: Mapping[str, float], dumps: int, temperature: float | None) -> ExplainedOutputs:
    """Put a fit into words. temperature: that of the truth, if it is the same in all dumps; amounts of temperature are times
    this.
    """
    zeros = [CauseFit(PLACEHOLDER, fitted.placeholders, None, np.zeros(0), fitted.before)] * bool(fitted.placeholders)
    named, also = (tuple(_named(each, own, temperature) for each in fits) for fits in (fitted.named, [*zeros, *fitted.expected]))
    nearest = (
        f"{_named(fitted.nearest, own, temperature).said}, leaves {number(fitted.nearest.left, 3)}" if fitted.nearest else ""
    )
    return ExplainedOutputs(fitted.before, fitted.noise, fitted.tokens, dumps, named, also, fitted.unknown, nearest)


def _named(each: CauseFit, own: Mapping[str, float], temperature: float | None) -> NamedCause:
    """Describe a fit. An amount that has an error is given with it."""
    model = each.name.removeprefix(f"{WEIGHTS} ")
    cause = BY_NAME[WEIGHTS if model != each.name else each.name]
    amount, error, none, said = each.amount, each.error, own.get(each.name), cause.said
    if each.name == "temperature" and temperature and amount:
        amount, error, none = amount * temperature, (error or 0.0) * temperature, temperature
        said = "temperature {own} was not applied" if none != 1.0 and abs(amount - 1.0) < 0.02 else said
    shown = f"{amount:+}" if cause.name == SHIFT else number(amount, 4) + (f" ± {number(error, 1)}" if error else "")
    said = said.format(amount=shown, own=number(none, 4), model=model)
    return NamedCause(each.name, said, cause.remedy, cause.thread, amount, error, each.left, each.z)
