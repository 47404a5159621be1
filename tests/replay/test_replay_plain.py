"""The plain backend for real: OpenRLHF's Actor with the tiny model, real workers, real faults.

Nothing in the product is there for these tests: a fault is a signal that the test sends to a worker while it has the input.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from replaycases import publish
from safetensors.torch import load_file
from supervised import ctrl_c_after, spec_of

from actordbg.records.journal import TENSORS, read_events, read_results
from actordbg.records.replay_record import ReplayInput
from actordbg.replay.supervise import ReplayOutcome, load_spec, run_replay
from actordbg.store.layout import Store

pytestmark = pytest.mark.slow

COUNT, LENGTH = 26, 256


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, list[ReplayInput]]:
    store = Store(tmp_path_factory.mktemp("plain") / "store").create()
    return store, publish(store, COUNT, batch=2, length=LENGTH)


@pytest.fixture(scope="module")
def undisturbed(bench: tuple[Store, list[ReplayInput]]) -> ReplayOutcome:
    store, inputs = bench
    return run_replay(store, spec_of(inputs, backward=True, keep_tensors=True))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def test_every_input_passes_says_what_it_took_and_leaves_no_memory_behind(
    bench: tuple[Store, list[ReplayInput]], undisturbed: ReplayOutcome
) -> None:
    """One kept logits tensor would be 8 MiB for each input, 112 MiB between the two samples of the peaks."""
    assert undisturbed.all_passed and len(undisturbed.results) == COUNT
    assert undisturbed.resolved["model"] == "tiny" and undisturbed.resolved["attn"] == "sdpa"
    for record in undisturbed.results.values():
        assert record.forward_s and record.backward_s and record.load_s
        assert record.grad_norm and record.loss and record.logprob_mean
        assert record.loss == pytest.approx(-record.logprob_mean, rel=1e-5)
        assert record.logprob_count == 2 * (LENGTH // 2 - 3)
    tensors = load_file(undisturbed.folder / TENSORS / f"{bench[1][0].dump_id}.safetensors")
    assert tensors["log_probs"].shape == tensors["mask"].shape == (2, LENGTH // 2)
    mean = float(tensors["log_probs"][tensors["mask"].bool()].double().mean())
    ordered = [undisturbed.results[item.dump_id] for item in bench[1]]
    assert ordered[0].logprob_mean == pytest.approx(mean), "what is kept is what the figures are about"
    peaks = [record.peak_memory_bytes or 0 for record in ordered]
    early, late = statistics.median(peaks[2:12]), statistics.median(peaks[-10:])
    assert early > 0 and late - early < 64 * 2**20
    assert len(read_events(undisturbed.folder / "rank0.jsonl")) == 2 + 2 * COUNT + 1


def test_ctrl_c_and_resume_give_what_an_undisturbed_replay_gives(
    bench: tuple[Store, list[ReplayInput]], undisturbed: ReplayOutcome
) -> None:
    store, inputs = bench
    spec = spec_of(inputs, backward=True)

    with pytest.raises(KeyboardInterrupt):
        run_replay(store, spec, ctrl_c_after(inputs[0].dump_id))
    kept = read_results(store.replays / spec.replay_id)
    assert 0 < len(kept) < COUNT
    outcome = run_replay(store, load_spec(store, spec.replay_id))
    assert outcome.all_passed and outcome.results.items() >= kept.items()
    digests = {dump_id: record.output_digest for dump_id, record in undisturbed.results.items()}
    assert {dump_id: record.output_digest for dump_id, record in outcome.results.items()} == digests
