"""Rules about the curves of a run, and their judgment: `judge(curves_of(log))`.

Limits are those at which people of the field look at a run; each finding has figure and limit. A rule whose curves are not
there, or too short, is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from actordbg.base.units import plural
from actordbg.measure.align_logs import FALLS, RISES
from actordbg.measure.curves import LEAST, MISMATCH, SUMMED, SUPERVISED_LOSS, Curve, Curves, is_held_out_score
from actordbg.measure.log_lines import is_loss
from actordbg.records.finding import Finding, Findings, Rule, RuleOutcome

AUXILIARY = ("format", "tag", "length", "lang", "style", "think")
"""Words in the name of a reward's part that judges the form of an answer and not whether it is right."""

NEAR = 50
"""Steps on either side that a norm is held against."""
LEAST_DIGITS = {"gradient norm": 2, "entropy": None, "KL to the reference": None, "reward": 0, "response length": 2}
"""Quantities that change from step to step, and how many digits a figure has that stands for a fault where all steps have it:
norms after clipping, a KL without a reference and an entropy that is not computed are constant in healthy runs.
"""
Seen = tuple[str, int, float | None, float | None]
"""What breaks a rule: in words, since which step, how large it is, and the limit; both None where only that counts."""
Sightings = Iterator[Seen]
"""Every place where a rule is broken."""
Judge = Callable[[Curves], Sightings]


@dataclass(frozen=True)
class CurveRule:
    """A rule about curves. needs: the quantities that it looks at; without one of them it is not checked."""

    rule: Rule
    needs: tuple[str, ...]
    judge: Judge


def _finite(curves: Curves) -> Sightings:
    quantities = {curve.name: f"{quantity} ({curve.name})" for quantity, curve in reversed([*curves.of.items()])}
    for name, curve in curves.metrics.items():
        known = name in quantities or is_loss(name) or is_held_out_score(name)
        if known and curve.nonfinite:
            many = plural(len(curve.nonfinite), "step")
            said = f"{quantities.get(name, name)} is NaN or infinite at {many}"
            yield f"{said}, first at step {curve.nonfinite[0]}", curve.nonfinite[0], None, None


def _above(quantity: str, limit: float) -> Judge:
    """Return a judge that holds the last third of a quantity below a limit."""

    def judge(curves: Curves) -> Sightings:
        curve = curves.long(quantity)
        if curve and curve.late > limit:
            since = curve.since(limit)
            yield f"{curve.course}, above {limit:g} since step {since}", since, curve.late, limit

    return judge


def _mismatch(curves: Curves) -> Sightings:
    curve = curves.of["rollout mismatch"]
    return _above("rollout mismatch", MISMATCH[curve.name])(curves)


def _reference(curves: Curves) -> Sightings:
    curve, limit = curves.of["KL to the reference"], 0.05
    first, value = curve.steps[0], curve.values[0]
    if first <= 1 and abs(value) > limit:
        yield f"{curve.name} is {value:.3g} nats at step {first}", first, abs(value), limit


def _drift(curves: Curves) -> Sightings:
    curve, limit = curves.long("KL to the reference"), 0.5
    # A sum over an answer's tokens has another scale: there it counts only where nothing is learned with it.
    summed = curve is not None and curve.name in SUMMED and _learns(curves)
    if curve and curve.trend.word == RISES and curve.late > limit and not summed:
        said = f"{curve.course} nats"
        reward = curves.long("reward")
        if reward and reward.late_trend.word == RISES:
            said += f", and {reward.name} rises with it ({reward.early:.3g} to {reward.late:.3g})"
        yield said, curve.since(limit), curve.late, limit


def _learns(curves: Curves) -> bool:
    """Return whether a held-out score rises in the second half; the reward, where the run has none."""
    scores = curves.held_out or [curve for curve in [curves.long("reward")] if curve]
    return any(curve.late_trend.word == RISES for curve in scores)


def _solved(curves: Curves) -> bool:
    """Return whether a reward between 0 and 1 has come to 0.9: then little is left to explore, and entropy falls with reason."""
    reward = curves.long("reward")
    return reward is not None and min(reward.values) >= 0 and max(reward.values) <= 1 and reward.late >= 0.9


