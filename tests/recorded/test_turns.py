"""Token in, token out: the kind of the first id that differs, by real tokenizers, and chat templates that break the prefix."""

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from casefiles import cases_of
from catalogcases import record
from commandline import in_json, invoke
from replaycases import publish
from roots import read_json, write_json

import actordbg
from actordbg.base.errors import CorruptDump, EnvironmentProblem, NothingToDo, Unsupported, UsageError
from actordbg.demo.demo_training import build_assets
from actordbg.formats.turn_record import SampledTurn, Trajectory
from actordbg.recorded.chat_template import template_answer
from actordbg.recorded.recorded_calls import Answer, key_of
from actordbg.recorded.turns import RULES, difference, rewards, turns_answer
from actordbg.records.run_files import read_trajectory
from actordbg.store import payload
from actordbg.trainers.openrlhf import told, turn_recording

Ids = list[int]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A byte-level BPE tokenizer with BOS, EOS, roles and a chat template."""
    return build_assets(tmp_path_factory.mktemp("tokenizer"), 1)[0]


@pytest.fixture(scope="module")
def tokenizer(model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def encode(tokenizer, text):
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def conversation(tokenizer, number=0):
    """Two turns and feedback between them."""
    given = encode(tokenizer, "<|begin|><|user|>What is the sum of 17, 4?<|end|><|assistant|>")
    said = encode(tokenizer, f"The sum is {number}, I think so.\n") + [tokenizer.eos_token_id]
    second = given + said + encode(tokenizer, "<|user|>Sort these numbers<|end|><|assistant|>")
    answer = [*encode(tokenizer, "smallest first"), tokenizer.eos_token_id]
    turns = (SampledTurn(tuple(given), tuple(said), "x"), SampledTurn(tuple(second), tuple(answer), "y"))
    trained = (*second, *answer)
    ranges = ((len(given), len(given) + len(said)), (len(second), len(trained)))
    when = f"2026-01-01T00:00:0{number}.000000Z"
    return Trajectory("r", "h", 1, number, when, tokenizer.bos_token_id, tokenizer.eos_token_id, turns, trained, ranges)


def stored(store, *trajectories):
    for each in trajectories:
        path = store.root / "turns" / each.run / each.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(each.to_json())
        assert read_trajectory(path) == each
    return store


def as_rows(store, *rows, actions=None):
    """Publish a dump of the run whose rows are padded on the left. actions: the positions in each row that count as actions."""
    publish(store, 0)
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    described = record(0, run="r", rank=0, batch_size=len(rows), seq_len=width, tokens=int(mask.sum()), action_len=0)
    tensors = {"sequences": ids, "attention_mask": mask}
    if actions is not None:
        acts = torch.stack([torch.arange(width) - width + len(row) for row in rows])
        tensors["action_mask"] = torch.isin(acts, torch.tensor(actions))[:, 1:]
    store.publish_dump(*payload.encode(described, tensors))


def test_ids_that_stay_the_same_are_right_and_rows_of_the_training_are_found(store, model, tokenizer):
    pair = [conversation(tokenizer, number=number) for number in (0, 1)]
    stored(store, *pair)
    as_rows(store, *(list(each.trained) for each in pair))
    answer = actordbg.open(store.root).turns(tokenizer=model)
    assert answer.ok and answer["trajectories"] == answer["in_dumps"] == 2 and answer["turns"] == 4


FAULTS = {
    "retokenized": ("retokenized", lambda t, first, second: [*second[:-8], *(i for c in t.decode(second[-8:-2]) for i in encode(t, c)), *second[-2:]]),
    "newline lost": ("border lost", lambda t, first, second: first[:-2] + second[len(first) - 1 :]),
    "text dropped": ("template drops text", lambda t, first, second: first[:-7] + second[len(first) - 1 :]),
    "two BOS": ("extra BOS", lambda t, first, second: [t.bos_token_id, *second]),
    "EOS doubled": ("EOS appended", lambda t, first, second: [*first, t.eos_token_id, *second[len(first) :]]),
    "other": ("other ids", lambda t, first, second: [*first[:-5], 99, 98, *second[len(first) - 3 :]]),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_kind_of_difference_between_sampled_and_trained_is_named(store, model, tokenizer, name):
    kind, change = FAULTS[name]
    good, bad = conversation(tokenizer), conversation(tokenizer, number=1)
    stored(store, good, bad)
    turn = bad.turns[0]
    first = [*turn.given, *turn.sampled]
    as_rows(store, list(good.trained), change(tokenizer, first, list(bad.trained)))
    told = in_json(store, "turns --tokenizer", model)
    (fault,) = told["findings"]
    assert fault["rule"] == kind and f"{fault['place']['conversation']}.json" == bad.name and not told["good"], fault
    assert "as recorded in the training" in told["sentence"] and told["wrong"] == ["trainer"]


CASES = cases_of("turns")


def ids_of(text):
    return tuple(map(ord, text))


def judged_lines(store, lines):
    """What is said of conversations whose characters are tokens, and of rows. lines: of `turns.test`."""
    talks = []
    rows = []
    actions = None
    for verb, values in ((line.partition(" ")[0], json.loads(f"[{line.partition(' ')[2]}]")) for line in lines):
        if verb == "conversation":
            talks.append({"turns": []})
        elif verb == "turn":
            talks[-1]["turns"].append(SampledTurn(ids_of(values[0]), ids_of(values[1]), values[1]))
        elif verb == "row":
            rows.append(list(ids_of(values[0])))
        elif verb == "actions":
            actions = [at for start, stop in values for at in range(start, stop)]
        else:
            talks[-1][verb] = values
    for number, talk in enumerate(talks):
        turns = talk["turns"]
        trained = ids_of(*talk["trained"]) if "trained" in talk else turns[-1].given + turns[-1].sampled
        ranges = talk.get("ranges") or [(len(turn.given), len(turn.given) + len(turn.sampled)) for turn in turns]
        when = f"2026-01-01T00:00:0{number}.000000Z"
        stored(store, Trajectory("r", "h", 1, number, when, ord("^"), ord("$"), tuple(turns), trained, tuple(map(tuple, ranges))))
    if rows:
        as_rows(store, *rows, actions=actions)
    answer = turns_answer(store, decode=lambda ids: "".join(map(chr, ids)))
    found = [f"{each['rule']}, {each['side']}, {json.dumps(each['place'])}: {each['said']}" for each in answer["findings"]]
    return [f"{answer.verdict}: {answer['in_dumps']} of {answer['trajectories']} in dumps", *found, *answer["not_checked"]]


@pytest.mark.parametrize("case", CASES)
def test_conversations_and_rows_of_the_training_that_were_made_from_them(store, case):
    assert judged_lines(store, CASES[case].given) == CASES[case].expected


def test_a_damaged_conversation_is_counted_as_not_checked(store, tokenizer):
    stored(store, conversation(tokenizer))
    (store.root / "turns" / "r" / "h-1-000009.json").write_text("{")
    assert [left.partition(",")[0] for left in turns_answer(store)["not_checked"]] == [
        "1 conversation",
        "1 recorded conversation",
    ]


def test_a_run_that_is_no_name_or_not_the_dumps_is_refused(store, tokenizer):
    good = conversation(tokenizer)
    stored(store, good)
    as_rows(store, list(good.trained))
    for run in ("/x", "*", ".."):
        for command in ("turns", "weights"):
            with pytest.raises(UsageError, match="name of a run"):
                invoke(store, command, "--run", run)
    with pytest.raises(UsageError, match="not of other"):
        turns_answer(store, "last", run="other")


def test_a_file_that_names_a_run_as_no_run_can_be_named_is_damaged(store, tokenizer):
    """Its name becomes part of a condition, and of a command to paste."""
    path = store.root / "turns" / "r" / "h-1-000000.json"
    path.parent.mkdir(parents=True)
    path.write_text(replace(conversation(tokenizer), run="r$(id)' or 'x'='x").to_json())
    with pytest.raises(CorruptDump, match="no plain name"):
        read_trajectory(path)


def test_a_cut_at_the_end_is_no_difference():
    assert difference(range(20), range(9), None, bos=None, eos=None) is None


def test_without_recorded_turns_it_says_how_to_record_them(store):
    with pytest.raises(NothingToDo) as raised:
        invoke(store, "turns")
    assert "--turns" in raised.value.hint


def with_template(model, folder, template):
    folder.mkdir()
    for file in model.iterdir():
        if file.name.startswith("tokenizer"):
            (folder / file.name).write_bytes(file.read_bytes())
    config = read_json(folder / "tokenizer_config.json")
    config["chat_template"] = template or ""
    write_json(folder / "tokenizer_config.json", config)
    return str(folder)


TEMPLATES = {
    "template drops text": "{% for m in messages %}<|{{ m.role }}|>{% if not loop.last and '</think>' in m.content %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "border lost": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '' if loop.last else '\n' }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "retokenized": "{% for m in messages %}The sum{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}The su{% endif %}",
}


def test_a_template_that_only_appends_keeps_each_prefix(model, store, tokenizer):
    stored(store, conversation(tokenizer))
    answer = invoke(store, "turns --template", model)
    assert answer.exit_code == 0 and "and 1 recorded" in answer.output, answer.output


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_template_that_changes_earlier_turns_is_named(model, tmp_path, kind):
    answer = template_answer(with_template(model, tmp_path / "changed", TEMPLATES[kind]))
    assert not answer.ok and kind in {fault["rule"] for fault in answer["findings"]}, answer.sentence


def test_a_template_that_leaves_out_an_empty_answer_drops_text(model, tmp_path):
    said = "{% for m in messages if m.content %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    said += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    answer = template_answer(with_template(model, tmp_path / "leaving", said))
    assert [(fault["place"]["conversation"], fault["rule"]) for fault in answer["findings"]] == [
        ("empty answer", "template drops text")
    ]


def test_a_template_that_refuses_every_conversation_is_not_checked(model, tmp_path, tokenizer):
    refusing = with_template(model, tmp_path / "refusing", "{{ raise_exception('no') }}")
    odd = replace(conversation(tokenizer), trained=(2**30, *conversation(tokenizer).trained))
    answer = template_answer(refusing, [odd])
    assert answer.verdict == "NOT CHECKED" and len(answer["skipped"]) >= 8
    (Path(refusing) / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')
    with pytest.raises(EnvironmentProblem):
        template_answer(refusing)


def test_a_model_without_a_template_or_a_tokenizer_is_refused(model, tmp_path):
    with pytest.raises(Unsupported, match="no chat template"):
        template_answer(with_template(model, tmp_path / "none", None))
    with pytest.raises(EnvironmentProblem, match="no tokenizer"):
        template_answer(str(tmp_path))


def test_the_turns_of_agents_are_recorded_as_the_engine_got_and_sampled_them(store, monkeypatch):
    class AgentExecutorBase:
        """OpenRLHF's."""

        async def execute(self, prompt, llm_engine, hf_tokenizer):
            raise NotImplementedError

    monkeypatch.setenv("ACTORDBG_STORE", str(store.root))
    monkeypatch.setenv("ACTORDBG_RUN", "agents")
    threads, write = [], turn_recording.atomic_write
    monkeypatch.setattr(
        turn_recording, "atomic_write", lambda *given: (threads.append(threading.current_thread()), write(*given))
    )
    turn_recording.attach(SimpleNamespace(AgentExecutorBase=AgentExecutorBase))  # type: ignore[arg-type]

    class Agent(AgentExecutorBase):
        async def execute(self, prompt, llm_engine, hf_tokenizer):
            ids = [1, 2]
            for _ in range(2):
                ids += (await llm_engine.generate(list(ids), None)).outputs[0].token_ids + [7]
            return {"observation_tokens": ids, "action_ranges": [(2, 4), (5, 7)], "reward": 0.5} if prompt != "bad" else {}

    class Engine:
        async def generate(self, ids, params):
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=[len(ids), 5], text="t")])

    special = SimpleNamespace(bos_token_id=1, eos_token_id=None)
    for prompt in ("good", "bad"):
        result = asyncio.run(Agent().execute(prompt=prompt, llm_engine=Engine(), hf_tokenizer=special))
    assert result == {}
    (path,) = (store.root / "turns" / "agents").iterdir()
    trajectory = read_trajectory(path)
    assert trajectory.trained == (1, 2, 2, 5, 7, 5, 5, 7) and trajectory.bos == 1
    assert [turn.given for turn in trajectory.turns] == [(1, 2), (1, 2, 2, 5, 7)] and trajectory.reward == 0.5
    answer = turns_answer(store)
    assert answer.verdict == "NOT CHECKED" and not answer["findings"], "nothing of a training is recorded"
    assert threads and threading.main_thread() not in threads, "no disk is waited for in the event loop"


