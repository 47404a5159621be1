"""Judges the cells of a training check, and tells it as a document: verdict, charts, the table, where trainings part, what
failed and why, what it ran on. Pure.

The ancestor's criteria: it completes; its loss falls; its losses (first, mean, last) are within the threshold, 5 %, of the
baseline's.

The stricter one looks at every step and at three figures: loss, gradient norm, and the norm of what the weights moved by. A
training *parts* at the first step where one of them is further from the baseline than FACTOR times the floor and LEAST of its
dtype. The floor is how far the plain Actor in the same dtype, its sums reordered, is from the baseline up to that step.

Which figure parts first says where to look: `looks_like`. Of the trainer's own program only losses are known: the ancestor's
criteria judge it, against that program on one process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from actordbg.base.units import grouped, plural
from actordbg.document.blocks import (
    BAD_TONE,
    GOOD_TONE,
    NO_TONE,
    PART_TONE,
    Banner,
    Block,
    Chart,
    Grid,
    Heading,
    Items,
    Paragraph,
    number,
)
from actordbg.measure.align_logs import FALLS, RISES, relative, trend
from actordbg.measure.log_document import apart_chart, values_chart
from actordbg.records.matrix_record import (
    ASKED,
    BASELINE,
    BROKEN,
    IMPOSSIBLE,
    NOISE,
    OPEN,
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
OWN = (SFT, SFT_BASELINE)
"""What the trainer's own program trains."""
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
    of finite ones, None if there are none.

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


Judged = list[tuple[TrainCell, CellVerdict]]


def verdicts(record: TrainCheckRecord) -> list[CellVerdict]:
    """One verdict per cell, in order; those of the baseline and noise cells do not count."""
    baseline, alone = trained(record, BASELINE), trained(record, SFT_BASELINE)
    return [_verdict(record, cell, alone if cell.role in OWN else baseline) for cell in record.cells]


def trained(record: TrainCheckRecord, role: str) -> TrainCell | None:
    """The first cell of this role, if it was trained."""
    return next((cell for cell in record.cells if cell.role == role and cell.status == TRAINED), None)


def asked_of(record: TrainCheckRecord) -> Judged:
    """The cells that were requested, and their verdicts."""
    pairs = zip(record.cells, verdicts(record), strict=True)
    return [(cell, verdict) for cell, verdict in pairs if cell.role in (ASKED, SFT)]


def is_good(record: TrainCheckRecord) -> bool:
    """Something was trained, and every cell that could be trained agrees and is known to have a falling loss."""
    ran = [verdict.good for cell, verdict in asked_of(record) if cell.status != IMPOSSIBLE]
    return bool(ran) and all(ran)


def _verdict(record: TrainCheckRecord, cell: TrainCell, baseline: TrainCell | None) -> CellVerdict:
    if cell.status != TRAINED:
        return CellVerdict(cell.index, cell.status, NO)
    own = cell.role in OWN
    period = (record.options.get(SFT) or {}).get(ROUND) or 0 if own else steps_of_round(len(record.dump_ids), record.batch)
    ours = _losses(cell)
    falls = falling(ours, period, _THREE_DIGITS if own else 0.0)
    if baseline is None:
        return CellVerdict(cell.index, "not checked", YES, falls)
    gaps = {figure: gaps_of(cell, baseline, figure) for figure in FIGURES[: 1 if own else 3]}
    largest = {figure: max(filter(math.isfinite, found), default=None) for figure, found in gaps.items()}
    # the ancestor's third criterion
    losses = zip(*([values[0], fmean(values), values[-1]] for values in (ours, _losses(baseline))), strict=True)
    within = YES if all(relative(a, b) < record.threshold for a, b in losses) else NO
    parting = _parting(gaps, record, cell, baseline) if cell.role == ASKED else None
    word = cell.role.rpartition(" ")[2]
    if cell.role in (ASKED, SFT):
        word = PARTS if parting else FAR if within == NO else NO_FALL if falls == NO else AGREES
    return CellVerdict(cell.index, word, YES, falls, within, largest, parting)


