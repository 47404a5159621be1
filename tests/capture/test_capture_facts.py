"""Facts: rank, role, and what is read of a real OpenRLHF Actor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from roots import ROOT

from actordbg.capture import facts
from actordbg.formats import ringfile
from actordbg.formats.dump_record import timestamp_of
from actordbg.formats.record_reading import parse_timestamp
from actordbg.formats.ringfile import host_name
from actordbg.store.layout import Store


def pretend_ray(monkeypatch: pytest.MonkeyPatch, task: str | None, actor: str | None = "a1") -> None:
    context = SimpleNamespace(
        get_actor_id=lambda: actor, get_task_name=lambda: "custom", get_task_function_name=lambda: task
    )  # fmt: skip
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)


@pytest.mark.parametrize(
    ("task", "role"),
    [
        ("openrlhf.trainer.ray.ppo_actor.PolicyModelActor.fit", "policy"),
        ("openrlhf.trainer.ray.launcher.ReferenceModelActor.forward", "reference"),
        ("openrlhf.trainer.ray.ppo_actor.ActorModelRayActor.forward", "policy"),
        ("openrlhf.trainer.ray.launcher.ReferenceModelRayActor.forward", "reference"),
        ("openrlhf.trainer.ray.launcher.RewardModelActor.forward", None),
        ("my.Trainer.policy", None),
        (None, None),
        ("", None),
    ],
)
def test_the_class_of_the_ray_actor_says_the_role(monkeypatch: pytest.MonkeyPatch, task: str | None, role: str | None):
    pretend_ray(monkeypatch, task)
    assert facts.role_from_ray() == role


def test_outside_of_a_ray_actor_ray_says_nothing(monkeypatch: pytest.MonkeyPatch):
    pretend_ray(monkeypatch, "openrlhf.PolicyModelActor.fit", actor=None)
    assert facts.role_from_ray() is None
    monkeypatch.delitem(sys.modules, "ray")
    assert facts.role_from_ray() is None


def test_torch_distributed_knows_the_rank_better_than_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import torch.distributed as dist

    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert facts.rank_of_process().rank == 7
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert facts.rank_of_process() == facts.Rank(0, 1, 3)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("value", ["", "x", "-1"])
def test_without_a_launcher_the_rank_is_zero(monkeypatch: pytest.MonkeyPatch, value: str):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, value)
    assert facts.rank_of_process() == facts.Rank(0, None, None)


def test_host_names_can_be_part_of_a_file_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ringfile.socket, "gethostname", lambda: "a/b c" * 50)
    assert host_name().startswith("a_b_c") and len(host_name()) == 64


def test_a_timestamp_has_the_microseconds_of_the_clock():
    now = time.time_ns()
    assert abs(parse_timestamp(timestamp_of(now)).timestamp() - now / 1e9) < 2e-6


def test_wrappers_are_seen_through():
    inner = torch.nn.Linear(1, 1)
    engine = torch.nn.Module()
    engine.module, engine.global_steps = inner, 3
    compiled = torch.nn.Module()
    compiled._orig_mod = engine
    assert facts.unwrap(compiled) is inner
    assert facts.unwrap(None) is None


OPENRLHF = """
import sys, json, hashlib, torch
from actordbg.trainers.openrlhf.cpu import install_cpu_support
from actordbg.actor.tiny import ensure_tiny
install_cpu_support()
import openrlhf.models.actor as module
from pathlib import Path
store, folder = sys.argv[1:3]
torch.set_num_threads(1)
actor = module.Actor(str(ensure_tiny(Path(folder))), attn_implementation="sdpa", param_dtype="fp32", packing_samples=True, temperature=0.7)
torch.manual_seed(0)
ids = torch.randint(0, 200, (2, 24))
attention = torch.ones(2, 24, dtype=torch.int64); attention[1, :9] = 0
action = torch.ones(2, 6, dtype=torch.int64)
def digest():
    actor.zero_grad()
    log_probs, output = actor(ids, action, attention_mask=attention, return_output=True, return_entropy=False)
    (-log_probs.mean() + output["logits"].square().mean()).backward()
    values = [log_probs.detach(), output["logits"].detach(), *[p.grad for p in actor.parameters()], torch.get_rng_state()]
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in values)).hexdigest()
plain = [digest() for _ in range(2)]
from actordbg.capture import hook
assert hook.install(module.Actor, store=store)
hooked = [digest() for _ in range(2)]
hook._slots[store].recorder.close()
print(json.dumps({"plain": plain, "hooked": hooked}))
"""


@pytest.mark.slow
def test_a_real_openrlhf_actor_is_recorded_and_cannot_tell(store: Store, tmp_path: Path):
    pytest.importorskip("openrlhf")
    from actordbg.capture.control import Control, write_control

    write_control(store, Control(True, "r", "2026-11-20T12:00:00.000000Z", free_floor_bytes=0, with_outputs=True))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", OPENRLHF, str(store.root), str(tmp_path / "models")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    digests = json.loads(done.stdout.splitlines()[-1])
    assert len({*digests["plain"], *digests["hooked"]}) == 1

    from actordbg.store import payload

    dumps = [payload.load(path) for path in store.iter_dumps()]
    assert len(dumps) == 2
    record = dumps[0].record
    assert (record.batch_size, record.seq_len, record.tokens, record.action_len) == (2, 24, 39, 6)
    assert (record.packing_samples, record.temperature, record.model_dtype) == (True, 0.7, "float32")
    assert (record.role, record.training, record.grad_enabled) == ("policy", True, True)
    assert record.model_name and record.model_name.startswith(str(tmp_path))
    known = {
        "model_type": "llama",
        "attn_implementation": "sdpa",
        "use_cache": False,
        "actor_class": "Actor",
        "lora": False,
    }
    assert known.items() <= record.actor.items()
    assert {"hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"} <= record.actor.keys()
    assert {"openrlhf", "torch", "transformers", "deepspeed"} <= record.versions.keys()
    assert dumps[0].outputs["action_log_probs"].shape == (2, 6)
