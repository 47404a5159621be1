"""Laws of the losses of whole steps: by which formula they were computed, by what divided, which were applied, on which ranks.

`token_rewards` says what advantages were made of.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from actordbg.base.units import plural, release
from actordbg.document.blocks import EITHER, TRAINER, number
from actordbg.recorded.advantage_laws import estimated, misplaced, tolerance
from actordbg.recorded.loss_terms import BY_ROW, OF_CALLS, OF_STEPS, Terms, aggregation
from actordbg.recorded.mask_laws import NEVER
from actordbg.recorded.recorded_calls import LAST, LEAST, MOST, Answer, Calls, Numbers, RecordedCall
from actordbg.recorded.step_laws import ALIKE, AS_ANOTHER, FAR, MANY, is_whole, learns, scored_rows, steps, updates

LOSS_OFF = {True: 1e-4, False: 0.01}
"""Largest distance of a loss from its terms, relative to the sum of absolute terms, by fp32."""
UNRELATED = 0.3
"""A correlation of log-probs of the same tokens that two policies of one origin exceed: a tiny model with a third of noise in its
weights has 0.6, and another temperature 0.98.
"""
LARGE_RATE = 1e-3
"""A learning rate with which an update may move weights as far as they are from 0."""
SMALL = 1e-8
"""A learning rate times a KL coefficient, above which fp32 shows the KL penalty of a policy that was updated."""
WHOLE = 0.01
"""How near a factor, or its inverse, is to a whole number if it is believed of one micro-batch, which has any factor."""
ENOUGH_PARTS = 3
"""A step has so many micro-batches at least if a factor of one term is to be believed."""
ACCUMULATES_LAST = (0, 19)
"""The release of DeepSpeed (0.19.6 to 0.19.8) in which ZeRO 1 and 2 drop all but the last gradient; others were not tried."""


@dataclass(frozen=True)
class SummedStep:
    """A step whose losses were recomputed. given: what each micro-batch adds to the step's loss, [M]; wanted: by its terms.
    off: their distance. size: the sum of absolute terms. means: what is added up, in words.
    formula: another formula that gives these losses, in words, "" without one.
    """

    words: str
    first: RecordedCall
    given: Numbers
    wanted: Numbers
    off: float
    size: float
    means: str
    formula: str

    @property
    def sums(self) -> str:
        """Say what the losses are, and what they should be."""
        given, wanted = self.given.sum(), self.wanted.sum()

        return f"{self.words}: its losses add up to {number(given)}, their {self.means} is {number(wanted)}"


def summed(calls: Calls, answer: Answer) -> Iterator[SummedStep]:
    """Yield the whole steps of losses with a known formula."""
    for words, losses in steps(calls):
        first = losses[0]
        mode = aggregation(first.loss_attributes)
        count = OF_CALLS.get(mode, "")
        parts = [(call, float(loss)) for call in losses if call.terms and (loss := call.fact("loss")) is not None]
        why = {
            "a loss of a known formula, without other terms": len(parts) < len(losses),
            "whole steps, of all ranks": not (count or is_whole(losses)), "batches of a fixed size": first.fact("dynamic_batch"),
        }  # fmt: skip
        if lacks := next((name for name, lacking in why.items() if lacking), ""):
            answer.lacks = lacks
            continue
        total = Terms(*map(sum, zip(*(astuple(call.terms) for call, _ in parts), strict=True)))  # type: ignore[arg-type]
        known = total.divisor(first.loss_attributes)
        of_rows = "loss_agg_mode" in first.loss_attributes and mode.startswith("seq")
        if known is None or (of_rows and total.rows < sum(call.rows for call in losses)):
            answer.lacks = "what the losses of a step add up to, with actions in every row"  # trainers differ on rows without
            continue
        ranks, divisor = 1 if count else len({call.record.rank for call in losses}), known[0]
        by_rows = mode in (BY_ROW, "call-row-means")

        def normalized(terms: Sequence[Terms], by_row: bool = by_rows, by: float = divisor, of: int = ranks) -> Numbers:
            return np.array([(each.by_row if by_row else each.by_token) / by + each.apart / of for each in terms])

        given = np.array([loss / (ranks * (first.fact("engine_accumulation") or 1)) for _, loss in parts])
        given *= [float((count and call.fact(count)) or 1) for call, _ in parts]
        wanted = normalized([call.terms for call, _ in parts if call.terms])
        size = total.size / (total.tokens / (1 if mode == BY_ROW else max(total.rows, 1)) if by_rows else divisor)
        off = float(np.abs(given - wanted).sum())  # of each micro-batch: whole steps may cancel
        answer.looked_at += 1
        limit = LOSS_OFF[first.fp32] * size
        if size and math.isfinite(size) and not off <= limit:
            common = set.intersection(*(set(call.others) for call in losses))
            others = {name: normalized([call.others[name] for call in losses]) for name in sorted(common)}
            found = _formula(given, wanted, others, limit)
            yield SummedStep(words, first, given, wanted, off=off, size=size, means=known[1], formula=found)


def _formula(given: Numbers, wanted: Numbers, others: Mapping[str, Numbers], limit: float) -> str:
    """Return the formula that gives these losses, in words, "" without one. others: losses by other formulas."""
    made, fitted = dict(others), dict[str, Numbers]()
    for name, without in others.items():
        term = wanted - without
        if name.startswith("no ") and term.any():
            made[f"the {name[3:]} term with the opposite sign"] = without - term
            times = float((given - without) @ term / (term @ term))
            fitted[f"{number(times, 4)} times the {name[3:]} term"] = without + times * term
    for known in (made, fitted if len(given) >= ENOUGH_PARTS else {}):  # of fewer parts a factor can always be found
        off = {name: float(np.abs(given - losses).sum()) for name, losses in known.items()}
        if off and min(off.values()) <= limit:
            return min(off, key=lambda name: (round(off[name] / limit, 3), name))
    return ""


def formula(calls: Calls, answer: Answer) -> None:
    """Look for steps whose losses are those of another formula than the recorded settings say, or reward a KL."""
    for words, losses in steps(calls):
        coefficient = losses[0].fact("loss.kl_coef")
        if coefficient is not None and coefficient < 0:
            rewarded = f"the KL penalty's coefficient is {number(coefficient)}: distance from the base is rewarded"
            answer.violated(losses[0], f"{words}: {rewarded}")
    for step in summed(calls, answer):
        if step.formula:
            answer.violated(step.first, f"{step.sums}; they are those of {step.formula}", size=step.off / step.size)


def _counts(calls: Calls, answer: Answer) -> None:
    """Look for losses that are divided by another number of actions, or of rows, than the step's."""
    for words, losses in steps(calls):
        mode = aggregation(losses[0].loss_attributes)
        placed = {(key, call.record.rank) for call in losses for key in call.row_keys}
        apart = len({key for key, _ in placed}) == len(placed)  # ranks of tensor parallelism have the same rows
        if mode not in OF_STEPS or not apart or not is_whole(losses) or any(call.counts is None for call in losses):
            continue
        counts = np.concatenate([call.counts for call in losses])
        size, what = ((counts > 0).sum(), "rows") if mode == "call-row-means" else (counts.sum(), "actions")
        given = {call.fact(OF_STEPS[mode]) for call in losses}
        if size and None not in given and given != {size}:
            said = f"{words}: its losses are divided by {number(min(given))}, and it has {size} {what}"
            answer.violated(losses[0], said)


