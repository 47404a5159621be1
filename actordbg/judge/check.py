"""Run dumps through one configuration and judge them by the replay, the laws, the truth and a noise floor.

    check = run_check(store, plan.spec)
    verdict = check.verdict(of=257, recorded="meta-llama/Llama-3.1-8B")
    verdict.sentence       # "RIGHT: 8 of 257 dumps match the truth to bf16 rounding; not checked: ..."

The replay is an ordinary one, so `report`, `compare` and `replay --resume` work on it. Under the plain backend one process
computes the replay and then the truth, which saves a start; under other backends the truth gets a separate process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from actordbg.base.errors import ActordbgError, MachineFault
from actordbg.base.units import plural
from actordbg.config.as_ran import as_ran, label
from actordbg.document.blocks import WRONG, Block, Chart, Heading, Paragraph, Verdict
from actordbg.formats.weight_hashes import met_weights
from actordbg.judge.comparing import compare, save
from actordbg.judge.comparison_document import details
from actordbg.judge.explain_outputs import with_explanation
from actordbg.judge.find_truth import Runner, ensure_rounding, ensure_truth
from actordbg.judge.lint import Findings, with_lint
from actordbg.judge.load_replays import load
from actordbg.judge.noise_floor import newest_for
from actordbg.judge.replay_document import replay_details
from actordbg.judge.report_model import ReplaySummary
from actordbg.judge.sides import OTHER_WEIGHTS, RECORDED
from actordbg.judge.summary import summary_of
from actordbg.judge.verdicts import replay_verdict
from actordbg.locate.verdict import LocalVerdict, verdict_of
from actordbg.records.comparison_record import MISMATCH, NOT_COMPARED, ComparisonRecord, DumpComparison
from actordbg.records.journal import read_results, read_standing
from actordbg.records.locate_record import formula_checks
from actordbg.records.replay_record import PASSED, ReplaySpec, ResultRecord
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.replay_data import ReplayData, data_of
from actordbg.replay.supervise import run_replay
from actordbg.store.layout import Store

REPLAYING, TRUTH, ROUNDING = "replaying", "computing the truth", "measuring what the dtype costs"
EXPLAINING, NAMING = "comparing with recorded outputs", "looking for a cause"


@dataclass(frozen=True)
class CheckedReplay:
    """The result of a check. comparison: with the truth; None without a truth, and `no_truth` says why.

    own: the comparison with the run's recorded outputs, if requested. shared: packages whose code the truth runs too.
    lint: the laws of the recorded data, if they were checked. located: results of another replay that judged this replay's model,
    module by module.
    """

    data: ReplayData
    comparison: ComparisonRecord | None = None
    no_truth: str = ""
    own: ComparisonRecord | None = None
    shared: Sequence[str] = ()
    lint: Findings | None = None
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
        left = tuple(self._left())
        verdict = replay_verdict(self.summary, of=of, own=self.own, left=left, no_truth=self.no_truth, **more)
        return verdict if self.lint is None else with_lint(verdict, self.lint)

    @cached_property
    def local(self) -> LocalVerdict | None:
        """The verdict on the model, module by module; None without the laws."""
        return verdict_of([*self.data.results, *self.located])

    def _left(self) -> Iterator[str]:
        """Yield what was not compared: recorded outputs by reason (for other weights, with the condition that excludes them),
        then what the comparison with the truth does not cover, and whose code the truth shares.
        """
        same = met_weights(self.data.resolved).get("same", [])
        steps = f"step={same[0]}" if len(same) == 1 else f"step in ({', '.join(map(str, same))})"
        known = f'--where "{steps}" excludes them' if same and None not in same else "pass that step's checkpoint as --model"
        left = Counter(next(iter(dump.not_compared.values()), "") for dump in self.owns if dump.verdict == NOT_COMPARED)
        for why, count in left.most_common():
            text = f"the outputs of the run in {count:,} of {plural(len(self.owns), 'dump')}: {why}"
            yield f"{text} ({known})" if why == OTHER_WEIGHTS else text
        if self.own is not None and self.own.verdict == MISMATCH and met_weights(self.data.resolved).get("unknown", 1):
            yield "whether the model has the weights of that step (run --hash-weights)"
        if self.comparison is not None:
            yield from self.comparison.unjudged
        if self.shared:
            yield f"modules of {', '.join(self.shared)} (shared with the truth)"


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

    If laws are checked, the model is also compared with transformers' own, and one input is judged module by module. Where that
    names nothing, causes are fitted to log-probs that are not the truth's.
    on_stage: called with the name of each stage as it begins. run: what runs it and the truth. callbacks: `on_event` of
    `run_replay`. Raises what `run_replay` raises. If the truth cannot be computed, the result's `no_truth` says why.
    """
    spec = replace(spec, locate=min(1, spec.config.laws))
    with WarmGroups(reopen=True) as warm:
        callbacks["warm"] = warm
        warm.share(spec.replay_id)
        on_stage(REPLAYING)
        run(store, spec, **callbacks)
        callbacks["run"] = run
        data = data_of(store, spec)
        if not any(result.status == PASSED for result in data.results):
            return CheckedReplay(data, no_truth="no input passed")
        warm.share(None)
        own = None
        if recorded:
            own = compare(store, spec.replay_id, RECORDED)
            on_stage(EXPLAINING)
            save(store, own := with_explanation(store, own, **callbacks))
        try:
            on_stage(TRUTH)
            truth = ensure_truth(store, spec.replay_id, **callbacks)
            on_stage(ROUNDING)
            rounding = ensure_rounding(store, spec.replay_id, **callbacks)
            noise = newest_for(store, spec.replay_id)
            record = compare(store, spec.replay_id, truth, rounding=rounding, noise=noise)
            local = verdict_of(data.results)
            if record.verdict == MISMATCH and (local is None or local.word != WRONG):  # no module was named
                on_stage(NAMING)
                record = with_explanation(store, record, **callbacks)
            save(store, record)
        except MachineFault as fault:
            fault.hint = f"fix that, then `actordbg compare {spec.replay_id} truth` continues"
            raise
        except ActordbgError as problem:
            return CheckedReplay(data, no_truth=problem.message, own=own)
        (data,) = load(store, [spec.replay_id]).replays  # with its comparisons
        return CheckedReplay(data, record, own=own, shared=_shared_code(store.replays / truth))


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
            blocks += [Heading(f"Replay against {against}", 2), *details(record, _WORST)]
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
