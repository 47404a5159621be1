"""Run a matrix per model family: a small random model, small synthetic dumps, every law, the truth.

python -m benchmarks.families [NAME|DIR ...] [--output FILE] [--keep DIR] [--packing on --attn sdpa,eager ...]

Writes Markdown: `make families` makes docs/reference/families.md of it. Without a name: all known families. A folder stands
for the configuration in its config.json, made small; its weights are not read. The options are the settings of `actordbg
matrix`. With --keep an interrupted run goes on where it ended. With --beside DIR, what an environment with other versions kept
in DIR, the page also says where that came out otherwise. Exit code 1: a family is wrong, unchecked or failed; one that could
not be built is said, and is no fault.

Every cell is an ordinary replay in the store and can be inspected like any other. As far as possible all cells run in the same
worker process (`WarmGroups.reopen`), because a start takes longer than a family.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from actordbg.actor.family_models import FAMILIES, NEWER, VOCABULARY, config_of_model
from actordbg.actor.model_code import guard
from actordbg.actor.models import once
from actordbg.base.errors import ActordbgError, UsageError
from actordbg.base.units import grouped, plural
from actordbg.campaign.cell_outcomes import context_of
from actordbg.campaign.cells import Axes, combinations, make_cells
from actordbg.campaign.matrix_document import IN_PART, verdict_word
from actordbg.campaign.run_matrix import MatrixRun, Surroundings, new_matrix, select
from actordbg.config.choices import installed_versions
from actordbg.config.replay_config import ANY_WIDER, AXES, SETTINGS, USUAL_LAWS, ReplayConfig
from actordbg.document.blocks import UNCHECKED, WRONG, Block, Code, Grid, Heading, Items, Paragraph
from actordbg.document.renderings import as_markdown
from actordbg.dumps.create import create_dumps
from actordbg.formats.store_files import atomic_write
from actordbg.records.matrix_record import FAILED, PASSED, UNAVAILABLE, MatrixCell, MatrixRecord
from actordbg.records.replay_record import answers_of, violations
from actordbg.records.stored_record import StoredRecord
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import interruptible, load_spec
from actordbg.store.layout import Store

KNOWN = FAMILIES | NEWER
USUAL_AXES: Axes = {"dtype": ["fp32", "bf16"], "attn": ["sdpa", "eager"], "packing": [False, True]}
"""The default axes, in the order of the settings."""
SHAPES: tuple[dict[str, Any], ...] = (
    {"batch_size": 3, "seq_len": 24, "action_len": 8},
    {"batch_size": 2, "seq_len": 16, "action_len": 1},
)
"""The dumps of each family: rows padded on both sides, and rows with an answer of one token."""


@dataclass(frozen=True)
class FamilyFinding:
    """A problem that some cells of a family share. word: the verdict in the table. words: the problem. cells: their names."""

    word: str
    words: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class FamilyResult(StoredRecord):
    """A family before or after its run, or the problem with building its model.

    name, known_as: of the family or a folder. typed: the argument that selects it uniquely, since folders can share a name.
    config: of the small model; after a run, as transformers wrote it. asked: a hash of the settings that decide the result.
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
        """Return whether some cell is right, and none is wrong, unchecked or failed."""
        bad = any(cell.wrong or cell.unjudged or cell.status == FAILED for cell in self.cells)
        return any(cell.good for cell in self.cells) and not bad


def subject_of(name: str) -> FamilyResult:
    """Resolve a family name or a model folder to a subject that has not run yet; UsageError if it is neither."""
    spelled = name.lower().replace("-", "_").replace(".", "_")
    if spelled in KNOWN:
        family = KNOWN[spelled]
        typed, known_as, config = spelled, family.known_as, family.config
    elif (folder := Path(name)).is_dir():
        typed, known_as, config, spelled = name, name, config_of_model(folder), folder.resolve().name
    else:
        raise UsageError(f"{name} is neither a family nor a folder", hint=f"the families: {', '.join(KNOWN)}")
    return FamilyResult(spelled, known_as, typed, str(config["model_type"]), config=config)


