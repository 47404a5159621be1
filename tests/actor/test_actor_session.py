"""Replaying on the Actor alone: the same numbers as OpenRLHF gives, for every kind of call, and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from actorcases import run_scenario

pytestmark = pytest.mark.slow

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def plain(cache: Path) -> Facts:
    # OpenRLHF compiles its entropy; without dynamo it is the same function, without half a minute of C++
    return run_scenario("plain", cache, TORCHDYNAMO_DISABLE="1")[0]


@pytest.fixture(scope="module")
def changed(cache: Path) -> Facts:
    return run_scenario("compiled,configurations", cache, TORCHINDUCTOR_COMPILE_THREADS="1")[0]


@pytest.fixture(scope="module")
def configurations(changed: Facts) -> Facts:
    found: Facts = changed["configurations"]
    return found


@pytest.fixture(scope="module")
def compiled(changed: Facts) -> Facts:
    found: Facts = changed["compiled"]
    return found


def furthest(left: list[list[float]], right: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True))


def test_log_probs_are_those_of_openrlhfs_actor_called_directly(plain: Facts):
    assert plain["twice"][0]["log_probs"] == plain["direct"]


def test_an_actor_of_our_own_gives_the_trainers_numbers_on_the_same_rows(plain: Facts):
    rows = plain["rows"]
    assert (rows["said"], rows["through"], rows["actor"]) == (None, "rows", "actordbg.trainers.rows_actor.RowsActor")
    assert rows["equal"] == [[True, True]] * 4, "log-probs and gradient norms, padded, packed, divided by a temperature, of all"
    assert len(rows["entropy"]) == 2 and max(rows["entropy"]) < 1e-5


def test_the_same_input_gives_the_same_result_whatever_ran_between(plain: Facts):
    first, again = plain["twice"]
    assert first == again
    assert first["grad_norm"] > 0.1


def test_no_gradient_and_no_graph_is_left_behind(plain: Facts):
    assert plain["weights"]
    assert plain["graph"] is False


def test_packed_rows_give_the_log_probs_and_the_gradient_of_padded_ones(plain: Facts):
    assert furthest(plain["packed"]["log_probs"], plain["twice"][0]["log_probs"]) < 1e-5
    assert plain["packed grad"][1] == pytest.approx(plain["packed grad"][0], rel=1e-5)
    assert plain["packed said"] == [False, True]


def test_the_loss_is_the_mean_of_negative_log_probs_over_the_action_mask(plain: Facts):
    assert plain["loss"][0] == pytest.approx(plain["loss"][1], rel=1e-6)


@pytest.mark.parametrize("call", ["log-probs of actions", "training pass", "with entropy", "old argument, off"])
def test_a_call_with_an_action_mask_gives_log_probs_of_its_actions(plain: Facts, call: str):
    found = plain["shapes"][call]
    assert found["log_probs"] == found["mask"] == [3, 8]
    assert found["chosen"] == 21
    assert found["entropy"] == ([3, 8] if call == "with entropy" else None)


@pytest.mark.parametrize("call", ["sft", "logits only", "logits only, packed"])
def test_a_call_without_one_gives_log_probs_of_every_real_next_token(plain: Facts, call: str):
    found = plain["shapes"][call]
    assert found["log_probs"] == found["mask"] == [3, 23]
    assert found["chosen"] == 16 + 20 + 23
    assert found["head"] == plain["shapes"]["log-probs of actions"]["head"]
    assert bool(found["notes"]) == (call != "sft")


def test_training_mode_follows_the_record(plain: Facts):
    assert plain["modes"] == [[True, True], [False, False], [False, False]]


def test_temperature_follows_each_record_and_does_not_stay(plain: Facts):
    assert plain["temperature"] == [0.5, 1.0]
    assert plain["temperature moved"] > 0.5


def test_ids_outside_the_vocabulary_are_folded_and_that_is_said(plain: Facts):
    assert plain["folded"] == {"said": [True, False], "equal": True}
    assert plain["resolved"]["vocab_size"] == 4096


def test_what_was_not_recorded_whole_is_refused_by_name(plain: Facts):
    incomplete, old, fork = plain["refused"]
    assert "visual_inputs" in incomplete
    assert "num_actions" in old
    assert "pos_ids" in fork


def test_a_failed_input_does_not_touch_the_next(plain: Facts):
    assert plain["after a failure"] == {"error": plain["after a failure"]["error"], "equal": True, "tainted": False}
    assert plain["after a failure"]["error"] != "ran"


def test_backward_follows_the_record_where_nothing_else_is_asked_for(plain: Facts):
    assert plain["backward for"] == [True, False, False]


def test_what_is_reported_is_what_was_built(plain: Facts):
    resolved = plain["resolved"]
    expected = {
        "model": "tiny", "dtype": "fp32", "attn": "sdpa", "packing": False, "backend": "plain", "zero_stage": 0,
        "world_size": 1, "num_layers": 2, "device": "cpu", "seed": 7,
        "actor": "openrlhf.models.actor.Actor",
    }  # fmt: skip
    assert {name: resolved[name] for name in expected} == expected
    assert len(resolved["actor_sha256"]) == 64
    assert resolved["versions"]["torch"]
    assert plain["collective"] is False
    assert plain["peak"] > 50_000_000
    assert plain["kept"] == ["log_probs", "mask"]


def test_a_replay_does_not_record_itself(plain: Facts):
    assert plain["disabled"] == "1"


def test_the_resolved_attention_is_the_function_that_runs(configurations: Facts):
    assert configurations["default"]["attn"] == "sdpa"
    assert configurations["default"]["ran"] == ["sdpa"]
    assert configurations["eager"]["attn"] == "eager"
    assert configurations["eager"]["ran"] == []
    assert 0 <= furthest(configurations["eager"]["log_probs"], configurations["default"]["log_probs"]) < 1e-4


def test_fewer_layers_are_the_first_ones_of_the_model(configurations: Facts):
    one, two = configurations["one layer"], configurations["default"]
    assert (one["num_layers"], two["num_layers"]) == (1, 2)
    assert one["parameters"] < two["parameters"]
    assert one["log_probs"] != two["log_probs"]


def test_a_saved_model_replays_to_the_same_bits(configurations: Facts):
    assert configurations["saved"]["log_probs"] == configurations["one layer bf16"]["log_probs"]
    assert configurations["saved"] | {"log_probs": 0} == {"layers": 1, "dtype": "bf16", "log_probs": 0}


def test_bf16_is_bf16(configurations: Facts):
    assert configurations["bf16"]["dtype"] == "bf16"
    assert 1e-4 < furthest(configurations["bf16"]["log_probs"], configurations["default"]["log_probs"]) < 0.5


@pytest.mark.parametrize(
    ("configuration", "code", "says"),
    [
        ("flash", "unsupported", "flash-attn is not installed"),
        ("three layers", "usage", "the model has 2 layers"),
        ("no such model", "environment", "/nowhere/model"),
        ("deepcompile", "unsupported", "DeepCompile runs on CUDA only"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(configurations: Facts, configuration: str, code: str, says: str):
    refusal = configurations[configuration]
    assert refusal["error"] == code
    assert says in refusal["message"]
    assert refusal["hint"]


def test_compiled_all_lengths_are_one_graph_with_the_numbers_of_eager(compiled: Facts):
    eager, traced, fast = compiled["eager"], compiled["traced"], compiled["compiled"]
    assert [run["graphs"] for run in fast] == [run["graphs"] for run in traced] == [1, 0, 0]
    assert [run["breaks"] for run in fast] == [0, 0, 0]
    assert [run["graphs"] for run in eager] == [None, None, None]
    for one, other in zip(fast, eager, strict=True):
        assert furthest(one["log_probs"], other["log_probs"]) < 1e-4
        assert (one["said"], other["said"]) == ([True, "inductor"], [False, None])
    for one, other in zip(traced, eager, strict=True):
        assert furthest(one["log_probs"], other["log_probs"]) < 1e-5
        assert one["said"] == [True, "aot_eager"]
