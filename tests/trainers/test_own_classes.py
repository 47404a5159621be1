"""Faults planted in trainings of other trainers' own classes are named from their recorded losses; healthy ones are not."""

import json
from importlib.util import find_spec

import pytest
from amounts import first_or_all
from commandline import in_json

from actordbg.store.layout import Store
from benchmarks import faulty_grpo, faulty_trl, own_classes

pytestmark = pytest.mark.forked
needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed: make test installs it")


@needs_trl
@pytest.mark.parametrize(
    "name",
    first_or_all(
        ["dpo-swapped", "sft-tokens", "rloo-old", "dpo-labels", "tokens-of-micro-batch", "sft-end", "dpo-stale", "sft-means"], 3
    ),
)
def test_whole_steps_of_trl_are_recorded_and_a_fault_of_each_trainer_is_named(tmp_path, name):
    """GRPO's faults of data, and that of its normalizer, are below and in `make whole`."""
    benchmark = faulty_trl if name in faulty_trl.CASES else faulty_grpo
    assert benchmark.every(tmp_path, {name: benchmark.CASES[name]}, benchmark.recorded)


@needs_trl
def test_data_faults_that_begin_late_in_a_run_are_named_with_their_step(tmp_path):
    """Reference log-probs of another token, then of another row; a mask that is shifted; a row twice: one step each, from 1 on."""
    folder = tmp_path / "late"
    faulty_grpo.recorded(folder, "late")
    answer = in_json(Store(folder / "store"), "lint")
    broken = {rule["rule"] for rule in answer["rules"] if rule["state"] == "broken"}
    assert answer["verdict"] == "WRONG" and {"alignment", "rows", "lengths", "duplicates"} <= broken, answer["sentence"]
    assert "step 1: base_action_log_probs are shifted" in (text := json.dumps(answer["findings"])), text
    assert "step 2: base_action_log_probs are those of another row" in text


@pytest.mark.parametrize("package", own_classes.CASES)
def test_steps_of_its_own_classes_are_recorded_and_their_faults_are_named(tmp_path, package):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: `python -m benchmarks.own_classes` says how")
    cases = {name: fault for name, fault in own_classes.CASES[package][1].items() if fault.command == "lint"}
    assert own_classes.every(tmp_path, cases, own_classes.recorded(package))