def build_model(folder: Path, config: dict[str, Any]) -> None:
    """Save a random model of a configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), trust_remote_code=False)
    model.save_pretrained(folder)


def run_family(
    store: Store, subject: FamilyResult, model: Path, base: ReplayConfig, axes: Axes, env: Surroundings, command: str
) -> FamilyResult:
    """Run the matrix of a family, whose small model is in the folder `model`, on the dumps of the store."""
    base = replace(base, model=str(model))
    chosen = select(store, base)
    cells = make_cells(combinations(base, axes), env.facts, chosen.defaults)
    options = {"order": "time", "oracle": ANY_WIDER, "skip_known": False, "slower": None}
    record = new_matrix(cells, axes, chosen.rows, options, command=command)
    record = MatrixRun(store, record, chosen.rows, replace(env, defaults=chosen.defaults)).run()
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
    """List the problems of a matrix, each text once with its cells."""
    words = ((cell.name, word, _reason(store, cell, word)) for cell in record.cells for word in [verdict_word(cell)])
    findings = grouped(((word, reason), name) for name, word, reason in words if reason)
    return tuple(FamilyFinding(*finding, tuple(names)) for finding, names in findings.items())


def _reason(store: Store, cell: MatrixCell, word: str) -> str:
    """Say why a cell is not right, without machine-specific values; "" if it is right."""
    if word == FAILED:
        return (cell.error or cell.signature or FAILED).partition(". ")[0]
    if word != WRONG or cell.replay_id is None:
        reason = re.sub(r" \(`actordbg [^)]*\)", "", cell.reason)  # a command that names this store's replay
        return reason if word in (UNAVAILABLE, IN_PART, UNCHECKED) else ""
    spec = load_spec(store, cell.replay_id)
    broken: dict[str, str] = {}
    for result in data_of(store, spec).results:
        for answer in violations(answers_of(result.extra)):
            if answer.verdict == spec.config.accept:
                continue
            broken.setdefault(answer.law, f"{answer.law} {answer.verdict}: {answer.words}")
    measures = ", ".join(dict.fromkeys(re.findall(r"(\w+) [\d.e+-]+ is above", cell.reason)))
    further = f"differs from the truth beyond rounding: {measures}" if measures else cell.reason
    return "; ".join(broken.values()) or f"no law failed; {further}"


@dataclass(frozen=True)
class FamilyFolder:
    """The working folder. base, axes: the settings of every family."""

    folder: Path
    base: ReplayConfig
    axes: Axes

    @property
    def store(self) -> Store:
        """The store of this folder; it may not exist yet."""
        return Store(self.folder / "store")

    def model(self, subject: FamilyResult) -> Path:
        """Return the folder for the small model of a family."""
        return self.folder / "models" / f"{subject.name}-{_hash(subject.config)}"

    def make_inputs(self) -> None:
        """Create the dumps that every family replays; existing dumps stay."""
        there = len(list(self.store.iter_dumps())) if self.store.root.is_dir() else 0
        for seed, shape in list(enumerate(SHAPES))[there:]:
            create_dumps(self.store, 1, vocab_size=VOCABULARY, seed=seed, **shape)

    def build(self, subject: FamilyResult) -> str:
        """Build the small model of a family; return why it could not be built, else ""."""
        guard(str(self.model(subject)))  # a configuration may name a kernel of the hub
        try:
            once(self.model(subject), partial(build_model, config=subject.config))
        except Exception as error:  # noqa: BLE001 - a configuration may fail in any way, and the others are still built
            return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        return ""

    def done(self, subject: FamilyResult) -> FamilyResult | None:
        """Return the result of an earlier run with the same settings; None if the family must run."""
        with contextlib.suppress(ActordbgError):
            result = FamilyResult.from_file(self._file(subject))
            if result.asked == self._asked(subject):
                return replace(result, known_as=subject.known_as, typed=subject.typed)
        return None

    def kept(self, subject: FamilyResult) -> FamilyResult | None:
        """Return the result of a family with any versions and settings; None if it was not built."""
        return FamilyResult.from_file(self._file(subject)) if self._file(subject).is_file() else None

    def keep(self, subject: FamilyResult, result: FamilyResult) -> FamilyResult:
        """Save the result of a family, with the hash of its settings."""
        result = replace(result, asked=self._asked(subject))
        atomic_write(self._file(subject), result.to_json().encode())
        return result

    def _file(self, subject: FamilyResult) -> Path:
        return self.folder / "families" / f"{self.model(subject).name}.json"

    def _asked(self, subject: FamilyResult) -> str:
        """Hash everything that decides a result."""
        base = {name: value for name, value in asdict(self.base).items() if name != "model"}
        return _hash([subject.config, base, self.axes, SHAPES, installed_versions()])


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


_SHOWN_VERSIONS = ("transformers", "torch", "openrlhf", "deepspeed", "actordbg")
_LEGEND = (
    "right: no law failed, and log-probs, entropies, loss and gradients are as near the truth (each row alone, unpadded, "
    "eager attention, fp32) as rounding in the cell's dtype allows. The models are small and random: this tests their code, "
    "not a checkpoint."
)


def families_document(results: Sequence[FamilyResult], beside: Sequence[FamilyResult] = ()) -> list[Block]:
    """Build the whole document, top to bottom. beside: results with other versions, of which it shows what came out otherwise."""
    only_there = {result.name for result in beside} & {result.name for result in results if result.problem}
    results = [result for result in results if result.name not in only_there]
    good = sum(result.good for result in results)
    unbuilt = sum(bool(result.problem) for result in results)
    versions = next((result.versions for result in results if result.versions), {})
    ran_on = ", ".join(f"{name} {versions[name]}" for name in _SHOWN_VERSIONS if name in versions)
    families = "1 family" if len(results) == 1 else f"{len(results)} families"
    if 1 < len(results) < len(FAMILIES) and all(result.name in FAMILIES for result in results):
        families = f"{len(results)} of the {len(FAMILIES)} known families"
    cells = [cell for result in results for cell in result.cells]
    open_to = " that could run" * any(cell.status == UNAVAILABLE for cell in cells)
    packings = list(dict.fromkeys(map(_packing, cells))) or [""]
    not_built = f", {unbuilt} not built" if unbuilt else ""
    columns = ("family", "models", *(packing or "result" for packing in packings))
    rows = _rows(results, packings)
    moved, ran = set(_rows(beside, packings)) - set(rows), len(beside)
    beside = [result for result in beside if moved.intersection(_rows([result], packings))]
    blocks: list[Block] = [
        Heading("Families", 1),
        Paragraph(f"{families}: {good} right in every cell{open_to}, {len(results) - good - unbuilt} not{not_built}. {ran_on}."),
        Grid(columns, rows, columns),
        Paragraph(_LEGEND),
    ]
    if beside:
        release = beside[0].versions["transformers"]
        blocks += [
            Heading(f"With transformers {release}", 2),
            Paragraph(f"{ran} families ran. These came out otherwise, or are not above."),
        ]
        blocks.append(Grid(columns, _rows(beside, packings), columns))
        beside = [replace(result, name=f"{result.name} ({release})") for result in beside]
    findings = [
        (result, finding, [cell for cell in result.cells if cell.name in finding.cells])
        for result in [*results, *beside]
        for finding in result.findings
    ]
    for title, meaning, applies in CAUSES:
        members = [entry for entry in findings if applies(*entry)]
        findings = [entry for entry in findings if entry not in members]
        if members:
            problem_of = (
                (f"{finding.word}, {_where(result, cells)}: {_brief(finding.words)}", result.name)
                for result, finding, cells in members
            )
            lines = [f"{', '.join(names)}: {problem}" for problem, names in grouped(problem_of).items()]
            result, _, cells = members[0]
            settings = {name: value for name in AXES if (value := cells[0].settings.get(name)) is not None}
            options = [f"{AXES[name].flag} {AXES[name].typed(value)}" for name, value in settings.items()]
            command = " ".join(["python -m benchmarks.families", shlex.quote(result.typed), *options])
            explained = [Paragraph(meaning)] if meaning else []
            blocks += [Heading(title, 2), *explained, Items(lines), Paragraph("See it:"), Code(command)]
    problems = [f"{result.name}: {result.problem}" for result in results if result.problem]
    return blocks + ([Heading("Not built", 2), Items(problems)] if problems else [])


def _rows(results: Sequence[FamilyResult], packings: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the table's rows: a family, its models, and what came out with each packing."""
    return [(result.name, result.known_as, *(_words(result, packing) for packing in packings)) for result in results]


