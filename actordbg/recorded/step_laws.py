"""Laws of recorded optimizer steps: what must hold between the losses of a step, of all ranks, and the calls before it.

The laws get all calls, trimmed (`RecordedCall.trim`). `recorded_laws.LAWS` has their table.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from dataclasses import replace
from itertools import combinations

import numpy as np

from actordbg.base.units import plural
from actordbg.document.blocks import EITHER, ROLLOUT, TRAINER, number
from actordbg.formats.dumpfile import IMPORTED
from actordbg.recorded.recorded_calls import HEAD, Answer, Calls, Numbers, RecordedCall, key_of, shifted, side_apart

MOVED = {True: 1e-4, False: 0.02}
"""Mean nats by which padding a row anew moves its log-probs at most, by fp32; measured 2e-6 and 6e-3."""
DROPPED = 0.1
"""Mean nats up to which the dropout of an adapter may be what moves a policy's log-probs from its reference's."""
IMPROBABLE, LONG = 30.0, 48
"""A row may appear twice if its actions are more likely than e^-30, or, without log-probs, fewer than this."""
FAR, AS_ANOTHER, ALIKE = 0.3, 0.1, 8
"""Log-probs are another row's, or another token's, if they are this far from their own (nats), this share of it from the other's,
over so many actions at least."""
NEARER, MANY = 0.4, 32
"""The share that is enough over so many actions. A policy that moved is off from both, and chance does not come so near."""
MOVES, ENOUGH = {True: 0.0, False: 1e-5}, 16
"""Learning rate above which an update moves a log-prob of so many actions, by fp32: weights in bf16 may not take a small step."""


def steps(calls: Iterable[RecordedCall]) -> Iterator[tuple[str, list[RecordedCall]]]:
    """Yield the losses of each optimizer step of a model, of all ranks, with the step in words."""
    steps: dict[tuple[str, int, str], list[RecordedCall]] = defaultdict(list)
    for call in calls:
        if call.is_loss and call.record.step is not None:
            steps[call.record.run, call.record.step, call.record.role or ""].append(call)
    for (_, step, role), losses in sorted(steps.items(), key=lambda item: (*item[0][:2], item[0][2] != "policy loss")):
        whose = " of the critic" if role == "critic loss" else ""
        yield f"step {step}{whose}", losses


def learns(losses: Calls) -> bool:
    """Check whether any row of a step has an action, or has none because masks were not recorded."""
    return any(call.counts is None or call.counts.any() for call in losses)


def actions(calls: Calls, answer: Answer) -> None:
    """Look for steps without an action."""
    for words, losses in steps(calls):
        answer.looked_at += 1
        if not learns(losses):
            truncated = [call.array("truncated") for call in losses]
            cut = losses[0].fact("mask_truncated") or all(each is not None and each.all() for each in truncated)
            rows = plural(sum(call.rows for call in losses), "row")
            why = ": every response was truncated" if cut else ""
            said = f"{words}: the action mask of all {rows} is empty{why}, so nothing is learned"
            answer.violated(losses[0], said)


def update(calls: Calls, answer: Answer) -> None:
    """Look for steps whose ratio is exactly 1, although updates came since their rows were first scored."""
    scored: dict[tuple[str, bytes], list[int]] = defaultdict(list)
    trained = dict[tuple[str, bytes], int]()
    for run, step, key in scored_rows(calls):
        if step is not None:
            scored[run, key].append(step)
    updated = set[Hashable]()
    for words, losses in steps(calls):
        first = losses[0]
        run, step = first.record.run, first.record.step
        assert step is not None
        if first.record.role != "policy loss":
            continue
        rows = [(run, key) for call in losses for key in call.row_keys]
        last = [max((at for at in scored[row] if at <= trained.get(row, step)), default=None) for row in rows]
        unlikely = [each for call in losses for each in (call.surprisal if call.surprisal is not None else np.zeros(call.rows))]
        for row, surprisal in zip(rows, unlikely, strict=False):
            if surprisal > IMPROBABLE:  # others may be sampled anew
                trained.setdefault(row, step)
        since = [at for at in last if at is not None]
        moves = [(run, at) in updated for at in range(min(since, default=step), step)]
        if updates(losses):
            updated.add((run, step))
        tokens = sum(int(call.counts.sum()) for call in losses if call.moved is not None and call.counts is not None)
        answer.lacks = "a loss after an update, of rows that were scored before it"
        if None in last or not since or max(since) == step or not any(moves) or tokens < ENOUGH or first.scaled:
            continue
        answer.looked_at += 1
        if not any(call.moved is None or call.moved.any() for call in losses):
            since_then = f"although {plural(sum(moves), 'update')} came since the rows were scored"
            said = f"{words}: every ratio is exactly 1, of {plural(tokens, 'token')}, {since_then}"
            answer.violated(first, said)


def reference(calls: Calls, answer: Answer) -> None:
    """Hold the reference to the policy before its first update, by the log-probs that a loss or a reference's forward has."""
    forwards = {
        (call.record.run, key): head
        for call in calls
        if call.record.role == "reference" and not call.is_loss
        for heads in call.heads.values()
        for key, head in zip(call.row_keys, heads, strict=False)
    }
    models = {(call.record.run, call.record.role): call.record.model_name for call in calls if call.record.model_name}
    unknown, updated, same = np.full(HEAD, np.nan), set[str](), defaultdict[str, list[tuple[bool, RecordedCall, str]]](list)
    for words, losses in steps(calls):
        first, apart = losses[0], [np.zeros(0)]
        if first.record.role != "policy loss":
            continue
        for call in losses:
            own, base = (call.heads.get(name) for name in ("log_probs", "base_action_log_probs"))
            sums = call.array("base_row_log_probs") if base is None else None
            if base is None and own is not None:
                base = np.array([forwards.get((call.record.run, key), unknown) for key in call.row_keys])
            if sums is not None and call.terms and call.surprisal is not None and call.counts is not None:
                apart.append(np.abs(call.surprisal + sums) / np.maximum(call.counts, 1))
            elif own is not None and base is not None and base.shape == own.shape:
                distances = np.abs(own - base)
                apart.append(distances[np.isfinite(distances)])
        every, run = np.concatenate(apart), first.record.run
        if run in updated and len(every) >= ENOUGH:
            same[run].append((not every.any(), first, words))
        if updates(losses):
            updated.add(run)
        if first.record.step != 0:
            answer.lacks = answer.lacks or "losses of a run's first step"
            continue
        policy, theirs = (models.get((run, role)) for role in ("policy", "reference"))
        other = policy and theirs and policy != theirs
        if (
            other or first.record.source == IMPORTED or first.fact("steps_of_process")
        ):  # another model by design, or a resumed run
            answer.lacks = "a reference of the policy's own model, and steps that count from the beginning of the run"
            continue
        if not len(every):
            answer.lacks = "log-probs of the reference at step 0 (in losses with a KL term, or forwards with --with-outputs)"
            continue
        mean, limit = float(every.mean()), MOVED[first.fp32]
        if first.record.actor.get("lora") and limit < mean <= DROPPED:
            answer.lacks = "an adapter without dropout"
            continue
        answer.looked_at += 1
        if mean > limit:
            said = f"{words}: nothing was updated, but the reference is {number(mean, 3)} nats from the policy (limit {limit:g})"
            answer.violated(first, said, size=mean)
    for of in same.values():
        answer.looked_at += len(of)
        if len(of) > 1 and all(equal for equal, *_ in of):  # one such step may be that in which a trainer renews its reference
            _, first, words = of[0]
            answer.violated(first, f"{words}: the policy was updated, but in {len(of)} steps its reference is exactly the policy")


