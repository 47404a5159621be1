"""`compare`, `locate` and `explain`: how far a replay is from a side, in which module, and why; a missing truth is computed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

from actordbg.api.desk import Desk, counting
from actordbg.api.reports import texts_of
from actordbg.base.errors import ActordbgError, EnvironmentProblem, StoreProblem, Unsupported, UsageError
from actordbg.base.foreign_text import in_shell
from actordbg.base.units import new_replay_id
from actordbg.catalog.lab_models import ComparisonRun
from actordbg.catalog.query import LOCATED, get_replay, open_fresh, select_dumps
from actordbg.config import consent
from actordbg.config.replay_config import ANY_WIDER, TINY
from actordbg.document.blocks import FAILED, RIGHT, UNCHECKED, WRONG, Paragraph, Verdict, section
from actordbg.document.command_result import CommandResult
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.weight_hashes import RECORDED_WEIGHTS
from actordbg.judge import explanation, noise_floor
from actordbg.judge.check import CheckedReplay
from actordbg.judge.comparing import compare, save
from actordbg.judge.comparison_document import comparison_charts, document
from actordbg.judge.explain_outputs import with_explanation
from actordbg.judge.explained_sides import ExplainedEngine, ExplainedRollout, explain_engine, explain_rollout
from actordbg.judge.find_truth import Wanted, ensure_lone_rows, find_truth, require_torch, wanted_rounding, wanted_truth
from actordbg.judge.lint import lint
from actordbg.judge.load_replays import load
from actordbg.judge.sides import GOLDEN, RECORDED_NAMES, TRUTH
from actordbg.judge.thresholds import asked
from actordbg.judge.token_charts import heat_chart
from actordbg.judge.wrong_tokens import wrong_tokens
from actordbg.locate.verdict import lines_of, verdict_of
from actordbg.records.comparison_record import MISMATCH, ComparisonRecord, NoiseRecord
from actordbg.records.journal import SPEC
from actordbg.records.replay_record import PASSED, ReplaySpec, ResultRecord
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.plan import law_order
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import load_spec, run_replay, spec_and_owner
from actordbg.store.layout import Store


def compared(
    desk: Desk, a: str, b: str, where: str | None, limits: Mapping[str, float | None], *,
    noise: str | None, truth: str, flat: bool, power: bool, worst: int, tokenizer: str | Path | None, charts: bool,
) -> CommandResult:  # fmt: skip
    """Compare a replay with another, with "truth" or with "recorded". charts: draw them, which reads the tensors again."""
    texts, thresholds, store = texts_of(tokenizer), asked(limits), desk.store.require()
    if power and (flat or b != "truth"):
        raise UsageError("--power needs a truth comparison", hint="compare REPLAY truth --power, without --flat-limits")
    if a in ("truth", *RECORDED_NAMES):
        raise UsageError(f"A is the side under test; it cannot be {a}", hint=f"swap them: compare REPLAY {a}")
    catalog = open_fresh(store)
    judged = desk.replay_named(catalog, a)
    floor = None if noise is None else noise_of(store, judged, noise)
    # evaluated first: a typo in `where` must not cost the computation of a truth
    only = None if where is None else {row.dump_id for row in select_dumps(open_fresh(store, where), where)}
    rounding = None
    if b == "truth":
        b, rounding = truth_and_rounding(desk, judged, truth, flat=flat, planted=power)
    elif b not in RECORDED_NAMES:
        b = desk.replay_named(catalog, b)
    with desk.client.progress("comparing", None) as advance:
        record = compare(
            store,
            judged,
            b,
            thresholds=thresholds,
            noise=floor,
            rounding=rounding,
            only=only,
            on_progress=lambda done, total: advance(1, total=total),
        )
    if b in RECORDED_NAMES and record.verdict == MISMATCH:
        record = _explained(desk, record)
    path = kept(desk, record)
    desk.settle()
    moves = floor.floor.get("max_abs") if floor else None
    blocks = document(record, worst, comparison_charts(store, record, texts, moves) if charts else [])
    if (pattern := wrong_tokens(store, record)) is not None:
        blocks.insert(2, Paragraph(f"Wrong tokens: {pattern.sentence}."))
    if b in RECORDED_NAMES and (weights := (get_replay(store, judged).resolved or {}).get(RECORDED_WEIGHTS)):
        blocks.insert(2, Paragraph(f"Weights: {weights}."))
    if path is not None:
        desk.client.note(f"saved as {path}", minor=True)
    return CommandResult(record.good, {**vars(record), "good": record.good}, blocks)


def with_truth(desk: Desk, replay_id: str) -> ComparisonRecord:
    """Compare a replay with its truth, computed now if it does not exist, and keep the comparison."""
    truth, rounding = truth_and_rounding(desk, replay_id, ANY_WIDER, flat=False, planted=False)
    record = compare(desk.store, replay_id, truth, rounding=rounding)
    kept(desk, record)
    return record


def kept(desk: Desk, record: ComparisonRecord) -> Path | None:
    """Save the comparison and return its path; None, with a note, if the store cannot be written."""
    try:
        return save(desk.store, record)
    except StoreProblem as problem:
        desk.client.note(f"this comparison is not saved: {problem.message}")
        return None


def noise_of(store: Store, replay_id: str, name: str) -> NoiseRecord:
    """Return the named noise floor; for "last", the newest that was measured under the configuration of this replay."""
    if name != "last":
        return NoiseRecord.named(store.noise, name, "noise")
    if (newest := noise_floor.newest_for(store, replay_id)) is not None:
        return newest
    words, mark = consent.words_of(load_spec(store, replay_id).command)
    command = "actordbg noise with the same options as that replay"
    if "replay" in words:
        words[words.index("replay")] = "noise"
        command = " ".join(in_shell(word) for word in words if word not in ("--keep-tensors", "--keep-gradients")) + mark
    raise UsageError(f"no noise floor was measured under the configuration of {replay_id}", hint=f"run {command}")


def _explained(desk: Desk, record: ComparisonRecord) -> ComparisonRecord:
    """Name the cause of a mismatch with recorded outputs, which loads the model of the replay."""
    replay_id = record.a.replay_id or ""
    spec, owner = spec_and_owner(desk.store, replay_id)
    try:
        desk.store.require_writable()
        desk.client.approve(f"replay {replay_id}, whose model {spec.config.model!r} would be loaded", owner)
    except ActordbgError as problem:
        return replace(record, reasons=(*record.reasons, f"no cause was searched for: {problem.message}"))
    with desk.progress("naming the cause", len(record.compared)) as advance, WarmGroups() as warm:
        return with_explanation(desk.store, record, on_event=counting(advance), warm=warm)


def truth_and_rounding(desk: Desk, replay_id: str, dtype: str, *, flat: bool, planted: bool) -> tuple[str, str | None]:
    """Return the ids of a replay's truth and of the replay that measures its dtype's rounding (None for fixed limits).

    Computes either replay if it does not exist yet. Asks for approval once before it loads the model of another user's replay.
    """
    store = desk.store
    spec, owner = spec_and_owner(store, replay_id)
    model = spec.config.model
    approve_once = cache(partial(desk.client.approve, f"replay {spec.replay_id}, whose model {model!r} would be loaded", owner))

    def computed(request: Wanted, label: str, command: str) -> str:
        if (there := find_truth(store, request)) is not None:
            return there
        require_torch(request)
        store.require_writable()
        if model != TINY:
            approve_once()
        with desk.progress(label, len(request.inputs)) as advance:
            reason = f"{command} replay {replay_id}"
            return ensure_lone_rows(store, request, command=reason, on_event=counting(advance), warm=warm)

    with WarmGroups() as warm:
        truth = computed(wanted_truth(store, spec, dtype), "computing the truth", "the truth of")
        rounding = None if flat else wanted_rounding(store, spec, planted=planted)
        try:
            label = "measuring the dtype's rounding"
            return truth, None if rounding is None else computed(rounding, label, "the rounding of")
        except Unsupported:
            return truth, None  # a kernel that this dtype lacks: the comparison says that its limits are fixed
        except (StoreProblem, EnvironmentProblem) as problem:  # a store may hold the truth where nothing can be computed
            desk.client.note(f"the dtype's rounding was not measured: {problem.message}")
            return truth, None


def of_one_input(spec: ReplaySpec, command: str = "") -> ReplaySpec:
    """Make a new replay of the input that shows the most, in which every place is judged and nothing else is kept."""
    config = replace(
        spec.config, laws=0, vary=None, truth=None, align=None, keep_tensors=False, keep_gradients=False, memory_snapshot=False
    )
    return replace(
        spec,
        replay_id=new_replay_id(),
        created_at=now_timestamp(),
        config=config,
        inputs=(spec.inputs[law_order(spec.inputs)[0]],),
        command=command,
        locate=1,
    )


def run_located(desk: Desk, spec: ReplaySpec, command: str) -> tuple[ReplaySpec, Sequence[ResultRecord]]:
    """Judge the model of `spec` module by module on one of its inputs, in another replay; return that and its results.

    command: what that replay records as its command.
    """
    spec = of_one_input(spec, command)
    desk.runnable(spec.config, spec.inputs)
    with desk.progress("locating", 1) as advance:
        run_replay(desk.store, spec, on_event=counting(advance))
    return spec, data_of(desk.store, spec).results


def locate_answer(spec: ReplaySpec, results: Sequence[ResultRecord]) -> CommandResult:
    """Build the answer: what the model is, every wrong place, what was not checked."""
    local = verdict_of(results)
    failed = next((result for result in results if result.status != PASSED), None)
    word, said = (local.word, local.said) if local else (UNCHECKED, "the input did not run")
    if failed is not None:
        word, said = FAILED, f"the input did not pass: {(failed.error or failed.status).strip().partition(chr(10))[0]}"
    following = {
        RIGHT: f"actordbg check --model {in_shell(spec.config.model)}",
        WRONG: f"actordbg explain {spec.replay_id}",
    }.get(word, f"actordbg report {spec.replay_id}")
    unchecked = local.unchecked if local and word in (RIGHT, WRONG) else ()
    chart = heat_chart(local.located) if local and local.located else None
    about = {"looked_at": local.looked_at, "unchecked": local.unchecked, **asdict(local)} if local else {}
    return CommandResult.of(
        Verdict(word, said, not_checked=unchecked[:1], next=following),
        {"word": word, "replay_id": spec.replay_id, **about},
        *section("", lines_of(local) if local else ()),
        *([chart] if chart else []),
        title=f"locate {spec.replay_id}",
    )


def explained(desk: Desk, spec: ReplaySpec) -> CommandResult:
    """Explain what is wrong with a replay."""
    check = _known(desk, spec)
    verdict = check.verdict(of=len(spec.inputs), explained=True)
    why = explanation.explain(desk.store, check, verdict)
    data = {"replay_id": spec.replay_id, "explanation": why.data}
    return CommandResult.of(explanation.headline(why), data, *why.blocks, title=f"actordbg explain {spec.replay_id}")


def sides_explained(desk: Desk, spec: ReplaySpec, models: Sequence[str], *, engine: bool) -> CommandResult:
    """Explain how the rollout and the run, or a server, differ from the truth on a replay's inputs."""
    desk.store.require_writable()
    explain_them: Callable[..., ExplainedEngine | ExplainedRollout] = explain_engine if engine else explain_rollout
    with desk.progress("naming the cause", len(spec.inputs)) as advance, WarmGroups() as warm:
        sides = explain_them(desk.store, spec.replay_id, models=models, on_event=counting(advance), warm=warm)
    return CommandResult.of(sides.verdict, {"replay_id": spec.replay_id, "wrong": sides.wrong} | asdict(sides), *sides.blocks)


