"""Adapters that are declared from sources: stand-ins with the signatures, arguments and results of those, around a small model.

Read: AReaL 1.0.4 (4aef98d), miles 0.1.0 (31f1ca9), NeMo-RL 0.6.0 (7ea279a), prime-rl 0.8.0 (559b447), slime 0.3.1 (624b824).
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from adaptercases import dumps_of, record_here, small_model, truth_of
from recordedfields import unlisted_of

from actordbg.recorded.lint import lint
from actordbg.recorded.recorded_calls import RecordedCall
from actordbg.trainers import recorded_model

ROWS = [torch.tensor([5, 9, 11, 2, 7, 3]), torch.tensor([4, 8, 4, 1])]
ANSWERS, TOTALS, HEAT = [3, 2], [6, 4], 0.7
WIDE, LONG = torch.nn.utils.rnn.pad_sequence(ROWS, batch_first=True), torch.cat(ROWS)[None]
COUNTED = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]])
"""Marks the tokens of the responses."""
Made: TypeAlias = "tuple[list[ModuleType], Callable[[], object]]"
"""Modules with a trainer's functions, and what trains a step of two micro-batches."""


def module(name, *functions):
    made = ModuleType(name)
    vars(made).update({function.__name__: function for function in functions})
    return made


def scored(logits, ids, heat=HEAT):
    """Log-probs of the token behind each; of the last one's, a token 0."""
    following = torch.nn.functional.pad(ids[..., 1:], (0, 1))
    return (logits.float() / heat).log_softmax(-1).gather(-1, following[..., None]).squeeze(-1)


def packed(model):
    return torch.cat([model(input_ids=row[None]).logits for row in ROWS], 1)


def nemo_rl(model):
    def model_forward(model, processed_inputs, is_reward_model=False):
        return model(input_ids=processed_inputs.input_ids, attention_mask=processed_inputs.attention_mask)

    def forward_with_post_processing_fn(model, post_processing_fn, processed_mb, sampling_params=None):
        logits = at.model_forward(model, processed_mb.processed_inputs).logits.div_(sampling_params.temperature)  # in place
        new = scored(logits, WIDE, 1.0)[:, :-1]
        return post_processing_fn(next_token_logprobs=new, data=processed_mb.data_dict), {}, processed_mb

    def automodel_forward_backward(model, data_iterator, post_processing_fn, forward_only=False):
        heat, results = SimpleNamespace(temperature=HEAT), []
        for each in data_iterator:
            results.append(at.forward_with_post_processing_fn(model, post_processing_fn, each, heat)[0])
            results[-1][0].backward()
        return results

    class NLLLossFn:
        def __call__(self, next_token_logprobs, data):
            return -(next_token_logprobs * data["token_mask"][:, 1:]).sum(), {}

    class ClippedPGLossFn:
        __call__ = NLLLossFn.__call__

    at = module("nemo_rl.models.automodel.train", model_forward, forward_with_post_processing_fn, automodel_forward_backward)
    data = {"input_ids": WIDE, "input_lengths": torch.tensor(TOTALS), "token_mask": COUNTED, "sample_mask": torch.ones(2).long()}
    data |= {"advantages": COUNTED * 0.5, "prev_logprobs": COUNTED * -1.0, "generation_logprobs": COUNTED * -1.1}
    ones = {
        "input_ids": WIDE,
        "attention_mask": torch.ones_like(WIDE),
        "flash_attn_kwargs": {},
        "vlm_kwargs": {},
        "cp_buffers": [],
    }
    batches = [SimpleNamespace(data_dict=data, processed_inputs=SimpleNamespace(**ones))] * 2
    losses = module("nemo_rl.algorithms.loss.loss_functions", ClippedPGLossFn, NLLLossFn)
    return [at, losses], lambda: at.automodel_forward_backward(model, batches, ClippedPGLossFn())


