"""Pictures: of log-probs and tokens, which are read without torch, damaged or not; and of a run over time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replaycases import publish
from safetensors.torch import save_file
from storecases import counters

from actordbg.judge.comparison_document import kept_rows, token_rows
from actordbg.judge.load_replays import calls_of, dropped_of
from actordbg.judge.replay_charts import run_timeline
from actordbg.judge.token_charts import TokenPair, tokens_chart
from actordbg.records.journal import TENSORS
from actordbg.store import payload
from actordbg.store.layout import Store


def kept(store: Store, **tensors: torch.Tensor) -> Path:
    folder = store.replays / "r1" / TENSORS
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "d1.safetensors")
    return folder / "d1.safetensors"


def test_kept_log_probs_are_read_and_gradients_beside_them_are_not(store: Store):
    values = torch.tensor([[-1.5, float("nan"), -0.25], [0.0, float("-inf"), -7.75]])
    mask = torch.tensor([[True, False, True], [True, True, False]])
    path = kept(store, **{"grad/a": torch.zeros(1000), "log_probs": values, "mask": mask})
    found = kept_rows(store, "r1", "d1")
    assert found is not None and np.array_equal(found[0], values, equal_nan=True) and np.array_equal(found[1], mask)
    whole = path.read_bytes()
    for cut in (0, 7, 20, -5):
        path.write_bytes(whole[:cut])
        assert kept_rows(store, "r1", "d1") is None
    assert kept_rows(store, "r1", "gone") is None


def test_a_dumps_tokens_are_those_that_torch_reads(store: Store):
    (one,) = publish(store.create(), 1)
    dump = payload.load(store.root / one.path)
    ids, real = token_rows(store, one.path)
    assert np.array_equal(ids, dump.tensors["sequences"]) and np.array_equal(real, dump.tensors["attention_mask"])
    assert token_rows(store, "dumps/run/rank0000/gone.safetensors.zst") == (None, None)


@pytest.mark.parametrize(
    ("ids", "real"), [([[1.0, 2.0]], None), ([1.0, 2.0, 3.0], None), ([[1.0, 2.0, 3.0, 4.0]], [[1.0, 1.0, 1.0]]), (None, [[1.0]])]
)
def test_a_dump_of_another_shape_by_now_leaves_the_picture_without_its_tokens(ids: Any, real: Any):
    given = [None if values is None else np.array(values) for values in (ids, real)]
    chart = tokens_chart(
        TokenPair("d", np.array([[-1.0, -2.0, -3.0]]), np.array([[-1.0, -2.0, -3.5]]), np.ones((1, 3), bool), *given, limit=9.0)
    )
    assert chart is not None and "3.5" in str(chart.table)
    assert "'w'" not in str(chart.specification) and "between turns" not in str(chart.specification)  # neither text nor turns
    assert "'domainMax': 9.0" in str(chart.specification), "what is allowed stays pale"


def test_dropped_calls_stand_at_their_rank_and_those_of_other_runs_do_not(store: Store):
    publish(store, 4)
    store.counters.joinpath("made-up").mkdir(parents=True)
    for name, told in {
        "a": counters("made-up", dropped={"queue": 3, "disk": 2}),
        "b": counters("made-up", dropped={"queue": 1}, pid=8),
        "c": counters("another", dropped={"queue": 50}),
    }.items():
        (store.counters / "made-up" / f"{name}.json").write_text(json.dumps(told))
    (store.counters / "made-up" / "d.json").write_text("{")
    dropped = dropped_of(store, "made-up")
    assert dropped == {0: 6}
    chart = run_timeline("made-up", calls_of(store, "made-up"), dropped)
    assert chart is not None and "6 calls dropped" in chart.says
    assert [row[0] for row in chart.table.rows] == ["rank 0, 6 dropped"]
    without = run_timeline("made-up", calls_of(store, "made-up"))
    assert without is not None and "dropped" not in without.says and without.table.rows[0][0] == "rank 0"
