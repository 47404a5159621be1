"""An optimizer step of a real tiny model, recorded as a trainer records it, right or with a fault: forwards, losses, norms."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from catalogcases import record
from torch import Tensor

from actordbg.actor.models import build_tiny
from actordbg.formats.dump_record import LOSS, make_dump_id
from actordbg.steps.run_step import Side
from actordbg.store import payload
from actordbg.store.layout import Store

ROWS, PROMPT, ANSWER, VOCAB = 2, 3, 6, 64
PPO_FACTS = {
    "loss.policy_loss_type": "ppo", "loss.clip_eps_low": 0.2, "loss.clip_eps_high": 0.2, "loss.dual_clip": None,
    "loss.token_level_loss": True, "loss.is_correction_level": "token", "loss.is_correction_gating": "ratio",
    "loss.is_correction_mode": "mask", "loss.is_correction_threshold": [0.5, 5.0], "dynamic_batch": False,
    "rollout.temperature": 1.0, "rollout.top_p": 1.0,
}  # fmt: skip
LOSS_FACTS = {**PPO_FACTS, "max_norm": 1.0, "engine_max_norm": 1.0}


@dataclass
class RecordedRun:
    """A step of `ranks` x `places` micro-batches in a store, and what a replay of it computes: `reference`.

    real: its model is on disk. How it was recorded may be wrong: dp_size, tokens (a factor of batch_num_tokens), engine (DeepSpeed's accumulation), applied
    (all, last, twice, first twice, no middle, last of a rank, last of a rank twice, all but a parameter, sums clipped, each clipped, clipped, scaled, a third, or missing), kl and entropy ("" none, right, missing, negated; kl also k2), doubled (backward got twice the loss), terms (how the loss's terms are not PPO's: no clip,
    clipped alone, inverse ratio, inverse weights), lora (it trains an adapter), learns (whether the first micro-batch has advantages), loss (a change of its terms), facts (other recorded values).
    """

    store: Store
    model: Path
    ranks: int = 2
    places: int = 2
    real: bool = False
    dp_size: int | None = None
    tokens: float = 1.0
    apart: float = 0.0
    engine: int | None = None
    applied: str = "all"
    kl: str = ""
    entropy: str = ""
    doubled: bool = False
    terms: str = ""
    learns: bool = True
    lora: bool = False
    loss: Callable[[Tensor], Tensor] = lambda terms: terms
    function: str = "openrlhf.models.loss:PolicyLoss.forward"
    facts: dict[str, Any] = field(default_factory=dict)
    reference: Side = field(default_factory=Side)

    def write(
        self,
        moved=0.0,
        *,
        process=0,
        step=4,
        publishes=lambda record: True,
    ):
        """Publish the dumps. moved: nats by which the recorded log-probs are not those of the model: other weights. process:
        a later job's processes. publishes: which losses are recorded.
        """
        self._process, self._step, self._publishes = process, step, publishes
        self._made, self._entropies = torch.Generator().manual_seed(5), list[Tensor]()
        model = self._tiny_model() if self.real else self._pairs()
        batches = [(place, rank, self._batch(model, moved)) for place in range(self.places) for rank in range(self.ranks)]
        total = sum(int(batch["action_mask"].sum()) for _, _, batch in batches)
        alone, parts, figures = [], [], []
        for (_, rank, batch), entropy in zip(batches, self._entropies, strict=True):
            part = self._terms(batch).sum() / total
            bonus = 0.1 * entropy / total if self.entropy else 0.0
            (part + (0.1 * self._kl(batch).sum() / total if self.kl else 0.0) - bonus).backward()
            figures.append({"loss": float(part.detach()), "entropy": float(entropy.detach())})
            parts.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
            model.zero_grad()
            if rank == self.ranks - 1:
                alone.append(sum(parts[-self.ranks :]))
                figures[-1]["alone"] = float(alone[-1].norm())
        total_gradient = sum(alone)
        whole = float(total_gradient.norm())
        figures[-1] |= {"grad_norm": whole, "products": [[float(one @ other) for other in parts] for one in parts]}
        sizes = [parameter.numel() for parameter in model.parameters()]
        figures[-1]["squares"] = {str(at): float(each @ each) for at, each in enumerate(total_gradient.split(sizes))}
        log_probs = tuple(batch["log_probs"].detach().numpy() - moved for _, _, batch in batches)
        self.reference = Side(tuple(figures), log_probs, {})
        norms = {"all": whole, "last": figures[-1]["alone"], "twice": 2 * whole, "missing": None}
        middle = alone[len(alone) // 2]
        norms |= {"first twice": float((total_gradient + alone[0]).norm()), "no middle": float((total_gradient - middle).norm())}
        limit, summed = self.facts.get("max_norm", 1.0), 0 * middle
        for each in alone:
            summed = each + summed * min(1.0, limit / float(summed.norm() + 1e-9))
        norms |= {
            "last of a rank": float((total_gradient - parts[-1]).norm()),
            "last of a rank twice": float((total_gradient + parts[-1]).norm()),
            "all but a parameter": (whole**2 - figures[-1]["squares"]["1"]) ** 0.5,
            "sums clipped": float(summed.norm()),
            "each clipped": float(sum(each * min(1.0, limit / float(each.norm())) for each in alone).norm()),
            "clipped": 1.0, "scaled": 65536 * whole, "a third": whole / 3,
        }  # fmt: skip
        self._publish(batches, total, norms[self.applied])

    def _tiny_model(self):
        """A tiny Llama on disk, which a replay loads."""
        from transformers import AutoModelForCausalLM

        build_tiny(self.model, vocab_size=VOCAB, hidden_size=32, head_dim=8, intermediate_size=32, pad_token_id=0, eos_token_id=2)
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32, attn_implementation="eager")

    def _pairs(self):
        """A model that knows pairs of tokens, for tests that replay nothing."""
        model = torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB))
        for parameter in model.parameters():
            parameter.data.normal_(generator=self._made)
        return model

    def _batch(self, model, moved):
        lengths = torch.randint(2, ANSWER + 1, (ROWS, 1), generator=self._made)
        mask = torch.arange(ANSWER) < lengths
        prompt = torch.randint(3, VOCAB, (ROWS, PROMPT), generator=self._made)
        answer = torch.randint(3, VOCAB, (ROWS, ANSWER), generator=self._made).where(mask, 0)
        sequences, attention = torch.cat((prompt, answer), 1), torch.cat((torch.ones_like(prompt), mask.long()), 1)
        logits = model(sequences, attention_mask=attention, use_cache=False).logits if self.real else model(sequences)
        logits = logits[:, PROMPT - 1 : -1]
        each = logits.log_softmax(-1)
        self._entropies.append(-((each.exp() * each).sum(-1) * mask).sum())
        log_probs = each.gather(2, answer[..., None])[..., 0] * mask + moved
        old = (log_probs + 0.3 * torch.randn(ROWS, ANSWER, generator=self._made)).detach()
        advantages = torch.randn(ROWS, 1, generator=self._made).expand(ROWS, ANSWER).contiguous()
        advantages *= self.learns or len(self._entropies) > 1
        return {
            "sequences": sequences, "attention_mask": attention, "action_mask": mask, "log_probs": log_probs, "advantages": advantages,
            "old_log_probs": old, "rollout_log_probs": old + 0.01, "context.base_action_log_probs": old - 0.2,
        }  # fmt: skip

    def _terms(self, batch, wrong=""):
        apart, inverse = batch["log_probs"] - batch["old_log_probs"], wrong == "inverse weights"
        ratio, advantages = (-apart if wrong == "inverse ratio" else apart).exp(), batch["advantages"]
        plain, clipped = ratio * advantages, ratio.clamp(0.8, 1.2) * advantages
        objective = {"no clip": plain, "clipped alone": clipped}.get(wrong, torch.minimum(plain, clipped))
        weights = ((batch["old_log_probs"] - batch["rollout_log_probs"]) * (-1 if inverse else 1)).exp()
        return torch.where(batch["action_mask"], -objective * weights, 0.0)

    def _kl(self, batch):
        return torch.where(batch["action_mask"], batch["log_probs"] - batch["context.base_action_log_probs"], 0.0)

    def _record(self, index, rank):
        made = record(index + self._process)
        return replace(made, dump_id=make_dump_id(made.timestamp, index, 4711 + self._process + rank, f"{index:08x}"))

    def _publish(self, batches, total, norm):
        dp_size, engine = self.dp_size or self.ranks, self.engine or self.places
        by = total / self.places * self.tokens
        facts = {**LOSS_FACTS, "engine_accumulation": engine, "accumulation": self.places, **self.facts}
        facts |= {"kl.use_loss": True, "kl.init_coef": 0.1, "kl.estimator": "k1"} if self.kl else {}
        facts |= {"entropy_coef": 0.1} if self.entropy else {}
        whole = by
        for number, (place, rank, batch) in enumerate(batches):
            by = whole * (1 + self.apart * rank)  # what a rank counts for itself
            loss = self.loss(self._terms(batch, self.terms)).sum() / by * dp_size
            kl = {"right": 1.0, "negated": -1.0, "k2": 0.5 * self._kl(batch)}.get(self.kl, 0.0) * self._kl(batch)
            bonus = {"right": 1.0, "negated": -1.0}.get(self.entropy, 0.0) * self._entropies[number]
            backward = loss * (2 if self.doubled else 1) + 0.1 * (kl.sum() - bonus) / by * dp_size
            common = {
                "batch_size": ROWS, "seq_len": PROMPT + ANSWER, "tokens": int(batch["attention_mask"].sum()), "run": "ppo",
                "world_size": self.ranks, "model_dtype": "float32", "action_len": ANSWER, "rank": rank, "step": self._step, "training": True,
                "host": "node", "pid": 4711 + self._process + rank,
                "monotonic_ns": number, "grad_enabled": True, "model_name": str(self.model), "role": "policy",
            }  # fmt: skip
            forward = replace(self._record(2 * number, rank), **(common | {"arguments": {"return_output": True}}))
            inputs = {name: batch[name] for name in ("sequences", "attention_mask", "action_mask")}
            self.store.publish_dump(*payload.encode(forward, inputs))
            held = {name: tensor.detach() for name, tensor in batch.items()}
            held |= {
                "batch_num_tokens": torch.tensor(by),
                "output.loss": loss.detach(),
                "output.backward_loss": backward.detach(),
            }
            held["context.kl_ctl"] = torch.tensor(0.1)
            if place == self.places - 1 and norm is not None:
                held["output.grad_norm"] = torch.tensor(norm)
            arguments = {f"context.{name}": value for name, value in facts.items()} | {"dp_size": dp_size}
            arguments |= {"context.forward": forward.dump_id, "context.micro_batch": place}
            actor = {"function": self.function, "zero_stage": 2, "wrapper_class": "DeepSpeedEngine", "lora": self.lora}
            changed = {"arguments": arguments, "point": LOSS, "actor": actor, "role": "policy loss", "replayable": False}
            described = replace(self._record(2 * number + 1, rank), **(common | changed))
            if self._publishes(described):
                self.store.publish_dump(*payload.encode(described, held))
