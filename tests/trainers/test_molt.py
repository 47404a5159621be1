"""Molt is recorded without an adapter being named, by `patch` as by `run`; its package is made up here, in the shape of 0.2.1."""

import contextlib
import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from actorcases import make_dump
from adaptercases import dumps_of, record_here
from commandline import in_json, invoke

from actordbg.actor.rules import check_config
from actordbg.actor.session import ActorSession
from actordbg.config.choices import Facts
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import FORWARD
from actordbg.install import patching
from actordbg.trainers.find_adapter import carried_form

FILES = {
    "models/actor.py": """
import torch

class Named(dict):
    pass

def log_probs_from_logits(logits, ids, temperature):
    return (logits.float() / temperature).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)

class Actor(torch.nn.Module):
    def __init__(self, model, temperature=1.0):
        super().__init__()
        self.model, self.temperature = model, temperature

    def masked(self, attention_mask):
        return attention_mask

    def forward(self, sequences, action_mask=None, attention_mask=None, position_ids=None, cp_context_stack=None,
                return_entropy=False, routed_experts=None, top_ids=None, **mm_inputs):
        if position_ids is None:
            position_ids = (attention_mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        output = Named(self.model(sequences, attention_mask=self.masked(attention_mask), position_ids=position_ids))
        if return_entropy:
            every = (output["logits"].float() / self.temperature).log_softmax(-1)
            output["entropy"] = -(every.exp() * every).sum(-1)[:, :-1]
        output["log_probs"] = log_probs_from_logits(output["logits"], sequences.roll(-1, 1), self.temperature)[:, :-1]
        if action_mask is not None:
            output["action_log_probs"] = output["log_probs"][:, -action_mask.shape[1] :] * action_mask.float()
        return output
""",
    "models/loss.py": """
import torch

class PolicyLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.clip_eps_low = self.clip_eps_high = 0.2
        self.dual_clip, self.token_level_loss, self.loss_agg_mode, self.loss_mode = None, True, "token-mean", "ppo"
        self.is_correction_level, self.is_correction_mode, self.is_correction_threshold = "off", "mask", None

    def forward(self, log_probs, old_log_probs, advantages, action_mask=None, rollout_log_probs=None, dp_size=1,
                batch_num_tokens=None, global_batch_size=None, prompt_token_counts=None):
        ratio = torch.nan_to_num(log_probs - old_log_probs, nan=0.0).exp()
        terms = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return -torch.where(action_mask, terms, 0.0).sum() / batch_num_tokens * dp_size, terms.detach().mean()

class SFTLoss(torch.nn.Module):
    token_level_loss, loss_agg_mode = True, "token-mean"

    def forward(self, per_token_logps, loss_mask, dp_size=1, batch_num_tokens=None, global_batch_size=None):
        return -(per_token_logps * loss_mask).sum() / batch_num_tokens * dp_size
""",
    "trainer/fsdp/strategy.py": """
from collections import defaultdict

class FsdpStrategy:
    accumulated_gradient, norm = 2, 0.5

    def __init__(self):
        self.time_steps = defaultdict(int)

    def backward(self, loss, model):
        loss.backward()

    def get_grad_norm(self, model):
        return self.norm
""",
    "trainer/workers/policy_actor.py": """
from contextlib import ExitStack
import torch

class PolicyTrainer:
    def __init__(self, **given):
        vars(self).update(given)

    def training_step(self, experience, kl_ctl, batch_num_tokens, is_optimizer_step):
        got = self.actor(experience.sequences, experience.action_mask, attention_mask=experience.attention_mask,
                         cp_context_stack=ExitStack(), routed_experts=None, top_ids=None)
        loss, _ = self.loss(got["action_log_probs"], experience.old, experience.advantages, action_mask=experience.action_mask,
                            rollout_log_probs=experience.rollout, batch_num_tokens=batch_num_tokens)
        self.strategy.backward(loss, self.actor)
        if is_optimizer_step:
            self.strategy.norm = torch.nn.utils.get_total_norm([each.grad for each in self.actor.parameters()]).item()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.strategy.get_grad_norm(self.actor)
        return loss
""",
    "trainer/sft_trainer.py": """
class SFTTrainer:
    def __init__(self, **given):
        vars(self).update(given)

    def _run_microbatch(self, sequences, attention_mask, loss_mask):
        got = self.model(sequences, attention_mask=attention_mask, cp_context_stack=None)
        loss = self.loss(got["log_probs"], loss_mask, batch_num_tokens=loss_mask.sum() * self.strategy.accumulated_gradient)
        loss.backward()
        self.strategy.time_steps["step_model"] += 1
        self.strategy.get_grad_norm(self.model)
        return loss
""",
}


