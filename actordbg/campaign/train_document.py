"""Judge the cells of a training check, and turn it into a document: verdict, charts, table, divergences, failures and causes,
environment. Pure.

The test suite's criteria: the training completes; its loss falls; its losses (first, mean, last) are within the threshold, 5 %,
of the baseline's.

The stricter criterion compares three figures at every step: loss, gradient norm, and update norm (how far the weights moved). A
training *diverges* at the first step where a figure differs from the baseline by more than FACTOR times the noise floor, and by
more than LEAST of its dtype. The noise floor is the largest difference up to that step between the baseline and the plain Actor
in the same dtype with its sums reordered.

The figure that diverges first suggests the cause: `looks_like`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from actordbg.base.foreign_text import in_shell
from actordbg.base.units import grouped, listed, plural
from actordbg.config.replay_config import TINY
from actordbg.document.blocks import (
    FAILED,
    RIGHT,
    UNCHECKED,
    WRONG,
    Block,
    Chart,
    Grid,
    Heading,
    Paragraph,
    Verdict,
    number,
    section,
)
from actordbg.measure.align_logs import FALLS, RISES, relative, trend
from actordbg.measure.log_document import apart_chart, values_chart
from actordbg.records.finding import Finding, NotChecked, Rule
from actordbg.records.matrix_record import (
    ASKED,
    BASELINE,
    BROKEN,
    CONTINUED,
    IMPOSSIBLE,
    NOISE,
    OPEN,
    TRAINED,
    TrainCell,
    TrainCheckRecord,
    TrainStep,
)

IN_WORDS = {"loss": "the loss", "grad_norm": "the gradient norm", "update_norm": "the update norm"}
FIGURES = tuple(IN_WORDS)
LEAST = {"fp32": 1e-5, "bf16": 2**-7, "fp16": 2**-10}
"""Relative differences below this are never a divergence."""
FACTOR = 4.0
TRAINS = Rule("trains", "a training ends, and its loss falls as the baseline's does")
AS_BASELINE = Rule("as the baseline", "a training's figures are the baseline's to rounding")
AGREES, DIVERGES, NO_FALL, FAR = "agrees", "DIVERGES", "loss not falling", "loss too far"
YES, NO, UNKNOWN = "yes", "no", "?"


@dataclass(frozen=True)
class Divergence:
    """The first step at which a training differs from the baseline beyond rounding: the figure, its difference and its limit.

    by: the relative difference; None if either value is NaN or infinite.
    """

    step: int
    figure: str
    by: float | None
    limit: float
    looks_like: str = ""


@dataclass(frozen=True)
class CellVerdict:
    """The verdict on a cell. falls, within: the test suite's criteria, in words. largest: the largest finite relative
    difference per figure, None if there is none.

    word: agrees, DIVERGES, loss not falling (everything else agrees), loss too far (beyond the threshold), or the cell's status.
    """

    index: int
    word: str
    falls: str = UNKNOWN
    within: str = UNKNOWN
    largest: dict[str, float | None] = field(default_factory=dict)
    parting: Divergence | None = None

    @property
    def good(self) -> bool:
        return self.word == AGREES and self.falls == YES


Judged = list[tuple[TrainCell, CellVerdict]]


def verdicts(record: TrainCheckRecord) -> list[CellVerdict]:
    """Judge every cell, in order; the verdicts of the baseline and noise cells do not count."""
    baseline = trained(record, BASELINE)
    return [_verdict(record, cell, baseline) for cell in record.cells]


def trained(record: TrainCheckRecord, role: str) -> TrainCell | None:
    """Return the first trained cell of this role; None if there is none."""
    return next((cell for cell in record.cells if cell.role == role and cell.status == TRAINED), None)


def requested_of(record: TrainCheckRecord) -> Judged:
    """Return the requested cells with their verdicts."""
    pairs = zip(record.cells, verdicts(record), strict=True)
    return [(cell, verdict) for cell, verdict in pairs if cell.role == ASKED]


def is_good(record: TrainCheckRecord) -> bool:
    """Return whether a cell was trained and every cell that could be trained agrees, with a loss that is known to fall."""
    ran = [verdict.good for cell, verdict in requested_of(record) if cell.status != IMPOSSIBLE]
    return bool(ran) and all(ran)


def _verdict(record: TrainCheckRecord, cell: TrainCell, baseline: TrainCell | None) -> CellVerdict:
    if cell.status != TRAINED:
        return CellVerdict(cell.index, cell.status)
    ours = _losses(cell)
    falls = falling(ours, steps_of_round(len(record.dump_ids), record.batch))
    if baseline is None:
        return CellVerdict(cell.index, "not checked", falls)
    gaps = {figure: gaps_of(cell, baseline, figure) for figure in FIGURES}
    largest = {figure: max(filter(math.isfinite, series), default=None) for figure, series in gaps.items()}
    # the test suite's third criterion
    losses = zip(*([values[0], fmean(values), values[-1]] for values in (ours, _losses(baseline))), strict=True)
    within = YES if all(relative(a, b) < record.threshold for a, b in losses) else NO
    parting, word = None, cell.role
    if cell.role == ASKED:
        parting = _divergence(gaps, record, cell, baseline)
        word = DIVERGES if parting else FAR if within == NO else NO_FALL if falls == NO else AGREES
    return CellVerdict(cell.index, word, falls=falls, within=within, largest=largest, parting=parting)


def gaps_of(cell: TrainCell, baseline: TrainCell, figure: str) -> list[float]:
    """Return the relative difference of a figure at each step."""
    pairs = zip(cell.steps, baseline.steps, strict=False)
    return [relative(number_of(getattr(a, figure)), number_of(getattr(b, figure))) for a, b in pairs]


def limits_of(record: TrainCheckRecord, figure: str) -> list[float]:
    """Return the limit at each step: how far a figure may differ from the baseline."""
    baseline, noise = trained(record, BASELINE), trained(record, NOISE)
    gaps = gaps_of(noise, baseline, figure) if noise and baseline else []
    finite = [gap if math.isfinite(gap) else 0.0 for gap in gaps]
    return [max(LEAST[record.dtype], FACTOR * max(finite[: step + 1], default=0.0)) for step in range(record.steps)]


def steps_of_round(inputs: int, batch: int) -> int:
    """Return the number of steps after which the same micro-batches repeat."""
    return inputs // math.gcd(inputs, batch)


def falling(losses: Sequence[float], period: int) -> str:
    """Decide whether the loss falls: yes, no or "?".

    Compares the first with the last whole round over the same inputs. If no round repeats, decides by the trend.
    """
    if not 0 < 2 * period <= len(losses):
        return {FALLS: YES, RISES: NO}.get(trend(losses).word, UNKNOWN)
    end = len(losses) - len(losses) % period
    first, last = math.fsum(losses[:period]), math.fsum(losses[end - period : end])
    return YES if last < first else NO


def _divergence(
    gaps: Mapping[str, Sequence[float]], record: TrainCheckRecord, cell: TrainCell, baseline: TrainCell
) -> Divergence | None:
    limits = {figure: limits_of(record, figure) for figure in FIGURES}
    for index, (ours, theirs) in enumerate(zip(cell.steps, baseline.steps, strict=False)):
        if over := [figure for figure in FIGURES if not gaps[figure][index] <= limits[figure][index]]:
            figure = max(over, key=lambda figure: gaps[figure][index])
            by, limit = gaps[figure][index], limits[figure][index]
            if math.isnan(by):
                return Divergence(ours.step, figure, None, limit)
            return Divergence(ours.step, figure, by, limit, looks_like(index, set(over), ours, theirs))
    return None


def looks_like(index: int, over: set[str], ours: TrainStep, theirs: TrainStep) -> str:
    """Guess the cause from the figures that diverge first. Never part of the verdict."""
    gradient = number_of(ours.grad_norm) / (number_of(theirs.grad_norm) or math.nan)
    update = number_of(ours.update_norm) / (number_of(theirs.update_norm) or math.nan)
    if "loss" in over and index == 0:
        return "forward differs: `actordbg matrix` on the same inputs locates it"
    if "grad_norm" in over and index == 0:
        return f"gradients {gradient:.3g} times as large: not reduced over all ranks, or misweighted"
    if "grad_norm" in over and "loss" not in over and index == 1 and gradient > 1:
        return "gradients left over from the previous step: missing zero_grad"
    if over != {"update_norm"}:
        return "weights already differ after the last step"
    if index > 1:
        cause = "the optimizer's state was reset, lost or not synchronized; or clipping, or the schedule"
        return f"same gradients, different update: {cause}"
    if index:  # the first update does not depend on the betas
        return "same gradients, different second update: betas, clipping or the schedule; or the optimizer's state was lost"
    if 0.9 < update < 1.1:
        return "same gradients, update of nearly the same size: weight decay, clipping, epsilon, or a different optimizer"
    return f"same gradients, update {update:.3g} times as large: learning rate or step applied twice, or a different optimizer"


def number_of(value: float | None) -> float:
    """Return the value; NaN if it is None, which stands for a value that was not finite."""
    return math.nan if value is None else value


def _losses(cell: TrainCell) -> list[float]:
    return [number_of(step.loss) for step in cell.steps]


_COLUMNS = ("configuration", "result", "first", "last", "falls", "loss", "|g|", "|dw|", "diverges")
_PLURAL = {"agrees": "agree", "DIVERGES": "DIVERGE"}


def train_document(record: TrainCheckRecord, logs: Mapping[int, str], whose: str = "") -> list[Block]:
    """Build the document of a check, top to bottom. logs: path of a cell's log, by index. whose: who else wrote it."""
    pairs = list(zip(record.cells, verdicts(record), strict=True))
    requested = requested_of(record)
    legend = (
        "first, last: loss. falls: over the same inputs; ?: undecided. loss, |g|, |dw|: largest relative difference "
        "from the baseline (the plain Actor in fp32) of loss, gradient norm and update norm. diverges: the first step where any "
        f"of them exceeds {LEAST[record.dtype]:.2g} and {FACTOR:g} times the difference of the plain Actor with sums reordered. "
        f"loss too far: first, mean or last loss differs by {record.threshold:g} or more."
    )
    impossible = _names_by([(cell.reason, cell) for cell in record.cells if cell.status == IMPOSSIBLE])
    sections = {
        "Diverges from the baseline": [_describe(cell, verdict.parting) for cell, verdict in pairs if verdict.parting],
        "Failed": [f"{cell.name}: {cell.reason}" for cell in record.cells if cell.status == BROKEN],
        "Unavailable": [f"{names}: {reason}" for reason, names in impossible.items()],
        "Logs": [f"{cell.name}: {logs[cell.index]}" for cell in record.cells if cell.index in logs],
        "Environment": _facts(record),
    }
    return [
        Heading(f"training check {record.check_id}", 1),
        replace(train_verdict(record, requested), whose=whose),
        *train_charts(record),
        Grid(_COLUMNS, [_row(*pair) for pair in pairs], {"configuration", "result", "falls", "diverges"}),
        Paragraph(legend),
        *(block for title, items in sections.items() for block in section(title, items)),
    ]