@pytest.mark.parametrize(
    "returned", [None, SimpleNamespace(outputs=[]), {"outputs": []}, SimpleNamespace(outputs=[SimpleNamespace(token_ids=[5])])]
)
@pytest.mark.parametrize("how", ["call", "remote", "a text"])
def test_a_turn_that_cannot_be_read_is_told_once_and_the_rollout_continues(store, monkeypatch, capsys, returned, how):
    class AgentExecutorBase:
        """OpenRLHF's."""

    class Agent(AgentExecutorBase):
        async def execute(self, llm_engine, hf_tokenizer):
            generate = llm_engine.generate.remote if how == "remote" else llm_engine.generate
            assert await generate(prompt_token_ids="a text" if how == "a text" else [1, 2]) is returned
            return {"observation_tokens": [1, 2, 5], "action_ranges": [(2, 3)]}

    async def generate(prompt_token_ids):
        return returned

    generate.remote = generate  # type: ignore[attr-defined]
    monkeypatch.setenv("ACTORDBG_STORE", str(store.root))
    monkeypatch.setattr(told, "_told", set())
    turn_recording.attach(SimpleNamespace(AgentExecutorBase=AgentExecutorBase))  # type: ignore[arg-type]
    for _ in range(2):
        answer = asyncio.run(Agent().execute(llm_engine=SimpleNamespace(generate=generate), hf_tokenizer=None))
        assert answer["observation_tokens"] == [1, 2, 5]
    assert not (store.root / "turns").exists() and capsys.readouterr().err.count("not recorded") == 1


