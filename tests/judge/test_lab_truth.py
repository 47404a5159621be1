"""Which replay is the truth of another one, decided from files alone. What it computes is in test_truth_end_to_end.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from comparecases import Tensors, given, write_replay
from typer.testing import CliRunner

from actordbg.actor import hub_model
from actordbg.base.errors import StoreProblem, UsageError
from actordbg.cli.app import app
from actordbg.judge.find_truth import ensure_truth, find_truth, wanted_truth
from actordbg.records.journal import SPEC
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store

MINE, TRUTH = "20250619T050000-000001", "20250619T050000-000002"
INPUTS = [given(0), given(1)]


def found(store: Store, name: str = MINE, dtype: str = "fp32") -> str | None:
    return find_truth(store, wanted_truth(store, load_spec(store, name), dtype))


def with_norm(index: int) -> dict[str, Any]:
    return {"grad_norm": 1.0 + index, "loss": 2.0}


def test_a_truth_that_covers_the_inputs_serves_every_configuration_of_them(store: Store) -> None:
    write_replay(store, MINE, INPUTS, dtype="bf16", packing=True)
    write_replay(store, "20250619T050000-000003", INPUTS[:1], dtype=None, compile=True, resolved={"dtype": "bf16"})
    assert found(store) is None
    write_replay(store, TRUTH, INPUTS, dtype="bf16", truth="fp32")
    assert found(store) == found(store, "20250619T050000-000003") == TRUTH == ensure_truth(store, MINE)


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


def test_one_that_lacks_an_input_or_its_tensors_is_not_taken(store: Store) -> None:
    write_replay(store, MINE, INPUTS)
    write_replay(store, TRUTH, INPUTS[:1], truth="fp32")
    assert found(store) is None
    write_replay(store, "20250619T050000-000003", INPUTS, truth="fp32", change=lambda index, made: made if index else None)
    assert found(store) is None


def test_an_input_that_has_no_truth_is_not_asked_for_again(store: Store) -> None:
    write_replay(store, MINE, INPUTS)
    refused = {"status": "failed", "error": "no model predicts it"}
    write_replay(store, TRUTH, INPUTS, truth="fp32", result=lambda index: refused if index else {})
    assert found(store) == TRUTH
    write_replay(store, TRUTH[:-1] + "4", INPUTS, truth="fp32", result=lambda index: {"status": "crashed"})
    assert found(store) == TRUTH


def test_gradients_are_wanted_where_the_replay_has_them(store: Store) -> None:
    write_replay(store, MINE, INPUTS, result=with_norm)
    write_replay(store, TRUTH, INPUTS, truth="fp32")
    assert found(store) is None
    write_replay(store, "20250619T050000-000003", INPUTS, truth="fp32", result=with_norm)
    assert found(store) == "20250619T050000-000003"


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
        monkeypatch.setattr(hub_model, "WHOLE", 8)
        monkeypatch.setattr(hub_model, "PIECE", 4)
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
    later = write_replay(store, "20250619T050000-000003", INPUTS, model=model)
    assert found(store, later) is None, "the truth of the weights of before is none of these"


def test_a_link_to_another_model_has_another_truth(store: Store, tmp_path: Path) -> None:
    link = tmp_path / "model"
    link.symlink_to(make_model(tmp_path / "step-1"))
    write_replay(store, TRUTH, INPUTS, model=str(link), truth="fp32")
    assert found(store, write_replay(store, MINE, INPUTS, model=str(link))) == TRUTH
    link.unlink()
    link.symlink_to(make_model(tmp_path / "step-2", b"b" * 64))
    assert found(store, write_replay(store, "20250619T050000-000003", INPUTS, model=str(link))) is None


@pytest.mark.parametrize("package", ["torch", "transformers", "actordbg"])
def test_after_an_upgrade_there_is_another_truth(store: Store, package: str) -> None:
    write_replay(store, MINE, INPUTS)
    now = hub_model.versions_of("tiny")
    write_replay(store, TRUTH, INPUTS, truth="fp32", versions=now | {package: "0.0.1"})
    assert found(store) is None
    write_replay(store, "20250619T050000-000003", INPUTS, truth="fp32", versions=now | {"deepspeed": "0.0.1"})
    assert found(store) == "20250619T050000-000003", "what the truth does not use does not decide"


@pytest.mark.parametrize("stale", [{"transformers": "5.14.0"}, {hub_model.WEIGHTS: "feedfacefeedface"}])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_agreeing_with_a_stale_truth_is_no_agreement(store: Store, dtype: str, stale: dict[str, str]) -> None:
    """A fault that was in the libraries or the weights is in the truth of then too. That one is newer than the right one here."""

    def faulty(index: int, made: Tensors) -> Tensors:
        return made | {"log_probs": made["log_probs"] + 1.0}

    def judged() -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["--store", str(store.root), "compare", MINE, "truth", "--json"])
        found = json.loads(result.stdout)
        return result.exit_code, found["verdict"], found["b"]["replay_id"]

    now = hub_model.versions_of("tiny")
    write_replay(store, MINE, INPUTS, dtype=dtype, change=faulty)
    for name, settings in ((TRUTH, {"truth": "fp32"}), (TRUTH[:-1] + "3", {"truth": dtype} if dtype == "bf16" else {})):
        write_replay(store, name, INPUTS, dtype=dtype, **settings)
    newest = TRUTH[:-1] + "4"
    write_replay(store, newest, INPUTS, dtype=dtype, truth="fp32", change=faulty, versions=now | stale)
    assert judged() == (1, "mismatch", TRUTH)
    spec = store.replays / newest / SPEC
    spec.write_text(spec.read_text().replace(json.dumps(stale)[1:-1], json.dumps({k: now.get(k) for k in stale})[1:-1]))
    if None not in [now.get(name) for name in stale]:
        assert judged() == (0, "match", newest), "were it not stale, it would be taken and agreed with"


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
