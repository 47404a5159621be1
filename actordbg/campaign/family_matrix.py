"""A matrix for each family of models: a small random model, small made-up dumps, every law, the truth.

    for name in ("llama3", "qwen3_5"):
        run_family(store, subject_of(name), models / name, base, USUAL_AXES, around)

Every cell is an ordinary replay in the store, and can be looked at like any other. All of them run in the same worker process as
far as that goes (`WarmGroups.reopen`), because a start takes longer than a family.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from actordbg.actor.family_models import FAMILIES, VOCABULARY, config_of_model
from actordbg.base.errors import ActordbgError, Conflict, UsageError
from actordbg.base.units import grouped, plural
from actordbg.campaign.cell_outcomes import context_of
from actordbg.campaign.cells import Axes, combinations, make_cells
from actordbg.campaign.matrix_document import IN_PART, UNJUDGED, WRONG, verdict_word
from actordbg.campaign.run_matrix import Surroundings, new_matrix, run_matrix, select
from actordbg.config.choices import installed_versions
from actordbg.config.replay_config import AXES, ReplayConfig
from actordbg.document.blocks import Block, Code, Grid, Heading, Items, Paragraph
from actordbg.formats.store_files import atomic_write
from actordbg.judge.agreement import laws_of
from actordbg.records.comparison_record import StoredRecord
from actordbg.records.matrix_record import FAILED, PASSED, UNAVAILABLE, MatrixCell, MatrixRecord
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
class FamilyFinding:
    """What is not right in some cells of a family, in the same words. word: as in the table. cells: by name."""

    word: str
    words: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class FamilyResult(StoredRecord):
    """A family that is to be run or ran, or the problem with building its model.

    name, known_as: the family's, or a folder's. typed: what selects it, and no other: folders may have one name. config: of the
    small model; of one that ran as transformers wrote it. asked: a hash of what was asked of it.
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


def subject_of(name: str) -> FamilyResult:
    """A family by its name, or a model's folder, before it runs; UsageError for neither."""
    spelled = name.lower().replace("-", "_").replace(".", "_")
    if spelled in FAMILIES:
        family = FAMILIES[spelled]
        typed, known_as, config = spelled, family.known_as, family.config
    elif (folder := Path(name)).is_dir():
        typed, known_as, config, spelled = name, name, config_of_model(folder), folder.resolve().name
    else:
        raise UsageError(f"{name} is neither a family nor a folder", hint=f"the families: {', '.join(FAMILIES)}")
    return FamilyResult(spelled, known_as, typed, str(config["model_type"]), config=config)


def run_family(
    store: Store, subject: FamilyResult, model: Path, base: ReplayConfig, axes: Axes, around: Surroundings, command: str
) -> FamilyResult:
    """Run the matrix of one family, whose small model lies in the folder `model`, on the dumps of the store."""
    base = replace(base, model=str(model))
    chosen = select(store, base)
    cells = make_cells(combinations(base, axes), around.facts, chosen.defaults)
    options = {"order": "time", "oracle": "fp32", "skip_known": False, "slower": None}
    record = new_matrix(cells, axes, chosen.rows, options, command=command)
    record = run_matrix(store, record, chosen.rows, replace(around, defaults=chosen.defaults))
    context = context_of(store, record)
    return replace(
        subject,
        model_class=str(context.resolved.get("model_class", "")),
        cells=record.cells,
        findings=findings_of(store, record),
        versions=context.versions,
        config=json.loads((model / "config.json").read_bytes()),
    )


def findings_of(store: Store, record: MatrixRecord) -> tuple[FamilyFinding, ...]:
    """List what is not right, each text once with its cells."""
    words = ((cell.name, word, _said(store, cell, word)) for cell in record.cells for word in [verdict_word(cell)])
    findings = grouped(((word, said), name) for name, word, said in words if said)
    return tuple(FamilyFinding(*finding, tuple(names)) for finding, names in findings.items())


