"""Replays made up for the comparison's tests: real folders with specifications, journals and kept tensors, without running a model."""

import json
from dataclasses import replace

import safetensors.torch
import torch
from replaycases import publish

from actordbg.actor.hub_model import versions_of
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.store_files import make_folder
from actordbg.records.journal import SPEC, SUPERVISOR, TENSORS, Journal, rank_journal
from actordbg.records.replay_record import ReplayInput, ReplaySpec, ResultRecord
from actordbg.store import payload

Tensors = dict[str, torch.Tensor]


def given(index, batch=2, length=12):
    """A dump that no file is needed for."""
    dump_id = f"20250619T0526{index % 60:02d}.{index:06d}Z-{index:06d}-4711-{index:08x}"
    return ReplayInput(dump_id, f"dumps/run/rank0000/{dump_id}.safetensors.zst", 0, batch, length, batch * length)


def tensors(index, batch=2):
    """Log-probs between -8 and 0, their mask (each row's last two tokens are padding), entropies; the same for one index."""
    generator = torch.Generator().manual_seed(index)
    log_probs = -8 * torch.rand(batch, 8, generator=generator)
    mask = torch.ones(batch, 8, dtype=torch.bool)
    mask[:, -2:] = False
    return {"log_probs": log_probs, "mask": mask, "entropy": torch.rand(batch, 8, generator=generator)}


def write_replay(
    store,
    replay_id,
    inputs,
    *,
    change=lambda index, made: made,
    result=lambda index: {},
    gradients=None,
    numel=None,
    resolved=None,
    status="complete",
    versions=None,
    command="",
    **config,
):
    """A finished replay of `inputs`, all passed with `tensors(i)`, unless `change` and `result` say otherwise for the i-th.

    `change` may give None: no tensors were kept. `gradients(i)` are kept too; `numel`: sizes of the whole where they are samples.
    """
    settings = ReplayConfig(**({"dtype": "fp32", "backward": gradients is not None} | config))
    ran = versions_of(settings.model) if versions is None else versions
    spec = ReplaySpec(
        replay_id, f"2025-06-19T05:{replay_id[-2:]}:00.000000Z", settings, tuple(inputs), command=command, versions=ran
    )
    folder = store.replays / replay_id
    make_folder(folder / TENSORS)
    (folder / SPEC).write_text(spec.to_json())
    known = {"model": settings.model, "dtype": settings.dtype, "attn": settings.attn or "sdpa",
             "packing": bool(settings.packing), "backend": settings.backend}  # fmt: skip
    supervisor = Journal(folder / SUPERVISOR)
    supervisor.append("resolved", resolved=known | {"num_layers": 2} | (resolved or {}))
    rank = Journal(rank_journal(folder, 0))
    for index, item in enumerate(inputs):
        kept = change(index, tensors(index, item.batch_size))
        if kept is not None:
            grads = gradients(index) if gradients else {}
            sizes = {name: {"numel": (numel or {}).get(name, tensor.numel())} for name, tensor in grads.items()}
            plain = {
                name: tensor.contiguous() for name, tensor in (kept | {f"grad/{name}": grads[name] for name in grads}).items()
            }
            data = safetensors.torch.save(plain, metadata={"gradients": json.dumps(sizes)})
            (folder / TENSORS / f"{item.dump_id}.safetensors").write_bytes(data)
        figures = {"status": "passed", "slot": index, "extra": {"temperature": 1.0}, "folded_ids": True}
        moment = f"2025-06-19T05:30:{index % 60:02d}.{index:06d}Z"
        record = ResultRecord(replay_id, item.dump_id, "passed", started_at=moment, finished_at=moment)
        rank.append("end", **replace(record, **(figures | result(index))).to_dict())
    rank.close()
    supervisor.append("finished", status=status, finished_at="2025-06-19T05:31:00.000000Z")
    supervisor.close()
    return replay_id


def write_truths(store, inputs, **more):
    """The replays "r-02" and "r-03": the truth in fp64 and in fp32."""
    for name, dtype in (("r-02", "fp64"), ("r-03", "fp32")):
        write_replay(store, name, inputs, truth=dtype, **more)


def publish_golden(store, count, outputs=True):
    """`count` dumps with the run's own log-probs and entropies, and the tensors of a replay that got the same."""
    inputs = publish(store, count, length=16, model_dtype="torch.float32", temperature=1.0)
    made = []
    for item in inputs:
        dump = payload.load(store.root / item.path)
        mask = dump.tensors["action_mask"].bool()
        log_probs, entropy = -torch.rand(mask.shape), torch.rand(item.batch_size, item.seq_len - 1)
        own = {"output.action_log_probs": log_probs, "output.entropy": entropy} if outputs else {}
        store.publish_dump(*payload.encode(dump.record, dump.tensors | own))
        made.append({"mask": mask, "log_probs": log_probs.clone(), "entropy": entropy[:, -mask.shape[1] :].clone()})
    return inputs, made
