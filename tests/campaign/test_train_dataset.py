"""`train-check --dataset`: the samples that OpenRLHF's own SFT makes of a file, as inputs of every backend."""

import json

import pytest
from commandline import invoke, run_here
from safetensors.numpy import load_file

from actordbg.base.errors import UsageError
from actordbg.campaign.train_plan import run_of_dataset
from actordbg.store import payload

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] + ' ' }}{% endfor %}{% if add_generation_prompt %}a {% endif %}"
)
PAIRS = [{"prompt": f"a b {word}", "response": f" c d {word} e"} for word in WORDS]
CHATS = [
    {"messages": [{"role": "b", "content": f"a {word}"}, {"role": "assistant", "content": "c d"}, {"role": "b", "content": "e"}]}
    for word in WORDS
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Llama with a tokenizer of eight words and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    vocabulary = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{word: at + 3 for at, word in enumerate(WORDS)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).save_pretrained(folder)
    return folder


def written(rows, path):
    """Write rows as the suffix of a file says, or as a folder that `datasets` saved."""
    from datasets import Dataset

    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        Dataset.from_list(rows).save_to_disk(path)
    return path


@pytest.mark.slow
def test_the_samples_of_each_kind_of_file_are_the_same_dumps_whose_responses_count(store, model, tmp_path):
    runs = [
        run_of_dataset(store, written(PAIRS, tmp_path / name), str(model), None, 5) for name in ("a.jsonl", "b.parquet", "saved")
    ]
    assert len({*runs}) == 1 and runs[0].startswith("sft-")
    dumps = [payload.load(path) for path in sorted(store.iter_dumps())]
    assert len(dumps) == 5, "written once"
    for at, dump in enumerate(dumps):
        assert dump.inputs["sequences"].tolist() == [[3, 4, at + 3, 5, 6, at + 3, 7, 1]]
        assert dump.inputs["action_mask"].tolist() == [[False, False, True, True, True, True, True]]
    assert invoke(store, "dump pack").exit_code == 0
    assert run_of_dataset(store, tmp_path / "a.jsonl", str(model), None, 5) == runs[0] and not [*store.iter_dumps()], "packed"
    texts = run_of_dataset(store, written([{"text": "a b c"}], tmp_path / "text.jsonl"), str(model), None, 1)
    (path,) = (store.dumps / texts).rglob("*.zst")
    plain = payload.load(path).inputs
    assert plain["sequences"].tolist() == [[3, 4, 5]] and plain["action_mask"].all(), "every token of plain text counts"
    chats = run_of_dataset(store, written(CHATS, tmp_path / "chats.jsonl"), str(model), None, 1)
    (path,) = (store.dumps / chats).rglob("*.zst")
    ids, mask = (payload.load(path).inputs[name][0] for name in ("sequences", "action_mask"))
    assert ids[1:][mask].tolist()[:2] == [5, 6] and not mask[-1], "only the assistant's turn counts"


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("a.py", "print(1)", "is not a data set"),
        ("a.pkl", "", "is not a data set"),
        ("a.jsonl", '{"body": "a"}\n', "has the columns body"),
        ("b.jsonl", "{", "cannot be read"),
        ("none.jsonl", None, "is not a data set"),
    ],
)
def test_what_is_no_data_set_says_so_and_runs_nothing(name, text, said, store, model, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=said):
        run_of_dataset(store, tmp_path / name, str(model), None, 5)
    with pytest.raises(UsageError, match="tiny model has no tokenizer"):
        run_of_dataset(store, tmp_path / name, "tiny", None, 5)


@pytest.mark.forked
def test_train_check_trains_on_the_data_set_that_the_suites_variables_name(store, model, tmp_path, monkeypatch):
    written(PAIRS, tmp_path / "a.jsonl")
    monkeypatch.chdir(tmp_path)
    for name, value in {"DATASET": "a.jsonl", "MAX_SAMPLES": "3", "MODEL": str(model), "OUTPUT_DIR": "trained"}.items():
        monkeypatch.setenv(name, value)
    asked = ["--store", str(store.root), "train-check", "--backend", "plain", "--steps", "2", "--dtype", "fp32"]
    done = run_here(*asked, "--json")
    check = json.loads(done.stdout)["check"]
    assert len(check["dump_ids"]) == 3 and check["selection"].startswith("run='sft-"), done.output
    assert {cell["status"] for cell in check["cells"]} == {"trained"}
    saved, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "trained" / "plain_test", model))
    assert saved.keys() == base.keys() and all((saved[name] != base[name]).any() for name in base)
    assert (tmp_path / "trained" / "plain_test" / "tokenizer.json").is_file()
    again = run_here(*asked, "--checkpoint-every", "1")
    assert "needs --storage" in str(again.exception)
    refused = run_here(*asked, "--where", "rank=0")
    assert "cannot be combined" in str(refused.exception)
