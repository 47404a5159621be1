"""Say which side is wrong where rollout and trainer disagree: the rollout's recorded log-probs, the trainer's, the truth's.

A dashboard has the difference of the first two, which names no side. The truth names it: a side is right if its mean distance
from the truth is at most 1.5 times the noise of rounding on the same tokens. The bank's causes are fitted to whichever
side is not.

Both come from recorded losses (`dump enable --calls forward,loss`): `rollout_log_probs` is what the engine returned, `log_probs`
is what the training forward gave for the same tokens. Which side is wrong is relative to the temperature: the truth has the one
that the rollout was configured with, where it was recorded.

    explained = explain_rollout(store, replay_id)
    explained.verdict.sentence   # "WRONG (rollout; trainer right): rollout log-probs: the adapter was not applied ..."

A server (`--backend endpoint`) is a side too, once for each way in which it scored (`explain_engine`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from actordbg.base.errors import StoreProblem, Unsupported
from actordbg.catalog import query
from actordbg.catalog.where import of_dumps
from actordbg.causes.bank import DROPPED, PLACEHOLDER, ROWS, SHIFT, UNKNOWN_POLICY, UNKNOWN_PRECISION, cause_and_part
from actordbg.causes.fit import FEWEST, Array
from actordbg.compare.same_weights import WEIGHTS, WeightsMet, weights_met
from actordbg.compare.sides import ReplaySide, open_replay
from actordbg.config.replay_config import ENDPOINT
from actordbg.document.blocks import (
    EITHER,
    RIGHT,
    ROLLOUT,
    TRAINER,
    UNCHECKED,
    WRONG,
    Block,
    Grid,
    Heading,
    Verdict,
    number,
    section,
)
from actordbg.judge.explain_outputs import MOST, explain_sides
from actordbg.recorded.recorded_calls import Numbers, RecordedCall
from actordbg.records.comparison_record import MODEL, TRUTH, ExplainedOutputs, NamedCause
from actordbg.records.finding import Finding, NotChecked, Rule
from actordbg.records.journal import ENGINE_WAYS
from actordbg.store.layout import Store

ENGINE, ALONE = "engine", "alone"
_OLD = "old"
_Side = Mapping[str, Array]
"""Arrays by dump id."""
WAYS = {
    "together": (
        "when rows share a request: the batch changes its numbers",
        "rows in one request were not scored for each input",
    ),
    "twice": (
        "at the second request: its prefix cache is wrong, or it does not repeat itself",
        "the same request was not repeated for each input",
    ),
    "cached": ("behind a cached prefix: its prefix cache is stale", "its cache was not read for each input"),
    "reset": ("after a reset of the cache: its weights changed meanwhile", "the cache was not reset for each input"),
}
"""By a way of scoring: when a server is wrong if only that way is, and what is said where inputs were not scored so."""
ENGINE_RULE = Rule("engine", "a server scores alike in every way of scoring")
_FAR = 8.0
"""A token's log-prob moved if it differs by more than this, times the mean noise."""


