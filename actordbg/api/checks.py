"""`check` and `lint`: the answer of a check as text, page, JUnit XML and annotations; the laws of recorded data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from actordbg.api.client import Advance
from actordbg.api.desk import Desk, DumpSelection, counting
from actordbg.base.errors import StoreProblem
from actordbg.catalog.query import count_dumps, open_fresh, select_dumps
from actordbg.document.blocks import WRONG, Items, Verdict, verdict_in
from actordbg.document.command_result import CommandResult
from actordbg.judge.check import ROUNDING, TRUTH, CheckedReplay, check_blocks, check_data, run_check
from actordbg.judge.explanation import explain
from actordbg.judge.exports import junit_xml, workflow_commands
from actordbg.judge.load_replays import pictures
from actordbg.judge.replay_list import listed
from actordbg.measure.run_logs import judge_logs
from actordbg.recorded.lint import LintFindings, keep, lint, lint_answer, with_known
from actordbg.records.journal import read_standing
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.supervise import COMPLETE, Progress, load_spec
from actordbg.store.layout import Store

LINTED = 256
"""Most dumps whose recorded data `check` checks, the newest: whole steps, and about a second."""


@dataclass(frozen=True, eq=False, repr=False)
class CheckResult(CommandResult):
    """The answer of a check."""

    checked: CheckedReplay | None = None

    def to_junit(self) -> str:
        """Return JUnit XML: a test case for each judgement of each dump."""
        return junit_xml(*self._judged).decode()

    def to_annotations(self) -> list[str]:
        """Return GitHub's workflow commands, a line each."""
        return list(workflow_commands(*self._judged))

    @property
    def _judged(self) -> tuple[CheckedReplay, Verdict]:
        verdict = verdict_in(self.blocks)
        assert self.checked is not None and verdict is not None
        return self.checked, verdict


def check(desk: Desk, chosen: DumpSelection, flags: dict[str, Any], *, sample: int, recorded: bool) -> CheckResult:
    """Replay a sample of dumps, and judge it by the laws and the truth. recorded: also judge the run's own outputs."""
    of_all = chosen.where
    chosen = desk.selected(chosen.sampled(sample))
    plan, own = desk.judged("check", flags, chosen)
    of = len(plan.spec.inputs) if chosen.files else count_dumps(desk.store, of_all)
    findings = None
    if not chosen.files:
        with desk.client.progress("reading", None) as advance:
            findings = lint_newest(desk, chosen.with_losses or of_all, on_dump=advance)
        findings = with_known(desk.store, findings, {item.dump_id for item in plan.spec.inputs})
        if chosen.logs:
            findings.outcomes = [*findings.outcomes, *judge_logs(chosen.logs)]
    checked = replace(_run(desk, plan.spec, recorded), lint=findings)
    return check_answer(desk.store, checked, of=of, recorded=own)


def _run(desk: Desk, spec: ReplaySpec, recorded: bool) -> CheckedReplay:
    """Run the check with one progress over all its stages. On Ctrl-C, keep the results and say how to continue."""
    desk.runnable(spec.config, spec.inputs)
    count = len(spec.inputs)
    done: dict[str, int] = {}
    try:
        with desk.progress("checking", 2 * count) as advance:

            def on_stage(stage: str) -> None:
                """Begin a stage of `count` steps, and skip the steps that are already computed or not needed."""
                done[stage] = 0
                advance(count - done[TRUTH] if stage == ROUNDING else 0, note=stage)

            def on_event(event: Progress) -> None:
                if event.kind == "attempt" and ROUNDING in done:
                    advance(0, total=3 * count)
                done[list(done)[-1]] += event.kind == "result"
                counted(event)

            counted = counting(lambda n=1, note="": advance(n, note=note and f"{list(done)[-1]}: {note}"))
            return run_check(desk.store, spec, recorded=recorded, on_stage=on_stage, on_event=on_event)
    except KeyboardInterrupt:
        left = read_standing(desk.store.replays / spec.replay_id)[1] != COMPLETE
        first = f"`actordbg replay --resume {spec.replay_id}`, then " if left else ""
        kept = f"results so far are kept, {first}`actordbg compare {spec.replay_id} truth` continues"
        desk.client.note(kept)
        raise


def lint_newest(
    desk: Desk, where: str | None, most: int | None = LINTED, on_dump: Advance = lambda *_, **__: None
) -> LintFindings:
    """Check the laws of the recorded data on the newest dumps, losses included, that a condition selects."""
    rows = select_dumps(desk.store, where, order="newest", limit=most, losses=True)
    on_dump(0, total=len(rows))
    return kept(desk, lint(desk.store.root, [row.path for row in rows], on_dump))


def kept(desk: Desk, findings: LintFindings) -> LintFindings:
    """Keep what laws of recorded data say of dumps for their last verdicts, or note why that cannot be. Returns the findings."""
    try:
        keep(desk.store, findings)
    except StoreProblem as problem:  # of another user, or read-only
        desk.client.note(f"not kept for the dumps' last verdicts: {problem.message}")
    return findings


def linted(desk: Desk, where: str | None, max_inputs: int | None) -> CommandResult:
    """Check recorded data against its laws. Raises NothingToDo if nothing was selected."""
    desk.store.require()
    with desk.client.progress("reading", None) as advance:
        findings = lint_newest(desk, where, max_inputs, advance)
    if not findings.dumps and not findings.unreadable:
        raise desk.nothing("lint", where)
    desk.client.note_some(findings.unreadable)
    return lint_answer(findings)


def check_answer(store: Store, checked: CheckedReplay, *, of: int, recorded: str | None = None) -> CheckResult:
    """Build the answer. of: the number of dumps that the sample was drawn from. recorded: the model that the dumps name."""
    verdict = checked.verdict(of=of, recorded=recorded)
    if verdict.good and (fault := _fault_beside(store, checked.data.spec)):
        verdict = replace(verdict, next=f"actordbg reduce {fault}")
    explained = explain(store, checked, verdict)
    data = check_data(checked, verdict, of=of) | {"explanation": explained.data}
    brief = (verdict, Items((f"configuration: {data['configuration']}",)))
    page = check_blocks(checked, verdict, explained.blocks, pictures(store, checked.data))
    return CheckResult(verdict.good, data, brief, page, checked=checked)


def _fault_beside(store: Store, spec: ReplaySpec) -> str:
    """Return this user's newest replay that is wrong on an input of `spec` under another configuration: what was changed decides.

    "" for none: the same configuration was wrong before somebody repaired it.
    """
    inputs = {item.dump_id for item in spec.inputs}
    for replay in listed(open_fresh(store), everything=True):
        if replay["verdict"] == WRONG and not replay["whose"]:
            there = load_spec(store, replay["replay_id"])
            changed = there.config != spec.config and there.config.model == spec.config.model
            if changed and there.config.nproc == 1 and inputs & {item.dump_id for item in there.inputs}:
                return there.replay_id
    return ""