def _brief(words: str) -> str:
    """Return the first law that failed, in words, and the names of the others."""
    first, *others = re.split(r"; (?=\w+ (?:broken|nondeterministic): )", words)
    names = ", ".join(other.split()[0] for other in others)
    return f"{first}; also {names}" if names else first


def _packing(cell: MatrixCell) -> str:
    """Name the column of a cell."""
    value = cell.settings.get("packing")
    return "" if value is None else AXES["packing"].in_words(value)


def _words(result: FamilyResult, packing: str) -> str:
    """Summarize the cells of one column: a single verdict, or each verdict with its cells."""
    if result.problem:
        return "not built"
    column = [cell for cell in result.cells if _packing(cell) == packing]
    by_word = grouped((verdict_word(cell).replace(PASSED, "right"), cell) for cell in column)
    if len(by_word) == 1:
        return next(iter(by_word))
    places = {word: _shared(cells, column) or plural(len(cells), "cell") for word, cells in by_word.items() if word != "right"}
    return "; ".join(f"{word} ({where})" for word, where in places.items())


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


# Known reasons why a family is wrong, explained for a reader who sees the finding for the first time. Pure.


def _rows_meet(result: FamilyResult, finding: FamilyFinding, cells: Sequence[MatrixCell]) -> bool:
    """Return whether rows depend on each other, and only in packed cells."""
    packed = all(cell.config.get("packing") for cell in cells)
    return packed and ("jacobian broken: row" in finding.words or "neighbour broken" in finding.words)


