"""`actordbg explain`: what, where, since when and what to do, from made-up replays; no worker starts."""

import re
from dataclasses import replace

from commandline import invoke
from comparecases import given, publish_golden, write_replay, write_truths
from roots import json_of, read_json, write_json
from typer.testing import CliRunner

from actordbg.causes.bank import all_causes
from actordbg.cli.app import app
from actordbg.compare.comparing import compare, save
from actordbg.document.blocks import Verdict
from actordbg.judge.check import CheckedReplay, located_spec, run_check
from actordbg.judge.explanation import WHAT, explain
from actordbg.laws.rules import of_answer
from actordbg.records.comparison_record import ExplainedOutputs, NamedCause
from actordbg.records.locate_record import Located, ModelIdentity, PlaceResult
from actordbg.records.replay_record import LawAnswer
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import load_spec

INPUTS = [given(index, batch=4) for index in range(3)]
PLACE = PlaceResult("lm_head", "out", "lm_head", 4.34, 1.1, rows=(0, 1), of_rows=2, tokens=3, of_tokens=9, position=7)


def located(place):
    heat = {"heat": {"model.layers.0": (1.0, 1.1), "lm_head": (4.0, 9.0)}, "fields": ((0, 0, 3), (0, 4, 8))}
    judged = Located(49, (place,), 1, largest=1.01, dtype="bfloat16", **heat)  # type: ignore[arg-type]
    identity = ModelIdentity(116, 0, (), ran=True)
    return {"temperature": 1.0, "identity": [vars(identity)], "located": vars(judged) | {"wrong": [vars(place)]}}


def rows_behind_the_first(_index, made):
    made["log_probs"][1:] += 0.1
    return made


def explained(store, code, *options):
    done = invoke(store, "explain --json", *options)
    assert done.exit_code == code, done.output
    answer = json_of(done)
    return answer


def test_the_command_says_why_and_where_and_what_was_not_checked_once(store):
    """`checks.test` has the sentences."""
    write_replay(store, "r-01", INPUTS, result=lambda _: {"extra": located(PLACE)}, change=rows_behind_the_first, packing=True)
    write_truths(store, INPUTS)
    run_check(store, load_spec(store, "r-01"))
    answer = explained(store, 1, "r-01")
    why = answer["explanation"]
    assert answer["verdict"] == "WRONG" and why["what"][0] in answer["sentence"] and "actordbg explain" not in answer["next"]
    assert len(answer["charts"]) == 1 and answer["figures"][0][0].startswith("max diff from the truth")
    assert any("worst token" in said for said in why["where"])
    compared = invoke(store, "compare r-01 truth").stdout
    assert "Wrong tokens: behind another row of the pack: 54 of 54" in compared and "next: actordbg explain r-01" in compared
    text = invoke(store, "explain r-01 --format md").stdout
    assert len(re.findall(r"not checked: |### Not checked", text)) == 1


def test_what_the_store_lacks_is_computed_once(store, monkeypatch):
    """The comparison with the truth, and the modules of one input."""
    ran = []

    def run_located(desk, spec, command, item=None):
        one = located_spec(spec, [item or spec.inputs[0]])
        ran.append(one.inputs[0].dump_id)
        settings = {name: value for name, value in vars(one.config).items() if name != "dtype"} | {"dtype": "fp32"}
        write_replay(
            store,
            "r-04",
            one.inputs,
            result=lambda _: {"extra": located(PLACE)},
            versions=one.versions,
            command=command,
            **settings,
        )
        path = store.replays / "r-04" / "spec.json"
        write_json(path, read_json(path) | {"locate": 1})
        there = load_spec(store, "r-04")
        return there, data_of(store, there).results

    monkeypatch.setattr("actordbg.api.explaining.run_located", run_located)
    write_replay(store, "r-01", INPUTS, keep_tensors=True)
    write_truths(store, INPUTS, keep_tensors=True)
    first, again = (explained(store, 1) for _ in range(2))  # the last replay is not the one that explain started
    assert first["explanation"] == again["explanation"] and ran == [INPUTS[0].dump_id]
    assert "lm_head is 4.34 times" in first["sentence"] and len(list(store.comparisons.iterdir())) == 1
    refused = CliRunner().invoke
    assert "itself a truth" in str(refused(app, ["--store", str(store.root), "explain", "r-02"]).exception)


def test_the_runs_own_outputs_are_a_side_of_their_own(store):
    inputs, made = publish_golden(store, 2)
    made[0]["log_probs"][1, 0] -= 1.5
    truth = {
        "model": "/m",
        "change": lambda index, _: made[index],
        "result": lambda _: {"folded_ids": False},
    }
    met = {"met_weights": {"same": [7], "other": {}, "unknown": 0}}  # else other weights would explain it
    write_replay(store, "r-01", inputs, resolved=met, **truth)
    write_truths(store, inputs, **truth)
    run_check(store, load_spec(store, "r-01"), recorded=True)
    answer = explained(store, 1, "r-01")
    assert answer["explanation"]["sides"] == ["A", "run"] and "the run's outputs" in answer["explanation"]["what"][0]


def written_apart(store):
    """The inputs of a replay that is far from what the run recorded, and what it computed."""
    inputs, made = publish_golden(store, 2)
    made[0]["log_probs"][1, 0] -= 1.5
    write_replay(store, "r-01", inputs, model="/m", change=lambda index, _: made[index], result=lambda _: {"folded_ids": False})
    return inputs, made


def test_causes_that_were_fitted_to_recorded_outputs_come_with_their_remedies(store):
    written_apart(store)
    record = compare(store, "r-01", "recorded")
    cause = NamedCause("temperature", "temperature 0.7 was not applied", "send the temperature to the engine", "verl#1", left=0.0)
    record = replace(record, explained=ExplainedOutputs(0.1, 0.0, 9, 2, causes=(cause,)))
    check = CheckedReplay(data_of(store, load_spec(store, "r-01")), own=record)
    why = explain(store, check, check.verdict(of=2, explained=True)).data
    assert why["what"][0].startswith("recorded log-probs: temperature 0.7 was not applied")
    assert why["to_do"] == ["send the temperature to the engine (verl#1)"]


def test_causes_of_an_earlier_bank_are_searched_for_again(store, monkeypatch):
    inputs, made = written_apart(store)
    write_truths(store, inputs, change=lambda index, _: made[index])
    record, asked = compare(store, "r-01", "recorded"), []
    monkeypatch.setattr(
        "actordbg.api.comparing.with_explanation", lambda store, record, **_: asked.append(record.explained.bank) or record
    )
    for bank in ("of another", all_causes()):
        save(store, replace(record, explained=ExplainedOutputs(0.1, 0.0, 9, 2, unknown=True, bank=bank)))
        explained(store, 1, "r-01")
    assert asked == ["of another"]


def test_the_first_broken_law_comes_first_where_a_later_dump_breaks_fewer(store):
    broken = [("a", "neighbour"), ("a", "future"), ("a", "jacobian"), ("b", "neighbour"), ("b", "future")]
    violations = [of_answer(dump, LawAnswer(law, "broken", law)) for dump, law in broken]
    write_replay(store, "r-01", INPUTS)
    check = CheckedReplay(data_of(store, load_spec(store, "r-01")))
    why = explain(store, check, Verdict("WRONG", "", findings=violations))
    assert [said.partition(" ")[0] for said in why.lines[WHAT]] == ["neighbour", "future", "jacobian"]
    assert why.lines["to do"] == [violations[0].todo], "the first explains the others"
