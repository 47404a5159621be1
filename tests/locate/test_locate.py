"""Where a configuration goes wrong, asked of real models: planted faults are named in fp32 and in bf16, healthy models are right.

The asserts are in the scenarios (`locatecases`), which run in processes of their own.
"""

import brokenactor
import census
import locatecases
import plantedfaults
import pytest
import torch
from actorcases import run_scenario
from amounts import first_or_all
from commandline import invoke, run_here
from replaycases import publish
from roots import json_of
from torch import Tensor, nn

from actordbg.catalog.query import newest_configuration
from actordbg.locate.forced_forward import Hooks
from actordbg.locate.operations import Listing, TokenLayout
from actordbg.records.locate_record import INTO, OUT
from actordbg.replay.supervise import load_spec

pytestmark = pytest.mark.forked


@pytest.mark.parametrize(
    "scenario", ["faults", "backward,routing", "others,compiled,odd_shapes", "kernels,foreign", "streamed,second_tokens"]
)
def test_a_fault_is_named_by_its_module_and_a_healthy_model_is_right(tmp_path, scenario):
    run_scenario(scenario, tmp_path, program=locatecases.__file__)


def test_faults_are_red_in_bf16_with_module_and_cause(tmp_path):
    run_scenario("some", tmp_path, program=plantedfaults.__file__)


def test_healthy_models_are_not_red(tmp_path):
    """Ask a fixed part of `make census`."""
    cells = census.sample()
    lines = census.run(tmp_path / "census.jsonl", tmp_path, cells)
    healthy = {"cells": len(cells), "RIGHT": len(cells), "truly red": 0, "falsely red": []}
    assert census.figures(lines) == healthy, (tmp_path / "workers.log").read_text()
    assert all(line["places"] > 35 and line["gradients"] > 60 for line in lines), lines
    assert max(line["largest"] for line in lines if (line["configuration"], line["family"]) == ("plain", "mixtral")) < 1.1, lines


def test_ranks_that_compute_together_stay_in_step_are_judged_alike_and_the_one_that_differs_is_named(tmp_path):
    """The laws are asked, too, whatever the inputs can answer."""
    run_scenario("together", tmp_path, world=2, program=locatecases.__file__)


@pytest.mark.parametrize(
    "fault, part, said, dumps",
    first_or_all(
        [
            (brokenactor.EPSILON_AT_THE_FIRST_CALL, 0, "model.layers.1.input_layernorm.variance_epsilon is 0.001", 1),
            (brokenactor.LONG_PACKS_SCALED, 1000, "the gated product of model.layers.1.mlp: with mul added", 2),
            (brokenactor.LATER_TOKENS_SKIP, 0, "model.layers.1", 2),
        ],
        2,
    ),
)
def test_a_check_names_what_the_first_call_changes_and_what_only_long_inputs_show(
    store, tmp_path, monkeypatch, fault, part, said, dumps
):
    """part: of the replay's time, which inputs of other lengths may take; 0: only a dump that is known to be wrong is judged."""
    monkeypatch.setattr("actordbg.judge.check.OTHER_LENGTHS", part)
    publish(store, 1, batch=3, length=48)
    (long,) = publish(store, 1, length=200, first=1)
    for name, value in brokenactor.environment(tmp_path / "fault", fault).items():
        monkeypatch.setenv(name, value)
    options = ["--store", str(store.root), "check", "--dtype", "bf16", "--packing", "--through", "rows", "--json"]
    found = run_here(*options)
    answer = json_of(found)
    assert found.exit_code == 1 and answer["verdict"] == "WRONG" and said in answer["sentence"], answer["sentence"]
    replays = len(list(store.replays.iterdir()))
    again = invoke(store, "explain", answer["replay_id"], "--json")
    why = json_of(again)["explanation"]
    assert said in str(why["what"] + why["where"]), why
    assert dumps == 1 or not any(text.startswith("all ") for text in why["ruled_out"]), "those of the other dump are not"
    assert len(list(store.replays.iterdir())) == replays, "what the check judged is not judged again"
    located = [load_spec(store, path.name) for path in store.replays.iterdir()]
    judged = {item.dump_id for spec in located for item in spec.inputs[: spec.locate] if len(spec.inputs) == 1}
    assert judged == ({long.dump_id} if dumps == 2 else set()), judged


def test_the_command_names_what_no_limit_on_outputs_shows(store, tmp_path, monkeypatch):
    """Ask for one input of several, in a healthy process and in one whose model has another epsilon."""
    publish(store, 2, batch=3, length=48)
    options = ["--store", str(store.root), "locate", "--json"]
    asked = [*options, "--dtype", "bf16", "--packing", "--through", "rows"]
    healthy = run_here(*asked)
    answer = json_of(healthy)
    assert healthy.exit_code == 0 and answer["word"] == "RIGHT", healthy.output
    assert answer["located"]["places"] == 53 and answer["looked_at"] == 114 and answer["located"]["largest"] < 1.05
    for name, value in brokenactor.environment(tmp_path / "fault", brokenactor.EPSILON_OF_A_NORM).items():
        monkeypatch.setenv(name, value)
    faulty = run_here(*options[:-1], answer["replay_id"])
    assert faulty.exit_code == 1, faulty.output
    cause = "model.layers.1.input_layernorm.variance_epsilon is 0.001; transformers' model from this checkpoint has 1e-06"
    assert f"WRONG: {cause}" in " ".join(faulty.stdout.split()), faulty.output
    assert newest_configuration(store).replay_id == answer["replay_id"], "that of a replay's modules keeps no tensors to compare"
    explained = run_here(*options[:2], "explain", "--json")
    why = json_of(explained)["explanation"]
    assert explained.exit_code == 1 and why["what"] == [cause] and "loads" not in why["to_do"][0], explained.output
    assert any("as near to the truth as a healthy" in text for text in why["ruled_out"]) and why["not_checked"], why
    refused = run_here(*options, answer["replay_id"], "--packing")
    assert "a replay has its own configuration and inputs, not --packing" in str(refused.exception)


def test_an_integer_that_becomes_a_float_is_no_error_of_the_listing():
    layer, places = nn.Identity(), torch.arange(3).view(1, 3)
    layer.forward = Tensor.float
    with Listing(layer, set(), TokenLayout(places, places, places[0])).on():
        assert layer(places).dtype is torch.float32


def test_a_tensor_that_only_one_model_gets_moves_no_other_place():
    class Seen(Hooks):
        def take(self, key, flat, module):
            self.keys = [*getattr(self, "keys", []), key[3]]

    def places(mask):
        module, seen = torch.nn.Module(), Seen(2)
        module.forward = lambda states, mask, ids: states
        with seen.on({"m": (module, (INTO, OUT))}):
            module(torch.ones(2, 3), mask, torch.ones(2))
        return seen.keys

    assert places(None) == [0, 2, 0] and places(torch.ones(2)) == [0, 1, 2, 0]
