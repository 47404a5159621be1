"""OpenRLHF's own losses on small tensors, called by trainers that call them as its training steps do."""

import importlib.util
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from actordbg.capture import losses

ROWS, PROMPT, ANSWER, MICRO = 2, 4, 6, 2


class Engine(nn.Module):
    """A DeepSpeed engine's facts: steps, accumulation; and a model of two parameters."""

    def __init__(self):
        super().__init__()
        self.global_steps, self.micro_steps = 7, 0
        self.weight = nn.Parameter(torch.tensor([0.5, -0.25]))

    def gradient_accumulation_steps(self):
        return MICRO

    def is_gradient_accumulation_boundary(self):
        return self.micro_steps % MICRO == MICRO - 1

    def zero_optimization_stage(self):
        return 2

    def get_global_grad_norm(self):
        return float(self.micro_steps - 1)


class DeepspeedStrategy:
    """The part of OpenRLHF's strategy that follows a loss."""

    def backward(self, loss, model, _optimizer):
        loss.backward()

    def optimizer_step(self, _optimizer, model, _scheduler, name="model"):
        engine = getattr(model, "model", model)
        engine.global_steps += engine.is_gradient_accumulation_boundary()
        engine.micro_steps += 1


class Actor(nn.Module):
    """An Actor whose log-probs are functions of its parameters."""

    temperature, packing_samples = 1.0, False

    def __init__(self):
        super().__init__()
        self.model = Engine()

    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False):
        wide = sequences[:, -action_mask.shape[1] :].float() / 50
        log_probs = -(self.model.weight[0] * wide).exp() + self.model.weight[1]
        return (log_probs, SimpleNamespace()) if return_output else log_probs


@dataclass
class Experience:
    """What OpenRLHF's training step gets."""

    sequences: Any
    attention_mask: Any
    action_mask: Any
    action_log_probs: Any
    rollout_log_probs: Any
    advantages: Any
    rewards: Any
    response_length: Any
    truncated: Any
    values: Any = None
    returns: Any = None
    kl: Any = None
    info: dict[str, Any] = field(default_factory=dict)


class ActorPPOTrainer:
    """The part of OpenRLHF's trainer that calls forward and loss."""

    def __init__(self, actor, loss):
        self.actor, self.actor_loss_fn, self.tokenizer = actor, loss, SimpleNamespace(eos_token_id=2)
        self.strategy = strategy_with_settings()

    def training_step(self, experience, kl_ctl, step, loss_batch_info=None):
        given = experience
        log_probs, _ = self.actor(given.sequences, given.action_mask, attention_mask=given.attention_mask, return_output=True)
        result = self.actor_loss_fn(
            log_probs, given.action_log_probs, given.advantages, action_mask=given.action_mask,
            rollout_log_probs=given.rollout_log_probs, **(loss_batch_info or {}),
        )  # fmt: skip
        self.strategy.backward(2 * result[0], self.actor, None)
        self.strategy.optimizer_step(None, self.actor, None, name="actor")
        return result


class Critic(Engine):
    """A critic's engine, whose values are functions of its parameters."""

    def forward(self, sequences, action_mask, attention_mask=None):
        return (self.weight[0] * sequences[:, -action_mask.shape[1] :].float() / 50 + self.weight[1]) * action_mask


class CriticPPOTrainer:
    """The part of OpenRLHF's trainer that calls a critic and its loss, in a process without Actors."""

    def __init__(self):
        self.critic, self.strategy = Critic(), strategy_with_settings()
        self.critic_loss_fn = sys.modules["openrlhf.models.loss"].ValueLoss(0.2)

    def training_step(self, experience, step, loss_batch_info=None):
        given = experience
        values = self.critic(given.sequences, given.action_mask, attention_mask=given.attention_mask)
        loss = self.critic_loss_fn(
            values, given.values, given.returns, action_mask=given.action_mask, **(loss_batch_info or {})
        )  # fmt: skip
        self.strategy.backward(loss, self.critic, None)
        self.strategy.optimizer_step(None, self.critic, None, name="critic")
        return loss


class DPOTrainer:
    """The part of OpenRLHF's trainer that sums the log-probs of a policy and of its reference."""

    def _get_batch_logps(self, log_probs, real, starts):
        return (log_probs * real[:, 1:])[:, starts[0] - 1 :].sum(-1)

    def fit(self, args):
        self.strategy, real = strategy_with_settings(), args.real
        for _ in range(2):
            sums = []
            for model in args.models:
                log_probs = model(args.ids, real[:, 1:], attention_mask=real)
                sums += self._get_batch_logps(log_probs, real, [3] * len(real)).chunk(2)
            self.strategy.backward(args.loss(*sums)[0], args.models[0], None)
            self.strategy.optimizer_step(None, args.models[0], None)


