"""`actordbg explain`: what is wrong with a replay, where, since when, what to do, and what was ruled out."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import typer

from actordbg.base.errors import UsageError
from actordbg.cli.options import ConfirmOption, TrustRemoteCode, option, require_good, store_of, stored, take_consent
from actordbg.cli.output import note, say_document

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actordbg.catalog.lab_models import ComparisonRun
    from actordbg.judge.check import CheckFound
    from actordbg.records.comparison_record import ComparisonRecord
    from actordbg.records.replay_record import ReplaySpec, ResultRecord
    from actordbg.store.layout import Store


class OtherSide(str, Enum):
    """Sides that a run can be explained against."""

    ROLLOUT = "rollout"


def explain(
    ctx: typer.Context,
    replay: str = typer.Argument(
        "last",
        metavar="REPLAY",
        help="The replay to explain: an id, a name, `@1` or `last`.",
        autocompletion=stored("replay"),
    ),
    against: OtherSide | None = option(
        None, "Say which side is wrong: rollout, the engine's recorded log-probs (needs `dump enable --calls forward,loss`)."
    ),
    other_model: list[str] = option(
        [],
        "With --against, also a model whose weights a side may have had, such as an earlier checkpoint; repeatable.",
        metavar="PATH",
    ),
    trust_remote_code: TrustRemoteCode = False,
    yes: ConfirmOption = False,
) -> None:
    """Explain what is wrong with a replay, where, and since when.

    Puts together what the store knows of the replay: its model bit for bit, its modules, the laws, the ranks, and the log-probs
    against the truth and the run's own outputs. Says which tokens are wrong by the smallest rule that covers them, since which
    recorded input, what to do, what was ruled out, and what was not checked. Computes the truth and runs `locate` on one input if
    that was not done yet.

    Exit code: 1 if anything is wrong or nothing could be checked.

    Example: actordbg explain last -o why.html
    """
    from actordbg.cli.locate import spec_of
    from actordbg.config.replay_config import ENDPOINT
    from actordbg.document.blocks import Heading
    from actordbg.judge import explanation

    take_consent(trust_remote_code)
    store = store_of(ctx).require()
    spec = spec_of(store, replay, yes)
    if against is not None:
        return _sides(store, spec, other_model, engine=False)
    if spec.config.backend == ENDPOINT:
        return _sides(store, spec, other_model, engine=True)
    if other_model:
        raise UsageError("--other-model needs --against", hint="add --against rollout")
    check = _known(store, spec, yes)
    verdict = check.verdict(of=len(spec.inputs), explained=True)
    explained = explanation.explain(store, check, verdict)
    first = Heading(f"actordbg explain {spec.replay_id}", 1), explanation.headline(explained)
    data = {"replay_id": spec.replay_id, "good": verdict.good, "explanation": explained.data}
    say_document([*first, *explained.blocks], data=data)
    require_good(verdict.good)


def _sides(store: Store, spec: ReplaySpec, models: list[str], *, engine: bool) -> None:
    """Explain how the rollout and the run, or a server, differ from the truth on a replay's inputs."""
    from dataclasses import asdict

    from actordbg.api.planning import counting
    from actordbg.cli.replaying import replaying
    from actordbg.judge.engine_sides import ExplainedEngine, explain_engine
    from actordbg.judge.rollout_sides import ExplainedRollout, explain_rollout
    from actordbg.replay.group_engine import WarmGroups

    store.require_writable()
    with replaying(store, "naming the cause", len(spec.inputs)) as advance, WarmGroups() as warm:
        explain_them: Callable[..., ExplainedEngine | ExplainedRollout] = explain_engine if engine else explain_rollout
        explained = explain_them(store, spec.replay_id, models=models, on_event=counting(advance), warm=warm)
    good = not explained.wrong
    say_document(explained.blocks, data={"replay_id": spec.replay_id, "good": good, "wrong": explained.wrong} | asdict(explained))
    require_good(good)


def _known(store: Store, spec: ReplaySpec, yes: bool) -> CheckFound:
    """Read what the store knows of a replay, and compute what it lacks: a comparison with the truth, the modules of one input."""
    from actordbg.base.errors import ActordbgError
    from actordbg.judge.check import CheckFound
    from actordbg.judge.lint import lint
    from actordbg.judge.load_replays import load
    from actordbg.judge.sides import GOLDEN, TRUTH
    from actordbg.locate.verdict import verdict_of
    from actordbg.records.replay_record import PASSED

    (data,) = load(store, [spec.replay_id]).replays
    record, own = (_saved(store, data.comparisons, kind) for kind in (TRUTH, GOLDEN))
    why = ""
    located: Sequence[ResultRecord] = ()
    passed = any(result.status == PASSED for result in data.results)
    if record is None and passed:
        try:
            record = _with_truth(store, spec, yes)
        except ActordbgError as problem:
            why = problem.message
        (data,) = load(store, [spec.replay_id]).replays
    if passed and verdict_of(data.results) is None:
        try:
            located = _located(store, spec)
        except ActordbgError as problem:
            note(f"not judged module by module: {problem.message}")
    why = why or ("" if passed else "no input passed")
    return CheckFound(data, record, why, own, lint=lint(store.root, [given.path for given in spec.inputs]), located=located)


def _saved(store: Store, rows: Sequence[ComparisonRun], kind: str) -> ComparisonRecord | None:
    """Read the newest comparison with a side of this kind; None if there is none, or it is damaged."""
    from actordbg.base.errors import ActordbgError
    from actordbg.records.comparison_record import ComparisonRecord

    for row in rows:
        if row.against_kind == kind:
            try:
                return ComparisonRecord.from_file(store.comparisons / f"{row.comparison_id}.json")
            except ActordbgError as problem:
                note(problem.message)
    return None


def _with_truth(store: Store, spec: ReplaySpec, yes: bool) -> ComparisonRecord | None:
    """Compare the replay with its truth, computed now if it does not exist, and keep the comparison. None without tensors."""
    from actordbg.cli import compare_work as work
    from actordbg.config.replay_config import ANY_WIDER
    from actordbg.judge.comparing import compare

    if not spec.config.keep_tensors:
        return None
    truth, rounding = work.truth_and_rounding(store, spec.replay_id, ANY_WIDER, flat=False, planted=False, yes=yes)
    record = compare(store, spec.replay_id, truth, rounding=rounding)
    work.kept(store, record)
    return record


def _located(store: Store, spec: ReplaySpec) -> Sequence[ResultRecord]:
    """Return the results of an earlier `locate` of this configuration, or run it now, on the input that shows the most."""
    import contextlib

    from actordbg.api.locating import of_one_input
    from actordbg.base.errors import ActordbgError
    from actordbg.catalog.query import LOCATED
    from actordbg.cli.locate import run_located
    from actordbg.records.journal import SPEC
    from actordbg.replay.replay_data import data_of
    from actordbg.replay.supervise import load_spec

    wanted = of_one_input(spec)
    for path in sorted(store.replays.glob(f"*/{SPEC}"), reverse=True):
        with contextlib.suppress(ActordbgError):  # damaged, or of a newer version: other commands report it
            there = load_spec(store, path.parent.name)
            alike = all(getattr(there, name) == getattr(wanted, name) for name in ("config", "inputs", "versions"))
            if there.locate and alike and (results := data_of(store, there).results):
                return results
    return run_located(store, spec, f"{LOCATED}{spec.replay_id}")[1]
