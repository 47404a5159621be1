"""Is a recorded norm that of the whole step's gradient? If not, which known fault gives it?"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from actordbg.base.units import some
from actordbg.compare.same_weights import OF_ROUNDING
from actordbg.document.blocks import number
from actordbg.recorded.recorded_calls import Numbers
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
    recorded, tolerance = figures.step.grad_norm, norm_limit(figures)
    factor = abs(figures.step.factor)
    whole = factor * figures.reference.grad_norm
    if recorded is None or (math.isfinite(whole) and near(recorded, whole, tolerance)):
        return None
    said = f"the norm is {number(recorded)} where the whole step has {number(whole)}"
    if not (0 < recorded < math.inf and 0 < whole < math.inf):
        return broken(UNKNOWN, f"{said}; no known fault explains it")
    cases = [case for case in _norms_of_faults(figures) if near(recorded, factor * case[1], tolerance)]
    cases = cases or _of_one_part(figures, recorded / factor, tolerance)
    if cases:
        words = "; or ".join(dict.fromkeys(words for _, _, words in cases))
        return broken(cases[0][0], f"{words}: {said}")
    if near(recorded, figures.replayed.grad_norm, tolerance):
        return None  # it follows from the losses as they were recorded
    return broken(UNKNOWN, f"{said}, {number(recorded / whole)} times it; no known fault explains it")


def _norms_of_faults(figures: StepFigures) -> Iterator[tuple[str, float, str]]:
    """Yield the rule that each known fault of the gradient breaks, the norm that it gives, and the fault in words."""
    step, side = figures.step, figures.reference
    whole, alone = side.grad_norm, side.alone
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
        yield UNKNOWN, limit / factor, "it is clipped before its norm is taken, once or at each micro-batch"
    if limit:
        summed, each = _clipped(side, step.ranks, limit / factor)
        yield "clipped early", summed, f"the accumulated gradient is clipped at {limit:g} behind each micro-batch"
        yield "clipped early", each, f"the gradient of each micro-batch is clipped at {limit:g}"
    if still := resting(step):
        squares = (side.squares.get(name, 0.0) for name in still)
        yield "lost gradient", _without(whole, squares), f"the gradient of {some(still)} is lost, which did not move"
    scale = round(math.log2(ratio / (factor * whole)))
    if scale >= 8:
        yield UNKNOWN, whole * 2.0**scale, f"the loss scale, 2^{scale}, was not divided out of the gradient"


def _of_one_part(figures: StepFigures, norm: float, tolerance: float) -> list[tuple[str, float, str]]:
    """Return the part that explains a norm if it is left out or doubled, as `_norms_of_faults`, if chance hardly can.

    A part is a micro-batch of all ranks, of one, or the gradient of a parameter, or of those with a module's name.
    """
    step, side, every = figures.step, figures.reference, np.arange(len(figures.step.micro_batches))

    def changed(name: str, part: Numbers) -> Iterator[tuple[str, float, str]]:
        yield "micro-batch left out", side.norm_of(1.0 - part), f"the gradient of {name} is left out"
        yield "gradient twice", side.norm_of(1.0 + part), f"the gradient of {name} is accumulated twice"

    of_all, of_one = [f"micro-batch {at}" for at in range(step.places)], [each.name for each in step.micro_batches]
    kinds = [
        [case for at, name in enumerate(names) for case in changed(name, every * len(names) // len(every) == at)]
        for names in ((of_all, of_one) if step.ranks > 1 else (of_all,))
    ]
    named = defaultdict[str, list[float]](list)
    for name, own in side.squares.items():
        for part in (name, *re.sub(r"\.(?=\d)", " ", name).split(".")[:-1]):
            named[part].append(own)
    for several in (False, True):
        of = {tuple(own): part for part, own in reversed(named.items()) if (len(own) > 1) == several}
        kinds.append(
            [("lost gradient", _without(side.grad_norm, own), f"the gradient of {part} is lost") for own, part in of.items()]
        )
    room = tolerance * max(side.grad_norm, norm)
    rare = [known for known in kinds if known and 2 * room * len(known) < CHANCE * np.ptp([each for _, each, _ in known])]
    fits = [case for known in rare for case in known if abs(norm - case[1]) <= room]
    return fits if len(fits) == 1 else []


def _clipped(side: Side, ranks: int, limit: float) -> tuple[float, float]:
    """Return the norm of a step whose sum was clipped behind each micro-batch, and if each micro-batch was clipped."""
    summed, norm = np.zeros(len(side.alone) * ranks), 0.0
    for place in range(len(side.alone)):
        summed[place * ranks :][:ranks] = 1.0
        norm = side.norm_of(summed)
        summed *= limit / max(norm, limit)
    return norm, side.norm_of(np.repeat([limit / max(alone, limit) for alone in side.alone], ranks))


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