def updates(losses: Calls) -> bool:
    """Check whether a step moves weights: it has a learning rate that does, and advantages that are not 0."""
    learned = any(call.weightless is None or not call.weightless.all() for call in losses)
    return learned and (rate := losses[0].array("lr")) is not None and float(rate.max()) > MOVES[losses[0].fp32]


def _of_others(known: Mapping[str, Numbers], answer: Answer) -> Iterator[tuple[str, Numbers, Numbers]]:
    """Yield the name and the log-probs of each other side, beside those of the loss, where they are not those of the loss."""
    own = known.get("log_probs")
    for name in ("rollout_log_probs", "old_log_probs", "base_action_log_probs"):
        if own is None or name not in known:
            continue
        if np.array_equal(known[name], own, equal_nan=True):
            answer.lacks = "log-probs beside those of the loss itself"
        else:
            yield name, known[name], own


def of_other_rows(calls: Calls, answer: Answer) -> None:
    for words, losses in steps(calls):
        losses = [call for call in losses if "log_probs" in call.heads]
        rows = [(call, row) for call in losses for row in range(call.rows)]
        names = set.intersection(*(set(call.heads) for call in losses)) if losses else set()
        known = {name: np.concatenate([call.heads[name] for call in losses]) for name in names}
        for name, said, own in _of_others(known, answer):
            answer.looked_at += len(rows)
            nearest: dict[int, tuple[float, int]] = {}
            far = (_apart(said, own) > FAR) & (_finite_ones(own) >= ALIKE)
            for at in np.flatnonzero(far).tolist():
                others = np.where(_finite_ones(own + said[at]) >= ALIKE, _apart(said[at], own), np.inf)
                nearest[at] = float(others.min() / others[at]), int(others.argmin())
            near = [at for at, (share, _) in nearest.items() if share < NEARER]
            # rows that are far from their own for another reason have few near ones, which do not change places
            swapped = sorted(nearest[at][1] for at in near) == near or len(near) * 2 > len(nearest)
            if not swapped or np.isfinite(own[near]).sum() < MANY:
                near = [at for at in near if nearest[at][0] < AS_ANOTHER]
            for call, row in [rows[at] for at in near[:1]]:
                text = f"{words}: {name} are those of another row, in {len(near)} of {plural(len(rows), 'row')}"
                answer.violated(call, text, row, side=side_apart(call, name))
        _blame_the_loss(answer)


