"""Laws of the action mask and of what ends a response: actions were sampled by the engine, from the first to one end token.

`recorded_laws.LAWS` has their table.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from typing import TypeAlias

import numpy as np

from actordbg.actor.hub_model import first_letters
from actordbg.base.units import plural
from actordbg.document.blocks import EITHER, ROLLOUT, TRAINER
from actordbg.recorded.recorded_calls import Answer, Calls, Numbers, RecordedCall, key_of, shifted, side_of

Beginning: TypeAlias = tuple[bytes, int, int]
"""See `RecordedCall.beginnings`."""

UNLIKELY, ALONE, NUCLEUS = -1e-3, 0.05, math.log(0.5)
"""Below this log-prob, in nats, another side cannot have computed exactly 0; with top-p, so far below its logarithm; that of the
least top-p of a file that does not name it.
"""
NEVER = -100.0
"""A log-prob in nats with which no token is ever sampled: a placeholder."""
USUAL_END = 0.5
"""Share of the rows whose last action must be the same token for it to count as the end token."""
LATE, FEW, VERIFIED, CHANCE, NEARLY_ALL = 3, 8, 4, 5.0, 0.9
"""Fewest prompts that show a late mask, and rows that show an early end; rows of each kind whose rewards are compared;
values that the rewards of a verifier have; standard errors beyond chance; the share of rows that is nearly all.
"""


def beginning(call: RecordedCall, answer: Answer) -> None:
    bos, ids, real = call.record.actor.get("bos_token_id"), call.sequences, call.array("attention_mask")
    if type(bos) is not int or ids is None or real is None or real.shape != ids.shape or ids.shape[1] < 2:
        return
    at = np.minimum((real != 0).argmax(1), ids.shape[1] - 2)
    rows = np.arange(len(ids))
    answer.rows(call, (ids[rows, at] == bos) & (ids[rows, at + 1] == bos), f"the row begins with its BOS token {bos} twice")


def spanned(mask: Numbers) -> Numbers:
    """Mark each row of a mask [B, A] from its first column that is set to its last."""
    return np.logical_or.accumulate(mask, 1) & np.logical_or.accumulate(mask[:, ::-1], 1)[:, ::-1]


def _scorer(call: RecordedCall) -> str:
    """Return the name of the log-probs that the rollout's are held against: the old ones, or else those of the loss."""
    return "old_log_probs" if "old_log_probs" in call.log_probs() else "log_probs"


def _zeros(call: RecordedCall, name: str, other: str) -> Numbers | None:
    """Mark actions whose log-prob is exactly 0.0, and by another side is not, or have none of the engine (a null in a file),
    bool [B, A]; None if that cannot be told.
    """
    known, of_engine = call.log_probs(), name == "rollout_log_probs"
    certain = call.fact("rollout.top_k") == 1 or call.fact("rollout.min_p")  # greedy, or a token may be left alone
    if name not in known or (of_engine and certain):
        return None
    said, by_other = known[name], known.get(other, np.zeros_like(known[name]))
    top_p = call.fact("rollout.top_p") if of_engine else None  # a token may be alone in its nucleus
    least = math.log(top_p) - ALONE if isinstance(top_p, float) and 0 < top_p < 1 else UNLIKELY
    alone = call.active & (said == 0) & (by_other > NUCLEUS)
    if of_engine and call.imported and alone.any():  # files do not name top_p; whatever it is, tokens above it have 0
        likely = by_other[alone].min()
        least = likely if by_other[call.active & (said < 0)].max(initial=NUCLEUS) < likely + 2 * ALONE else least
    return ((said == 0) & (by_other < least) | of_engine & call.imported & np.isnan(said)) & call.active


def _spoken(call: RecordedCall) -> Numbers:
    """Mark actions with a log-prob of the engine, bool [B, A]."""
    return (np.nan_to_num(call.log_probs()["rollout_log_probs"]) != 0) & call.active


def _ahead(call: RecordedCall) -> Numbers:
    """Mark actions before the rollout's first log-prob, bool [B, A]: those of a prompt. no action where that cannot be told."""
    if (zeros := _zeros(call, "rollout_log_probs", _scorer(call))) is None:
        return np.zeros_like(call.active)
    said, scored, advantages = _spoken(call), call.log_probs().get(_scorer(call)), call.array("advantages")
    if scored is not None and advantages is not None and advantages.shape == zeros.shape:
        empty = call.active & ~said & (scored == 0) & (advantages == 0)  # where no side has anything, nothing was sampled
        zeros = zeros | (empty & (advantages != 0).any(1)[:, None])
    return zeros & said.any(1)[:, None] & (said.cumsum(1) == 0)


