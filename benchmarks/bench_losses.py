"""What recording losses beside forwards adds to a step, between two with the hook off: `python -m benchmarks.bench_losses`.

The step is that of `benchmarks.real_step`, with OpenRLHF's own PolicyLoss behind its forward, called through a training step, a
backward and an optimizer step of OpenRLHF's names: so forward and loss are recorded, joined and handed over as in a real run. One
step is one micro-batch. Measured is the CPU time of the training thread: a machine with other work does not change it much.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from benchmarks import real_step
from benchmarks.bench_capture import with_error
from benchmarks.real_step import SETTLE_SECONDS, Actor, Training

_BOTH = {"calls": ("forward", "loss")}
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "forward, without weights": (False, {}),
    "forward": (True, {}),
    "forward and loss, without weights": (False, _BOTH),
    "forward and loss": (True, _BOTH),
}
"""By name, whether the weights of each step are sampled, and the switch. Here each micro-batch is a step of its own."""


class Strategy:
    """OpenRLHF's backward and optimizer step, without DeepSpeed."""

    accumulated_gradient = 1
    args = SimpleNamespace(rollout=SimpleNamespace(temperature=1.0, top_p=1.0), train=SimpleNamespace(), algo=SimpleNamespace())

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def backward(self, loss: torch.Tensor, model: Any, _optimizer: Any) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def optimizer_step(self, _optimizer: Any, model: Any, _scheduler: Any) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        model.model.global_steps += 1


class Trainer:
    """OpenRLHF's training step."""

    def __init__(self, actor: Any, loss: Any, strategy: Any) -> None:
        self.actor, self.loss, self.strategy = actor, loss, strategy

    def training_step(self, experience: Any, kl_ctl: float, step: int) -> None:
        log_probs = self.actor(**experience.arguments)
        rows = log_probs.shape
        result = self.loss(
            log_probs, experience.old, experience.advantages, action_mask=torch.ones(rows), rollout_log_probs=experience.old,
            dp_size=1, batch_num_tokens=torch.tensor(float(log_probs.numel())),
        )  # fmt: skip
        self.strategy.backward(result[0], self.actor, None)
        self.strategy.optimizer_step(None, self.actor, None)


def stand_in() -> Any:
    """Register OpenRLHF's module of losses, and these classes under the names that its own have; return its PolicyLoss."""
    root = Path(importlib.util.find_spec("openrlhf").submodule_search_locations[0])  # type: ignore[union-attr,index]
    for name, folder in (("openrlhf", root), ("openrlhf.models", root / "models")):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    sys.modules.setdefault("deepspeed", ModuleType("deepspeed"))  # which a module beside the losses imports
    kinds = {
        "models.actor:Actor": Actor,
        "trainer.ray.ppo_actor:ActorPPOTrainer": Trainer,
        "utils.deepspeed.deepspeed:DeepspeedStrategy": Strategy,
    }
    for where, kind in kinds.items():
        module, _, name = where.partition(":")
        made = sys.modules[f"openrlhf.{module}"] = ModuleType(f"openrlhf.{module}")
        setattr(made, name, kind)
    from openrlhf.models.loss import PolicyLoss

    return PolicyLoss


class WithLoss(Training):
    """Trains with a recorded loss."""

    def __init__(self, folder: Path, loss: Any) -> None:
        super().__init__(folder)
        self.slot.packages.add("openrlhf")
        self._actor.model.global_steps, self._actor.model.get_global_grad_norm = 0, lambda: 1.0
        self._actor.model.optimizer = self._optimizer
        self._trainer = Trainer(self._actor, loss, Strategy(self._optimizer))
        self._old = torch.full((4, 31), -2.0)

    def step(self) -> float:
        arguments = self._batches[self._calls % len(self._batches)]
        self._calls += 1
        rewards = torch.ones(4)
        experience = SimpleNamespace(arguments=arguments, old=self._old, advantages=self._old, rewards=rewards, truncated=rewards)
        self._trainer.training_step(experience, 0.01, self._calls)
        return 0.0

    def in_turn(self, way: str, each: int) -> list[tuple[str, float]]:
        """Run steps in which recording is on and off in turn; return the CPU time of the training thread in each."""
        self.switch(way)
        until = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < until:
            self.step()
        on, steps = self.slot.enter, []
        for _ in range(each):
            for which in ("off", way):
                self.slot.enter = on if which == way else None
                began = time.thread_time()
                self.step()
                steps.append((which, time.thread_time() - began))
        return steps


def run(each: int = 150) -> None:
    """Print, for each way, its step over the two neighbors that are off, in CPU time of the training thread, and the noise."""
    torch.set_num_threads(1)
    loss = stand_in()(is_correction_level="token")
    for way, (samples, limits) in WAYS.items():
        real_step.OURS[way] = {"writer": "process", **limits}
        with tempfile.TemporaryDirectory() as folder:
            training = WithLoss(Path(folder), loss)
            if not samples:
                training.slot.recorder._weights = lambda *_: None
            steps = training.in_turn(way, each)
            training.close()
        usual = median(seconds for which, seconds in steps if which == "off")
        for which, reach in (("off", 2), (way, 1)):
            places = [place for place in range(reach, len(steps) - reach) if steps[place][0] == which]
            near = [2 * steps[place][1] / (steps[place - reach][1] + steps[place + reach][1]) for place in places]
            ratio, error = with_error(near)
            print(f"{which} / off, beside {way}: {ratio:.4f} +- {error:.4f} of {1e3 * usual:.0f} ms, {each} steps", flush=True)


if __name__ == "__main__":
    run(*map(int, sys.argv[1:]))
