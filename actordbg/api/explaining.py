"""`explain` and `locate`: why a replay is wrong, and in which module; what the store lacks for it is computed."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from actordbg.api.checks import kept
from actordbg.api.comparing import with_cause, with_truth
from actordbg.api.desk import Desk, counting
from actordbg.base.errors import ActordbgError
from actordbg.base.foreign_text import in_shell
from actordbg.base.owners import is_own
from actordbg.base.units import first_line
from actordbg.catalog.dump_verdicts import LOCATED
from actordbg.catalog.lab_columns import ComparisonRun
from actordbg.catalog.query import count_dumps
from actordbg.causes.bank import all_causes
from actordbg.compare.sides import GOLDEN, TRUTH
from actordbg.document.blocks import FAILED, RIGHT, UNCHECKED, WRONG, Block, Heading, Verdict, section
from actordbg.document.command_result import CommandResult
from actordbg.formats.dump_record import LOSS
from actordbg.judge import explanation
from actordbg.judge.check import CheckedReplay, located_spec, worst_unlocated
from actordbg.judge.explained_sides import ExplainedEngine, ExplainedRollout, explain_engine, explain_rollout
from actordbg.judge.load_replays import load
from actordbg.judge.token_charts import heat_chart
from actordbg.locate.verdict import lines_of, verdict_of
from actordbg.recorded.lint import NO_LOSSES, lint, with_known
from actordbg.records.comparison_record import MODEL, ComparisonRecord
from actordbg.records.finding import NOT_CHECKED, NotChecked
from actordbg.records.journal import SPEC
from actordbg.records.replay_record import PASSED, ReplayInput, ReplaySpec, ResultRecord
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.plan import law_order
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import run_replay, spec_and_owner


def run_located(
    desk: Desk, spec: ReplaySpec, command: str, item: ReplayInput | None = None
) -> tuple[ReplaySpec, Sequence[ResultRecord]]:
    """Judge the model of `spec` module by module on one of its inputs, in another replay; return that and its results.

    command: what that replay records as its command. item: the input; None: the input that shows most.
    """
    spec = located_spec(spec, [item or spec.inputs[law_order(spec.inputs)[0]]], command)
    desk.runnable(spec.config, spec.inputs)
    with desk.progress("locating", 1) as advance:
        run_replay(desk.store, spec, on_event=counting(advance))
    return spec, data_of(desk.store, spec).results


def locate_answer(spec: ReplaySpec, results: Sequence[ResultRecord]) -> CommandResult:
    """Build the answer: what the model is, every wrong place, what was not checked."""
    local = verdict_of(results)
    failed = next((result for result in results if result.status != PASSED), None)
    word, said, about, blocks = UNCHECKED, "the input did not run", dict[str, Any](), list[Block]()
    if local is not None:
        word, said = local.word, local.said
        about = {name: getattr(local, name) for name in ("looked_at", "unchecked", "differences")} | asdict(local)
        chart = heat_chart(local.located) if local.located else None
        blocks = [*section("", lines_of(local)), *([chart] if chart else [])]
    if failed is not None:
        why = failed.error or failed.status
        word, said = FAILED, f"the input did not pass: {first_line(why)}"
    following = {
        RIGHT: f"actordbg check --model {in_shell(spec.config.model)}",
        WRONG: f"actordbg explain {spec.replay_id}",
    }.get(word, f"actordbg report {spec.replay_id}")
    left = [NotChecked(MODEL, why) for why in local.unchecked[:1]] if local and word in (RIGHT, WRONG) else []
    found = local.found if local and word == WRONG else []
    verdict = Verdict(word, said, not_checked=left, next=following, findings=found)
    data = {"word": word, "good": verdict.good, "replay_id": spec.replay_id, **about}
    return CommandResult(verdict.good, data, [Heading(f"locate {spec.replay_id}", 1), verdict, *blocks])


def explained(desk: Desk, spec: ReplaySpec) -> CommandResult:
    """Explain what is wrong with a replay."""
    check = _known(desk, spec)
    verdict = check.verdict(of=len(spec.inputs), explained=True)
    why = explanation.explain(desk.store, check, verdict)
    first = explanation.headline(why)
    data = {"replay_id": spec.replay_id, "good": first.good, "explanation": why.data}
    return CommandResult(first.good, data, [Heading(f"actordbg explain {spec.replay_id}", 1), first, *why.blocks])


def sides_explained(desk: Desk, spec: ReplaySpec, models: Sequence[str], *, engine: bool) -> CommandResult:
    """Explain how the rollout and the run, or a server, differ from the truth on a replay's inputs."""
    desk.store.require_writable()
    explain_them: Callable[..., ExplainedEngine | ExplainedRollout] = explain_engine if engine else explain_rollout
    with desk.progress("naming the cause", len(spec.inputs)) as advance, WarmGroups() as warm:
        sides = explain_them(desk.store, spec.replay_id, models=models, on_event=counting(advance), warm=warm)
    data = {"replay_id": spec.replay_id, "wrong": sides.wrong} | asdict(sides)
    return CommandResult.of(sides.verdict, data, *sides.blocks, title=f"sides of replay {spec.replay_id}")


