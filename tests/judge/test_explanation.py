"""`actordbg explain`: what, where, since when and what to do, from made-up replays; no worker starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from comparecases import given, publish_golden, write_replay
from typer.testing import CliRunner

from actordbg.cli.app import app
from actordbg.compare.comparing import compare
from actordbg.document.blocks import Verdict
from actordbg.judge.check import CheckedReplay, located_spec, run_check
from actordbg.judge.explanation import WHAT, explain
from actordbg.laws.rules import of_answer
from actordbg.records.comparison_record import ExplainedOutputs, NamedCause
from actordbg.records.locate_record import Located, ModelIdentity, PlaceResult
from actordbg.records.replay_record import LawAnswer
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store

INPUTS = [given(index, batch=4) for index in range(3)]
LAW = {"law": "padding", "verdict": "broken", "words": "a real token depends on the padding"}
DIFFERS = "model.norm.variance_epsilon is 0.001; transformers' model from this checkpoint has 1e-06"
PLACE = PlaceResult("lm_head", "out", "lm_head", 4.34, 1.1, rows=(0, 1), of_rows=2, tokens=3, of_tokens=9, position=7)


def located(*places: PlaceResult, differences: tuple[str, ...] = ()) -> dict[str, Any]:
    heat = {"heat": {"model.layers.0": (1.0, 1.1), "lm_head": (4.0, 9.0)}, "fields": ((0, 0, 3), (0, 4, 8))} if places else {}
    identity = ModelIdentity(116, len(differences), differences, ran=True)
    judged = Located(49, places, len(places), largest=1.01, dtype="bfloat16", **heat)  # type: ignore[arg-type]
    return {
        "temperature": 1.0,
        "identity": [vars(identity)],
        "located": vars(judged) | {"wrong": [vars(each) for each in places]},
    }


def rows_behind_the_first(_index: int, made: dict[str, Any]) -> dict[str, Any]:
    made["log_probs"][1:] += 0.1
    return made


def later(index: int, made: dict[str, Any]) -> dict[str, Any]:
    return made | {"log_probs": made["log_probs"] + 0.1 * (index > 0)}


def explained(store: Store, code: int, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["--store", str(store.root), "explain", "--json", *options])
    assert done.exit_code == code, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


CASES: list[tuple[dict[str, Any], str, dict[str, str]]] = [
    ({}, "RIGHT", {"ruled_out": "116 parameters, buffers, ties and attributes: the checkpoint's, bit for bit",
                   "not_checked": "gradients (--backward)"}),
    ({"change": rows_behind_the_first, "packing": True}, "WRONG",
     {"what": "3 of 3 dumps differ from the truth by more than fp32 rounding", "since": "the first recorded input: all 3 are wrong",
      "where": "wrong tokens: behind another row of the pack: 54 of 54 wrong tokens; fits as well: rows >= 1", "to_do": "--no-packing"}),
    ({"change": later}, "WRONG", {"what": "no cause is known", "since": f"{INPUTS[1].dump_id}: the 1 recorded before is right, all from",
                                  "where": "wrong tokens: no rule"}),
    ({"extra": located(differences=(DIFFERS,))}, "WRONG", {"what": DIFFERS, "to_do": "find what sets it after the checkpoint is loaded",
                                                           "ruled_out": "all 49 places"}),
    ({"extra": located(PLACE)}, "WRONG", {"what": "lm_head is 4.34 times as far", "to_do": "read the code that lm_head runs",
                                          "ruled_out": "48 of 49 places"}),
    ({"extra": located() | {"laws": [LAW, {"law": "state", "verdict": "kept"}]}}, "WRONG",
     {"what": "padding broken", "to_do": "pass the attention mask", "ruled_out": "laws that hold in 3 inputs: state"}),
    ({"status": {"status": "failed", "error_class": "torch.OutOfMemoryError", "error": "CUDA out of memory. Tried to allocate",
                 "signature": "cuda-out-of-memory"}}, "FAILED", {"what": "cuda-out-of-memory (3 inputs): ", "to_do": "--packing"}),
]  # fmt: skip


@pytest.mark.parametrize(("replayed", "word", "sentences"), CASES)
def test_causes_places_and_what_was_ruled_out_are_named(
    store: Store, replayed: dict[str, Any], word: str, sentences: dict[str, str]
) -> None:
    shown = set(replayed)
    extra, status = replayed.pop("extra", located()), replayed.pop("status", {})
    write_replay(store, "r-01", INPUTS, result=lambda _: {"extra": extra} | status, **replayed)
    for name, dtype in (("r-02", "fp64"), ("r-03", "fp32")):
        write_replay(store, name, INPUTS, truth=dtype)
    run_check(store, load_spec(store, "r-01"))
    answer = explained(store, int(word != "RIGHT"), "r-01")
    assert answer["verdict"] == word, answer["sentence"]
    for kind, text in sentences.items():
        assert any(text in said for said in answer["explanation"][kind]), (kind, answer["explanation"])
    if word == "RIGHT":
        assert answer["explanation"]["what"] == answer["explanation"]["to_do"] == answer["explanation"]["where"] == []
    else:
        assert answer["explanation"]["what"][0] in answer["sentence"] or word == "FAILED"
        assert "actordbg explain" not in answer["next"]
    if "packing" in replayed:
        compared = CliRunner().invoke(app, ["--store", str(store.root), "compare", "r-01", "truth"]).stdout
        assert "Wrong tokens: behind another row of the pack: 54 of 54" in compared and "next: actordbg explain r-01" in compared
    if "extra" in shown:  # the log-probs are within rounding
        assert not any("worst token" in said for said in answer["explanation"]["where"])
    if extra["located"]["wrong"]:
        assert answer["figures"][0] == ["error at lm_head", "4.3 times a healthy model's"], "the figure that decides comes first"
    assert len(answer["charts"]) == int(PLACE.what in answer["sentence"])
    text = CliRunner().invoke(app, ["--store", str(store.root), "explain", "r-01", "--format", "md"]).stdout
    assert len(re.findall(r"not checked: |### Not checked", text)) == 1, "what was not checked is said once"


def test_what_the_store_lacks_is_computed_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with the truth, and the modules of one input."""
    ran: list[str] = []

    def run_located(desk: Any, spec: Any, command: str, item: Any = None) -> Any:
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
        path.write_text(json.dumps(json.loads(path.read_text()) | {"locate": 1}))
        there = load_spec(store, "r-04")
        return there, data_of(store, there).results

    monkeypatch.setattr("actordbg.api.explaining.run_located", run_located)
    write_replay(store, "r-01", INPUTS, keep_tensors=True)
    for name, dtype in (("r-02", "fp64"), ("r-03", "fp32")):
        write_replay(store, name, INPUTS, truth=dtype, keep_tensors=True)
    first, again = (explained(store, 1) for _ in range(2))  # the last replay is not the one that explain started
    assert first["explanation"] == again["explanation"] and ran == [INPUTS[0].dump_id]
    assert "lm_head is 4.34 times" in first["sentence"] and len(list(store.comparisons.iterdir())) == 1
    refused: Callable[..., Any] = CliRunner().invoke
    assert "itself a truth" in str(refused(app, ["--store", str(store.root), "explain", "r-02"]).exception)


