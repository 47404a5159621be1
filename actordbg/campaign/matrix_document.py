"""Turn a matrix into a document: the table, failures and causes, what was loaded, and the environment. Pure.

Each cell has a verdict that is readable without color: passed; partial (what was checked is right, something was not checked);
WRONG (finished, and its numbers differ from the truth); NOT CHECKED (finished, and could not be compared with the truth); not
compared (finished, then interrupted before the comparison); failed; unavailable; not run; and REGRESSED if it is worse than the
baseline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product, zip_longest
from typing import Any

from actordbg.actor.signatures import explain
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import grouped, human_bytes, listed, plural
from actordbg.config.as_ran import complete, is_chosen, repeat_options
from actordbg.config.replay_config import AXES, SETTINGS, TINY, TOY_MODEL
from actordbg.document.blocks import (
    BAD_TONE,
    FAILED as FAILED_WORD,
    GOOD_TONE,
    NO_TONE,
    PART_TONE,
    RIGHT,
    UNCHECKED,
    WRONG,
    Block,
    Cell,
    Cells,
    Grid,
    Heading,
    Paragraph,
    Verdict,
    number,
    seconds,
    section,
    setting,
)
from actordbg.judge.agreement import SHOWN
from actordbg.judge.comparison_document import excluded
from actordbg.judge.replay_findings import NO_TOY, RUNS
from actordbg.laws.rules import RULES
from actordbg.records.comparison_record import GOOD, MISMATCH, NOT_COMPARED, TRUTH
from actordbg.records.finding import Finding, NotChecked, Rule
from actordbg.records.matrix_record import FAILED, NOT_RUN, PASSED, UNAVAILABLE, MatrixCell, MatrixRecord

AXES_AS_COLUMNS = 4
"""With more axes than this, the settings share one column."""
REGRESSED, IN_PART, WAITS = "REGRESSED", "partial", "not compared"
BASELINE = Rule("baseline", "a cell is as good as in the baseline")


@dataclass(frozen=True)
class MatrixContext:
    """The environment of the cells. `resolved`: the configuration of the first Actor. `folded`: how many inputs had token ids
    beyond the vocabulary, which were wrapped (modulo).
    """

    resolved: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    seq_lens: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    tokens: int = 0
    folded: int = 0
    gone: tuple[str, ...] = ()
    """Replays of cells that are no longer in the store."""
    logs: dict[int, str] = field(default_factory=dict)
    """The log of each cell that has one, by its index, relative to the current folder."""
    whose: str = ""
    """Who else wrote the matrix, its baseline or a cell's replay; "" if all is this user's."""


def matrix_document(record: MatrixRecord, context: MatrixContext) -> list[Block]:
    """Build the document of a matrix, top to bottom."""
    cells = record.cells
    state = "running, or was killed" if record.status == "running" else record.status
    by_word = grouped((verdict_word(cell), (cell.reason, cell)) for cell in cells)
    unasked = [(f"not checked: {reason}", cell) for cell in cells if cell.laws for reason in cell.unasked]
    sections = {
        "Wrong": [_wrong(cell) for _, cell in by_word.get(WRONG, ())],
        "Not checked": _by_text(by_word.get(UNCHECKED, ())),
        "Partial": _by_text([*by_word.get(PASSED, ()), *by_word.get(IN_PART, ())]),
        "Regressed": [f"{_label(cell)}: {'; '.join(cell.regressed)}" for cell in cells if cell.regressed],
        "Laws (invariance checks)": _by_text((cell.laws, cell) for cell in cells) + _by_text(unasked),
        "Detection limits": [
            f"{_label(cell)}: {excluded(cell.excludes, str(cell.config.get('dtype')))}"
            for cell in cells
            if cell.excludes and record.options.get("power")
        ],
        "Failed": [line for cell in cells if cell.status == FAILED for line in _failure(cell)],
        "Skipped: unavailable": _by_text((cell.reason, cell) for cell in cells if cell.status in (UNAVAILABLE, NOT_RUN)),
        "Logs": [f"{_label(cell)}: {context.logs[cell.index]}" for cell in cells if cell.index in context.logs],
        "Environment": _facts(record, context),
    }
    return [
        Heading(f"matrix {record.matrix_id}", 1),
        *([Paragraph(f"The matrix is {state}.")] if state != "complete" else []),
        matrix_verdict(record, context.whose),
        *_heat_map(record),
        _table(record),
        Paragraph(_LEGEND),
        *([] if record.options.get("oracle") else [Paragraph(_UNCOMPARED)]),
        *(block for title, lines in sections.items() for block in section(title, lines)),
    ]


def word_of(record: MatrixRecord, cell: MatrixCell) -> str:
    """Return the verdict of a cell of this matrix; a cell that still waits for its comparison has not passed."""
    return WAITS if record.waits(cell) and not cell.violations else verdict_word(cell)


def verdict_word(cell: MatrixCell) -> str:
    """Return the verdict of a cell, in one or two words."""
    if cell.wrong:
        return WRONG
    if cell.unjudged:
        return UNCHECKED
    if cell.status == NOT_RUN and not cell.reason and cell.replay_id:
        return "unfinished"
    if cell.status == PASSED and cell.verdict is not None and cell.reason:
        return IN_PART
    return cell.status


def _counted(record: MatrixRecord) -> str:
    words = Counter(word_of(record, cell) for cell in record.cells)
    names = (PASSED, IN_PART, WRONG, UNCHECKED, WAITS, FAILED, UNAVAILABLE, "unfinished", NOT_RUN)
    counts = ", ".join(f"{words[name]} {name}" for name in names if name in words)
    passed = [cell for cell in record.cells if cell.status == PASSED]
    parts = [f"{plural(len(record.cells), 'cell')} on {plural(len(record.dump_ids), 'dump')}: {counts}"]
    if lawless := sum(not cell.laws for cell in passed):
        parts.append(f"no laws checked in {lawless} of {len(passed)} that finished")
    if in_part := sum(bool(cell.unasked) for cell in passed):
        parts.append(f"some laws could not be checked in {in_part}")
    if regressed := sum(bool(cell.regressed) for cell in record.cells):
        parts.append(f"{regressed} {REGRESSED} against {record.baseline}")
    return "; ".join(parts)


def _varied(record: MatrixRecord) -> list[str]:
    return [name for name in AXES if len(record.axes.get(name, ())) > 1]


def _table(record: MatrixRecord) -> Grid:
    """Build the table: a column for each heading that any cell has a value for; "#" and figures are right-aligned."""
    cells = record.cells
    varied = _varied(record)
    columns: dict[str, Callable[[MatrixCell], str]] = {"combination": lambda cell: cell.name or "all as given"}
    if 0 < len(varied) <= AXES_AS_COLUMNS:
        columns = {name.replace("_", " "): partial(_setting, name) for name in varied}
    columns["result"] = partial(_result, record)
    if any(_broken(cell) for cell in cells):
        columns["broke"] = _broken
    left = set(columns)
    columns = {"#": lambda cell: str(cell.index)} | columns
    if any(cell.verdict is not None for cell in cells):
        columns["max diff"] = lambda cell: "?" if cell.verdict == NOT_COMPARED else number(cell.max_abs, 2)
    if any(cell.excludes for cell in cells):
        columns["detects"] = lambda cell: number(cell.excludes.get("token"), 2)
    columns["fwd s"] = lambda cell: seconds(cell.forward_s)
    if any(cell.backward_s is not None for cell in cells):
        columns["bwd s"] = lambda cell: seconds(cell.backward_s)
    columns["peak mem"] = lambda cell: human_bytes(cell.peak_memory_bytes)
    columns["load s"] = _load
    rows = [[text_of(cell) for text_of in columns.values()] for cell in cells]
    return Grid(tuple(columns), rows, left)


def _load(cell: MatrixCell) -> str:
    """Return the seconds to build a cell's Actor, or the cell whose Actor it took."""
    if cell.loads:
        return seconds(cell.load_s)
    return "-" if cell.shared_with is None else f"as {cell.shared_with}"