def _known(desk: Desk, spec: ReplaySpec) -> CheckedReplay:
    """Read what the store knows of a replay, and compute what it lacks: a comparison with the truth, the modules of one input."""
    store = desk.store
    (data,) = load(store, [spec.replay_id]).replays
    record, own = (_saved(desk, data.comparisons, kind) for kind in (TRUTH, GOLDEN))
    why = ""
    passed = any(result.status == PASSED for result in data.results)
    if record is None and passed:
        try:
            record = with_truth(desk, spec.replay_id)
        except ActordbgError as problem:
            why = problem.message
        (data,) = load(store, [spec.replay_id]).replays
    why = why or ("" if passed else "no input passed")
    findings = kept(desk, lint(store.root, [given.path for given in spec.inputs]))
    if count_dumps(store, f"point = '{LOSS}'"):
        for answer in findings.of(NOT_CHECKED):
            if answer.lacks == NO_LOSSES:
                answer.lacks = "policy losses, which `actordbg lint` reads"
    findings = with_known(store, findings, {given.dump_id for given in spec.inputs})
    check = CheckedReplay(data, record, why, own, lint=findings)
    if passed:
        check = replace(check, located=_located_before(desk, spec))
        wrong = worst_unlocated(check)
        try:
            if check.local is None or wrong:
                results = run_located(desk, spec, f"{LOCATED}{spec.replay_id}", *wrong[:1])[1]
                check = replace(check, located=(*check.located, *results))
        except ActordbgError as problem:
            desk.client.note(f"not judged module by module: {problem.message}")
    return check


def _saved(desk: Desk, rows: Sequence[ComparisonRun], kind: str) -> ComparisonRecord | None:
    """Read the newest comparison with a side of this kind; None if there is none, or it is damaged. Causes of an earlier bank are
    searched for again.
    """
    for row in rows:
        if row.against_kind == kind:
            try:
                record = ComparisonRecord.from_file(desk.store.comparisons / f"{row.comparison_id}.json")
                same = record.explained is None or record.explained.bank == all_causes()
                return record if same else with_cause(desk, record)
            except ActordbgError as problem:
                desk.client.note(problem.message)
    return None


def _located_before(desk: Desk, spec: ReplaySpec) -> list[ResultRecord]:
    """Return the results of this user's earlier replays that judged inputs of `spec` module by module under its configuration."""
    wanted, results = located_spec(spec, spec.inputs), list[ResultRecord]()
    for path in sorted(desk.store.replays.glob(f"*/{SPEC}")):
        with contextlib.suppress(ActordbgError):  # damaged, or of a newer version: other commands report it
            there, owner = spec_and_owner(desk.store, path.parent.name)
            alike = there.config == wanted.config and there.versions == wanted.versions
            if is_own(owner) and there.locate and alike and set(there.inputs) <= set(spec.inputs):
                results += data_of(desk.store, there).results
    return results
