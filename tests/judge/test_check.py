"""`actordbg check`: the word, what it leaves out, and what other programs get of it. One test runs a model."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import brokenactor
import pytest
from casefiles import cases_of, json_cases
from commandline import in_json, invoke, tried
from comparecases import given, publish_golden, write_replay, write_truths
from hostilestore import HOSTILE, forbidden
from replaylines import write_replays

from actordbg.base.errors import MachineFault, Unsupported
from actordbg.catalog.query import get_replay, open_fresh, select_dumps
from actordbg.compare.comparing import compare, save
from actordbg.dumps.create import create_dumps
from actordbg.formats.nested_values import RUN_ON
from actordbg.judge import check
from actordbg.judge.check import CheckedReplay, check_data, run_check
from actordbg.judge.explanation import NOT_CHECKED, explain
from actordbg.judge.exports import junit_xml, workflow_commands
from actordbg.judge.load_replays import load
from actordbg.judge.replay_findings import Judged, explained_outputs
from actordbg.judge.verdicts import replay_verdict
from actordbg.records.comparison_record import ComparisonRecord, ExplainedOutputs, NamedCause
from actordbg.records.locate_record import ROUNDED
from actordbg.replay.replay_data import data_of
from actordbg.replay.supervise import load_spec

INPUTS = [given(index) for index in range(3)]
KINDS = {f"actordbg.{kind}" for kind in ("replay", "laws", "modules", "truth")}
LAW = {"law": "neighbour", "verdict": "broken", "words": "row 1 depends on row 0", "row": 1, "position": 3}


@pytest.fixture(autouse=True)
def a_cause(monkeypatch):
    """Nothing is fitted: each search finds this cause."""

    def found(_store, record, **_):
        return replace(record, reasons=("log-probs: a cause", *record.reasons))

    monkeypatch.setattr(check, "with_explanation", found)


def checked(store, truth=True, **replayed):
    """A check of a replay and a truth that are there, so that no worker starts."""
    write_replay(store, "r-01", INPUTS, **replayed)
    if truth:
        write_truths(store, INPUTS)
    found = run_check(store, load_spec(store, "r-01"))
    return found, found.verdict(of=257)


def test_a_comparison_with_the_truth_knows_what_the_model_is(store):
    """Outputs within rounding are WRONG if the model is not the checkpoint's; a model that nobody looked at is named."""
    rounded = {"name": "model.rotary_emb.inv_freq", "kind": ROUNDED, "said": "model.rotary_emb.inv_freq was rounded to bf16"}
    differs = IDENTITY | {"count": 1, "differences": [rounded]}
    changed = {"extra": {"temperature": 1.0, "identity": [differs], "located": LOCATED}}
    write_replay(store, "r-04", INPUTS, result=lambda index: changed)
    write_replay(store, "r-05", INPUTS)
    write_replay(store, "r-07", INPUTS, result=lambda index: changed, change=off)
    write_replay(store, "r-06", INPUTS, truth="fp64")
    wrong, unknown = (compare(store, name, "r-06") for name in ("r-04", "r-05"))
    assert wrong.verdict == "mismatch" and "inv_freq" in wrong.reasons[0] and not wrong.left
    assert unknown.good and "actordbg locate r-05" in unknown.unjudged[0].text
    save(store, wrong)
    save(store, compare(store, "r-07", "r-06"))
    for summary in load(store, ["r-04", "r-07"]).summary().replays:
        said = replay_verdict(Judged(summary), reported=True)
        assert said.word == "WRONG" and "ZeRO-3" in said.details[-1], "the replay's own report says the same, and what to do"
        assert said.told.count("was rounded") == 1


def test_a_cause_that_was_fitted_is_named_beside_a_broken_law(store, monkeypatch):
    cause = NamedCause("temperature", "temperature 0.9 was applied", "", "", left=0.0)
    explained = ExplainedOutputs(0.1, 1e-6, tokens=9, dumps=1, causes=(cause,), what="log-probs")
    monkeypatch.setattr(check, "with_explanation", lambda _store, record, **_: replace(record, explained=explained))
    _, answer = checked(store, change=off, result=lambda index: LAWLESS)
    assert answer.word == "WRONG" and LAW["words"] in answer.sentence and cause.said in answer.sentence


def off(index, made):
    return made | {"log_probs": made["log_probs"] + 0.1 * (index == 1)}


LAWLESS = {"extra": {"temperature": 1.0, "laws": [LAW]}}


IDENTITY = {"looked_at": 116, "differences": [], "unchecked": [], "rank": 0, "ran": True}
LOCATED = {"places": 49, "wrong": [], "count": 0, "unchecked": [], "dtype": "bfloat16"}


CASES = cases_of("checks")


