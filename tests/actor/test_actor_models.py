"""Which folder a configuration's model is, how a shorter one is derived without touching it, and the embedded tiny one: deterministic,
openable, not degenerate, built once however many ask."""

import json
import multiprocessing
from pathlib import Path

import pytest
from casefiles import json_cases
from roots import read_json, write_json

from actordbg.actor.models import build_tiny, ensure_tiny, locate, truncate
from actordbg.base.errors import EnvironmentProblem, UsageError


@pytest.fixture
def model(tmp_path):
    """A folder with a model's files; nobody reads the weights here."""
    folder = tmp_path / "llama"
    folder.mkdir()
    write_json(folder / "config.json", {"num_hidden_layers": 4, "hidden_size": 8})
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_folder_is_itself_and_a_hub_name_stays_a_name(model, tmp_path):
    assert locate(str(model), tmp_path / "cache") == str(model)
    assert locate("meta-llama/Llama-3.1-8B", tmp_path / "cache") == "meta-llama/Llama-3.1-8B"
    assert not (tmp_path / "cache").exists()
    assert (tmp_path / "cache").samefile(Path(locate("tiny", tmp_path / "cache")).parent)


def test_a_shorter_model_has_its_own_configuration_and_the_same_weights_and_another_wish_is_another(model, tmp_path):
    before, cache = {path.name: path.read_bytes() for path in model.iterdir()}, tmp_path / "cache"
    path = Path(locate(str(model), cache, num_layers=2))
    assert read_json(path / "config.json") == {"num_hidden_layers": 2, "hidden_size": 8}
    assert (path / "model.safetensors").read_bytes() == b"weights" and (path / "model.safetensors").is_symlink()
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert locate(str(model), cache, num_layers=2) == str(path) != locate(str(model), cache, num_layers=3)
    other = Path(locate(str(model), cache, num_layers=2, dtype="float32"))  # what an old OpenRLHF will load
    assert other != path and read_json(other / "config.json")["torch_dtype"] == "float32"
    assert not any(path.name.startswith(".") for path in cache.iterdir())


@pytest.mark.parametrize("config, shorter", json_cases("truncated"))
def test_truncating_keeps_the_first_layers_of_the_text_model(config, shorter):
    before = json.dumps(config)
    assert truncate(config, 2) == shorter
    assert json.dumps(config) == before


def test_more_layers_than_there_are_is_an_error_that_says_how_many(model, tmp_path):
    with pytest.raises(UsageError, match="the model has 4 layers"):
        locate(str(model), tmp_path / "cache", num_layers=5)
    with pytest.raises(UsageError, match="does not say how many layers"):
        truncate({"hidden_size": 8}, 1)


def test_a_path_where_nothing_is_is_not_taken_for_a_hub_name_and_a_folder_without_a_configuration_for_a_model(tmp_path):
    for name in ("/nowhere/model", "./nowhere", "~/nowhere/at/all"):
        with pytest.raises(EnvironmentProblem, match="there is no model"):
            locate(name, tmp_path / "cache")
    with pytest.raises(EnvironmentProblem, match=r"holds no model: there is no config\.json"):
        locate(str(tmp_path), tmp_path / "cache", num_layers=1)


def _bytes(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_configuration_gives_the_same_bytes_and_another_does_not(tmp_path):
    first = _bytes(build_tiny(tmp_path / "a", vocab_size=300))
    assert set(first) == {"config.json", "model.safetensors"}
    assert _bytes(build_tiny(tmp_path / "b", vocab_size=300)) == first
    assert _bytes(build_tiny(tmp_path / "c", vocab_size=301)).items().isdisjoint(first.items())


def test_many_processes_that_ask_at_once_get_one_whole_model(tmp_path):
    context = multiprocessing.get_context("forkserver")  # forking this process could deadlock in torch's thread pool
    context.set_forkserver_preload(["actordbg.actor.models", "safetensors.torch"])
    asking = [context.Process(target=ensure_tiny, args=(tmp_path,)) for _ in range(6)]
    for process in asking:
        process.start()
    for process in asking:
        process.join(60)
    assert [process.exitcode for process in asking] == [0] * 6
    assert len(list(tmp_path.iterdir())) == 1, "one model, and nobody's leavings"
    before = (path := ensure_tiny(tmp_path)).stat().st_mtime_ns
    assert _bytes(path) == _bytes(build_tiny(tmp_path / "again"))
    assert ensure_tiny(tmp_path) == path and path.stat().st_mtime_ns == before


def test_a_build_that_was_killed_half_way_is_not_taken_for_a_model(tmp_path):
    (tmp_path / ".tiny-dead").mkdir()
    (tmp_path / ".tiny-dead" / "config.json").write_text("{")
    assert read_json(ensure_tiny(tmp_path) / "config.json")["model_type"] == "llama"