def normalization(calls: Calls, answer: Answer) -> None:
    _counts(calls, answer)
    for step in summed(calls, answer):
        if not step.formula:
            given, wanted = step.given, step.wanted
            factor = float(given @ wanted / (wanted @ wanted)) if wanted.any() else 0.0
            alike = np.abs(given - factor * wanted).sum() < step.off / 10
            of_one = len(given) == 1 and min(abs(each - round(each)) for each in (factor, 1 / (factor or 1))) > WHOLE
            times = f", {number(factor, 4)} times it" if alike and not of_one else ""
            answer.violated(step.first, step.sums + times, size=step.off / step.size)


def accumulation(calls: Calls, answer: Answer) -> None:
    for words, losses in steps(calls):
        first, by_rank = losses[0], Counter(call.record.rank for call in losses)
        since = release(first.record.versions.get("deepspeed", ""))[:2] >= ACCUMULATES_LAST
        if first.fact("engine_accumulation") is None or first.fact("dynamic_batch") is None:
            continue
        answer.looked_at += 1
        stage, most = first.record.actor.get("zero_stage"), max(by_rank.values())
        if since and first.fact("dynamic_batch") and most > 1 and stage in (1, 2):
            said = f"{words}: of {most} micro-batches under ZeRO {stage}, only the gradient of the last is applied"
            answer.violated(first, said)


