"""Families as a document: a table with a line for each, then what is not right, why, and the command that shows it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actordbg.actor.family_models import FAMILIES
from actordbg.base.units import plural
from actordbg.campaign.family_matrix import FamilyFinding, FamilyResult
from actordbg.campaign.matrix_document import verdict_word
from actordbg.config.replay_config import AXES
from actordbg.document.blocks import Block, Code, Grid, Heading, Items, Paragraph
from actordbg.records.matrix_record import PASSED, UNAVAILABLE, MatrixCell

_SAID = ("transformers", "torch", "openrlhf", "deepspeed", "actordbg")
_LEGEND = (
    "right: no law is broken, and log-probs, entropies, loss and gradients are as near the truth (each row alone, unpadded, "
    "eager attention, fp32) as rounding in the cell's dtype lets them be. The models are small and random: their code is what "
    "is tried, and no checkpoint."
)


def families_document(results: Sequence[FamilyResult]) -> list[Block]:
    """Build the whole document, top to bottom."""
    good = sum(result.good for result in results)
    versions = next((result.versions for result in results if result.versions), {})
    ran_on = ", ".join(f"{name} {versions[name]}" for name in _SAID if name in versions)
    families = "1 family" if len(results) == 1 else f"{len(results)} families"
    if 1 < len(results) < len(FAMILIES) and all(result.name in FAMILIES for result in results):
        families = f"{len(results)} of the {len(FAMILIES)} families that the command knows"
    cells = [cell for result in results for cell in result.cells]
    open_to = " that could run" * any(cell.status == UNAVAILABLE for cell in cells)
    packings = list(dict.fromkeys(map(_packing, cells))) or [""]
    columns = ("family", "models", *(packing or "result" for packing in packings))
    rows = [(result.name, result.known_as, *(_words(result, packing) for packing in packings)) for result in results]
    blocks: list[Block] = [
        Heading("Families", 1),
        Paragraph(f"{families}: {good} right in every cell{open_to}, {len(results) - good} not. {ran_on}."),
        Grid(columns, rows, columns),
        Paragraph(_LEGEND),
    ]
    findings = [(result, finding) for result in results for finding in result.findings]
    for cause in (*CAUSES, UNEXPLAINED):
        members = [pair for pair in findings if cause.applies(*pair)]
        findings = [pair for pair in findings if pair not in members]
        if members:
            lines = [f"{result.name}: {told.word}, {_where(result, told)}: {told.words}" for result, told in members]
            meaning = [Paragraph(cause.meaning)] if cause.meaning else []
            blocks += [Heading(cause.title, 2), *meaning, Items(lines), Paragraph("See it:"), Code(_command(*members[0]))]
    problems = [f"{result.name}: {result.problem}" for result in results if result.problem]
    return blocks + ([Heading("Not built", 2), Items(problems)] if problems else [])


def _packing(cell: MatrixCell) -> str:
    """Name the column of a cell."""
    value = cell.settings.get("packing")
    return "" if value is None else AXES["packing"].in_words(value)


def _words(result: FamilyResult, packing: str) -> str:
    """Say what became of the cells of one column: a word for all, or each word with its cells."""
    if result.problem:
        return "not built"
    column = [cell for cell in result.cells if _packing(cell) == packing]
    by_word: dict[str, list[MatrixCell]] = {}
    for cell in column:
        word = verdict_word(cell)
        by_word.setdefault("right" if word == PASSED else word, []).append(cell)
    if len(by_word) == 1:
        return next(iter(by_word))
    told = {word: _shared(cells, column) or plural(len(cells), "cell") for word, cells in by_word.items() if word != "right"}
    return "; ".join(f"{word} ({where})" for word, where in told.items())


def _shared(cells: Sequence[MatrixCell], others: Sequence[MatrixCell]) -> str:
    """Name the settings that these cells have in common and that vary among the others."""
    shared = []
    for name in AXES:
        values, all_values = ({cell.settings.get(name) for cell in some} for some in (cells, others))
        if len(values) == 1 < len(all_values) and name in cells[0].settings:
            shared.append(AXES[name].in_words(values.pop(), brief=True))
    return ", ".join(shared)


def _cells(result: FamilyResult, finding: FamilyFinding) -> list[MatrixCell]:
    return [cell for cell in result.cells if cell.name in finding.cells]


def _where(result: FamilyResult, finding: FamilyFinding) -> str:
    """Say in which cells: "packed", or "packed, bf16"; "every cell"."""
    cells = _cells(result, finding)
    if len(cells) == len(result.cells):
        return "every cell"
    return _shared(cells, result.cells) or ", ".join(f"[{name}]" for name in finding.cells)


def _command(result: FamilyResult, finding: FamilyFinding) -> str:
    """Write the first cell of a finding alone as a command line."""
    settings = _cells(result, finding)[0].settings
    options = [f"{AXES[name].flag} {AXES[name].typed(settings[name])}" for name in AXES if settings.get(name) is not None]
    return " ".join(["actordbg families", shlex.quote(result.typed), *options])


# Why a family is wrong, where that is known: what a reader needs to know who sees the finding for the first time. Pure.


@dataclass(frozen=True)
class Cause:
    """A known cause. applies: whether it explains this finding of this family."""

    title: str
    meaning: str
    applies: Callable[[FamilyResult, FamilyFinding], bool]


def _rows_meet(result: FamilyResult, finding: FamilyFinding) -> bool:
    """Rows see each other, and only where they are packed."""
    packed = all(cell.config.get("packing") for cell in _cells(result, finding))
    return packed and ("jacobian broken: row" in finding.words or "neighbour broken" in finding.words)


def _has_a_state(result: FamilyResult) -> bool:
    """The model has a recurrent state or a convolution along the sequence."""
    layers = {str(layer) for value in result.config.values() if isinstance(value, list) for layer in value}
    named = any("mamba" in name or "conv" in name or name == "state_size" for name in result.config)
    return named or bool(layers & {"linear_attention", "conv", "mamba", "hybrid"})


def _no_soft_cap(result: FamilyResult, finding: FamilyFinding) -> bool:
    sdpa = all(cell.config.get("attn") == "sdpa" for cell in _cells(result, finding))
    return sdpa and bool(result.config.get("attn_logit_softcapping"))


CAUSES = (
    Cause(
        "A state runs on into the next packed row",
        "These models have layers with a state along the sequence: a recurrence or a convolution. transformers sets it back at "
        "the border of a row only where it is told of the borders (cu_seq_lens_q or seq_idx), or not at all. OpenRLHF packs all "
        "rows into one and passes position ids only. Every row after the first begins with what the row before left. Train these "
        "without packing.",
        lambda result, finding: _rows_meet(result, finding) and _has_a_state(result),
    ),
    Cause(
        "Attention does not know where a packed row ends",
        "With sdpa and eager attention, transformers finds the borders of packed rows in the position ids, and builds its mask "
        "from them. The code of these models does not hand its position ids to the mask. So each packed row attends to all rows "
        "before it. Train these without packing.",
        _rows_meet,
    ),
    Cause(
        "sdpa leaves the soft cap of the attention's logits out",
        "The configuration caps attention logits (attn_logit_softcapping). sdpa has no such cap and drops it without a word; "
        "eager attention has it. How much it matters grows with the logits. Use eager attention, or flash attention where it "
        "takes a soft cap.",
        _no_soft_cap,
    ),
    Cause(
        "Experts are drawn at random in a training pass",
        "The router samples its experts in training mode (transformers' sparsemixer): without jitter among those of equal "
        "score, and in bf16 there are some. So the log-probs of a training pass depend on the seed.",
        lambda result, finding: result.model_type == "phimoe" and finding.words.startswith("rerun nondeterministic"),
    ),
    Cause(
        "The model has no such attention",
        "The model's code has no sdpa. OpenRLHF's Actor is then not built. Use eager attention.",
        lambda result, finding: "does not support an attention implementation" in finding.words,
    ),
)
"""In this order; the first one that applies is said."""
UNEXPLAINED = Cause("Not explained yet", "", lambda result, finding: True)