def _shifted(values):
    return values.roll(1, 1)


def _nan(values):
    return values.clone().index_put((torch.tensor([0]), torch.tensor([-4])), torch.tensor(float("nan")))


FAULTS = {
    "healthy": ("", ""),
    "shifted": ("alignment", "trainer"),
    "nan": ("finite", "trainer"),
    "temperature": ("temperature", "trainer"),
    "mask": ("ratio", "trainer"),
}
"""The law that each fault breaks, and its side."""


@pytest.fixture
def molt(store, tmp_path, monkeypatch):
    """The package, whose actor.py is patched; the modules of its actor, losses, trainers and strategy."""
    for name, text in FILES.items():
        path = tmp_path / "molt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in (path.parent, path.parents[1]):
            (folder / "__init__.py").touch()
    info = tmp_path / "molt_rl-0.2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: molt-rl\nVersion: 0.2.1\n")
    for proof in ("require_hook", "require_seen"):  # by another interpreter, which takes seconds
        monkeypatch.setattr(patching, proof, lambda *_: "0")
    told = invoke(store, "patch --target", str(tmp_path / "molt/models/actor.py"))
    assert told.exit_code == 0 and "not OpenRLHF's" in told.output
    monkeypatch.syspath_prepend(str(tmp_path))
    record_here(store, calls=["forward", "loss"])
    yield [importlib.import_module(f"molt.{name.removesuffix('.py').replace('/', '.')}") for name in FILES]
    for name in [name for name in sys.modules if name.partition(".")[0] == "molt"]:
        del sys.modules[name]