class ExplainedSides:
    """Sides that were held against the truth. sides: the explanation of each, by its name."""

    sides: Mapping[str, ExplainedOutputs]

    @property
    def wrong(self) -> tuple[str, ...]:
        """The sides that are further from the truth than rounding, or in which a cause was found."""
        return tuple(name for name, side in self.sides.items() if side.wrong)

    @property
    def right(self) -> list[str]:
        """The sides that were judged, and are not wrong."""
        return [name for name in self.sides if name not in (*self.wrong, *self.unjudged)]

    @property
    def unjudged(self) -> list[str]:
        """The sides of which there is no truth, or too few tokens."""
        few = [name for name, side in self.sides.items() if not side.wrong and side.tokens < FEWEST]
        of_others = [name for name, cause in self.beside if cause_and_part(cause.name)[0].name in _OF_OTHERS]
        return [*few, *of_others]

    @property
    def beside(self) -> list[tuple[str, NamedCause]]:
        """Return what is notable of each side beside its cause: a coarser dtype, an older policy."""
        return [(name, cause) for name, side in self.sides.items() for cause in side.also]

    @property
    def notes(self) -> list[str]:
        """The same in words."""
        return [f"{name} log-probs: {cause.said}" for name, cause in self.beside]

    @property
    def found(self) -> list[Finding]:
        """Return what is wrong with each side."""
        return [finding for name in self.wrong for finding in self.sides[name].found(name)]

    @property
    def told(self) -> list[Block]:
        """Return what to do about the causes, and how far each side is from the truth."""
        causes = [cause for side in self.sides.values() for cause in (*side.causes, *side.also)]
        remedies = dict.fromkeys(cause.remedy for cause in causes if cause.remedy)
        far = {name: number(side.before if side.tokens else None, 3) for name, side in self.sides.items()}
        rows = [(f"{name} to the truth", far[name], number(side.noise, 3)) for name, side in self.sides.items()]
        table = Grid((_MEASURED, "measured", "noise"), rows, {_MEASURED})
        return [*section("What to do", remedies), Heading("How far apart", 3), table]


_OF_OTHERS = (UNKNOWN_POLICY, UNKNOWN_PRECISION, DROPPED)
"""Causes that say that a side is that of a policy, a dtype or a dropout of which there is no truth."""
_MEASURED, _DASHBOARD = "mean of |difference|, nats", "name on a dashboard"


@dataclass(frozen=True)
class ExplainedRollout(ExplainedSides):
    """What is wrong between rollout and trainer. apart: the mean of |rollout - trainer|, nats. dashboards: the field's names for
    how far they are apart (`field_figures`). Both sides' distances from the truth are in their explanations. weights: whether the
    truth has those of the trainer; with others, nobody is wrong.
    """

    rollout: ExplainedOutputs
    trainer: ExplainedOutputs
    apart: float
    dashboards: dict[str, float]
    engine: ExplainedOutputs | None = None
    weights: WeightsMet | None = None

    @property
    def sides(self) -> dict[str, ExplainedOutputs]:  # type: ignore[override]
        """The explanation of each side, by its name."""
        return {ROLLOUT: self.rollout, TRAINER: self.trainer} | ({ENGINE: self.engine} if self.engine else {})

    @property
    def verdict(self) -> Verdict:
        """Say which side is wrong, and why."""
        figures = [("rollout to trainer", f"{number(self.apart, 3)} nats")]
        far = " and ".join(f"{side.before:.3g}" for side in self.sides.values())
        same, identity = (self.weights.same, [self.weights.words]) if self.weights else (True, [])
        missing = [NotChecked(TRUTH, f"the {name}'s log-probs") for name in self.unjudged]
        left = [*missing, *(NotChecked(WEIGHTS, words) for words in identity if not same)]
        named = any(self.sides[name].causes for name in self.wrong)
        if same is False or not (same or named):
            return Verdict(UNCHECKED, f"{' and '.join(self.sides)} are {far} nats from the truth", figures, left)
        if self.wrong:
            causes = [text for name in (*self.wrong, *self.right) for text in self.sides[name].told(f"{name} log-probs")]
            if self.apart <= 2 * self.rollout.noise:  # what both have may be in the model that they are held against
                left.append(NotChecked(MODEL, "whether this model's settings are those of the run: rollout and trainer agree"))
            return Verdict(WRONG, "; ".join(causes), figures, left, findings=self.found, right=self.right, also=self.wrong[1:])
        notes = "; ".join(self.notes)
        if PLACEHOLDER in [cause.name for _, cause in self.beside]:
            found = [Finding(Rule(PLACEHOLDER, side=EITHER), notes)]
            return Verdict(WRONG, notes, figures, left, next="actordbg lint", findings=found)
        if missing:
            unjudged = " and ".join(each.said for each in missing)
            said = f"{unjudged} over {self.rollout.tokens:,} tokens"
            return Verdict(UNCHECKED, "; ".join([said, *self.notes]), figures)
        every = "both" if len(self.sides) == 2 else "all"
        said = f"{' and '.join(self.sides)} are {every} right: {far} nats from the truth over {self.rollout.tokens:,} tokens"
        return Verdict(RIGHT, "; ".join([said, *self.notes, *identity]), figures)

    @property
    def blocks(self) -> list[Block]:
        """Return what a page and `actordbg explain --against rollout` show below the verdict."""
        rows = [(name, number(value)) for name, value in self.dashboards.items()]
        return [*self.told, Grid((_DASHBOARD, "rollout and trainer"), rows, {_DASHBOARD})]


