"""The modules that import `run_replay` by name. One that is first imported while it is replaced would keep the replacement."""

from importlib import import_module

_NAMES = ("api.explaining", "campaign.run_matrix", "campaign.run_train_check", "judge.check", "compare.find_truth",
          "compare.noise_floor", "steps.run_step")  # fmt: skip


def callers():
    return [import_module(f"actordbg.{name}") for name in _NAMES]
