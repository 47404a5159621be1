"""Which replay is the truth of another one, decided from files alone. What it computes is in test_truth_end_to_end.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from comparecases import given, write_replay

from actordbg.actor import weights_version
from actordbg.base.errors import StoreProblem, UsageError
from actordbg.judge.find_truth import ensure_truth, find_truth, wanted_truth
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store

MINE, TRUTH, THIRD, NEWEST = (f"20250619T050000-00000{number}" for number in (1, 2, 3, 4))
INPUTS = [given(0), given(1)]


def found(store: Store, name: str = MINE, dtype: str = "fp32") -> str | None:
    return find_truth(store, wanted_truth(store, load_spec(store, name), dtype))


def with_norm(index: int) -> dict[str, Any]:
    return {"grad_norm": 1.0 + index, "loss": 2.0}


def test_a_truth_that_covers_the_inputs_serves_every_configuration_of_them(store: Store) -> None:
    write_replay(store, MINE, INPUTS, dtype="bf16", packing=True)
    write_replay(store, THIRD, INPUTS[:1], dtype=None, compile=True, resolved={"dtype": "bf16"})
    assert found(store) is None
    write_replay(store, TRUTH, INPUTS, dtype="bf16", truth="fp32")
    assert found(store) == found(store, THIRD) == TRUTH == ensure_truth(store, MINE)


@pytest.mark.parametrize(
    "unlike",
    [
        {"dtype": "fp32"}, {"truth": "fp64"}, {"truth": "bf16"}, {"truth": None}, {"num_layers": 1}, {"model": "/other"},
        {"temperature": 0.5}, {"keep_tensors": False}, {"vary": "repad"},
    ],
)  # fmt: skip
def test_another_one_is_not_taken(store: Store, unlike: dict[str, Any]) -> None:
    write_replay(store, MINE, INPUTS, dtype="bf16")
    write_replay(store, TRUTH, INPUTS, **{"dtype": "bf16", "truth": "fp32"} | unlike)
    assert found(store) is None


def test_one_that_lacks_an_input_its_tensors_or_its_gradients_is_not_taken(store: Store) -> None:
    write_replay(store, MINE, INPUTS, result=with_norm)
    incomplete: list[dict[str, Any]] = [
        {"inputs": INPUTS[:1], "result": with_norm},
        {"change": lambda index, made: made if index else None, "result": with_norm},
        {},
    ]
    for number, lacking in enumerate(incomplete, 5):
        write_replay(store, f"20250619T050000-00000{number}", **({"inputs": INPUTS} | lacking), truth="fp32")
        assert found(store) is None
    write_replay(store, TRUTH, INPUTS, truth="fp32", result=with_norm)
    assert found(store) == TRUTH


def test_an_input_that_has_no_truth_is_not_asked_for_again(store: Store) -> None:
    write_replay(store, MINE, INPUTS)
    refused = {"status": "failed", "error": "no model predicts it"}
    write_replay(store, TRUTH, INPUTS, truth="fp32", result=lambda index: refused if index else {})
    assert found(store) == TRUTH
    write_replay(store, NEWEST, INPUTS, truth="fp32", result=lambda index: {"status": "crashed"})
    assert found(store) == TRUTH


def make_model(folder: Path, weights: bytes = b"a" * 64) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights)
    return str(folder)


@pytest.mark.parametrize("large", [False, True])
def test_a_model_that_was_changed_since_has_another_truth(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    """Also where its size and its time are those of before, as `rsync --times` leaves them."""
    if large:
        monkeypatch.setattr(weights_version, "WHOLE", 8)
        monkeypatch.setattr(weights_version, "PIECE", 4)
    model = make_model(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    before = weights.stat()
    write_replay(store, MINE, INPUTS, model=model)
    write_replay(store, TRUTH, INPUTS, model=model, truth="fp32")
    assert found(store) == TRUTH
    weights.write_bytes(b"b" * 64)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(StoreProblem, match="have changed since replay"):
        found(store)
    later = write_replay(store, THIRD, INPUTS, model=model)
    assert found(store, later) is None, "the truth of the weights of before is none of these"


@pytest.mark.parametrize("package", ["torch", "transformers", "actordbg"])
def test_after_an_upgrade_there_is_another_truth(store: Store, package: str) -> None:
    write_replay(store, MINE, INPUTS)
    now = weights_version.versions_of("tiny")
    write_replay(store, TRUTH, INPUTS, truth="fp32", versions=now | {package: "0.0.1"})
    assert found(store) is None
    write_replay(store, THIRD, INPUTS, truth="fp32", versions=now | {"deepspeed": "0.0.1"})
    assert found(store) == THIRD, "what the truth does not use does not decide"


def test_what_has_no_truth_says_so(store: Store) -> None:
    write_replay(store, TRUTH, INPUTS, truth="fp32")
    with pytest.raises(UsageError, match="is a truth itself"):
        found(store, TRUTH)
    with pytest.raises(StoreProblem):
        ensure_truth(store, "nothing")
    write_replay(store, MINE, INPUTS)
    (store.replays / MINE / "supervisor.jsonl").write_text("")
    with pytest.raises(StoreProblem, match="built no actor"):
        found(store)
