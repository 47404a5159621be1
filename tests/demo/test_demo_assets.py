"""The demo's own tokenizer, data and command lines."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actordbg.demo.demo_training import Assets, build_assets, tasks
from actordbg.trainers.openrlhf import demo_programs
from actordbg.trainers.openrlhf.demo_programs import PROGRAMS


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Assets:
    return build_assets(tmp_path_factory.mktemp("assets"), prompts=10, conversations=6)


@pytest.fixture(scope="module")
def tokenizer(assets: Assets) -> object:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(assets.model)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=60))
def test_any_text_round_trips_through_the_tokenizer(text: str, tokenizer) -> None:  # type: ignore[no-untyped-def]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_the_tokenizers_special_tokens_are_the_models(assets: Assets, tokenizer) -> None:  # type: ignore[no-untyped-def]
    config = json.loads((assets.model / "config.json").read_text())
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert (config["pad_token_id"], config["bos_token_id"], config["eos_token_id"]) == (0, 1, 2)
    assert len(tokenizer) <= config["vocab_size"]


def test_the_chat_template_marks_roles_and_asks_for_an_answer(tokenizer) -> None:  # type: ignore[no-untyped-def]
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|begin|><|user|>hi<|end|><|assistant|>"


def test_the_data_are_the_same_every_time_and_of_very_different_length(assets: Assets) -> None:
    prompts = [json.loads(line)["prompt"] for line in assets.prompts.read_text().splitlines()]
    assert prompts == [task for task, _ in tasks(10)]
    lengths = [len(task) for task, _ in tasks(96)]
    assert max(lengths) > 4 * min(lengths)


def test_answers_are_right() -> None:
    for task, answer in tasks(20):
        numbers = [int(word) for word in re.findall(r"\d+", task)]
        if task.startswith("Sort"):
            assert answer == ", ".join(map(str, sorted(numbers)))
        else:
            assert answer == f"The sum is {sum(numbers)}."


def test_every_option_of_the_trainings_exists_in_openrlhfs_own_programs(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or spec.origin is None:
        pytest.skip("openrlhf is not installed here")
    folder = Path(spec.origin).parent / "cli"
    assets = Assets(tmp_path / "m", tmp_path / "p", tmp_path / "c")
    for command, program in (
        (PROGRAMS["ppo"].command(assets.model, assets.prompts, tmp_path, 1), "train_ppo_ray.py"),
        (PROGRAMS["sft"].command(assets.model, assets.conversations, tmp_path, 1), "train_sft.py"),
    ):
        source = (folder / program).read_text()
        known = set(re.findall(r'"--([\w.]+)"', source))
        known |= {f"{p}.{name}" for p in ("actor", "critic") for name in re.findall(r'f"--\{prefix\}\.([\w.]+)"', source)}
        used = {word.removeprefix("--") for word in command[command.index("--") + 1 :] if word.startswith("--")}
        assert used and used <= known


def test_the_rewards_are_one_number_per_answer_and_differ() -> None:
    spec = importlib.util.spec_from_file_location("loaded_by_its_path", demo_programs.__file__)  # as OpenRLHF does it
    spec.loader.exec_module(loaded := importlib.util.module_from_spec(spec))
    found = loaded.reward_func(["ab: aaaa", "ab: abcd", "ab: "], ["ab: "] * 3, [""] * 3)
    assert [round(float(r), 2) for r in found["rewards"]] == [0.25, 1.0, 0.0]  # type: ignore[attr-defined]


def test_options_of_the_deepspeed_launcher_come_before_the_module(tmp_path: Path) -> None:
    command = PROGRAMS["sft"].command(tmp_path, tmp_path, tmp_path, 29500)
    module = command.index("actordbg.trainers.openrlhf.demo_programs")
    assert command[module + 1] == "sft" and "29500" in " ".join(command[:module]) and "--module" in command[:module]
