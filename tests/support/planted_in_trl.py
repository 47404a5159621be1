"""A pytest plugin for `examples/trainer_ci`: runs its test once without a fault, and once with each of six planted in TRL."""

import functools

import pytest
import torch

from benchmarks.faulty_grpo import without_deepspeed

without_deepspeed()
SCORE = "_get_per_token_logps_and_entropies"


def of_scores(change):
    """Change the log-probs that TRL's scoring function returns."""

    def plant(patch):
        def changed(original, self, *args, **kwargs):
            log_probs, *more = original(self, *args, **kwargs)
            return change(log_probs), *more

        _wrap(patch, SCORE, changed)

    return plant


def of_model(change):
    """Change the trainer's model after the trainer was built."""

    def plant(patch):
        def changed(original, self, *args, **kwargs):
            original(self, *args, **kwargs)
            change(self.model)

        _wrap(patch, "__init__", changed)

    return plant


def _wrap(patch, name, changed):
    from trl import GRPOTrainer

    original = getattr(GRPOTrainer, name)

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        return changed(original, self, *args, **kwargs)

    patch.setattr(GRPOTrainer, name, method)


def no_temperature(patch):
    from trl.trainer import grpo_trainer

    original = grpo_trainer.add_fused_lm_head
    patch.setattr(grpo_trainer, "add_fused_lm_head", lambda model, **more: original(model, **more | {"temperature": 1.0}))


def no_mask(patch):
    """The model gets no attention mask: it attends to padding."""
    from trl.trainer import grpo_trainer

    original = grpo_trainer.add_fused_lm_head

    def add(model, **more):
        made = original(model, **more)
        forward = model.forward
        model.forward = functools.wraps(forward)(
            lambda *args, **given: forward(*args, **given | {"attention_mask": torch.ones_like(given["attention_mask"])})
        )
        return made

    patch.setattr(grpo_trainer, "add_fused_lm_head", add)


def scaled(model):
    model.model.layers[1].self_attn.scaling *= 1.1


def narrow_angles(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()


FAULTS = {
    "temperature": no_temperature,
    "shifted": of_scores(lambda log_probs: log_probs.roll(1, dims=1)),
    "bf16": of_scores(lambda log_probs: log_probs.bfloat16().float()),
    "mask": no_mask,
    "scaling": of_model(scaled),
    "angles": of_model(narrow_angles),
}


def pytest_generate_tests(metafunc):
    metafunc.parametrize("planted", ["healthy", *FAULTS], indirect=True)


@pytest.fixture(autouse=True)
def planted(request, monkeypatch):
    if request.param in FAULTS:
        FAULTS[request.param](monkeypatch)
