"""`actordbg actor init`: builds the actor, tries it, and says what it is. That no worker is left is for tests/replay: it is a replay."""

import pytest
from commandline import invoke
from roots import json_of, read_json

from actordbg.base.errors import ActordbgError
from actordbg.store.layout import Store

pytestmark = pytest.mark.forked


def init(folder, *words, code=0):
    done = invoke(Store(folder / "store"), "actor init", *words, "--json")
    assert done.exit_code == code, done.stdout
    return json_of(done) | {"notes": done.stderr}


def test_it_builds_and_runs_and_says_what_it_built(tmp_path):
    saved = tmp_path / "saved"
    answer = init(tmp_path, "--num-layers", 1, "--packing", "--backward", "--save", saved)
    assert answer["ok"]
    expected = {"attn": "sdpa", "dtype": "fp32", "packing": True, "num_layers": 1, "backend": "plain", "zero_stage": 0}
    assert {name: answer["resolved"][name] for name in expected} == expected
    assert answer["resolved"]["parameters"] > 500_000
    assert answer["forward_s"] > 0 and answer["backward_s"] > 0 and answer["grad_norm"] > 0
    assert answer["peak_memory_bytes"] > 50_000_000
    assert [finding["id"] for finding in answer["known_failures"]] == ["vocabulary-folded"]
    assert "info[vocabulary-folded]" in answer["notes"]
    assert list(tmp_path.iterdir()) == [saved] and answer["saved"] == str(saved), "it leaves nothing else"
    assert read_json(saved / "config.json")["num_hidden_layers"] == 1
    with pytest.raises(ActordbgError, match="is not an empty folder") as refused:
        init(tmp_path, "--model", saved, "--save", saved)
    assert refused.value.exit_code == 3
    built = init(tmp_path, "--model", saved, "--dtype", "fp32")
    assert built["resolved"]["parameters"] == answer["resolved"]["parameters"]


@pytest.mark.parametrize(
    "words, code, said",
    [
        (("--backend", "deepspeed", "--zero-stage", "1", "--deepcompile"), 3, "DeepCompile runs on CUDA only"),
        (("--num-layers", "9"), 2, "the model has 2 layers"),  # an error in the worker keeps its exit code
    ],
)
def test_what_is_known_to_fail_is_refused_here_or_in_the_worker(tmp_path, words, code, said):
    with pytest.raises(ActordbgError, match=said) as refused:
        init(tmp_path, *words)
    assert refused.value.exit_code == code and not (tmp_path / "store").exists()


def test_what_the_model_raises_is_the_answer(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    answer = init(tmp_path, "--model", tmp_path / "broken", code=1)
    assert not answer["ok"] and "OSError" in answer["error"] and answer["signature"] == "checkpoint-broken"
