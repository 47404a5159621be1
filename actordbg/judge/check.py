"""Run dumps through one configuration and judge them by the replay, the laws, the truth and a noise floor.

    check = run_check(store, plan.spec)
    verdict = check.verdict(of=257, recorded="meta-llama/Llama-3.1-8B")
    verdict.sentence       # "RIGHT: 8 dumps, a sample of 257, match the truth to bf16 rounding; not checked: ..."

The replay is an ordinary one, so `report`, `compare` and `replay --resume` work on it. Under the plain backend one process
computes the replay and then the truth, which saves a start. Under other backends the truth gets a separate process, which has
imported nothing of the engine; without a GPU it is a fork (`actordbg.replay.rank_launcher`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from actordbg.base.errors import ActordbgError, MachineFault
from actordbg.base.units import listed, new_replay_id, plural, some
from actordbg.catalog.dump_verdicts import LOCATED
from actordbg.compare.comparing import compare, save
from actordbg.compare.find_truth import Runner, ensure_rounding, ensure_truth
from actordbg.compare.noise_floor import newest_for
from actordbg.compare.same_weights import WEIGHTS, WeightsMet, weights_of_outputs, without_unknown_weights
from actordbg.compare.sides import OTHER_WEIGHTS, RECORDED
from actordbg.config.as_ran import as_ran, label
from actordbg.document.blocks import RIGHT, UNCHECKED, WRONG, Block, Chart, Heading, Paragraph, Verdict
from actordbg.formats.dump_record import now_timestamp
from actordbg.judge.comparison_document import details
from actordbg.judge.explain_outputs import with_explanation
from actordbg.judge.load_replays import load
from actordbg.judge.replay_document import replay_details
from actordbg.judge.replay_findings import CODE, Judged
from actordbg.judge.report_model import ReplaySummary
from actordbg.judge.summary import summary_of
from actordbg.judge.verdicts import replay_verdict
from actordbg.locate.rules import PLACES
from actordbg.locate.verdict import LocalVerdict, verdict_of
from actordbg.recorded.lint import LintFindings, with_lint
from actordbg.records.comparison_record import (
    MISMATCH,
    MODEL,
    NOT_COMPARED,
    RECORDED as OUTPUTS,
    ComparisonRecord,
    DumpComparison,
)
from actordbg.records.finding import NotChecked
from actordbg.records.journal import read_results, read_standing
from actordbg.records.locate_record import OUT, formula_checks
from actordbg.records.replay_record import PASSED, ReplayInput, ReplaySpec, ResultRecord, answers_of, violations
from actordbg.records.run_files import met_weights
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.plan import other_lengths
from actordbg.replay.replay_data import ReplayData, data_of
from actordbg.replay.supervise import run_replay
from actordbg.store.layout import Store

REPLAYING, TRUTH, ROUNDING = "replaying", "computing the truth", "measuring what the dtype costs"
EXPLAINING, NAMING = "comparing with recorded outputs", "looking for a cause"
MODULES = PLACES[OUT]
OTHER_LENGTHS = 0.2
"""Part of the replay's time, a tenth of the whole check's, in which inputs of other lengths are judged module by module."""


@dataclass(frozen=True)
class CheckedReplay:
    """The result of a check. comparison: with the truth; None without a truth, and `no_truth` says why.

    own: the comparison with the run's recorded outputs, if requested. shared: packages whose code the truth runs too.
    lint: the laws of the recorded data, if they were checked. located: results of other replays that judged this replay's model,
    module by module.
    """

    data: ReplayData
    comparison: ComparisonRecord | None = None
    no_truth: str = ""
    own: ComparisonRecord | None = None
    shared: Sequence[str] = ()
    lint: LintFindings | None = None
    located: Sequence[ResultRecord] = ()

    @cached_property
    def summary(self) -> ReplaySummary:
        """Summarize the replay."""
        return replace(summary_of(self.data), local=self.local)

    @property
    def truths(self) -> tuple[DumpComparison, ...]:
        """Each dump's comparison with the truth."""
        return self.comparison.dumps if self.comparison else ()

    @property
    def owns(self) -> tuple[DumpComparison, ...]:
        """Each dump's comparison with the run's recorded outputs."""
        return self.own.dumps if self.own else ()

    def verdict(self, *, of: int, **more: Any) -> Verdict:
        """Return the verdict. of: the number of dumps the sample was drawn from. more: options of `replay_verdict`."""
        verdict = replay_verdict(self.judged, of=of, **more)
        if verdict.word == RIGHT and self.weights is not None:
            unknown = self.weights.same is None
            known = () if unknown else (self.weights.words,)
            verdict = replace(verdict, word=UNCHECKED if unknown else RIGHT, further=(*verdict.further, *known))
        return verdict if self.lint is None else with_lint(verdict, self.lint)

    @property
    def judged(self) -> Judged:
        """Everything that judged the replay."""
        return Judged(self.summary, self.comparison, self.own, tuple(self._left()), self.no_truth)

    @cached_property
    def weights(self) -> WeightsMet | None:
        """Say whether the model has the weights of the recorded outputs that it was compared with; None if there are none."""
        if self.own is None:
            return None
        rounding = {dump.dump_id: dump.log_probs.mean_abs or 0.0 for dump in self.truths if dump.log_probs}
        return weights_of_outputs(self.own, self.data.resolved, rounding)

    @cached_property
    def local(self) -> LocalVerdict | None:
        """The verdict on the model, module by module; None without the laws."""
        return verdict_of([*self.data.results, *self.located])

    @property
    def unlocated(self) -> list[ReplayInput]:
        """Inputs of lengths that no judged input has, one of each."""
        return other_lengths(self.data.spec.inputs, self.local.judged if self.local else ())

    def _left(self) -> Iterator[NotChecked]:
        """Yield what was not compared: recorded outputs by reason (for other weights, with the condition that excludes them),
        then what the comparison with the truth does not cover, and whose code the truth shares.
        """
        same = met_weights(self.data.resolved).get("same", [])
        steps = f"step={same[0]}" if len(same) == 1 else f"step in ({listed(same)})"
        known = f'--where "{steps}" excludes them' if same and None not in same else "pass that step's checkpoint as --model"
        left = Counter(next(iter(dump.not_compared.values()), "") for dump in self.owns if dump.verdict == NOT_COMPARED)
        for why, count in left.most_common():
            said = f"the outputs of the run in {count:,} of {plural(len(self.owns), 'dump')}: {why}"
            yield NotChecked(OUTPUTS, said, known if why == OTHER_WEIGHTS else "")
        if self.weights is not None and self.weights.same is None:
            yield NotChecked(WEIGHTS, self.weights.words)
        if self.comparison is not None:
            yield from (each for each in self.comparison.unjudged if each.rule != MODEL)
        for item in worst_unlocated(self)[:1]:
            yield NotChecked(MODULES, f"module by module, the dump that is wrong: {item.dump_id}")
        if (others := self.unlocated) and self.local is not None and self.local.judged:
            named = [f"{item.dump_id.rpartition('-')[2]} ({item.tokens:,} tokens)" for item in others]
            yield NotChecked(MODULES, f"module by module, inputs of other lengths: {some(named)}")
        if self.shared:
            yield NotChecked(CODE, f"modules of {listed(self.shared)} (shared with the truth)")