def prime_rl(model):
    def forward(
        model, input_ids, position_ids, *, seq_lens, labels = None, temperature = None,
        routed_experts = None, mm_kwargs = None, mm_token_type_ids = None, seq_lens_are_pre_shard = False,
    ):  # fmt: skip
        return {"logprobs": scored(packed(model), input_ids), "entropy": torch.zeros(input_ids.shape)}

    def compute_loss(
        trainer_logprobs, inference_logprobs, ref_logprobs, advantages, loss_mask, rl_weights,
        rl_scale,
    ):  # fmt: skip
        return -sum((n * m).sum() for n, m in zip(trainer_logprobs, loss_mask, strict=True)) / rl_scale, {}

    def clip_grad_norm_(manager, model, max_norm, ep_enabled):
        return torch.tensor(2.5)

    at, losses = module("prime_rl.trainer.model", forward), module("prime_rl.trainer.rl.loss", compute_loss)
    steps = module("prime_rl.trainer.utils", clip_grad_norm_)

    def train():
        mask = [kept[:total].bool() for kept, total in zip(COUNTED, TOTALS, strict=True)]
        for _ in range(2):
            given = {"seq_lens": torch.tensor(TOTALS), "temperature": torch.full(LONG.shape, HEAT)}
            new = at.forward(model, LONG, LONG, **given)["logprobs"].roll(1, 1).squeeze().split(TOTALS)
            weights = [kept * 0.5 for kept in mask]
            losses.compute_loss(new, [values.detach() - 0.1 for values in new], None, weights, mask, None, 5)[0].backward()
        steps.clip_grad_norm_(None, model, 1.0, False)

    return [at, losses, steps], train


def areal(model):
    class FSDPEngine:
        config, parallel_helper = SimpleNamespace(is_critic=False, temperature=HEAT), SimpleNamespace(sp_size=1)

        def _compute_logprobs(self, logits, inputs, ulysses_pad_size=0):
            return scored(logits, inputs["input_ids"].squeeze(0))

        def _compute_logprobs_entropy(self, logits, inputs, ulysses_pad_size=0):
            return scored(logits, inputs["input_ids"].squeeze(0)), torch.zeros(logits.shape[0])

        def _compute_logprobs_and_loss(self, logits, ctx):
            new, entropy = (of[: -ctx.pad_length] for of in self._compute_logprobs_entropy(logits, ctx.model_inputs))
            return actor.grpo_loss_fn(new, entropy, ctx.mb_input)

        def optimizer_step(self):
            return {"grad_norm": 2.5}

    def grpo_loss_fn(logprobs, entropy, input_data):
        return -(logprobs * input_data["loss_mask"]).sum()

    at, actor = module("areal.engine.fsdp_engine", FSDPEngine), module("areal.trainer.ppo.actor", grpo_loss_fn)
    engine = FSDPEngine()
    engine.model = model
    mask = torch.cat([kept[:total].roll(-1) for kept, total in zip(COUNTED, TOTALS, strict=True)])
    data = {"input_ids": LONG, "loss_mask": mask, "advantages": mask * 0.5, "logprobs": mask * -1.1, "prox_logp": mask * -1.0}
    padded = {"input_ids": torch.nn.functional.pad(LONG, (0, 2)), "cu_seqlens": torch.tensor([0, 6, 10, 12])}
    context = SimpleNamespace(model_inputs=padded, mb_input=data, pad_length=2)

    def train():
        for _ in range(2):
            behind = model(input_ids=torch.zeros(1, 2, dtype=torch.long)).logits
            engine._compute_logprobs_and_loss(torch.cat((packed(model), behind), 1).squeeze(0), context).backward()
        engine.optimizer_step()

    return [at, actor], train