def _unsampled(call: RecordedCall) -> tuple[Numbers, bool] | None:
    """Mark actions that the engine gave no log-prob for between some that it sampled, several in a row, bool [B, A]; and return
    whether most of these runs begin behind the token that ends a turn. None if that cannot be told.
    """
    zeros, ids = _zeros(call, "rollout_log_probs", _scorer(call)), call.actions
    if zeros is None or ids is None or call.ends is None:
        return None
    spoken = _spoken(call)
    between: Numbers = call.active & ~spoken & spanned(spoken)
    runs = between & (shifted(between, 1) | shifted(between, -1))
    runs = runs & ((runs & zeros).sum(1, keepdims=True) > 1)
    ahead = Counter[int](ids[shifted(runs & ~shifted(runs, 1), -1)].tolist())
    (usual, count), *_ = ahead.most_common(1) or [(0, 0)]
    return runs, 2 * count > ahead.total() and (count > 1 or usual in call.ends[:, 1])


def named(call: RecordedCall) -> Numbers:
    """Mark actions without a log-prob of the engine that the laws of the mask and of the environment name, bool [B, A]."""
    ahead, tools = _ahead(call), _unsampled(call)
    return ahead if tools is None else ahead | tools[0]


def environment(call: RecordedCall, answer: Answer) -> None:
    """Look for the tokens of a tool among the actions: without a log-prob of the engine, between those that it sampled."""
    if (found := _unsampled(call)) is None:
        return
    bad, turns = found[0].any(1), call.counts != call.spans
    if (bad | turns).any():
        many = plural(int(found[0].sum()), "token")
        words = f"{many} between those that the engine sampled count as actions, without a log-prob of it"
        answer.rows(call, bad, words, side=TRAINER if found[1] else EITHER)


def placeholder(call: RecordedCall, answer: Answer) -> None:
    sides = ("rollout_log_probs", _scorer(call)), ("old_log_probs", "log_probs"), ("log_probs", "rollout_log_probs")
    for name, other in sides:
        known = call.log_probs()
        if other not in known or (bad := _zeros(call, name, other)) is None:
            continue
        if name == "log_probs":  # those of a whole row: NaN that became 0 has a finite loss
            bad = bad & (((known[name] == 0) | (call.active == 0)).all(1)[:, None])
        if name == "rollout_log_probs":
            bad = bad & (known[name] == 0) & ~named(call)
        worst = -np.where(bad, known[other], 0.0).min(1, initial=0.0)
        words = f"{name} is exactly 0.0 at an action whose {other.replace('_', ' ')} say otherwise"
        answer.rows(call, bad.any(1), words, worst, side_of(name))


def mask(call: RecordedCall, answer: Answer) -> None:
    said = call.log_probs().get("rollout_log_probs")
    multi_turn = call.fact("multi_turn")
    active: Numbers = call.active
    real: Numbers = True if said is None or call.real is None else call.real[:, 1:][:, -said.shape[1] :]
    spoken: Numbers = said is None or np.nan_to_num(said) != 0
    within: Numbers = spoken & real
    for by in (-1, 1, -2, 2) if said is not None else ():
        whole = (shifted(spoken, by) == active).all(1) & (active != spoken).any(1)
        cut = (shifted(within, by) & real == active).all(1) & (active != within).any(1)  # at the row's end
        bad = active.any(1) & (whole | cut)
        kept = active.sum(1) == spoken.sum(1)  # else a mask of fewer tokens looks like this too
        if (bad & kept).any() or bad.sum() * 2 > active.any(1).sum():
            words = f"the action mask is shifted by {by:+} against the log-probs of the rollout"
            begin_alike = (active.argmax(1) == spoken.argmax(1))[bad].all()
            ends_early = f"the action mask leaves out the last {plural(-by, 'token')}, which the engine sampled"
            answer.rows(call, bad, ends_early if begin_alike and by < 0 else words, side=TRAINER)
            break
    else:
        if (ahead := _ahead(call)).any():
            many = int(ahead.sum(1).max())
            side = TRAINER if many > 1 else EITHER  # an engine may leave out its first log-prob
            words = f"the action mask begins {plural(many, 'token')} before the rollout's first log-prob"
            answer.rows(call, ahead.any(1), words, side=side)
    if said is not None and call.real is not None:
        left = spoken & real & ~active
        last = (left == (real & ~shifted(real, -1))).all(1) & active.any(1)
        if last.sum() >= LATE and not left[~last].any():
            answer.rows(call, last, "the action mask leaves out the last token, which the engine sampled", side=TRAINER)
    if call.holes is None or call.real is None:
        return
    supervised = call.fact("loss.policy_loss_type") == "sft"
    if supervised and call.fact("pretrain") is False:
        whole = call.counts == call.real.sum(1) - 1
        answer.rows(call, whole & whole.all(), "rows count from their first token on, and so do their prompts", side=TRAINER)
    if multi_turn is False:
        beta = call.fact("loss.beta")
        side = TRAINER if beta or supervised else ""  # no engine sampled these
        answer.rows(call, call.holes, "one response, but its action mask has a hole or ends before its last token", side=side)
        others = np.array(unlike_pairs(call, 0) * 2, bool)
        answer.rows(call, others, "the rows of a pair have different tokens before their actions", side=side)
        return
    ends = call.actions == call.fact("eos_token_id")
    behind = ends & ~active & shifted(active, 1) & call.real[:, -active.shape[1] :]
    if supervised and behind.any() and not (ends & active).any():
        answer.rows(call, behind.any(1), "no end token is an action, although one is behind the last action", side=TRAINER)
    elif multi_turn is None and not call.holes.any():
        answer.looked_at += call.rows


