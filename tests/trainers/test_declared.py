"""Adapters that are declared from sources: stand-ins with the signatures, arguments and results of those, around a small model.

Read: AReaL 1.0.4 (4aef98d), miles 0.1.0 (31f1ca9), NeMo-RL 0.6.0 (7ea279a), prime-rl 0.8.0 (559b447), slime 0.3.1 (624b824).
"""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from adaptercases import dumps_of, record_here, small_model, truth_of
from recordedfields import linted, unlisted_of

from actordbg.recorded.recorded_calls import RecordedCall
from actordbg.trainers import recorded_model
from actordbg.trainers.declared_adapter import prime_loss

ROWS = [torch.tensor([5, 9, 11, 2, 7, 3]), torch.tensor([4, 8, 4, 1])]
ANSWERS, TOTALS, HEAT = [3, 2], [6, 4], 0.7
WIDE, LONG = torch.nn.utils.rnn.pad_sequence(ROWS, batch_first=True), torch.cat(ROWS)[None]
COUNTED = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0]])
"""Marks the tokens of the responses."""


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


STEP = {"now": 0}
"""The optimizer step that runs. In the second and in the third the trainer's loss has a fault (`FAULTS`)."""
GAIN = torch.tensor([[0.5, 0.4, 0.3, 0.5, 0.4, 0.5], [-0.5, -0.4, -0.6, -0.5, -0.7, -0.4]])
APART = torch.tensor([[0.0, 0.1, 0.1, -0.5, 0.1, -0.3], [0.0, 0.1, 0.5, -0.4, 0.0, 0.0]])
"""How much likelier a token is under an older policy than now, in nats, [B, S]."""


def in_step(number):
    return STEP["now"] == number


def scores_of(model):
    """The model's log-probs of the token at each place, [B, S]; 0 at the first, and in padding."""
    with torch.no_grad():
        rows = [scored(model(input_ids=row[None]).logits, row[None]).squeeze(0)[:-1] for row in ROWS]
    return torch.stack([torch.nn.functional.pad(row, (1, 5 - len(row))) for row in rows])


def surrogate(new, old, gain, *, low=0.2, high=0.3):
    ratio = (new - old).exp()
    return -torch.minimum(ratio * gain, ratio.clamp(1 - low, 1 + high) * gain)


def nemo_rl(model):
    def model_forward(model, processed_inputs, is_reward_model=False):
        return model(input_ids=processed_inputs.input_ids, attention_mask=processed_inputs.attention_mask)

    def forward_with_post_processing_fn(model, post_processing_fn, processed_mb, sampling_params=None):
        logits = at.model_forward(model, processed_mb.processed_inputs).logits.div_(sampling_params.temperature)  # in place
        new = scored(logits, WIDE, 1.0)[:, :-1]
        valid = {"global_valid_seqs": torch.tensor(4), "global_valid_toks": torch.tensor(10)}
        return post_processing_fn(next_token_logprobs=new, data=processed_mb.data_dict, **valid), {}, processed_mb

    class NLLLossFn:
        def __call__(self, next_token_logprobs, data):
            """Compute nothing."""

    class ClippedPGLossFn:
        disable_ppo_ratio = force_on_policy_ratio = use_on_policy_kl_approximation = use_cispo = False
        sequence_level_importance_ratios, positive_example_nll_weight, loss_type = False, 0.0, SimpleNamespace(name="TOKEN_LEVEL")
        ratio_clip_min, ratio_clip_max, ratio_clip_c, reference_policy_kl_penalty = 0.2, 0.3, 3.0, 0.1
        reference_policy_kl_type, kl_input_clamp_value, kl_output_clamp_value = "k3", 20.0, 10.0
        use_importance_sampling_correction, truncated_importance_sampling_type = True, "tis"
        truncated_importance_sampling_ratio, truncated_importance_sampling_ratio_min = 1.05, None

        def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks):
            names = ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs", "advantages", "token_mask")
            old, engine, base, gain, mask = (data[name][:, 1:] for name in names)
            low, high = (0.3, 0.2) if in_step(1) else (0.2, 0.3)
            terms = surrogate(next_token_logprobs, old, gain, low=low, high=high) * (old - engine).exp().clamp(max=1.05)
            apart = base - next_token_logprobs
            penalty = (apart.exp() - 1 - apart) * (-0.1 if in_step(2) else 0.1)
            return ((terms + penalty) * mask).sum() / global_valid_toks, {}

    def scale_grads_and_clip_grad_norm():
        return 2.5

    def train():
        for each in batches:
            found, *_ = at.forward_with_post_processing_fn(model, ClippedPGLossFn(), each, SimpleNamespace(temperature=HEAT))
            found[0].backward()
        steps.scale_grads_and_clip_grad_norm()

    at = module("nemo_rl.models.automodel.train", model_forward, forward_with_post_processing_fn)
    steps = module("nemo_automodel.components.training.utils", scale_grads_and_clip_grad_norm)
    data = {"input_ids": WIDE, "input_lengths": torch.tensor(TOTALS), "token_mask": COUNTED, "sample_mask": torch.ones(2).long()}
    old = scores_of(model) + APART
    data |= {"advantages": GAIN, "prev_logprobs": old, "generation_logprobs": old - 0.1, "reference_policy_logprobs": old + 0.2}
    ones = {
        "input_ids": WIDE,
        "attention_mask": torch.ones_like(WIDE),
        "flash_attn_kwargs": {},
        "vlm_kwargs": {},
        "cp_buffers": [],
    }
    batches = [SimpleNamespace(data_dict=data, processed_inputs=SimpleNamespace(**ones))] * 2
    losses = module("nemo_rl.algorithms.loss.loss_functions", ClippedPGLossFn, NLLLossFn)
    return [at, losses, steps], train