def run_check(
    store: Store,
    spec: ReplaySpec,
    *,
    recorded: bool = False,
    on_stage: Callable[[str], None] = lambda stage: None,
    run: Runner = run_replay,
    **callbacks: Any,
) -> CheckedReplay:
    """Run the replay `spec` and compare it with the truth; with `recorded` also with the run's recorded outputs.

    If laws are checked, the model is also compared with transformers' own, and one input is judged module by module, inputs of
    other lengths as far as OTHER_LENGTHS allows, and the worst of those known to be wrong. Where that names nothing, causes are
    fitted to log-probs that are not the truth's.
    on_stage: called with the name of each stage as it begins. run: what runs it and the truth. callbacks: `on_event` of
    `run_replay`. Raises what `run_replay` raises. If the truth cannot be computed, the result's `no_truth` says why.
    """
    spec = replace(spec, locate=min(1, spec.config.laws))
    with WarmGroups(reopen=True) as warm:
        callbacks["warm"] = warm
        warm.share(spec.replay_id)
        on_stage(REPLAYING)
        began = time.monotonic()
        run(store, spec, **callbacks)
        callbacks["run"] = run
        data = data_of(store, spec)
        if not any(result.status == PASSED for result in data.results):
            return CheckedReplay(data, no_truth="no input passed")

        def located_on(inputs: Sequence[ReplayInput]) -> Sequence[ResultRecord]:
            if not inputs:
                return ()
            other = located_spec(spec, inputs, f"{LOCATED}{spec.replay_id}")
            run(store, other, warm=warm)
            return data_of(store, other).results

        located = located_on(_affordable(CheckedReplay(data), OTHER_LENGTHS * (time.monotonic() - began)))
        warm.share(None)
        own = None

        def saved_own(truth: ComparisonRecord | None) -> ComparisonRecord | None:
            if own is None:
                return None
            kept = without_unknown_weights(own, CheckedReplay(data, truth, own=own).weights)
            save(store, kept)
            return kept

        if recorded:
            own = compare(store, spec.replay_id, RECORDED)
            on_stage(EXPLAINING)
            own = with_explanation(store, own, **callbacks)
        try:
            on_stage(TRUTH)
            truth = ensure_truth(store, spec.replay_id, **callbacks)
            on_stage(ROUNDING)
            rounding = ensure_rounding(store, spec.replay_id, **callbacks)
            noise = newest_for(store, spec.replay_id)
            record = compare(store, spec.replay_id, truth, rounding=rounding, noise=noise)
            located = (*located, *located_on(worst_unlocated(CheckedReplay(data, record, located=located))[:1]))
            local = verdict_of([*data.results, *located])
            if record.verdict == MISMATCH and (local is None or local.word != WRONG):  # no module was named
                on_stage(NAMING)
                record = with_explanation(store, record, **callbacks)
            save(store, record)
            own = saved_own(record)
        except MachineFault as fault:
            fault.hint = f"fix that, then `actordbg compare {spec.replay_id} truth` continues"
            raise
        except ActordbgError as problem:
            return CheckedReplay(data, no_truth=problem.message, own=saved_own(None), located=located)
        (data,) = load(store, [spec.replay_id]).replays  # with its comparisons
        return CheckedReplay(data, record, own=own, shared=_shared_code(store.replays / truth), located=located)


