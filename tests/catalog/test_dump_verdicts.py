"""The last verdict of a dump: one fold over everything that judged it, and every list reads that one."""

import re

import pytest
from casefiles import cases_of
from commandline import in_json, invoke
from comparecases import write_replay
from replaycases import publish

from actordbg.catalog import dump_verdicts, query
from actordbg.catalog.dump_verdicts import Judgement, fold
from actordbg.catalog.indexer import refresh
from actordbg.config.replay_config import ReplayConfig
from actordbg.dumps import checking
from actordbg.ui.ui_pages import dumps_page

NEW, OLD = "20250619T050200-000002", "20250619T050100-000001"


def at(replay_id, configuration="a", status="passed", digest="d", **more):
    about = {name: more.pop(name) for name in ("command", "accept", "mine") if name in more}
    return Judgement(int(replay_id[-6:]), replay_id, status, digest, configuration, answers=more, **about)


CASES = cases_of("dump_verdicts")


def judgement(line):
    when, _, said = line.partition(" ")
    words, _, command = said.partition("command=")
    named = {name: None if value == "None" else value for name, value in (word.split("=") for word in words.split())}
    return at(NEW if when == "new" else OLD, **named, **({"command": command} if command else {}))


@pytest.mark.parametrize("case", CASES)
def test_the_newest_answer_to_each_question_counts(case):
    verdict, *broken = CASES[case].expected
    last = fold([judgement(line) for line in CASES[case].given])
    assert (str(last.verdict), last.broken, last.theirs) == (verdict, broken[0] if broken else None, None)


def test_what_came_from_elsewhere_counts_for_them_alone():
    theirs = at(NEW, mine=False, truth="match")
    assert (fold([theirs]).verdict, fold([theirs]).theirs, fold([theirs]).last_result) == (None, "RIGHT", 2)
    both = fold([theirs, at(OLD, truth="mismatch")])
    assert (both.verdict, both.theirs, both.last_result) == ("WRONG", "RIGHT", 1), "and hides nothing of one's own"


LAW = {"law": "neighbour", "verdict": "broken", "words": "row 1 depends on row 0"}
WAYS = {
    "a law": ({"extra": {"laws": [LAW]}}, "WRONG", "neighbour"),
    "a check that raised": ({"extra": {"laws": [LAW | {"verdict": "not-checked", "raised": True}]}}, "FAILED", "neighbour"),
    "a module": ({"extra": {"located": {"places": 4, "count": 1}}}, "WRONG", "local"),
    "an operation": ({"extra": {"located": {"places": 4, "operation": {"word": "soft cap"}}}}, "WRONG", "local"),
    "ranks": ({"extra": {"lane": {"ranks": [0, 1], "differ": {"1": {}}}}}, "WRONG", "ranks"),
    "an exception": ({"status": "failed", "error_class": "RuntimeError"}, "FAILED", "failed"),
    "a crash": ({"status": "crashed"}, "FAILED", "crashed"),
    "a hang": ({"status": "hung"}, "FAILED", "hung"),
    "the truth": ({}, "WRONG", "truth"),
    "nothing": ({}, "RIGHT", None),
    "no comparison": ({}, "NOT CHECKED", None),
}
"""Each way a dump can be wrong, and two in which it is not: the result of its replay, its verdict, what broke."""


@pytest.fixture
def judged(store):
    """A store with a dump for each of WAYS, and two that were never replayed; replayed before with other, better ends."""
    every = publish(store, len(WAYS) + 1)
    inputs, results = every[: len(WAYS)], [result for result, _, _ in WAYS.values()]
    write_replay(store, OLD, inputs, align="same", nproc=2)
    write_replay(store, NEW, inputs, align="same", nproc=2, result=lambda index: {"output_digest": "d"} | results[index])
    truth = "20250619T050300-000003"
    far = [*WAYS].index("the truth")
    write_replay(
        store, truth, inputs[:-1], truth="fp32",
        change=lambda index, made: made | {"log_probs": made["log_probs"] + 3} if index == far else made,
    )  # fmt: skip
    assert invoke(store, "compare", NEW, truth).exit_code == 1
    return store


def verdicts_of(store):
    return [(row.verdict, row.broken) for row in query.select_dumps(store)]


