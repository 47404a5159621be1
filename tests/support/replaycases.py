"""Small dumps for replay tests: published into a store like captured ones, with made-up tokens of a fixed seed."""

import pickle
from dataclasses import dataclass

import torch

from actordbg.formats.dump_record import DumpRecord, make_dump_id
from actordbg.records.replay_record import ReplayInput
from actordbg.store import payload


@dataclass(frozen=True)
class PlannedRow:
    """What planning needs of a dump."""

    dump_id: str
    path: str = ""
    rank: int = 0
    batch_size: int = 2
    seq_len: int = 8
    tokens: int = 16
    timestamp: str = "2025-06-19T05:26:08.430740Z"
    replayable: bool = True
    run: str = "made-up"
    source: str = "capture"
    role: str | None = None
    instance: str | None = None
    step: int | None = None
    call_index: int | None = 0
    grad_enabled: bool | None = None
    return_output: bool | None = None


def publish(store, count, batch=2, length=96, first=0, mask=torch.int64, **record):
    """`count` dumps of [batch, length] with left padding and an action mask over the second half; `first` is their number."""
    generator = torch.Generator().manual_seed(first)
    return [_publish(store, index, batch, length, generator, mask, record) for index in range(first, first + count)]


def _publish(store, index, batch, length, generator, mask, extra):
    sequences = torch.randint(0, 4000, (batch, length), generator=generator)
    attention = torch.ones(batch, length, dtype=mask)
    attention[0, : length // 4] = 0
    action = torch.ones(batch, length // 2, dtype=torch.bool)
    action[:, -3:] = False
    moment = f"2025-06-19T05:26:{index % 60:02d}.{index:06d}Z"
    record = DumpRecord(
        dump_id=make_dump_id(moment, index, 1, f"{index:08x}"),
        run="made-up",
        rank=0,
        timestamp=moment,
        batch_size=batch,
        seq_len=length,
        tokens=int(attention.sum()),
        action_len=length // 2,
        **extra,
    )
    tensors = {"sequences": sequences, "attention_mask": attention, "action_mask": action}
    finished, blob = payload.encode(record, tensors)
    path = store.relative(store.publish_dump(finished, blob))
    return ReplayInput(record.dump_id, path, 0, batch, length, record.tokens)


def old_pickle(folder, rank=0, stamp="20250619_052608_430740", name=""):
    """Write one file as the old recorder did, into `folder`."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[:, :3] = 0
    content = {
        "sequences": torch.randint(0, 128_256, (2, 12)),
        "action_mask": torch.ones(2, 5, dtype=torch.bool),
        "attention_mask": mask,
        "return_output": True,
        "allgather_logits": False,
        "return_logprobs": False,
        "packed_seq_lens": None,
        "return_entropy": False,
        "timestamp": stamp,
        "rank": rank,
        "batch_size": 2,
        "seq_len": 12,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (name or f"actor_inputs_rank{rank}_{stamp}.pkl")
    path.write_bytes(pickle.dumps(content))
    return path
