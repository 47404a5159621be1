"""Laws of recorded data: what must hold in every healthy training, whatever its model. Pure: calls in, answers out.

A law sees either each call alone, or all calls with their tensors dropped (`RecordedCall.trim`). It counts what it looked at; a
law that looked at nothing was not checked. Tokens outside of the action mask are never compared: they have placeholders.
`LAWS` is the table: to add a law, write a function and a row.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import astuple

import numpy as np

from actordbg.base.units import plural, release
from actordbg.document.blocks import EITHER, ROLLOUT, TRAINER, number
from actordbg.judge.recorded_calls import (
    BY_ROW,
    VALUES,
    Answer,
    Numbers,
    RecordedCall,
    RecordedLaw,
    Terms,
    Violation,
    aggregation,
)  # fmt: skip

POSITIVE = {True: 1e-3, False: 0.05}
"""Nats above 0 that rounding may lift a log-prob, by whether the model computes in fp32."""
UNLIKELY, ALONE = -1e-3, 0.05
"""Below this log-prob, in nats, another side cannot have computed exactly 0; with top-p, so far below its logarithm."""
MOVED = {True: 1e-4, False: 0.02}
"""Mean nats by which padding a row anew moves its log-probs at most, by fp32; measured 2e-6 and 6e-3."""
LOSS_OFF = {True: 1e-4, False: 0.01}
"""Largest distance of a loss from its terms, relative to the sum of absolute terms, by fp32."""
IMPROBABLE, LONG = 30.0, 48
"""A row may appear twice if its actions are more likely than e^-30, or, without log-probs, fewer than this."""
ACCUMULATES_LAST = (0, 19)
"""The release of DeepSpeed in which ZeRO 1 and 2 were seen to drop all but the last gradient; earlier ones were not tried."""
FAR, AS_ANOTHER, ALIKE = 0.3, 0.1, 8
"""A row's log-probs are another row's if they are this far from its own (nats), this share of it from the other's, over so many
actions at least."""
USUAL_END = 0.5
"""Share of the rows whose last action must be the same token for it to count as the end token."""


def _side_of(name: str) -> str:
    """Return the side that a tensor comes from."""
    return ROLLOUT if name == "rollout_log_probs" else TRAINER


def _lengths(calls: Sequence[RecordedCall], answer: Answer) -> None:
    for call in calls:
        mask, real = call.array("action_mask"), call.real
        if mask is None or real is None or call.active is None:
            continue
        answer.looked_at += 1
        odd = [
            f"{name} is {list(values.shape)}"
            for name in ("log_probs", "action_log_probs", "old_log_probs", "rollout_log_probs", "advantages", *VALUES)
            if (values := call.array(name)) is not None and values.shape != mask.shape
        ]
        if mask.shape[1] >= real.shape[1]:
            odd.append(f"sequences are {list(real.shape)}")
        if odd:
            answer.violations.append(Violation(call.record.dump_id, f"the action mask is {list(mask.shape)}; {', '.join(odd)}"))
            continue
        padded = (call.active & ~real[:, -mask.shape[1] :]).any(1)
        answer.rows(call, padded, "the action mask covers padding: it is shifted")


def _finite(calls: Sequence[RecordedCall], answer: Answer) -> None:
    for call in calls:
        named = dict(call.log_probs())
        for name in ("advantages", *VALUES):
            values = call.array(name)
            if values is not None and call.active is not None and values.shape == call.active.shape:
                named[name] = values
        for name, values in named.items():
            bad: Numbers = ~np.isfinite(values) & call.active
            answer.rows(call, bad.any(1), f"{name} is not finite under the action mask", side=_side_of(name))
        if (loss := call.array("loss")) is not None:
            answer.rows(call, ~np.isfinite(loss).reshape(1), "the loss is not finite")


def _positive(calls: Sequence[RecordedCall], answer: Answer) -> None:
    for call in calls:
        for name, values in call.log_probs().items():
            assert call.active is not None
            highest = np.where(call.active, values, -1.0).max(1, initial=-1.0)
            answer.rows(call, highest > POSITIVE[call.fp32], f"{name} is above 0 under the action mask", highest, _side_of(name))


def _zeros(call: RecordedCall, name: str, other: str) -> Numbers | None:
    """Mark actions whose log-prob is exactly 0.0, and by another side is not, bool [B, A]; None if that cannot be told."""
    known = call.log_probs()
    greedy = name == "rollout_log_probs" and call.fact("rollout.top_k") == 1  # every token is then certain
    if name not in known or other not in known or greedy:
        return None
    top_p = call.fact("rollout.top_p") if name == "rollout_log_probs" else None  # a token may be alone in its nucleus
    least = math.log(top_p) - ALONE if isinstance(top_p, float) and 0 < top_p < 1 else UNLIKELY
    return (known[name] == 0) & (known[other] < least) & call.active


def _ahead(call: RecordedCall) -> Numbers | None:
    """Mark actions before the rollout's first log-prob, bool [B, A]: those of a prompt. None if that cannot be told."""
    if (zeros := _zeros(call, "rollout_log_probs", "old_log_probs")) is None:
        return None
    said = (call.log_probs()["rollout_log_probs"] != 0) & call.active
    return zeros & said.any(1)[:, None] & (said.cumsum(1) == 0)