class RewardModelTrainer:
    """The part of OpenRLHF's trainer that scores pairs with a model that is no Actor."""

    def __init__(self, loss):
        self.model, self.loss_fn, self.strategy = Critic(), loss, strategy_with_settings()

    def concatenated_inputs(self, chosen, rejected):
        ids = torch.cat((chosen, rejected))
        return ids, torch.ones_like(ids)

    def fit(self, chosen, rejected, margin):
        for _ in range(MICRO):
            ids, real = self.concatenated_inputs(chosen, rejected)
            loss = self.loss_fn(*self.model(ids, real).sum(1).chunk(2), margin)
            self.strategy.backward(loss, self.model, None)
            self.strategy.optimizer_step(None, self.model, None)


def strategy_with_settings():
    """A strategy as a trainer gets it."""
    rollout = SimpleNamespace(temperature=1.0, top_p=1.0, n_samples_per_prompt=2)
    train = SimpleNamespace(dynamic_batch_enable=False, agent_func_path=None)
    strategy = sys.modules["openrlhf.utils.deepspeed.deepspeed"].DeepspeedStrategy()
    strategy.accumulated_gradient, strategy.args = MICRO, SimpleNamespace(rollout=rollout, train=train)
    return strategy


def stand_in_for_openrlhf(monkeypatch):
    """OpenRLHF's loss.py alone, without what its package imports; beside it an Actor and a trainer like its own."""
    (root,) = importlib.util.find_spec("openrlhf").submodule_search_locations or []
    for name, where in (("openrlhf", root), ("openrlhf.models", f"{root}/models"), ("openrlhf.trainer.ray", f"{root}/none")):
        package = ModuleType(name)
        package.__path__ = [where]
        monkeypatch.setitem(sys.modules, name, package)
    if "deepspeed" not in sys.modules:
        monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))  # utils.py imports it, and loss.py does not use it
    for name in ("openrlhf.models.loss", "openrlhf.models.utils"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.import_module("openrlhf.models.loss")
    kinds = {
        "models.actor": Actor, "trainer.ray.ppo_actor": ActorPPOTrainer, "trainer.ray.ppo_critic": CriticPPOTrainer,
        "trainer.dpo_trainer": DPOTrainer, "trainer.rm_trainer": RewardModelTrainer, "utils.deepspeed.deepspeed": DeepspeedStrategy,
    }  # fmt: skip
    made = {f"openrlhf.{name}": type(kind.__name__, (kind,), dict(vars(kind))) for name, kind in kinds.items()}
    for name, kind in made.items():
        module = ModuleType(name)
        kind.__module__ = name
        setattr(module, kind.__name__, kind)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(losses, "_attached", {})
    actor, trainer, critic, preferences, rewards, _ = made.values()
    yield SimpleNamespace(
        Actor=actor,
        Trainer=trainer,
        Critic=critic,
        Preferences=preferences,
        Rewards=rewards,
        PolicyLoss=sys.modules["openrlhf.models.loss"].PolicyLoss,
    )
    for name in ("openrlhf.models.loss", "openrlhf.models.utils"):
        sys.modules.pop(name, None)


def experiences(actor, steps):
    """Micro-batches with the old log-probs of this actor, and a critic's old values and returns."""
    made, batches = torch.Generator().manual_seed(3), []
    for _ in range(steps):
        lengths = torch.randint(2, ANSWER + 1, (ROWS, 1), generator=made)
        at = torch.arange(ANSWER)
        prompt = torch.randint(10, 90, (1, PROMPT), generator=made).expand(ROWS, -1)
        answer = torch.randint(10, 90, (ROWS, ANSWER), generator=made).where(at < lengths - 1, 2).where(at < lengths, 0)
        mask = at < lengths
        sequences, attention = torch.cat((prompt, answer), 1), torch.cat((torch.ones_like(prompt), mask.long()), 1)
        with torch.no_grad():
            old = actor(sequences, mask, attention_mask=attention)
        advantages = torch.randn(ROWS, 1, generator=made).expand(ROWS, ANSWER)
        facts = (torch.rand(ROWS, generator=made), lengths[:, 0].float(), torch.zeros(ROWS).bool())
        values = torch.randn(2, ROWS, ANSWER, generator=made)
        batches.append(Experience(sequences, attention, mask, old, old + 0.02, advantages, *facts, *values))
    return batches


def normalization(batches, number):
    """What OpenRLHF's `get_loss_batch_info` returns for a micro-batch of these."""
    window = batches[number // MICRO * MICRO :][:MICRO]
    return {"dp_size": 1, "batch_num_tokens": sum(each.action_mask.sum() for each in window).float() / MICRO}