def alignment(call: RecordedCall, answer: Answer) -> None:
    active: Numbers = call.active
    known = {name: np.where(active, values.astype("f8"), np.nan) for name, values in call.log_probs().items()}
    for name, said, own in _of_others(known, answer):
        bad, words = np.zeros(call.rows, bool), ""
        near = (_apart(said, own) < FAR / 2).all()  # nearer than any that is far without the columns that a shift drops
        for by in () if near else (-1, 1, -2, 2):
            moved = shifted(own, -by, np.nan)
            both = np.isfinite(own) & np.isfinite(moved) & np.isfinite(said)
            away, beside = (np.where(both, np.abs(said - each), 0.0).sum(1) for each in (own, moved))
            far = (np.isfinite(own).sum(1) >= ALIKE) & (away > FAR * both.sum(1))
            late = far & (beside < np.where(both.sum(1) >= MANY, NEARER, AS_ANOTHER) * away)
            if both[far].sum() >= MANY and beside[far].sum() < NEARER * away[far].sum():
                late = far
            if late.any():
                bad, words = late, f"{name} are shifted by {by:+} against those of the loss"
                break
        answer.rows(call, bad, words, side=side_apart(call, name))
    _blame_the_loss(answer)
    base, sums = known.get("base_action_log_probs"), call.array("base_row_log_probs")
    if base is not None and sums is not None:
        away = np.abs(np.nansum(base, 1) - sums) / active.sum(1)
        words = "the base's sums of rows are not those of its log-probs over their actions"
        answer.rows(call, away > MOVED[call.fp32], words, away, TRAINER)


def _blame_the_loss(answer: Answer) -> None:
    """Name the trainer where the log-probs of both sides are off against those of the loss: these came later."""
    if {ROLLOUT, TRAINER} <= {finding.side for finding in answer.found}:
        answer.found = [replace(finding, side=TRAINER) for finding in answer.found]


def _finite_ones(values: Numbers) -> Numbers:
    """Count the finite values of each row [R]."""
    return np.isfinite(values).sum(1)


def _apart(ours: Numbers, theirs: Numbers) -> Numbers:
    """Return the mean of |difference| of each row [R] over the columns that both have; 0 without any."""
    apart = np.abs(ours - theirs)
    known = np.isfinite(apart)
    return np.where(known, apart, 0.0).sum(1) / np.maximum(known.sum(1), 1)