def _placeholder(calls: Sequence[RecordedCall], answer: Answer) -> None:
    for call in calls:
        for name, other in (("rollout_log_probs", "old_log_probs"), ("old_log_probs", "log_probs")):
            if (bad := _zeros(call, name, other)) is None:
                continue
            if name == "rollout_log_probs" and (ahead := _ahead(call)) is not None:
                bad = bad & ~ahead  # which the mask's law names
            worst = -np.where(bad, call.log_probs()[other], 0.0).min(1, initial=0.0)
            words = f"{name} is exactly 0.0 at an action whose {other.replace('_', ' ')} say otherwise"
            answer.rows(call, bad.any(1), words, worst, _side_of(name))


def _mask(calls: Sequence[RecordedCall], answer: Answer) -> None:
    for call in calls:
        said = call.log_probs().get("rollout_log_probs")
        for by in (-1, 1, -2, 2) if said is not None else ():
            assert call.active is not None
            bad = call.active.any(1) & (_moved(said != 0, by) == call.active).all(1) & (call.active != (said != 0)).any(1)
            if bad.sum() * 2 > call.active.any(1).sum():
                words = f"the action mask is shifted by {by:+} against the log-probs of the rollout"
                answer.rows(call, bad, words, side=TRAINER)
                break
        else:
            if (ahead := _ahead(call)) is not None and ahead.any():
                many = int(ahead.sum(1).max())
                side = TRAINER if many > 1 else EITHER  # an engine may leave out its first log-prob
                words = f"the action mask begins {plural(many, 'token')} before the rollout's first log-prob"
                answer.rows(call, ahead.any(1), words, side=side)
    single = [call for call in calls if call.holes is not None and call.fact("multi_turn") is False]
    for call in single:
        assert call.holes is not None
        answer.rows(call, call.holes, "one response, but its action mask has a hole or ends before its last token")
    silent = [call for call in calls if call.holes is not None and call.fact("multi_turn") is None]
    if not any(call.holes is not None and call.holes.any() for call in silent):
        answer.looked_at += sum(call.rows for call in silent)


def _alignment(calls: Sequence[RecordedCall], answer: Answer) -> None:
    for call in calls:
        active: Numbers = call.active
        known = {name: np.where(active, values.astype("f8"), np.nan) for name, values in call.log_probs().items()}
        for name in ("rollout_log_probs", "old_log_probs", "base_action_log_probs"):
            if name not in known or "log_probs" not in known:
                continue
            own, said, bad = known["log_probs"], known[name], np.zeros(call.rows, bool)
            enough, words = (np.isfinite(own).sum(1) >= ALIKE) & (_apart(said, own) > FAR), ""
            for by in (-1, 1, -2, 2):
                shifted = enough & (_apart(said, _moved(own, -by, np.nan)) < AS_ANOTHER * _apart(said, own))
                if shifted.sum() * 2 > max(int(enough.sum()), 1):
                    bad, words = shifted, f"{name} are shifted by {by:+} against those of the loss"
            answer.rows(call, bad, words, side=_side_of(name))


def _moved(mask: Numbers, by: int, fill: float = 0) -> Numbers:
    """Return a mask or values [B, A] shifted by some columns, without what leaves them; what comes in is `fill`."""
    moved, size = np.full_like(mask, fill), mask.shape[1] - abs(by)
    moved[:, max(by, 0) : max(by, 0) + size] = mask[:, max(-by, 0) : max(-by, 0) + size]
    return moved