def _pairs(call: RecordedCall) -> Iterator[tuple[Beginning, Beginning]]:
    """Yield the beginnings of the two rows of each pair of preferences."""
    half, left = divmod(len(call.beginnings) if call.fact("loss.beta") else 0, 2)
    if not left:
        yield from zip(call.beginnings[:half], call.beginnings[half:], strict=False)  # no beta: no pairs


def unlike_pairs(call: RecordedCall, part: int) -> list[bool]:
    """Mark pairs of preferences whose rows differ in the last token before their actions (1), or before it (0).

    A tokenizer merges the end of a prompt, such as a space, with an answer: the trainer's count of the prompt's own tokens then
    takes the first token of the answer for a prompt's. A mask that begins one token late looks the same.
    """
    return [own[part] != paired[part] for own, paired in _pairs(call)]


def _late_pairs(call: RecordedCall) -> list[bool]:
    """Mark pairs that begin alike, and whose last tokens before their actions begin with different letters.

    Merged tokens begin as the rest of the prompt does, in both rows: these are of the answers alone.
    """
    if not any(unlike_pairs(call, 1)):
        return []
    letters, end = first_letters(call.record.model_name or ""), call.fact("eos_token_id")
    late = []
    for (stem, *own), (other, *paired) in _pairs(call):
        begun = {letters.get(own[0]), letters.get(paired[0])}
        late.append(stem == other and len(begun) == 2 and None not in begun and end not in (*own, *paired))  # an answer is empty
    return late


def unsure_beginnings(calls: Calls) -> str:
    """Say which rows of texts are alike up to the last token before their actions and differ in that: a mask may begin late."""
    if any(True in unlike_pairs(call, 1) for call in calls):
        return "the rows of pairs"
    lasts: dict[bytes, set[int]] = defaultdict(set)
    for call in calls:
        if call.fact("loss.policy_loss_type") == "sft" and call.fact("multi_turn") is False:
            for stem, last, _ in call.beginnings:
                lasts[stem].add(last)
    lasts.pop(key_of([]), None)  # no prompt
    several = sum(len(of) > 1 for of in lasts.values())
    return "rows that begin alike" if several >= LATE else ""


def first_action(calls: Calls, answer: Answer) -> None:
    """Look for samples of a prompt that differ before their first action: a sampled token that the mask leaves out.

    Without the log-probs of the engine nothing else shows it, if all values were computed from that mask. Of answers that no
    engine sampled, a tokenizer may have merged the first token with the prompt's last: `_late_pairs` tells some apart.
    """
    by_step: dict[Hashable, dict[bytes, dict[int, list[tuple[int, RecordedCall, int]]]]] = {}
    pairs = [(call, pair) for call in calls for pair, bad in enumerate(_late_pairs(call)) if bad]
    if len(pairs) >= LATE:
        words = f"the action mask misses the first token of the response, in {len(pairs)} pairs"
        answer.violated(pairs[0][0], words, pairs[0][1])
    for call in calls:
        of_texts = call.fact("loss.beta") or call.fact("loss.policy_loss_type") == "sft"
        if (call.is_loss and not of_texts) or call.record.role == ROLLOUT:
            stems = by_step.setdefault((call.record.run, call.record.step, call.record.role), {})
            for row, (stem, last, first) in enumerate(call.beginnings):
                if first >= 0:
                    stems.setdefault(stem, {}).setdefault(last, []).append((first, call, row))
    answer.lacks = "sampled answers to a prompt that differ from their first action on"
    for stems in by_step.values():
        late = [of for of in stems.values() if len(of) > 1]
        if not late:
            answer.looked_at += sum(len({first for first, *_ in rows}) > 1 for of in stems.values() for rows in of.values())
            continue
        # Prompts may differ in their last token; but then each is sampled as often, and not each stem.
        of_stems, of_prompts = (
            {sum(map(len, of.values())) for of in stems.values()},
            {len(rows) for of in late for rows in of.values()},
        )
        if len(late) >= LATE and 2 * len(late) > len(stems) and len(of_stems) == 1 and (len(of_prompts) > 1 or 1 in of_prompts):
            _, call, row = next(iter(late[0].values()))[0]
            words = f"the action mask misses the first token of the response, in {len(late)} of {plural(len(stems), 'prompt')}"
            answer.violated(call, f"{words}: their samples differ before it", row)


