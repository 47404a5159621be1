"""What coding agents read: the skill's commands exist, and `--json` is what the published schemas say."""

import json
import os
import re
import shlex
from types import SimpleNamespace

import docpages
import jsonschema
import msgspec
import pytest
from amounts import first_or_all
from commandline import run_here
from comparecases import write_replay
from replaycases import old_pickle, publish
from roots import ROOT, json_of, read_json, script
from stepcases import RecordedRun

import actordbg
from actordbg.api import reducing
from actordbg.cli.app import CONTENTS
from actordbg.cli.lazy import every_command
from actordbg.document.blocks import VerdictData
from actordbg.formats.turn_record import SampledTurn, Trajectory
from actordbg.formats.weight_syncs import EngineAnswer, SentParameter, WeightSync
from actordbg.reduce.case import DIFFERENCE, FaultCase, drawn
from actordbg.reduce.handover import Script
from actordbg.reduce.reduction import Reduction
from actordbg.reduce.trials import Fingerprint
from actordbg.steps import run_step
from actordbg.store.layout import Store

SKILL, SCHEMAS = ROOT / "docs" / "skill" / "SKILL.md", ROOT / "docs" / "reference" / "json"
COMMANDS = re.findall(r"`(actordbg [^`.(]+[^`]*)`", SKILL.read_text())
REQUIRED = ("verdict", "sentence", "figures", "not_checked", "next", "good")


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.split()[0] == "actordbg"])
def test_every_command_of_the_skill_exists(command):
    for arguments in docpages.invocations(command):
        docpages.parse(arguments)


def test_the_skill_begins_with_its_name_and_names_every_key_and_every_schema():
    text = SKILL.read_text()
    assert re.match(r"---\nname: actordbg\ndescription: .+\n---\n", text)
    assert [key for key in REQUIRED if f"`{key}`" not in text] == []
    assert [
        path.name for path in SCHEMAS.glob("*.json") if path.name not in text and path.name != "replay-spec.schema.json"
    ] == []


def as_schema_says(name, record):
    jsonschema.validate(record, read_json(SCHEMAS / f"{name}.schema.json"))


@pytest.mark.forked
def test_the_api_returns_what_the_commands_print_by_the_schemas_and_next_is_a_command(tmp_path, capfd):
    publish(Store(tmp_path / "store").create(), 1, length=24)
    steps = []
    store = actordbg.open(tmp_path / "store", on_progress=lambda count, note="", total=None: steps.append(count))
    answers = {
        "laws": store.replay(max_inputs=1, laws=1, backward=False),
        "matrix": store.matrix(max_inputs=1, packing=[True], attn=["eager"], compile=[False], backward=False),
        "compare": store.compare("@1", "truth"),
    }
    assert capfd.readouterr() == ("", "") and sum(steps) >= 3
    for name, answer in answers.items():
        assert [key for key in REQUIRED if key not in answer] == [], name
        msgspec.convert(answer.record, VerdictData)
        as_schema_says("answer", answer.record)
        for arguments in docpages.invocations(answer.next):
            docpages.parse(arguments)
    assert all(answer.ok for answer in answers.values()) and answers["laws"]["laws"]["inputs"] == 1
    assert answers["compare"].verdict == "RIGHT" and "<main" in answers["matrix"].to_html()
    as_schema_says("matrix", answers["matrix"]["matrix"])
    as_schema_says("comparison", answers["compare"].record)
    printed = run_here("--store", store.folder, "compare", "@1", "truth", "--json")
    ours = json_of(printed)
    assert ours.keys() == answers["compare"].record.keys() and ours["sentence"] == answers["compare"].sentence
    told = json_of(run_here("--store", store.folder, "report", "@1", "-f", "json"))
    assert told["replays"][0]["command"].startswith("actordbg ")


@pytest.mark.forked
@pytest.mark.parametrize("fault", first_or_all(["not_a_number", "packing"]))
def test_a_planted_fault_is_named_within_five_commands_that_the_answers_give(fault, tmp_path, monkeypatch):
    """`examples/agent_walk.py` walks six in processes of their own."""
    from examples import agent_walk

    def ask(folder, command):
        words = [*shlex.split(command)[1:], "--json"]
        answer = json_of(run_here("--store", folder / "store", *words))
        return answer

    monkeypatch.setattr(agent_walk, "ask", ask)
    assert 1 <= agent_walk.walk(tmp_path, agent_walk.FAULTS[fault]) <= agent_walk.MOST