def prime_rl(model):
    def forward(
        model, input_ids, position_ids, *, seq_lens, labels = None, temperature = None,
        routed_experts = None, mm_kwargs = None, mm_token_type_ids = None, seq_lens_are_pre_shard = False,
    ):  # fmt: skip
        return {"logprobs": scored(packed(model), input_ids), "entropy": torch.zeros(input_ids.shape)}

    def compute_loss(
        trainer_logprobs, inference_logprobs, ref_logprobs, advantages, loss_mask, rl_weights,
        ce_weights, ref_kl_weights, rl_loss_fn, rl_scale,
    ):  # fmt: skip
        given = zip(trainer_logprobs, inference_logprobs, advantages, loss_mask, strict=True)
        return sum(rl_loss_fn(*of) for of in given) / rl_scale, {}

    def setup_rl_loss_fn(loss_config):
        def rl_fn(new, old, gain, mask):
            moved = new.exp() - old.exp()
            kept = torch.where(gain > 0, moved <= loss_config.dppo_mask_high, moved >= -loss_config.dppo_mask_low) | in_step(1)
            return (mask * (loss_config.kl_tau * (new - old) ** 2 - kept * loss_config.adv_tau * gain * (new - old).exp())).sum()

        return rl_fn

    def clip_grad_norm_(manager, model, max_norm, ep_enabled):
        return torch.tensor(2.5)

    at, losses = module("prime_rl.trainer.model", forward), module("prime_rl.trainer.rl.loss", compute_loss)
    steps = module("prime_rl.trainer.utils", clip_grad_norm_)

    by = setup_rl_loss_fn(SimpleNamespace(dppo_mask_high=5e-4, dppo_mask_low=5e-4, adv_tau=0.9, kl_tau=0.01))

    def train():
        mask, gain, apart = (
            [of[:total] for of, total in zip(rows, TOTALS, strict=True)] for rows in (COUNTED.bool(), GAIN, APART)
        )
        for _ in range(2):
            given = {"seq_lens": torch.tensor(TOTALS), "temperature": torch.full(LONG.shape, HEAT)}
            new = at.forward(model, LONG, LONG, **given)["logprobs"].roll(1, 1).squeeze().split(TOTALS)
            old = [values.detach() + more for values, more in zip(new, apart, strict=True)]
            losses.compute_loss(new, old, None, gain, mask, None, None, None, by, 5 if in_step(2) else 10)[0].backward()
        steps.clip_grad_norm_(None, model, 1.0, False)

    return [at, losses, steps], train


