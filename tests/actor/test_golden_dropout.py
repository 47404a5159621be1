"""A call that dropped activations gives its own log-probs again, bit for bit, exactly when its generators' states are restored."""

import json
from dataclasses import dataclass

import goldencases
import pytest
import torch
from actorcases import run_scenario
from stopcases import actordbg

from actordbg.catalog.indexer import refresh
from actordbg.catalog.query import results_for, select_dumps
from actordbg.compare.comparing import compare
from actordbg.records.comparison_record import MATCH, MISMATCH
from actordbg.store.layout import Store

pytestmark = pytest.mark.slow

WITHOUT_DYNAMO = {"TORCHDYNAMO_DISABLE": "1"}
"""OpenRLHF compiles its entropy; without dynamo it is the same function, without half a minute of C++."""
AS_RECORDED = ("training", "checkpointed", "no gradients", "evaluated", "other entropies")
OFF = ("without states", "other states", "no states")


@dataclass(frozen=True)
class Recorded:
    """What the scenario made: the model, and the dumps' ids by what they are."""

    store: Store
    model: str
    ids: dict[str, str]
    drawn: list[bool]

    def command(self, *words):
        done = actordbg(self.store, *words, **WITHOUT_DYNAMO)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def recorded(forked_workers, tmp_path_factory):
    cache = tmp_path_factory.mktemp("dropout")
    facts = run_scenario("dropout", cache, program=goldencases.__file__, **WITHOUT_DYNAMO)[0]
    return Recorded(Store(cache / "store"), facts["model"], facts["ids"], facts["drawn"])


@pytest.fixture(scope="module")
def default(recorded):
    answer = json.loads(recorded.command("replay", "--json", "--model", recorded.model))
    assert (answer["status"], answer["passed"]) == ("complete", 8)
    by_id = {record.dump_id: record for record in results_for(recorded.store, answer["replay_id"])}
    return answer, {name: by_id[dump_id] for name, dump_id in recorded.ids.items()}


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize(
    "condition, names",
    [
        ("with_rng and rng_match = false", {"other states"}),
        ("golden_max_abs > 0.01", set(OFF)),
        ("golden_entropy_max_abs > 0.1", {"other entropies"}),
        ("not with_rng", {"without states"}),
    ],
)
def test_where_finds_what_is_off(recorded, condition, names):
    refresh(recorded.store)
    assert {row.dump_id for row in select_dumps(recorded.store, condition)} == {recorded.ids[name] for name in names}


def test_random_numbers_are_drawn_in_training_mode_only(recorded):
    assert recorded.drawn == [True, True, True, False]


def test_restored_states_give_the_runs_log_probs_and_entropies_bit_for_bit(default):
    for name in AS_RECORDED:
        result = default[1][name]
        assert (result.golden_max_abs, result.rng_match) == (0.0, True), name
        assert result.golden_count == result.golden_entropy_count == result.logprob_count, name
        assert (result.logprob_count or 0) > 20 and result.extra["restored"] == ["cpu"]
        expected = pytest.approx(0.25, abs=1e-5) if name == "other entropies" else 0.0
        assert result.golden_entropy_max_abs == expected, name


def test_without_the_states_or_with_others_the_log_probs_are_not_the_runs(recorded, default):
    answer, results = default
    assert all((results[name].golden_max_abs or 0) > 0.01 for name in OFF)
    assert [results[name].rng_match for name in OFF] == [None, False, None]
    assert results["no states"].extra["not_compared"]["generators"].startswith("the recorded RNG state of cpu")
    assert not {"restored", "not_compared"} & results["without states"].extra.keys()
    whole = compare(recorded.store, answer["replay_id"], "golden")
    off = {one.dump_id for one in whole.dumps if one.verdict == MISMATCH}
    assert whole.verdict == MISMATCH and off == {recorded.ids[name] for name in (*OFF, "other entropies")}
    assert [one.dump_id in off for one in whole.dumps] == [True] * 4 + [False] * 4, "the worst first"
    assert compare(recorded.store, answer["replay_id"], "golden", only=[recorded.ids["training"]]).verdict == MATCH


def test_the_answer_and_the_report_tell(recorded, default):
    answer, _ = default
    assert (answer["golden"]["results"], answer["golden"]["equal"], answer["golden_entropy"]["equal"]) == (8, 5, 4)
    assert answer["golden_entropy"]["worst_dump"] == recorded.ids["other entropies"]
    drawn = answer["generators"]
    assert (drawn["restored"], drawn["matched"], drawn["differed"]) == (6, 5, 1)
    assert drawn["example"] == recorded.ids["other states"]
    text = " ".join(recorded.command("report", answer["replay_id"]).split())
    assert "against the run's own log-probs: 8 inputs, 206 tokens; 5 inputs equal, |difference|" in text
    assert "against the run's own RNG states: cpu restored for 6 inputs; 5 ended in the run's state" in text


def test_dropout_in_attention_is_the_runs_own_padded_and_packed(forked_workers, tmp_path):
    run_scenario("sessions", tmp_path, program=goldencases.__file__, **WITHOUT_DYNAMO, CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_a_gpu_its_own_generator_is_restored(tmp_path):
    run_scenario("sessions", tmp_path, program=goldencases.__file__, **WITHOUT_DYNAMO)