def _row(cell: TrainCell, verdict: CellVerdict) -> tuple[str, ...]:
    ends = ["-"] * 3
    if cell.steps:
        ends = [number(cell.steps[0].loss), number(cell.steps[-1].loss), verdict.falls]
    apart = ["-"] * len(FIGURES)
    if verdict.largest:
        apart = ["nan" if gap is None else f"{gap:.1e}" for gap in verdict.largest.values()]
    diverges = f"step {verdict.parting.step}" if verdict.parting else "-"
    return (cell.name, verdict.word, *ends, *apart, diverges)


def _counted(record: TrainCheckRecord, requested: Judged) -> str:
    """Count the configurations per verdict, with the steps and inputs of the check."""
    words = [verdict.word for _, verdict in requested]
    least = 2 * steps_of_round(len(record.dump_ids), record.batch)
    falls = "its change is within step-to-step noise; use more --steps, or a larger --lr"
    if least > record.steps:
        falls = f"no round over the inputs repeats; use --steps {least}, or fewer inputs (--max-inputs)"
    unknown = any(verdict.word == AGREES and verdict.falls == UNKNOWN for _, verdict in requested)
    state = "running, or was killed" if record.status == "running" else record.status
    counts = []
    for word, count in Counter(words).items():
        named = _PLURAL.get(word, word) if count > 1 else word
        counts.append(f"{count} {named}")
    said = (
        f"{plural(len(words), 'configuration')}, {plural(record.steps, 'step')}, {plural(record.batch, 'micro-batch')} in each, "
        f"over {plural(len(record.dump_ids), 'input')}: {listed(counts)}."
    )
    if unknown:
        said += f" Whether the loss falls was not checked: {falls}."
    return said if state == "complete" else f"{said} The check is {state}."


