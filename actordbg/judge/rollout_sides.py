"""Say which side is wrong where rollout and trainer disagree: the rollout's recorded log-probs, the trainer's, the truth's.

A dashboard has the difference of the first two, which names no side. The truth names it: a side is right if its mean distance
from the truth is at most 1.5 times the noise of rounding on the same tokens. The bank's causes are fitted to whichever
side is not.

Both come from recorded losses (`dump enable --calls forward,loss`): `rollout_log_probs` is what the engine returned, `log_probs`
is what the training forward gave for the same tokens. Which side is wrong is relative to the temperature: the truth has the one
that the rollout was configured with, where it was recorded.

    explained = explain_rollout(store, replay_id)
    explained.sentence   # "the rollout is wrong, the trainer is right: rollout log-probs: the adapter was not applied ..."
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actordbg.base.errors import StoreProblem, Unsupported
from actordbg.catalog import query
from actordbg.causes.fit import Array
from actordbg.config.replay_config import ENDPOINT
from actordbg.document.blocks import RIGHT, ROLLOUT, TRAINER, WRONG, Block, Grid, Heading, Items, Verdict, number
from actordbg.judge.explain_outputs import explain_sides
from actordbg.judge.recorded_calls import Numbers, RecordedCall
from actordbg.judge.sides import open_replay
from actordbg.records.comparison_record import ExplainedOutputs
from actordbg.store.layout import Store

ENGINE = "engine"


@dataclass(frozen=True)
class ExplainedRollout:
    """What is wrong between rollout and trainer. apart: the mean of |rollout - trainer|, nats. dashboards: the field's names for
    how far they are apart (`field_figures`). Both sides' distances from the truth are in their explanations.
    """

    rollout: ExplainedOutputs
    trainer: ExplainedOutputs
    apart: float
    dashboards: dict[str, float]
    engine: ExplainedOutputs | None = None

    @property
    def sides(self) -> dict[str, ExplainedOutputs]:
        """The explanation of each side, by its name."""
        return {ROLLOUT: self.rollout, TRAINER: self.trainer} | ({ENGINE: self.engine} if self.engine else {})

    @property
    def wrong(self) -> tuple[str, ...]:
        """The sides that are further from the truth than rounding, or in which a cause was found."""
        return tuple(name for name, side in self.sides.items() if is_wrong(side))

    @property
    def verdict(self) -> Verdict:
        """Say which side is wrong, and why."""
        figures = (("rollout to trainer", f"{number(self.apart, 3)} nats"),)
        if self.wrong:
            right = [name for name in self.sides if name not in self.wrong]
            return Verdict(WRONG, "; ".join(self.sentences), figures, wrong=self.wrong, right=right)
        far = " and ".join(f"{side.before:.3g}" for side in self.sides.values())
        every = f"{' and '.join(self.sides)} are {'both' if len(self.sides) == 2 else 'all'} right"
        return Verdict(RIGHT, f"{every}: {far} nats from the truth over {self.rollout.tokens:,} tokens", figures)

    @property
    def sentence(self) -> str:
        """The verdict without its word."""
        return self.verdict.text

    @property
    def sentences(self) -> list[str]:
        """Return what was found on each side."""
        return [
            text.replace("recorded log-probs", f"{name} log-probs")
            for name, side in self.sides.items()
            for text in side.sentences
        ]

    @property
    def blocks(self) -> list[Block]:
        """Return what a page and `actordbg explain --against rollout` show."""
        return [
            self.verdict,
            *side_blocks(self.sides),
            Grid(("name on a dashboard", "rollout and trainer"), tuple((name, number(v)) for name, v in self.dashboards.items()),
                 {"name on a dashboard"}),
        ]  # fmt: skip


def is_wrong(side: ExplainedOutputs) -> bool:
    """Check whether a side is further from the truth than rounding, or has a cause."""
    return bool(side.causes) or side.unknown


def side_blocks(sides: Mapping[str, ExplainedOutputs]) -> list[Block]:
    """Return what to do about the causes of some sides, and how far each side is from the truth."""
    remedies = dict.fromkeys(cause.remedy for side in sides.values() for cause in side.causes)
    to_do: list[Block] = [Heading("What to do", 3), Items(tuple(remedies))] if remedies else []
    rows = [(f"{name} to the truth", number(side.before, 3), number(side.noise, 3)) for name, side in sides.items()]
    table = Grid(("mean of |difference|, nats", "measured", "noise"), tuple(rows), {"mean of |difference|, nats"})
    return [*to_do, Heading("How far apart", 3), table]


def explain_rollout(store: Store, replay_id: str, *, models: Sequence[str] = (), **callbacks: Any) -> ExplainedRollout:
    """Explain how the rollout and the run differ on the inputs of a replay, whose losses were recorded.

    models, callbacks: see `explain_sides`. Raises Unsupported if no loss of these inputs has the rollout's log-probs, and what
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
    arrays = {dump_id: loss.log_probs() for dump_id, loss in losses.items()}
    sides = {
        ROLLOUT: {dump_id: named["rollout_log_probs"] for dump_id, named in arrays.items()},
        TRAINER: {dump_id: named["log_probs"] for dump_id, named in arrays.items()},
    }
    temperature = temperatures.pop() if len(temperatures) == 1 else None
    ours = open_replay(query.open_fresh(store), replay_id)
    asked = ours.spec.config.backend == ENDPOINT and temperature in (None, 1.0)  # a server scores at temperature 1
    if asked:
        sides[ENGINE] = {dump_id: values.log_probs for dump_id in arrays if not isinstance(values := ours.read(dump_id), str)}
    masks: dict[str, Numbers] = {dump_id: loss.active for dump_id, loss in losses.items()}
    sides = {  # forwards of other trainers also count tokens that the loss does not: of tools, of prompts
        name: {dump_id: np.where(masks[dump_id], values, np.nan) for dump_id, values in side.items()}
        for name, side in sides.items()
    }
    explained = explain_sides(store, replay_id, sides, models=models, temperature=temperature, **callbacks)
    before = {dump_id: named["old_log_probs" if "old_log_probs" in named else "log_probs"] for dump_id, named in arrays.items()}
    rollout, run, old = (
        np.concatenate([of[dump_id][masks[dump_id]] for dump_id in arrays]).astype(np.float64)
        for of in (sides[ROLLOUT], sides[TRAINER], before)
    )
    figures, apart = field_figures(rollout, run, old), float(np.abs(run - rollout).mean())
    return ExplainedRollout(explained[ROLLOUT], explained[TRAINER], apart, figures, explained.get(ENGINE))


def _losses(store: Store, replay_id: str) -> Iterator[tuple[str, RecordedCall]]:
    """Yield the losses with log-probs of rollout and run, by the dump of their forward, of a replay's inputs."""
    catalog = query.open_fresh(store)
    inputs = open_replay(catalog, replay_id).inputs
    ids = ", ".join(f"'{dump_id}'" for dump_id in inputs)
    known = query.select_dumps(catalog, f"dump_id in ({ids})") if inputs else []
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