@pytest.mark.parametrize("given, found, judged", [([0, 1, 2], 0, 3), ([1, 2, 0], 1, 3), ([0, 5, 2], 0, 0)])
def test_a_row_has_the_reward_of_its_conversation_unless_rewards_were_shaped(store, tokenizer, given, found, judged):
    made = [replace(conversation(tokenizer, number), reward=float(number)) for number in range(3)]
    stored(store, *made)
    record = SimpleNamespace(run="r", dump_id="d")
    about = {"is_loss": True, "root": store.root, "row_keys": [key_of(each.trained) for each in made], "record": record}

    def judge(values):
        answer = Answer(RULES[0])
        rewards([SimpleNamespace(array=lambda _: np.array(values), **about)], answer)
        return len(answer.found), answer.looked_at

    assert judge(given) == (found, judged) and judge([1.0]) == (0, 0), "one reward is not that of each row"
    stored(store, *(replace(each, number=each.number + 9, reward=9.0) for each in made))
    assert judge(given) == (0, 0), "equal conversations have unlike rewards"


@pytest.mark.parametrize("value", [None, torch.ones(2), float("nan"), "much"])
def test_a_reward_that_is_not_one_finite_number_costs_no_turns(value):
    assert turn_recording._number(value) is None and turn_recording._number(torch.tensor(0.5)) == 0.5