def _has_a_state(result: FamilyResult) -> bool:
    """Return whether the model has a recurrent state or a convolution along the sequence."""
    layers = {str(layer) for value in result.config.values() if isinstance(value, list) for layer in value}
    named = any("mamba" in name or "conv" in name or name == "state_size" for name in result.config)
    return named or bool(layers & {"linear_attention", "conv", "mamba", "hybrid"})


Applies = Callable[[FamilyResult, FamilyFinding, Sequence[MatrixCell]], bool]
CAUSES: tuple[tuple[str, str, Applies], ...] = (
    (
        "The choice of a sparse attention takes sdpa's mask for numbers",
        "sdpa's mask is boolean, and the code of these models adds it to scores and fills it with a negative number, so "
        "nothing is masked: with padding or packed rows each token sees later ones (transformers 5.24 asks for its dtype). Use "
        "eager attention.",
        lambda result, finding, cells: (
            finding.word == WRONG
            and all(cell.config.get("attn") == "sdpa" for cell in cells)
            and bool(result.config.get("index_topk"))
        ),
    ),
    (
        "A state leaks into the next packed row",
        "These models have layers with a state along the sequence: a recurrence or a convolution. transformers resets it at "
        "row boundaries only if it is given them (cu_seq_lens_q or seq_idx), or never. OpenRLHF packs all rows into one and "
        "passes position ids only. So every row after the first starts from the state of the row before. Train these without "
        "packing.",
        lambda result, finding, cells: _rows_meet(result, finding, cells) and _has_a_state(result),
    ),
    (
        "Attention does not know where a packed row ends",
        "With sdpa and eager attention, transformers infers the boundaries of packed rows from the position ids when it "
        "builds its mask. The code of these models does not pass its position ids to the mask (falcon's does from transformers "
        "5.24). So each packed row attends to all rows before it. Train these without packing.",
        _rows_meet,
    ),
    (
        "sdpa ignores the soft cap of the attention logits",
        "The configuration caps attention logits (attn_logit_softcapping). sdpa silently ignores the cap; eager attention "
        "applies it. transformers refuses sdpa here since 5.21. Use eager attention, or a flash attention that supports a soft "
        "cap.",
        lambda result, finding, cells: (
            finding.word == WRONG
            and all(cell.config.get("attn") == "sdpa" for cell in cells)
            and bool(result.config.get("attn_logit_softcapping"))
        ),
    ),
    (
        "Experts are drawn at random in a training pass",
        "In training mode the router samples its experts (transformers' sparsemixer): without jitter, among experts of equal "
        "score, which occur in bf16. So the log-probs of a training pass depend on the seed.",
        lambda result, finding, cells: result.model_type == "phimoe" and finding.words.startswith("rerun nondeterministic"),
    ),
    (
        "The model does not implement this attention",
        "The model's code has no sdpa, so OpenRLHF's Actor cannot be built. Use eager attention.",
        lambda result, finding, cells: "does not support an attention implementation" in finding.words,
    ),
    (
        "Chunks are counted from the start of the pack",
        "Attention stays within chunks of attention_chunk_size tokens. transformers counts them in the packed sequence, so a "
        "row's chunks depend on the rows before it; from 5.24 it counts them in each row (remap_positions_for_packed_sequence). "
        "Train these without packing.",
        lambda result, finding, cells: (
            finding.word == WRONG
            and all(cell.config.get("packing") for cell in cells)
            and bool(result.config.get("attention_chunk_size"))
        ),
    ),
    (
        "Judged in part",
        "A module whose tensors are not one for each token, such as experts that all run on all tokens, is not compared by "
        "itself. Laws, log-probs and gradients are right.",
        lambda result, finding, cells: finding.word == IN_PART and "its tokens cannot be told apart" in finding.words,
    ),
    ("Not explained yet", "", lambda result, finding, cells: True),
)
"""Title, meaning, and whether it explains a finding in these cells of a family; the first match wins."""


