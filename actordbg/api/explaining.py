"""`explain`: what the store knows of a replay, and what it lacks computed now."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import asdict

from actordbg.api.comparing import with_truth
from actordbg.api.desk import Desk
from actordbg.api.locating import of_one_input, run_located
from actordbg.api.planning import counting
from actordbg.base.errors import ActordbgError
from actordbg.catalog.lab_models import ComparisonRun
from actordbg.catalog.query import LOCATED
from actordbg.document.blocks import Heading
from actordbg.document.command_result import CommandResult
from actordbg.judge import explanation
from actordbg.judge.check import CheckFound
from actordbg.judge.engine_sides import ExplainedEngine, explain_engine
from actordbg.judge.lint import lint
from actordbg.judge.load_replays import load
from actordbg.judge.rollout_sides import ExplainedRollout, explain_rollout
from actordbg.judge.sides import GOLDEN, TRUTH
from actordbg.locate.verdict import verdict_of
from actordbg.records.comparison_record import ComparisonRecord
from actordbg.records.journal import SPEC
from actordbg.records.replay_record import PASSED, ReplaySpec, ResultRecord
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import load_spec


def explained(desk: Desk, spec: ReplaySpec) -> CommandResult:
    """Explain what is wrong with a replay."""
    check = _known(desk, spec)
    verdict = check.verdict(of=len(spec.inputs), explained=True)
    why = explanation.explain(desk.store, check, verdict)
    first = Heading(f"actordbg explain {spec.replay_id}", 1), explanation.headline(why)
    data = {"replay_id": spec.replay_id, "good": verdict.good, "explanation": why.data}
    return CommandResult(verdict.good, data, [*first, *why.blocks])


def sides_explained(desk: Desk, spec: ReplaySpec, models: Sequence[str], *, engine: bool) -> CommandResult:
    """Explain how the rollout and the run, or a server, differ from the truth on a replay's inputs."""
    desk.store.require_writable()
    explain_them: Callable[..., ExplainedEngine | ExplainedRollout] = explain_engine if engine else explain_rollout
    with desk.progress("naming the cause", len(spec.inputs)) as advance, WarmGroups() as warm:
        sides = explain_them(desk.store, spec.replay_id, models=models, on_event=counting(advance), warm=warm)
    good = not sides.wrong
    data = {"replay_id": spec.replay_id, "good": good, "wrong": sides.wrong} | asdict(sides)
    return CommandResult(good, data, sides.blocks, title=f"sides of replay {spec.replay_id}")


def _known(desk: Desk, spec: ReplaySpec) -> CheckFound:
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
    return CheckFound(data, record, why, own, lint=lint(store.root, [given.path for given in spec.inputs]), located=located)


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