def _end_token(calls: Sequence[RecordedCall]) -> int | None:
    """Return the id that ends responses: the model's, else that of most rows; None if rows end with various ids."""
    recorded = {call.fact("eos_token_id") for call in calls if call.is_loss} - {None}  # a critic's trainer has none
    if len(recorded) == 1 and type(only := recorded.pop()) is int:
        return only
    ends = Counter(int(last) for call in calls if call.ends is not None for last in call.ends[:, 1] if last >= 0)
    (usual, count), *_ = ends.most_common(1) or [(0, 0)]
    return usual if count > USUAL_END * ends.total() else None


def _ends(calls: Sequence[RecordedCall], answer: Answer) -> None:
    if (end := _end_token(calls)) is None:
        return
    for call in calls:
        if call.ends is not None:
            answer.rows(call, (call.ends == end).all(1), f"the response ends with its end token {end} twice")


def _truncation(calls: Sequence[RecordedCall], answer: Answer) -> None:
    said = [call for call in calls if call.ends is not None and call.array("truncated") is not None]
    said = [call for call in said if call.fact("multi_turn") is not True]  # an environment may end a turn without an end token
    if not said or (end := _end_token(said)) is None:
        return
    longest = max(int(call.counts.max(initial=0)) for call in said if call.counts is not None)
    for call in said:
        truncated, ends, counts = call.array("truncated"), call.ends, call.counts
        assert truncated is not None and ends is not None and counts is not None
        bad = (ends[:, 1] != end) & (ends[:, 1] >= 0) & (truncated.reshape(-1) == 0)
        words = f"the response lacks its end token {end}, and is not reported as truncated"
        if (bad & (counts == longest)).any():
            words += f" at the longest length, {longest:,}"
        answer.rows(call, bad, words)


def _response_length(calls: Sequence[RecordedCall], answer: Answer) -> None:
    for call in calls:
        said, counts, spans = call.array("response_length"), call.counts, call.spans
        if said is None or counts is None or spans is None:
            continue
        said = said.reshape(-1)
        bad = said != counts
        by_span = ", but the span from the first action to the last" if (said == spans)[bad].all() else ""
        answer.rows(call, bad, f"response_length is not the number of actions{by_span}", said - counts)


def _steps(calls: Iterable[RecordedCall]) -> Iterator[tuple[str, list[RecordedCall]]]:
    """Yield the losses of each optimizer step of a model, of all ranks, with the step in words."""
    steps: dict[tuple[str, int, str], list[RecordedCall]] = defaultdict(list)
    for call in calls:
        if call.is_loss and call.record.step is not None:
            steps[call.record.run, call.record.step, call.record.role or ""].append(call)
    for (_, step, role), losses in sorted(steps.items(), key=lambda item: (*item[0][:2], item[0][2] != "policy loss")):
        yield f"step {step}{' of the critic' * (role == 'critic loss')}", losses


def _advantages(calls: Sequence[RecordedCall], answer: Answer) -> None:
    flat_groups, groups = 0, 0
    weightless: list[Numbers] = []
    for words, losses in _steps(calls):
        rows = [call.weightless for call in losses if call.weightless is not None]
        if not rows:
            continue
        rewards: dict[bytes, set[float]] = defaultdict(set)
        members: Counter[bytes] = Counter()
        for call in losses:
            given = call.array("rewards")
            for prompt, reward in zip(call.prompts, given.reshape(-1) if given is not None else (), strict=False):
                rewards[prompt].add(float(reward))
                members[prompt] += 1
        groups += sum(count > 1 for count in members.values())
        flat_groups += sum(len(rewards[prompt]) == 1 for prompt, count in members.items() if count > 1)
        answer.looked_at += 1
        weightless += rows
        if sum(map(len, rows)) > 1 and np.concatenate(rows).all():
            differ = any(len(of) > 1 for of in rewards.values())
            said = f"{words}: every advantage is 0, so nothing is learned" + ", although rewards differ" * differ
            answer.violations.append(Violation(losses[0].record.dump_id, said, side=TRAINER * differ))
    if weightless:
        share = float(np.concatenate(weightless).mean())
        answer.figures.append(("rows without advantage", f"{share:.1%}"))
        if groups:
            answer.figures.append(("groups of a prompt with equal rewards", f"{flat_groups:,} of {groups:,}"))


