"""Laws of recorded advantages: what a trainer's estimator makes of rewards, and what every result of it has in common.

`recorded_laws.LAWS` has their table. A row's value is its advantage, or, where the trainer whitens advantages, its return before.

| Estimator | A row's value | Source |
|---|---|---|
| gae | of each token: returns - values; whitened | OpenRLHF 0.11.2, `experience_maker.compute_advantages_and_returns` |
| reinforce, reinforce_baseline | r, r - mean of its group; whitened | the same |
| rloo | r - mean of the others in its group | the same |
| dr_grpo, group_norm | r - mean, (r - mean) / (std + 1e-9) of its group | the same |
| flash_reinforce | r - mean of the rollout | the same |
| grpo-group, -batch | (r - mean of its group) / (std + 1e-4), std of the group or of the rollout | TRL 1.16, `scale_rewards` |
| grpo-none | r - mean of its group | the same |
| slime's, in files | r, which is normalized before | slime 624b824, `ray/rollout.py` |
| NeMo-RL's, in files | (r - mean of the others) / (their std + 1e-6), of its group | NeMo-RL 7ea279a, `advantage_estimator.py` |

Standard deviations of rewards are those of samples (n - 1); whitening uses all tokens of a rollout (n). A KL penalty in the
reward and a discount give each token a value of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from actordbg.base.units import plural
from actordbg.document.blocks import number
from actordbg.recorded.recorded_calls import COUNT, FIRST, HIGH, LAST, LEAST, LOW, MOST, Answer, Calls, Numbers, RecordedCall
from actordbg.recorded.step_laws import has_rollout, of_critics, rollout, steps

OFF = 1e-3
"""Distance of a value from what an estimator gives, relative to the largest value of the step or to 1, that rounding explains."""
FLAT = 0.01
"""Standard deviation of whitened advantages below which all returns were equal but for rounding."""


@dataclass(frozen=True)
class Estimator:
    """How rewards become advantages. baseline: whose mean is subtracted: of the "group", of the "others" in it, of the "batch".
    scale: whose standard deviation, and `least`, divides, as for baseline. whitened: then all tokens get mean 0 and standard
    deviation 1.
    by_token: each token has a value of its own.
    """

    baseline: str = ""
    scale: str = ""
    least: float = 0.0
    whitened: bool = False
    by_token: bool = False


ESTIMATORS = {
    "gae": Estimator(whitened=True, by_token=True), "reinforce": Estimator(whitened=True),
    "reinforce_baseline": Estimator("group", whitened=True), "rloo": Estimator("others"), "dr_grpo": Estimator("group"),
    "group_norm": Estimator("group", "group", 1e-9), "flash_reinforce": Estimator("batch"),
    "grpo-group": Estimator("group", "group", 1e-4), "grpo-batch": Estimator("group", "batch", 1e-4),
    "grpo-none": Estimator("group"),
}  # fmt: skip
"""The estimators, by the name that is recorded (`advantage.estimator`)."""
FROM_FILES = (Estimator(), Estimator("others", "others", 1e-6))
"""Estimators of trainers that are known by their files only: slime's and NeMo-RL's."""
AGREE, ROWS = 0.75, 8
"""An estimator that is not recorded is that with which more than this share of the rows agrees, of so many rows at least."""


@dataclass(frozen=True)
class EstimatedStep:
    """A step whose estimator is known. rows: (call, row) of each row with actions. estimates: theirs, see `RecordedCall`.
    groups: the rows of each group of a prompt that is whole. rollout: how many rows a rollout has, 0 if unknown. whole: the step
    has all of them. of_one_rollout: rollouts divide into steps of its size. mixed: rewards have a KL penalty.
    """

    words: str
    of: Estimator
    rows: list[tuple[RecordedCall, int]]
    estimates: Numbers
    groups: list[list[int]]
    samples: int
    rollout: int
    whole: bool
    of_one_rollout: bool
    mixed: bool

    @property
    def values(self) -> Numbers:
        """Each row's value, [R]: the reward of its last action where that is known, else its first advantage."""
        rewards = self.estimates[:, LAST]
        return rewards if np.isfinite(rewards).all() else self.estimates[:, FIRST]

    @property
    def imported(self) -> bool:
        """Check whether the step was read from files, which do not name its estimator."""
        return bool(self.rows) and self.rows[0][0].imported

    @property
    def has_values(self) -> bool:
        """Check whether rows have values: rewards have no KL penalty, and are known, or each token has the same advantage."""
        known = bool(np.isfinite(self.estimates[:, LAST]).all())
        return not self.mixed and (known or not (self.of.by_token or self.of.whitened))

    def broken(self, answer: Answer, row: int, words: str, size: float, many: int = 1) -> None:
        """Add a violation in a row. many: how many rows have it."""
        call, at = self.rows[row]
        of = f", in {many} of {plural(len(self.rows), 'row')}" if many > 1 else ""
        answer.violated(call, f"{self.words}: {words}{of}", at, float(size))