@dataclass(frozen=True)
class ExplainedEngine(ExplainedSides):
    """How right a server is. server: "vLLM 0.32.0". ways: the explanation of each way of asking
    (`actordbg.actor.endpoint_session`), `alone` first: if that is wrong, causes are fitted; if only another way is, its name says
    what is: the batch, the cache, or that the server does not repeat itself. moved: by way, where its log-probs begin to differ
    from those of `alone`, in words.
    """

    server: str
    ways: Mapping[str, ExplainedOutputs]
    moved: Mapping[str, str]

    @property
    def sides(self) -> Mapping[str, ExplainedOutputs]:  # type: ignore[override]
        """The explanation of each way."""
        return self.ways

    @property
    def verdict(self) -> Verdict:
        """The sentence, and the ways that were not checked."""
        judged = RIGHT if self.ways[ALONE].tokens >= FEWEST else UNCHECKED
        word = WRONG if self.wrong else judged
        found = [replace(finding, side="") for finding in self.found]
        return Verdict(word, self.sentence, not_checked=self.unchecked, findings=found)

    @property
    def unchecked(self) -> list[NotChecked]:
        """Return the ways in which it did not score."""
        return [NotChecked(ENGINE_RULE, lacks) for way, (_, lacks) in WAYS.items() if way not in self.ways]

    @property
    def sentence(self) -> str:
        """Say whether the server is right, in which ways, and why not."""
        alone, who = self.ways[ALONE], f"the engine ({self.server}, raw logits at temperature 1)"
        if ALONE in self.wrong:
            return f"{who} is wrong: {'; '.join(alone.told('its log-probs'))}"
        right = f"{who} is right {', '.join(self.right)}"
        if not self.wrong:
            far = f"{alone.before:.3g} nats from the truth over {alone.tokens:,} tokens"
            return f"{right}: {far}" if alone.tokens >= FEWEST else f"{who} is {far}: these are too few"
        told = [f"wrong {WAYS[way][0]}{self.moved.get(way, '')}" for way in self.wrong]
        return f"{right}, and {'; '.join(told)}"

    @property
    def blocks(self) -> list[Block]:
        """Return what `actordbg explain` shows of a server below the verdict."""
        return [*self.told, *section("", (f"{way}: {text}" for way, side in self.ways.items() for text in side.sentences))]