WALK = """
dump create --count 3 --batch-size 1 --seq-len 16 --vocab-size 90 --run made
dump create --count 1 --seq-len 8 --run spare
dump import PICKLES
dump enable --run live
dump disable
dump status
dump ls
dump columns
dump show last
dump verify
dump export --out OUT/exported --where "run='made'"
dump pack
dump unpack --all
dump recover
dump prune --where "run='spare'" --yes
index
store fsck
status --target ACTOR
patch --target ACTOR --dry-run
unpatch --target ACTOR --dry-run
doctor --quick
adapters plain
actor init --batch-size 1 --seq-len 8
lint
replay --where "run='made'" --dry-run
check --where "run='made'" --max-inputs 1 --no-backward --num-layers 1
replay --where "run='made'" --max-inputs 1 --no-backward --num-layers 1
replay ls
locate last
explain last
compare last truth
report last
report --all
bundle last --out OUT/bundle.tar.zst
noise --where "seq_len>999" --allow-empty
matrix --max-inputs 1 --attn eager --packing on --compile off --dry-run
train-check --max-inputs 1 --backend plain --steps 2 --dry-run
compare-logs LOG LOG
memory watch --pid PID --for 300ms --interval 100ms -o OUT/a.csv
memory compare OUT/a.csv OUT/a.csv
"""
"""Every command with --json, but those of `RECORDED`."""
RECORDED = """
weights
turns
step --step 4 --model MODEL
reduce last
repro last --out OUT/repro.py
store push OUT/store memory://walk
store pull memory://walk OUT/pulled
run --run walk -- true
"""
"""Commands that need a recorded run, a wrong replay or a remote store."""
TAKING = {name: entry for name, entry in every_command(CONTENTS) if "json" in entry.outputs.split()}


def walk(store, lines, names):
    """Run each line with --json, and check its answer. names: what stands for words of the lines. Returns the commands."""
    walked = set()
    for line in lines.strip().splitlines():
        words = shlex.split(re.sub("|".join(names), lambda match: str(names[match[0]]), line))
        own = words.index("--") if "--" in words else len(words)
        done = run_here("--store", store, *words[:own], "--json", *words[own:])
        printed = done.stdout or done.stderr[done.stderr.find("{") :]  # `run` leaves standard output to its job
        assert done.exit_code in (0, 1, 4) and printed, (line, done.output, done.exception)
        answer = json.loads(printed)
        if isinstance(answer, dict) and "good" in answer:
            assert (done.exit_code == 0) is answer["good"], (line, "the exit code is not what `good` says")
        walked.add(name := next(name for end in (3, 2, 1) if (name := " ".join(words[:end])) in TAKING or name == "run"))
        if name in TAKING and "csv" in TAKING[name].outputs.split() and not isinstance(answer, dict):
            continue
        assert {"verdict", "sentence", "next"} <= answer.keys() and answer["sentence"], (line, answer)
        as_schema_says("answer", answer)
        for arguments in docpages.invocations(answer["next"]):
            docpages.parse(arguments)
    return walked


@pytest.mark.forked
def test_every_answer_has_a_verdict_a_sentence_and_the_next_command(tmp_path):
    old_pickle(tmp_path / "pickles")
    actor = script(
        tmp_path / "actor.py", "class Actor:\n    def forward(self, sequences, attention_mask=None):\n        return 1\n"
    )
    (tmp_path / "loss.log").write_text("".join(f"{{'loss': {1 / step}, 'step': {step}}}\n" for step in range(1, 6)))
    names = {"PICKLES": tmp_path / "pickles", "OUT": tmp_path, "ACTOR": actor, "LOG": tmp_path / "loss.log", "PID": os.getpid()}
    walked = walk(tmp_path / "store", WALK, names)
    assert (
        TAKING.keys() - walked
        == {" ".join(line.split()[: 1 + line.startswith("store")]) for line in RECORDED.strip().splitlines()} & TAKING.keys()
    )


def test_so_have_the_answers_about_recorded_runs_and_faults(tmp_path, monkeypatch):
    """Nothing is replayed or reduced: the workers of `step` give nothing, and the reduction is made up."""
    run = RecordedRun(Store(tmp_path / "store").create(), tmp_path / "model")
    run.write()
    when = "2026-01-01T00:00:00.000000Z"
    sent = SentParameter("bfloat16", (2, 3), "a" * 64, "a" * 64, (EngineAnswer(True, "b" * 64, 1),))
    turn = Trajectory("ppo", "h", 1, 0, when, 1, 2, (SampledTurn((1, 5), (6, 2), "x"),), (1, 5, 7, 2), ((2, 4),))
    for folder, record in (("syncs", WeightSync("ppo", 0, "h", 1, 0, 4, when, 0.1, 1, {"lm_head": sent})), ("turns", turn)):
        path = run.store.root / folder / "ppo" / record.name
        path.parent.mkdir(parents=True)
        path.write_text(record.to_json())
    write_replay(run.store, "20260101T000000-aaaaaa", publish(run.store, 1))
    case = FaultCase(DIFFERENCE, rows=drawn((3, 4), 9), config={"model_type": "llama"})
    reduction = Reduction("20260101T000000-aaaaaa", when, Fingerprint(DIFFERENCE, "x"), case, "", 1, 1.0, True, True, True)
    monkeypatch.setattr(reducing, "reduced", lambda *what: reduction)
    monkeypatch.setattr(reducing, "script_of", lambda *what: Script("print()", "row 1: WRONG"))
    nothing = lambda *what, folder, **more: SimpleNamespace(results={}, resolved=None, folder=folder)  # noqa: E731
    monkeypatch.setattr(run_step, "run_replay", nothing)
    monkeypatch.setattr("actordbg.api.desk.require_model", lambda *what: None)
    assert "step" in walk(run.store.root, RECORDED, {"MODEL": run.model, "OUT": tmp_path})