def _describe(cell: TrainCell, parting: Divergence) -> str:
    hint = f". Looks like: {parting.looks_like}" if parting.looks_like else ""
    off = "NaN or infinite, here or in the baseline"
    if parting.by is not None:
        off = f"{parting.by:.2g} from the baseline (limit {parting.limit:.2g})"
    return f"{cell.name}: at step {parting.step} {IN_WORDS[parting.figure]} is {off}{hint}"


def _names_by(pairs: Sequence[tuple[str, TrainCell]]) -> dict[str, str]:
    """Group the names of cells by their text, in order."""
    return {text: "; ".join(cell.name for cell in cells) for text, cells in grouped(pairs).items()}


def _facts(record: TrainCheckRecord) -> list[str]:
    training = record.training
    clip = f"clipped to {training['max_norm']:g}" if training.get("max_norm") else "not clipped"
    lines = [
        f"AdamW: lr {training['lr']:g}, betas {training['betas'][0]:g} and {training['betas'][1]:g}, eps {training['eps']:g}, "
        f"weight decay {training['weight_decay']:g}; gradients {clip}; {record.dtype}, weights stepped in fp32"
    ]
    if training.get("gradient_checkpointing"):
        lines[0] += "; gradient checkpointing, except in the baseline"
    stepped = _names_by([(cell.optimizer, cell) for cell in record.cells if cell.optimizer])
    lines += [f"stepped by {who}: {names}" for who, names in stepped.items()]
    names = {str(cell.index): cell.name for cell in record.cells}
    for index, after in record.options.get(CONTINUED, {}).items():
        lines.append(f"{names.get(index, index)} continued from a checkpoint after step {listed(after)}")
    if record.selection:
        lines.append(f'selected: --where "{record.selection}"')
    if record.names:
        lines.append("from the environment: " + ", ".join(f"{name}={value}" for name, value in record.names.items()))
    if seconds := [f"{c.name} {c.seconds:.0f} s" for c in record.cells if c.seconds is not None and c.status == TRAINED]:
        lines.append(f"took: {listed(seconds)}")
    if record.command:
        lines.append(f"command: {record.command}")
    return lines


