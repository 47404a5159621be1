"""A matrix as a document: the table, what failed and why, what was loaded, and what it ran on. Pure.

A cell is told in a word that needs no colour: passed, in part (what was judged is right, and something was not judged), WRONG (it
finished, and its numbers are not the truth's), NOT JUDGED (it finished, and could not be compared with the truth), not compared
(it finished, and an interruption came first), failed, unavailable, not run; and REGRESSED if it is worse than the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from actordbg.base.units import human_bytes, plural
from actordbg.campaign.matrix_picture import heat_map, matrix_banner
from actordbg.config.as_ran import toy
from actordbg.config.replay_config import AXES
from actordbg.document.blocks import Block, Grid, Heading, Items, Paragraph, number, seconds, setting
from actordbg.judge.agreement import SHOWN
from actordbg.judge.comparison_document import excluded
from actordbg.judge.summary import Explain, nothing_known
from actordbg.records.comparison_record import GOOD, NOT_COMPARED
from actordbg.records.matrix_record import FAILED, NOT_RUN, PASSED, UNAVAILABLE, MatrixCell, MatrixRecord

_STATES = {"running": "running, or was killed"}
AXES_AS_COLUMNS = 4
"""With more axes than this the settings share one column."""
WRONG, UNJUDGED, REGRESSED, IN_PART, WAITS = "WRONG", "NOT JUDGED", "REGRESSED", "in part", "not compared"


@dataclass(frozen=True)
class MatrixContext:
    """What the cells ran on. `resolved`: the configuration of the first Actor. `folded`: inputs whose token ids were folded into
    the vocabulary. `truth_load_s`: seconds to load the truth's model, in a process of its own.
    """

    resolved: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    seq_lens: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    tokens: int = 0
    folded: int = 0
    truth_load_s: float | None = None
    gone: tuple[str, ...] = ()
    """Replays of cells that are no longer in the store."""
    logs: dict[int, str] = field(default_factory=dict)
    """The log of each cell that has one, by its index, relative to the current folder."""


def matrix_document(
    record: MatrixRecord, context: MatrixContext, explain: Explain = nothing_known, *, explained: bool = True
) -> list[Block]:
    """Build the whole matrix, top to bottom. explained: with what its columns mean, not only with where that is said."""
    word = word_in(record)
    cells, counted = record.cells, _counted(record)
    state = "" if record.status == "complete" else f" The matrix is {_STATES.get(record.status, record.status)}."
    of_toy = next((said for cell in cells if (said := toy(cell.config.get("model"), ", of a "))), "")
    heat = heat_map(record, word)
    unasked = ((f"not checked: {reason}", cell) for cell in cells if cell.laws for reason in cell.unasked)
    excludes = [cell for cell in cells if cell.excludes and record.options.get("power")]
    sections = {
        "Wrong": (_wrong(cell) for cell in cells if verdict_word(cell) == WRONG),
        "Not judged": _by_text((cell.reason, cell) for cell in cells if verdict_word(cell) == UNJUDGED),
        "In part": _by_text((cell.reason, cell) for cell in cells if verdict_word(cell) in (PASSED, IN_PART)),
        "Regressed": (f"{_label(cell)}: {'; '.join(cell.regressed)}" for cell in cells if cell.regressed),
        "Laws": _by_text((cell.laws, cell) for cell in cells) + _by_text(unasked),
        "What would have been wrong": (
            f"{_label(cell)}: {excluded(cell.excludes, str(cell.config.get('dtype')))}" for cell in excludes
        ),
        "Failed": (line for cell in cells if cell.status == FAILED for line in _failure(cell, explain)),
        "Unavailable and not run": _by_text((cell.reason, cell) for cell in cells if cell.status in (UNAVAILABLE, NOT_RUN)),
        "Loaded": _loaded(record, context),
        "Logs": (f"{_label(cell)}: {context.logs[cell.index]}" for cell in cells if cell.index in context.logs),
        "What it ran on": _facts(record, context),
    }
    blocks: list[Block] = [
        Heading(f"matrix {record.matrix_id}{of_toy}", 1),
        Paragraph(f"{counted}.{state}"),
        matrix_banner(record, counted),
        *([heat] if heat else []),
        _table(record, context),
        Paragraph(f"{'; '.join(_DEFINITIONS)}." if explained else _EXPLAINED),
        *([] if record.options.get("oracle") else [Paragraph(_UNCOMPARED)]),
    ]
    for title, lines in sections.items():
        if items := tuple(lines):
            blocks += [Heading(title, 3), Items(items)]
    return blocks


def word_in(record: MatrixRecord) -> Callable[[MatrixCell], str]:
    """What became of a cell of this matrix: one that still waits for its comparison has not passed."""
    return lambda cell: WAITS if record.waits(cell) and not cell.violations else verdict_word(cell)


def verdict_word(cell: MatrixCell) -> str:
    """What became of the cell, in one or two words."""
    if cell.wrong:
        return WRONG
    if cell.unjudged:
        return UNJUDGED
    if cell.status == NOT_RUN and not cell.reason and cell.replay_id:
        return "unfinished"
    if cell.status == PASSED and cell.verdict is not None and cell.reason:
        return IN_PART
    return cell.status


def _counted(record: MatrixRecord) -> str:
    words = list(map(word_in(record), record.cells))
    names = (PASSED, IN_PART, WRONG, UNJUDGED, WAITS, FAILED, UNAVAILABLE, "unfinished", NOT_RUN)
    counts = ", ".join(f"{words.count(name)} {name}" for name in names if name in words)
    passed = [cell for cell in record.cells if cell.status == PASSED]
    told = [f"{plural(len(record.cells), 'cell')} on {plural(len(record.dump_ids), 'dump')}: {counts}"]
    if lawless := sum(not cell.laws for cell in passed):
        told.append(f"no law was asked of {lawless} of {len(passed)} that finished")
    if in_part := sum(bool(cell.unasked) for cell in passed):
        told.append(f"some laws could not be asked of {in_part}")
    if regressed := sum(bool(cell.regressed) for cell in record.cells):
        told.append(f"{regressed} {REGRESSED} against {record.baseline}")
    return "; ".join(told)


def _table(record: MatrixRecord, context: MatrixContext) -> Grid:
    cells, word = record.cells, word_in(record)
    varied = [name for name in AXES if len(record.axes.get(name, ())) > 1]
    columns: dict[str, list[str]] = {"#": [str(cell.index) for cell in cells]}
    if 0 < len(varied) <= AXES_AS_COLUMNS:
        columns |= {name.replace("_", " "): [_setting(name, cell.settings.get(name)) for cell in cells] for name in varied}
    else:
        columns["combination"] = [cell.name or "all as given" for cell in cells]
    columns["result"] = [_result(cell, word(cell)) for cell in cells]
    left = frozenset(columns) - {"#"}
    if any(cell.verdict is not None for cell in cells):
        columns["off by"] = ["?" if cell.verdict == NOT_COMPARED else number(cell.max_abs, 2) for cell in cells]
    if any(cell.excludes for cell in cells):
        columns["sees"] = [number(cell.excludes.get("token"), 2) for cell in cells]
    columns["fwd s"] = [seconds(cell.forward_s) for cell in cells]
    if any(cell.backward_s is not None for cell in cells):
        columns["bwd s"] = [seconds(cell.backward_s) for cell in cells]
    columns["peak mem"] = [human_bytes(cell.peak_memory_bytes) for cell in cells]
    shared = ["-" if cell.shared_with is None else f"as {cell.shared_with}" for cell in cells]
    columns["load s"] = [seconds(cell.load_s) if cell.loads else text for cell, text in zip(cells, shared, strict=True)]
    links = tuple(context.logs.get(cell.index, "") for cell in cells)
    return Grid(tuple(columns), tuple(zip(*columns.values(), strict=True)), left, links)


def _result(cell: MatrixCell, word: str) -> str:
    bad = sum(count for status, count in cell.counts.items() if status != PASSED)
    told = f"{word} {bad}/{sum(cell.counts.values())}" if cell.status == FAILED and bad else word
    return f"{told} {REGRESSED}" if cell.regressed else told


def _setting(name: str, value: Any) -> str:
    """A value below the name of its axis: "flash", "on", "3"."""
    return "-" if value is None else AXES[name].in_words(value, brief=True) if isinstance(value, str) else AXES[name].typed(value)


_EXPLAINED = "How to read the figures: `actordbg matrix --explain`."
_UNCOMPARED = "passed: it finished with finite numbers; they were not compared with the truth (--no-truth)."


_DEFINITIONS = (
    "off by: largest difference of a log-prob from the truth, in nats (each row alone, unpadded, eager attention)",
    "sees: the smallest error of any one log-prob that would have been wrong, in nats",
    'fwd, bwd: median of steady inputs ("-": none was: first and compiling ones do not count)',
    "load: seconds to build the Actor, or whose was used",
)


def explanations() -> list[Block]:
    """Explain the columns of a matrix."""
    return [Heading("How to read the figures", 3), Items(_DEFINITIONS)]


def _label(cell: MatrixCell) -> str:
    """Without a #: GitHub would make it a link to an issue."""
    return f"cell {cell.index}, {cell.name}".removesuffix(", ")