def equal_calls(calls: Calls, answer: Answer) -> None:
    """Look for steps in which a rank made fewer or more calls with gradients than the others, where no call of it is missing."""
    models: dict[Hashable, list[RecordedCall]] = defaultdict(list)
    for call in calls:
        record = call.record
        if record.step is not None:
            models[record.run, record.rank, record.host, record.pid, record.instance, record.point].append(call)
    by_role: dict[tuple[str, str], list[list[RecordedCall]]] = defaultdict(list)
    for own in sorted(models.values(), key=lambda own: own[0].record.rank):
        own.sort(key=lambda call: call.record.call_index)
        last = own[-1].record  # the role of a model's first calls may be unknown
        by_role[last.run, last.role or "model"].append(own)
    for (_, role), of_ranks in sorted(by_role.items()):
        made = {own[0].record.rank: _calls_by_step(own) for own in of_ranks}
        if not 1 < len(made) == len(of_ranks):
            continue  # a rank that was there twice: another job of this run
        for step in sorted(set.intersection(*map(set, made.values()))):
            counts = {rank: known[step] for rank, known in made.items()}
            answer.looked_at += any(counts.values())
            (usual, many), *others = Counter(counts.values()).most_common()
            for count, _ in others[:1]:
                rank = next(rank for rank, own in counts.items() if own == count)
                call = next(call for own in of_ranks for call in own if call.record.step == step)
                said = f"step {step}: rank {rank} made {plural(count, 'call')} of the {role}, {plural(many, 'rank')} made {usual}"
                answer.violated(call, said)


def _calls_by_step(calls: Calls) -> dict[int, int]:
    """Count a model's calls with gradients, in their order, by step, for those steps of which none can be missing."""
    numbers, at = [call.record.call_index for call in calls], [call.record.step or 0 for call in calls]
    if numbers != [*range(numbers[0], numbers[0] + len(numbers))]:
        return {}
    ended = calls[-1].fact("grad_norm") is not None
    learning = Counter(call.record.step for call in calls if call.record.grad_enabled is not False)
    begun = numbers[0] > 0 or at[0] > 0  # calls are counted from when recording began, which may be in the middle of a step
    return {step: learning[step] for step in range(at[0] + begun, at[-1] + ended)}


def _beginnings(losses: Calls, one: str, other: str) -> tuple[Numbers, Numbers, Numbers] | None:
    """Return two sets of log-probs of the rows' first actions, [R, HEAD], and where both are known; None for too few."""
    both = [(call.heads[one], call.heads[other]) for call in losses if {one, other} <= call.heads.keys()]
    if not both:
        return None
    ours, theirs = map(np.concatenate, zip(*both, strict=True))
    known = np.isfinite(ours + theirs) & (ours > NEVER)
    return (ours, theirs, known) if known.sum() >= MANY else None


def agreement(calls: Calls, answer: Answer) -> None:
    """Look for log-probs of the rollout, or old ones, that do not follow those of the loss, or do so but at the first action.

    Where those two agree, an update as large as the weights may be why the loss's do not follow: a rate of 0.03 of Adam leaves a
    correlation of 0.2. So it may where the rollout's agreed with the loss's at an earlier step with such a rate.
    """
    updated: dict[str, float] = defaultdict(float)  # by run, the largest rate of a step at which they agreed
    answer.lacks = f"{MANY} actions of a step with log-probs of both sides"
    for words, losses in steps(calls):
        sampled = _beginnings(losses, "rollout_log_probs", "old_log_probs")
        own_old = sampled and np.abs(sampled[0] - sampled[1])[sampled[2]].mean() < FAR
        moved = losses[0].record.step and (own_old or updated[losses[0].record.run] >= LARGE_RATE)
        rate = losses[0].array("lr")
        for name in ("rollout_log_probs", "old_log_probs"):
            if (both := _beginnings(losses, name, "log_probs")) is None:
                continue
            said, own, known = both
            apart = np.where(known, np.abs(said - own), 0.0)
            mean, first, others = (
                float(apart[:, at].sum() / max(known[:, at].sum(), 1)) for at in (slice(None), 0, slice(1, None))
            )
            related = float(np.corrcoef(said[known], own[known])[0, 1])
            side, text = EITHER if name == "rollout_log_probs" else TRAINER, ""
            many = (apart[:, 0] > FAR).sum() >= max(ALIKE, known[:, 0].sum() / 2)
            if many and others < AS_ANOTHER * first and known[:, 1:].sum() >= MANY:
                text = f"{number(first, 3)} nats from those of the loss at the first action, {number(others, 3)} behind it"
            elif mean > FAR and not related > UNRELATED and not moved:
                text = f"{number(mean, 3)} nats from those of the loss, and do not follow them (correlation {related:.2f})"
            elif mean > FAR:
                why = "large updates, old rows, or another temperature (`explain` with a model says)"
                answer.lacks = f"{name} nearer than {mean:.2g} nats: {why}"
                answer.unjudged = f"{words}: {name}, {mean:.2g} nats from those of the loss: {why}"
                continue
            answer.looked_at += len(known)
            if name == "rollout_log_probs":
                if rate is not None and mean < FAR:
                    updated[losses[0].record.run] = max(updated[losses[0].record.run], float(rate.max()))
                answer.figures = [("rollout and trainer apart, by token", f"{mean:.2g} nats")]
            if text:
                answer.violated(losses[0], f"{words}: {name} are {text}", size=mean, side=side)