def answered(store, lines):
    """What a check says of the replay that lines of `checks.test` write, and what an explanation of it says."""
    inputs, text = [given(index, batch=4) for index in range(3)], "\n".join(lines)
    for name, dtype in (("r-02", "fp64"), ("r-03", "fp32")):
        if f"replay {name}" not in text:
            write_replay(store, name, inputs, truth=dtype)
    write_replays(store, lines, inputs)
    found = run_check(store, load_spec(store, "r-01"))
    answer = found.verdict(of=257, recorded="org/a model")
    assert answer.good == (answer.word == "RIGHT")
    for path in store.comparisons.glob("*.json"):
        furthest = ComparisonRecord.from_file(path).furthest
        assert check_data(found, answer, of=257)["max_abs"] == (furthest and pytest.approx(furthest[0]))
    why = explain(store, found, found.verdict(of=257, explained=True))
    figures = [f"{name}: {value}" for name, value in answer.figures]
    said = [f"{kind}: {each}" for kind, each_of in why.lines.items() if kind != NOT_CHECKED for each in each_of]
    return [answer.sentence, f"next: {answer.next}", *figures, *(f"chart: {chart.title}" for chart in why.charts), *said]


@pytest.mark.parametrize("case", CASES)
def test_a_check_says_what_is_wrong_what_was_not_judged_and_why(store, case):
    assert answered(store, CASES[case].given) == CASES[case].expected


def test_rows_that_may_be_packed_ones_are_named_beside_a_right_replay(store):
    for name, truth in (("r-01", None), ("r-02", "fp64"), ("r-03", "fp32")):
        write_replay(store, name, INPUTS, truth=truth, result=lambda index: {"extra": {"notes": [RUN_ON] * (index == 1)}})
    verdict = run_check(store, load_spec(store, "r-01")).verdict(of=3)
    assert verdict.word == "RIGHT" and any("1 dump" in each.said and "restart" in each.said for each in verdict.not_checked)


def test_what_a_run_recorded_and_nobody_asked_about_comes_next(store):
    apart = {"golden_count": 8, "golden_max_abs": 0.7, "golden_mean_abs": 0.5}
    for name, truth in (("r-01", None), ("r-02", "fp64"), ("r-03", "fp32")):
        other = {"recorded_model": "org/recorded"}
        write_replay(store, name, INPUTS, model="/m", truth=truth, result=lambda index: apart, resolved=other)
    answer = run_check(store, load_spec(store, "r-01")).verdict(of=257)
    assert "whether this is the recorded model (org/recorded)" in answer.left
    assert answer.word == "RIGHT" and "the recorded log-probs, 0.5 nats from these on average" in answer.left
    assert answer.next == "actordbg compare r-01 recorded"


@pytest.mark.parametrize("asked, following", [({}, "actordbg matrix"), ({"packing": True}, "")])
def test_a_right_check_leads_to_a_matrix_unless_that_led_to_it(store, asked, following):
    """A run that was packed, or a machine with flash attention, is the usual configuration there, and nobody chose it."""
    for name, truth in (("r-01", None), ("r-02", "fp64"), ("r-03", "fp32")):
        write_replay(store, name, INPUTS, model="/m", truth=truth, resolved={"packing": True}, **asked)
    answer = run_check(store, load_spec(store, "r-01")).verdict(of=257)
    assert answer.word == "RIGHT" and answer.next.startswith(following) and bool(answer.next) == bool(following), answer.next


def test_ranks_that_differ_on_the_same_inputs_are_wrong_and_named(store):
    lane = {"extra": {"temperature": 1.0, "lane": {"differ": {"1": {"output_digest": "other"}}}}}
    write_replay(store, "r-01", INPUTS, result=lambda index: lane, nproc=2, align="same")
    same = CheckedReplay(data_of(store, load_spec(store, "r-01"))).verdict(of=3)
    assert (same.word, same.good) == ("WRONG", False)
    assert same.said.endswith(f"{INPUTS[0].dump_id}: rank 1 has other log-probs than rank 0")


def test_a_truth_that_cannot_be_computed_says_why(store, monkeypatch):
    def no_truth(*_, **__):
        raise Unsupported("no row has a truth")

    monkeypatch.setattr("actordbg.judge.check.ensure_truth", no_truth)
    _, answer = checked(store, truth=False)
    assert answer.sentence.endswith("none could be compared with the truth: no row has a truth")


@pytest.mark.parametrize("recorded, result", json_cases("run_outputs"))
def test_what_the_training_run_got_is_judged_where_it_was_asked_for(store, recorded, result):
    """A replay and a truth that agree, and dumps with what the training run itself got, of which one figure is off. outputs:
    whether they have it; "known": the weights were recorded, and are the model's. Other weights may explain what has no cause.
    """
    (log_prob, entropy, outputs), (word, said) = recorded, result
    inputs, made = publish_golden(store, 2, bool(outputs))
    made[0]["log_probs"][1, 0] -= log_prob
    for tensors in made:
        tensors["entropy"][1, 0] -= entropy
    truth = {"model": "/m", "change": lambda index, _: made[index], "result": lambda index: {"folded_ids": False}}
    met = {"met_weights": {"same": [7], "other": {}, "unknown": 0}} if outputs == "known" else {}
    write_replay(store, "r-01", inputs, resolved=met, **truth)
    write_truths(store, inputs, **truth)
    answer = run_check(store, load_spec(store, "r-01"), recorded=True).verdict(of=2)
    assert answer.word == word and said in answer.sentence
    dumps = {row.verdict for row in select_dumps(open_fresh(store), None)}
    assert word in dumps, "a dump's last verdict is that of the check"
    assert word == "WRONG" or dumps == {word}
    if word == "WRONG":
        assert answer.next == "actordbg explain r-01"
        assert answer.figures[0][0].startswith("max diff from the run's"), "the failing figure is the first"
        assert "has the weights of that step" not in answer.left