def _cells(cells: Sequence[MatrixCell]) -> str:
    """ "cells 0, 1, 2"."""
    return f"cell{'s' * (len(cells) > 1)} {', '.join(str(cell.index) for cell in cells)}"


def _wrong(cell: MatrixCell) -> str:
    """Broken laws first: they need no tolerance."""
    others = len(cell.violations) - SHOWN
    why = [*cell.violations[:SHOWN], *([f"and {others} more broken laws"] if others > 0 else [])]
    why += [cell.reason or cell.verdict] if cell.verdict and cell.verdict not in GOOD else []
    return f"{_label(cell)}: {'; '.join(why)}. Comparison {cell.comparison_id or '-'}, replay {cell.replay_id}"


def _failure(cell: MatrixCell, explain: Explain) -> list[str]:
    known = explain(cell.signature) if cell.signature else None
    counts = ", ".join(f"{count} {status}" for status, count in sorted(cell.counts.items()))
    parts = [f"{_label(cell)}: {cell.signature or 'failed'} ({counts or 'the Actor could not be built'})"]
    if cell.error and cell.error != cell.signature:
        parts.append(f"first cause: {cell.error}")
    if known:
        parts += [f"why: {known[0]}", f"way out: {'; or '.join(known[1])}"]
    return [*parts, f"log: {cell.log}"]


