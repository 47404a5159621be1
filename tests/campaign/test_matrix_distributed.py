"""Two processes, started by each backend's real launcher: every backend agrees with the truth, packed or not, in one matrix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import brokenactor
import pytest
from replaycases import publish
from roots import ROOT

from actordbg.campaign import matrix_files as matrices
from actordbg.records.comparison_record import ComparisonRecord
from actordbg.records.journal import read_events
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.store.layout import Store

pytestmark = pytest.mark.slow
GIVEN = (
    "--backend", "deepspeed,fsdp2", "--zero-stage", "3", "--tp", "1,2", "--nproc", "2", "--packing", "both", "--align", "same",
    "--backward", "--dtype", "fp32", "--attn", "sdpa", "--compile", "off", "--timeout", "900",
)  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    store = Store(tmp_path_factory.mktemp("distributed") / "store").create()
    for first, length in enumerate((48, 96, 120)):
        publish(store, 1, length=length, first=first, arguments={"return_output": True})
    return store


@pytest.fixture(scope="module")
def record(store: Store) -> MatrixRecord:
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), "matrix", "--quiet", "--json", *GIVEN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr}"
    assert json.loads(done.stdout)["good"] is True
    return matrices.load(store, "last")


def ran(record: MatrixRecord) -> list[MatrixCell]:
    return [cell for cell in record.cells if cell.status != "unavailable"]


def test_what_ran_agrees_with_the_truth_on_log_probs_and_gradients(store: Store, record: MatrixRecord) -> None:
    seen = [(c.settings["backend"], c.settings["tp"], c.settings["packing"]) for c in ran(record)]
    assert seen == [
        (backend, tp, packing) for backend, tp in (("deepspeed", 1), ("fsdp2", 1), ("fsdp2", 2)) for packing in (False, True)
    ]
    for cell in ran(record):
        assert (cell.status, cell.verdict, cell.counts) == ("passed", "match", {"passed": 3}), cell
        path = store.comparisons / f"{cell.comparison_id}.json"
        for dump in ComparisonRecord.from_json(path.read_bytes()).dumps:
            assert dump.log_probs is not None and dump.log_probs.max_abs is not None
            assert dump.log_probs.max_abs < 1e-4, (cell.name, dump)
            assert dump.grad_norm_rel is not None and dump.grad_norm_rel < 1e-3, (cell.name, dump)
            assert dump.gradients is not None and dump.gradients.cosine is not None
            assert dump.gradients.cosine > 0.999999, (cell.name, dump)


def test_packed_and_not_packed_share_a_load_and_every_rank_ran_what_was_asked(store: Store, record: MatrixRecord) -> None:
    cells = ran(record)
    assert [cell.loads for cell in cells] == [1, 0, 1, 0, 1, 0]
    assert [cell.shared_with for cell in cells] == [x for c in cells[::2] for x in (None, c.index)]
    for cell in cells:
        for rank in (0, 1):
            events = read_events(store.replays / str(cell.replay_id) / f"rank{rank}.jsonl")
            resolved: dict[str, Any] = next(event["resolved"] for event in events if event["event"] == "ready")
            assert resolved["backend"] == cell.settings["backend"] and resolved["packing"] == cell.settings["packing"]


def test_a_combination_that_cannot_work_is_unavailable_with_its_rule(record: MatrixRecord) -> None:
    refused = [cell for cell in record.cells if cell.status == "unavailable"]
    assert [(cell.settings["backend"], cell.settings["tp"]) for cell in refused] == [("deepspeed", 2)] * 2
    assert all(cell.replay_id is None and "way out" in cell.reason for cell in refused)


def test_wrong_gradients_are_wrong_cells(store: Store, tmp_path: Path) -> None:
    """Each rank has inputs of its own, so what fsdp2 gives is a mean over two of them. Log-probs and losses are right."""
    broken = brokenactor.environment(tmp_path / "broken", brokenactor.WRONG_GRADIENTS)
    given = ("--backend", "plain,fsdp2", "--nproc", "2", "--packing", "off", "--backward", "--dtype", "bf16", "--attn", "sdpa", "--compile", "off")  # fmt: skip
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), "matrix", "--quiet", "--json", *given]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    broken["PYTHONPATH"] = f"{tmp_path / 'broken'}{os.pathsep}{ROOT}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment | broken)
    assert done.returncode == 1, f"{done.stdout[-4000:]}\n{done.stderr}"
    cells = matrices.load(store, "last").cells
    assert [cell.settings["backend"] for cell in cells] == ["plain", "fsdp2"]
    for cell in cells:
        flipped = "(model.layers.0.self_attn.k_proj.weight)" in cell.reason and "parameter_distance " in cell.reason
        assert flipped if cell.settings["backend"] == "plain" else "gradient_distance " in cell.reason, cell
        record = ComparisonRecord.from_json((store.comparisons / f"{cell.comparison_id}.json").read_bytes())
        assert record.verdict == "mismatch" and record.unjudged == ()
        assert all(dump.log_probs is not None and (dump.log_probs.max_abs or 0) < 0.1 for dump in record.dumps)