def _of_other_rows(calls: Sequence[RecordedCall], answer: Answer) -> None:
    for words, losses in _steps(calls):
        losses = [call for call in losses if "log_probs" in call.heads]
        rows = [(call, row) for call in losses for row in range(call.rows)]
        own = np.concatenate([call.heads["log_probs"] for call in losses]) if losses else np.zeros((0, 0))
        for name in ("rollout_log_probs", "old_log_probs", "base_action_log_probs"):
            if not rows or not all(name in call.heads for call in losses):
                continue
            answer.looked_at += len(rows)
            said, moved = np.concatenate([call.heads[name] for call in losses]), []
            for at in ((_apart(said, own) > FAR) & (np.isfinite(own).sum(1) >= ALIKE)).nonzero()[0]:
                others = np.where(np.isfinite(own + said[at]).sum(1) >= ALIKE, _apart(said[at], own), np.inf)
                if others.min() < AS_ANOTHER * others[at]:
                    moved.append(rows[at])
            for call, row in moved[:1]:
                text = f"{words}: {name} are those of another row, in {len(moved)} of {plural(len(rows), 'row')}"
                answer.violations.append(Violation(call.record.dump_id, text, row, side=_side_of(name)))


def _apart(ours: Numbers, theirs: Numbers) -> Numbers:
    """Return the mean of |difference| of each row [R] over the columns that both have; 0 without any."""
    apart = np.abs(ours - theirs)
    known = np.isfinite(apart)
    return np.where(known, apart, 0.0).sum(1) / np.maximum(known.sum(1), 1)


def _scored(calls: Iterable[RecordedCall]) -> Counter[Hashable]:
    """Count how often the policy, whose role is not known at first, scored each row before the update, by run, step and key."""
    scores = (call for call in calls if not call.is_loss and call.record.grad_enabled is False)
    before = (call for call in scores if call.record.role in ("policy", None))
    return Counter((call.record.run, call.record.step, key) for call in before for key in call.row_keys)


def _ratio(calls: Sequence[RecordedCall], answer: Answer) -> None:
    scored = _scored(calls)
    for words, losses in _steps(calls):
        moved, tokens = 0.0, 0
        for call in losses:
            if call.moved is None or call.counts is None:
                continue
            for key, distance, count in zip(call.row_keys, call.moved, call.counts, strict=False):
                if scored[call.record.run, call.record.step, key]:
                    moved, tokens = moved + float(distance), tokens + int(count)
        if tokens:
            answer.looked_at += 1
            mean, limit = moved / tokens, MOVED[losses[0].fp32]
            if not mean <= limit:
                said = f"{words}: no update since the old log-probs, but they differ by {number(mean, 3)} nats (limit {limit:g})"
                answer.violations.append(Violation(losses[0].record.dump_id, said, size=mean))


def _is_whole(losses: Sequence[RecordedCall]) -> bool:
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


def _normalization(calls: Sequence[RecordedCall], answer: Answer) -> None:
    for words, losses in _steps(calls):
        first = losses[0]
        parts = [(call.terms, float(loss)) for call in losses if call.terms and (loss := call.fact("loss")) is not None]
        if len(parts) < len(losses) or not _is_whole(losses) or first.fact("dynamic_batch"):
            continue
        total = Terms(*map(sum, zip(*(astuple(terms) for terms, _ in parts), strict=True)))
        mode, known = aggregation(first.loss_attributes), total.divisor(first.loss_attributes)
        of_rows = "loss_agg_mode" in first.loss_attributes and mode.startswith("seq")
        if known is None or (of_rows and total.rows < sum(call.rows for call in losses)):
            continue  # trainers differ on rows without actions
        ranks = len({call.record.rank for call in losses})
        shares = ranks * (first.fact("engine_accumulation") or 1)
        wanted = np.array([(terms.by_row if mode == BY_ROW else terms.by_token) / known[0] for terms, _ in parts])
        given = np.array([loss / shares for _, loss in parts])
        size = total.size / (total.tokens if mode == BY_ROW else known[0])
        off = float(np.abs(given - wanted).sum())  # of each micro-batch: whole steps may cancel
        answer.looked_at += 1
        if size and not off <= LOSS_OFF[first.fp32] * size:
            factor = float(given @ wanted / (wanted @ wanted)) if wanted.any() else 0.0
            times = f", {number(factor, 4)} times it" if np.abs(given - factor * wanted).sum() < off / 10 else ""
            said = f"{words}: its losses add up to {number(given.sum())}, their {known[1]} is {number(wanted.sum())}{times}"
            answer.violations.append(Violation(first.record.dump_id, said, size=off / size))