def explain_rollout(store: Store, replay_id: str, **options: Any) -> ExplainedRollout:
    """Explain how the rollout and the run differ on the inputs of a replay, whose losses were recorded.

    options: of `explain_sides`. Raises Unsupported if no loss of these inputs has the rollout's log-probs, and what
    `explain_sides` raises.
    """
    losses = dict(_losses(store, replay_id))
    if not losses:
        raise Unsupported(
            "no recorded loss of these inputs has the rollout's log-probs",
            hint="record with `dump enable --calls forward,loss`, and let the trainer request them "
            "(OpenRLHF: --algo.advantage.is_correction_level token)",
        )
    temperatures = {loss.fact("rollout.temperature") for loss in losses.values()}
    temperature = temperatures.pop() if len(temperatures) == 1 else None
    masks: dict[str, Numbers] = {dump_id: loss.active for dump_id, loss in losses.items()}
    arrays = {dump_id: loss.log_probs() for dump_id, loss in losses.items()}
    whole: dict[str, dict[str, Array]] = {
        ROLLOUT: {dump_id: named["rollout_log_probs"] for dump_id, named in arrays.items()},
        TRAINER: {dump_id: named["log_probs"] for dump_id, named in arrays.items()},
        _OLD: {dump_id: named["old_log_probs" if "old_log_probs" in named else "log_probs"] for dump_id, named in arrays.items()},
    }
    rollout, run, old = (
        np.concatenate([side[dump_id][masks[dump_id]] for dump_id in arrays]).astype(np.float64) for side in whole.values()
    )
    if (old == run).all():  # else of a forward of their own, before an update or another kind of call
        del whole[_OLD]
    ours = open_replay(store, replay_id)
    if ours.spec.config.backend == ENDPOINT and temperature in (None, 1.0):  # a server scores at temperature 1
        whole[ENGINE] = {dump_id: values.log_probs for dump_id in arrays if not isinstance(values := ours.read(dump_id), str)}
    sides = {  # forwards of other trainers also count tokens that the loss does not: of tools, of prompts
        name: {dump_id: np.where(masks[dump_id], values, np.nan) for dump_id, values in side.items()}
        for name, side in whole.items()
    }
    of_old = {ROLLOUT: sides[_OLD]} if _OLD in sides else {}
    given: dict[str, Any] = {"temperature": temperature, "coarser": (ROLLOUT, ENGINE), "old": of_old}
    if any(loss.record.training for loss in losses.values()):
        given["trained"] = (TRAINER,)
    explained = explain_sides(store, replay_id, sides, **given, **options)
    trainer = explained[TRAINER]
    old_ones = explained.get(_OLD)
    if not trainer.wrong and old_ones and any(cause.name in (SHIFT, ROWS) for cause in old_ones.causes):
        trainer = replace(old_ones, what=f"{_OLD} log-probs")  # an update explains neither a shift nor other rows
    figures, apart = field_figures(rollout, run, old), float(np.abs(run - rollout).mean())
    weights = _weights(ours, losses, sides[TRAINER], explained[TRAINER].noise)
    return ExplainedRollout(explained[ROLLOUT], trainer, apart, figures, explained.get(ENGINE), weights)


def _weights(ours: ReplaySide, losses: Mapping[str, RecordedCall], recorded: _Side, noise: float) -> WeightsMet:
    """Say whether a replay has the weights with which the trainer computed these log-probs. noise: of rounding, nats."""
    distances: list[float] = []
    for dump_id, loss in losses.items():
        values = ours.read(dump_id)
        if not isinstance(values, str) and loss.active is not None and values.log_probs.shape == loss.active.shape:
            apart = np.abs(values.log_probs - recorded[dump_id])
            distances.append(float(apart[loss.active].mean()))
    fp32 = all(loss.fp32 for loss in losses.values())
    as_recorded = all((ours.dtype_of(dump_id) == "fp32") == fp32 for dump_id in losses)
    apart = float(np.mean(distances)) if distances else math.nan
    return weights_met(ours.resolved, fp32=fp32, as_recorded=as_recorded, apart=apart, rounding=noise)


def _losses(store: Store, replay_id: str) -> Iterator[tuple[str, RecordedCall]]:
    """Yield the losses with log-probs of rollout and run, by the dump of their forward, of a replay's inputs."""
    catalog = query.open_fresh(store)
    inputs = open_replay(catalog, replay_id).inputs
    known = query.select_dumps(catalog, of_dumps(inputs)) if inputs else []
    if not known:
        return
    runs = " or ".join(f"run = '{run}'" for run in sorted({row.run for row in known}))
    steps = [row.step for row in known if row.step is not None]
    near = f" and (step is null or step between {min(steps)} and {max(steps)})" if len(steps) == len(known) else ""
    for row in query.each_dump(catalog, f"point = 'loss' and ({runs}){near}", losses=True):
        try:
            loss = RecordedCall.read(str(store.root / row.path))
        except StoreProblem:
            continue
        forward = str(loss.forward_id)
        if forward in inputs and {"rollout_log_probs", "log_probs"} <= loss.log_probs().keys():
            yield forward, loss


