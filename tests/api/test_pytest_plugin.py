"""The pytest plugin as a trainer's CI meets it: failures whose text is the verdict, dumps as parameters, pages."""

import sys
from importlib.util import find_spec
from itertools import pairwise

import pytest
from amounts import WHOLE
from replaycases import publish
from roots import ROOT, environment, run_program

from actordbg.store.layout import Store

MODELS = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MODEL = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, pad_token_id=0))
BATCH = {"input_ids": torch.randint(3, 64, (2, 12)), "attention_mask": (torch.arange(12) < torch.tensor([[12], [8]])).long()}
"""


def outcome_of(folder, source, *arguments):
    """Run pytest with the plugin on a file of this source; return its output and the outcomes by name."""
    (folder / "test_own.py").write_text(source)
    return run(folder, folder / "test_own.py", *arguments)


def run(folder, path, *arguments):
    plugins = ["-p", "actordbg.api.pytest_plugin", "-c", "/dev/null", "--rootdir", str(folder), "-q", "-rN", "-p", "no:warnings"]
    command = [sys.executable, "-m", "pytest", *plugins, *arguments, str(path)]
    done = run_program(command, cwd=folder, env=environment(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"))
    words = done.stdout.splitlines()[-1].replace(",", "").split()
    return done.stdout, {word: int(count) for count, word in pairwise(words) if count.isdigit()}


def test_the_plugin_loads_nothing_until_it_is_used(tmp_path):
    source = "import sys\ndef test_it():\n    assert not {'torch', 'sqlmodel', 'numpy', 'actordbg.api.own_model'} & sys.modules.keys()\n"
    assert outcome_of(tmp_path, source)[1]["passed"] == 1


@pytest.mark.forked
def test_each_dump_of_a_sample_is_a_parameter_and_no_dump_is_an_error(tmp_path):
    publish(Store(tmp_path / "store").create(), 5)
    source = """
import pytest

@pytest.mark.actordbg_dumps("store", where="rank>=0", sample=3)
def test_dump(actordbg_dump):
    assert actordbg_dump.tensors["sequences"].shape[1] == actordbg_dump.seq_len
"""
    (tmp_path / "test_none.py").write_text(source.replace("rank>=0", "seq_len>9999"))
    words = ("--strict-markers", "--continue-on-collection-errors", str(tmp_path / "test_none.py"))
    output, outcomes = outcome_of(tmp_path, source, *words)
    assert outcomes == {"passed": 3, "error": 1} and "no dump of store to run the test for\nselect others" in output


@pytest.mark.forked
def test_a_failures_text_is_the_verdict_and_its_page_is_written(tmp_path):
    publish(Store(tmp_path / "store").create(), 1, length=24)
    source = f"""{MODELS}
import sys
import pytest

def test_healthy(actordbg_check):
    before = torch.get_rng_state(), MODEL.training, set(sys.modules["os"].environ)
    assert actordbg_check(MODEL, BATCH, backward=False).verdict == "RIGHT"
    assert torch.equal(before[0], torch.get_rng_state()) and before[1:] == (MODEL.training, set(sys.modules["os"].environ))

def test_faulty(actordbg_check, monkeypatch):
    monkeypatch.setattr(MODEL.model.layers[0].self_attn, "scaling", 0.275)
    actordbg_check(MODEL, BATCH, packing=False)

def test_sft_and_dpo(actordbg_check):
    pairs = dict((name, torch.cat([rows, rows.flip(0)])) for name, rows in BATCH.items())  # chosen and rejected in one call
    with actordbg_check.calls(MODEL):
        MODEL(**BATCH, labels=BATCH["input_ids"].masked_fill(BATCH["attention_mask"] == 0, -100)).loss.backward()
        MODEL(**pairs, use_cache=False)

def test_store(actordbg_check):
    assert actordbg_check("store", sample=1, backward=False)["dumps"] == 1

def test_no_call(actordbg_check):
    with actordbg_check.calls(MODEL):
        pass

def test_own_function(actordbg_check):
    def score(model, input_ids, attention_mask):
        logits = model(input_ids, attention_mask=attention_mask).logits
        return logits[:, :-1].softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)  # not the logarithm

    actordbg_check.calls(score)(MODEL, **BATCH)
"""
    output, outcomes = outcome_of(tmp_path, source, "--actordbg-html", "pages")
    output = " ".join(output.split())
    assert outcomes == {"failed": 3, "passed": 3}, output
    assert "self_attn.scaling is 0.275; transformers' model from this checkpoint has 0.25" in output
    assert "NothingToDo: no call of LlamaForCausalLM" in output and "the run's outputs are not what its model gives" in output
    assert len(list((tmp_path / "pages").glob("test_*.html"))) == 6 and "page: pages/test_faulty-1.html" in output


@pytest.mark.forked
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed: make test installs it")
def test_grpo_of_trl_is_right_and_red_for_each_planted_fault(tmp_path):
    """Six faults in `make whole`; here one of what TRL computes. `test_faulty` above is one of the model."""
    faults = CAUSES if WHOLE else {"temperature": CAUSES["temperature"]}
    chosen = " or ".join(["healthy", *faults])
    output, outcomes = run(tmp_path, ROOT / "examples" / "trainer_ci", "-p", "planted_in_trl", "-k", chosen)
    output = " ".join(output.split())
    assert outcomes == {"failed": len(faults), "passed": 1} | ({} if WHOLE else {"deselected": 5}), output
    for cause in faults.values():
        assert cause in output
    assert output.count("the run's outputs are not what its model gives in fp32: log-probs by up to") == (3 if WHOLE else 1)


CAUSES = {
    "temperature": "temperature 0.7 was not applied",
    "shifted": "log-probs are shifted by -1 tokens",
    "mask": "padding broken: row",
    "scaling": "self_attn.scaling is 0.275; transformers' model from this checkpoint has 0.25",
    "angles": "model.rotary_emb.inv_freq was rounded to bf16",
    "bf16": "log-probs were rounded to bf16",
}