def gaps_of(cell: TrainCell, baseline: TrainCell, figure: str) -> list[float]:
    """Relative differences of a figure, step by step."""
    pairs = zip(cell.steps, baseline.steps, strict=False)
    return [relative(number_of(getattr(a, figure)), number_of(getattr(b, figure))) for a, b in pairs]


def limits_of(record: TrainCheckRecord, figure: str) -> list[float]:
    """How far a figure may be from the baseline, step by step."""
    baseline, noise = trained(record, BASELINE), trained(record, NOISE)
    gaps = gaps_of(noise, baseline, figure) if noise and baseline else []
    finite = [gap if math.isfinite(gap) else 0.0 for gap in gaps]
    return [max(LEAST[record.dtype], FACTOR * max(finite[: step + 1], default=0.0)) for step in range(record.steps)]


def steps_of_round(inputs: int, batch: int) -> int:
    """After how many steps the same micro-batches come again."""
    return inputs // math.gcd(inputs, batch)


def falling(losses: Sequence[float], period: int, rounding: float) -> str:
    """Whether the loss falls: from the first to the last whole round over the same inputs, by more than its relative `rounding`;
    by its trend where no round comes twice.
    """
    if not 0 < 2 * period <= len(losses):
        return {FALLS: YES, RISES: NO}.get(trend(losses).word, UNKNOWN)
    end = len(losses) - len(losses) % period
    first, last = math.fsum(losses[:period]), math.fsum(losses[end - period : end])
    return UNKNOWN if relative(first, last) < rounding else YES if last < first else NO


def _parting(
    gaps: Mapping[str, Sequence[float]], record: TrainCheckRecord, cell: TrainCell, baseline: TrainCell
) -> Parting | None:
    limits = {figure: limits_of(record, figure) for figure in FIGURES}
    for index, (ours, theirs) in enumerate(zip(cell.steps, baseline.steps, strict=False)):
        if over := [figure for figure in FIGURES if not gaps[figure][index] <= limits[figure][index]]:
            figure = max(over, key=lambda figure: gaps[figure][index])
            by, limit = gaps[figure][index], limits[figure][index]
            if math.isnan(by):
                return Parting(ours.step, figure, None, limit)
            return Parting(ours.step, figure, by, limit, looks_like(index, set(over), ours, theirs))
    return None


def looks_like(index: int, over: set[str], ours: TrainStep, theirs: TrainStep) -> str:
    """What the figures that part first point to. A guess to begin with, never part of the verdict."""
    gradient = number_of(ours.grad_norm) / (number_of(theirs.grad_norm) or math.nan)
    update = number_of(ours.update_norm) / (number_of(theirs.update_norm) or math.nan)
    if "loss" in over and index == 0:
        return "forward differs: `actordbg matrix` on the same inputs locates it"
    if "grad_norm" in over and index == 0:
        return f"gradients {gradient:.3g} times as large: not reduced over all ranks, or misweighted"
    if "grad_norm" in over and "loss" not in over and index == 1 and gradient > 1:
        return "gradients left over from the previous step: missing zero_grad"
    if over != {"update_norm"}:
        return "weights already off after the last step"
    if index:
        return "same gradients, another update: the optimizer's state was reset, lost or not synchronized"
    return f"same gradients, update {update:.3g} times as large: a learning rate or a step applied twice, or another optimizer"


def number_of(value: float | None) -> float:
    """The value, NaN for one that was not finite."""
    return math.nan if value is None else value


def _losses(cell: TrainCell) -> list[float]:
    return [number_of(step.loss) for step in cell.steps]


_COLUMNS = ("configuration", "result", "first", "last", "falls", "loss", "|g|", "|dw|", "parts")
_PLURAL = {"agrees": "agree", "PARTS": "PART"}


