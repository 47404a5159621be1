"""The lab: a matrix with one load for all its cells against a replay for each, and comparing against the obvious script.

* **matrix**: `actordbg matrix` over sdpa and eager x packed and not (four cells, two inputs of 2 x 128, tiny model, fp32,
  forward only, `--no-truth`) against `actordbg replay` once for each of the four, as a shell script would. Both end to end, one
  thread, in turn, medians of three.
* **compare**: `numerics.compare` over 200 dumps of [4, 1,024] log-probs and entropies (two replays' kept tensors) against
  reading the same files with safetensors and computing maximum, mean, two percentiles, relative differences and the cosine
  with numpy. In one process, one thread, in turn, medians of five. Ours also finds the worst tokens, both KL estimates, the
  clip share, units of last place and the sums of rows, and judges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy

from actordbg.compare.comparing import compare
from actordbg.records.journal import TENSORS
from actordbg.store.layout import Store
from benchmarks.kept_replays import two_replays
from benchmarks.rows import Row, interleaved, one_thread

CELLS = [[f"--attn={attn}", f"--{packing}"] for attn in ("sdpa", "eager") for packing in ("no-packing", "packing")]
DUMPS, SHAPE = 200, (4, 1024)


def run() -> list[Row]:
    """Both comparisons."""
    return [_matrix(), _compare()]


def _matrix() -> Row:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        sizes = ["--batch-size", "2", "--seq-len", "128", "--count", "2"]
        _actordbg(store, "dump", "create", *sizes)
        common = ["--dtype", "fp32", "--no-backward", "--quiet"]
        replays = [["replay", *cell, *common] for cell in CELLS]
        matrix = ["matrix", "--attn", "sdpa,eager", "--packing", "off,on", "--compile", "off", "--no-truth", *common]
        _actordbg(store, *replays[0])  # builds the tiny model
        ours, theirs = interleaved(lambda: _actordbg(store, *matrix), lambda: [_actordbg(store, *one) for one in replays], 3)
    note = f"{len(CELLS)} cells x 2 inputs of 2 x 128, tiny, fp32, forward, one thread; end to end"
    return Row(
        "matrix / a replay for each cell",
        ours,
        theirs,
        "s",
        ratio=ours / theirs,
        budget="<= 0.5",
        note=note,
        within=ours / theirs <= 0.5,
    )


def _compare() -> Row:
    with one_thread():
        with tempfile.TemporaryDirectory() as folder:
            store = Store(Path(folder) / "store")
            a, b = two_replays(store.root, DUMPS, SHAPE)
            ours, theirs = interleaved(lambda: compare(store, a, b), lambda: _by_hand(store, a, b), 5)
    note = f"{DUMPS} dumps of {list(SHAPE)} float32 log-probs and entropies, one thread"
    return Row("compare / a short numpy script", ours, theirs, "s", ratio=ours / theirs, note=note, within=None)


def _actordbg(store: str, *arguments: str) -> None:
    home = str(Path(__file__).parents[1])
    paths = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH", "")) if part)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "actordbg", "--store", store, *arguments]
    subprocess.run(command, env=environment, check=True, capture_output=True)


def _by_hand(store: Store, a: str, b: str) -> str:
    found = []
    for path in sorted((store.replays / a / TENSORS).iterdir()):
        ours, theirs = (safetensors.numpy.load_file(store.replays / name / TENSORS / path.name) for name in (a, b))
        figures = {}
        for what in ("log_probs", "entropy"):
            x, y = (one[what][ours["mask"]].astype(np.float64) for one in (ours, theirs))
            apart = np.abs(x - y)
            relative = apart / np.abs(y)
            figures[what] = {
                "max": float(apart.max()),
                "mean": float(apart.mean()),
                "percentiles": np.percentile(apart, [95, 99]).tolist(),
                "relative": [float(relative.max()), *np.percentile(relative, [95, 99]).tolist()],
                "cosine": float(x @ y / np.sqrt((x @ x) * (y @ y))),
            }
        found.append({"dump": path.stem} | figures)
    return json.dumps(found)
