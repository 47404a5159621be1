"""What our adapters read of calls as their trainers make them. The log has real trainings of those that are not installed here."""

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from actorcases import make_dump
from adaptercases import IDS, MASK, truth_of
from commandline import run_here
from roots import ROOT, json_of, run_program

from actordbg.actor.rules import check_config, leaked
from actordbg.config.choices import Facts
from actordbg.config.replay_config import ReplayConfig
from actordbg.config.sources import parse_toml
from actordbg.doctor.python_environment import adapter_check
from actordbg.store import payload
from actordbg.trainers.find_adapter import BUILT_IN
from actordbg.trainers.fitting import fit_of
from actordbg.trainers.plain_adapter import Plain
from actordbg.trainers.recorded_model import scores_of
from actordbg.trainers.seam import Seam, Unreadable, note_update
from actordbg.trainers.skyrl_adapter import SkyRl
from actordbg.trainers.trl_adapter import Trl
from actordbg.trainers.verl_adapter import Verl

LAPTOP = Facts(cuda=False, gpus=0, flash_attn=False)
MODEL = torch.nn.Module()
LABELS = torch.tensor([[-100, -100, -100, -100, 11, 2], [-100, -100, 8, 4, 1, -100]])
FUSED = {"self": MODEL, "fused_lm_head": True, "input_ids": IDS, "attention_mask": MASK, "labels": LABELS, "temperature": 0.7}
WRAPPER = torch.nn.Module()
WRAPPER.model = MODEL
SKYRL = {"self": WRAPPER, "sequences": IDS, "num_actions": 2, "attention_mask": MASK, "temperature": 0.7}
SKYRL |= {"compute_entropy": True, "pixel_values": None}


def read(seam, call):
    rows = seam.rows(call)
    assert rows.model is MODEL and rows.sequences is IDS and rows.attention_mask is MASK
    assert rows.temperature == 0.7 and rows.entropy
    return rows


def test_trl_completions_count_where_they_are_real():
    trainer = SimpleNamespace(temperature=0.7, state=SimpleNamespace(global_step=5))
    given = {"self": trainer, "model": MODEL, "input_ids": IDS, "attention_mask": MASK, "logits_to_keep": 2, "compute_entropy": 1}
    for seam in Trl.seams[:2]:
        rows = read(seam, given | {"pixel_values": IDS, "image_sizes": None})
        assert rows.action_mask.tolist() == [[1, 1], [1, 0]]
        assert rows.step == 5 and list(rows.more) == ["pixel_values"]
        assert seam.result((1, 2, 3)).entropy == 2


def test_trl_labels_count_for_the_token_before_them_and_packed_rows_have_positions():
    seam = Trl.seams[2]
    call = FUSED | {"outputs": ("log_probs", "entropy")}
    rows = read(seam, call)
    assert rows.action_mask.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 0]]
    assert seam.rows(call | {"fused_lm_head": False}) is None
    packed = seam.rows(call | {"attention_mask": None, "position_ids": IDS})
    assert packed.positions.equal(IDS) and packed.attention_mask is None
    for without in ({"attention_mask": None}, {"labels": None}, {"shift_labels": IDS}):
        with pytest.raises(Unreadable, match="packed"):
            seam.rows(call | without)


def test_sft_and_dpo_of_trl_have_the_step_of_their_trainer_and_so_have_a_reference_and_what_peft_changed():
    class Peft(torch.nn.Module):
        def get_base_model(self):
            return MODEL

    class Training:
        args, state, ref_model = SimpleNamespace(), SimpleNamespace(global_step=7), torch.nn.Module()

    trainer, reference = Training(), Training.ref_model
    assert Trl.seams[3] is Plain.seams[1] and Trl.seams[3].rows({"self": trainer, "model": Peft()}) is None
    scored = FUSED | {"outputs": ("log_probs",)}
    steps = [Trl.seams[2].rows(scored | {"self": model}).step for model in (MODEL, reference, torch.nn.Module())]  # type: ignore[union-attr]
    assert steps == [7, 7, None]
    ours = Plain.seams[0].rows({"self": MODEL, "input_ids": IDS})
    assert ours.step == 7
    del trainer
    assert Trl.seams[2].rows(scored).step is None, "the training is over"  # type: ignore[union-attr]


def test_packed_rows_that_transformers_does_not_keep_apart_are_recorded_as_such_and_their_mismatch_says_so():
    model = torch.nn.Module()
    model.is_gradient_checkpointing, model.config = True, SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    call = {"self": model, "input_ids": IDS, "position_ids": IDS}

    def leaks(**more):
        rows = Plain.seams[0].rows(call | more)
        record = make_dump(
            arguments={f"context.{name}": one for name, one in rows.context.items()},
            actor={"attn_implementation": "sdpa"},
            packing_samples=rows.packed,
        ).record
        hits = [hit.id for hit in check_config(ReplayConfig(), LAPTOP, record)]
        assert ("recorded-rows-leaked" in hits) == leaked(record)
        assert not leaked(replace(record, actor={"attn_implementation": "flash_attention_2"}))
        return leaked(record)

    assert not leaks() and not leaks(use_cache=False) and leaks(use_cache=True), "checkpointing makes no cache in training"
    model.eval()
    assert leaks() and not leaks(use_cache=False) and not leaks(position_ids=None)