def _entropy(curves: Curves) -> Sightings:
    curve = curves.long("entropy")
    if not curve or curve.early <= 0 or _learns(curves):
        return
    share = curve.now / curve.early
    if curve.trend.word == FALLS and share < 0.1 and not _solved(curves):
        low = 0.1 * curve.early
        step = next(step for step, value in zip(curve.steps, curve.values, strict=True) if value < low)
        said = f"{curve.name} went from {curve.early:.3g} to {curve.now:.3g} nats, and no reward rises with it"
        yield said, step, share, 0.1
    elif curve.trend.word == RISES and share > 3:
        yield f"{curve.course} nats, and no reward rises with it", curve.since(3 * curve.early), share, 3.0


def _length(curves: Curves) -> Sightings:
    curve, limit = curves.long("response length"), 1.5
    if curve and curve.early > 0 and curve.trend.word == RISES and curve.late > limit * curve.early and not _learns(curves):
        since = curve.since(limit * curve.early)
        yield f"{curve.course} tokens, and no reward rises with it", since, curve.late / curve.early, limit


def _negative(curves: Curves) -> Sightings:
    curve, limit = curves.long("KL to the reference"), -0.05
    if curve and curve.late < limit and curve.name not in SUMMED:
        below = next(step for step, value in zip(curve.steps, curve.values, strict=True) if value < limit)
        yield f"{curve.course} nats, and a mean over the policy's own samples is not below 0", below, curve.late, limit