def train_document(record: TrainCheckRecord, logs: Mapping[int, str]) -> list[Block]:
    """The whole check, top to bottom. logs: the log of each cell that has one, by index."""
    pairs = list(zip(record.cells, verdicts(record), strict=True))
    asked = asked_of(record)
    counted = _counted(record, asked)
    legend = (
        "first, last: loss. falls: over the same inputs; ?: undecided. loss, |g|, |dw|: largest relative difference "
        "from the baseline (the plain Actor in fp32) of loss, gradient norm and update norm. parts: the first step where one of "
        f"them is further away than {LEAST[record.dtype]:.2g} and {FACTOR:g} times what the plain Actor with its sums reordered "
        f"is. far: first, mean or last loss is {record.threshold:g} or more away."
        + " train_sft: the trainer's own program over rows of text, against itself on one process."
        * any(cell.role == SFT for cell in record.cells)
    )
    impossible = _names_by([(cell.reason, cell) for cell in record.cells if cell.status == IMPOSSIBLE])
    sections = {
        "Parts from the baseline": [_told(cell, verdict.parting) for cell, verdict in pairs if verdict.parting],
        "Failed": [f"{cell.name}: {cell.reason}" for cell in record.cells if cell.status == BROKEN],
        "Unavailable": [f"{names}: {reason}" for reason, names in impossible.items()],
        "Logs": [f"{cell.name}: {logs[cell.index]}" for cell in record.cells if cell.index in logs],
        "Environment": _facts(record),
    }
    links = [logs.get(cell.index, "") for cell in record.cells]
    return [
        Heading(f"training check {record.check_id}", 1),
        Paragraph(counted),
        train_banner(record, asked, counted),
        *train_charts(record),
        Grid(_COLUMNS, [_row(*pair) for pair in pairs], {"configuration", "result", "falls", "parts"}, links),
        Paragraph(legend),
        *(block for title, items in sections.items() if items for block in (Heading(title, 3), Items(items))),
    ]


def _row(cell: TrainCell, verdict: CellVerdict) -> tuple[str, ...]:
    ends = (number(step.loss) for step in (cell.steps[0], cell.steps[-1])) if cell.steps else "--"
    largest = verdict.largest
    apart = ["-" if n not in largest else "nan" if (gap := largest[n]) is None else f"{gap:.1e}" for n in FIGURES]
    parts = f"step {verdict.parting.step}" if verdict.parting else "-"
    return (cell.name, verdict.word, *ends, verdict.falls if cell.steps else "-", *apart, parts)


def _counted(record: TrainCheckRecord, asked: Judged) -> str:
    """How many configurations came out how, over what."""
    words, own = ([verdict.word for cell, verdict in asked if cell.role == role] for role in (ASKED, SFT))
    least = 2 * steps_of_round(len(record.dump_ids), record.batch)
    falls = "its change is within the scatter of the steps; use more --steps, or a larger --lr"
    if least > record.steps:
        falls = f"no round over the inputs comes twice; use --steps {least}, or fewer inputs (--max-inputs)"
    unknown = any(verdict.word == AGREES and verdict.falls == UNKNOWN for _, verdict in asked)
    state = "running, or was killed" if record.status == "running" else record.status
    return (
        f"{plural(len(words), 'configuration')}, {plural(record.steps, 'step')}, {record.batch} micro-batches in each, over "
        f"{plural(len(record.dump_ids), 'input')}: {_in_words(words)}."
        + f" Whether the loss falls was not checked: {falls}." * unknown
        + f" train_sft: {_in_words(own)}." * bool(own)
        + f" The check is {state}." * (state != "complete")
    )


def _in_words(words: Sequence[str]) -> str:
    return ", ".join(f"{count} {_PLURAL.get(word, word) if count > 1 else word}" for word, count in Counter(words).items())


def _told(cell: TrainCell, parting: Parting) -> str:
    hint = f". Looks like: {parting.looks_like}" if parting.looks_like else ""
    off = "NaN or infinite, here or in the baseline"
    if parting.by is not None:
        off = f"off by {parting.by:.2g} (limit {parting.limit:.2g})"
    return f"{cell.name}: at step {parting.step} {IN_WORDS[parting.figure]} is {off}{hint}"