def test_skyrl_entropies_are_those_of_the_actions():
    seam = SkyRl.seams[0]
    for actions in (2, [2]):
        rows = read(seam, SKYRL | {"num_actions": actions})
        assert rows.action_mask.tolist() == [[1, 1], [1, 0]]
    log_probs = torch.zeros(2, 2)
    found = seam.result((log_probs, {"entropy": torch.arange(12).view(2, 6)}))
    assert found.log_probs is log_probs and found.entropy.tolist() == [[3, 4], [9, 10]]
    assert seam.result(log_probs).log_probs is log_probs and seam.result((log_probs, {})).entropy is None
    for unread in ({"num_actions": [2, 1]}, {"pixel_values": IDS}):
        with pytest.raises(Unreadable):
            seam.rows(SKYRL | unread)


def test_plain_calls_count_their_labels_and_a_step_of_generate_is_none():
    seam = Plain.seams[0]
    call = {"self": MODEL, "input_ids": IDS, "attention_mask": MASK, "labels": LABELS, "num_items_in_batch": torch.tensor(5)}
    rows = seam.rows(call | {"token_type_ids": MASK, "past_key_values": None, "cache": None})
    assert list(rows.more) == ["token_type_ids"]
    assert rows.action_mask.int().tolist() == [[0, 0, 0, 1, 1], [0, 1, 1, 1, 0]]
    for other in ({"past_key_values": ()}, {"cache_params": ()}, {"cache": ()}, {"input_ids": None}):
        assert seam.rows(call | other) is None, other
    last = seam.rows({"self": MODEL, "input_ids": IDS, "logits_to_keep": torch.tensor([2, 3])})
    assert last.more == {}
    both = torch.nn.Module()
    both.config = SimpleNamespace(is_encoder_decoder=True)  # type: ignore[assignment]
    for unread in ({"attention_mask": MASK[:, None, None, :]}, {"self": both}):
        with pytest.raises(Unreadable):
            seam.rows(call | unread)


TRAINING = """
import hashlib, json, sys, torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, Trainer, TrainingArguments
torch.set_num_threads(1)
small = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=50, pad_token_id=0)
some = torch.randint(3, 50, (2, 5))
LlamaForSequenceClassification(LlamaConfig(**small))(input_ids=some)
BertForMaskedLM(BertConfig(**small))(input_ids=some)
LlamaForCausalLM(LlamaConfig(**small)).generate(some, max_new_tokens=3, use_cache=False, do_sample=False)
ids = torch.randint(3, 99, (8, 9), generator=torch.Generator().manual_seed(1))
masks = torch.arange(9) < torch.arange(4, 12)[:, None]
rows = [dict(input_ids=i * m, attention_mask=m.long(), labels=torch.where(m, i, -100)) for i, m in zip(ids, masks)]
def trained(recorded):
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=99, initializer_range=0.3, **sizes))
    if not recorded:
        LlamaForCausalLM.forward = LlamaForCausalLM.forward.__actordbg_seam__
    model.save_pretrained("model")
    settings = TrainingArguments("out", max_steps=3, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no")
    Trainer(model, settings, train_dataset=rows).train()
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print(json.dumps([trained(True), trained(False)]))
"""


