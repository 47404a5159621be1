"""What is kept of a gradient: the same elements everywhere, the norm of all, a name that no engine changed."""

import os
from pathlib import Path

import pytest
import torch

from actordbg.actor import forward_outcome as gradients
from actordbg.actor.forward_outcome import GRADIENT_SAMPLE, GradientKeeper, plain_name, sample


def test_a_small_gradient_is_kept_whole_and_a_large_one_at_fixed_places():
    small = torch.arange(GRADIENT_SAMPLE, dtype=torch.float32).reshape(256, 256)
    assert torch.equal(sample(small), small.flatten())
    numel = 3 * GRADIENT_SAMPLE // 2 + 1
    kept = sample(torch.arange(numel, dtype=torch.float64))
    assert kept.tolist() == [i * numel // GRADIENT_SAMPLE for i in range(GRADIENT_SAMPLE)]


def test_the_norm_is_of_all_elements_also_in_pieces(monkeypatch):
    whole = torch.randn(1000, 100, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    monkeypatch.setattr(gradients, "_PIECE", 7000)
    keeper = GradientKeeper()
    keeper.take("module.model.norm.weight", whole)
    assert keeper.facts["model.norm.weight"]["numel"] == 100_000
    assert keeper.facts["model.norm.weight"]["norm"] == pytest.approx(float(whole.double().norm()), rel=1e-12)
    kept = keeper.tensors["grad/model.norm.weight"]
    assert kept.dtype == torch.float32 and kept.shape == (GRADIENT_SAMPLE,)


def test_a_kept_gradient_does_not_change_with_the_engines_and_who_does_not_record_keeps_none():
    gradient, keeper, idle = torch.ones(4), GradientKeeper(), GradientKeeper(records=False)
    for one in (keeper, idle):
        one.take("weight", gradient)
    gradient.zero_()
    assert keeper.tensors["grad/weight"].tolist() == [1, 1, 1, 1] and not idle.tensors and not idle.facts


@pytest.mark.parametrize("name", ["module.model.layers.0.mlp.weight", "_orig_mod.model.layers.0._fsdp_wrapped_module.mlp.weight"])
def test_names_are_those_of_the_transformers_model(name):
    assert plain_name(name) == "model.layers.0.mlp.weight"


def test_memory_that_is_kept_is_returned_afterwards():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    size = 2**27
    with gradients.keeping_memory():
        for _ in range(2):
            block = torch.ones(size, dtype=torch.uint8)
            del block
        kept = resident()
    assert kept - resident() > 0.9 * size  # against what earlier tests left, either may be smaller
