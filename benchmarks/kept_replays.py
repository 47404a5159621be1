"""Two finished replays of the same dumps with kept tensors, without running a model: what comparisons are measured on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch

from actordbg.config.replay_config import ReplayConfig
from actordbg.dumps.create import create_dumps
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import make_folder
from actordbg.records.journal import SPEC, SUPERVISOR, TENSORS, Journal, rank_journal
from actordbg.records.replay_record import ReplayInput, ReplaySpec, ResultRecord
from actordbg.store.layout import Store
from actordbg.store.places import dump_id_of

NAMES = ("20250101T000000-aaaaaa", "20250101T000001-bbbbbb")


def two_replays(root: Path, dumps: int, shape: tuple[int, int], gradients: int = 0) -> tuple[str, str]:
    """Their ids, in a new store: B's log-probs [B, A] = `shape` and its gradients are others by about 1e-3.

    gradients: parameters of 4,096 elements.
    """
    store, (batch, actions) = Store(root), shape
    paths = create_dumps(store, dumps, batch_size=batch, seq_len=2 * actions)
    inputs = [
        ReplayInput(dump_id_of(str(path)), str(path.relative_to(store.root)), 0, batch, 2 * actions, batch * 2 * actions)
        for path in paths
    ]
    for number, name in enumerate(NAMES):
        _keep(store, name, inputs, shape, 1e-3 * number, gradients)
    return NAMES


def _keep(store: Store, name: str, inputs: Sequence[ReplayInput], shape: tuple[int, int], noise: float, gradients: int) -> None:
    """A finished replay with kept tensors; with `noise` other values by about that much."""
    folder = store.replays / name
    make_folder(folder / TENSORS)
    config = ReplayConfig(dtype="fp32", backward=gradients > 0)
    (folder / SPEC).write_text(ReplaySpec(name, now_timestamp(), config, tuple(inputs)).to_json())
    resolved = {"model": "tiny", "dtype": "fp32", "attn": "sdpa", "packing": False, "backend": "plain", "num_layers": 2}
    supervisor, worker = Journal(folder / SUPERVISOR), Journal(rank_journal(folder, 0))
    supervisor.append("resolved", resolved=resolved)
    for index, one in enumerate(inputs):
        safetensors.torch.save_file(_tensors(index, shape, noise, gradients), folder / TENSORS / f"{one.dump_id}.safetensors")
        moment = now_timestamp()
        record = ResultRecord(name, one.dump_id, "passed", started_at=moment, finished_at=moment)
        worker.append("end", **record.to_dict())
    supervisor.append("finished", status="complete", finished_at=now_timestamp())


def _tensors(index: int, shape: tuple[int, int], noise: float, gradients: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    log_probs = -8 * torch.rand(shape, generator=generator)
    made = {
        f"grad/layer.{number}": torch.randn(4096, generator=generator) + noise * torch.randn(4096, generator=generator)
        for number in range(gradients)
    }
    moved = {"log_probs": log_probs + noise * torch.randn(shape, generator=generator), "entropy": -log_probs}
    return made | moved | {"mask": torch.ones(shape, dtype=torch.bool)}
