"""Judges the cells of a training check: by the ancestor's three criteria, and by where a training parts from the baseline. Pure.

The ancestor's: it completes; its loss falls; its losses (first, mean, last) are within the threshold, 5 %, of the baseline's.

The stricter one looks at every step and at three figures: loss, gradient norm, and the norm of what the weights moved by. A
training *parts* at the first step where one of them is further from the baseline than FACTOR times the floor and LEAST of its
dtype. The floor is how far the plain Actor in the same dtype, its sums reordered, is from the baseline up to that step.

Which figure parts first says where to look: `looks_like`. Of the trainer's own program only losses are known: the ancestor's
criteria judge it, against that program on one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from actordbg.measure.align_logs import relative
from actordbg.measure.log_answer import FALLS, RISES, trend
from actordbg.records.matrix_record import (
    ASKED,
    BASELINE,
    IMPOSSIBLE,
    NOISE,
    SFT,
    SFT_BASELINE,
    TRAINED,
    TrainCell,
    TrainCheckRecord,
    TrainStep,
)

FIGURES = ("loss", "grad_norm", "update_norm")
IN_WORDS = {"loss": "the loss", "grad_norm": "the gradient norm", "update_norm": "the update norm"}
LEAST = {"fp32": 1e-5, "bf16": 2**-7, "fp16": 2**-10}
"""Relative differences below this are never a parting."""
FACTOR = 4.0
AGREES, PARTS, NO_FALL, FAR = "agrees", "PARTS", "no fall", "far"
YES, NO, UNKNOWN = "yes", "no", "?"
ROUND = "round"
"""Key of the options of the trainer's own program: after how many steps its rows come again."""
_THREE_DIGITS = 0.005


@dataclass(frozen=True)
class Parting:
    """Where a training first is further from the baseline than rounding: the figure there, by how much, and the limit.

    by: None where one of the two is NaN or infinite.
    """

    step: int
    figure: str
    by: float | None
    limit: float
    looks_like: str = ""


@dataclass(frozen=True)
class CellVerdict:
    """completes, falls, within: the ancestor's criteria, in words. largest: of each figure the largest relative difference
    of finite ones, None where there are none.

    word: agrees, PARTS, no fall (all agrees, and the loss does not fall), far (further than the threshold), or the cell's status.
    """

    index: int
    word: str
    completes: str
    falls: str = UNKNOWN
    within: str = UNKNOWN
    largest: dict[str, float | None] = field(default_factory=dict)
    parting: Parting | None = None

    @property
    def good(self) -> bool:
        return self.word == AGREES and self.falls == YES


def verdicts(record: TrainCheckRecord) -> list[CellVerdict]:
    """One for each cell, in order; the baseline and the noise are judged as well, and count for nothing."""
    baseline, alone = trained(record, BASELINE), trained(record, SFT_BASELINE)
    return [_verdict(record, cell, alone if cell.role in (SFT, SFT_BASELINE) else baseline) for cell in record.cells]


def trained(record: TrainCheckRecord, role: str) -> TrainCell | None:
    """The first cell of this role, if it was trained."""
    return next((one for one in record.cells if one.role == role and one.status == TRAINED), None)


def is_good(record: TrainCheckRecord) -> bool:
    """Something was trained, and every cell that could be trained agrees and is known to have a falling loss."""
    asked = [one for cell, one in zip(record.cells, verdicts(record), strict=True) if cell.role in (ASKED, SFT)]
    ran = [one for one in asked if one.word != IMPOSSIBLE]
    return bool(ran) and all(one.good for one in ran)


def _verdict(record: TrainCheckRecord, cell: TrainCell, baseline: TrainCell | None) -> CellVerdict:
    if cell.status != TRAINED:
        return CellVerdict(cell.index, cell.status, NO)
    own = cell.role in (SFT, SFT_BASELINE)
    period = (record.options.get(SFT) or {}).get(ROUND) or 0 if own else steps_of_round(len(record.dump_ids), record.batch)
    falls = falling(cell.steps, period, _THREE_DIGITS if own else 0.0)
    if baseline is None:
        return CellVerdict(cell.index, "not judged", YES, falls)
    known = FIGURES[:1] if own else FIGURES
    gaps = {figure: gaps_of(cell.steps, baseline.steps, figure) for figure in known}
    largest = {figure: max((one for one in found if one == one), default=None) for figure, found in gaps.items()}
    within = YES if _aligned(cell.steps, baseline.steps, record.threshold) else NO
    parting = _parting(gaps, record, cell, baseline) if cell.role == ASKED else None
    word = cell.role.rpartition(" ")[2]
    if cell.role in (ASKED, SFT):
        word = PARTS if parting else FAR if within == NO else NO_FALL if falls == NO else AGREES
    return CellVerdict(cell.index, word, YES, falls, within, largest, parting)