def listed(model, slime):
    args = SimpleNamespace(rollout_temperature=HEAT, allgather_cp=False, use_rollout_logprobs=False)
    own = {"advantages": 0.5, "log_probs": -1.0, "rollout_log_probs": -1.1, "loss_masks": 1.0}
    batch = {name: [torch.full((count,), value) for count in ANSWERS] for name, value in own.items()}
    rows = {"unconcat_tokens": ROWS, "total_lengths": TOTALS, "response_lengths": ANSWERS}

    def get_log_probs_and_entropy(logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False):
        every = scored(logits, LONG).squeeze(0).split(total_lengths)
        found = [row[-count - 1 : -1] for row, count in zip(every, response_lengths, strict=True)]
        given = {"log_probs": found, "entropy": [of * 0 for of in found]}
        return (torch.empty(0), given) if slime else given

    def policy_loss_function(args, batch, logits, sum_of_sample_mean):
        scores = at.get_log_probs_and_entropy(logits, args=args, with_entropy=True, **rows)
        return -torch.cat((scores[1] if slime else scores)["log_probs"]).sum(), {}

    class FSDPTrainRayActor:
        model: Any
        ref_model = None

        def _train_step(self, batch, step_id=0, num_microbatches=2):
            losses.policy_loss_function(args, batch, packed(self.model), None)[0].backward()

        def _compute_log_prob(self, model_tag, data_iterator, num_microbatches, store_prefix=""):
            """Score nothing."""

    def forward_only(f, args, model, data_iterator=None, store_prefix=""):
        f(packed(model[0]), args=args, **rows)

    def train_one_step(args, model):
        for _ in range(2):
            losses.policy_loss_function(args, batch | rows, packed(model[0]), None)[0].backward()

    FSDPTrainRayActor.model = model
    if slime:
        at = losses = module("slime.backends.megatron_utils.loss", get_log_probs_and_entropy, policy_loss_function)
        steps = module("slime.backends.megatron_utils.model", forward_only, train_one_step)

        def train():
            steps.forward_only(at.get_log_probs_and_entropy, args, [model], store_prefix="ref_")  # not recorded
            steps.train_one_step(args, [model])

        return [at, steps], train
    hub = "miles.backends.training_utils.loss_hub"
    at, losses = module(f"{hub}.logit_processors", get_log_probs_and_entropy), module(f"{hub}.losses", policy_loss_function)
    steps, actor = module("miles.backends.fsdp_utils.actor", FSDPTrainRayActor), FSDPTrainRayActor()
    return [at, losses, steps], lambda: [actor._train_step(batch | rows) for _ in range(2)]


TRAINERS: dict[str, Callable[[Any], Made]] = {
    "nemo-rl": nemo_rl, "prime-rl": prime_rl, "areal": areal, "slime": lambda model: listed(model, True),
    "miles": lambda model: listed(model, False),
}  # fmt: skip


@pytest.mark.parametrize("name", TRAINERS)
def test_a_declared_trainer_is_recorded_with_its_losses_and_its_log_probs_are_those_of_the_truth(
    store, tmp_path, monkeypatch, name
):
    monkeypatch.setattr(recorded_model._Inside, "has_steps", False)  # by another test's adapter
    model = small_model(tmp_path / "model")
    modules, train = TRAINERS[name](model)
    folder = record_here(store, calls=["forward", "loss"])
    for made in modules:
        assert recorded_model.attach(made, name, folder), made.__name__
    train()
    dumps = dumps_of(store)
    forwards = [dump for dump in dumps if dump.record.point == "forward"]
    losses = [RecordedCall.read(str(store.dump_path(dump.record))) for dump in dumps if dump.record.point == "loss"]
    assert len(forwards) == len(losses) == 2 and {call.forward_id for call in losses} == {f.record.dump_id for f in forwards}
    for dump in forwards:
        assert dump.record.replayable and dump.record.temperature == pytest.approx(HEAT), dump.record.extra
        assert [row[row != 0].tolist() for row in dump.inputs["sequences"][:2]] == [row.tolist() for row in ROWS]
        (found,) = (of for of_name, of in dump.outputs.items() if "log_probs" in of_name)
        truth = truth_of(tmp_path / "model", dump)
        mask = dump.inputs.get("action_mask", dump.inputs["attention_mask"][:, 1:])[:2] != 0
        assert (found[:2] - truth[:2])[mask].abs().max() < 2e-5 and mask.sum() in (5, 8)
    for call in losses:
        named, active = call.log_probs(), call.active
        assert active is not None and call.actions is not None and call.actions[active].tolist() == [2, 7, 3, 4, 1]
        assert {"log_probs", "rollout_log_probs"} <= set(named) and (named["log_probs"][active] < 0).all()
    findings = lint(store.root, [str(path.relative_to(store.root)) for path in store.iter_dumps()])
    assert {law.name for law in findings.broken} <= {"duplicates"}, "both micro-batches are the same"
    assert not unlisted_of(store.iter_dumps())
