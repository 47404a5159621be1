"""Judged by the truth: what is right is green, what was broken on purpose is red, and a wrong reference misleads nobody.

Real workers, OpenRLHF's own packing and masking, the tiny model.
"""

import contextlib
import json
from dataclasses import dataclass

import brokenactor
import pytest
from commandline import invoke
from replaycases import publish

from actordbg.base.units import new_replay_id
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.records.replay_record import ReplaySpec
from actordbg.replay.supervise import load_spec, run_replay
from actordbg.store.layout import Store

pytestmark = pytest.mark.forked


@pytest.fixture(autouse=True, scope="module")
def a_usual_shell():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_SIZE"):
            patch.delenv(name, raising=False)
        yield


@dataclass(frozen=True)
class Bench:
    """A store with fp32 replays of two inputs: packed, and packed with a large and with a small fault."""

    store: Store
    right: str
    broken: str
    epsilon: str


@contextlib.contextmanager
def fault(folder, program):
    """Inside the block workers have this fault, and it is reached."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in brokenactor.environment(folder, program).items():
            patch.setenv(name, value)
        yield
    assert (folder / "reached").is_file(), "the fault was in the worker"


def run(store, inputs, **settings):
    config = ReplayConfig(backward=True, keep_gradients=True, **settings)
    outcome = run_replay(store, ReplaySpec(new_replay_id(), now_timestamp(), config, tuple(inputs)))
    assert outcome.all_passed, "a fault that is seen on its own would be no test of the verdict"
    return outcome.replay_id


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("truth")
    store = Store(folder / "store").create()
    inputs = publish(store, 2, batch=3)
    right = run(store, inputs, packing=True)
    with fault(folder / "run-on", brokenactor.POSITIONS_RUN_ON):
        broken = run(store, inputs, packing=True)
    with fault(folder / "epsilon", brokenactor.EPSILON):
        epsilon = run(store, inputs, packing=True)
    return Bench(store, right, broken, epsilon)


def command(store, *words):
    result = invoke(store, *words, "--json")
    answer = json.loads(result.stdout)
    return result.exit_code, answer


def test_the_truth_is_near_what_is_right_and_far_from_what_is_broken(bench):
    code, found = command(bench.store, "compare", bench.right, "truth")
    assert (code, found["verdict"], found["b"]["kind"], len(found["dumps"])) == (0, "RIGHT", "truth", 2)
    for dump in found["dumps"]:
        assert dump["log_probs"]["max_abs"] < 1e-5 and dump["grad_norm_rel"] < 1e-4
        assert dump["gradients"]["distance"] < 1e-4 and not dump["not_compared"]
    code, found = command(bench.store, "compare", bench.broken, "truth")
    assert (code, {dump["verdict"] for dump in found["dumps"]}) == (1, {"mismatch"})
    assert found["dumps"][0]["log_probs"]["max_abs"] > 0.1
    reached = {token["row"] for dump in found["dumps"] for token in dump["worst_tokens"]}
    assert 0 not in reached, "the first packed row has nothing before it that could leak"


def test_fp32_is_judged_by_what_fp32_costs_this_model(bench):
    """An epsilon of 5e-6 for 1e-6 moves log-probs ten times as far as rounding does, and no log-prob by 1e-4."""
    code, right = command(bench.store, "compare", bench.right, "truth")
    assert (code, right["b"]["dtype"]) == (0, "fp64") and "what fp32 costs against fp64" in right["thresholds_from"]
    code, found = command(bench.store, "compare", bench.epsilon, "truth")
    assert (code, found["b"]["replay_id"], found["rounding_id"]) == (1, right["b"]["replay_id"], right["rounding_id"])
    assert {dump["verdict"] for dump in found["dumps"]} == {"mismatch"}
    assert command(bench.store, "compare", bench.epsilon, "truth", "--flat-limits")[0] == 0, "flat limits pass it"


def test_a_fault_in_transformers_own_module_is_in_the_truth_and_found_by_its_formula(bench, tmp_path):
    """Replay and truth run the same patched norm, and agree to a millionth."""
    with fault(tmp_path / "norm", brokenactor.NORM_OF_TRANSFORMERS):
        broken = run(bench.store, list(load_spec(bench.store, bench.right).inputs[:1]), packing=True, temperature=0.9)
        code, found = command(bench.store, "compare", broken, "truth")
    assert (code, found["verdict"], {dump["verdict"] for dump in found["dumps"]}) == (1, "WRONG", {"match"})
    assert "transformers' own LlamaRMSNorm (replaced by sitecustomize's code) is wrong" in found["reasons"][0]
    code, mended = command(bench.store, "compare", broken, "truth")
    assert code == 1 and mended["b"]["replay_id"] != found["b"]["replay_id"], "that truth serves nobody else"
    assert mended["dumps"][0]["verdict"] == "mismatch"


def test_a_patched_mask_function_of_transformers_is_named_by_check(store, tmp_path):
    """Replay and truth run it, so that their log-probs agree; laws and the formula do not."""
    publish(store, 1, length=32)
    with fault(tmp_path / "mask", brokenactor.MASK_OF_TRANSFORMERS):
        code, found = command(store, "check", "--no-backward")
    assert (code, found["verdict"]) == (1, "WRONG") and found["max_abs"] < 1e-5
    assert {"formula", "future"} <= {each["rule"] for each in found["findings"]}
    assert "the code of sitecustomize (causal_mask_function), which is not transformers'" in found["not_checked"]


def noise_of(store, dtype):
    """The noise floor of the shorter input, packed."""
    code, found = command(store, "noise", "--dtype", dtype, "--packing", "--backward", "--order", "length", "--max-inputs", "1")
    assert code == 0
    return found


def excused(store, replay_id, noise):
    """Whether a replay is green against the truth because of this floor."""
    return command(store, "compare", replay_id, "truth", "--noise", noise["noise_id"])[0] == 0


def test_every_variation_is_measured_and_excuses_no_fault(bench):
    noise = noise_of(bench.store, "bf16")
    assert [variant["name"] for variant in noise["variants"]] == ["repeat", "repad", "rebatch", "reorder", "rounding"]
    assert noise["dumps"] == 1 and all(variant["log_probs"]["count"] == noise["tokens"] > 100 for variant in noise["variants"])
    assert noise["deterministic"] is True and noise["reasons"] == []
    assert 0.005 < noise["floor"]["max_abs"] < 0.5, "what bf16 costs on its own"
    assert not excused(bench.store, bench.broken, noise)


def test_the_noise_of_a_broken_configuration_does_not_excuse_it(bench, tmp_path):
    """Rows that leak into each other move when they are reordered, by as much as they are wrong."""
    with fault(tmp_path / "fault", brokenactor.POSITIONS_RUN_ON):
        noise = noise_of(bench.store, "fp32")
    assert max(variant["log_probs"]["max_abs"] for variant in noise["variants"]) > 0.1, "it moves as far as it is wrong"
    assert noise["floor"]["max_abs"] < 1e-4
    assert noise["reasons"] and all("counted as a fault" in reason for reason in noise["reasons"])
    assert not excused(bench.store, bench.broken, noise)


FAULTS = (
    "log-softmax in bf16",
    "one token off by 0.4",
    "no gradient of q_proj, layer 0",
    "no gradient of q_proj, layer 1",
    "no gradient of a norm",
    "gradients x0.98",
    "attention x1.1",
    "epsilon 1e-3",
)


def test_each_planted_fault_is_red_by_measured_limits_and_flat_ones_pass_the_small_ones(store, tmp_path):
    """In bf16: the first input is right, and each other has a fault."""
    inputs = publish(store, len(FAULTS) + 1, length=200)
    with fault(tmp_path / "faults", brokenactor.ONE_FAULT_EACH):
        run(store, inputs, dtype="bf16", packing=True)

    def judged(*more):
        dumps = command(store, "compare", "last", "truth", *more)[1]["dumps"]
        return dict(zip(("right", *FAULTS), sorted(dumps, key=lambda dump: dump["dump_id"]), strict=True))

    found = judged()
    assert {name: dump["verdict"] for name, dump in found.items()} == {"right": "match"} | dict.fromkeys(FAULTS, "mismatch")
    assert any("q_proj" in reason for reason in found["no gradient of q_proj, layer 1"]["reasons"])
    flat = judged("--flat-limits")
    small = ("right", "log-softmax in bf16", "one token off by 0.4", "gradients x0.98")
    assert {flat[name]["verdict"] for name in small} == {"match"}
