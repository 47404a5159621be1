"""Ranks that compute together give the plain actor's numbers: fully_shard, tensor parallelism, rings, ZeRO; on two processes."""

from __future__ import annotations

import json
from typing import Any

import parallelcases
import pytest
from actorcases import run_scenario

pytestmark = pytest.mark.slow

Facts = dict[str, Any]
PARAMETERS = 21
"""Of the tiny model, as transformers names them."""
RUNS = [(name, run) for name, one in parallelcases.BACKENDS.items() for run in ("unpacked", "packed", "warm")]
RUNS = [(name, run) for name, run in RUNS if run != "unpacked" or "ring" not in name]
TWO_INPUTS = [name for name in parallelcases.BACKENDS if "," not in name]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Facts]:
    folder = tmp_path_factory.mktemp("models")
    return run_scenario("parallel", folder, world=2, program=parallelcases.__file__, TORCHDYNAMO_DISABLE="1")


@pytest.mark.parametrize(("name", "run"), RUNS)
def test_log_probs_norm_and_single_gradients_are_the_plain_actors(ranks: list[Facts], name: str, run: str):
    for found in (rank[name][run] for rank in ranks):
        assert found["log_probs"] < 1e-4 and found["entropy"] < 1e-4
        assert found["norm"] < 1e-3
        assert found["over"] == []
    records = ranks[0][name][run]
    assert records["names"] and records["kept"] == PARAMETERS
    assert records["cosine"] > 0.9999 and records["parameter norms"] < 1e-3
    if "," in name and run == "packed":
        assert ranks[1][name][run]["kept"] == 0, "only the first rank of a lane keeps gradients"


@pytest.mark.parametrize("name", TWO_INPUTS)
def test_two_inputs_at_a_time_share_the_mean_gradient_and_the_result_says_whose(ranks: list[Facts], name: str):
    for found in (rank[name]["two inputs"] for rank in ranks):
        assert found["over"] == ["dump-1", "dump-2"]
        assert found["log_probs"] < 1e-4
        assert found["cosine"] > 0.9999 and found["parameter norms"] < 1e-3


@pytest.mark.parametrize("name", list(parallelcases.BACKENDS))
def test_the_same_input_gives_the_same_bits_and_a_call_from_another_ring_says_so(ranks: list[Facts], name: str):
    assert [(rank[name]["again"], rank[name]["collective"]) for rank in ranks] == [(True, True)] * 2
    said = "had 4 ranks when recorded, and has 2" if "ring" in name else "of 4 ranks left out"
    assert [said in note for note in ranks[0][name]["notes"]] == [True]


def test_what_ran_is_read_off_what_was_built(ranks: list[Facts]):
    said = {name: ranks[0][name]["said"] for name in parallelcases.BACKENDS}
    assert {one["dist_backend"] for one in said.values()} == {"gloo"}
    assert said["fsdp2, tp"]["mesh"] == {"dp": 1, "sp": 1, "tp": 2}
    assert said["fsdp2, ring"]["mesh"] == {"dp": 1, "sp": 2, "tp": 1}
    assert said["fsdp2"]["mesh"] == {"dp": 2, "sp": 1, "tp": 1}
    assert said["fsdp2"]["model_class"] == "LlamaForCausalLM"
    kernels = {name: one["ring_kernel"] for name, one in said.items()}
    assert {name for name, kernel in kernels.items() if kernel == "gathered K/V (stand-in)"} == {
        name for name in said if "ring" in name
    }


@pytest.mark.parametrize("name", ["plain", *parallelcases.BACKENDS])
def test_what_a_forward_raises_is_what_is_reported(ranks: list[Facts], name: str):
    assert [rank[name]["raised at once"] for rank in ranks] == [["ValueError", "boom"]] * 2
    if name == "plain":  # whose recovery fails itself, which hides nothing, and taints
        assert [rank[name]["recovery fails"] for rank in ranks] == [[["ValueError", "boom"], True]] * 2


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2, tp", "fsdp2, ring"])
def test_fsdp2_goes_on_after_an_input_that_raised(ranks: list[Facts], name: str):
    for rank in ranks:
        assert rank[name]["failed"] == "in the middle"
        assert rank[name]["after a failure"] == [False, True]
    assert json.loads(ranks[0][name]["saved"])["architectures"] == ["LlamaForCausalLM"]


def test_a_head_with_the_embeddings_weight_and_norms_of_single_heads_can_be_split(ranks: list[Facts]):
    found = ranks[0]["tied weights"]
    assert found["log_probs"] < 1e-4 and found["norm"] < 1e-3
    assert found["names"] and found["cosine"] > 0.9999 and found["parameter norms"] < 1e-3


def test_the_stand_in_for_ring_attention_is_attention_over_the_whole(ranks: list[Facts]):
    for rank in ranks:
        assert rank["ring attention"]["forward"] < 1e-5
        assert rank["ring attention"]["gradients"] < 1e-5
        assert rank["left behind"] is True
