"""The reward of the demo's PPO run, loaded by OpenRLHF through `--reward.remote_url <this file>`.

It pays for answers that use few distinct tokens twice, which is enough for advantages to differ from sample to sample.
"""

from __future__ import annotations

import torch


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, object]:
    """One reward in [0, 1] per query: the share of distinct characters in what follows the prompt."""
    rewards = torch.tensor([_variety(query[len(prompt) :]) for query, prompt in zip(queries, prompts, strict=True)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}


def _variety(answer: str) -> float:
    return len(set(answer)) / len(answer) if answer else 0.0