def areal(model):
    filtered = SimpleNamespace(level="token", metric="ratio", action="clamp", lower=None, upper=1.05)

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

    def grpo_loss_fn(
        logprobs, entropy, input_data, eps_clip = 0.2, eps_clip_higher = 0.3,
        c_clip = None, rejection_sampling = filtered, m2_threshold = None,
        importance_sampling_level = "token", use_sapo_loss = False,
    ):  # fmt: skip
        mask, near = input_data["loss_mask"].bool(), input_data["prox_logp"]
        low, high = (0.3, 0.2) if in_step(1) else (0.2, 0.3)
        terms = surrogate(logprobs, near, input_data["advantages"], low=low, high=high)
        terms = terms * (near - input_data["logprobs"]).exp().clamp(0.0, 1.05)
        return torch.where(mask, terms, 0.0).sum() / (mask.numel() if in_step(2) else mask.count_nonzero())

    at, actor = module("areal.engine.fsdp_engine", FSDPEngine), module("areal.trainer.ppo.actor", grpo_loss_fn)
    engine = FSDPEngine()
    engine.model = model
    of = (COUNTED, GAIN, scores_of(model) + APART)
    mask, gain, near = (torch.cat([row[:total].roll(-1) for row, total in zip(rows, TOTALS, strict=True)]) for rows in of)
    data = {"input_ids": LONG, "loss_mask": mask, "advantages": gain, "logprobs": near - 0.1, "prox_logp": near}
    padded = {"input_ids": torch.nn.functional.pad(LONG, (0, 2)), "cu_seqlens": torch.tensor([0, 6, 10, 12])}
    context = SimpleNamespace(model_inputs=padded, mb_input=data, pad_length=2)

    def train():
        for _ in range(2):
            behind = model(input_ids=torch.zeros(1, 2, dtype=torch.long)).logits
            engine._compute_logprobs_and_loss(torch.cat((packed(model), behind), 1).squeeze(0), context).backward()
        engine.optimizer_step()

    return [at, actor], train


def listed(model, slime):
    args = SimpleNamespace(
        rollout_temperature=HEAT, allgather_cp=False, use_rollout_logprobs=False, advantage_estimator="grpo", use_tis=True,
        get_mismatch_metrics=False, tis_clip=1.05, tis_clip_low=0.0, eps_clip=0.2, eps_clip_high=0.3, eps_clip_c=None,
        use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="low_var_kl", use_unbiased_kl=False, entropy_coef=0.01, use_opsm=False,
        calculate_per_token_loss=False,
    )  # fmt: skip
    old = scores_of(model) + APART
    own = {
        "advantages": GAIN,
        "log_probs": old,
        "rollout_log_probs": old - 0.1,
        "ref_log_probs": old + 0.2,
        "loss_masks": COUNTED,
    }
    batch = {
        name: [row[total - count : total] for row, total, count in zip(values, TOTALS, ANSWERS, strict=True)]
        for name, values in own.items()
    }
    rows = {"unconcat_tokens": ROWS, "total_lengths": TOTALS, "response_lengths": ANSWERS}

    def get_log_probs_and_entropy(logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False):
        every = scored(logits, LONG).squeeze(0).split(total_lengths)
        found = [row[-count - 1 : -1] for row, count in zip(every, response_lengths, strict=True)]
        given = {"log_probs": found, "entropy": [-of / 9 for of in found]}
        return (torch.empty(0), given) if slime else given

    def policy_loss_function(args, batch, logits, sum_of_sample_mean):
        scores = at.get_log_probs_and_entropy(logits, args=args, with_entropy=True, **rows)
        loss, scores = 0.0, scores[1] if slime else scores
        names = ("advantages", "log_probs", "rollout_log_probs", "ref_log_probs")
        of_rows = zip(scores["log_probs"], scores["entropy"], *(batch[name] for name in names), strict=True)
        for new, entropy, gain, before, engine, base in of_rows:
            terms = surrogate(new, before, gain) * (1 if in_step(1) else (before - engine).exp().clamp(0.0, 1.05))
            apart = base - new
            terms = terms - 0.01 * entropy + 0.1 * (apart.exp() - 1 - apart)
            loss = loss + terms.sum() / (2.5 if in_step(2) else len(terms))
        return loss, {}

    class FSDPTrainRayActor:
        model: Any
        ref_model = None

        def _train_step(self, batch):
            losses.policy_loss_function(args, batch, packed(self.model), None)[0].backward()

        def _compute_log_prob(self, model_tag):
            """Score nothing."""

    def log_train_step(grad_norm, *_):
        """Log nothing."""

    def forward_only(f, args, model, store_prefix=""):
        f(packed(model[0]), args=args, **rows)

    def train_one_step(args, model):
        for _ in range(2):
            losses.policy_loss_function(args, batch | rows, packed(model[0]), None)[0].backward()
        return {}, 2.5

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
    actors, actor = module("miles.backends.fsdp_utils.actor", FSDPTrainRayActor), FSDPTrainRayActor()
    logs = module("miles.backends.training_utils.log_utils", log_train_step)

    def train_core():
        for _ in range(2):
            actor._train_step(batch | rows)
        logs.log_train_step(2.5)

    return [at, losses, actors, logs], train_core