def _broken(cell: MatrixCell) -> str:
    """Return the names of the rules that a cell breaks."""
    return ", ".join(dict.fromkeys(finding.rule.name for finding in findings_of(cell)))


def _result(record: MatrixRecord, cell: MatrixCell) -> str:
    parts, inputs = [word_of(record, cell)], sum(cell.counts.values())
    if cell.status == FAILED and (bad := inputs - cell.counts.get(PASSED, 0)):
        parts.append(f"{bad}/{inputs}")
    if cell.regressed:
        parts.append(REGRESSED)
    return " ".join(parts)


def _setting(name: str, cell: MatrixCell) -> str:
    """Return a cell's value of an axis, as shown in its column: "flash", "on", "3"."""
    axis, value = AXES[name], cell.settings.get(name)
    if value is None:
        return "-"
    return axis.in_words(value, brief=True) if isinstance(value, str) else axis.typed(value)


_UNCOMPARED = "passed: finished with finite numbers, not compared with the truth (--no-truth)."


_LEGEND = (
    "max diff: largest log-prob difference from the truth, nats; detects: smallest single log-prob error that would be WRONG, "
    "nats; fwd, bwd: median without first and compiling inputs; load: time to build the Actor, or the cell whose Actor it took."
)


def _label(cell: MatrixCell) -> str:
    """Label a cell without a "#", which GitHub would turn into a link to an issue."""
    return f"cell {cell.index}, {cell.name}".removesuffix(", ")


