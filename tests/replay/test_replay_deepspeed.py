"""The deepspeed backend for real: OpenRLHF's DeepSpeed strategy, started by deepspeed's launcher, against a plain script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from roots import ROOT
from safetensors.torch import load_file

from actordbg.actor.tiny import TINY_VOCAB, ensure_tiny
from actordbg.catalog.query import results_for
from actordbg.dumps.importer import import_paths
from actordbg.records.journal import TENSORS
from actordbg.store import payload
from actordbg.store.layout import Store
from actordbg.trainers.captured_call import fold_ids

pytestmark = pytest.mark.slow

HOME = str(ROOT)
WHERE = "seq_len>1800 and rank=0"
TOLERANCE = 2e-5
"""Nats; fp32, sdpa, CPU, the same weights. ZeRO-3 gathers the very same parameters, so only the order of sums may differ."""

PLAIN_SCRIPT = """
# OpenRLHF's Actor called directly: no session, no launcher, no DeepSpeed engine.
import sys
from actordbg.trainers.openrlhf.cpu import install_cpu_support
install_cpu_support()
import torch
from openrlhf.models import Actor
model, inputs, outputs = sys.argv[1:]
actor = Actor(model, attn_implementation="sdpa", param_dtype="fp32", packing_samples=False).eval()
answers = []
for sequences, action_mask, attention_mask in torch.load(inputs, weights_only=True):
    with torch.no_grad():
        answers.append(actor(sequences, action_mask, attention_mask))
torch.save(answers, outputs)
"""


def run(command: list[str], timeout: float) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": HOME, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_zero_3_on_two_processes_gives_what_a_plain_script_gives(store: Store, shared_dumps: Path, tmp_path: Path) -> None:
    import_paths(store, sorted(shared_dumps.glob("actor_inputs_rank0_*.pkl"))[:24], run="real")
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), "replay", "--where", WHERE]
    command += ["--max-inputs", "3", "--backend", "deepspeed", "--zero-stage", "3", "--nproc", "2", "--launcher", "real"]
    answer = json.loads(run([*command, "--no-backward", "--no-packing", "--dtype", "fp32", "--keep-tensors", "--json"], 900))
    assert (answer["passed"], answer["status"]) == (3, "complete")
    assert (answer["resolved"]["zero_stage"], answer["resolved"]["world_size"]) == (3, 2)
    results = results_for(store, answer["replay_id"])
    assert len(results) == 3 and {record.worker for record in results} == {0, 1}

    dumps = {path.name.split(".safe")[0]: payload.load(path) for path in store.iter_dumps()}
    names = ("sequences", "action_mask", "attention_mask")
    inputs = [[dumps[record.dump_id].tensors[name] for name in names] for record in results]
    torch.save([[fold_ids(ids, TINY_VOCAB), *masks] for ids, *masks in inputs], tmp_path / "inputs.pt")
    script = tmp_path / "plain.py"
    script.write_text(PLAIN_SCRIPT)
    model = str(ensure_tiny(store.models))
    run([sys.executable, str(script), model, str(tmp_path / "inputs.pt"), str(tmp_path / "outputs.pt")], 600)
    for record, expected in zip(results, torch.load(tmp_path / "outputs.pt", weights_only=True), strict=True):
        kept = load_file(Path(answer["folder"]) / TENSORS / f"{record.dump_id}.safetensors")
        mask = kept["mask"].bool()
        assert mask.any() and record.logprob_count == int(mask.sum())
        assert float((kept["log_probs"] - expected)[mask].abs().max()) < TOLERANCE
