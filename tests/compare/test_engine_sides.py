"""A running server as a side: what it gets wrong is named, from replays with `--backend endpoint` alone.

The server is a stand-in with transformers behind it (`tests/support/scoring_server.py`).
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import first_or_all
from commandline import in_json, invoke
from lawcases import dump_of, model_of
from scoring_server import ScoringServer, scores_of, serving

from actordbg.base.errors import Unsupported, UsageError
from actordbg.formats.dump_record import make_dump_id
from actordbg.judge.explained_sides import ExplainedEngine
from actordbg.store import payload
from actordbg.store.layout import Store

pytestmark = pytest.mark.forked


@dataclass(frozen=True)
class Served:
    """A store with a dump, the checkpoint that is served, and what scores rows with it."""

    store: Store
    model: Path
    loaded: Any

    def replay(self, server, *more):
        with serving(server) as url:
            words = ("replay", "--backend", "endpoint", "--url", url, "--model", self.model, "--dtype", "fp32", "--json", *more)
            return dict(json.loads(invoke(self.store, *words).stdout))

    def explain(self, server, *more):
        self.replay(server)
        return dict(in_json(self.store, "explain last", *more))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("engine")
    store, model = Store(folder / "store").create(), model_of(folder, "llama")
    for index in range(1):
        dump = dump_of("left", length=64, actions=48, seed=index)
        moment = f"2025-06-19T05:26:0{index}.000000Z"
        record = replace(dump.record, dump_id=make_dump_id(moment, index, 1, f"{index:08x}"), timestamp=moment, action_len=48)
        store.publish_dump(*payload.encode(record, dump.tensors))
    return Served(store, model, AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())


@pytest.fixture
def scores(served):
    return scores_of(served.loaded)


@pytest.fixture
def other_weights(served, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(served.model, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)) * parameter.abs().mean()
    model.save_pretrained(tmp_path / "later")
    yield tmp_path / "later", scores_of(model)


@pytest.mark.parametrize("kind", first_or_all(["vLLM", "SGLang"]))
def test_a_right_server_is_right_in_every_way_and_against_the_truth(served, scores, kind):
    told = served.explain(ScoringServer(scores, kind))
    assert told["good"] and told["wrong"] == [] and set(told["ways"]) == {"alone", "together", "twice", "cached", "reset"}
    assert f"{kind} 0.0.stand-in" in told["sentence"] and not told["not_checked"]
    compared = in_json(served.store, "compare last truth")
    assert compared["verdict"] == "RIGHT"


def test_a_temperature_that_a_server_applies_is_named(served):
    told = served.explain(ScoringServer(scores_of(served.loaded, temperature=0.7)))
    assert not told["good"] and "alone" in told["wrong"] and "temperature was 0.7" in told["sentence"], told["sentence"]


def test_weights_of_another_step_are_named(served, other_weights):
    folder, later = other_weights
    told = served.explain(ScoringServer(later), "--other-model", str(folder))
    assert "alone" in told["wrong"] and str(folder) in told["sentence"], told["sentence"]


def test_a_stale_cache_is_wrong_only_when_asked_twice(served, scores, other_weights):
    told = served.explain(ScoringServer(scores, "SGLang", stale=other_weights[1], stale_from=30))
    assert set(told["wrong"]) <= {"together", "twice", "cached"} and {"twice", "cached"} <= set(told["wrong"])
    assert "prefix cache" in told["sentence"] and "from token 3" in told["moved"]["twice"], told


def test_what_a_server_cannot_do_is_refused_before_anything_runs(served, scores):
    with pytest.raises(UsageError, match="--temperature and --backend endpoint"):
        served.replay(ScoringServer(scores), "--temperature", "0.7")
    with pytest.raises(UsageError, match="does not serve"):
        served.replay(ScoringServer(scores), "--served-model", "other")
    with pytest.raises(UsageError, match="needs a server"):
        invoke(served.store, "replay --backend endpoint --model", served.model)
    with pytest.raises(Unsupported, match="tiny"), serving(ScoringServer(scores)) as url:
        invoke(served.store, "replay --backend endpoint --url", url)


def test_nan_and_missing_log_probs_fail_the_inputs_and_nothing_else(served, scores):
    for fault, says in (("nan", "not finite"), ("no-logprobs", "returned no prompt_logprobs")):
        told = served.replay(ScoringServer(scores, broken=fault))
        assert not told["good"] and says in json.dumps(told)
    with pytest.raises(Unsupported, match="no input of replay"):
        invoke(served.store, "explain", told["replay_id"])


def test_each_way_that_was_not_scored_for_every_input_is_not_checked():
    ways = {"alone": None, "cached": None}
    assert [left.text.split()[-1] for left in ExplainedEngine("a server", ways, {}).unchecked] == ["input"] * 3
