"""The curves of a run: what its trainer logged of norm, KL, entropy, rewards and lengths, by quantity and step.

curves = curves_of(read_log("trainer_state.json", every=True))
curves.long("entropy").trend.word        # "falls"

A quantity is found under the names that trainers log it by (`NAMES`). What a curve does is told by medians of its thirds, which
half of the values can be outliers without moving, and by `align_logs.trend`: beyond twice the standard error that neighboring
steps show.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from actordbg.measure.align_logs import Trend, trend
from actordbg.measure.log_lines import KINDS, TrainLog, is_loss

LEAST = 12
"""Fewest steps of a curve that a rule about its course judges."""
NAMES: Mapping[str, tuple[str, ...]] = {
    "gradient norm": ("actor_grad_norm", "grad_norm", "actor/grad_norm", "policy/grad_norm", "optim/grad_norm"),
    "KL to the reference": ("kl", "actor/reward_kl_penalty", "actor/kl_loss", "kl_loss", "policy/policy_kl"),
    "entropy": (
        "entropy_loss", "ent_loss", "entropy", "actor/entropy", "entropy/all/mean", "entropy/mean", "approx_entropy",
        "policy/policy_entropy",
    ),
    "clip fraction": (
        "ppo_clip_ratio", "clip_ratio/region_mean", "clip_ratio", "actor/pg_clipfrac", "pg_clipfrac", "policy/clip_ratio",
        "clip_fraction", "clipfrac",
    ),
    "reward": ("reward", "critic/score/mean", "critic/rewards/mean", "rollout/raw_reward", "reward/avg_raw_reward"),
    "response length": (
        "response_length", "gen_len", "response_length/mean", "completions/mean_length", "rollout/response_len/mean",
    ),
    "truncated share": ("truncated", "completions/clipped_ratio", "response_length/clip_ratio", "rollout/truncated_ratio"),
    "groups without variance": ("frac_reward_zero_std",),
    "loss scale": ("loss_scale",),
    "learning rate": ("actor_lr", "learning_rate", "actor/lr", "optim/lr", "lr-pg_0", "policy/policy_lr", "lr"),
}  # fmt: skip
"""Quantity -> the names of its metric, the best first, as OpenRLHF 0.11, TRL 1.16, verl 0.9.1 and SkyRL 0.3 log it, and slime,
prime-rl and NeMo-RL by their documentation.
"""
SUMMED = ("actor/kl_loss", "kl_loss")
"""Names of a KL that may be a sum over an answer's tokens, by the trainer's setting."""
MISMATCH = {
    "vllm_kl": 0.05,
    "rollout_corr/kl": 0.05,
    "mismatch_kl/all/mean": 0.05,
    "mismatch_kl/mean": 0.05,
    "gen_kl_error": 0.05,
    "sampling/sampling_logp_difference/mean": 0.1,
    "train_rollout_logprob_abs_diff": 0.1,
    "policy/rollout_train_logprobs_abs_diff_mean": 0.1,
    "training/rollout_probs_diff_mean": 0.05,
}
"""Metrics of the difference between rollout engine and trainer, with the figure (nats; of probabilities for the last) above which
it is no longer rounding. NeMo-RL's own tests hold the KL below 0.002, slime's the absolute difference below 0.1; a healthy bf16
engine has 0.001 and 0.03.
"""
HELD_OUT = ("eval", "val/", "val-core/", "validation/", "test/", "test_")
SCORES = ("acc", "score", "reward", "pass", "correct")
NO_SCORES = ("std", "clip", "len", "rewards/")
"""Words in the name of a figure beside a score: its deviation, a length, a part of a reward, which may be NaN for none."""
SUPERVISED = ("loss", "train_loss", "gpt_loss", "loss_mean")
SUPERVISED_LOSS = "supervised loss"
PREFERRED = "rewards/chosen"
"""What a training on preferences logs: its `kl` is of whole answers."""


@dataclass(frozen=True)
class Curve:
    """The finite values of a metric by step. nonfinite: steps at which it is NaN or infinite."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    nonfinite: tuple[int, ...] = ()

    @property
    def long(self) -> bool:
        """Return whether its course can be judged."""
        return len(self.values) >= LEAST

    @property
    def trend(self) -> Trend:
        return trend(self.values)

    @property
    def late_trend(self) -> Trend:
        """Return the trend of the second half."""
        return trend(self.values[len(self.values) // 2 :])

    @property
    def course(self) -> str:
        """Return the medians of the first and the last third in words."""
        return f"{self.name} went from {self.early:.3g} to {self.late:.3g}"

    @property
    def early(self) -> float:
        return median(self.values[: max(1, len(self.values) // 3)])

    @property
    def late(self) -> float:
        return self._last(max(1, len(self.values) // 3))

    @property
    def now(self) -> float:
        """Return the median of the last tenth."""
        return self._last(max(3, len(self.values) // 10))

    def _last(self, many: int) -> float:
        return median(self.values[-many:])

    def since(self, above: float) -> int:
        """Return the first step after which at most one value in ten is below a figure."""
        over = [value > above for value in self.values]
        for at, step in enumerate(self.steps):
            if over[at] and 10 * sum(over[at:]) >= 9 * len(over[at:]):
                return step
        return self.steps[-1]


@dataclass(frozen=True)
class Curves:
    """The curves of a run: of each quantity, and every metric by its name."""

    of: Mapping[str, Curve]
    metrics: Mapping[str, Curve]

    def long(self, quantity: str) -> Curve | None:
        """Return the curve of a quantity if its course can be judged."""
        curve = self.of.get(quantity)
        return curve if curve and curve.long else None

    @property
    def held_out(self) -> list[Curve]:
        """The long curves of held-out scores."""
        return [curve for name, curve in self.metrics.items() if is_held_out_score(name) and curve.long]

    @property
    def reward_parts(self) -> list[Curve]:
        """The long curves of the parts that a reward is made of, as TRL logs them."""
        return [
            curve for name, curve in self.metrics.items() if name.startswith("rewards/") and name.endswith("/mean") and curve.long
        ]


def is_held_out_score(name: str) -> bool:
    """Return whether a metric's name is that of a score on data that is not trained on."""
    name = name.lower()
    scores = any(word in name for word in SCORES) and not any(word in name for word in NO_SCORES)
    return scores and name.startswith(HELD_OUT)


def curves_of(log: TrainLog) -> Curves:
    """Return the curves of a log that was read with all metrics, by their best numbering."""
    metrics = {}
    for name, kinds in log.series.items():
        points = next(kinds[kind] for kind in KINDS if kind in kinds).points
        finite = {step: value for step, value in points.items() if math.isfinite(value)}
        lost = tuple(step for step in points if step not in finite)
        metrics[name] = Curve(name, tuple(finite), tuple(finite.values()), lost)
    found = {}
    for quantity, names in {**NAMES, "rollout mismatch": tuple(MISMATCH)}.items():
        if known := next((name for name in names if name in metrics), None):
            found[quantity] = metrics[known]
    if PREFERRED in metrics:
        found.pop("KL to the reference", None)
    losses = [name for name in metrics if is_loss(name) and not name.startswith(HELD_OUT)]
    if losses:
        found["loss"] = metrics[losses[0]]
    if losses and losses[0] in SUPERVISED and not {"reward", "KL to the reference", "rollout mismatch"} & found.keys():
        found[SUPERVISED_LOSS] = metrics[losses[0]]
    curves = Curves(found, metrics)
    if curves.held_out:
        found["held-out score"] = curves.held_out[0]
    if curves.reward_parts:
        found["part of the reward"] = curves.reward_parts[0]
    return curves