def estimated(calls: Calls, answer: Answer) -> Iterator[EstimatedStep]:
    """Yield the steps whose estimator is known, with at least one finite advantage."""
    for words, losses in steps(calls):
        first = losses[0]
        if first.record.role != "policy loss" or not all(call.estimates is not None for call in losses):
            continue
        estimates = np.concatenate([call.estimates for call in losses])
        used = estimates[estimates[:, COUNT] > 0, LOW : HIGH + 1]
        if not np.isfinite(used).all():
            continue  # `finite` says so
        if first.imported:
            if first.estimated is None:  # the laws of advantages ask one after another
                first.estimated = (_as_most_rows(words, losses, estimates),)
            (step,) = first.estimated
        else:
            of = ESTIMATORS.get(first.fact("advantage.estimator") or "")
            step = None if of is None else _estimated_step(words, losses, estimates, of)
        if step is None:
            answer.lacks = "an estimator of advantages that is known"
        else:
            yield step


def _estimated_step(words: str, losses: Calls, estimates: Numbers, of: Estimator) -> EstimatedStep:
    """Build a step under an estimator. estimates: of all rows, see `RecordedCall`."""
    first, counts = losses[0], estimates[:, COUNT]
    mixed = bool(first.fact("kl.init_coef")) and not first.fact("kl.use_loss")
    discounts = first.fact("advantage.estimator") == "reinforce" and first.fact("advantage.gamma") not in (None, 1)
    every = [(call, row) for call in losses for row in range(call.rows)]
    samples, size = first.fact("n_samples_per_prompt") or 0, rollout(losses)
    whole = first.imported or has_rollout(losses)
    members: dict[bytes, list[int]] = defaultdict(list)
    kept = (counts > 0).nonzero()[0].tolist()
    for at, (call, row) in enumerate(every[place] for place in kept if whole):  # else a group may be in several steps
        members[call.prompts[row]].append(at)
    if first.imported:  # what a file calls returns need not be what its advantages are made of
        estimates = estimates.copy()
        estimates[:, [LAST, LEAST, MOST, COUNT + 3, COUNT + 4, COUNT + 5]] = np.nan
        samples = max(map(len, members.values()), default=0)
        size = samples * len(members)
    groups = [group for group in members.values() if len(group) == samples]
    return EstimatedStep(
        words=words,
        of=replace(of, by_token=of.by_token or mixed or discounts),
        rows=[every[place] for place in kept],
        estimates=estimates[kept],
        groups=groups,
        samples=samples,
        rollout=size,
        whole=whole,
        of_one_rollout=size % len(every) == 0,
        mixed=mixed,
    )


