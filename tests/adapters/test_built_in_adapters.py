"""What our adapters read of calls as their trainers make them. The trainers are not installed here; the log has real trainings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actordbg.adapters.seam import Rows, Unreadable
from actordbg.adapters.skyrl_adapter import SkyRl
from actordbg.adapters.trl_adapter import Trl

IDS = torch.tensor([[0, 0, 5, 9, 11, 2], [7, 3, 8, 4, 1, 6]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
MODEL = torch.nn.Module()
LABELS = torch.tensor([[-100, -100, -100, -100, 11, 2], [-100, -100, 8, 4, 1, -100]])
FUSED = {"self": MODEL, "fused_lm_head": True, "input_ids": IDS, "attention_mask": MASK, "labels": LABELS, "temperature": 0.7}
SKYRL = {"self": SimpleNamespace(model=MODEL), "sequences": IDS, "num_actions": 2, "attention_mask": MASK, "temperature": 0.7}
SKYRL |= {"compute_entropy": True, "pixel_values": None}


def read(seam: Any, call: dict[str, Any]) -> Rows:
    rows = seam.rows(call)
    assert rows.model is MODEL and rows.sequences is IDS and rows.attention_mask is MASK
    assert rows.temperature == 0.7 and rows.entropy
    return rows


def test_trl_completions_count_where_they_are_real() -> None:
    trainer = SimpleNamespace(temperature=0.7, state=SimpleNamespace(global_step=5))
    given = {
        "self": trainer,
        "model": MODEL,
        "input_ids": IDS,
        "attention_mask": MASK,
        "logits_to_keep": 2,
        "compute_entropy": True,
    }
    for seam in Trl.seams[:2]:
        rows = read(seam, given | {"pixel_values": IDS, "image_sizes": None})
        assert rows.action_mask is not None and rows.action_mask.tolist() == [[1, 1], [1, 0]]
        assert rows.step == 5 and list(rows.more) == ["pixel_values"]
        assert seam.result((1, 2, 3)).entropy == 2


def test_trl_labels_count_for_the_token_before_them_and_packed_rows_are_not_read() -> None:
    seam = Trl.seams[2]
    call = FUSED | {"outputs": ("log_probs", "entropy")}
    rows = read(seam, call)
    assert rows.action_mask is not None
    assert rows.action_mask.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 0]]
    assert seam.rows(call | {"fused_lm_head": False}) is None
    for without in ({"attention_mask": None}, {"labels": None}, {"position_ids": IDS}):
        with pytest.raises(Unreadable, match="packed"):
            seam.rows(call | without)


def test_skyrl_entropies_are_those_of_the_actions() -> None:
    (seam,) = SkyRl.seams
    for actions in (2, [2]):
        rows = read(seam, SKYRL | {"num_actions": actions})
        assert rows.action_mask is not None and rows.action_mask.tolist() == [[1, 1], [1, 0]]
    log_probs = torch.zeros(2, 2)
    found = seam.result((log_probs, {"entropy": torch.arange(12).view(2, 6)}))
    assert found.log_probs is log_probs and found.entropy is not None and found.entropy.tolist() == [[3, 4], [9, 10]]
    assert seam.result(log_probs).log_probs is log_probs and seam.result((log_probs, {})).entropy is None
    for unread in ({"num_actions": [2, 1]}, {"pixel_values": IDS}):
        with pytest.raises(Unreadable):
            seam.rows(SKYRL | unread)
