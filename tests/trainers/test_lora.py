"""LoRA: the same model is the policy and, with its adapters off, the reference. Its adapter's folder is a model to replay with."""

import json
import sys

import pytest
import roots
import torch
from actorcases import run_scenario
from adaptercases import small_model
from commandline import invoke

from actordbg.actor.hub_model import find_model, weights_version
from actordbg.actor.models import locate
from actordbg.base.errors import EnvironmentProblem
from actordbg.capture.ledger import Identity
from actordbg.capture.snapshot import Copier
from actordbg.formats.weight_hashes import step_weights
from actordbg.store import payload

pytest.importorskip("peft")

TRAINING = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaForCausalLM
torch.manual_seed(0)
torch.set_num_threads(1)
base = LlamaForCausalLM.from_pretrained("base")
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
model.save_pretrained("adapter", safe_serialization=False)  # as OpenRLHF does under ZeRO-3
model.train()
ids = torch.randint(1, 16, (2, 9))
with torch.no_grad(), model.disable_adapter():
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.sum().backward()
"""


@pytest.mark.forked
def test_a_pass_without_its_adapter_is_a_reference_and_both_are_right_by_the_adapters_folder(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the adapter's base is
    small_model(tmp_path / "base")
    (tmp_path / "train.py").write_text(TRAINING)
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), "run", "--run", "lora", "--adapter", "plain"]
    command += ["--with-outputs", "--free-floor", "0", "--", sys.executable, "train.py"]
    done = roots.run_program(command, env=roots.environment(ACTORDBG_DISABLE="", FORKED_PROGRAM="train.py"))
    assert "2 recording actors: 2 calls = 2 captured" in done.stderr, done.stderr
    records = [payload.load(path).record for path in store.iter_dumps()]
    told = sorted((record.role or "", record.actor["lora_adapters"]) for record in records)
    assert told == [("policy", ["default"]), ("reference", [])]
    checked = invoke(store, "check --recorded --model adapter --no-laws")
    assert checked.exit_code == 0 and "RIGHT: 2 of 2 dumps" in checked.stdout, checked.output
    checked = invoke(store, "check --recorded --where", "role='policy'", "--model", "base", "--no-laws")
    assert checked.exit_code == 1 and "NOT CHECKED: recorded outputs; 1 of 1" in checked.stdout, (
        "another model's weights accuse nobody"
    )


@pytest.mark.forked
def test_openrlhfs_actor_and_the_truth_have_the_adapter_of_the_folder(tmp_path):
    facts = run_scenario("adapter", tmp_path)[0]
    for role in ("policy", "reference"):
        assert facts[role] < 2e-5, role
    assert facts["apart"] > 0.1 and facts["gradient"] < 1e-4 and facts["trained"] == ["lora_A", "lora_B"]


WHO = Identity("r", 0, 1, "host", 1, "actor0")


def test_weights_have_the_same_names_with_and_without_pefts_prefix():
    model = torch.nn.Linear(2, 1)
    wrapped = torch.nn.ModuleDict({"base_model": torch.nn.ModuleDict({"model": model})})
    taken, plain = (step_weights(each, Copier().outputs, hashed=True).record(WHO).parameters for each in (wrapped, model))
    assert taken == plain and all(each.sha256 and each.sample for each in plain.values())


def adapter_of(base, path):
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    return path


def test_an_adapter_without_its_base_is_refused_by_name_and_a_changed_base_is_another_model(tmp_path, monkeypatch):
    adapter = adapter_of(tmp_path / "base", tmp_path / "adapter")
    twice = adapter_of(adapter, tmp_path / "twice")
    with pytest.raises(EnvironmentProblem, match="is an adapter, and its base is not available: there is no model in") as refused:
        find_model(str(adapter))
    assert "base_model_name_or_path" in str(refused.value.hint)
    with pytest.raises(EnvironmentProblem, match=r"its base is not available: .*adapter holds no model"):
        find_model(str(twice))
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"model_type": "llama"}')
    assert find_model(str(adapter)) == {"model_type": "llama"}
    monkeypatch.setattr("actordbg.actor.models.is_there", lambda name: name != "peft")
    with pytest.raises(EnvironmentProblem, match="peft is not installed"):
        locate(str(adapter), tmp_path / "cache")
    monkeypatch.undo()
    (adapter / "adapter_model.bin").write_bytes(b"no archive")
    with pytest.raises(EnvironmentProblem, match=r"adapter_model\.bin cannot be read as an adapter's weights"):
        locate(str(adapter), tmp_path / "cache")
    before = weights_version(str(adapter))
    (tmp_path / "base" / "model.safetensors").write_bytes(b"others")
    assert weights_version(str(adapter)) != before, "a truth of the old base is not taken for one of this"