def _model(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=99, initializer_range=0.2, use_cache=False, **sizes))
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_training_step_is_recorded_with_its_loss_and_a_fault_in_its_path_has_a_side(molt, fault, store, tmp_path, monkeypatch):
    """The loss of NaN log-probs is finite there: the log-probs themselves are looked at."""
    monkeypatch.setenv("ACTORDBG_DISABLE", "")
    acting, losses, strategies, training, _ = molt
    model = _model(tmp_path / "model")
    actor = acting.Actor(model, 1.0 if fault == "temperature" else 0.7)
    trainer = training.PolicyTrainer(
        actor=actor, loss=losses.PolicyLoss(), strategy=strategies.FsdpStrategy(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), actor_scheduler=SimpleNamespace(get_last_lr=lambda: [1e-3]),
        args=SimpleNamespace(rollout=SimpleNamespace(temperature=0.7)),
    )  # fmt: skip
    original, chance = acting.log_probs_from_logits, torch.Generator().manual_seed(1)
    change = {"shifted": _shifted, "nan": _nan}.get(fault, lambda values: values)
    for _ in range(2):
        for micro_batch in range(2):
            ids, real = torch.randint(3, 99, (4, 24), generator=chance), torch.ones(4, 24, dtype=torch.int64)
            real[0, :5] = 0
            mask = (torch.arange(1, 24) > 7).expand(4, 23)
            with torch.no_grad():
                old = actor(ids, mask, attention_mask=real)["action_log_probs"]
            noise = 1e-3 * torch.randn(old.shape, generator=chance)
            experience = SimpleNamespace(
                sequences=ids, attention_mask=real, action_mask=mask, old=old, rollout=(old + noise) * mask
            )
            experience.advantages = torch.randn(4, 1, generator=chance) * mask
            acting.log_probs_from_logits = lambda *given: change(original(*given))
            if fault == "mask":
                actor.masked = torch.ones_like
            loss = trainer.training_step(experience, 0.0, 2 * mask.sum(), is_optimizer_step=micro_batch == 1)
            acting.log_probs_from_logits = original
            vars(actor).pop("masked", None)
            assert loss.isfinite()
    dumps = dumps_of(store)
    assert sorted((dump.record.step, dump.record.point) for dump in dumps) == [
        (step, point) for step in range(2) for point in ["forward"] * 4 + ["loss"] * 2
    ]
    assert {dump.record.versions["molt-rl"] for dump in dumps} == {"0.2.1"}
    assert all(dump.record.replayable for dump in dumps if dump.record.point == FORWARD)
    answer = in_json(store, "lint")
    rule, side = FAULTS[fault]
    assert answer["sentence"].startswith(f"WRONG ({side})" if rule else "RIGHT"), answer["sentence"]
    assert {each["rule"] for each in answer["findings"]} >= ({rule} if rule else set())
    if not rule:
        losses = [dump.outputs for dump in dumps if dump.record.point != FORWARD]
        assert all(each["backward_loss"] == each["loss"] for each in losses)
        for through in ("trainer", "rows"):
            config = ReplayConfig(model=str(tmp_path / "model"), dtype="fp32", attn="sdpa", through=through, backend="plain")
            first = [dump for dump in dumps if dump.record.point == FORWARD and dump.record.step == 0]
            session = ActorSession(config, first[0].record, tmp_path / "cache")
            for dump in first:
                apart = (session.run(dump, backward=False).log_probs - dump.outputs["action_log_probs"]).abs().max()
                assert apart < 2e-5 and (through == "rows" or apart == 0)
            session.close()
        step = in_json(store, "step --step 0 --dtype fp32 --model", tmp_path / "model")
        assert step["verdict"] == "RIGHT" and step["grad_norm"]["recorded"], step["sentence"]


def test_an_sft_step_ends_with_its_last_micro_batch_and_what_its_calls_have_beside_is_kept(molt, store, tmp_path, monkeypatch):
    monkeypatch.setenv("ACTORDBG_DISABLE", "")
    acting, losses, strategies, _, tuning = molt
    actor = acting.Actor(_model(tmp_path / "model"))
    trainer = tuning.SFTTrainer(model=actor, loss=losses.SFTLoss(), strategy=strategies.FsdpStrategy())
    ids, mask = torch.randint(3, 99, (2, 8)), torch.ones(2, 8, dtype=torch.int64)
    for _ in range(4):
        trainer._run_microbatch(ids, mask, mask[:, 1:])
    chosen, experts = torch.zeros(2, 7, 3, dtype=torch.int64), torch.zeros(2, 1, 1, 8, dtype=torch.int64)
    with torch.no_grad(), contextlib.ExitStack() as stack:
        stack.callback(list)  # a context that is not empty: the forward may have filled it
        actor(ids, mask[:, 1:], mask, 2 * torch.arange(8).expand(2, 8), stack, True, experts, chosen)
    dumps = dumps_of(store)
    of_loss = [(dump.record.step, float(dump.tensors["context.micro_batch"])) for dump in dumps if dump.record.point == "loss"]
    assert sorted(of_loss) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    last = dumps[-1]
    assert {"position_ids", "context.routed_experts", "context.top_ids"} <= {*last.tensors} and last.record.replayable
    assert {*last.outputs} == {"action_log_probs", "entropy"}


def test_the_actor_runs_again_around_a_model_that_fsdp2_shards_but_under_no_other_launcher():
    record = make_dump(actor={"adapter": "molt"}).record
    for backend in ("fsdp2", "deepspeed"):
        config = ReplayConfig(through="trainer", backend=backend, nproc=2)
        hits = [hit.id for hit in check_config(config, Facts(cuda=False, gpus=0, flash_attn=False), record)]
        assert ("trainers-function-is-alone" in hits) == (backend == "deepspeed")


def test_run_waits_for_its_modules_without_being_told():
    assert carried_form([]).startswith("molt=molt.models.actor,molt.models.loss,")