def _said(store: Store, cell: MatrixCell, word: str) -> str:
    """Say why a cell is not right, without what differs from machine to machine; "" where it is right."""
    if word == FAILED:
        return cell.error or cell.signature or FAILED
    if word != WRONG or cell.replay_id is None:
        return cell.reason if word in (UNAVAILABLE, IN_PART, UNJUDGED) else ""
    spec = load_spec(store, cell.replay_id)
    laws = laws_of(data_of(store, spec).results, spec.config)
    broken: dict[str, str] = {}
    for answer in laws.violations if laws else ():
        broken.setdefault(answer["law"], f"{answer['law']} {answer['verdict']}: {answer['words']}")
    measures = ", ".join(dict.fromkeys(re.findall(r"(\w+) [\d.e+-]+ is above", cell.reason)))
    further = f"differs from the truth beyond rounding: {measures}" if measures else cell.reason
    return "; ".join(broken.values()) or f"no law failed; {further}"


@dataclass(frozen=True)
class FamilyFolder:
    """A folder to work in. base, axes: what is asked of every family."""

    folder: Path
    base: ReplayConfig
    axes: Axes

    @property
    def store(self) -> Store:
        """Its store; it may not be there yet."""
        return Store(self.folder / "store")

    def model(self, subject: FamilyResult) -> Path:
        """Where the small model of a family belongs."""
        return self.folder / "models" / f"{subject.name}-{_hash(subject.config)}"

    def make_inputs(self) -> None:
        """The dumps that every family replays; those that are there stay."""
        from actordbg.dumps.create import create_dumps  # and numpy

        there = len(list(self.store.iter_dumps())) if self.store.root.is_dir() else 0
        for seed, shape in list(enumerate(SHAPES))[there:]:
            create_dumps(self.store, 1, vocab_size=VOCABULARY, seed=seed, **shape)

    def done(self, subject: FamilyResult) -> FamilyResult | None:
        """The result of an earlier run that asked the same; None if it must run."""
        with contextlib.suppress(ActordbgError):
            result = FamilyResult.from_file(self._file(subject))
            if result.asked == self._asked(subject):
                return replace(result, known_as=subject.known_as, typed=subject.typed)
        return None

    def keep(self, subject: FamilyResult, result: FamilyResult) -> FamilyResult:
        """Write down what became of a family, and what was asked of it."""
        result = replace(result, asked=self._asked(subject))
        atomic_write(self._file(subject), result.to_json().encode())
        return result

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Inside the block no other `families` works here; Conflict if one does."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise Conflict(
                f"another `actordbg families` works in {self.folder}", hint="wait for it, or name a new folder"
            ) from None
        finally:
            os.close(descriptor)

    def _file(self, subject: FamilyResult) -> Path:
        return self.folder / "families" / f"{self.model(subject).name}.json"

    def _asked(self, subject: FamilyResult) -> str:
        """A hash of all that decides a result."""
        base = {name: value for name, value in asdict(self.base).items() if name != "model"}
        return _hash([subject.config, base, self.axes, SHAPES, installed_versions()])