def _accumulation(calls: Sequence[RecordedCall], answer: Answer) -> None:
    for words, losses in _steps(calls):
        first, by_rank = losses[0], Counter(call.record.rank for call in losses)
        since = release(first.record.versions.get("deepspeed", ""))[:2] >= ACCUMULATES_LAST
        if first.fact("engine_accumulation") is None or first.fact("dynamic_batch") is None:
            continue
        answer.looked_at += 1
        stage, most = first.record.actor.get("zero_stage"), max(by_rank.values())
        if since and first.fact("dynamic_batch") and most > 1 and stage in (1, 2):
            said = f"{words}: of {most} micro-batches under ZeRO {stage}, only the gradient of the last is applied"
            answer.violations.append(Violation(first.record.dump_id, said))


def _duplicates(calls: Sequence[RecordedCall], answer: Answer) -> None:
    seen: dict[Hashable, dict[bytes, str]] = defaultdict(dict)
    scored = _scored(calls)
    surprisals = {
        key: value
        for call in calls
        if call.surprisal is not None
        for key, value in zip(call.row_keys, call.surprisal, strict=False)
    }
    for call in calls:
        record, apart = call.record, call.fact("dp_size") == call.record.world_size
        together: Hashable = record.dump_id
        if call.is_loss and record.step is not None:  # ranks of a ring or of tensor parallelism have the same rows
            together = (record.run, record.step, record.role, None if apart else record.rank)
        repeated = np.zeros(len(call.row_keys), bool)
        for row, key in enumerate(call.row_keys):
            count = 0 if call.counts is None else call.counts[row]
            unlikely = not surprisals[key] <= IMPROBABLE if key in surprisals else count >= LONG
            repeated[row] = unlikely and key in seen[together]
            seen[together].setdefault(key, record.dump_id)
        key = next((call.row_keys[row] for row in repeated.nonzero()[0]), b"")
        first, times = seen[together].get(key, ""), scored[record.run, record.step, key] if apart else 0
        where = "" if first == record.dump_id else f" in {first}"
        known = ("", EITHER), (", and was scored once", TRAINER), (", and was scored as often", ROLLOUT)
        how, side = known[min(times, 2)]
        answer.rows(call, repeated, f"the same row is trained on twice in a step{where}{how}", side=side)