def of_critics(calls: Calls, answer: Answer) -> None:
    """Hold the returns and values that a critic learns from to those of its rows in the losses of the policy."""
    rows = [(call, key, own) for call in calls for key, own in call.learned.items()]
    known = {(call.record.run, key, own) for call, key, own in rows if call.record.role == "policy loss"}
    of_policy = {(run, key) for run, key, _ in known}
    for call, key, own in rows:
        run, step = call.record.run, call.record.step
        if call.record.role != "critic loss" or (run, key) not in of_policy:
            continue
        answer.looked_at += 1
        if (run, key, own) not in known:
            said = f"step {step}: the critic's returns and values are not those of its row in the losses of the policy"
            return answer.violated(call, said, call.row_keys.index(key))


def groups(calls: Calls, answer: Answer) -> None:
    """Look for steps with a whole rollout whose prompts do not have as many rows as a prompt is sampled."""
    for words, losses in steps(calls):
        size = losses[0].fact("n_samples_per_prompt") or 0
        prompts = Counter(prompt for call in losses for prompt in call.prompts)
        acting = all(call.counts is not None and call.counts.all() for call in losses)  # else where a prompt ends is unknown
        if not has_rollout(losses) or not acting:
            answer.lacks = "the whole rollout in a step, with actions in every row"
            continue
        answer.looked_at += len(prompts)
        odd = [prompt for prompt, count in prompts.items() if count % size]
        if odd:
            call = next(call for call in losses if odd[0] in call.prompts)
            said = f"{words}: a prompt has {plural(prompts[odd[0]], 'row')}, and was sampled {size} times"
            answer.violated(call, said, call.prompts.index(odd[0]))


def has_rollout(losses: Calls) -> bool:
    """Check whether a step has all rows of a rollout, once each."""
    return rollout(losses) == sum(call.rows for call in losses) and is_whole(losses)


def rollout(losses: Calls) -> int:
    """Return how many rows the rollout of a step has; 0 if unknown, -1 if they may be of several, which a frozen policy made."""
    first = losses[0]
    made = (first.record.step or 0) * sum(call.rows for call in losses)
    samples, prompts, epochs = (first.fact(name) or 0 for name in ("n_samples_per_prompt", "rollout.batch_size", "max_epochs"))
    frozen = first.fact("freezing_steps")
    return samples * prompts if frozen in (None, -1) or made >= (frozen + 2) * samples * prompts * epochs else -1


def scored_rows(calls: Iterable[RecordedCall]) -> Counter[tuple[str, int | None, bytes]]:
    """Count how often the policy, whose role is not known at first, scored each row before the update, by run, step and key."""
    scores = (call for call in calls if not call.is_loss and call.record.grad_enabled is False)
    before = (call for call in scores if call.record.role in ("policy", None))
    return Counter((call.record.run, call.record.step, key) for call in before for key in call.row_keys)


def ratio(calls: Calls, answer: Answer) -> None:
    scored = scored_rows(calls)
    for words, losses in steps(calls):
        moved, tokens = 0.0, 0
        for call in losses:
            if call.moved is None or call.counts is None:
                continue
            for key, distance, count in zip(call.row_keys, call.moved, call.counts, strict=False):
                if scored[call.record.run, call.record.step, key]:
                    moved, tokens = moved + float(distance), tokens + int(count)
        if not tokens:
            answer.lacks = "forwards that scored the rows of a loss in the same step"
        else:
            answer.looked_at += 1
            mean, limit = moved / tokens, MOVED[losses[0].fp32]
            if not mean <= limit:
                said = f"{words}: no update since the old log-probs, but they differ by {number(mean, 3)} nats (limit {limit:g})"
                answer.violated(losses[0], said, size=mean)


def is_whole(losses: Calls) -> bool:
    """Check whether a step has the losses of all ranks and micro-batches."""
    by_rank: dict[int | None, list[RecordedCall]] = defaultdict(list)
    for call in losses:
        by_rank[call.record.rank].append(call)
    if len(by_rank) != (losses[0].record.world_size or 1):
        return False
    if (accumulation := losses[0].fact("engine_accumulation")) is not None:
        return bool(len(losses) == len(by_rank) * accumulation)
    for own in by_rank.values():  # of an adapter: the last has the norm of the step's gradient
        places = {call.fact("micro_batch"): call.fact("grad_norm") for call in own}
        if {*places} != {*range(len(own))} or places[len(own) - 1] is None:
            return False
    return True


