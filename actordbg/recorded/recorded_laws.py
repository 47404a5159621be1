"""Laws of recorded data: what must hold in every healthy training, whatever its model. Pure: calls in, answers out.

A law sees either one call, or all calls with their tensors dropped (`RecordedCall.trim`): those of whole steps are in
`step_laws`, those of advantages in `advantage_laws`. It counts what it looked at; a law that looked at nothing was not checked.
Tokens outside of the action mask are never compared: they have placeholders. `LAWS` is the table: to add a law, write a function
and a row. `docs/reference/recorded-fields.md` says for each recorded field which law reads it.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from actordbg.document.blocks import EITHER, ROLLOUT, TRAINER
from actordbg.formats.dump_record import LOSS, DumpRecord
from actordbg.recorded import advantage_laws, loss_laws, mask_laws, step_laws, turns
from actordbg.recorded.loss_terms import VALUES
from actordbg.recorded.recorded_calls import Answer, Calls, Numbers, RecordedCall, RecordedLaw, shifted, side_of
from actordbg.recorded.weight_ladder import unequal_ranks
from actordbg.records.finding import Finding

POSITIVE = {True: 1e-3, False: 0.05}
"""Nats above 0 that rounding may lift a log-prob, by whether the model computes in fp32."""
WEIGHT_OFF = {True: 1e-3, False: 0.05}
"""Largest distance of an importance weight from its formula, relative to it, by whether its log-probs were stored in fp32."""


def _lengths(call: RecordedCall, answer: Answer) -> None:
    mask, real, sequences = call.array("action_mask"), call.real, call.sequences
    if mask is None or real is None or sequences is None or call.active is None:
        return
    answer.looked_at += 1
    odd = [
        f"{name} is {list(values.shape)}"
        for name in ("log_probs", "action_log_probs", "old_log_probs", "rollout_log_probs", "advantages", *VALUES)
        if (values := call.array(name)) is not None and values.shape != mask.shape
    ]
    if mask.shape[1] >= real.shape[1]:
        odd.append(f"sequences are {list(real.shape)}")
    if odd:
        answer.violated(call, f"the action mask is {list(mask.shape)}; {', '.join(odd)}")
        return
    labels = call.array("labels")
    if labels is not None and labels.shape == sequences.shape:
        counted = (labels != -100) & (np.arange(labels.shape[1]) > 0)
        fits = {by: ~counted | (labels == shifted(sequences, by)) for by in (-1, 1)}
        moved = [by for by, where in fits.items() if where.all()]
        how = f"shifted by {moved[0]:+}, and the model shifts them itself" if moved else "not the tokens of their row"
        answer.rows(call, (counted & (labels != sequences)).any(1), f"labels are {how}")
    within = real[:, -mask.shape[1] :]
    words = "the action mask covers padding"
    if any(not (shifted(call.active, by) & ~within).any() for by in (-1, 1)):
        words += ": it is shifted"
    answer.rows(call, (call.active & ~within).any(1), words)
    between = mask_laws.spanned(real) & ~real
    padding = sequences[~real & ~between]  # what a trainer pads with, within a row too
    hole = between & ~np.isin(sequences, padding) if padding.size else between & False
    answer.rows(call, hole.any(1), "the attention mask leaves out a token between others: it is shifted")


_FIGURES = {
    "loss": "loss", "backward_loss": "loss that backward got", "grad_norm": "gradient norm", "lr": "learning rate",
    "kl_ctl": "coefficient of the KL term",
}  # fmt: skip
"""Figures of a loss and of its optimizer step that are finite, in words."""


def _finite(call: RecordedCall, answer: Answer) -> None:
    named = dict(call.log_probs())
    for name in ("advantages", *VALUES, "term_weights", "rewards"):
        values = call.array(name)
        if values is None or call.active is None or len(values) != len(call.active):
            continue
        values = values.reshape(len(values), -1)
        if values.shape[1] in (1, call.active.shape[1]):
            named[name] = values
    for name, values in named.items():
        bad: Numbers = ~np.isfinite(values) & call.active
        bad = bad & ~mask_laws.named(call) if name == "rollout_log_probs" and bad.any() else bad
        answer.rows(call, bad.any(1), f"{name} is not finite at an action", side=side_of(name))
    for name, words in _FIGURES.items():
        value = call.array(name)
        if value is not None and not (name == "grad_norm" and call.scaled):
            answer.looked_at += 1
            if not np.isfinite(value).all():
                at = "" if call.record.step is None else f" of step {call.record.step}"
                said = f"the {words}{at} is not finite: {value.reshape(-1)[0]}"
                answer.violated(call, said)


def _positive(call: RecordedCall, answer: Answer) -> None:
    for name, values in call.log_probs().items():
        assert call.active is not None
        highest = np.where(call.active, values, -1.0).max(1, initial=-1.0)
        answer.rows(call, highest > POSITIVE[call.fp32], f"{name} is above 0 at an action", highest, side_of(name))
        lowest = np.where(call.active & np.isfinite(values), values, 0.0).min(1, initial=0.0)
        if name == "rollout_log_probs" and (bad := lowest <= mask_laws.NEVER).any():
            answer.rows(call, bad, f"{name} is {lowest.min():g} at an action, which was sampled", lowest, ROLLOUT)


def _entropy(call: RecordedCall, answer: Answer) -> None:
    entropy, vocabulary, off = call.array("entropy"), call.record.actor.get("vocab_size"), POSITIVE[call.fp32]
    if entropy is None or call.active is None or entropy.shape != call.active.shape:
        return
    most = math.log(vocabulary) if type(vocabulary) is int and vocabulary > 0 else math.inf
    bad = ((entropy < -off) | (entropy > most * (1 + off) + off)) & call.active
    answer.rows(call, bad.any(1), f"entropy is not within 0 and {most:.4g} nats at an action")


def _importance(call: RecordedCall, answer: Answer) -> None:
    weights, mode = call.array("term_weights"), call.fact("loss.weights_mode")
    apart = call.between("old_log_probs", "rollout_log_probs")
    if weights is None or not isinstance(mode, str) or apart is None:
        return
    apart = np.where(call.active & ~np.isnan(apart), apart, 0.0)  # TRL does not correct a token that the engine did not score
    counted: Numbers = call.active
    if mode.startswith("sequence"):
        apart, counted = apart.sum(1, keepdims=True), counted.any(1, keepdims=True)
    limits = [np.nan if (limit := call.fact(f"loss.weights_{end}")) is None else limit for end in ("low", "high")]
    stored = {call.record.tensors[name].dtype for name in ("old_log_probs", "rollout_log_probs")}
    plain, given, off = np.exp(apart), np.broadcast_to(weights, apart.shape), WEIGHT_OFF[stored <= {"float32", "float64"}]
    for limit in limits:
        counted = counted & ~(np.abs(plain - limit) < off * plain)  # rounding may move it to the other side
    wanted, inverse = (_limited(each, *limits, clips=mode.endswith("truncate")) for each in (plain, 1 / plain))
    bad = counted & ~(np.abs(given - wanted) <= off * np.maximum(plain, 1.0))
    how = ""
    if bad.any():
        used = counted & (given > 0) & (wanted > 0)
        times = given[used] / wanted[used] if used.any() else np.array([1.0, np.inf])
        is_inverse = np.allclose(given[counted], inverse[counted], rtol=off, atol=off)
        factor = f"{np.median(times):.4g} times " if np.ptp(times) < off * np.median(times) else "not "
        how = "the inverse of " if is_inverse else factor
    words = f"importance weights are {how}exp(old - rollout log-probs)"
    answer.rows(call, bad.any(1), words, np.abs(given - wanted).max(1, initial=0.0))


def _limited(weights: Numbers, low: float, high: float, *, clips: bool) -> Numbers:
    """Return weights clipped to limits, or 0 outside of them; a limit that is NaN does not count."""
    if clips:
        return np.fmin(np.fmax(weights, low), high)
    return np.where((weights < low) | (weights > high), 0.0, weights)


def _ranks(calls: Calls, answer: Answer) -> None:
    by_root: dict[Path, list[DumpRecord]] = {}
    for call in calls:
        if call.root is not None:
            by_root.setdefault(call.root, []).append(call.record)
    for root, records in by_root.items():
        for record, words in unequal_ranks(root, records):
            answer.looked_at += 1
            if words:
                answer.found.append(Finding(answer.rule, words, {"dump": record.dump_id}))


def _response_length(call: RecordedCall, answer: Answer) -> None:
    said, counts, spans = call.array("response_length"), call.counts, call.spans
    if said is None or counts is None or spans is None:
        return
    said = said.reshape(-1)
    bad = said != counts
    by_span = ", but the span from the first action to the last" if (said == spans)[bad].all() else ""
    answer.rows(call, bad, f"response_length is not the number of actions{by_span}", said - counts)


def _temperature(calls: Calls, answer: Answer) -> None:
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
        keys = [(call.record.run, key) for key in call.row_keys if call.record.role == "policy"]
        known, others = seen.keys() & keys, np.array([seen.setdefault(key, ours) for key in keys])
        if known:
            answer.rows(call, others != ours, f"scored at temperature {ours:g}, elsewhere at another one", others - ours)


def _sampling(call: RecordedCall, answer: Answer) -> None:
    level, cuts = call.fact("loss.is_correction_level"), {name: call.fact(f"rollout.{name}") for name in _NO_CUT}
    if level is None or all(value is None for value in cuts.values()):
        return
    cut = [f"{name} {value:g}" for name, value in cuts.items() if value is not None and value not in _NO_CUT[name]]
    words = f"importance correction is on, and sampling was cut to {' and '.join(cut)}"
    corrected = level != "off" or call.fact("loss.is_corrected") is True
    answer.rows(call, np.full(1, bool(cut) and corrected), words)


_NO_CUT = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
_OF_LOSS = (LOSS, "log_probs")
_ESTIMATED = (LOSS, "advantages", "advantage.estimator")
LAWS = (
    RecordedLaw(
        "lengths", "log-probs, advantages and the action mask have one shape, and the mask covers real tokens only",
        "eval-protocol PR#457", "look for a shift by one first: column j of a mask [B, A] is token S - A + j", ("action_mask",),
        TRAINER, fails="the action mask does not fit the tokens", judge=_lengths, over_calls=False,
    ),
    RecordedLaw(
        "finite", "recorded values are finite", "NeMo-RL#2100",
        "look at the step before it: its loss, its gradient norm, and the weights that it left", ("log_probs",), TRAINER,
        judge=_finite, over_calls=False,
    ),
    RecordedLaw(
        "beginning", "no row begins with two BOS tokens", "open-r1 PR#462",
        "encode a prompt that has a BOS with add_special_tokens=False", ("attention_mask", "bos_token_id"), EITHER,
        judge=mask_laws.beginning, over_calls=False, fails="a row begins with two BOS tokens",
    ),
    RecordedLaw(
        "log-probs", "no log-prob is above 0, and none of a sampled token below -100", "verl#2656",
        "normalize with log_softmax over the whole vocabulary, in fp32", ("log_probs",), TRAINER, judge=_positive,
        over_calls=False,
    ),
    RecordedLaw(
        "entropy", "entropies are within 0 and the logarithm of the vocabulary's size", "Cover and Thomas 2006, theorem 2.6.4",
        "compute them from the logits that log-probs come from", ("entropy",), TRAINER, judge=_entropy, over_calls=False,
    ),
    RecordedLaw(
        "mask", "the actions of a single response are contiguous and end with its last token", "SkyRL PR#354",
        "build the mask from the sampled ids, not from their text", ("action_mask", "multi_turn"), EITHER,
        fails="the action mask does not fit the response", judge=mask_laws.mask, over_calls=False,
    ),
    RecordedLaw(
        "actions", "a step has actions to learn from", "trl#6369",
        "if all were cut off, raise the completion length or do not mask them; else see how the mask finds the response",
        _OF_LOSS, "", fails="no token counts as an action, so nothing is learned", judge=step_laws.actions,
    ),
    RecordedLaw(
        "alignment", "the log-probs of rollout, old policy and base are those of their own tokens", "ms-swift PR#8196",
        "align log-probs with tokens: the log-prob at t is of the id at t + 1", _OF_LOSS, EITHER,
        fails="log-probs are not those of their own tokens", judge=step_laws.alignment, over_calls=False,
    ),
    RecordedLaw(
        "rows", "the log-probs of rollout, old policy and base are those of their own row", "open-instruct#1473",
        "match results by id, not by order", _OF_LOSS, EITHER, judge=step_laws.of_other_rows,
        fails="log-probs belong to other rows",
    ),
    RecordedLaw(
        "first action", "samples of a prompt are equal up to their first action", "OpenRLHF#973",
        "begin it at the first token behind the prompt: column j of a mask [B, A] is token S - A + j", ("action_mask",), TRAINER,
        fails="the action mask misses the first token of the response", judge=mask_laws.first_action,
    ),
    RecordedLaw(
        "environment", "tokens of a tool or an environment are not actions", "trl PR#4975",
        "mask what the engine did not sample, turn by turn", (*_OF_LOSS, "rollout_log_probs"), TRAINER,
        fails="tokens of a tool or an environment are trained on", judge=mask_laws.environment, over_calls=False,
    ),
    RecordedLaw(
        "placeholder", "no log-prob of an action is a placeholder 0.0", "SkyRL PR#2148",
        "mask tokens that the engine did not sample (an appended end token, tool output)", (*_OF_LOSS, "rollout_log_probs"),
        ROLLOUT, judge=mask_laws.placeholder, over_calls=False, fails="a placeholder 0.0 is trained on as a log-prob",
    ),
    RecordedLaw(
        "agreement", "the log-probs of rollout and old policy follow those of the loss from the first action", "NeMo-RL PR#1767",
        "compare the tokens, and the packing, that each side scored", _OF_LOSS, EITHER, judge=loss_laws.agreement,
        fails="log-probs are not those of their tokens",
    ),
    RecordedLaw(
        "end", "a response ends with one end token", "open-instruct PR#1041",
        "append an end token only if the engine returned none, and set its action mask to 0", ("action_mask",), ROLLOUT,
        fails="a response ends with its end token twice", judge=mask_laws.ends,
    ),
    RecordedLaw(
        "truncation", "a response without an end token is reported as truncated", "NeMo-RL PR#4042",
        "take truncated from the finish_reason of every turn", (LOSS, "truncated"), ROLLOUT, judge=mask_laws.truncation,
        fails="a response was cut off, but not reported as truncated",
    ),
    RecordedLaw(
        "cut off", "rows that were cut off are masked if the trainer is set so, and not rewarded as if they alone had ended",
        "verifiers PR#186",
        "see that filter and grader ask for finish_reason, and that the engine stops at the template's end token",
        ("truncated", "rewards"), EITHER, fails="cut-off responses count as finished ones", judge=mask_laws.cut_off,
    ),
    RecordedLaw(
        "response length", "response_length counts the actions", "OpenRLHF#1243", "use action_mask.sum(-1) instead of the span",
        (LOSS, "response_length"), TRAINER, judge=_response_length, over_calls=False,
        fails="response_length is not the number of actions",
    ),
    RecordedLaw(
        "duplicates", "no row is in a step twice", "open-instruct#1473",
        "look for an id twice among the rollout's results; else see that each rank's sampler has its own share", ("sequences",),
        EITHER, fails="a row is trained on twice in a step", judge=step_laws.duplicates,
    ),
    RecordedLaw(
        "groups", "all rows of a group have the same prompt", "open-instruct PR#1483",
        "sort results by their index before grouping", (LOSS, "n_samples_per_prompt", "rollout.batch_size"), TRAINER,
        fails="rows of a group have different prompts", judge=step_laws.groups,
    ),
    RecordedLaw(
        "advantages", "a step has advantages that are not 0", "torchforge PR#571",
        "print a group's rewards: if they differ, find what sets advantages to 0; if not, correct the reward, or sample more",
        (LOSS, "advantages"), "", fails="every advantage is 0, so nothing is learned", judge=loss_laws.advantages,
    ),
    RecordedLaw(
        "token rewards", "a row's reward is that of its last token, and others have their KL penalty alone", "OpenRLHF 0.11.2",
        "see gamma, lambda, where the reward is put, and that the KL penalty is subtracted", (*_ESTIMATED, "returns"), TRAINER,
        judge=loss_laws.token_rewards, fails="tokens have other rewards than are set",
    ),
    RecordedLaw(
        "row advantage", "all tokens of a row have its advantage, unless the estimator gives each its own", "slime PR#2235",
        "give all tokens of a response the same advantage (only GAE, or a KL in the reward, gives each its own)", _ESTIMATED,
        TRAINER, fails="tokens of a row have different advantages", judge=advantage_laws.advantage_of_row,
    ),
    RecordedLaw(
        "bound", "an advantage is within what rewards over their standard deviation can give", "NeMo-RL PR#4158",
        "look for a row of another group, a tiny standard deviation, a second scaling", _ESTIMATED, TRAINER,
        fails="an advantage is larger than its group's rewards allow", judge=advantage_laws.bound,
    ),
    RecordedLaw(
        "group mean", "the advantages of a group have mean 0", "AReaL#1419",
        "check that the completions of a prompt stand together when rows are put into groups", _ESTIMATED, TRAINER,
        fails="advantages of a group do not average to 0", judge=advantage_laws.group_mean,
    ),
    RecordedLaw(
        "rewards", "advantages are what the estimator makes of the rewards", "tt-metal PR#46548",
        "match rewards and rows by id, not by order; see that advantages rise with rewards", (*_ESTIMATED, "rewards"), TRAINER,
        judge=advantage_laws.from_rewards, fails="advantages are not what the rewards give",
    ),
    RecordedLaw(
        "own reward", "a row has the reward that the rollout gave it", "tt-metal PR#46548",
        "match rewards and rows by id, not by order", (LOSS, "rewards"), TRAINER, judge=turns.rewards,
        fails="rewards belong to other rows",
    ),
    RecordedLaw(
        "returns", "advantages are what returns and values give", "tt-metal PR#46548",
        "match them by id, not by order; if all are of one row, check the formula (GAE), and that whitening is done once",
        (*_ESTIMATED, "returns"), TRAINER, judge=advantage_laws.from_returns,
        fails="advantages are not what returns and values give",
    ),
    RecordedLaw(
        "whitening", "whitened advantages have mean 0 and standard deviation 1 over a rollout's tokens", "SkyRL#1305",
        "whiten over the actions of all rows and ranks, once", _ESTIMATED, TRAINER,
        fails="whitened advantages do not have mean 0 and std 1", judge=advantage_laws.whitening,
    ),
    RecordedLaw(
        "importance", "importance weights are exp(old - rollout), clipped or masked as set", "Liger-Kernel#1082",
        "compute exp(trainer's old log-probs - engine's log-probs), apply it once, cap it as set",
        (*_OF_LOSS, "term_weights", "rollout_log_probs"), TRAINER,
        fails="importance weights are not exp(old - rollout log-probs)", judge=_importance, over_calls=False,
    ),
    RecordedLaw(
        "temperature", "all recorded temperatures of a row are equal", "trl#4159",
        "divide the logits by the sampling temperature on both sides", ("rollout.temperature",), TRAINER, judge=_temperature,
    ),
    RecordedLaw(
        "ratio", "before the first update, the ratio is 1", "slime#774",
        "compute old log-probs by the same weights, temperature and dtype as in training; turn dropout off",
        (*_OF_LOSS, "old_log_probs"), TRAINER, judge=step_laws.ratio,
        fails="old log-probs differ from the policy's before any update",
    ),
    RecordedLaw(
        "update", "after an update, the ratio is not exactly 1", "tensorforce#312",
        "compute the trainer's old log-probs once, before the first update; end autocast before a step, as it caches weights",
        (*_OF_LOSS, "old_log_probs", "lr"), TRAINER, fails="the ratio is exactly 1 although the policy was updated",
        judge=step_laws.update,
    ),
    RecordedLaw(
        "reference", "before the first update, the policy is its reference", "ms-swift PR#9934",
        "load it from the checkpoint that the policy began with; under PiSSA or OLoRA a disabled adapter is not that model",
        _OF_LOSS, TRAINER, fails="the reference model is not the policy's first weights", judge=step_laws.reference,
    ),
    RecordedLaw(
        "normalization", "the losses of all micro-batches and ranks add up to the loss of one batch", "ms-swift#10117",
        "divide by the step's tokens (or rows) over all ranks and micro-batches; if no factor is said, look at clip and mask",
        (LOSS, "loss"), TRAINER, fails="losses of a step are not those of one batch", judge=loss_laws.normalization,
    ),
    RecordedLaw(
        "formula", "losses are those of the recorded settings: ratio, clips, KL and entropy", "OpenRLHF 0.11.2, its k3",
        "check that ratio, clip range, KL and entropy coefficient reach the loss as they are set", (LOSS, "loss"), TRAINER,
        fails="the loss does not follow its settings", judge=loss_laws.formula,
    ),
    RecordedLaw(
        "accumulation", "every micro-batch's gradient is applied", "OpenRLHF 0.11.2 with DeepSpeed 0.19.6",
        "zero gradients once a step; with dynamic batches on ZeRO 1 or 2: drop --train.dynamic_batch_enable, or use ZeRO 3",
        (LOSS, "engine_accumulation", "dynamic_batch"), TRAINER, fails="only the last micro-batch's gradient is applied",
        judge=loss_laws.accumulation,
    ),
    RecordedLaw(
        "calls", "all ranks make the same number of calls in a step", "ms-swift PR#8102",
        "divide the rows so that each rank has as many micro-batches as the others", ("every call of several ranks",), TRAINER,
        judge=loss_laws.equal_calls, fails="ranks run different numbers of micro-batches in a step",
    ),
    RecordedLaw(
        "ranks", "all ranks have the same weights", "minimind#853",
        "compare the ranks, from the broadcast at the start to the averaging of gradients",
        ("recorded weights of several ranks",), TRAINER, judge=_ranks, fails="ranks have different weights",
    ),
    RecordedLaw(
        "sampling", "importance correction is not combined with top_p, top_k or min_p", "trl#6789",
        "sample with top_p 1 and no top_k or min_p, or replay the engine's sampling mask",
        (LOSS, "loss.is_correction_level", "rollout.top_p"), ROLLOUT, judge=_sampling, over_calls=False,
        fails="importance correction is combined with top_p, top_k or min_p",
    ),
)  # fmt: skip
"""The laws, in the order in which they are named. A fault of shapes or masks comes before what it would also break."""
