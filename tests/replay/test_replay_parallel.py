"""Tensor parallelism from the command line: torchrun, lanes, kept gradients, and the comparison with the plain backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from stopcases import actordbg

from actordbg.catalog.query import results_for
from actordbg.judge.comparing import compare
from actordbg.store.layout import Store

pytestmark = pytest.mark.slow


def replay(store: Store, *options: str) -> dict[str, Any]:
    options = ("--backward", "--dtype", "fp32", "--keep-gradients", *options, "--quiet", "--json")
    done = actordbg(store, "replay", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_model_split_by_torchrun_gives_what_the_plain_actor_gives(store: Store) -> None:
    actordbg(store, "dump", "create", "--count", "3", "--batch-size", "2", "--seq-len", "48")
    plain = replay(store, "--packing")
    found = replay(store, "--packing", "--backend", "fsdp2", "--tp", "2")
    assert (found["passed"], found["restarts"]) == (3, 0)
    resolved = found["resolved"]
    assert (resolved["world_size"], resolved["mesh"], resolved["dist_backend"]) == (
        2,
        {"dp": 1, "sp": 1, "tp": 2},
        "gloo",
    )

    results = results_for(store, found["replay_id"])
    assert [record.worker for record in results] == [0, 0, 0]
    assert all(record.extra["lane"] == {"ranks": [0, 1], "differ": {}} for record in results)
    path = Path(found["folder"]) / "tensors" / f"{results[0].dump_id}.safetensors"
    with safe_open(path, framework="pt") as file:
        kept = json.loads(file.metadata()["gradients"])
        assert {f"grad/{name}" for name in kept} <= set(file.keys()) and "model.layers.1.mlp.up_proj.weight" in kept

    comparison = compare(store, found["replay_id"], plain["replay_id"])
    assert comparison.verdict == "match" and len(comparison.dumps) == 3
    for dump in comparison.dumps:
        assert not dump.not_compared
        assert dump.gradients is not None and (dump.gradients.cosine or 0) > 0.9999
        assert dump.grad_norm_rel is not None and dump.grad_norm_rel < 1e-3


def test_what_cannot_be_split_is_refused_with_the_rule_before_anything_starts(store: Store) -> None:
    actordbg(store, "dump", "create", "--count", "1", "--batch-size", "2", "--seq-len", "48")
    refused = actordbg(store, "replay", "--backend", "fsdp2", "--tp", "3")
    assert refused.returncode == 3 and "tiny has 4 and 2" in refused.stderr and "--tp 2" in refused.stderr
    assert not list(store.replays.glob("*"))