def test_recorded_outputs_are_the_trainers_unless_the_model_may_be_another():
    for cause, side in {"temperature": "trainer", "weights": ""}.items():
        known = ExplainedOutputs(1, 0, 9, 1, (NamedCause(cause, "why", "", ""),))
        assert explained_outputs(SimpleNamespace(explained=known, b=SimpleNamespace(kind="golden")))[0].side == side


def test_other_programs_get_every_failure_as_text(store):
    hostile = {"status": "failed", "error_class": "E", "error": f"100% {HOSTILE}\ufffe", "log_excerpt": HOSTILE}
    found, answer = checked(store, change=off, result=lambda index: hostile if index == 0 else {})
    suite = ElementTree.fromstring(junit_xml(found, answer)).find("testsuite")
    assert suite is not None and (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("5", "2", "0")
    failures = {case.get("classname"): case.find("failure") for case in suite if case.find("failure") is not None}
    assert failures.keys() == {"actordbg.replay", "actordbg.truth"}
    assert forbidden("".join(suite.itertext()) + str([case.attrib for case in suite.iter()])) == []
    lines = list(workflow_commands(found, answer))
    assert [line.partition(" ")[0] for line in lines] == ["::error", "::error", "::error"]
    assert "100%25" in lines[0] and all("\n" not in line and forbidden(line) == [] for line in lines)


@pytest.mark.forked
def test_a_full_disk_is_an_environment_error_of_a_check_and_no_dumps_failure(store, tmp_path, monkeypatch):
    full = tmp_path / "full"
    full.touch()
    faulty = brokenactor.environment(tmp_path / "fault", brokenactor.FULL_DISK) | {"FULL_DISK": str(full)}
    for name, value in faulty.items():
        monkeypatch.setenv(name, value)
    create_dumps(store, 2, batch_size=1, seq_len=24, vocab_size=4096, seed=1)
    said = tried(store, "check --quiet").exception
    assert isinstance(said, MachineFault) and said.exit_code == 4
    replay_id = load_spec(store, "last").replay_id
    assert said.message.startswith(f"No space left on device ({store.replays / replay_id} has ")
    full.unlink()
    assert said.hint == f"fix that, then `actordbg replay --resume {replay_id}` continues"
    done = invoke(store, "replay --resume", replay_id, "--quiet")
    assert done.exit_code == 0 and "2 of 2 dumps passed" in done.stdout, done.output


@pytest.mark.forked
def test_own_dumps_come_to_a_verdict_in_one_command(store, tmp_path, monkeypatch):
    def actordbg(*words, code=0):
        monkeypatch.setattr(sys, "argv", ["actordbg", "check", *words])
        done = tried(store, "check", *words)
        assert getattr(done.exception, "exit_code", done.exit_code) == code, done.output
        return done

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    create_dumps(store, 4, batch_size=2, seq_len=24, vocab_size=4096, seed=1)
    assert "nothing to check: no dump matches" in str(actordbg("--where", "seq_len>99", code=5).exception)
    assert "/nowhere is not a folder" in str(actordbg("--junit", "/nowhere/x.xml", code=4).exception)
    said = actordbg("--max-inputs", "2", "--junit", "junit.xml", "--github", "--dtype", "bf16").stdout
    assert said.startswith(
        "RIGHT (TOY MODEL): 2 dumps, a sample of 4, match the truth to bf16 rounding\n  held against the clean model module by"
    )
    assert (
        "  peak memory in one worker (TOY MODEL)  " in said
        and "\nnext: actordbg check --model YOUR_MODEL" in said
        and "::notice title=actordbg check::RIGHT" in said
    )
    (page,) = store.reports.iterdir()
    assert "match the truth to bf16 rounding" in page.read_text() and "Replay against the truth" in page.read_text()
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert {case.get("classname") for case in suite.iter("testcase")} == KINDS
    assert (tmp_path / "summary.md").read_text().startswith("**RIGHT (TOY MODEL):** ")
    explained = invoke(store, "explain --json")
    answer = json.loads(explained.stdout)
    assert explained.exit_code == 0 and answer["verdict"] == "RIGHT" and answer["explanation"]["what"] == [], explained.output
    assert in_json(store, "replay --resume last")["verdict"] == "RIGHT", "what a check compared is not forgotten"
    replayed = get_replay(store, "last")
    assert (replayed.command or "").startswith("actordbg check ") and len(list(store.comparisons.iterdir())) == 1
