"""What is left open in a configuration follows the record, and then the machine."""

from dataclasses import replace

import pytest
from casefiles import json_cases

from actordbg.base.errors import UsageError
from actordbg.config.choices import Facts, choose, gather_facts, short_dtype
from actordbg.config.replay_config import SETTINGS, ReplayConfig, validate
from actordbg.formats.dump_record import DumpRecord

LAPTOP = Facts(cuda=False, gpus=0, flash_attn=False)
SERVER = Facts(cuda=True, gpus=2, flash_attn=True)


def record(**fields):
    moment = "2025-06-19T05:26:08.430740Z"
    base = DumpRecord(dump_id="a", run="r", rank=0, timestamp=moment, batch_size=1, seq_len=4, tokens=4)
    return replace(base, **fields)


def test_without_a_record_the_machine_decides():
    laptop, server = choose(ReplayConfig(), None, LAPTOP), choose(ReplayConfig(), None, SERVER)
    assert (laptop.dtype, laptop.attn) == ("fp32", "sdpa")
    assert (server.dtype, server.attn) == ("bf16", "flash_attention_2")
    assert (laptop.model, laptop.packing, laptop.temperature, laptop.backward) == ("tiny", False, 1.0, False)
    assert choose(ReplayConfig(model="gpt2"), None, LAPTOP).dtype == "bf16", "only the tiny model is fp32 by default"
    assert (laptop.seed, choose(ReplayConfig(seed=7), None, LAPTOP).seed) == (0, 7)


def test_the_record_decides_what_is_left_open_and_what_is_asked_for_wins_also_when_it_is_false():
    captured = record(model_dtype="torch.bfloat16", packing_samples=True, temperature=0.7, grad_enabled=True)
    asked = ReplayConfig(dtype="fp16", packing=False, temperature=1.0, backward=False)
    found = [choose(config, captured, LAPTOP) for config in (ReplayConfig(), asked)]
    decided = [(one.dtype, one.packing, one.temperature, one.backward) for one in found]
    assert decided == [("bf16", True, 0.7, True), ("fp16", False, 1.0, False)]
    assert choose(ReplayConfig(), record(model_name="meta-llama/Llama-3.1-8B"), SERVER).model == "tiny", "it is not taken"


def test_one_of_a_thing_is_told_in_the_singular():
    assert [SETTINGS["nproc"].in_words(count) for count in (1, 2)] == ["1 process", "2 processes"]


def test_dtypes_have_openrlhfs_short_names():
    names = {"torch.bfloat16": "bf16", "float32": "fp32", "fp16": "fp16", "float8_e4m3fn": None, None: None, "": None}
    assert {given: short_dtype(given) for given in names} == names


@pytest.mark.parametrize("fields, names", json_cases("meaningless_settings"))
def test_values_that_mean_nothing_are_refused_by_name(fields, names):
    with pytest.raises(UsageError) as refused:
        validate(ReplayConfig(**fields))
    assert names in refused.value.message
    assert refused.value.hint


def test_facts_name_the_versions_and_a_cpu_build_of_torch_has_no_gpu_whatever_devices_there_are(monkeypatch):
    facts = gather_facts(cuda=True, gpus=3)
    assert (facts.cuda, facts.gpus) == (True, 3) and {"python", "torch", "transformers"} <= facts.versions.keys()
    monkeypatch.setattr("actordbg.config.choices.installed_versions", lambda: {"torch": "2.13.0+cpu"})
    facts = gather_facts()
    assert (facts.cuda, facts.gpus) == (False, 0)


def test_a_cpu_computes_fp16_where_deepspeed_trains_in_it():
    torch = pytest.importorskip("torch")
    assert gather_facts().cpu_fp16 == torch.ops.mkldnn._is_mkldnn_fp16_supported()