def _spikes(curves: Curves) -> Sightings:
    curve, limit = curves.long("gradient norm"), 10.0
    if not curve:
        return
    spikes = {}
    for at in range(LEAST // 2 + 1, len(curve.values)):
        before, after = curve.values[max(0, at - NEAR) : at], curve.values[at + 1 : at + 1 + NEAR]
        # A norm that falls or rises steadily, as at the start of a run, has larger ones on one side.
        usual = max(median(side) for side in (before, after) if side)
        spread = 1.4826 * median(abs(value - usual) for value in before + after)
        if usual > 0 and curve.values[at] > max(limit * usual, usual + 8 * spread):
            spikes[at] = usual
    if spikes:
        worst = max(spikes, key=lambda at: curve.values[at])
        value, usual, step = curve.values[worst], spikes[worst], curve.steps[worst]
        said = f"{curve.name} is {value:.3g} at step {step}, {value / usual:.0f} times the median of {usual:.3g} around it"
        yield f"{said}; {plural(len(spikes), 'such step')}", step, value / usual, limit
    yield from _risen(curve, limit)


def _diverges(curves: Curves) -> Sightings:
    return _risen(curves.of[SUPERVISED_LOSS], 1.5)


def _risen(curve: Curve, limit: float) -> Sightings:
    if curve.trend.word == RISES and curve.late > limit * curve.early > 0:
        yield curve.course, curve.since(limit * curve.early), curve.late / curve.early, limit


def _rate(curves: Curves) -> Sightings:
    curve, limit = curves.of["learning rate"], 0.2
    zeros = [run for run in _equal_runs(curve) if run.value == 0]
    longest = max(zeros, key=lambda run: run.count, default=None)
    least = min((value for value in curve.values if value > 0), default=1.0)
    loss = curves.of.get("loss")
    learns = _learns(curves) or (loss is not None and loss.trend.word == FALLS)
    rounded = least >= 1e-4 and learns  # four decimals make 0 of a rate with which something is learned
    if longest and longest.count > limit * len(curve.values) and not rounded:
        said = f"{curve.name} is 0 at {longest.count} steps in a row, of {len(curve.values)}"
        yield said, longest.step, longest.count / len(curve.values), limit


@dataclass(frozen=True)
class EqualRun:
    """Steps in a row with the same value. step: the first."""

    value: float
    step: int
    count: int


def _equal_runs(curve: Curve) -> list[EqualRun]:
    runs = [list(same) for _, same in groupby(zip(curve.values, curve.steps, strict=True), key=lambda pair: pair[0])]
    return [EqualRun(*same[0], len(same)) for same in runs]


def _moving(curves: Curves) -> Sightings:
    curve, limit = curves.long("gradient norm"), 0.2
    zeros = [] if curve is None else [step for step, value in zip(curve.steps, curve.values, strict=True) if value == 0]
    if curve and len(zeros) > limit * len(curve.values):
        share = len(zeros) / len(curve.values)
        yield f"{curve.name} is exactly 0 at {share:.0%} of the steps", zeros[0], share, limit


def _frozen(curves: Curves) -> Sightings:
    for quantity, digits in LEAST_DIGITS.items():
        curve = curves.long(quantity)
        if curve is None:
            continue
        longest = max(_equal_runs(curve), key=lambda run: run.count)
        value, count = longest.value, longest.count
        written = f"{abs(value):.12g}".replace(".", "")
        given = len(written.strip("0"))
        # Rewards of 0 and 1, and rounded figures, repeat by chance; six digits do not.
        by_chance = count < 5 or given < 6
        throughout = digits is not None and given >= digits and count == len(curve.values)
        at_limit = quantity == "response length" and given >= 2 and count >= LEAST
        if not by_chance or throughout or at_limit:
            yield f"{curve.name} is {value:.6g} at {count} steps in a row", longest.step, float(count), 5.0


def _reward(curves: Curves) -> Sightings:
    curve = curves.long("reward")
    if curve and curve.trend.word == FALLS and curve.late_trend.word == FALLS:
        best = curve.steps[curve.values.index(max(curve.values))]
        yield f"{curve.course} and still falls; the best step was {best}", best, curve.late, curve.early


def _held_out(curves: Curves) -> Sightings:
    reward = curves.long("reward")
    for curve in curves.held_out:
        if reward and reward.trend.word == RISES and curve.late_trend.word == FALLS:
            best = max(curve.values)
            said = f"{reward.course}, while {curve.name} fell from {best:.3g} to {curve.now:.3g}"
            yield said, curve.steps[curve.values.index(best)], curve.now, best


def _form(curves: Curves) -> Sightings:
    parts, limit = curves.reward_parts, 0.9
    form = [curve for curve in parts if any(word in curve.name.lower() for word in AUXILIARY)]
    whole = sum(abs(curve.late) for curve in parts)
    share = sum(abs(curve.late) for curve in form) / whole if whole else 0.0
    if len(form) < len(parts) and share > limit:
        others = ", ".join(f"{curve.name} {curve.late:.3g}" for curve in parts if curve not in form)
        said = f"{share:.0%} of the reward is {form[0].name} ({form[0].late:.3g}), beside {others}"
        yield said, form[0].steps[0], share, limit


def _scale(curves: Curves) -> Sightings:
    curve = curves.of["loss scale"]
    first, last = curve.values[0], curve.values[-1]
    if last <= 1 < first:
        yield f"{curve.name} fell from {first:g} to {last:g}", curve.steps[-1], last, 1.0


_RECORD = "record such a step: `actordbg dump enable --calls forward,loss --on nan`"
RULES = tuple(
    CurveRule(Rule(name, holds, remedy=remedy, fails=fails), needs, judge)
    for name, fails, holds, remedy, needs, judge in (
        ("finite curves", "NaN or infinity from step {step} on", "no figure is NaN or infinite", _RECORD, (), _finite),
        ("reference at start", "the reference differs from the policy before any update (step {step})",
         "the policy begins as its reference: KL 0",
         "load the reference from the policy's checkpoint, with equal dtype and chat template", ("KL to the reference",),
         _reference),
        ("KL bounded", "the policy drifts from its reference since step {step}",
         "the KL does not rise to a last third above 0.5 nats a token",
         "lower the learning rate or raise the KL coefficient; read that step's answers, as hacking raises rewards too",
         ("KL to the reference",), _drift),
        ("KL not negative", "the KL is negative since step {step}", "a KL is not below -0.05 nats a token",
         "a mean k3 cannot be negative: check its formula; for k1, sample with top-p 1 and score at the sampling temperature",
         ("KL to the reference",), _negative),
        ("rollout agrees", "log-probs of rollout engine and trainer disagree since step {step}",
         "engine and trainer differ by rounding only",
         "record a step (`actordbg dump enable --calls forward,loss`), then `actordbg explain --against rollout`",
         ("rollout mismatch",), _mismatch),
        ("entropy kept", "the policy stops exploring at step {step}",
         "entropy neither collapses below a tenth nor triples while no reward rises",
         "raise the upper clip bound or the entropy coefficient, or lower the learning rate", ("entropy",), _entropy),
        ("few ratios clipped", "many tokens' ratios are clipped since step {step}",
         "at most 0.2 of the tokens are clipped in the last third",
         "fewer updates on a batch, or a lower learning rate; `actordbg lint` compares ratio and old log-probs",
         ("clip fraction",), _above("clip fraction", 0.2)),
        ("groups differ", "most groups have equal rewards since step {step}, so they teach nothing",
         "at most half of the groups have equal rewards in the last third",
         "none solved: check grader and cut-off answers, then easier prompts; all solved: harder ones; both: dynamic sampling",
         ("groups without variance",), _above("groups without variance", 0.5)),
        ("answers end", "answers are cut off since step {step}",
         "at most 0.15 of the answers are cut off at the length limit in the last third",
         "raise the limit of new tokens, or mask truncated answers", ("truncated share",), _above("truncated share", 0.15)),
        ("length is earned", "answers grow without reward since step {step}", "answers that grow by half have rising scores",
         "a length penalty, or a loss normalized by a fixed length", ("response length", "reward"), _length),
        ("no norm spikes", "the gradient norm grows tenfold at step {step}",
         "no gradient norm is ten times those around it and eight deviations above them, and it does not grow tenfold",
         "record it: `actordbg dump enable --calls forward,loss --step N`, then `actordbg step`", ("gradient norm",), _spikes),
        ("steps move", "the gradient is 0 in many steps, first in step {step}",
         "at most 0.2 of the steps have a gradient of exactly 0",
         "look at the rewards of these steps: a group whose rewards are all equal has no advantage", ("gradient norm",),
         _moving),
        ("curves move", "a logged figure is stuck from step {step} on",
         "no figure of six digits stays equal for five steps, and no norm, reward or length throughout",
         "see what the trainer logs there: a figure not computed anew, a policy not updated, answers that all reach the limit",
         tuple(LEAST_DIGITS), _frozen),
        ("learning rate set", "the learning rate is 0 since step {step}", "the learning rate is not 0 for a fifth of the steps",
         "see the scheduler's number of steps, and whether it steps", ("learning rate",), _rate),
        ("loss falls", "the loss diverges since step {step}", "the loss of a supervised training does not grow by half",
         "lower the learning rate; `actordbg dump enable --calls forward,loss --step N`, then `actordbg step`",
         (SUPERVISED_LOSS,), _diverges),
        ("reward kept", "the reward falls since step {step}", "the reward does not fall over the run and its second half",
         "go back to the best step's checkpoint; `actordbg lint` and `actordbg step` on dumps of the steps after it",
         ("reward",), _reward),
        ("held-out follows", "the reward rises, but the held-out score falls since step {step}",
         "no held-out score falls while the reward rises",
         "go back to the best held-out step; read answers with high reward: if they cheat, correct the reward, else it overfits",
         ("reward", "held-out score"), _held_out),
        ("reward is the task's", "nearly all of the reward is for an answer's format, not its content",
         "at most 0.9 of the reward is for an answer's form",
         "grade answers known to be right: if they get 0, correct the grader; else easier prompts, or less weight on format",
         ("part of the reward",), _form),
        ("loss scale kept", "fp16 overflows: the loss scale fell to its end", "fp16's loss scale stays above 1",
         f"train in bf16; {_RECORD}", ("loss scale",), _scale),
    )
)  # fmt: skip
_ANY_LENGTH = (_finite, _reference, _scale)
"""Judges of what a single step can break."""


def judge(curves: Curves, subject: str = "") -> Findings:
    """Judge the curves of a run by all rules. A rule without its curves is not checked, and says which it needs."""
    return Findings([_outcome(each, curves) for each in RULES], subject)


def _outcome(each: CurveRule, curves: Curves) -> RuleOutcome:
    outcome = RuleOutcome(each.rule)
    missing = [name for name in each.needs if name not in curves.of]
    short = [name for name in each.needs if name not in missing and not curves.of[name].long]
    norm = curves.of.get("gradient norm") if "gradient norm" in each.needs else None
    if each.judge is _frozen and len(short) + len(missing) < len(each.needs):
        missing, short = [], []  # one of them will do
    if not curves.of:
        outcome.lacks = "a metric that is known"
    elif missing:
        outcome.lacks = f"{' and '.join(missing)} in the log"
    elif short and each.judge not in _ANY_LENGTH:
        outcome.lacks = f"{LEAST} steps of {' and '.join(short)}"
    elif norm and each.judge is not _frozen and {*norm.values} == {norm.values[0]} != {0}:
        outcome.lacks = f"a gradient norm that changes, before clipping: {norm.name} is {norm.values[0]:g} at all steps"
    else:
        outcome.looked_at = 1
        for said, step, size, limit in each.judge(curves):
            outcome.found.append(Finding(each.rule, said, {"step": step}, size=size, limit=limit))
    return outcome
