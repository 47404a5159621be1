"""`actordbg actor init`: builds the actor, tries it, and says what it is. That no worker is left is for tests/replay: it is a replay."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from commandline import program

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_workers")]


def init(store: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return program("--store", str(store), "actor", "init", *arguments, OMP_NUM_THREADS="1")


def test_it_builds_and_runs_and_says_what_it_built(tmp_path: Path):
    done = init(tmp_path / "store", "--num-layers", "1", "--packing", "--backward", "--save", str(tmp_path / "saved"), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["ok"]
    expected = {"attn": "sdpa", "dtype": "fp32", "packing": True, "num_layers": 1, "backend": "plain", "zero_stage": 0}
    assert {name: answer["resolved"][name] for name in expected} == expected
    assert answer["resolved"]["parameters"] > 500_000
    assert answer["forward_s"] > 0 and answer["backward_s"] > 0 and answer["grad_norm"] > 0
    assert answer["peak_memory_bytes"] > 50_000_000
    assert [finding["id"] for finding in answer["known_failures"]] == ["vocabulary-folded"]
    assert "info[vocabulary-folded]" in done.stderr
    saved = tmp_path / "saved"
    assert list(tmp_path.iterdir()) == [saved] and answer["saved"] == str(saved), "it leaves nothing else"
    assert json.loads((saved / "config.json").read_text())["num_hidden_layers"] == 1
    again = init(tmp_path / "store", "--model", str(saved), "--save", str(saved), "--json")
    assert again.returncode == 3 and "is not an empty folder" in again.stderr
    built = json.loads(init(tmp_path / "store", "--model", str(saved), "--dtype", "fp32", "--json").stdout)
    assert built["resolved"]["parameters"] == answer["resolved"]["parameters"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--backend", "deepspeed", "--zero-stage", "1", "--deepcompile"), 3, "DeepCompile runs on CUDA only"),
        (("--num-layers", "9"), 2, "the model has 2 layers"),  # an error in the worker keeps its exit code
    ],
)
def test_what_is_known_to_fail_is_refused_here_or_in_the_worker(tmp_path: Path, arguments: tuple[str, ...], code: int, said: str):
    done = init(tmp_path / "store", *arguments)
    assert done.returncode == code and said in done.stderr
    assert code == 2 or not (tmp_path / "store").exists(), "nothing was started"


def test_what_the_model_raises_is_the_answer(tmp_path: Path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    done = init(tmp_path / "store", "--model", str(broken), "--json")
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert not answer["ok"]
    assert "OSError" in answer["error"]
    assert answer["signature"].startswith("OSError: ")
