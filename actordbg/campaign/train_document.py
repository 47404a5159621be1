"""A training check as a document: verdict, charts, the table, where trainings part, what failed and why, what it ran on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actordbg.base.units import plural
from actordbg.campaign.train_verdicts import (
    AGREES,
    FACTOR,
    FIGURES,
    IN_WORDS,
    LEAST,
    PARTS,
    UNKNOWN,
    CellVerdict,
    gaps_of,
    limits_of,
    number_of,
    steps_of_round,
    trained,
    verdicts,
)
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
from actordbg.measure.log_document import apart_chart, values_chart
from actordbg.records.matrix_record import (
    ASKED,
    BASELINE,
    BROKEN,
    IMPOSSIBLE,
    NOISE,
    OPEN,
    SFT,
    TRAINED,
    TrainCell,
    TrainCheckRecord,
)

_COLUMNS = ("configuration", "result", "first", "last", "falls", "loss", "|g|", "|dw|", "parts")

_STATES = {"running": "running, or was killed"}
_PLURAL = {"agrees": "agree", "PARTS": "PART"}


def train_document(record: TrainCheckRecord, logs: Mapping[int, str], findings: tuple[str, ...] = ()) -> list[Block]:
    """The whole check, top to bottom. logs: the log of each cell that has one, by index."""
    judged = verdicts(record)
    counted = _counted(record, judged)
    pairs = list(zip(record.cells, judged, strict=True))
    parted = [_parting(cell, one) for cell, one in pairs if one.parting]
    broken = [f"{cell.name}: {cell.reason}" for cell in record.cells if cell.status == BROKEN]
    impossible: dict[str, list[str]] = {}
    for cell in record.cells:
        if cell.status == IMPOSSIBLE:
            impossible.setdefault(cell.reason, []).append(cell.name)
    return [
        Heading(f"training check {record.check_id}", 1),
        Paragraph(counted),
        train_banner(record, judged, counted),
        *train_charts(record),
        Grid(
            _COLUMNS,
            tuple(_row(cell, one) for cell, one in pairs),
            frozenset(("configuration", "result", "falls", "parts")),
            tuple(logs.get(cell.index, "") for cell in record.cells),
        ),
        Paragraph(_legend(record)),
        *_section("Parts from the baseline", parted),
        *_section("Failed", broken),
        *_section("Unavailable", [f"{'; '.join(names)}: {reason}" for reason, names in impossible.items()]),
        *_section("Logs", [f"{cell.name}: {logs[cell.index]}" for cell in record.cells if cell.index in logs]),
        *_section("What it ran on", _facts(record, findings)),
    ]


def _row(cell: TrainCell, one: CellVerdict) -> tuple[str, ...]:
    losses = [step.loss for step in cell.steps]
    ends = (number(losses[0]), number(losses[-1])) if losses else ("-", "-")
    apart = tuple(_apart(one.largest[name]) if name in one.largest else "-" for name in FIGURES)
    parts = f"step {one.parting.step}" if one.parting else "-"
    return (cell.name, one.word, *ends, one.falls if cell.steps else "-", *apart, parts)


def _counted(record: TrainCheckRecord, judged: list[CellVerdict]) -> str:
    words = [one.word for cell, one in zip(record.cells, judged, strict=True) if cell.role == ASKED]
    own = [one.word for cell, one in zip(record.cells, judged, strict=True) if cell.role == SFT]
    also = f" train_sft: {_in_words(own)}." if own else ""
    state = "" if record.status == "complete" else f" The check is {_STATES.get(record.status, record.status)}."
    asked, steps, inputs = (
        plural(len(words), "configuration"),
        plural(record.steps, "step"),
        plural(len(record.dump_ids), "input"),
    )
    unknown = any(one.word == AGREES and one.falls == UNKNOWN for one in judged)
    least = 2 * steps_of_round(len(record.dump_ids), record.batch)
    scatter = "its change is within the scatter of the steps; use more --steps, or a larger --lr"
    again = f"no round over the inputs comes twice; use --steps {least}, or fewer inputs (--max-inputs)"
    falls = f" Whether the loss falls was not checked: {again if least > record.steps else scatter}." if unknown else ""
    return f"{asked}, {steps}, {record.batch} micro-batches in each, over {inputs}: {_in_words(words)}.{falls}{also}{state}"


def _in_words(words: list[str]) -> str:
    counts = {word: words.count(word) for word in dict.fromkeys(words)}
    return ", ".join(f"{count} {_PLURAL.get(word, word) if count > 1 else word}" for word, count in counts.items())


def _legend(record: TrainCheckRecord) -> str:
    own = any(cell.role == SFT for cell in record.cells)
    return (
        "first, last: loss. falls: over the same inputs; ?: nobody can tell. loss, |g|, |dw|: largest relative difference "
        "from the baseline (the plain Actor in fp32) of loss, gradient norm and update norm. parts: the first step where one of "
        "them is further away "
        f"than {LEAST[record.dtype]:.2g} and {FACTOR:g} times what the plain Actor with its sums reordered is. "
        f"far: first, mean or last loss is {record.threshold:g} or more away."
        + (" train_sft: the trainer's own program over rows of text, against itself on one process." if own else "")
    )


def _parting(cell: TrainCell, one: CellVerdict) -> str:
    found = one.parting
    assert found is not None
    hint = f". Looks like: {found.looks_like}" if found.looks_like else ""
    off = "NaN or infinite, here or in the baseline" if found.by is None else f"off by {found.by:.2g} (limit {found.limit:.2g})"
    return f"{cell.name}: at step {found.step} {IN_WORDS[found.figure]} is {off}{hint}"


def _apart(largest: float | None) -> str:
    return "nan" if largest is None else f"{largest:.1e}"


def _facts(record: TrainCheckRecord, findings: tuple[str, ...]) -> list[str]:
    told = record.training
    clip = f"clipped to {told['max_norm']:g}" if told.get("max_norm") else "not clipped"
    lines = [
        f"AdamW: lr {told['lr']:g}, betas {told['betas'][0]:g} and {told['betas'][1]:g}, eps {told['eps']:g}, weight decay "
        f"{told['weight_decay']:g}; gradients {clip}; {record.dtype}, weights stepped in fp32"
        + "; gradient checkpointing, but for the baseline"
        * bool(told.get("gradient_checkpointing"))
    ]
    stepped: dict[str, list[str]] = {}
    for cell in record.cells:
        if cell.optimizer:
            stepped.setdefault(cell.optimizer, []).append(cell.name)
    lines += [f"stepped by {who}: {'; '.join(names)}" for who, names in stepped.items()]
    for index, after in (record.options.get("went on") or {}).items():
        names = [cell.name for cell in record.cells if str(cell.index) == index]
        lines.append(f"{names[0] if names else index} went on from a checkpoint after step {', '.join(map(str, after))}")
    lines += list(findings)
    if record.selection:
        lines.append(f'selected: --where "{record.selection}"')
    if record.names:
        lines.append("from the environment: " + ", ".join(f"{name}={value}" for name, value in record.names.items()))
    seconds = [
        f"{cell.name} {cell.seconds:.0f} s" for cell in record.cells if cell.seconds is not None and cell.status == TRAINED
    ]
    if seconds:
        lines.append("took: " + ", ".join(seconds))
    return [*lines, f"command: {record.command}"] if record.command else lines


def _section(title: str, items: list[str]) -> list[Block]:
    return [Heading(title, 3), Items(tuple(items))] if items else []


def train_banner(record: TrainCheckRecord, judged: Sequence[CellVerdict], counted: str) -> Banner:
    """The verdict over all configurations that were asked for."""
    asked = [(cell, one) for cell, one in zip(record.cells, judged, strict=True) if cell.role in (ASKED, SFT)]
    bad = [one.word for cell, one in asked if cell.status not in (IMPOSSIBLE, OPEN) and one.word != AGREES]
    if not any(cell.status == TRAINED for cell, _ in asked):
        return Banner("NOTHING TRAINED", counted, NO_TONE)
    agree = sum(one.word == AGREES for _, one in asked)
    figures = (("configurations that agree", f"{agree} / {len(asked)}"), ("steps", str(record.steps)))
    unjudged = tuple(f"{cell.name}: {one.word}" for cell, one in asked if cell.status in (IMPOSSIBLE, OPEN))
    if short := [cell.name for cell, one in asked if cell.status == TRAINED and one.falls == UNKNOWN]:
        unjudged += (f"whether the loss falls: too few steps, or within its scatter ({'; '.join(short)})",)
    if bad:
        return Banner(PARTS if PARTS in bad else bad[0].upper(), counted, BAD_TONE, figures, unjudged)
    if short or any(cell.status == OPEN for cell, _ in asked):
        return Banner("NOT CHECKED" if short else "NOT COMPLETE", counted, PART_TONE, figures, unjudged)
    return Banner("AGREES", counted, GOOD_TONE, figures, unjudged)


def train_charts(record: TrainCheckRecord) -> list[Chart]:
    """Losses, and each figure's distance from the baseline. The trainer's own program has other rows, and is not in them."""
    drawn = [one for one in record.cells if one.status == TRAINED and one.role in (BASELINE, NOISE, ASKED)]
    losses = {one.name: [(step.step, number_of(step.loss)) for step in one.steps] for one in drawn}
    made = [values_chart("Losses", "loss", losses)]
    baseline = trained(record, BASELINE)
    for name in FIGURES if baseline is not None else ():
        others = [one for one in drawn if one.role != BASELINE]
        gaps = {one.name: list(enumerate(gaps_of(one.steps, baseline.steps if baseline else (), name), 1)) for one in others}
        limits = list(enumerate(limits_of(record, name), 1))
        title = f"{IN_WORDS[name].removeprefix('the ').capitalize()}, from the baseline"
        made.append(apart_chart(title, IN_WORDS[name], gaps, limits))
    return [chart for chart in made if chart is not None]
