"""`actordbg check`: the word, what it leaves out, and what other programs get of it. One test runs a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import brokenactor
import pytest
from click.testing import Result
from comparecases import given, publish_golden, write_replay
from hostilestore import HOSTILE, forbidden
from typer.testing import CliRunner

from actordbg.base.errors import MachineFault, Unsupported
from actordbg.catalog.query import get_configuration
from actordbg.cli.app import app
from actordbg.dumps.create import create_dumps
from actordbg.judge.check import CheckAnswer, CheckFound, answer_of_check, run_check
from actordbg.judge.junit import junit_xml, workflow_commands
from actordbg.judge.load_replays import load
from actordbg.records.comparison_record import ComparisonRecord
from actordbg.replay.supervise import load_spec
from actordbg.store.layout import Store

INPUTS = [given(index) for index in range(3)]
LAW = {"law": "neighbour", "verdict": "broken", "words": "row 1 sees row 0", "row": 1, "position": 3}


def checked(store: Store, truth: bool = True, recorded: str | None = None, **replayed: Any) -> tuple[CheckFound, CheckAnswer]:
    """A check of a replay and a truth that are there, so that no worker starts."""
    write_replay(store, "r-01", INPUTS, **replayed)
    if truth:
        write_replay(store, "r-02", INPUTS, truth="fp32", **({"model": replayed["model"]} if "model" in replayed else {}))
    found = run_check(store, load_spec(store, "r-01"))
    return found, answer_of_check(found, of=257, recorded=recorded)


def off(index: int, made: dict[str, Any]) -> dict[str, Any]:
    return made | {"log_probs": made["log_probs"] + 0.1 * (index == 1)}


class TestTheWord:
    def test_right_says_of_how_many_how_far_and_what_was_not_judged(self, store: Store) -> None:
        _, answer = checked(store, recorded="org/a model")
        assert (answer.good, answer.max_abs) == (True, 0)
        assert answer.sentence == (
            "RIGHT (TOY MODEL): 3 of 257 dumps run, as near the truth as fp32 allows; not judged: your model; gradients (--backward); the laws"
        )
        assert answer.next == "actordbg check --model 'org/a model'"
        assert [ComparisonRecord.from_file(path).verdict for path in store.comparisons.iterdir()] == ["match"]

    def test_wrong_names_how_many_and_the_worst_dump_comes_next(self, store: Store) -> None:
        _, answer = checked(store, change=off)
        assert not answer.good and answer.max_abs == pytest.approx(0.1, rel=0.01)
        assert answer.sentence.startswith(
            "WRONG (TOY MODEL): 1 of 3 dumps further from the truth than fp32 explains; not judged:"
        )
        assert INPUTS[1].dump_id in answer.next and answer.next.startswith("actordbg matrix --where")

    def test_a_broken_law_is_wrong_whatever_the_truth_says(self, store: Store) -> None:
        _, answer = checked(store, result=lambda index: {"extra": {"temperature": 1.0, "laws": [LAW] * (index == 2)}})
        assert answer.sentence.startswith("WRONG (TOY MODEL): neighbour broken: row 1 sees row 0")
        assert not answer.good and INPUTS[2].dump_id in answer.next

    def test_a_failure_is_named_before_anything_else(self, store: Store) -> None:
        failed = {"status": "failed", "error_class": "ValueError", "error": "no such thing\nat all"}
        _, answer = checked(store, change=off, result=lambda index: failed if index == 0 else {})
        assert answer.sentence == "FAILED (TOY MODEL): 1 of 3 dumps did not pass: ValueError, no such thing"
        assert not answer.good and answer.next == "actordbg report r-01"

    def test_nothing_compared_is_not_green(self, store: Store) -> None:
        _, answer = checked(store, change=lambda index, made: None)
        assert answer.word == "NOT JUDGED" and not answer.good
        assert "nothing could be compared with the truth: " in answer.sentence
        (compared,) = load(store, ["r-01"]).replays[0].comparisons
        why = answer.sentence.partition("nothing could be compared with the truth: ")[2]
        assert compared.compared == 0 and why in (compared.reasons or "")

    def test_a_truth_that_cannot_be_computed_says_why(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_truth(*_: Any, **__: Any) -> str:
            raise Unsupported("no row has a truth")

        monkeypatch.setattr("actordbg.judge.check.ensure_truth", no_truth)
        _, answer = checked(store, truth=False)
        assert answer.sentence.endswith("nothing could be compared with the truth: no row has a truth")


class TestWhatTheRunGot:
    """A replay and a truth that agree, and dumps with what the training run itself got, of which one figure is off."""

    @staticmethod
    def answer(store: Store, log_prob: float = 0.0, entropy: float = 0.0, outputs: bool = True) -> CheckAnswer:
        inputs, made = publish_golden(store, 2, outputs)
        made[0]["log_probs"][1, 0] -= log_prob
        for tensors in made:
            tensors["entropy"][1, 0] -= entropy
        truth: Any = {"model": "/m", "change": lambda index, _: made[index], "result": lambda index: {"folded_ids": False}}
        write_replay(store, "r-01", inputs, **truth)
        write_replay(store, "r-02", inputs, truth="fp32", **truth)
        return answer_of_check(run_check(store, load_spec(store, "r-01"), golden=True), of=2)

    def test_a_fault_of_the_trainer_is_wrong_though_the_replay_is_right(self, store: Store) -> None:
        answer = self.answer(store, log_prob=1.5)
        assert (answer.good, answer.max_abs, answer.next) == (False, 0, "actordbg compare r-01 golden")
        assert answer.sentence.startswith(
            "WRONG: in 1 of 2 dumps what the run itself got is not what its model gives in fp32: log-probs by up to 1.5 nats; not judged: "
        )
        assert answer.not_judged[0] == "whether the model has the weights of that moment (run --hash-weights)"

    def test_entropies_alone_are_named_so(self, store: Store) -> None:
        assert "in 2 of 2 dumps" in (said := self.answer(store, entropy=3.25).said)
        assert said.endswith(": entropies by up to 3.25 nats; its log-probs agree")

    def test_what_was_asked_for_and_not_recorded_is_not_judged(self, store: Store) -> None:
        assert self.answer(store, outputs=True).good
        answer = self.answer(store, outputs=False)
        assert answer.word == "NOT JUDGED" and "; not judged: what the run itself got in 2 of 2 dumps: the" in answer.sentence


def test_other_programs_get_every_failure_as_text(store: Store) -> None:
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


@pytest.mark.slow
def test_a_full_disk_is_an_environment_error_of_a_check_and_no_dumps_failure(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = tmp_path / "full"
    full.touch()
    faulty = brokenactor.environment(tmp_path / "fault", brokenactor.FULL_DISK) | {"FULL_DISK": str(full)}
    for name, value in faulty.items():
        monkeypatch.setenv(name, value)
    create_dumps(store, 2, batch_size=1, seq_len=24, vocab_size=4096, seed=1)
    said = CliRunner().invoke(app, ["--store", str(store.root), "check", "--quiet"]).exception
    assert isinstance(said, MachineFault) and said.exit_code == 4
    replay_id = load_spec(store, "last").replay_id
    assert said.message.startswith(f"No space left on device ({store.replays / replay_id} has ")
    full.unlink()
    assert said.hint == f"fix that, then `actordbg replay --resume {replay_id}` goes on"
    done = CliRunner().invoke(app, ["--store", str(store.root), "replay", "--resume", replay_id, "--quiet"])
    assert done.exit_code == 0 and "2 inputs, 2 passed" in done.stdout, done.output


@pytest.mark.slow
def test_own_dumps_come_to_a_verdict_in_one_command(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def actordbg(*words: str, code: int = 0) -> Result:
        monkeypatch.setattr(sys, "argv", ["actordbg", "check", *words])
        done = CliRunner().invoke(app, ["--store", str(store.root), "check", *words])
        assert getattr(done.exception, "exit_code", done.exit_code) == code, done.output
        return done

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    create_dumps(store, 4, batch_size=2, seq_len=24, vocab_size=4096, seed=1)
    assert "nothing to check: no dump matches" in str(actordbg("--where", "seq_len>99", code=5).exception)
    assert "/nowhere is no folder" in str(actordbg("--junit", "/nowhere/x.xml", code=4).exception)
    said = actordbg("--max-inputs", "2", "--junit", "junit.xml", "--github", "--dtype", "bf16", "--quiet").stdout
    assert said.startswith("RIGHT (TOY MODEL): 2 of 4 dumps run, as near the truth as bf16 allows; not judged: your model")
    assert (
        "  peak memory     " in said
        and "next: actordbg check --model PATH" in said
        and "::notice title=actordbg check::RIGHT" in said
    )
    (page,) = store.reports.iterdir()
    assert "as near the truth as bf16 allows" in page.read_text() and "Against the truth" in page.read_text()
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()[0]
    assert {case.get("classname") for case in suite.iter("testcase")} == {"actordbg.replay", "actordbg.laws", "actordbg.truth"}
    assert (tmp_path / "summary.md").read_text().startswith("# RIGHT (TOY MODEL)")
    replayed = get_configuration(store, "last")
    assert (replayed.command or "").startswith("actordbg check ") and len(list(store.comparisons.iterdir())) == 1
