"""A patched file, the real hook, a process that knows nothing of actordbg: the calls arrive in the store. And many at once."""

import importlib
import os
import subprocess
import sys
import time

import pytest
import torch
from adaptercases import dumps_of, record_here
from commandline import invoke
from patchkit import ACTOR as PLAIN, OLD, facts_of, written
from roots import FORKED, ROOT, json_of
from runkit import python

from actordbg.actor.session import ActorSession
from actordbg.capture import facts
from actordbg.capture.control import Control
from actordbg.capture.switch_file import write_control
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.install import patching as operate, trailer
from actordbg.install.patch_target import find_target
from actordbg.store.layout import Store

pytestmark = pytest.mark.slow

ACTOR = """
import torch

class Actor(torch.nn.Module):
    def forward(self, sequences, action_mask=None, attention_mask=None, return_output=False):
        return sequences * 2
"""
JOB = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from actor import Actor
sequences = torch.arange(6).reshape(2, 3)
assert torch.equal(Actor()(sequences, attention_mask=torch.ones_like(sequences)), sequences * 2)
"""


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch):
    """Of ours in the environment, but that actordbg can be imported."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("ACTORDBG_STORE", "ACTORDBG_DISABLE", "ACTORDBG_RUN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("forked_workers")
def test_a_patched_actor_records_its_calls_and_an_unpatched_one_does_not(tmp_path):
    """The calls are made in a new process that starts in another folder, as a Ray worker does."""
    actor = tmp_path / "actor.py"
    actor.write_text(ACTOR)
    store = Store(tmp_path / "it's the store").create()
    write_control(store, Control(enabled=True, run="run", since=now_timestamp(), free_floor_bytes=0))
    target = find_target(target=actor)
    operate.patch(target, store)
    around = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, FORKED))), "FORKED_PROGRAM": "-c"}
    python(JOB, around, str(tmp_path))
    assert len(list(store.iter_dumps())) == 1
    operate.unpatch(target)
    assert actor.read_text() == ACTOR
    python(JOB, around, str(tmp_path))
    assert len(list(store.iter_dumps())) == 1


PROCESSES, ROUNDS = 6, 3
WORKER = """
import sys
from actordbg.install import patching as operate
from actordbg.install.patch_target import Target
from actordbg.store.layout import Store
from pathlib import Path
target = Target(Path(sys.argv[1]), Path(sys.argv[1]), sys.executable, None)
operate.require_hook = lambda python: "0"   # that the hook imports is another test's matter, and takes seconds
for _ in range(int(sys.argv[3])):
    print(operate.patch(target, Store(sys.argv[2])).action, flush=True)
    print(operate.unpatch(target).action, flush=True)
"""


def test_many_processes_never_leave_a_third_state(tmp_path, store):
    """A reader never sees anything but the two states."""
    actor = written(tmp_path / "models" / "actor.py")
    command = [sys.executable, "-c", WORKER, str(actor), str(store.root), str(ROUNDS)]
    pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    workers = [subprocess.Popen(command, **pipes) for _ in range(PROCESSES)]
    seen = set()
    while any(worker.poll() is None for worker in workers):
        seen.add(actor.read_bytes())
        time.sleep(0.001)
    for worker in workers:
        out, err = worker.communicate()
        assert worker.returncode == 0, err
        assert len(out.split("\n")) == 2 * ROUNDS + 1
    assert seen <= {PLAIN, trailer.append(PLAIN, str(store.root), mtime_ns=OLD)}
    assert facts_of(actor) == (PLAIN, 0o640, os.getuid(), OLD)
    assert os.listdir(actor.parent) == ["actor.py"]


FORK = """
import torch

class AttrDict(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error

class Actor(torch.nn.Module):
    def __init__(self, model, temperature):
        super().__init__()
        self.model, self.temperature, self.packing_samples = model, temperature, False

    def forward(self, sequences, action_mask=None, attention_mask=None, position_ids=None, cp_context_stack=None,
                return_entropy=False, routed_experts=None, **mm_inputs):
        if position_ids is None:
            position_ids = (attention_mask.cumsum(-1) - 1).masked_fill(attention_mask == 0, 1)
        output = AttrDict(self.model(sequences, attention_mask=attention_mask, position_ids=position_ids))
        every = (output["logits"].float() / self.temperature).log_softmax(-1)
        if return_entropy:
            output["entropy"] = -(every.exp() * every).sum(-1)[:, :-1]
        output["log_probs"] = every[:, :-1].gather(-1, sequences[:, 1:, None]).squeeze(-1)
        if action_mask is not None:
            output["action_log_probs"] = output["log_probs"][:, -action_mask.shape[1] :] * action_mask.float()
        return output
"""


def test_the_actor_of_another_trainer_is_labelled_as_its_own_and_replayed_on_the_rows(store, tmp_path, monkeypatch):
    """As a fork may have it: a mapping with attributes comes back, with entropies even where no output is asked for."""
    from transformers import LlamaConfig, LlamaForCausalLM

    for proof in ("require_hook", "require_seen"):  # by another interpreter, which takes seconds
        monkeypatch.setattr(operate, proof, lambda *_: "0")
    record_here(store)
    file, info = tmp_path / "loom" / "models" / "actor.py", tmp_path / "loom_rl-0.1.6.dist-info"
    file.parent.mkdir(parents=True)
    info.mkdir()
    for path, text in {
        file: FORK, file.with_name("__init__.py"): "", file.parents[1] / "__init__.py": "", info / "top_level.txt": "loom\n",
        info / "METADATA": "Metadata-Version: 2.1\nName: loom-rl\nVersion: 0.1.6\n", info / "RECORD": "loom/models/actor.py,,\n",
    }.items():  # fmt: skip
        path.write_text(text)
    told = invoke(store, "patch --target", str(file))
    assert told.exit_code == 0 and "this is the Actor of loom (loom-rl 0.1.6), not OpenRLHF's" in told.output

    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(facts, "DISTRIBUTIONS", [*facts.DISTRIBUTIONS])
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=99, initializer_range=0.3, use_cache=False, **sizes))
    model.save_pretrained(tmp_path / "model")
    actor = importlib.import_module("loom.models.actor").Actor(model, 0.7)
    ids, mask = torch.randint(3, 99, (3, 8)), torch.ones(3, 8, dtype=torch.int64)
    mask[0, :3], counts = 0, torch.ones(3, 4, dtype=torch.int64)
    with torch.no_grad():
        actor(ids, attention_mask=mask)
        actor(ids, action_mask=counts, attention_mask=mask, return_entropy=True)
        actor(ids, action_mask=counts, attention_mask=mask, position_ids=2 * torch.arange(8).expand(3, 8))
    dumps = dumps_of(store)
    assert [{*dump.outputs} for dump in dumps] == [{"log_probs"}, {"action_log_probs", "entropy"}, {"action_log_probs"}]
    assert {dump.record.versions["loom-rl"] for dump in dumps} == {"0.1.6"}
    listed = invoke(store, "dump ls --where", "trainer='loom'", "--json")
    assert len(json_of(listed)) == 3, listed.output
    session = ActorSession(ReplayConfig(model=str(tmp_path / "model"), dtype="fp32"), dumps[0].record, tmp_path / "cache")
    for dump in dumps:
        outcome = session.run(dump, backward=False)
        golden = dump.outputs.get("action_log_probs", dump.outputs.get("log_probs"))
        assert (outcome.log_probs - golden)[outcome.mask].abs().max() < 2e-5
    session.close()
