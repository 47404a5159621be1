"""Is a recorded norm that of the whole step's gradient? If not, which known fault gives it?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from actordbg.base.units import some
from actordbg.compare.same_weights import OF_ROUNDING
from actordbg.document.blocks import number
from actordbg.records.finding import Finding
from actordbg.steps.adam_update import resting
from actordbg.steps.rules import UNKNOWN, broken, near
from actordbg.steps.run_step import Side, StepFigures

NORM_OFF = {True: 1e-3, False: 0.01}
"""Largest relative distance of a gradient's norm, by whether the run computes in fp32; measured 1e-6, 2.3e-3 in bf16."""
NORM_LEAST, OF_NORM = {True: 1e-4, False: 1e-3}, 3.0
"""Where a replay repeats the run's log-probs, its norm is so near, or so many times as near as rounding takes it to fp32's."""
CHANCE = 0.1
"""Most of the range of norms that micro-batches left out or doubled may explain: above it, one would fit by chance."""


def of_norm(figures: StepFigures) -> Finding | None:
    """Name the fault that explains the recorded norm; None if it is that of the whole step."""
    step, whole = figures.step, figures.reference.grad_norm
    recorded, tolerance = step.grad_norm, norm_limit(figures)
    factor = abs(step.factor)
    if recorded is None or (math.isfinite(whole) and near(recorded, factor * whole, tolerance)):
        return None
    said = f"the norm is {number(recorded)} where the whole step has {number(factor * whole)}"
    if not (0 < recorded < math.inf and 0 < factor * whole < math.inf):
        return broken(UNKNOWN, f"{said}; no known fault explains it")
    cases = [case for case in _norms_of_faults(figures) if near(recorded, factor * case[1], tolerance)]
    cases = cases or _of_one_part(figures, recorded / factor, tolerance)
    if cases:
        words = "; or ".join(dict.fromkeys(words for _, _, words in cases))
        return broken(cases[0][0], f"{words}: {said}")
    if near(recorded, figures.replayed.grad_norm, tolerance):
        return None  # it follows from the losses as they were recorded
    return broken(UNKNOWN, f"{said}, {number(recorded / (factor * whole))} times it; no known fault explains it")


def _norms_of_faults(figures: StepFigures) -> Iterator[tuple[str, float, str]]:
    """Yield the rule that each known fault of the gradient breaks, the norm that it gives, and the fault in words."""
    step, whole, alone = figures.step, figures.reference.grad_norm, figures.reference.alone
    zero, gas, ratio = step.micro_batches[0].loss.record.actor.get("zero_stage"), step.accumulation, step.grad_norm or 1.0
    if step.places > 1:
        under = "" if zero is None else f" under ZeRO {zero}"
        yield "last micro-batch", alone[-1], f"of {step.places} micro-batches{under}, only the gradient of the last is applied"
        yield "first micro-batch", alone[0], "only the gradient of the first micro-batch is applied"
    yield "gradient twice", 2 * whole, "each micro-batch's gradient is accumulated twice"
    if step.ranks > 1:
        yield "sum over ranks", step.ranks * whole, "gradients are added over ranks, not averaged"
        yield "ranks twice", whole / step.ranks, "gradients are averaged over ranks twice"
    if gas > 1:
        yield "accumulation", whole / gas, "the gradient is divided by the accumulation twice"
        yield "accumulation", whole * gas, "the gradient is not divided by the accumulation"
    factor = abs(step.factor)
    if (limit := step.fact("max_norm")) and limit < factor * whole:
        yield UNKNOWN, limit / factor, "the norm is one after clipping"
    if limit:
        summed, each = _clipped(figures.reference, step.ranks, limit / factor)
        yield "clipped early", summed, f"the accumulated gradient is clipped at {limit:g} behind each micro-batch"
        yield "clipped early", each, f"the gradient of each micro-batch is clipped at {limit:g}"
    if still := resting(step):
        squares = (figures.reference.squares.get(name, 0.0) for name in still)
        yield "lost gradient", _without(whole, squares), f"the gradient of {some(still)} is lost, which did not move"
    scale = round(math.log2(ratio / (factor * whole)))
    if scale >= 8:
        yield UNKNOWN, whole * 2.0**scale, f"the loss scale, 2^{scale}, was not divided out of the gradient"


def _of_one_part(figures: StepFigures, norm: float, tolerance: float) -> list[tuple[str, float, str]]:
    """Return the part that explains a norm if it is left out or doubled, as `_norms_of_faults`, if chance hardly can.

    A part is a micro-batch of all ranks, of one, or a parameter's gradient.
    """
    step, whole, every = figures.step, figures.reference.grad_norm, np.arange(len(figures.step.micro_batches))
    of_all = [(f"micro-batch {at}", every // step.ranks == at) for at in range(step.places)]
    of_one = [(each.name, every == at) for at, each in enumerate(step.micro_batches)]
    kinds = []
    for parts in (of_all, of_one) if step.ranks > 1 else (of_all,):
        kinds.append([
            (rule, figures.reference.norm_of(np.where(part, times, 1.0)), f"the gradient of {name} is {how}")
            for times, rule, how in ((0.0, "micro-batch left out", "left out"), (2.0, "gradient twice", "accumulated twice"))
            for name, part in parts
        ])  # fmt: skip
    squares = figures.reference.squares
    kinds.append([("lost gradient", _without(whole, [own]), f"the gradient of {name} is lost") for name, own in squares.items()])
    fits = list[tuple[str, float, str]]()
    for known in kinds:
        norms = [each for _, each, _ in known]
        by_chance = 2 * tolerance * sum(norms) / (max(norms, default=0) - min(norms, default=0) or math.nan)
        fits += [case for case in known if by_chance < CHANCE and near(norm, case[1], tolerance)]
    return fits if len(fits) == 1 else []


def _clipped(side: Side, ranks: int, limit: float) -> tuple[float, float]:
    """Return the norm of a step whose sum was clipped behind each micro-batch, and if each micro-batch was clipped."""
    places = np.arange(len(side.alone) * ranks) // ranks
    summed, own, norm = np.zeros(len(places)), np.zeros(len(places)), 0.0
    for place, alone in enumerate(side.alone):
        own = np.where(places == place, limit / max(alone, limit), own)
        summed = np.where(places == place, 1.0, summed)
        norm = side.norm_of(summed)
        summed *= limit / max(norm, limit)
    return norm, side.norm_of(own)


def _without(whole: float, squares: Iterable[float]) -> float:
    return math.sqrt(max(0.0, whole**2 - sum(squares)))


def norm_limit(figures: StepFigures) -> float:
    """Return how far the recorded norm may be from the step's, relative: what rounding costs, measured on the step."""
    step, replayed, reference = figures.step, figures.replayed, figures.reference
    own, floor = figures.apart(replayed).sum(), figures.apart(replayed, reference).sum()  # nats, over all actions
    repeats = own <= OF_ROUNDING[step.fp32] * floor
    rounding = abs(replayed.grad_norm - reference.grad_norm) / (reference.grad_norm or math.nan)
    if not repeats or not math.isfinite(rounding):
        return NORM_OFF[step.fp32]
    return min(NORM_OFF[step.fp32], max(NORM_LEAST[step.fp32], OF_NORM * rounding))
