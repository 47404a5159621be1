"""The embedded tiny model: deterministic, openable, not degenerate; built once however many ask."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

from actordbg.actor.models import TINY_VOCAB, TinyShape, build_tiny, ensure_tiny


def _bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path):
    first = _bytes(build_tiny(tmp_path / "a", TinyShape(vocab_size=300, seed=7)))
    assert set(first) == {"config.json", "model.safetensors"}
    assert _bytes(build_tiny(tmp_path / "b", TinyShape(vocab_size=300, seed=7))) == first
    assert _bytes(build_tiny(tmp_path / "c", TinyShape(vocab_size=300, seed=8))) != first


@pytest.mark.slow
def test_transformers_opens_it_with_every_weight_in_place_and_its_predictions_depend_on_the_context(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(build_tiny(tmp_path), dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    for parameter in model.parameters():
        assert torch.equal(parameter, parameter.bfloat16().float()), "an fp32 load must hold the bf16 weights, exactly"
    ids = torch.randint(0, TINY_VOCAB, (1, 32), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 0] = (ids[0, 0] + 1) % TINY_VOCAB
    with torch.no_grad():
        logits, moved = model(ids).logits, model(other).logits
    assert logits.std() > 1
    assert (logits[0, 8] - moved[0, 8]).abs().max() > 0.1, "a token seen through attention alone must show"


def test_many_processes_that_ask_at_once_get_one_whole_model(tmp_path: Path):
    context = multiprocessing.get_context("forkserver")  # forking this process could deadlock in torch's thread pool
    context.set_forkserver_preload(["actordbg.actor.models", "safetensors.torch"])
    asking = [context.Process(target=ensure_tiny, args=(tmp_path,)) for _ in range(6)]
    for process in asking:
        process.start()
    for process in asking:
        process.join(60)
    assert [process.exitcode for process in asking] == [0] * 6
    assert [path.name for path in tmp_path.iterdir()] == [TinyShape().cache_name()], "one model, and nobody's leavings"
    before = (path := ensure_tiny(tmp_path)).stat().st_mtime_ns
    assert _bytes(path) == _bytes(build_tiny(tmp_path / "again")) and ensure_tiny(tmp_path, TinyShape(layers=1)) != path
    assert ensure_tiny(tmp_path) == path and path.stat().st_mtime_ns == before


def test_a_build_that_was_killed_half_way_is_not_taken_for_a_model(tmp_path: Path):
    (tmp_path / ".tiny-dead").mkdir()
    (tmp_path / ".tiny-dead" / "config.json").write_text("{")
    assert json.loads((ensure_tiny(tmp_path) / "config.json").read_text())["model_type"] == "llama"
