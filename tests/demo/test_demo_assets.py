"""The demo's own tokenizer, data and command lines."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from actordbg.demo.demo_training import build_assets, tasks
from actordbg.trainers.openrlhf import demo_programs
from actordbg.trainers.openrlhf.demo_programs import PROGRAMS


def test_the_tokenizer_is_the_models_keeps_any_text_and_marks_roles(tmp_path):
    from transformers import AutoTokenizer

    model, data = build_assets(tmp_path, 10)
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    special = ("pad_token_id", "bos_token_id", "eos_token_id")
    assert [getattr(tokenizer, name) for name in special] == [config[name] for name in special] == [0, 1, 2]
    assert len(tokenizer) <= config["vocab_size"]
    for text in ("", "naïve 日本 \x00\U0001f600", " \t\n  <|pad|"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    asked = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert asked == "<|begin|><|user|>hi<|end|><|assistant|>"
    assert [json.loads(line)["prompt"] for line in data.read_text().splitlines()] == [task for task, _ in tasks(10)]


def test_the_tasks_are_of_very_different_length_and_their_answers_right():
    lengths = [len(task) for task, _ in tasks(96)]
    assert max(lengths) > 4 * min(lengths)
    for task, answer in tasks(20):
        numbers = sorted(int(word) for word in re.findall(r"\d+", task))
        assert answer == (", ".join(map(str, numbers)) if task.startswith("Sort") else f"The sum is {sum(numbers)}.")


def test_every_option_of_the_trainings_exists_in_openrlhfs_own_programs(tmp_path):
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or spec.origin is None:
        pytest.skip("openrlhf is not installed here")
    for name, program in (("ppo", "train_ppo_ray.py"), ("sft", "train_sft.py")):
        command = PROGRAMS[name].command(tmp_path / "m", tmp_path / "d", tmp_path, 29500)
        source = (Path(spec.origin).parent / "cli" / program).read_text()
        known = set(re.findall(r'"--([\w.]+)"', source))
        known |= {f"{p}.{option}" for p in ("actor", "critic") for option in re.findall(r'f"--\{prefix\}\.([\w.]+)"', source)}
        used = {word.removeprefix("--") for word in command[command.index("--") + 1 :] if word.startswith("--")}
        assert used and used <= known
    module = command.index("actordbg.trainers.openrlhf.demo_programs")  # options of deepspeed's launcher come before it
    assert command[module + 1] == "sft" and "29500" in " ".join(command[:module]) and "--module" in command[:module]


def test_the_rewards_are_one_number_per_answer_and_differ():
    spec = importlib.util.spec_from_file_location("loaded_by_its_path", demo_programs.__file__)  # as OpenRLHF does it
    spec.loader.exec_module(loaded := importlib.util.module_from_spec(spec))
    rewards = loaded.reward_func(["ab: aaaa", "ab: abcd", "ab: "], ["ab: "] * 3, [""] * 3)["rewards"]
    assert [round(float(reward), 2) for reward in rewards] == [0.25, 1.0, 0.0]
