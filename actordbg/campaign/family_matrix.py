"""A matrix for each family of models: a small random model, small made-up dumps, every law, the truth.

    for name in ("llama3", "qwen3_5"):
        run_family(store, subject_of(name), models / name, base, USUAL_AXES, around)

Every cell is an ordinary replay in the store, and can be looked at like any other. All of them run in the same worker process as
far as that goes (`WarmGroups.reopen`), because a start takes longer than a family.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from actordbg.actor.family_models import FAMILIES, config_of_model
from actordbg.base.errors import UsageError
from actordbg.campaign.axes import Axes, combinations
from actordbg.campaign.cell_outcomes import context_of
from actordbg.campaign.cells import make_cells
from actordbg.campaign.matrix_document import IN_PART, UNJUDGED, WRONG, verdict_word
from actordbg.campaign.matrix_files import select
from actordbg.campaign.run_matrix import Surroundings, new_matrix, run_matrix
from actordbg.config.replay_config import ReplayConfig
from actordbg.judge.law_summary import laws_of
from actordbg.records.comparison_record import StoredRecord
from actordbg.records.matrix_record import FAILED, UNAVAILABLE, MatrixCell, MatrixRecord
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store

USUAL_AXES: Axes = {"dtype": ["fp32", "bf16"], "attn": ["sdpa", "eager"], "packing": [False, True]}
"""What varies where no option says otherwise, in the order of the settings."""
SHAPES: tuple[dict[str, Any], ...] = (
    {"batch_size": 3, "seq_len": 24, "action_len": 8, "padding": "both"},
    {"batch_size": 2, "seq_len": 16, "action_len": 1, "padding": "left"},
)
"""The dumps of each family: rows padded on both sides, and rows with an answer of one token."""


@dataclass(frozen=True)
class Subject:
    """What is to be run: a family's name, or a folder's, and the configuration of its small model. typed: what selects it, and
    no other: folders may have one name.
    """

    name: str
    known_as: str
    config: dict[str, Any]
    typed: str


@dataclass(frozen=True)
class FamilyFinding:
    """What is not right in some cells of a family, in the same words. word: as in the table. cells: by name."""

    word: str
    words: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class FamilyResult(StoredRecord):
    """A family that ran, or the problem with building its model. config: of the small model, as transformers wrote it.

    asked: a hash of what was asked of it (`actordbg.campaign.family_folder`).
    """

    what: ClassVar[str] = "family"

    name: str
    known_as: str
    typed: str
    model_type: str
    model_class: str = ""
    problem: str = ""
    cells: tuple[MatrixCell, ...] = ()
    findings: tuple[FamilyFinding, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    asked: str = ""

    @property
    def good(self) -> bool:
        """Every cell that could run is right."""
        bad = any(cell.wrong or cell.unjudged or cell.status == FAILED for cell in self.cells)
        return any(cell.good for cell in self.cells) and not bad


def subject_of(name: str) -> Subject:
    """A family by its name, or a model's folder; UsageError for neither."""
    spelled = name.lower().replace("-", "_").replace(".", "_")
    if spelled in FAMILIES:
        return Subject(spelled, FAMILIES[spelled].known_as, FAMILIES[spelled].config, spelled)
    folder = Path(name)
    if not folder.is_dir():
        raise UsageError(f"{name} is neither a family nor a folder", hint=f"the families: {', '.join(FAMILIES)}")
    return Subject(folder.resolve().name, name, config_of_model(folder), name)


def not_built(subject: Subject, problem: str) -> FamilyResult:
    """The result of a family whose small model cannot be made."""
    return FamilyResult(subject.name, subject.known_as, subject.typed, str(subject.config["model_type"]), problem=problem)


def run_family(
    store: Store, subject: Subject, model: Path, base: ReplayConfig, axes: Axes, around: Surroundings, command: str
) -> FamilyResult:
    """Run the matrix of one family, whose small model lies in the folder `model`, on the dumps of the store."""
    base = replace(base, model=str(model))
    chosen = select(store, base, None, [], "time", None, 0)
    cells = make_cells(combinations(base, axes), around.facts, chosen.defaults)
    options = {"order": "time", "oracle": "fp32", "skip_known": False, "slower": None}
    record = new_matrix(cells, axes, chosen.rows, options, command=command)
    record = run_matrix(store, record, chosen.rows, replace(around, defaults=chosen.defaults))
    context = context_of(store, record)
    return replace(
        not_built(subject, ""),
        model_class=str(context.resolved.get("model_class", "")),
        cells=record.cells,
        findings=tuple(findings_of(store, record)),
        versions=context.versions,
        config=json.loads((model / "config.json").read_bytes()),
    )


def findings_of(store: Store, record: MatrixRecord) -> list[FamilyFinding]:
    """List what is not right, each text once with its cells."""
    cells: dict[tuple[str, str], list[str]] = {}
    for cell in record.cells:
        word = verdict_word(cell)
        if words := _said(store, cell, word):
            cells.setdefault((word, words), []).append(cell.name)
    return [FamilyFinding(word, words, tuple(names)) for (word, words), names in cells.items()]


def _said(store: Store, cell: MatrixCell, word: str) -> str:
    """Say why a cell is not right, without what differs from machine to machine; "" where it is right."""
    if word in (UNAVAILABLE, IN_PART, UNJUDGED):
        return cell.reason
    if word == FAILED:
        return cell.error or cell.signature or FAILED
    if word != WRONG:
        return ""
    assert cell.replay_id is not None
    spec = load_spec(store, cell.replay_id)
    laws = laws_of(data_of(store, spec).results, spec.config)
    broken: dict[str, str] = {}
    for answer in laws.violations if laws else ():
        broken.setdefault(answer["law"], f"{answer['law']} {answer['verdict']}: {answer['words']}")
    measures = ", ".join(dict.fromkeys(re.findall(r"(\w+) [\d.e+-]+ is above", cell.reason)))
    further = f"further from the truth than rounding explains: {measures}" if measures else cell.reason
    return "; ".join(broken.values()) or f"no law is broken; {further}"