def _groups(calls: Sequence[RecordedCall], answer: Answer) -> None:
    prompts: dict[Hashable, bytes] = {}
    for call in calls:
        index, size = call.array("index"), call.fact("n_samples_per_prompt")
        if index is None or not size or not call.prompts:
            continue
        odd = np.zeros(call.rows, bool)
        step = call.record.run, call.record.role, call.record.step  # a critic may have trained before its policy did
        for row, (number_, prompt) in enumerate(zip(index.reshape(-1), call.prompts, strict=False)):
            if call.counts is not None and call.counts[row]:  # else where its prompt ends is unknown
                odd[row] = prompts.setdefault((*step, int(number_) // size), prompt) != prompt
        answer.rows(call, odd, "a row of a group has another prompt than the group")


def _temperature(calls: Sequence[RecordedCall], answer: Answer) -> None:
    seen: dict[tuple[str, bytes], float] = {}
    for call in calls:
        ours, asked = call.record.temperature, call.fact("rollout.temperature")
        each = call.array("temperatures", "temperature")
        if each is not None and each.ndim == 2:
            answer.rows(call, each.min(1) != each.max(1), "the temperature changes within a row", side=ROLLOUT)
        if ours is None:
            continue
        if asked is not None:
            answer.rows(call, np.full(1, asked != ours), f"sampled at temperature {asked:g}, scored at {ours:g}")
        if call.record.role == "policy" and call.row_keys:
            others = np.array([seen.setdefault((call.record.run, key), ours) for key in call.row_keys])
            answer.rows(call, others != ours, f"scored at temperature {ours:g}, elsewhere at another one", others - ours)


def _sampling(calls: Sequence[RecordedCall], answer: Answer) -> None:
    for call in calls:
        level, top_p, top_k = (call.fact(name) for name in ("loss.is_correction_level", "rollout.top_p", "rollout.top_k"))
        if level is None or (top_p is None and top_k is None):
            continue
        cut = [f"top_p {top_p:g}"] * (top_p is not None and top_p < 1) + [f"top_k {top_k}"] * (top_k is not None and top_k > 0)
        words = f"importance correction is on, and sampling was cut to {' and '.join(cut)}"
        corrected = level != "off" or call.fact("loss.is_corrected") is True
        answer.rows(call, np.full(1, bool(cut) and corrected), words)


_LOSSES = "policy losses (dump enable --calls forward,loss)"
_SCORES = "log-probs (dump enable --with-outputs, or --calls forward,loss)"
LAWS = (
    RecordedLaw(
        "lengths", "log-probs, advantages and the action mask have one shape, and the mask covers real tokens only",
        "eval-protocol PR#457", "shift the mask by one: column j of A is token S - A + j", "an action mask", TRAINER, _lengths,
    ),
    RecordedLaw(
        "finite", "log-probs, advantages and losses are finite", "NeMo-RL#2100",
        "replay that dump, and explain it: `actordbg replay`, `actordbg explain`", _SCORES, TRAINER, _finite,
    ),
    RecordedLaw(
        "log-probs", "no log-prob is above 0", "verl#2656", "normalize: log_softmax over the whole vocabulary, in fp32",
        _SCORES, TRAINER, _positive,
    ),
    RecordedLaw(
        "mask", "the actions of a single response are contiguous and end with its last token", "SkyRL PR#354",
        "build the mask from the sampled ids, not from their text", "the kind of rollout, in losses, for rows with holes",
        EITHER, _mask,
    ),
    RecordedLaw(
        "alignment", "the log-probs of rollout, old policy and base are those of their own tokens", "ms-swift PR#8196",
        "align log-probs with tokens: the log-prob at t is of the id at t + 1", _LOSSES, EITHER, _alignment,
    ),
    RecordedLaw(
        "rows", "the log-probs of rollout, old policy and base are those of their own row", "open-instruct#1473",
        "match results by id, not by order", _LOSSES, EITHER, _of_other_rows, True,
    ),
    RecordedLaw(
        "placeholder", "no log-prob of an action is a placeholder 0.0", "SkyRL PR#2148",
        "mask tokens that the engine did not sample (an appended end token, tool output)", _LOSSES, ROLLOUT, _placeholder,
    ),
    RecordedLaw(
        "end", "a response ends with one end token", "open-instruct PR#1041",
        "append an end token only if the engine returned none, and then without a mask", "actions, most with one last token",
        ROLLOUT, _ends, True,
    ),
    RecordedLaw(
        "truncation", "a response without an end token is reported as truncated", "NeMo-RL PR#4042",
        "take truncated from the finish_reason of every turn", _LOSSES, ROLLOUT, _truncation, True,
    ),
    RecordedLaw(
        "response length", "response_length counts the actions", "OpenRLHF#1243", "use action_mask.sum(-1) instead of the span",
        _LOSSES, TRAINER, _response_length,
    ),
    RecordedLaw(
        "advantages", "a step has advantages that are not 0", "torchforge PR#571",
        "look at the rewards: drop groups whose rewards are all equal, or sample more", _LOSSES, "", _advantages, True,
    ),
    RecordedLaw(
        "ratio", "before the first update, the ratio is 1", "slime#774",
        "compute old log-probs by the same weights, temperature and dtype as in training",
        f"{_LOSSES} and the forwards of old log-probs", TRAINER, _ratio, True,
    ),
    RecordedLaw(
        "normalization", "the losses of all micro-batches and ranks add up to the loss of one batch", "ms-swift#10117",
        "divide by the step's tokens (or rows) over all ranks and micro-batches", f"whole steps of {_LOSSES}",
        TRAINER, _normalization, True,
    ),
    RecordedLaw(
        "accumulation", "every micro-batch's gradient is applied", "OpenRLHF 0.11.2 with DeepSpeed 0.19.6",
        "use ZeRO 3, or drop --train.dynamic_batch_enable", _LOSSES, TRAINER, _accumulation, True,
    ),
    RecordedLaw(
        "duplicates", "no row is in a step twice", "open-instruct#1473",
        "check the sampler of each rank and the order of results", "rows", EITHER, _duplicates, True,
    ),
    RecordedLaw(
        "groups", "all rows of a group have the same prompt", "open-instruct PR#1483",
        "sort results by their index before grouping", "the index of each row", TRAINER, _groups, True,
    ),
    RecordedLaw(
        "temperature", "a row is sampled and scored at one temperature", "trl#4159",
        "divide the logits by the sampling temperature on both sides", "rows scored twice, or the sampling settings",
        TRAINER, _temperature, True,
    ),
    RecordedLaw(
        "sampling", "importance correction is not combined with top_p or top_k", "trl#6789",
        "sample with top_p 1 and no top_k, or replay the engine's sampling mask", _LOSSES, ROLLOUT, _sampling,
    ),
)  # fmt: skip
"""The laws, in the order in which they are named. A fault of shapes or masks comes before what it would also break."""