def open_folder(folder: Path) -> Path:
    """The folder of an earlier run, or a new or empty one; UsageError for one with anything else in it."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", hint="name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    if {path.name for path in folder.iterdir()} - {"store", "models", "families"}:
        raise UsageError(
            f"{folder} is not empty, and not of `actordbg families`",
            hint="name a new folder: it writes only to an empty folder",
        )
    return folder.resolve()


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


_SAID = ("transformers", "torch", "openrlhf", "deepspeed", "actordbg")
_LEGEND = (
    "right: no law failed, and log-probs, entropies, loss and gradients are as near the truth (each row alone, unpadded, "
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
    findings = [
        (result, finding, [cell for cell in result.cells if cell.name in finding.cells])
        for result in results
        for finding in result.findings
    ]
    for title, meaning, applies in CAUSES:
        members = [told for told in findings if applies(*told)]
        findings = [told for told in findings if told not in members]
        if members:
            lines = [f"{result.name}: {told.word}, {_where(result, cells)}: {told.words}" for result, told, cells in members]
            result, _, cells = members[0]
            settings = {name: value for name in AXES if (value := cells[0].settings.get(name)) is not None}
            options = [f"{AXES[name].flag} {AXES[name].typed(value)}" for name, value in settings.items()]
            command = " ".join(["actordbg families", shlex.quote(result.typed), *options])
            explained = [Paragraph(meaning)] if meaning else []
            blocks += [Heading(title, 2), *explained, Items(lines), Paragraph("See it:"), Code(command)]
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
    by_word = grouped((verdict_word(cell).replace(PASSED, "right"), cell) for cell in column)
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


def _where(result: FamilyResult, cells: Sequence[MatrixCell]) -> str:
    """Say in which cells: "packed", or "packed, bf16"; "every cell"."""
    if len(cells) == len(result.cells):
        return "every cell"
    return _shared(cells, result.cells) or ", ".join(f"[{cell.name}]" for cell in cells)


# Why a family is wrong, where that is known: what a reader needs to know who sees the finding for the first time. Pure.


def _rows_meet(result: FamilyResult, finding: FamilyFinding, cells: Sequence[MatrixCell]) -> bool:
    """Rows see each other, and only where they are packed."""
    packed = all(cell.config.get("packing") for cell in cells)
    return packed and ("jacobian broken: row" in finding.words or "neighbour broken" in finding.words)


def _has_a_state(result: FamilyResult) -> bool:
    """The model has a recurrent state or a convolution along the sequence."""
    layers = {str(layer) for value in result.config.values() if isinstance(value, list) for layer in value}
    named = any("mamba" in name or "conv" in name or name == "state_size" for name in result.config)
    return named or bool(layers & {"linear_attention", "conv", "mamba", "hybrid"})


Applies = Callable[[FamilyResult, FamilyFinding, Sequence[MatrixCell]], bool]
CAUSES: tuple[tuple[str, str, Applies], ...] = (
    (
        "A state runs on into the next packed row",
        "These models have layers with a state along the sequence: a recurrence or a convolution. transformers sets it back at "
        "the border of a row only where it is told of the borders (cu_seq_lens_q or seq_idx), or not at all. OpenRLHF packs all "
        "rows into one and passes position ids only. Every row after the first begins with what the row before left. Train these "
        "without packing.",
        lambda result, finding, cells: _rows_meet(result, finding, cells) and _has_a_state(result),
    ),
    (
        "Attention does not know where a packed row ends",
        "With sdpa and eager attention, transformers finds the borders of packed rows in the position ids, and builds its mask "
        "from them. The code of these models does not hand its position ids to the mask. So each packed row attends to all rows "
        "before it. Train these without packing.",
        _rows_meet,
    ),
    (
        "sdpa leaves the soft cap of the attention's logits out",
        "The configuration caps attention logits (attn_logit_softcapping). sdpa has no such cap and drops it without a word; "
        "eager attention has it. How much it matters grows with the logits. Use eager attention, or flash attention where it "
        "takes a soft cap.",
        lambda result, finding, cells: (
            all(cell.config.get("attn") == "sdpa" for cell in cells) and bool(result.config.get("attn_logit_softcapping"))
        ),
    ),
    (
        "Experts are drawn at random in a training pass",
        "The router samples its experts in training mode (transformers' sparsemixer): without jitter among those of equal "
        "score, and in bf16 there are some. So the log-probs of a training pass depend on the seed.",
        lambda result, finding, cells: result.model_type == "phimoe" and finding.words.startswith("rerun nondeterministic"),
    ),
    (
        "The model has no such attention",
        "The model's code has no sdpa. OpenRLHF's Actor is then not built. Use eager attention.",
        lambda result, finding, cells: "does not support an attention implementation" in finding.words,
    ),
    ("Not explained yet", "", lambda result, finding, cells: True),
)
"""Title, meaning, and whether it explains a finding in these cells of a family; the first one that applies is said."""