def _wrong(cell: MatrixCell) -> str:
    """Explain a WRONG cell: failed laws first, since they need no tolerance."""
    why = list(cell.violations[:SHOWN])
    if others := cell.violations[SHOWN:]:
        why.append(f"and {len(others)} more failed laws")
    if cell.verdict and cell.verdict not in GOOD:
        why.append(cell.reason or cell.verdict)
    comparison = cell.comparison_id or "-"
    return f"{_label(cell)}: {'; '.join(why)}. Comparison {comparison}, replay {cell.replay_id}"


def _failure(cell: MatrixCell) -> list[str]:
    known = explain(cell.signature) if cell.signature else None
    failure = cell.signature or "failed"
    counts = [f"{count} {status}" for status, count in sorted(cell.counts.items())] or ["the Actor could not be built"]
    parts = [f"{_label(cell)}: {failure} ({listed(counts)})"]
    if cell.error and cell.error != cell.signature:
        parts.append(f"cause: {cell.error}")
    if known:
        parts += [f"why: {known[0]}", f"try: {'; or '.join(known[1])}"]
    return [*parts, f"log: {cell.log}"]


def _by_text(pairs: Iterable[tuple[str, MatrixCell]]) -> list[str]:
    """Write each text once, with its cells."""
    lines = []
    for text, cells in grouped(pairs).items():
        if text:
            noun = "cell" if len(cells) == 1 else "cells"
            lines.append(f"{noun} {', '.join(str(cell.index) for cell in cells)}: {text}")
    return lines


def _facts(record: MatrixRecord, context: MatrixContext) -> list[str]:
    ran, sizes = context.resolved, ""
    named = ("model", "model_class", "parameters", "num_layers")
    model = [f"{name} {setting(ran[name])}" for name in named if ran.get(name) is not None]
    if context.seq_lens:
        sizes = f"{plural(len(context.seq_lens), 'dump')}, batch size {_range(context.batch_sizes)}, "
        sizes += f"seq_len {_range(context.seq_lens)}, {plural(context.tokens, 'token')}"
        if context.folded:
            sizes += f" (ids of {context.folded} wrapped into the vocabulary)"
    gone = dict.fromkeys(context.gone, " (gone)")
    replays = [f"{cell.index}: {cell.replay_id}{gone.get(cell.replay_id, '')}" for cell in record.cells if cell.replay_id]
    facts = {
        "model": listed(model).removeprefix("model "),
        "device": ran and f"{ran.get('device_name')}, {ran.get('threads')} threads",
        "inputs": sizes,
        "selected": record.selection and f'--where "{record.selection}"',
        "common to all": ", ".join(f"{name} {setting(values[0])}" for name, values in record.axes.items() if len(values) == 1),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(context.versions.items())),
        "command": record.command,
        "baseline": record.baseline,
        "replays (for `report` and `compare`)": listed(replays),
    }
    return [f"{name}: {text}" for name, text in facts.items() if text]


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


MOST_COLUMNS = 6
"""Columns of a heat map that a phone can still scroll through."""


def matrix_verdict(record: MatrixRecord, whose: str = "") -> Verdict:
    """Return the verdict over all cells. whose: who else wrote it, or a cell."""
    ran = [cell for cell in record.cells if cell.status in (PASSED, FAILED)]
    judged = [cell for cell in ran if cell.verdict is not None and not cell.unjudged]
    toy = all(str(cell.config.get("model", TINY)) == TINY for cell in record.cells)
    left = [NO_TOY] if toy else []
    if unjudged := len(ran) - len(judged):
        left.append(NotChecked(TRUTH, f"the numbers of {plural(unjudged, 'cell')}, which were not compared with the truth"))
    if others := len(record.cells) - len(ran):
        left.append(NotChecked(RUNS, f"{plural(others, 'cell')} that did not run"))
    good = sorted((cell.forward_s, cell.index) for cell in ran if cell.good and cell.forward_s)
    fastest = record.cells[good[0][1]] if good else None
    wrong, failed = [cell for cell in ran if cell.wrong], [cell for cell in ran if cell.status == FAILED]
    regressed = [cell for cell in record.cells if cell.regressed]
    open_cells = not ran or any(cell.open or record.waits(cell) for cell in record.cells)
    word = WRONG if wrong or regressed else FAILED_WORD if failed else UNCHECKED if open_cells or unjudged else RIGHT
    bad = [*wrong, *failed, *regressed]
    said = _counted(record)
    if bad and bad[0].name:
        said += f"; first {word_of(record, bad[0])}: {bad[0].name}"
    figures = [("right cells", f"{sum(cell.good for cell in judged)} of {len(record.cells)}")]
    if off := [cell.max_abs for cell in wrong if cell.max_abs is not None]:
        figures.insert(0, ("max diff from the truth", f"{number(max(off), 2)} nats"))
    if fastest is not None:
        forward = f"fastest forward ({TOY_MODEL})" if toy else "fastest forward"
        figures.append((f"{forward}: {fastest.name}", f"{seconds(fastest.forward_s)} s"))
    found = [finding for cell in bad for finding in findings_of(cell)]
    return Verdict(
        word, said, figures=figures, not_checked=left, next=_next(record, bad, fastest), toy=toy, findings=found, whose=whose
    )