def field_figures(rollout: Array, run: Array, old: Array) -> dict[str, float]:
    """Return how far log-probs of the same tokens [T] are apart, by the names that dashboards have. d = old - rollout, in nats,
    with the run's log-probs before the first update of the batch; prime-rl has those of the update itself: d = run - rollout.

    | name | formula | from |
    |---|---|---|
    | vllm_kl, rollout_corr/kl | mean(-d) | OpenRLHF's PolicyLoss, verl's rollout correction (k1) |
    | mismatch_kl | mean(exp(d) - 1 - d) | prime-rl (k3) |
    | train_rollout_logprob_abs_diff, sampling_logp_difference | mean(abs(d)) | slime, TRL |
    | token_mult_prob_error | mean(exp(abs(d))) | NeMo-RL |
    | rollout_probs_diff_mean | mean(abs(exp(old) - exp(rollout))) | verl: of probabilities, not of logs |
    | rollout_is_eff_sample_size | mean(w) ** 2 / mean(w ** 2), w = exp(d) | verl |
    """
    apart, now = old - rollout, run - rollout
    ratio = np.exp(apart)
    return {
        "vllm_kl": float(-apart.mean()),
        "mismatch_kl": float((np.exp(now) - 1 - now).mean()),
        "train_rollout_logprob_abs_diff": float(np.abs(apart).mean()),
        "token_mult_prob_error": float(np.exp(np.abs(apart)).mean()),
        "rollout_probs_diff_mean": float(np.abs(np.exp(old) - np.exp(rollout)).mean()),
        "rollout_is_eff_sample_size": float(ratio.mean() ** 2 / (ratio**2).mean()),
    }


def explain_engine(store: Store, replay_id: str, **options: Any) -> ExplainedEngine:
    """Explain a replay by a server. options, errors: of `explain_sides`."""
    ours = open_replay(store, replay_id)
    sides: dict[str, dict[str, Array]] = {ALONE: {}}
    masks: dict[str, Array] = {}
    why = "it has none"
    for dump_id in ours.inputs:
        if isinstance(values := ours.read(dump_id), str):
            why = values
        elif len(masks) < MOST:
            masks[dump_id] = values.mask
            for way, log_probs in {ALONE: values.log_probs, **ours.arrays(dump_id, ENGINE_WAYS)}.items():
                sides.setdefault(way, {})[dump_id] = log_probs
    if not masks:
        raise Unsupported(f"no input of replay {replay_id} has log-probs: {why}", hint="replay it again once the server scores")
    whole = {way: sides[way] for way in (ALONE, *WAYS) if way in sides and sides[way].keys() == masks.keys()}
    explained = explain_sides(store, replay_id, whole, coarser=[*whole], **options)
    noise = explained[ALONE].noise
    moved = {way: words for way in whole if way != ALONE and (words := _moved(ours, whole[ALONE], whole[way], masks, noise))}
    return ExplainedEngine(str(ours.resolved.get("server")), explained, moved)


def _moved(ours: ReplaySide, alone: _Side, other: _Side, masks: _Side, noise: float) -> str:
    """Say where the log-probs of a way begin to differ from those of `alone`; "" if they do not."""
    for dump_id, mask in masks.items():
        apart = np.abs(other[dump_id] - alone[dump_id]) * mask
        rows, columns = (apart > max(_FAR * noise, 1e-6)).nonzero()
        if len(rows):
            column = int(columns.min())
            row = int(rows[columns.argmin()])
            length = ours.inputs[dump_id].seq_len - mask.shape[1] + column
            return f", from token {length} of row {row} of {dump_id} on, by up to {apart.max():.3g} nats (noise {noise:.2g})"
    return ""