def test_the_runs_own_outputs_are_a_side_of_their_own(store: Store) -> None:
    inputs, made = publish_golden(store, 2)
    made[0]["log_probs"][1, 0] -= 1.5
    truth: Any = {
        "model": "/m",
        "change": lambda index, _: made[index],
        "result": lambda _: {"extra": located(), "folded_ids": False},
    }
    met = {"met_weights": {"same": [7], "other": {}, "unknown": 0}}  # else other weights would explain it
    write_replay(store, "r-01", inputs, resolved=met, **truth)
    for name, dtype in (("r-02", "fp64"), ("r-03", "fp32")):
        write_replay(store, name, inputs, truth=dtype, **truth)
    run_check(store, load_spec(store, "r-01"), recorded=True)
    answer = explained(store, 1, "r-01")
    assert answer["explanation"]["sides"] == ["A", "run"] and "the run's outputs" in answer["explanation"]["what"][0]


def test_causes_that_were_fitted_to_recorded_outputs_come_with_their_remedies(store: Store) -> None:
    inputs, made = publish_golden(store, 2)
    made[0]["log_probs"][1, 0] -= 1.5
    write_replay(store, "r-01", inputs, model="/m", change=lambda index, _: made[index], result=lambda _: {"folded_ids": False})
    record = compare(store, "r-01", "recorded")
    cause = NamedCause("temperature", "temperature 0.7 was not applied", "send the temperature to the engine", "verl#1", left=0.0)
    record = replace(record, explained=ExplainedOutputs(0.1, 0.0, 9, 2, causes=(cause,)))
    check = CheckedReplay(data_of(store, load_spec(store, "r-01")), own=record)
    why = explain(store, check, check.verdict(of=2, explained=True)).data
    assert why["what"][0].startswith("recorded log-probs: temperature 0.7 was not applied")
    assert why["to_do"] == ["send the temperature to the engine (verl#1)"]


def test_the_first_broken_law_comes_first_where_a_later_dump_breaks_fewer(store: Store) -> None:
    broken = [("a", "neighbour"), ("a", "future"), ("a", "jacobian"), ("b", "neighbour"), ("b", "future")]
    violations = [of_answer(dump, LawAnswer(law, "broken", law)) for dump, law in broken]
    write_replay(store, "r-01", INPUTS)
    check = CheckedReplay(data_of(store, load_spec(store, "r-01")))
    why = explain(store, check, Verdict("WRONG", "", findings=violations))
    assert [said.partition(" ")[0] for said in why.lines[WHAT]] == ["neighbour", "future", "jacobian"]
    assert why.lines["to do"] == [violations[0].todo], "the first explains the others"