def train_verdict(record: TrainCheckRecord, requested: Judged) -> Verdict:
    """Return the verdict over all requested configurations."""
    ran = [(cell, verdict) for cell, verdict in requested if cell.status == TRAINED]
    bad = [verdict for cell, verdict in requested if verdict.word not in (AGREES, IMPOSSIBLE, OPEN)]
    agree = sum(verdict.word == AGREES for _, verdict in ran)
    figures = [("configurations that agree", f"{agree} of {len(requested)}"), ("steps", str(record.steps))]
    left = [NotChecked(TRAINS, f"{cell.name}: {cell.status}") for cell, _ in requested if cell.status in (IMPOSSIBLE, OPEN)]
    if short := "; ".join(cell.name for cell, verdict in ran if verdict.falls == UNKNOWN):
        left.append(NotChecked(TRAINS, f"whether the loss falls: too few steps, or too noisy ({short})"))
    wrong, unfinished = any(verdict.word != BROKEN for verdict in bad), any(cell.status == OPEN for cell, _ in requested)
    word = WRONG if wrong else FAILED if bad else UNCHECKED if short or unfinished or not ran else RIGHT
    model = str(record.cells[0].config.get("model", TINY))
    next_command = f"actordbg train-check --resume {record.check_id}" if unfinished else ""
    if record.selection is not None and wrong:
        next_command = f"actordbg matrix --where {in_shell(record.selection)} --model {in_shell(model)}"
    shared = "whether the model is its checkpoint's, and what configurations share, as the baseline's forward"
    left.append(NotChecked(AS_BASELINE, shared, "`actordbg check`"))
    found = [_finding(cell, verdict) for cell, verdict in requested if verdict in bad]
    return Verdict(
        word, _counted(record, requested), figures=figures, not_checked=left, next=next_command, toy=model == TINY, findings=found
    )


def _finding(cell: TrainCell, verdict: CellVerdict) -> Finding:
    """Return what is wrong with a configuration's training."""
    parting, at = verdict.parting, {"cell": cell.index}
    if cell.status != TRAINED:
        return Finding(TRAINS, cell.reason or cell.status, at)
    if parting is None:
        return Finding(TRAINS, verdict.word, at)
    said = f"{parting.figure} differs from the baseline's from step {parting.step} on"
    return Finding(AS_BASELINE, said, at | {"step": parting.step}, size=parting.by, limit=parting.limit)


def train_charts(record: TrainCheckRecord) -> list[Chart]:
    """Chart the losses, and each figure's distance from the baseline."""
    drawn = [cell for cell in record.cells if cell.status == TRAINED]
    losses = {cell.name: [(step.step, number_of(step.loss)) for step in cell.steps] for cell in drawn}
    made = [values_chart("Losses", "loss", losses)]
    if (baseline := trained(record, BASELINE)) is not None:
        for figure, what in IN_WORDS.items():
            others = [cell for cell in drawn if cell.role != BASELINE]
            gaps = {cell.name: list(enumerate(gaps_of(cell, baseline, figure), 1)) for cell in others}
            title = f"{what.removeprefix('the ').capitalize()}, from the baseline"
            made.append(apart_chart(title, what, gaps, list(enumerate(limits_of(record, figure), 1))))
    return [chart for chart in made if chart is not None]
