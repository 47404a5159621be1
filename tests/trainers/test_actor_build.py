"""Arguments for the Actor of every OpenRLHF version that a replay supports, and calls against their forwards.

The signatures are those of the released versions; the classes do nothing but have them.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from actorcases import make_dump

from actordbg.base.errors import Unsupported
from actordbg.config.choices import Choices
from actordbg.trainers.built_model import drawn_share, resolved_attention, resolved_dtype
from actordbg.trainers.captured_call import Signature, make_call, read_result, summary_mask
from actordbg.trainers.openrlhf.build import actor_arguments, init_parameters, loads_checkpoint_dtype

CPU = torch.device("cpu")
CHOICES = Choices("tiny", "fp32", "sdpa", packing=True, temperature=0.5, backward=False)


class Released07:
    def __init__(self, pretrain_or_model, use_flash_attention_2=False, bf16=True, load_in_4bit=False, ds_config=None,
                 device_map=None, packing_samples=False, temperature=1.0, use_liger_kernel=False, **kwargs): ...  # fmt: skip

    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False, allgather_logits=False,
                return_logprobs=False, ring_attn_group=None, packed_seq_lens=None): ...  # fmt: skip


class Released0810:
    def __init__(self, pretrain_or_model, attn_implementation="flash_attention_2", bf16=True, ds_config=None,
                 packing_samples=False, temperature=1.0, **kwargs): ...  # fmt: skip

    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False, allgather_logits=False,
                return_logprobs=False, ring_attn_group=None, packed_seq_lens=None, return_entropy=False): ...  # fmt: skip


class Released011:
    def __init__(self, pretrain_or_model, attn_implementation="flash_attention_2", param_dtype="bf16", ds_config=None,
                 packing_samples=False, temperature=1.0, experts_implementation=None, **kwargs): ...  # fmt: skip

    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False, allgather_logits=False,
                return_logprobs=False, ring_attn_group=None, packed_seq_lens=None, return_entropy=False, **mm_inputs): ...  # fmt: skip


class Ancient:
    def __init__(self, pretrain_or_model, from_config=False, **kwargs): ...


def test_the_attention_is_passed_as_the_version_calls_it():
    common = {"packing_samples": True, "temperature": 0.5}
    assert actor_arguments(init_parameters(Released07), CHOICES, None) == common | {
        "use_flash_attention_2": False,
        "bf16": False,
    }
    assert actor_arguments(init_parameters(Released0810), CHOICES, None) == common | {
        "attn_implementation": "sdpa",
        "bf16": False,
    }
    assert actor_arguments(init_parameters(Released011), CHOICES, None) == common | {
        "attn_implementation": "sdpa",
        "param_dtype": "fp32",
    }


def test_flash_attention_and_bf16_are_asked_of_an_old_version_by_its_flags():
    found = actor_arguments(init_parameters(Released07), replace(CHOICES, attn="flash_attention_2", dtype="bf16"), None)
    assert (found["use_flash_attention_2"], found["bf16"]) == (True, True)


def test_nothing_is_passed_that_kwargs_would_swallow():
    for kind in (Released07, Released0810, Released011):
        assert actor_arguments(init_parameters(kind), CHOICES, {"zero": 3}).keys() <= init_parameters(kind)


def test_a_deepspeed_configuration_is_passed_where_there_is_one():
    assert actor_arguments(init_parameters(Released011), CHOICES, {"zero": 3})["ds_config"] == {"zero": 3}
    assert "ds_config" not in actor_arguments(init_parameters(Released011), CHOICES, None)


def test_what_a_version_cannot_do_is_refused_and_not_dropped():
    with pytest.raises(Unsupported, match="choose an attention"):
        actor_arguments(init_parameters(Ancient), CHOICES, None)
    with pytest.raises(Unsupported, match="pack samples"):
        actor_arguments(init_parameters(Released011) - {"packing_samples"}, CHOICES, None)
    with pytest.raises(Unsupported, match="temperature"):
        actor_arguments(init_parameters(Released011) - {"temperature"}, CHOICES, None)
    with pytest.raises(Unsupported, match="DeepSpeed"):
        actor_arguments(init_parameters(Released011) - {"ds_config"}, CHOICES, {"zero": 3})


def test_only_versions_without_param_dtype_load_the_checkpoints_own_dtype():
    assert loads_checkpoint_dtype(init_parameters(Released07), "fp32")
    assert not loads_checkpoint_dtype(init_parameters(Released07), "bf16")
    assert not loads_checkpoint_dtype(init_parameters(Released011), "fp32")


def test_the_dtype_is_that_of_most_parameters():
    model = torch.nn.ModuleList([torch.nn.Linear(64, 64, dtype=torch.bfloat16), torch.nn.LayerNorm(64)])
    assert resolved_dtype(model) == "bf16"
    assert resolved_dtype(torch.nn.Linear(2, 2).double()) == "float64"
    assert resolved_dtype(torch.nn.Identity()) == "none"


def test_the_attention_is_read_from_the_text_model():
    text = SimpleNamespace(_attn_implementation="eager")
    config = SimpleNamespace(_attn_implementation="sdpa", get_text_config=lambda: text)
    assert resolved_attention(SimpleNamespace(config=config)) == "eager"


def signature(kind: type) -> Signature:
    return Signature.of(kind("any"))


def test_arguments_are_matched_by_name_and_groups_are_left_out():
    call = make_call(signature(Released011), make_dump(0), 4096, CPU)
    assert call.arguments.keys() == {
        "sequences", "attention_mask", "action_mask", "return_output", "return_logprobs", "return_entropy", "packed_seq_lens",
    }  # fmt: skip
    assert call.notes == ()


def test_an_argument_that_was_off_may_be_unknown_to_this_version():
    call = make_call(signature(Released07), make_dump(0), 4096, CPU)
    assert "return_entropy" not in call.arguments
    with pytest.raises(Unsupported, match="return_entropy"):
        make_call(signature(Released07), make_dump(0, arguments={"return_entropy": True}), 4096, CPU)


def test_multimodal_inputs_go_where_the_forward_takes_them_and_nothing_else_does():
    dump = make_dump(0)
    dump.tensors["pixel_values"] = torch.ones(3, 4)
    assert "pixel_values" in make_call(signature(Released011), dump, 4096, CPU).arguments
    with pytest.raises(Unsupported, match="pixel_values"):
        make_call(signature(Released0810), dump, 4096, CPU)
    dump.tensors["pos_ids"] = dump.tensors.pop("pixel_values")
    with pytest.raises(Unsupported, match="pos_ids"):
        make_call(signature(Released011), dump, 4096, CPU)


def test_a_ring_of_ranks_is_noted_and_computed_whole():
    dump = make_dump(0)
    dump.record.process_groups["ring_attn_group"] = {"size": 2, "rank": 1}
    call = make_call(signature(Released011), dump, 4096, CPU)
    assert "ring_attn_group" not in call.arguments
    assert "ring_attn_group of 2 ranks" in call.notes[0]


def test_recorded_outputs_and_generator_states_are_not_inputs():
    dump = make_dump(0)
    plain = make_call(signature(Released011), dump, 4096, CPU).arguments.keys()
    dump.tensors.update({"output.log_probs": torch.zeros(3, 8), "rng.cpu": torch.get_rng_state()})
    assert make_call(signature(Released011), dump, 4096, CPU).arguments.keys() == plain
    assert (dump.outputs.keys(), dump.rng.keys()) == ({"log_probs"}, {"cpu"})


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.float32])
def test_masks_go_in_with_the_dtype_they_were_captured_with(dtype: torch.dtype):
    dump = make_dump(0)
    for name in ("attention_mask", "action_mask"):
        dump.tensors[name] = dump.tensors[name].to(dtype)
    call = make_call(signature(Released011), dump, 4096, CPU)
    assert call.arguments["attention_mask"].dtype is call.arguments["action_mask"].dtype is dtype
    assert call.mask.dtype is torch.bool
    assert int(call.mask.sum()) == 21


def test_without_an_action_mask_only_pairs_of_real_tokens_count():
    inputs = {"sequences": torch.zeros(2, 5), "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])}
    assert summary_mask(inputs).tolist() == [[False, False, True, True], [True, True, False, False]]
    assert summary_mask({"sequences": torch.zeros(2, 5)}).all()


def test_log_probs_are_found_in_every_shape_of_result():
    mask = torch.ones(2, 3, dtype=torch.bool)
    log_probs, entropy = torch.zeros(2, 3), torch.arange(10.0).view(2, 5)
    assert read_result(log_probs, mask)[0] is log_probs
    found = read_result((log_probs, SimpleNamespace(entropy=entropy)), mask)
    assert found[0] is log_probs
    assert found[1].tolist() == [[2, 3, 4], [7, 8, 9]]
    assert read_result((log_probs, {"logits": None}), mask)[1] is None


def test_a_result_of_another_shape_is_an_error_and_not_a_number():
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(Unsupported, match=r"log-probs are \(2, 4\), the mask \(2, 3\)"):
        read_result(torch.zeros(2, 4), mask)
    with pytest.raises(Unsupported, match="not log-probs"):
        read_result({"logits": 1}, mask)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"attn_pdrop": 0.1, "resid_pdrop": 0.0}, 0.1),
        ({"router_jitter_noise": 0.01}, 0.01),
        ({"summary_first_dropout": 0.1, "classifier_dropout": 0.1, "drop_tokens": True, "attn_pdrop": 0.0}, 0.0),
    ],
)
def test_only_what_a_language_model_drops_counts(settings: dict[str, object], share: float) -> None:
    """GPT-2 and GPT-NeoX have settings for heads that are not there: taken for dropout, a healthy cell was not compared."""
    config = SimpleNamespace(to_dict=lambda: settings)
    assert drawn_share(SimpleNamespace(config=config, modules=lambda: [torch.nn.Linear(2, 2)])) == share
    assert drawn_share(SimpleNamespace(config=config, modules=lambda: [torch.nn.Dropout(0.5)])) == 0.5