def _known(desk: Desk, spec: ReplaySpec) -> CheckedReplay:
    """Read what the store knows of a replay, and compute what it lacks: a comparison with the truth, the modules of one input."""
    store = desk.store
    (data,) = load(store, [spec.replay_id]).replays
    record, own = (_saved(desk, data.comparisons, kind) for kind in (TRUTH, GOLDEN))
    why = ""
    located: Sequence[ResultRecord] = ()
    passed = any(result.status == PASSED for result in data.results)
    if record is None and passed:
        try:
            record = with_truth(desk, spec.replay_id) if spec.config.keep_tensors else None
        except ActordbgError as problem:
            why = problem.message
        (data,) = load(store, [spec.replay_id]).replays
    if passed and verdict_of(data.results) is None:
        try:
            located = _located(desk, spec)
        except ActordbgError as problem:
            desk.client.note(f"not judged module by module: {problem.message}")
    why = why or ("" if passed else "no input passed")
    return CheckedReplay(data, record, why, own, lint=lint(store.root, [given.path for given in spec.inputs]), located=located)


def _saved(desk: Desk, rows: Sequence[ComparisonRun], kind: str) -> ComparisonRecord | None:
    """Read the newest comparison with a side of this kind; None if there is none, or it is damaged."""
    for row in rows:
        if row.against_kind == kind:
            try:
                return ComparisonRecord.from_file(desk.store.comparisons / f"{row.comparison_id}.json")
            except ActordbgError as problem:
                desk.client.note(problem.message)
    return None


def _located(desk: Desk, spec: ReplaySpec) -> Sequence[ResultRecord]:
    """Return the results of an earlier `locate` of this configuration, or run it now, on the input that shows the most."""
    wanted = of_one_input(spec)
    for path in sorted(desk.store.replays.glob(f"*/{SPEC}"), reverse=True):
        with contextlib.suppress(ActordbgError):  # damaged, or of a newer version: other commands report it
            there = load_spec(desk.store, path.parent.name)
            alike = all(getattr(there, name) == getattr(wanted, name) for name in ("config", "inputs", "versions"))
            if there.locate and alike and (results := data_of(desk.store, there).results):
                return results
    return run_located(desk, spec, f"{LOCATED}{spec.replay_id}")[1]
