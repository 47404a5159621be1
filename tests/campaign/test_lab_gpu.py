"""What the lab does for real where there is CUDA: flash attention's cells, nccl, ring_flash_attn. Never run without a device."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from replaycases import publish
from roots import ROOT

from actordbg.actor.signatures import known_failures
from actordbg.campaign import matrix_files as matrices
from actordbg.records.matrix_record import MatrixRecord
from actordbg.store.layout import Store

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0


def matrix(store: Store, *given: str) -> MatrixRecord:
    for first, length in enumerate((96, 256, 512)):
        publish(store, 1, length=length, first=first, arguments={"return_output": True})
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), "matrix", "--quiet", *given]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=environment)
    assert done.returncode in (0, 1), done.stderr
    return matrices.load(store, "last")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not DEVICES, reason="needs CUDA")
def test_all_eight_combinations_run_and_are_right_or_fail_in_a_known_way(store: Store) -> None:
    """Without flash-attn its four are unavailable, and say so."""
    record = matrix(store)
    known, flash = {*known_failures()}, importlib.util.find_spec("flash_attn") is not None
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
@pytest.mark.slow
@pytest.mark.skipif(not DEVICES, reason="needs CUDA")
def test_every_backend_over_nccl_agrees_with_the_truth(store: Store) -> None:
    """On one GPU each group is one process: nccl takes one rank for each device."""
    ranks = min(DEVICES, 2)
    given = (
        "--backend",
        "plain,deepspeed,fsdp2",
        "--zero-stage",
        "0,3",
        "--tp",
        "1,2" if ranks == 2 else "1",
        "--nproc",
        str(ranks),
    )
    aligned = ("--align", "same") if ranks == 2 else ()
    record = matrix(
        store, *given, *aligned, "--backward", "--dtype", "fp32", "--attn", "sdpa", "--compile", "off", "--packing", "both"
    )
    ran = [cell for cell in record.cells if cell.status != "unavailable"]
    assert len(ran) >= (10 if ranks == 2 else 8) and all((cell.status, cell.verdict) == ("passed", "match") for cell in ran)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(
    DEVICES < 2 or importlib.util.find_spec("ring_flash_attn") is None,
    reason="needs two CUDA devices and ring_flash_attn",
)
def test_a_ring_of_the_real_kernel_agrees_with_the_truth(store: Store) -> None:
    given = ("--backend", "deepspeed,fsdp2", "--ring", "2", "--packing", "on", "--attn", "flash_attention_2")
    record = matrix(store, *given, "--compile", "off", "--dtype", "bf16", "--backward", "--align", "same")
    assert [(cell.status, cell.verdict) for cell in record.cells] == [("passed", "match")] * 2