def _by_text(said: Iterable[tuple[str, MatrixCell]]) -> list[str]:
    """Write each text once, with its cells; no text is left out."""
    by_text: dict[str, list[MatrixCell]] = {}
    for text, cell in said:
        by_text.setdefault(text, []).append(cell)
    return [f"{_cells(cells)}: {text}" for text, cells in by_text.items() if text]


def _loaded(record: MatrixRecord, context: MatrixContext) -> Iterator[str]:
    built = [cell for cell in record.cells if cell.loads]
    if not built:
        return
    total = sum(cell.load_s or 0.0 for cell in built)
    ran = sum(cell.replay_id is not None for cell in record.cells)
    yield f"{plural(record.loads, 'Actor')} built in {seconds(total)} s for {plural(ran, 'cell')}"
    for cell in built:
        # one that was resumed may have shared first and built later
        shared = [one for one in record.cells if one.shared_with == cell.index != one.index and not one.loads]
        more = f", {cell.loads} builds" if cell.loads > 1 else ""
        yield f"{_label(cell)}: {seconds(cell.load_s)} s{more}" + (f"; shared by {_cells(shared)}" if shared else "")
    if context.truth_load_s is not None:
        yield f"the truth ({record.truth_id}) has a model of its own: {seconds(context.truth_load_s)} s"


def _facts(record: MatrixRecord, context: MatrixContext) -> Iterator[str]:
    if context.resolved:
        named = {name: context.resolved.get(name) for name in ("model", "model_class", "parameters", "num_layers")}
        told = (f"{name} {setting(value)}" for name, value in named.items() if value is not None)
        yield "model: " + ", ".join(told).removeprefix("model ")
        yield f"device: {context.resolved.get('device_name')}, {context.resolved.get('threads')} threads"
    if context.seq_lens:
        sizes = f"batch size {_range(context.batch_sizes)}, seq_len {_range(context.seq_lens)}, {plural(context.tokens, 'token')}"
        folded = f" (ids of {context.folded} folded into the vocabulary)" if context.folded else ""
        yield f"inputs: {plural(len(context.seq_lens), 'dump')}, {sizes}{folded}"
    gone = dict.fromkeys(context.gone, " (gone)")
    replays = [f"{cell.index}: {cell.replay_id}{gone.get(cell.replay_id, '')}" for cell in record.cells if cell.replay_id]
    facts = {
        "selected": record.selection and f'--where "{record.selection}"',
        "the same for all": ", ".join(f"{name} {setting(values[0])}" for name, values in record.axes.items() if len(values) == 1),
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(context.versions.items())),
        "command": record.command,
        "baseline": record.baseline,
        "replays (for `report` and `compare`)": ", ".join(replays),
    }
    yield from (f"{name}: {text}" for name, text in facts.items() if text)


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
