"""Causes planted in real models are named from log-probs alone, and nothing is named in healthy ones.

The asserts are in the scenarios (`causecases`), which run in processes of their own.
"""

import shutil
from pathlib import Path

import causecases
import pytest
from actorcases import run_scenario
from amounts import first_or_all
from commandline import run_here
from roots import json_of

pytestmark = pytest.mark.forked


@pytest.mark.parametrize("scenario", ["planted", "others", "healthy", "adapters"])
def test_a_cause_is_named_with_its_amount_and_a_healthy_model_has_none(tmp_path, scenario):
    run_scenario(scenario, tmp_path, program=causecases.__file__, OMP_NUM_THREADS="1")


def test_the_commands_name_the_cause_of_what_a_run_recorded(tmp_path):
    """A run that was configured with temperature 0.7 recorded log-probs without it; another one was healthy."""
    (folders,) = run_scenario("recorded", tmp_path, program=causecases.__file__, OMP_NUM_THREADS="1")
    for name, said in (("raw", "recorded log-probs: temperature 0.7 was not applied (0."), ("healthy", "")):
        asked = ["check", "--recorded", "--model", folders["model"], "--through", "rows", "--no-laws"]
        checked = run_here("--store", folders[name], *asked)
        assert (said or "RIGHT") in " ".join(checked.stdout.split()), checked.output
        assert checked.exit_code == (1 if said else 0), checked.output
        compared = run_here("--store", folders[name], "compare", "last", "recorded", "--json")
        explained = json_of(compared)["explained"]
        if said:
            assert [cause["name"] for cause in explained["causes"]] == ["temperature"] and not explained["unknown"]
            assert explained["causes"][0]["amount"] == pytest.approx(1.0, abs=1e-4) and explained["dumps"] == 2
            answer = explanation_of(folders[name])
            assert answer["wrong"] == ["rollout"] and answer["rollout"]["causes"][0]["name"] == "temperature", answer
            assert (
                not answer["trainer"]["causes"]
                and not answer["trainer"]["unknown"]
                and answer["dashboards"]["mismatch_kl"] > 0.01
            )
        else:
            assert explained is None, "nothing is searched for where nothing differs"


@pytest.mark.parametrize(
    "name, others, word, said",
    first_or_all(
        [
            ("updated-cool", True, "WRONG", "temperature"),
            ("updated-bf16", False, "NOT CHECKED", "unknown policy"),
            ("bf16", False, "RIGHT", "precision: bf16"),
            ("updated", False, "RIGHT", "older policy"),
            ("updated-cool", False, "NOT CHECKED", "unknown policy"),
            ("updated-bf16", True, "RIGHT", "precision: bf16"),
            ("bf16-cool", False, "WRONG", "temperature"),
        ],
        3,
    ),
)
def test_a_rollout_is_held_to_its_policy_and_to_its_dtype(sides, name, others, word, said):
    """Healthy off-policy steps and engines in bf16 are no fault, and faults of these are named where their truth is given."""
    more = ["--other-model", sides["before"]] if others else []
    answer = explanation_of(sides[name], *more)
    rollout = answer["rollout"]
    assert answer["verdict"] == word, answer["sentence"]
    assert said in [cause["name"] for cause in (*rollout["causes"], *rollout["also"])], answer["sentence"]
    assert answer["wrong"] == (["rollout"] if word == "WRONG" else []) and not answer["trainer"]["unknown"]


def explanation_of(store, *more):
    asked = ["--store", store, "explain", "last", "--against", "rollout", *more, "--json"]
    return json_of(run_here(*asked))


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    """Return the folders of models and stores, by name. The inputs of all stores are the same, and replayed in one of them."""
    (folders,) = run_scenario("sides", tmp_path_factory.mktemp("sides"), program=causecases.__file__, OMP_NUM_THREADS="1")
    first, *others = (folder for name, folder in folders.items() if name not in ("before", "now"))
    given = ["--model", folders["now"], "--through", "rows", "--dtype", "fp32", "--keep-tensors", "--no-backward", "--all"]
    replayed = run_here("--store", first, "replay", *given)
    assert replayed.exit_code == 0, replayed.output
    explanation_of(first)
    for other in others:
        shutil.copytree(Path(first) / "replays", Path(other) / "replays")
    return dict(folders)
