"""A model and a batch in memory: the faults that transformers' own models have, and a truth that is the truth."""

import runpy
from typing import Any

import pytest
import torch
from roots import ROOT
from transformers import AutoModelForCausalLM, Gemma2PreTrainedModel, Qwen2Config

import actordbg
from actordbg.actor.family_models import FAMILIES, Family
from actordbg.base.errors import Unsupported
from benchmarks.families import build_model

IDS = torch.randint(3, 200, (3, 16), generator=torch.Generator().manual_seed(0))
MASK = ((torch.arange(16) >= torch.tensor([[3], [0], [0]])) & (torch.arange(16) < torch.tensor([[16], [16], [12]]))).long()
BATCH = {"input_ids": IDS, "attention_mask": MASK}


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny tensors on several threads cost four times the processor time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model_of(folder, family, **loading):
    build_model(folder, (FAMILIES.get(family) or Family(family, "")).config)
    return AutoModelForCausalLM.from_pretrained(folder, **loading)


@pytest.mark.slow
def test_a_plain_script_names_packed_rows_that_meet_in_qwen3_5_and_a_wrong_soft_cap_of_gemma2(capsys):
    runpy.run_path(str(ROOT / "examples" / "check_families.py"))
    qwen, gemma = capsys.readouterr().out.split("Gemma2:")
    said = " ".join(qwen.split())
    assert "WRONG: a row depends on other rows (model.layers.0.linear_attn" in qwen, qwen
    assert "neighbour broken: row 1 depends on row 0" in said and "padded: RIGHT" in said, qwen
    assert "self_attn.attn_logit_softcapping is 5.0; transformers' model from this checkpoint has 50.0" in gemma


@pytest.mark.slow
@pytest.mark.skipif(not Gemma2PreTrainedModel._supports_sdpa, reason="transformers from 5.21 refuses it")
def test_an_attention_without_the_soft_cap_of_gemma2_is_named(tmp_path):
    model = model_of(tmp_path, "gemma2", attn_implementation="sdpa")  # which has no soft cap
    without = actordbg.check_model(model, BATCH, packing=False, backward=False)
    assert without.verdict == "WRONG" and "sdpa attention is" in without.sentence and "attn_logit_softcapping" in without.sentence
    assert "(backward=True)" in str(without)  # no option of the command line


@pytest.mark.slow
def test_the_truth_has_the_log_probs_and_the_gradients_of_plain_fp64_and_leaves_the_model_as_it_was(tmp_path):
    model = model_of(tmp_path, "llama")
    model.train()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    labels = IDS.where(torch.arange(16) >= 8, -100).where(MASK != 0, -100)
    truth = actordbg.truth(model, {**BATCH, "labels": labels})
    assert model.training and bool((model.lm_head.weight.grad == 1).all()) and model.lm_head.weight.dtype == torch.float32
    wide = model.double().eval()
    wide.zero_grad()
    positions = (MASK.cumsum(1) - 1).clamp(min=0)
    logits = wide(IDS, attention_mask=MASK, position_ids=positions, use_cache=False).logits[:, :-1].log_softmax(-1)
    ours = logits.gather(-1, IDS[:, 1:, None]).squeeze(-1)
    counted = labels[:, 1:] != -100
    assert torch.equal(truth.mask, counted) and truth.dtype == "fp64"
    assert torch.allclose(truth.log_probs[counted].double(), ours[counted], atol=1e-6)
    assert torch.allclose(truth.entropy[counted].double(), -(logits.exp() * logits).sum(-1)[counted], atol=1e-5)
    (-ours[counted].mean()).backward()
    expected = {name: parameter.grad for name, parameter in wide.named_parameters()}
    assert truth.gradients.keys() == expected.keys() and truth.loss == pytest.approx(float(-ours[counted].mean()), rel=1e-6)
    assert all(
        torch.allclose(truth.gradients[name].double(), grad, atol=1e-6) for name, grad in expected.items() if grad is not None
    )


def small():
    config = Qwen2Config(
        vocab_size=200, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.slow
def test_a_model_whose_optimizer_is_a_hook_is_as_before_and_positions_that_count_real_tokens_are_of_padded_rows():
    model, calls = small(), list[Any]()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    before = model.lm_head.weight.clone()
    positions = (MASK.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        answer = actordbg.check_model(model, {**BATCH, "position_ids": positions}, packing=False)
    assert answer.ok and "packed" not in answer.record and "gradients in one dump" in answer.sentence
    assert torch.equal(before, model.lm_head.weight) and not calls
    model(IDS).logits.sum().backward()
    assert calls, "the hooks are there again"


@pytest.mark.parametrize(
    "batch, given, why",
    [
        ([1, 2], {}, "no input_ids"),
        ({"input_ids": IDS.tolist()}, {}, "they are not a tensor"),
        ({"input_ids": IDS.float()}, {}, "whole numbers"),
        ({"input_ids": IDS[0]}, {}, "rows of at least 2 tokens"),
        ({"input_ids": IDS[:0]}, {}, "rows of at least 2 tokens"),
        ({"input_ids": IDS + 1000}, {}, "the vocabulary has 200"),
        ({"input_ids": IDS, "attention_mask": MASK[:, 1:]}, {}, "the attention mask is"),
        (BATCH, {"temperature": 0.0}, "temperature"),
        (BATCH, {"log_probs": torch.zeros(3, 16)}, "log_probs is"),
        (BATCH, {"entropy": torch.zeros(3, 15)}, "together with log-probs"),
    ],
)
def test_a_batch_that_is_none_is_refused_before_anything_runs(batch, given, why):
    with pytest.raises(Unsupported, match=why):
        actordbg.check_model(small(), batch, **given)


def test_what_cannot_be_judged_is_refused_with_the_reason(tmp_path):
    with pytest.raises(Unsupported, match="no weights"), torch.device("meta"):
        actordbg.check_model(small(), BATCH)
    with pytest.raises(Unsupported, match="the truth of a model in fp32"):
        actordbg.truth(small(), BATCH, dtype="bf16")
    with pytest.raises(Unsupported, match="Linear is not a model of transformers"):
        actordbg.check_model(torch.nn.Linear(2, 2), BATCH)
