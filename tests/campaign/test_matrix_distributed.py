"""Several processes, started as each backend's launcher would: every backend agrees with the truth, packed or not, in one matrix.

Where there is CUDA: flash attention's cells, nccl, ring_flash_attn. Those never run without a device.
"""

import importlib.util

import brokenactor
import pytest
import torch
from actorcases import ZERO3
from amounts import WHOLE
from commandline import invoke
from replaycases import publish

from actordbg.actor.signatures import known_failures
from actordbg.campaign import run_matrix as matrices
from actordbg.locate.verdict import verdict_of
from actordbg.records.comparison_record import ComparisonRecord
from actordbg.records.journal import read_events, read_results
from actordbg.store.layout import Store

pytestmark = pytest.mark.forked
PACKINGS = (False, True) if WHOLE else (True,)
RUNNING = (("deepspeed", 1), ("fsdp2", 1), ("fsdp2", 2)) if WHOLE else (("fsdp2", 2),)
"""The others are beside the plain Actor in `test_actor_parallel.py`, too, and FSDP2 is in a matrix below."""
USUAL = "--backward --attn sdpa --compile off --laws 1"
DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0


def matrix(store, typed, code=None):
    """What the command leaves in the store. code: how it has to end."""
    done = invoke(store, "matrix --quiet", *typed.split())
    assert done.exit_code in ((0, 1) if code is None else (code,)), f"{done.stdout[-4000:]}\n{done.stderr}"
    return matrices.load(store, "last")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("distributed") / "store").create()
    for first, length in enumerate((32, 64)):
        publish(store, 1, length=length, first=first, arguments={"return_output": True})
    return store


@pytest.fixture(scope="module")
def record(store):
    more = "--tp 1,2 --packing both" if WHOLE else "--tp 2 --packing on"
    given = (
        f"--backend deepspeed,fsdp2 --zero-stage {ZERO3['zero_stage']} {more} --nproc 2 --align same --dtype fp32 --timeout 900"
    )
    record = matrix(store, f"{given} {USUAL}", 0)
    assert record.good
    return record


def compared(store, cell):
    return ComparisonRecord.from_file(store.comparisons / f"{cell.comparison_id}.json")


def test_what_ran_agrees_with_the_truth_on_log_probs_and_gradients(store, record):
    cells = [cell for cell in record.cells if cell.status != "unavailable"]
    assert [(cell.settings["backend"], cell.settings["tp"], cell.settings["packing"]) for cell in cells] == [
        (backend, tp, packing) for backend, tp in RUNNING for packing in PACKINGS
    ]
    for cell in cells:
        assert (cell.status, cell.verdict, cell.counts) == ("passed", "match", {"passed": 2}), cell
        located = verdict_of(list(read_results(store.replays / str(cell.replay_id)).values()))
        assert located and located.word == "RIGHT" and located.looked_at > 50, (cell.name, located)  # as `check` judges
        for dump in compared(store, cell).dumps:
            assert dump.log_probs is not None and (dump.log_probs.max_abs or 0) < 1e-4, (cell.name, dump)
            assert dump.grad_norm_rel is not None and dump.grad_norm_rel < 1e-3, (cell.name, dump)
            assert dump.gradients is not None and (dump.gradients.cosine or 0) > 0.999999, (cell.name, dump)
        for rank in (0, 1):
            events = read_events(store.replays / str(cell.replay_id) / f"rank{rank}.jsonl")
            resolved = next(event["resolved"] for event in events if event["event"] == "ready")
            assert resolved["backend"] == cell.settings["backend"] and resolved["packing"] == cell.settings["packing"]
    refused = [cell for cell in record.cells if cell.status == "unavailable"]
    assert [(cell.settings["backend"], cell.settings["tp"]) for cell in refused] == [("deepspeed", 2)] * len(PACKINGS)
    assert all(cell.replay_id is None and "try: " in cell.reason for cell in refused)


def test_wrong_gradients_are_wrong_cells_and_packed_ones_share_a_load(store, tmp_path, monkeypatch):
    """Each rank has inputs of its own, so what fsdp2 gives is a mean over two of them. Log-probs and losses are right."""
    for name, value in brokenactor.environment(tmp_path / "broken", brokenactor.WRONG_GRADIENTS).items():
        monkeypatch.setenv(name, value)
    given = "--backend plain,fsdp2 --nproc 2 --packing both --backward --attn sdpa --compile off --no-laws --dtype bf16"
    cells = matrix(store, given, 1).cells
    assert [(cell.settings["backend"], cell.loads, cell.shared_with) for cell in cells] == [
        ("plain", 2, None), ("plain", 0, 0), ("fsdp2", 1, None), ("fsdp2", 0, 2)
    ]  # fmt: skip
    for cell in cells:
        flipped = "model.layers.0.self_attn.k_proj.weight" in cell.reason
        doubled = "2 times the truth's" in cell.reason
        assert flipped if cell.settings["backend"] == "plain" else doubled, cell
        record = compared(store, cell)
        assert record.verdict == "mismatch" and [one.said for one in record.unjudged] == [*record.left]
        assert all(dump.log_probs is not None and (dump.log_probs.max_abs or 0) < 0.1 for dump in record.dumps)


@pytest.mark.gpu
@pytest.mark.skipif(not DEVICES, reason="needs CUDA")
def test_all_eight_combinations_run_and_are_right_or_fail_in_a_known_way(store):
    """Without flash-attn its four are unavailable, and say so."""
    record = matrix(store, "")
    known, flash = known_failures(), importlib.util.find_spec("flash_attn") is not None
    assert len(record.cells) == 8
    for cell in record.cells:
        asked_for_flash = cell.settings["attn"] == "flash_attention_2"
        if asked_for_flash and not flash:
            assert cell.status == "unavailable", cell
        elif cell.status == "passed":
            assert cell.verdict == "match", cell
        else:
            assert cell.status == "failed" and asked_for_flash and cell.settings["compile"] and cell.signature in known, cell


@pytest.mark.gpu
@pytest.mark.skipif(not DEVICES, reason="needs CUDA")
def test_every_backend_over_nccl_agrees_with_the_truth(store):
    """On one GPU each group is one process: nccl takes one rank for each device."""
    ranks = min(DEVICES, 2)
    given = f"--backend plain,deepspeed,fsdp2 --zero-stage 0,3 --packing both --nproc {ranks} --dtype fp32"
    record = matrix(store, f"{given} {USUAL} --tp {'1,2 --align same' if ranks == 2 else 1}")
    ran = [cell for cell in record.cells if cell.status != "unavailable"]
    assert len(ran) >= (10 if ranks == 2 else 8) and all((cell.status, cell.verdict) == ("passed", "match") for cell in ran)


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICES < 2 or importlib.util.find_spec("ring_flash_attn") is None,
    reason="needs two CUDA devices and ring_flash_attn",
)
def test_a_ring_of_the_real_kernel_agrees_with_the_truth(store):
    given = "--backend deepspeed,fsdp2 --ring 2 --packing on --attn flash_attention_2 --compile off"
    record = matrix(store, f"{given} --dtype bf16 --backward --align same")
    assert [(cell.status, cell.verdict) for cell in record.cells] == [("passed", "match")] * 2