def gaps_of(steps: Sequence[TrainStep], baseline: Sequence[TrainStep], figure: str) -> list[float]:
    """Relative differences of a figure, step by step."""
    pairs = zip(steps, baseline, strict=False)
    return [relative(number_of(getattr(a, figure)), number_of(getattr(b, figure))) for a, b in pairs]


def limits_of(record: TrainCheckRecord, figure: str) -> list[float]:
    """How far a figure may be from the baseline, step by step."""
    baseline, noise = trained(record, BASELINE), trained(record, NOISE)
    floor, limits = 0.0, []
    gaps = gaps_of(noise.steps, baseline.steps, figure) if noise and baseline else []
    for step in range(record.steps):
        floor = max(floor, gaps[step] if step < len(gaps) and gaps[step] == gaps[step] else 0.0)
        limits.append(max(LEAST[record.dtype], FACTOR * floor))
    return limits


def steps_of_round(inputs: int, batch: int) -> int:
    """After how many steps the same micro-batches come again."""
    return inputs // math.gcd(inputs, batch)


def falling(steps: Sequence[TrainStep], period: int, rounding: float) -> str:
    """Whether the loss falls: from the first to the last whole round over the same inputs, by more than its relative `rounding`;
    by its trend where no round comes twice.
    """
    losses = [number_of(one.loss) for one in steps]
    if not 0 < 2 * period <= len(losses):
        return {FALLS: YES, RISES: NO}.get(trend(losses).word, UNKNOWN)
    end = len(losses) - len(losses) % period
    first, last = math.fsum(losses[:period]), math.fsum(losses[end - period : end])
    return UNKNOWN if relative(first, last) < rounding else YES if last < first else NO


def _aligned(steps: Sequence[TrainStep], baseline: Sequence[TrainStep], threshold: float) -> bool:
    """The ancestor's third criterion: first, mean and last loss."""
    ours, theirs = ([number_of(one.loss) for one in side] for side in (steps, baseline))
    three = [(side[0], math.fsum(side) / len(side), side[-1]) for side in (ours, theirs)]
    return all(relative(a, b) < threshold for a, b in zip(*three, strict=True))


def _parting(gaps: dict[str, list[float]], record: TrainCheckRecord, cell: TrainCell, baseline: TrainCell) -> Parting | None:
    limits = {figure: limits_of(record, figure) for figure in FIGURES}
    for index in range(len(gaps["loss"])):
        over = [figure for figure in FIGURES if not gaps[figure][index] <= limits[figure][index]]
        if over:
            first = max(over, key=lambda figure: gaps[figure][index])
            by = gaps[first][index]
            hint = "" if by != by else looks_like(index, set(over), cell.steps, baseline.steps)
            return Parting(cell.steps[index].step, first, None if by != by else by, limits[first][index], hint)
    return None


def looks_like(index: int, over: set[str], steps: Sequence[TrainStep], baseline: Sequence[TrainStep]) -> str:
    """What the figures that part first point to. A guess to begin with, never part of the verdict."""
    ours, theirs = steps[index], baseline[index]
    gradient = number_of(ours.grad_norm) / (number_of(theirs.grad_norm) or math.nan)
    update = number_of(ours.update_norm) / (number_of(theirs.update_norm) or math.nan)
    if "loss" in over and index == 0:
        return "the forward differs: `actordbg matrix` on the same inputs says where"
    if "grad_norm" in over and index == 0:
        return f"gradients {gradient:.3g} times as large: not reduced over all ranks, or weighted otherwise"
    if "grad_norm" in over and "loss" not in over and index == 1 and gradient > 1:
        return "gradients of the step before are still there: a missing zero_grad"
    if over == {"update_norm"} and index == 0:
        return (
            f"same gradients, update {update:.3g} times as large: a learning rate or a step applied twice, or another optimizer"
        )
    if over == {"update_norm"}:
        return "same gradients, another update: the optimizer's state was reset, lost or not synchronised"
    return "weights that the step before left different"


def number_of(value: float | None) -> float:
    """The value, NaN for one that was not finite."""
    return math.nan if value is None else value