def advantages(calls: Calls, answer: Answer) -> None:
    flat_groups, groups = 0, 0
    weightless: list[Numbers] = []
    for words, losses in steps(calls):
        rows = [call.weightless for call in losses if call.weightless is not None]
        if not rows or not learns(losses):
            continue
        rewards: dict[bytes, list[float]] = defaultdict(list)
        for call in losses:
            given = call.array("rewards")
            for prompt, reward in zip(call.prompts, given.reshape(-1) if given is not None else (), strict=False):
                rewards[prompt].append(float(reward))
        several = [len(set(of)) == 1 for of in rewards.values() if len(of) > 1]
        flat, groups, flat_groups = sum(several), groups + len(several), flat_groups + sum(several)
        weightless += rows
        none = sum(map(len, rows)) > 1 and np.concatenate(rows).all()
        if none and flat and flat == len(rewards):
            answer.lacks = "a step whose prompts have different rewards: of equal ones, advantages are 0"
            continue
        answer.looked_at += 1
        if none:
            said, side = f"{words}: every advantage is 0, so nothing is learned", ""
            if any(len(set(of)) > 1 for of in rewards.values()):
                said, side = f"{said}, although rewards differ", TRAINER
            answer.violated(losses[0], said, side=side)
    if weightless:
        share = float(np.concatenate(weightless).mean())
        answer.figures.append(("rows without advantage", f"{share:.1%}"))
        if groups:
            answer.figures.append(("groups of a prompt with equal rewards", f"{flat_groups:,} of {groups:,}"))


def token_rewards(calls: Calls, answer: Answer) -> None:
    """Look for tokens before a row's last whose reward, by its returns, is more than a KL penalty, and for penalties left out."""
    scored, updated = scored_rows(calls), set[str]()
    for step in estimated(calls, answer):
        first, (least, most) = step.rows[0][0], step.estimates[:, [LEAST, MOST]].T
        run, estimator = first.record.run, first.fact("kl.estimator")
        if not np.isfinite(least + most).all():
            answer.lacks = "returns, and of GAE its values and lambda"
            continue
        answer.looked_at += len(step.rows)
        off = tolerance(step.estimates[:, LAST])
        above, moved = (most > off) & (not step.mixed or estimator in ("k2", "k3")), misplaced(step)
        bad = ((least < -off) & (not step.mixed) | above | moved).nonzero()[0]
        for row in bad[:1]:
            far = float(max(least[row], most[row], key=abs))
            said = f"by its returns, a token before the last of a row has the reward {number(far)}"
            expected = "a KL penalty only takes away" if step.mixed and not moved else "only the last has one"
            step.broken(answer, row, f"{said}, where {expected}", far, len(bad))
        own = dict.fromkeys(call for call, _ in step.rows)
        since = run in updated and all(scored[run, first.record.step, key] for call in own for key in call.row_keys)
        if since and step.mixed and estimator == "k1" and not (least.any() or most.any()):
            step.broken(answer, 0, "the policy was updated, and by their returns no token's reward has a KL penalty", 0.0)
        rate = first.array("lr")
        if rate is not None and updates([*own]) and float(rate.max()) * (first.fact("kl.init_coef") or 0.0) > SMALL:
            updated.add(run)