def run(subjects: Sequence[FamilyResult], folder: FamilyFolder) -> list[FamilyResult]:
    """Build the models and run the families one by one, in the same worker processes; reuse the results in `folder`."""
    folder.make_inputs()
    results = []
    with WarmGroups(reopen=True) as warm:
        for subject in subjects:
            if (result := folder.done(subject)) is None:
                print(subject.name, file=sys.stderr, flush=True)
                if why := folder.build(subject):
                    result = replace(subject, problem=why, config={})
                else:
                    env = Surroundings(None, warm=warm)
                    done = run_family(folder.store, subject, folder.model(subject), folder.base, folder.axes, env=env, command="")
                    result = folder.keep(subject, done)
            results.append(result)
    return results


def main(words: Sequence[str] | None = None) -> int:
    """Run the families that are named, and write the document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME|DIR", help=f"by default all of {', '.join(KNOWN)}")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in DIR and keep it")
    parser.add_argument(
        "--beside", type=Path, metavar="DIR", help="compare with what an environment with other versions kept in DIR"
    )
    parser.add_argument("--output", default="/dev/stdout", metavar="FILE", help="write the page into FILE")
    for name, setting in SETTINGS.items():
        kind = setting.list_of if name in AXES else setting.parse
        parser.add_argument(setting.flag, dest=name, type=kind, metavar="LIST" if name in AXES else "VALUE")
    given = {name: value for name, value in vars(parser.parse_args(words)).items() if value is not None}
    names, keep, beside, output = (
        given.pop("names"),
        given.pop("keep", None),
        given.pop("beside", None),
        Path(given.pop("output")),
    )
    axes = {name: values for name in AXES if (values := given.pop(name, None) or USUAL_AXES.get(name))}
    base = replace(ReplayConfig(backward=True, keep_tensors=True, keep_gradients=True, laws=USUAL_LAWS), **given)
    subjects = {subject.typed: subject for subject in map(subject_of, names or KNOWN)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(interruptible())
        place = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="actordbg-families-")))
        place.mkdir(parents=True, exist_ok=True)
        results = run(list(subjects.values()), FamilyFolder(place.resolve(), base, axes))
    others = [FamilyFolder(beside, base, axes).kept(subject) for subject in subjects.values()] if beside else []
    output.write_text(as_markdown(families_document(results, [other for other in others if other is not None])))
    return 0 if all(result.good or result.problem for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
