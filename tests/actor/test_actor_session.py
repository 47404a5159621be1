"""Replaying on the Actor alone: the same numbers as OpenRLHF gives, for every kind of call, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest
from actorcases import run_scenario

pytestmark = pytest.mark.slow

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    # OpenRLHF compiles its entropy; without dynamo it is the same function, without half a minute of C++
    return run_scenario("plain", tmp_path_factory.mktemp("models"), TORCHDYNAMO_DISABLE="1")[0]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return run_scenario("compiled,configurations", tmp_path_factory.mktemp("models"), TORCHINDUCTOR_COMPILE_THREADS="1")[0]


def furthest(left: list[list[float]], right: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(left, right, strict=True) for a, b in zip(one, other, strict=True))


def test_log_probs_are_those_of_openrlhfs_actor_called_directly_whatever_ran_between(plain: Facts):
    first, again = plain["twice"]
    assert first["log_probs"] == plain["direct"]
    assert first == again and first["grad_norm"] > 0.1
    assert (plain["weights"], plain["graph"], plain["disabled"]) == (True, False, "1"), "nothing is left behind or recorded"
    assert plain["loss"][0] == pytest.approx(plain["loss"][1], rel=1e-6), "the mean of -log_prob over the action mask"


def test_an_actor_of_our_own_gives_the_trainers_numbers_on_the_same_rows(plain: Facts):
    rows = plain["rows"]
    assert (rows["said"], rows["through"], rows["actor"]) == (None, "rows", "actordbg.trainers.rows_actor.RowsActor")
    assert rows["equal"] == [[True, True]] * 4, "log-probs and gradient norms, padded, packed, divided by a temperature, of all"
    assert len(rows["entropy"]) == 2 and max(rows["entropy"]) < 1e-5


def test_packed_rows_give_the_log_probs_and_the_gradient_of_padded_ones(plain: Facts):
    assert furthest(plain["packed"]["log_probs"], plain["twice"][0]["log_probs"]) < 1e-5
    assert plain["packed grad"][1] == pytest.approx(plain["packed grad"][0], rel=1e-5)
    assert plain["packed said"] == [False, True]


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


def test_each_record_decides_mode_temperature_and_backward_and_they_do_not_stay(plain: Facts):
    assert plain["modes"] == [[True, True], [False, False], [False, False]]
    assert plain["temperature"] == [0.5, 1.0] and plain["temperature moved"] > 0.5
    assert plain["backward for"] == [True, False, False]


def test_what_was_not_recorded_whole_is_refused_by_name(plain: Facts):
    for name, said in zip(("visual_inputs", "num_actions", "pos_ids"), plain["refused"], strict=True):
        assert name in said


def test_a_failed_input_does_not_touch_the_next(plain: Facts):
    found = plain["after a failure"]
    assert found == {"error": found["error"], "equal": True, "tainted": False} and found["error"] != "ran"


def test_what_is_reported_is_what_was_built(plain: Facts):
    resolved = plain["resolved"]
    expected = {
        "model": "tiny", "dtype": "fp32", "attn": "sdpa", "packing": False, "backend": "plain", "zero_stage": 0,
        "world_size": 1, "num_layers": 2, "device": "cpu", "seed": 7,
        "actor": "openrlhf.models.actor.Actor",
    }  # fmt: skip
    assert {name: resolved[name] for name in expected} == expected
    assert len(resolved["actor_sha256"]) == 64 and resolved["versions"]["torch"] and resolved["vocab_size"] == 4096
    assert plain["folded"] == {"said": [True, False], "equal": True}, "ids outside of the vocabulary"
    assert (plain["collective"], plain["kept"]) == (False, ["log_probs", "mask"]) and plain["peak"] > 50_000_000


def test_a_configuration_is_what_runs(changed: Facts):
    found = changed["configurations"]
    default, eager, one, bf16 = (found[name] for name in ("default", "eager", "one layer", "bf16"))
    assert (default["attn"], default["ran"], eager["attn"], eager["ran"]) == ("sdpa", ["sdpa"], "eager", [])
    assert 0 <= furthest(eager["log_probs"], default["log_probs"]) < 1e-4
    assert (one["num_layers"], default["num_layers"]) == (1, 2), "the first ones"
    assert one["parameters"] < default["parameters"] and one["log_probs"] != default["log_probs"]
    assert bf16["dtype"] == "bf16" and 1e-4 < furthest(bf16["log_probs"], default["log_probs"]) < 0.5
    saved = {"layers": 1, "dtype": "bf16", "log_probs": found["one layer bf16"]["log_probs"]}
    assert found["saved"] == saved, "a saved model replays to the same bits"


@pytest.mark.parametrize(
    ("configuration", "code", "says"),
    [
        ("flash", "unsupported", "flash-attn is not installed"),
        ("three layers", "usage", "the model has 2 layers"),
        ("no such model", "environment", "/nowhere/model"),
        ("deepcompile", "unsupported", "DeepCompile runs on CUDA only"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(changed: Facts, configuration: str, code: str, says: str):
    refusal = changed["configurations"][configuration]
    assert refusal["error"] == code and says in refusal["message"] and refusal["hint"]


def test_compiled_all_lengths_are_one_graph_with_the_numbers_of_eager(changed: Facts):
    eager, traced, fast = (changed["compiled"][name] for name in ("eager", "traced", "compiled"))
    assert {(run["graphs"], *run["said"]) for run in eager} == {(None, False, None)}
    for runs, backend, off in ((fast, "inductor", 1e-4), (traced, "aot_eager", 1e-5)):
        assert [(run["graphs"], run["breaks"]) for run in runs] == [(1, 0), (0, 0), (0, 0)]
        assert all(run["said"] == [True, backend] for run in runs)
        assert all(furthest(run["log_probs"], one["log_probs"]) < off for run, one in zip(runs, eager, strict=True))