def located_spec(spec: ReplaySpec, inputs: Sequence[ReplayInput], command: str = "") -> ReplaySpec:
    """Make a new replay of some inputs of `spec`, in which every place is judged and nothing else is kept."""
    config = replace(
        spec.config, laws=0, vary=None, truth=None, align=None, keep_tensors=False, keep_gradients=False, memory_snapshot=False
    )
    return replace(
        spec,
        replay_id=new_replay_id(),
        created_at=now_timestamp(),
        config=config,
        inputs=tuple(inputs),
        command=command,
        locate=len(inputs),
    )


def worst_unlocated(check: CheckedReplay) -> list[ReplayInput]:
    """Return the inputs that are known to be wrong, by the truth or by a law, the worst first.

    [] where one of them was judged module by module, the model was not compared, or its fault is known.
    """
    local = check.local
    if local is None or local.word == WRONG:
        return []
    known = [dump.dump_id for dump in check.truths if dump.verdict == MISMATCH]
    known += [result.dump_id for result in check.data.results if violations(answers_of(result.extra))]
    inputs = {item.dump_id: item for item in check.data.spec.inputs}
    return [] if set(known) & set(local.judged) else [inputs[dump_id] for dump_id in known if dump_id in inputs]


def _affordable(check: CheckedReplay, seconds: float) -> list[ReplayInput]:
    """Return inputs of other lengths that can be judged module by module in so many seconds, by what the first one took."""
    local = check.local
    if local is None or local.located is None or not local.judged or local.word == WRONG:
        return []
    chosen = []
    for item in check.unlocated:
        longer = max(1.0, item.tokens / max(1, local.located.tokens))
        takes = local.located.seconds * (1 + longer) / 2  # half of it is loading, and reading weights
        if takes <= seconds:
            seconds -= takes
            chosen.append(item)
    return chosen


def _shared_code(truth: Path) -> list[str]:
    """Name the packages whose modules the truth runs too, but for transformers' where they were held against their formulas."""
    packages, held = read_standing(truth)[0].get("shared_code", ()), formula_checks(read_results(truth).values())
    return [package for package in packages if package != "transformers" or not held]


_WORST = 10
"""How many of a comparison's dumps the page lists."""


def check_blocks(check: CheckedReplay, verdict: Verdict, explained: Sequence[Block], charts: Sequence[Chart]) -> list[Block]:
    """Build the page: the verdict, its explanation, both comparisons, the replay's report with its charts."""
    spec = check.data.spec
    blocks: list[Block] = [Heading("actordbg check", 1), Paragraph(f"{spec.command}; {spec.created_at}"), verdict, *explained]
    for record, against in ((check.own, "the run's recorded outputs"), (check.comparison, "the truth")):
        if record is not None:
            blocks += [Heading(f"Replay against {against}", 2), *details(record, _WORST, excludes=record is check.own)]
    return [*blocks, Heading("Replay", 2), *replay_details(check.summary, charts)]


def check_data(check: CheckedReplay, verdict: Verdict, *, of: int) -> dict[str, Any]:
    """Return the result as data: times in seconds, memory in bytes, max_abs in nats. of: see `CheckedReplay.verdict`."""
    summary, record, spec = check.summary, check.comparison, check.data.spec
    timed = summary.forward if summary.forward.count else summary.warm_up.first_forward
    return {
        "good": verdict.good,
        "replay_id": spec.replay_id,
        "comparison_id": record.comparison_id if record else None,
        "dumps": len(spec.inputs),
        "of": of,
        "configuration": label(as_ran(spec.config, check.data.resolved)),
        "toy_model": verdict.toy,
        "max_abs": record.furthest[0] if record and record.furthest else None,
        "forward_median_s": timed.median,
        "tokens_per_s": summary.tokens_per_s.median,
        "peak_memory_bytes": summary.peak_memory_bytes,
    }