def _end_token(calls: Calls) -> int | None:
    """Return the id that ends responses: the model's, else that of most rows; None if rows end with various ids."""
    recorded = {call.fact("eos_token_id") for call in calls if call.is_loss} - {None}  # a critic's trainer has none
    if len(recorded) == 1 and type(only := recorded.pop()) is int:
        return only
    ends = Counter(int(last) for call in calls if call.ends is not None for last in call.ends[:, 1] if last >= 0)
    (usual, count), *_ = ends.most_common(1) or [(0, 0)]
    return usual if count > USUAL_END * ends.total() else None


def ends(calls: Calls, answer: Answer) -> None:
    if (end := _end_token(calls)) is None:
        return
    for call in calls:
        if call.ends is not None:
            answer.rows(call, (call.ends == end).all(1), f"the response ends with its end token {end} twice")


def truncation(calls: Calls, answer: Answer) -> None:
    said = [call for call in calls if call.ends is not None and call.array("truncated") is not None]
    # An environment may end a turn without an end token, and so may a stop string that a file does not name.
    said = [call for call in said if call.fact("multi_turn") is not True and not call.imported]
    if not said or (end := _end_token(said)) is None:
        return
    longest = max(int(call.counts.max(initial=0)) for call in said if call.counts is not None)
    cut = wrong = 0
    for call in said:
        truncated, ends, counts = call.array("truncated"), call.ends, call.counts
        assert truncated is not None and ends is not None and counts is not None
        bad = (ends[:, 1] != end) & (ends[:, 1] >= 0) & (truncated.reshape(-1) == 0)
        ended = ends[truncated.reshape(-1) != 0, 1] == end
        cut, wrong = cut + len(ended), wrong + int(ended.sum())
        words = f"the response lacks its end token {end}, and is not reported as truncated"
        if (bad & (counts == longest)).any():
            words += f" at the longest length, {longest:,}"
        answer.rows(call, bad, words)
    if wrong >= LATE and 2 * wrong > cut:
        answer.violated(said[0], f"{wrong} of {cut} rows that are reported as truncated have their end token {end}")


def cut_off(calls: Calls, answer: Answer) -> None:
    """Look for rows that were cut off and are not masked although the trainer is set so, or are rewarded as if they had ended."""
    by_run: dict[str, list[RecordedCall]] = defaultdict(list)
    answer.lacks = f"{FEW} rows that were cut off, beside as many that ended, with the rewards of a verifier"
    for call in calls:
        end, cut, rewards = call.fact("eos_token_id"), call.array("truncated"), call.array("rewards")
        if call.fact("mask_truncated") is True and end is not None and call.ends is not None and call.fact("multi_turn") is False:
            last, pad = call.ends[:, 1], call.fact("pad_token_id")  # to some trainers, a sampled pad token is an end, too
            answer.rows(
                call,
                (last >= 0) & (last != end) & (last != pad),
                "a row that was cut off is not masked, as the trainer is set to",
            )
        if cut is not None and rewards is not None and cut.size == rewards.size == call.rows:
            by_run[call.record.run].append(call)
    for own in by_run.values():
        truncated, rewards = (
            np.concatenate([np.asarray(call.array(name)).reshape(-1) for call in own]) for name in ("truncated", "rewards")
        )
        cut, best = truncated != 0, rewards == rewards.max()
        if min(cut.sum(), (~cut).sum()) < FEW or len(np.unique(rewards)) > VERIFIED:
            continue
        answer.looked_at += int(cut.sum())
        of_cut, of_ended, of_all = best[cut].mean(), best[~cut].mean(), best.mean()
        error = np.sqrt(of_all * (1 - of_all) * (1 / cut.sum() + 1 / (~cut).sum()))
        if of_cut - of_ended > CHANCE * error and (of_ended == 0 or of_cut >= NEARLY_ALL):
            said = f"{of_cut:.0%} of the rows that were cut off have the best reward, and {of_ended:.0%} of those that ended"
            answer.violated(own[0], said, size=float(of_cut))