def duplicates(calls: Calls, answer: Answer) -> None:
    seen: dict[Hashable, dict[bytes, str]] = defaultdict(dict)
    scored = scored_rows(calls)
    surprisals = {
        key: value
        for call in calls
        if call.surprisal is not None
        for key, value in zip(call.row_keys, call.surprisal, strict=False)
        if value  # 0 without actions
    }
    unlearned = {key for call in calls if call.record.grad_enabled is False for key in call.row_keys}
    for call in calls:
        record = call.record
        pairs = "context.labels" in record.tensors and _may_be_pairs(call, unlearned)
        unsure = not call.is_loss and (pairs or "action_mask" not in record.tensors)
        if (
            record.role == ROLLOUT or call.fact("loss.beta") or unsure
        ):  # an answer may be in several pairs, and a forward does not name its loss
            continue  # as sampled, perhaps for an evaluation; greedy rows are equal
        ranks = call.fact("dp_size")
        apart = ranks is not None and ranks == record.world_size
        together: Hashable = record.dump_id
        if call.is_loss and record.step is not None:  # ranks of a ring or of tensor parallelism have the same rows
            together = (record.run, record.step, record.role, None if apart else record.rank)
        repeated = np.zeros(len(call.row_keys), bool)
        for row, key in enumerate(call.row_keys):
            count = 0 if call.counts is None else call.counts[row]
            if call.counts is not None and not count:
                continue  # only fills a batch
            unlikely = not surprisals[key] <= IMPROBABLE if key in surprisals else count >= LONG
            repeated[row] = unlikely and key in seen[together]
            seen[together].setdefault(key, record.dump_id)
        key = next((call.row_keys[row] for row in repeated.nonzero()[0]), b"")
        first, times = seen[together].get(key, ""), scored[record.run, record.step, key] if apart else 0
        where = "" if first == record.dump_id else f" in {first}"
        known = ("", EITHER), (", and was scored once", TRAINER), (", and was scored as often", ROLLOUT)
        how, side = known[min(times, 2)]
        answer.rows(call, repeated, f"the same row is trained on twice in a step{where}{how}", side=side)
    _over_ranks(calls, answer, {key for key, value in surprisals.items() if value > IMPROBABLE})


def _may_be_pairs(call: RecordedCall, unlearned: Set[bytes]) -> bool:
    """Check whether labels may be of preferences: a reference scored a row too, or several answers share a prompt."""
    prompted = any(stem != key_of([]) for stem, *_ in call.beginnings)  # else all tokens but the first are trained on
    shared = prompted and len({*call.prompts}) < len({*call.row_keys})
    return call.imported or not unlearned.isdisjoint(call.row_keys) or shared


def _over_ranks(calls: Calls, answer: Answer, unlikely: set[bytes]) -> None:
    """Look for rows that two ranks have in files, which do not say how ranks divide rows: replicas of tensor and of context
    parallelism have all in common, others none. A rank whose rows are all another's may be a replica, of a file that was cut.
    """
    steps: dict[Hashable, dict[int, dict[bytes, tuple[RecordedCall, int]]]] = defaultdict(lambda: defaultdict(dict))
    for call in calls:
        if call.imported and call.is_loss and call.fact("dp_size") is None:
            of_rank = steps[call.record.run, call.record.step][call.record.rank]
            of_rank.update({key: (call, row) for row, key in enumerate(call.row_keys) if key in unlikely})
    for by_rank in steps.values():
        for (one, ours), (other, theirs) in combinations(sorted(by_rank.items()), 2):
            both = ours.keys() & theirs.keys()
            if both and len(both) < min(len(ours), len(theirs)):
                call, row = theirs[min(both)]
                said = f"ranks {one} and {other} both train on {plural(len(both), 'row')}, and each on others besides"
                answer.violated(call, f"step {call.record.step}: {said}", row)
                break
            if both:
                answer.lacks = f"whether ranks {one} and {other} are replicas: they have the same rows"