def _names_by(said: Sequence[tuple[str, TrainCell]]) -> dict[str, str]:
    """The cells' names by what is said of them, in order."""
    return {text: "; ".join(cell.name for cell in cells) for text, cells in grouped(said).items()}


def _facts(record: TrainCheckRecord) -> list[str]:
    told = record.training
    clip = f"clipped to {told['max_norm']:g}" if told.get("max_norm") else "not clipped"
    lines = [
        f"AdamW: lr {told['lr']:g}, betas {told['betas'][0]:g} and {told['betas'][1]:g}, eps {told['eps']:g}, weight decay "
        f"{told['weight_decay']:g}; gradients {clip}; {record.dtype}, weights stepped in fp32"
        + "; gradient checkpointing, but for the baseline"
        * bool(told.get("gradient_checkpointing"))
    ]
    stepped = _names_by([(cell.optimizer, cell) for cell in record.cells if cell.optimizer])
    lines += [f"stepped by {who}: {names}" for who, names in stepped.items()]
    names = {str(cell.index): cell.name for cell in record.cells}
    for index, after in (record.options.get("continued") or {}).items():
        lines.append(f"{names.get(index, index)} continued from a checkpoint after step {', '.join(map(str, after))}")
    if record.selection:
        lines.append(f'selected: --where "{record.selection}"')
    if record.names:
        lines.append("from the environment: " + ", ".join(f"{name}={value}" for name, value in record.names.items()))
    seconds = [f"{c.name} {c.seconds:.0f} s" for c in record.cells if c.seconds is not None and c.status == TRAINED]
    lines += [f"took: {', '.join(seconds)}"] if seconds else []
    return [*lines, f"command: {record.command}"] if record.command else lines


def train_banner(record: TrainCheckRecord, asked: Judged, counted: str) -> Banner:
    """The verdict over all configurations that were requested."""
    ran = [(cell, verdict) for cell, verdict in asked if cell.status == TRAINED]
    if not ran:
        return Banner("NOTHING TRAINED", counted, NO_TONE)
    bad = [verdict.word for cell, verdict in asked if verdict.word not in (AGREES, IMPOSSIBLE, OPEN)]
    agree = sum(verdict.word == AGREES for _, verdict in ran)
    figures = (("configurations that agree", f"{agree} / {len(asked)}"), ("steps", str(record.steps)))
    unjudged = tuple(f"{cell.name}: {cell.status}" for cell, _ in asked if cell.status in (IMPOSSIBLE, OPEN))
    if short := "; ".join(cell.name for cell, verdict in ran if verdict.falls == UNKNOWN):
        unjudged += (f"whether the loss falls: too few steps, or too noisy ({short})",)
    word, tone = "AGREES", GOOD_TONE
    if bad:
        word, tone = PARTS if PARTS in bad else bad[0].upper(), BAD_TONE
    elif short or any(cell.status == OPEN for cell, _ in asked):
        word, tone = "NOT CHECKED" if short else "NOT COMPLETE", PART_TONE
    return Banner(word, counted, tone, figures, unjudged)


def train_charts(record: TrainCheckRecord) -> list[Chart]:
    """Losses, and each figure's distance from the baseline. The trainer's own program has other rows, and is not in them."""
    drawn = [cell for cell in record.cells if cell.status == TRAINED and cell.role in (BASELINE, NOISE, ASKED)]
    losses = {cell.name: [(step.step, number_of(step.loss)) for step in cell.steps] for cell in drawn}
    made = [values_chart("Losses", "loss", losses)]
    if (baseline := trained(record, BASELINE)) is not None:
        for figure, what in IN_WORDS.items():
            others = [cell for cell in drawn if cell.role != BASELINE]
            gaps = {cell.name: list(enumerate(gaps_of(cell, baseline, figure), 1)) for cell in others}
            title = f"{what.removeprefix('the ').capitalize()}, from the baseline"
            made.append(apart_chart(title, what, gaps, list(enumerate(limits_of(record, figure), 1))))
    return [chart for chart in made if chart is not None]