@pytest.mark.forked
def test_a_training_of_transformers_own_trainer_is_recorded_whole_and_not_changed(store, tmp_path, monkeypatch):
    """Before it models that are not policies, which are named, and a generation without a cache, which is not a call."""
    monkeypatch.setenv("ACTORDBG_DISABLE", "")  # the truth in this process sets it
    monkeypatch.setenv("FORKED_PROGRAM", "train.py")
    (tmp_path / "train.py").write_text(TRAINING)
    given = ["--store", str(store.root), "run", "--run", "a", "--with-outputs", "--adapter", "plain", "--", sys.executable]
    command = [sys.executable, "-m", "actordbg", *given, "train.py"]
    done = run_program(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recorded, unrecorded = json.loads(done.stdout.splitlines()[-1])
    assert recorded == unrecorded and "3 calls = 3 captured + 0 dropped" in done.stderr
    assert "LlamaForSequenceClassification has no language head" in done.stderr and "was not read" not in done.stderr
    assert "BertForMaskedLM cannot generate: it is not a causal language model" in done.stderr
    dumps = [payload.load(path) for path in sorted(store.iter_dumps())]
    assert [dump.record.step for dump in dumps] == [0, 1, 2] and {dump.record.role for dump in dumps} == {"policy"}
    assert all((dump.record.batch_size, dump.record.seq_len) == (4, 9) for dump in dumps)
    assert all(dump.record.tokens == int(dump.inputs["attention_mask"].sum()) < 36 for dump in dumps)
    assert dumps[0].record.actor["function"].endswith("modeling_llama:LlamaForCausalLM.forward")
    truth = truth_of(tmp_path / "model", dumps[0])
    assert (truth - dumps[0].outputs["action_log_probs"]).abs().max() < 2e-5 and truth.abs().max() > 1


def test_every_built_in_adapter_is_in_the_contracts_that_keep_the_training_process_light():
    contracts = parse_toml((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    light = [contract["source_modules"] for contract in contracts if Seam.__module__ in contract.get("source_modules", ())]
    assert len(light) == 2
    for adapter in BUILT_IN.values():
        assert all(adapter.partition(":")[0] in modules for modules in light), adapter


def test_adapters_answers_for_those_that_are_named_and_prints_a_template(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = run_here("adapters", "plain", "--json")
    assert listed.exit_code == 0 and json_of(listed)[0]["version"] == version("transformers")
    template = run_here("adapters", "--template").stdout
    (tmp_path / "from_template.py").write_text(template.replace("MY_TRAINER.MODULE:CLASS.METHOD", "from_template:read_call"))
    answer = run_here("adapters", "from_template:MyTrainer")
    assert answer.exit_code == 1 and "it takes no MODEL, INPUT_IDS, ATTENTION_MASK, KEEP; it takes call" in answer.output
    sys.modules.pop("from_template")


def test_doctor_tells_a_release_that_was_tried_from_one_that_was_not_and_one_that_differs():
    from actordbg.trainers.fitting import Fit

    def fit(version, *differs):
        return Fit("mine", "m:A", "my-trainer", True, version, ("1.0",), ("m:f",), differs)

    assert adapter_check(fit("1.0")).status == "ok"
    assert adapter_check(fit("2.0")).status == adapter_check(fit(None)).status == "warn"
    refused = adapter_check(fit("2.0", "m:f: it takes no ids"))
    assert refused.status == "warn" and "takes no ids" in refused.detail and "1.0" in refused.remedy


def test_a_trainer_is_not_there_because_transformers_is():
    """TRL's adapter also reads the step of transformers' Trainer."""
    assert fit_of("trl").there == (find_spec("trl") is not None) and fit_of("plain").there


def test_verl_rows_are_jagged_and_count_their_responses_or_their_loss_mask():
    seam = Verl.seams[0]
    jagged, counted, values = (
        torch.nested.nested_tensor_from_jagged(torch.tensor(given), offsets=torch.tensor([0, 4, 7]))
        for given in ([5, 9, 11, 2, 7, 3, 8], [0, 0, 0, 1, 0, 1, 1], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    )

    class Engine:
        model_config, module, lr_scheduler = SimpleNamespace(model_type="language_model"), MODEL, SimpleNamespace(last_epoch=1)

    engine = Engine()
    for _ in range(3):  # optimizer steps, of which several may be between two of the scheduler
        note_update(engine)
    batch = {"input_ids": jagged, "temperature": 0.7, "calculate_entropy": True}
    asked = {"prompts": torch.zeros(2, 3), "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 0, 1, 0, 0]])}
    rows = seam.rows({"self": engine, "micro_batch": batch | asked})
    assert rows.sequences.tolist() == [[5, 9, 11, 2], [7, 3, 8, 0]] and rows.attention_mask.tolist() == [[1] * 4, [1, 1, 1, 0]]
    assert rows.action_mask.int().tolist() == [[0, 1, 1], [0, 1, 0]]
    assert (rows.temperature, rows.entropy, rows.step) == (0.7, True, 3)
    sft = seam.rows({"self": engine, "micro_batch": {**batch, "loss_mask": counted, "temperature": torch.tensor([0.7, 0.7])}})
    assert sft.action_mask.int().tolist() == [[0, 0, 1], [1, 1, 0]]
    scores = scores_of(seam, rows, (1.0, {"model_output": {"log_probs": values}}))
    assert scores.log_probs.tolist() == [[0, 1, 2], [0, 5, 0]] and scores.entropy is None
    for unread in ({"temperature": torch.tensor([0.7, 1.0])}, {"multi_modal_inputs": []}, {"input_ids": IDS}):
        with pytest.raises(Unreadable):
            seam.rows({"self": engine, "micro_batch": batch | asked | unread})
    engine.model_config.model_type = "value_model"
    assert seam.rows({"self": engine, "micro_batch": batch | asked}) is None
