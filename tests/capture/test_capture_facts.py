"""Facts: rank, role, what is read of a real OpenRLHF Actor, and the states of torch's generators around a call."""

import hashlib
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from capturekit import with_gpus
from deathcases import switch
from roots import FORKED, ROOT
from runkit import below_run, python

from actordbg.capture import facts
from actordbg.capture.facts import digests, states
from actordbg.formats import ringfile
from actordbg.store import payload


@pytest.mark.parametrize(
    "task, role, actor",
    [
        ("openrlhf.trainer.ray.ppo_actor.PolicyModelActor.fit", "policy", "a1"),
        ("openrlhf.trainer.ray.ppo_actor.ActorModelRayActor.forward", "policy", "a1"),
        ("openrlhf.trainer.ray.launcher.ReferenceModelRayActor.forward", "reference", "a1"),
        ("openrlhf.trainer.ray.launcher.RewardModelActor.forward", None, "a1"),
        ("my.Trainer.policy", None, "a1"),
        (None, None, "a1"),
        ("openrlhf.PolicyModelActor.fit", None, None),
    ],
)
def test_the_class_of_the_ray_actor_says_the_role(monkeypatch, task, role, actor):
    context = SimpleNamespace(
        get_actor_id=lambda: actor, get_task_name=lambda: "custom", get_task_function_name=lambda: task
    )  # fmt: skip
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: context)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert facts.role_from_ray() == role
    monkeypatch.delitem(sys.modules, "ray")
    assert facts.role_from_ray() is None


def test_torch_distributed_knows_the_rank_better_than_the_environment(monkeypatch, tmp_path):
    import torch.distributed as dist

    def told(rank, local_rank):
        for name, value in {"RANK": rank, "WORLD_SIZE": "", "LOCAL_RANK": local_rank}.items():
            monkeypatch.setenv(name, value)
        return tuple(facts.rank_of_process().values())

    assert [told("7", "3"), told("x", "-1"), told("", "")] == [(7, None, 3), (0, None, None), (0, None, None)]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        assert told("7", "3") == (0, 1, 3)
    finally:
        dist.destroy_process_group()


def test_host_names_can_be_part_of_a_file_name(monkeypatch):
    monkeypatch.setattr(ringfile.socket, "gethostname", lambda: "a/b c" * 50)
    assert ringfile.host_name().startswith("a_b_c") and len(ringfile.host_name()) == 64


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
from actordbg.actor.models import ensure_tiny
install_cpu_support()
import openrlhf.models.actor as module
from pathlib import Path
torch.set_num_threads(1)
actor = module.Actor(str(ensure_tiny(Path(sys.argv[1]))), attn_implementation="sdpa", param_dtype="fp32", packing_samples=True, temperature=0.7)
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
wrapped = module.Actor.forward
module.Actor.forward = wrapped.__actordbg_forward__
plain = [digest() for _ in range(2)]
module.Actor.forward = wrapped
hooked = [digest() for _ in range(2)]
from actordbg.capture import hook
next(iter(hook._slots.values())).recorder.close()
print(json.dumps({"plain": plain, "hooked": hooked}))
"""


@pytest.mark.forked
def test_a_real_openrlhf_actor_below_run_is_recorded_and_cannot_tell(store, tmp_path):
    pytest.importorskip("openrlhf")
    switch(store, with_outputs=True)
    environment = below_run(ROOT, FORKED, HF_HUB_OFFLINE="1", FORKED_PROGRAM="-c") | {"ACTORDBG_STORE": str(store.root)}
    digests = json.loads(python(OPENRLHF, environment, str(tmp_path / "models")).splitlines()[-1])
    assert len({*digests["plain"], *digests["hooked"]}) == 1
    dumps = [payload.load(path) for path in store.iter_dumps()]
    assert len(dumps) == 2
    record = dumps[0].record
    assert (record.batch_size, record.seq_len, record.tokens, record.action_len) == (2, 24, 39, 6)
    assert (record.packing_samples, record.temperature, record.model_dtype) == (True, 0.7, "float32")
    assert (record.role, record.training, record.grad_enabled) == ("policy", True, True)
    assert record.model_name and record.model_name.startswith(str(tmp_path))
    known = {"model_type": "llama", "attn_implementation": "sdpa", "use_cache": False, "actor_class": "Actor", "lora": False}
    assert known.items() <= record.actor.items()
    assert {"hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"} <= record.actor.keys()
    assert {"openrlhf", "torch", "transformers", "deepspeed"} <= record.versions.keys()
    assert dumps[0].outputs["action_log_probs"].shape == (2, 6)


class FakeGenerator:
    """A GPU's generator without a GPU: its state is its number. Guarantees: counts how often it is asked."""

    def __init__(self, number):
        self.number, self.asked = number, 0

    def get_state(self):
        self.asked += 1
        return torch.full((16,), self.number, dtype=torch.uint8)


@pytest.fixture
def gpus(monkeypatch):
    """A process that has initialized CUDA, with three GPUs, the second of them current."""
    generators = [FakeGenerator(number) for number in range(3)]
    with_gpus(monkeypatch, tuple(generators), 1)
    return generators


def test_the_cpu_state_is_torchs_its_digest_is_of_its_bytes_and_reading_it_draws_nothing():
    torch.manual_seed(5)
    before = states()
    kept = before["cpu"].clone()
    assert list(before) == ["cpu"] and torch.equal(kept, torch.get_rng_state()) and digests(states()) == digests(before)
    drawn = torch.rand(7)
    assert torch.equal(before["cpu"], kept) and digests(states()) != digests(before)
    torch.set_rng_state(kept)
    assert torch.equal(torch.rand(7), drawn)
    state = torch.arange(16, dtype=torch.uint8)
    assert digests({"cuda:0": state}) == {"cuda:0": hashlib.sha256(bytes(range(16))).hexdigest()}


def test_the_given_gpus_generator_is_read_else_the_current_ones_and_none_in_a_graph_capture_or_without_cuda(gpus, monkeypatch):
    assert list(states()) == list(states(torch.device("cpu"))) == ["cpu", "cuda:1"]
    given = states(torch.device("cuda", 2))
    assert list(given) == ["cpu", "cuda:2"] and int(given["cuda:2"][0]) == 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert list(states(torch.device("cuda", 0))) == ["cpu"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("it would initialize CUDA"))
    assert list(states(torch.device("cuda", 0))) == ["cpu"]
    assert [generator.asked for generator in gpus] == [0, 2, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_real_gpus_state_is_torchs_and_is_left_out_of_a_graph_capture():
    torch.cuda.init()  # `states` leaves a CUDA that nobody uses alone
    torch.cuda.manual_seed(3)
    before = states(torch.device("cuda", 0))["cuda:0"]
    assert before.device.type == "cpu" and torch.equal(before, torch.cuda.get_rng_state(0))
    drawn = torch.rand(7, device="cuda:0")
    assert digests(states()) != digests({"cuda:0": before})
    torch.cuda.set_rng_state(before, 0)
    assert torch.equal(torch.rand(7, device="cuda:0"), drawn)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert list(states()) == ["cpu"]