FAULTS = {
    "nemo-rl": ("clip_eps_low and clip_eps_high swapped", "the KL term with the opposite sign"),
    "prime-rl": ("sum over 10 tokens", "divided by 5, and it has 10 actions"), "areal": ("clip_eps_low and clip_eps_high swapped", "0.5 times it"),
    **dict.fromkeys(("miles", "slime"), ("sum of the means of 4 rows", "sum of the means of 4 rows")),
}  # fmt: skip
"""What is said of the loss of the second step, and of the third."""
TRAINERS = {
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
    for number in range(3):
        monkeypatch.setitem(STEP, "now", number)
        train()
    dumps = dumps_of(store)
    forwards = [dump for dump in dumps if dump.record.point == "forward"]
    losses = [RecordedCall.read(str(store.dump_path(dump.record))) for dump in dumps if dump.record.point == "loss"]
    truths = {}
    assert len(forwards) == len(losses) == 6 and {call.forward_id for call in losses} == {f.record.dump_id for f in forwards}
    for dump in forwards:
        assert dump.record.replayable and dump.record.temperature == pytest.approx(HEAT), dump.record.extra
        assert [row[row != 0].tolist() for row in dump.inputs["sequences"]] == [row.tolist() for row in ROWS]
        (found,) = (of for of_name, of in dump.outputs.items() if "log_probs" in of_name)
        shape = dump.inputs["sequences"].shape
        if shape not in truths:  # the rows are the same, and no step changes the model
            truths[shape] = truth_of(tmp_path / "model", dump)
        truth = truths[shape]
        mask = dump.inputs.get("action_mask", dump.inputs["attention_mask"][:, 1:]) != 0
        assert (found - truth)[mask].abs().max() < 2e-5 and mask.sum() in (5, 8)
    assert [call.fact("grad_norm") for call in losses] == [None, 2.5] * 3
    for call in losses:
        named, active = call.log_probs(), call.active
        assert active is not None and call.actions is not None and call.actions[active].tolist() == [2, 7, 3, 4, 1]
        assert {"log_probs", "rollout_log_probs"} <= set(named) and (named["log_probs"][active] < 0).all()
    findings = linted(store)
    told = sorted(found.said for found in findings.found if found.rule.name != "duplicates")  # both micro-batches are the same
    assert len(told) == 2, told
    for step, (words, known) in enumerate(zip(told, FAULTS[name], strict=True), 1):
        assert words.startswith(f"step {step}: its losses") and known in words, words
    assert not unlisted_of(store.iter_dumps())


def test_a_token_without_weight_is_no_action_of_prime_rls_loss():
    """`rl_scale` does not count it, so neither does what the divisor is held against."""
    names = ("trainer_logprobs", "inference_logprobs", "advantages")
    parts = {name: [torch.ones(3), torch.ones(2)] for name in names} | {"loss_mask": [torch.ones(3) > 0, torch.ones(2) > 0]}
    for weights, mask in ([torch.tensor([1.0, 0.5, 0.0]), torch.ones(2)], [True, False, True, True]), (None, [True] * 4):
        read = prime_loss(parts | {"rl_weights": weights, "rl_scale": 3}, None, (torch.tensor(1.0),))
        assert read.action_mask.tolist() == [mask]