def test_every_list_and_filter_reads_the_last_verdict(judged):
    expected = [(verdict, broken) for _, verdict, broken in WAYS.values()] + [(None, None)]
    listed = in_json(judged, "dump ls --order time")
    assert [(row["verdict"], row["broken"]) for row in listed] == expected == verdicts_of(judged)
    text = invoke(judged, "dump ls --order time").stdout
    for row, (verdict, broken) in zip(listed, expected, strict=True):
        (line,) = [line for line in text.splitlines() if row["dump_id"].rpartition("-")[2] in line and "next" not in line]
        assert "passed" not in line and all(word in line for word in (verdict, broken) if word)
        assert (verdict or "-") in invoke(judged, "dump show", row["dump_id"]).stdout
    for word in ("RIGHT", "WRONG", "FAILED", "NOT CHECKED"):
        many = [verdict for verdict, _ in expected].count(word)
        assert invoke(judged, "dump ls --where", f"verdict='{word}'", "--json").stdout.count('"dump_id"') == many > 0
        page = dumps_page(judged, {"verdict": word})
        assert page.count(f">{word}") >= many and "passed" not in re.sub(
            r"<style.*?</style>|<script.*?</script>", "", page, flags=re.S
        )
    bad = [row["dump_id"] for row in listed if row["verdict"] in ("WRONG", "FAILED")]
    again = in_json(judged, "replay --lf --dry-run")
    assert sorted(name for share in again["shares"] for name in share["dumps"]) == sorted(bad)
    assert in_json(judged, "status")["holds"]["bad"] == len(bad)


def test_verdicts_are_derived_from_the_files_alone(judged):
    before = verdicts_of(judged)
    assert not list(checking.catalog(judged, deep=True))
    refresh(judged, rebuild=True)
    assert verdicts_of(judged) == before
    for path in judged.comparisons.glob("*.json"):
        path.unlink()
    refresh(judged)
    assert [verdict for verdict, _ in verdicts_of(judged)].count("RIGHT") == 0, "what is gone judges nothing"
    for replay in (NEW, OLD):
        (judged.replays / replay).rename(judged.root / replay)
    refresh(judged)
    assert {verdict for verdict, _ in verdicts_of(judged)} == {None}, "a truth judges nothing alone"


def test_what_a_model_is_counts_for_every_dump_of_its_replay(store):
    inputs = publish(store, 3)
    extra = {"identity": [{"rank": 0, "count": 1}]}
    write_replay(store, NEW, inputs, result=lambda index: {"extra": extra} if index == 1 else {})
    assert verdicts_of(store) == [("WRONG", "identity")] * 3


def test_a_module_that_is_wrong_in_one_dump_is_what_breaks_the_others_whose_log_probs_match(store):
    inputs, truth = publish(store, 3), "20250619T050300-000003"
    extra = {"located": {"places": 4, "kernel": "it sees later tokens"}}
    write_replay(store, NEW, inputs, result=lambda index: {"extra": extra} if index == 1 else {})
    write_replay(store, truth, inputs, truth="fp32")
    assert invoke(store, "compare", NEW, truth).exit_code == 1
    assert verdicts_of(store) == [("WRONG", "local")] * 3


def test_a_refresh_that_was_killed_before_it_judged_leaves_it_to_the_next(judged, monkeypatch):
    before = verdicts_of(judged)
    write_replay(judged, "20250619T050400-000004", publish(judged, 1)[:1])

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(dump_verdicts, "fold_news", killed)
        refresh(judged)
    assert verdicts_of(judged) == [("NOT CHECKED", None), *before[1:]], "another configuration, which nothing judged"


def test_settings_that_change_no_number_are_the_same_configuration(store):
    inputs = publish(store, 1)
    write_replay(store, OLD, inputs, seed=1, result=lambda index: {"extra": {"laws": [LAW]}})
    write_replay(store, NEW, inputs, seed=2, timeout_s=ReplayConfig().timeout_s + 1)
    assert verdicts_of(store) == [("WRONG", "neighbour")]
    write_replay(store, "20250619T050300-000003", inputs, attn="eager", resolved={"attn": "eager"})
    assert verdicts_of(store) == [("NOT CHECKED", None)]