def _as_most_rows(words: str, losses: Calls, estimates: Numbers) -> EstimatedStep | None:
    """Return an imported step under the estimator that nearly all rows agree with; None without one, or without rewards.

    A file does not name it. Rows that disagree are few then, so that they are the exception and not the rule.
    """
    best: tuple[float, EstimatedStep | None] = (AGREE, None)
    step = _estimated_step(words, losses, estimates, Estimator())
    if (rewards := _rewards(step)) is None:
        return None
    for of in (*ESTIMATORS.values(), *FROM_FILES):
        if of.whitened or of.by_token:
            continue
        step = replace(step, of=replace(of, by_token=step.of.by_token))
        wanted = _values(step, rewards)
        known = np.isfinite(wanted)
        if known.sum() < ROWS or np.ptp(wanted[known]) < OFF:
            continue
        share = max(_share(sign * step.values[known], wanted[known]) for sign in (1, -1))  # `from_rewards` names the other sign
        if share > best[0]:
            best = share, step
    return best[1]


def _share(values: Numbers, wanted: Numbers) -> float:
    """Return the share of values that are the wanted ones, but for rounding."""
    return float((np.abs(values - wanted) <= tolerance(wanted)).mean())


def advantage_of_row(calls: Calls, answer: Answer) -> None:
    """Look for rows whose advantages differ from token to token."""
    for step in estimated(calls, answer):
        if step.of.by_token:
            answer.lacks = "an estimator that gives a row one advantage"
            continue
        answer.looked_at += len(step.rows)
        low, high = step.estimates[:, LOW : HIGH + 1].T
        bad = (high - low > tolerance(low, high)).nonzero()[0]
        for row in bad[:1]:
            said = f"the advantages of a row are {number(low[row])} to {number(high[row])}, where its estimator gives one"
            step.broken(answer, row, said, high[row] - low[row], len(bad))


def bound(calls: Calls, answer: Answer) -> None:
    """Look for advantages beyond what rewards over their own standard deviation can give."""
    for step in estimated(calls, answer):
        size = {"group": step.samples, "batch": step.rollout}.get(step.of.scale, 0)
        if step.of.by_token or min(size, step.samples) < 2:
            answer.lacks = "advantages that are divided by the rewards' standard deviation"
            continue
        # a row at distance d leaves -d to the G - 1 others of its group: the sum of squares is at least d^2 G / (G - 1)
        limit = math.sqrt((size - 1) * (step.samples - 1) / step.samples)
        answer.looked_at += len(step.rows)
        low, high = step.estimates[:, LOW : HIGH + 1].T
        largest = np.where(-low > high, low, high)
        bad = (np.abs(largest) > limit * (1 + OFF)).nonzero()[0]
        for row in bad[:1]:
            said = (
                f"an advantage of {number(largest[row])} is beyond what {size} rewards over their std can give ({number(limit)})"
            )
            step.broken(answer, row, said, largest[row], len(bad))


def group_mean(calls: Calls, answer: Answer) -> None:
    """Look for groups whose values do not have mean 0."""
    for step in estimated(calls, answer):
        if step.of.baseline not in ("group", "others") or not step.has_values or step.imported:
            answer.lacks = "values of rows whose group's mean was subtracted"
            continue
        values = step.values
        clip = step.rows[0][0].fact("reward.clip_range") if step.rows else None
        free = [group for group in step.groups if not clip or _inside(values[group], clip)]
        answer.looked_at += len(free)
        means = np.array([values[group].mean() for group in free])
        bad = (np.abs(means) > tolerance(values)).nonzero()[0]
        for at in bad[:1]:
            said = (
                f"the advantages of a group of {step.samples} have mean {number(float(means[at]))}, where their estimator gives 0"
            )
            step.broken(answer, free[at][0], f"{said}, in {len(bad)} of {plural(len(free), 'group')}", means[at])
        if not free:
            answer.lacks = "whole groups of a prompt"


