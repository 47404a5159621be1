"""The plain backend for real: OpenRLHF's Actor with the tiny model, and a real worker."""

import statistics

import pytest
from replaycases import publish
from safetensors.torch import load_file
from supervised import spec_of

from actordbg.records.journal import TENSORS, read_events
from actordbg.replay.supervise import run_replay

pytestmark = pytest.mark.forked

COUNT, LENGTH = 26, 256


def test_every_input_passes_says_what_it_took_and_leaves_no_memory_behind(store, monkeypatch):
    """One kept logits tensor would be 8 MiB for each input, 112 MiB between the two samples of the peaks."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    inputs = publish(store, COUNT, length=LENGTH)
    undisturbed = run_replay(store, spec_of(inputs, backward=True, keep_tensors=True))
    assert undisturbed.all_passed and len(undisturbed.results) == COUNT
    assert undisturbed.resolved["model"] == "tiny" and undisturbed.resolved["attn"] == "sdpa"
    for record in undisturbed.results.values():
        assert record.forward_s and record.backward_s and record.load_s
        assert record.grad_norm and record.loss and record.logprob_mean
        assert record.loss == pytest.approx(-record.logprob_mean, rel=1e-5)
        assert record.logprob_count == 2 * (LENGTH // 2 - 3)
    tensors = load_file(undisturbed.folder / TENSORS / f"{inputs[0].dump_id}.safetensors")
    assert tensors["log_probs"].shape == tensors["mask"].shape == (2, LENGTH // 2)
    mean = float(tensors["log_probs"][tensors["mask"].bool()].double().mean())
    ordered = [undisturbed.results[item.dump_id] for item in inputs]
    assert ordered[0].logprob_mean == pytest.approx(mean), "what is kept is what the figures are about"
    peaks = [record.peak_memory_bytes or 0 for record in ordered]
    early, late = statistics.median(peaks[2:12]), statistics.median(peaks[-10:])
    assert early > 0 and late - early < 64 * 2**20
    assert len(read_events(undisturbed.folder / "rank0.jsonl")) == 2 + 2 * COUNT + 1
