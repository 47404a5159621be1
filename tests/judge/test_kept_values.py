"""Log-probs and tokens read without torch are what torch reads; what is damaged gives no picture and no error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from replaycases import publish
from safetensors.torch import save_file

from actordbg.judge.comparison_document import kept_rows, token_rows
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
    kept(store, **{"grad/a": torch.zeros(1000), "log_probs": values, "mask": mask})
    found = kept_rows(store, "r1", "d1")
    assert found is not None and found[1] == mask.tolist()
    torch.testing.assert_close(torch.tensor(found[0]), values, equal_nan=True)


@pytest.mark.parametrize("cut", [0, 7, 20, -5])
def test_what_is_cut_or_gone_is_none(store: Store, cut: int):
    path = kept(store, log_probs=torch.zeros(2, 3), mask=torch.ones(2, 3, dtype=torch.bool))
    path.write_bytes(path.read_bytes()[:cut])
    assert kept_rows(store, "r1", "d1") is None
    assert kept_rows(store, "r1", "gone") is None
    assert token_rows(store, "dumps/run/rank0000/gone.safetensors.zst") == (None, None)


def test_a_dumps_tokens_are_those_that_torch_reads(store: Store):
    (one,) = publish(store.create(), 1)
    dump = payload.load(store.root / one.path)
    ids, real = token_rows(store, one.path)
    assert ids == dump.tensors["sequences"].tolist() and real == dump.tensors["attention_mask"].tolist()


@pytest.mark.parametrize(
    ("ids", "real"), [([[1.0, 2.0]], None), ([1.0, 2.0, 3.0], None), ([[1.0, 2.0, 3.0, 4.0]], [[1.0, 1.0, 1.0]]), (None, [[1.0]])]
)
def test_a_dump_of_another_shape_by_now_leaves_the_picture_without_its_tokens(ids: Any, real: Any):
    values = [[-1.0, -2.0, -3.0]]
    chart = tokens_chart(TokenPair("d", values, [[-1.0, -2.0, -3.5]], [[1.0, 1.0, 1.0]], ids, real))
    assert chart is not None and "3.5" in str(chart.table)