def from_rewards(calls: Calls, answer: Answer) -> None:
    """Recompute the values of rows from their rewards."""
    for step in estimated(calls, answer):
        rewards = _rewards(step)
        if rewards is None or not step.has_values:
            answer.lacks = "rewards, of which each row got one value"
            continue
        wanted = _values(step, rewards)
        known = np.isfinite(wanted)
        answer.looked_at += int(known.sum())
        values = step.values
        off = tolerance(wanted[known])
        bad = (known & (np.abs(values - wanted) > off)).nonzero()[0]
        turned = bad.size > 0 and _share(-values[known], wanted[known]) > AGREE
        if step.imported and not turned:  # advantages may be clipped or shaped later; those of another row are neither
            largest = np.abs(values[known]).max()
            clipped = (wanted[bad] / values[bad] > 1) & (np.abs(values[bad]) >= largest - off)
            of_another = (np.abs(values[bad, None] - wanted[known]) <= off).any(1)
            bad = bad[of_another & ~clipped]
        for row in bad[:1]:
            others = step.imported or np.allclose(np.sort(values[known]), np.sort(wanted[known]), atol=off)
            said = f"the advantage of a row is {number(float(values[row]))}, and its reward gives {number(float(wanted[row]))}"
            if turned:
                said += ": it has the other sign"
            elif others:
                said += ": it is another row's"
            step.broken(answer, row, said, values[row] - wanted[row], len(bad))


def _rewards(step: EstimatedStep) -> Numbers | None:
    """Return each row's reward, [R]; None if not all rows have one."""
    known: dict[RecordedCall, Numbers] = {call: call.array("rewards") for call in dict.fromkeys(call for call, _ in step.rows)}
    if any(each is None for each in known.values()):
        return None
    return np.array([known[call].reshape(-1)[row] for call, row in step.rows], "f8")


def _values(step: EstimatedStep, rewards: Numbers) -> Numbers:
    """Return what the estimator makes of the rewards [R]; NaN where not all rows are known that it looked at."""
    unknown = np.full(len(rewards), np.nan)
    wanted = rewards.copy() if not step.of.baseline else unknown
    if step.whole and step.of.baseline == "batch":
        wanted = rewards - rewards.mean()
    if step.groups and step.of.baseline in ("group", "others"):
        groups = np.array(step.groups)  # [groups, samples]
        own, size = rewards[groups], step.samples
        by_others = (own.sum(1, keepdims=True) - own) / max(size - 1, 1)
        wanted[groups] = own - (own.mean(1, keepdims=True) if step.of.baseline == "group" else by_others)
        if step.of.scale == "group" and size > 1:
            wanted[groups] /= own.std(1, ddof=1, keepdims=True) + step.of.least
        if step.of.scale == "others" and size > 2:
            spread = np.stack([np.delete(own, at, 1).std(1, ddof=1) for at in range(size)], 1)
            wanted[groups] /= np.where(spread > 0, spread + step.of.least, 1.0)
    if step.of.scale == "batch":
        wanted = wanted / (rewards.std(ddof=1) + step.of.least) if step.whole and len(rewards) > 1 else unknown
    clip = step.rows[0][0].fact("reward.clip_range")
    return np.clip(wanted, *clip) if clip else wanted


def misplaced(step: EstimatedStep) -> bool:
    """Check whether rewards are, by their returns, those of earlier actions than the last."""
    if (rewards := _rewards(step)) is None or len(rewards) < ROWS:
        return False
    wanted, estimates = _values(step, rewards), step.estimates
    earlier = np.abs(estimates[:, LEAST : MOST + 1] - wanted[:, None]).min(1)
    return bool(np.nansum([np.abs(estimates[:, LAST]), earlier], 1).max() < np.nansum(np.abs(wanted)) / 10)


