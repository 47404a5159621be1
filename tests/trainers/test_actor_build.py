"""Arguments for the Actor of every OpenRLHF version that a replay supports, and calls against their forwards.

The signatures are those of the released versions; the classes do nothing but have them.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from actorcases import make_dump

from actordbg.base.errors import Unsupported
from actordbg.config.choices import Choices
from actordbg.trainers.captured_call import Signature, make_call, read_result, summary_mask
from actordbg.trainers.openrlhf import build
from actordbg.trainers.openrlhf.build import actor_arguments, init_parameters
from actordbg.trainers.rows_actor import drawn_share, resolved_attention, resolved_dtype

CPU = torch.device("cpu")
CHOICES = Choices("tiny", "fp32", "sdpa", packing=True, temperature=0.5, backward=False)


class Released07:
    def __init__(self, pretrain_or_model, use_flash_attention_2=False, bf16=True, load_in_4bit=False, ds_config=None,
                 device_map=None, packing_samples=False, temperature=1.0, use_liger_kernel=False, **kwargs): ...  # fmt: skip

    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False, allgather_logits=False,
                return_logprobs=False, ring_attn_group=None, packed_seq_lens=None): ...  # fmt: skip


class Released0810(Released07):
    """Its forward has return_entropy, too."""

    def __init__(self, pretrain_or_model, attn_implementation="flash_attention_2", bf16=True, ds_config=None,
                 packing_samples=False, temperature=1.0, **kwargs): ...  # fmt: skip


class Released011:
    def __init__(self, pretrain_or_model, attn_implementation="flash_attention_2", param_dtype="bf16", ds_config=None,
                 packing_samples=False, temperature=1.0, experts_implementation=None, **kwargs): ...  # fmt: skip

    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False, allgather_logits=False,
                return_logprobs=False, ring_attn_group=None, packed_seq_lens=None, return_entropy=False, **mm_inputs): ...  # fmt: skip


SDPA, FLASH = {"attn_implementation": "sdpa"}, {"attn_implementation": "flash_attention_2"}


class Ancient:
    def __init__(self, pretrain_or_model, from_config=False, **kwargs): ...


@pytest.mark.parametrize(
    "kind, fp32, flash",
    [
        (Released07, {"use_flash_attention_2": False, "bf16": False}, {"use_flash_attention_2": True, "bf16": True}),
        (Released0810, SDPA | {"bf16": False}, FLASH | {"bf16": True}),
        (Released011, SDPA | {"param_dtype": "fp32"}, FLASH | {"param_dtype": "bf16"}),
    ],
)
def test_an_actor_is_given_what_its_version_calls_it_and_nothing_that_kwargs_would_swallow(kind, fp32, flash, monkeypatch):
    names, common = init_parameters(kind), {"packing_samples": True, "temperature": 0.5}
    assert actor_arguments(names, CHOICES, None) == common | fp32
    assert actor_arguments(names, replace(CHOICES, attn="flash_attention_2", dtype="bf16"), None) == common | flash
    assert actor_arguments(names, CHOICES, {"zero": 3}) == common | fp32 | {"ds_config": {"zero": 3}}
    monkeypatch.setattr(build, "import_actor", lambda: kind)
    assert build.loads_checkpoint_dtype("fp32") == ("param_dtype" not in fp32) and not build.loads_checkpoint_dtype("bf16")


def test_what_a_version_cannot_do_is_refused_and_not_dropped():
    with pytest.raises(Unsupported, match="choose an attention"):
        actor_arguments(init_parameters(Ancient), CHOICES, None)
    for name, said in (("packing_samples", "pack samples"), ("temperature", "temperature"), ("ds_config", "DeepSpeed")):
        with pytest.raises(Unsupported, match=said):
            actor_arguments(init_parameters(Released011) - {name}, CHOICES, {"zero": 3})


def test_dtype_and_attention_are_those_of_most_parameters_and_of_the_text_model():
    model = torch.nn.ModuleList([torch.nn.Linear(64, 64, dtype=torch.bfloat16), torch.nn.LayerNorm(64)])
    double, empty = torch.nn.Linear(2, 2).double(), torch.nn.Identity()
    assert [resolved_dtype(one) for one in (model, double, empty)] == ["bf16", "float64", "none"]
    text = SimpleNamespace(_attn_implementation="eager")
    config = SimpleNamespace(_attn_implementation="sdpa", get_text_config=lambda: text)
    assert resolved_attention(SimpleNamespace(config=config)) == "eager"


def called(kind, dump):
    return make_call(Signature.of(kind("any")), dump, 4096, CPU)


def test_arguments_are_matched_by_name_and_groups_are_left_out():
    dump = make_dump()
    call = called(Released011, dump)
    assert call.arguments.keys() == {
        "sequences", "attention_mask", "action_mask", "return_output", "return_logprobs", "return_entropy", "packed_seq_lens",
    }  # fmt: skip
    assert call.notes == ()
    dump.tensors.update({"output.log_probs": torch.zeros(3, 8), "rng.cpu": torch.get_rng_state()})
    assert called(Released011, dump).arguments.keys() == call.arguments.keys()
    assert (dump.outputs.keys(), dump.rng.keys()) == ({"log_probs"}, {"cpu"})
    dump.record.process_groups["ring_attn_group"] = {"size": 2, "rank": 1}
    call = called(Released011, dump)
    assert "ring_attn_group" not in call.arguments and "ring_attn_group of 2 ranks" in call.notes[0]


def test_an_argument_that_was_off_may_be_unknown_to_this_version():
    assert "return_entropy" not in called(Released07, make_dump()).arguments
    with pytest.raises(Unsupported, match="return_entropy"):
        called(Released07, make_dump(arguments={"return_entropy": True}))


def test_multimodal_inputs_go_where_the_forward_takes_them_and_nothing_else_does():
    dump = make_dump()
    dump.tensors["pixel_values"] = torch.ones(3, 4)
    assert "pixel_values" in called(Released011, dump).arguments
    with pytest.raises(Unsupported, match="pixel_values"):
        called(Released0810, dump)
    dump.tensors["pos_ids"] = dump.tensors.pop("pixel_values")
    with pytest.raises(Unsupported, match="pos_ids"):
        called(Released011, dump)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_masks_go_in_with_the_dtype_they_were_captured_with(dtype):
    dump = make_dump()
    for name in ("attention_mask", "action_mask"):
        dump.tensors[name] = dump.tensors[name].to(dtype)
    call = called(Released011, dump)
    assert call.arguments["attention_mask"].dtype is call.arguments["action_mask"].dtype is dtype
    assert call.mask.dtype is torch.bool and int(call.mask.sum()) == 21


def test_without_an_action_mask_only_pairs_of_real_tokens_count():
    inputs = {"sequences": torch.zeros(2, 5), "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]])}
    assert summary_mask(inputs).tolist() == [[False, False, True, True], [True, True, False, False]]
    assert summary_mask({"sequences": torch.zeros(2, 5)}).all()


def test_log_probs_are_found_in_every_shape_of_result_and_one_of_another_shape_is_an_error():
    mask = torch.ones(2, 3, dtype=torch.bool)
    log_probs, entropy = torch.zeros(2, 3), torch.arange(10.0).view(2, 5)
    found = read_result((log_probs, SimpleNamespace(entropy=entropy)), mask)
    assert found[0] is log_probs and found[1].tolist() == [[2, 3, 4], [7, 8, 9]]
    for result in (log_probs, (log_probs, {"logits": None})):
        assert read_result(result, mask) == (log_probs, None)
    for result, said in ((torch.zeros(2, 4), r"log-probs are \(2, 4\), the mask \(2, 3\)"), ({"logits": 1}, "not log-probs")):
        with pytest.raises(Unsupported, match=said):
            read_result(result, mask)


@pytest.mark.parametrize(
    "settings, share",
    [
        ({"attn_pdrop": 0.1, "resid_pdrop": 0.0}, 0.1),
        ({"router_jitter_noise": 0.01}, 0.01),
        ({"summary_first_dropout": 0.1, "classifier_dropout": 0.1, "drop_tokens": True, "attn_pdrop": 0.0}, 0.0),
    ],
)
def test_only_what_a_language_model_drops_counts(settings, share):
    """GPT-2 and GPT-NeoX have settings for heads that are not there: taken for dropout, a healthy cell was not compared."""
    config = SimpleNamespace(to_dict=lambda: settings)
    assert drawn_share(SimpleNamespace(config=config, modules=lambda: [torch.nn.Linear(2, 2)])) == share
    assert drawn_share(SimpleNamespace(config=config, modules=lambda: [torch.nn.Dropout(0.5)])) == 0.5