def findings_of(cell: MatrixCell) -> Iterator[Finding]:
    """Yield what is wrong with a cell: laws, the truth, what made it fail, the baseline."""
    at = {"cell": cell.index}
    for name, said in zip_longest(cell.broken, cell.violations, fillvalue="laws"):
        yield Finding(RULES.get(name) or Rule(name), said, at)
    if cell.verdict == MISMATCH:
        yield Finding(TRUTH, cell.reason, at, size=cell.max_abs)
    if cell.status == FAILED:
        failure = cell.signature or cell.status
        yield Finding(Rule(f"{RUNS.name}: {failure}", RUNS.holds), cell.error or cell.reason, at)
    yield from (Finding(BASELINE, text, at) for text in cell.regressed)


def _next(record: MatrixRecord, bad: Sequence[MatrixCell], fastest: MatrixCell | None) -> str:
    """Return the command to run next: on the first bad cell, on the unfinished ones, or a check of the fastest configuration that
    is right, on other dumps; "" if that is the usual one.
    """
    if bad and bad[0].replay_id:
        word = "explain" if bad[0].wrong else "report"
        return f"actordbg {word} {bad[0].replay_id}"
    if any(cell.open or record.waits(cell) for cell in record.cells):
        return f"actordbg matrix --resume {record.matrix_id}"
    if fastest is None:
        return ""
    if str(fastest.config.get("model", TINY)) == TINY:
        return "actordbg check --model YOUR_MODEL"
    config = complete(fastest.config)
    words = repeat_options(config, "check") if is_chosen(config) else []
    return " ".join(["actordbg check", *map(in_shell, words)]) if words else ""


def _heat_map(record: MatrixRecord) -> list[Block]:
    """Lay out the cells by their settings; [] if no setting varies."""
    down = _varied(record)
    if not down:
        return []
    across: list[str] = []
    while down and (not across or len(_values(record, [down[-1], *across])) <= MOST_COLUMNS):
        across.insert(0, down.pop())
    by_settings = {tuple(str(cell.settings.get(name)) for name in (*down, *across)): _cell(cell, record) for cell in record.cells}
    rows, columns = _values(record, down), _values(record, across)
    cells = tuple(tuple(by_settings.get((*map(str, row), *map(str, column))) for column in columns) for row in rows)
    heads = tuple(_named(down, row) or "all" for row in rows), tuple(_named(across, column) for column in columns)
    says = "Each cell is one replay: its verdict and its distance from the truth. Hover for the reason;"
    return [Cells("The cells", f"{says} click to copy the command.", *heads, cells)]


def _values(record: MatrixRecord, axes: Sequence[str]) -> list[tuple[Any, ...]]:
    return list(product(*(record.axes[name] for name in axes)))


def _named(axes: Sequence[str], values: Sequence[Any]) -> str:
    return ", ".join(SETTINGS[name].in_words(value) or f"{name} {value}" for name, value in zip(axes, values, strict=True))


def _cell(cell: MatrixCell, record: MatrixRecord) -> Cell:
    word = word_of(record, cell)
    figures = [f"max diff {number(cell.max_abs, 2)} nats"] if cell.max_abs is not None else []
    figures += [f"{seconds(cell.forward_s)} s"] if cell.forward_s is not None else []
    why = [*cell.violations[:2], *filter(None, (cell.reason, cell.error)), *cell.regressed]
    summary = f"cell {cell.index}, {cell.name}: {word}"
    if why:
        summary += f". {'; '.join(why)[:400]}"
    tone = GOOD_TONE if word == PASSED and cell.verdict is not None else PART_TONE
    if cell.wrong or cell.status == FAILED or cell.regressed:
        tone = BAD_TONE
    elif cell.status != PASSED or cell.unjudged:
        tone = NO_TONE
    where = ["--where", record.selection] if record.selection else []
    words = ["actordbg", "replay", *where, "--max-inputs", str(len(record.dump_ids)), *repeat_options(complete(cell.config))]
    return Cell(word, listed(figures), tone, summary, " ".join(map(in_shell, words)))