def whitening(calls: Calls, answer: Answer) -> None:
    """Look for rollouts whose whitened advantages do not have mean 0 and standard deviation 1."""
    for step in estimated(calls, answer):
        if part := _whitened_apart(step):
            answer.looked_at += 1
            step.broken(answer, 0, f"each {part} is whitened alone, so that equal returns have different advantages", 1.0)
            continue
        if not step.of.whitened or not step.whole:
            answer.lacks = "the whole rollout in a step, and an estimator that whitens"
            continue
        answer.looked_at += 1
        mean, std, count = _moments(step.estimates)
        keeps = bool(step.rows[0][0].fact("advantage.no_std_norm")) or std < FLAT
        if abs(mean) > OFF * max(std, 1.0) or (abs(std - 1) > OFF and not keeps):
            expected = "mean 0" if keeps else "mean 0 and std 1"
            said = f"whitened advantages have mean {number(mean)} and std {number(std)} over {count:,.0f} tokens, not {expected}"
            step.broken(answer, 0, said, mean if abs(mean) > OFF else std)


def _moments(estimates: Numbers) -> tuple[float, float, float]:
    """Return mean and standard deviation of the advantages of rows, over their tokens, and how many these are."""
    count, total, squares = map(float, estimates[:, COUNT : COUNT + 3].sum(0))
    mean = total / count
    return mean, math.sqrt(max(squares / count - mean * mean, 0.0)), count


def _whitened_apart(step: EstimatedStep) -> str:
    """Return which parts of a step were whitened alone, "rank" or "micro-batch"; "" if none were, or all agree with the step's
    returns, as whitened together.
    """
    away = _from_line(step)
    if not step.of.whitened or away is None or not away.any():
        return ""
    for name, field in ("rank", "rank"), ("micro-batch", "dump_id"):
        keys = [getattr(call.record, field) for call, _ in step.rows]
        parts = [step.estimates[[own == key for own in keys]] for key in dict.fromkeys(keys)]
        if len(parts) > 1 and all(map(_is_whitened, parts)):
            return name
    return ""


def _is_whitened(estimates: Numbers) -> bool:
    mean, std, count = _moments(estimates)
    return abs(mean) <= OFF and min(abs(std - 1), abs(std - math.sqrt(1 - 1 / count))) <= OFF  # of all tokens, or of samples


def _from_line(step: EstimatedStep) -> Numbers | None:
    """Return how far the advantages of each row are from a line through their returns, 0 within rounding; None if open."""
    count, a, aa, r, ar, rr = step.estimates[:, COUNT:].T
    n, spread = count.sum(), rr.sum() - r.sum() ** 2 / count.sum()
    if not np.isfinite(rr).all() or spread <= 1e-9 * rr.sum():
        return None
    slope = (ar.sum() - a.sum() * r.sum() / n) / spread
    slope, start = (slope, (a.sum() - slope * r.sum()) / n) if step.of.whitened else (1.0, 0.0)
    left = aa - 2 * (slope * ar + start * a) + slope**2 * rr + 2 * slope * start * r + count * start**2
    away: Numbers = np.sqrt(np.maximum(left, 0.0) / count)
    return np.where(away > 10 * OFF * max(math.sqrt(aa.sum() / n), OFF), away, 0.0)


def from_returns(calls: Calls, answer: Answer) -> None:
    """Hold advantages to the returns, less the values, that they were made of: a line for all tokens of a step."""
    of_critics(calls, answer)
    for step in estimated(calls, answer):
        away = _from_line(step)
        if away is None or (step.of.whitened and (not step.of_one_rollout or _whitened_apart(step))):
            answer.lacks = "returns that differ, in losses; whitened together, if their estimator whitens"
            continue
        answer.looked_at += len(step.rows)
        if away.any():
            worst, bad = int(away.argmax()), int(np.count_nonzero(away))
            said = f"the advantages of a row are {number(float(away[worst]))} from what its returns give"
            step.broken(answer, worst, said, away[worst], bad)


def _inside(values: Numbers, limits: Sequence[float]) -> bool:
    low, high = limits
    return bool((values > low + OFF).all() and (values < high - OFF).all())


def tolerance(*values: Numbers) -> float:
    largest = [float(np.abs(each).max(initial=0.0)) for each in values]
    return OFF * max([1.0, *largest])
