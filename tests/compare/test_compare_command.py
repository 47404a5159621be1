"""`actordbg compare` as typed: what it says and how it ends; and what a comparison says in words about A."""

import json

import pytest
import torch
from commandline import invoke
from comparecases import given, tensors, write_replay

from actordbg.base.errors import Unsupported, UsageError
from actordbg.catalog import query
from actordbg.records.comparison_record import ComparisonRecord

INPUTS = [given(index) for index in range(12)]


def off(index, made):
    """The i-th input's first token is off by 0.02 i."""
    made["log_probs"][0, 0] += 0.02 * index
    return made


@pytest.fixture
def replayed(store):
    """`r-02` is `r-01` with one token of each input moved, and without the first input; `r-03` is equal to `r-01`."""
    kept = {"model.layers.0.self_attn.q_proj.weight": torch.ones(6), "lm_head.weight": torch.ones(4)}
    more = {name: tensor * 1.5 for name, tensor in kept.items()}
    write_replay(store, "r-01", INPUTS, gradients=lambda index: kept)
    write_replay(
        store, "r-02", INPUTS[1:], change=lambda index, _: off(index + 1, tensors(index + 1)), gradients=lambda index: more
    )
    write_replay(store, "r-03", INPUTS, gradients=lambda index: kept)
    return store


def compared(store, line, *words):
    return invoke(store, f"compare {line}", *words)


def kept(store):
    return [ComparisonRecord.from_json(path.read_bytes()) for path in sorted(store.comparisons.glob("*.json"))]


def test_a_mismatch_in_words_first_and_within_80_columns(replayed):
    result = compared(replayed, "r-02 r-01 --limit 4")
    assert result.exit_code == 1
    verdict, *lines = result.stdout.splitlines()
    assert verdict == "WRONG (TOY MODEL): the two replays give different results for the same inputs, in dump 0000000b"
    assert lines[-1] == "next: actordbg compare r-02 truth" and max(map(len, lines)) <= 80
    text = " ".join(result.stdout.split())
    for told in ("11 of 12 dumps beyond the thresholds: Both are configured alike; A is r-02, B r-01; 1 not compared; the largest difference of",
                 "thresholds: max_abs 0.0001,", "(defaults for fp32)", "The worst 4 of 11 dumps", "Worst tokens", "Worst parameters",
                 "1 dump: only B replayed it, A did not; 00000000", "0000000b: "):  # fmt: skip
        assert told in text


def test_a_replay_without_tensors_is_refused_before_a_truth_is_computed(store, monkeypatch):
    write_replay(store, "r-01", INPUTS[:2], change=lambda *_: None, keep_tensors=False)
    monkeypatch.setattr("actordbg.api.comparing.find_truth", lambda *_: pytest.fail("looked for a truth"))
    with pytest.raises(Unsupported, match="kept no tensors"):
        compared(store, "r-01 truth")


def test_a_match_a_mismatch_and_nothing_compared_say_so_and_are_kept_and_indexed(replayed):
    match = compared(replayed, "last r-01")
    assert match.exit_code == 0 and match.stdout.startswith("NOT CHECKED (TOY MODEL): ")
    assert "Worst" not in match.stdout and "Not compared" not in match.stdout
    assert compared(replayed, "r-02 r-01").exit_code == 1
    nothing = compared(replayed, "r-01 recorded")
    assert nothing.exit_code == 1 and nothing.stdout.startswith("NOT CHECKED (TOY MODEL): ")
    assert "tiny model is not the run's" in nothing.stdout
    assert {(row.replay_id, row.against, row.verdict) for row in query.comparisons(replayed)} == {
        ("r-03", "r-01", "match"), ("r-02", "r-01", "mismatch"), ("r-01", "golden", "not-compared"),
    }  # fmt: skip
    assert sorted(record.verdict for record in kept(replayed)) == ["match", "mismatch", "not-compared"]


def test_thresholds_by_flag(replayed):
    loose = ["--max-abs", "1", "--p99-abs", "1", "--mean-abs", "inf", "--gradient-distance", "1", "--parameter-distance", "1"]
    result = compared(replayed, "r-02 r-01", *loose)
    assert result.exit_code == 0, result.stdout
    assert "max_abs, p99_abs, mean_abs, gradient_distance" not in result.stdout
    assert "gradient_distance, max_abs, mean_abs, p99_abs, parameter_distance from flags" in " ".join(result.stdout.split())
    result = compared(replayed, "r-02 r-01", *loose[:6], "--gradient-distance", "0.25", "--parameter-distance", "1")
    assert result.exit_code == 1
    assert "gradient_distance 0.5 is above 0.25" in " ".join(result.stdout.split())


def test_json_is_the_record_and_markdown_a_page(replayed):
    result = compared(replayed, "r-02 r-01 --json --quiet")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    record = kept(replayed)[-1]
    assert (
        found["verdict"] == "WRONG"
        and found["next"] == "actordbg compare r-02 truth"
        and found["comparison_id"] == record.comparison_id
    )
    assert found["dumps"][0]["log_probs"]["max_abs"] == record.dumps[0].log_probs.max_abs  # type: ignore[union-attr]
    assert len(found["dumps"]) == 12
    page = compared(replayed, "r-02 r-01 --format md").stdout
    assert page.startswith("**WRONG (TOY MODEL):** the two replays give different results for the same inputs")
    assert "| dump | S | outputs |" in page
    with pytest.raises(UsageError, match="conflicts with"):
        compared(replayed, "r-02 r-01 --json --format md")


@pytest.mark.parametrize("words", ["r-01 r-01", "r-02 r-01 --max-abs -1", "r-02 r-01 --noise n-01"])
def test_what_makes_no_sense_is_a_usage_error_and_leaves_nothing(replayed, words):
    with pytest.raises(UsageError) as raised:
        compared(replayed, *words.split())
    assert raised.value.exit_code == 2 and raised.value.hint
    assert not list(replayed.comparisons.glob("*"))


def test_the_report_of_a_replay_shows_its_comparisons(replayed):
    compared(replayed, "r-02 r-01")
    compared(replayed, "r-02 golden")

    def report(*arguments):
        return invoke(replayed, "report r-02", *arguments).stdout

    text = report()
    assert "Compared\n" in text and max(map(len, text.splitlines()[1:])) <= 80
    assert [line.split()[:4] for line in text.splitlines() if line.split()[1:2] in (["mismatch"], ["not-compared"])] == [
        ["r-01", "mismatch", "11/12", "0.22"],
    ]
    assert "recorded outputs not-compared 0/11 - " in " ".join(text.split())
    assert "the worst is 0000000b" in " ".join(text.split())
    assert "| r-01 | mismatch | 11/12 | 0.22 |" in report("--format", "md")
    found = json.loads(report("--format", "json"))["replays"][0]["comparisons"]
    assert [(one["against"], one["verdict"], one["worst_dump"]) for one in found] == [
        ("golden", "not-compared", None),
        ("r-01", "mismatch", INPUTS[11].dump_id),
    ]
    assert "Compared\n" not in invoke(replayed, "report r-03").stdout


ONE, TWO = "20250619T050000-000001", "20250619T050100-000002"


def test_nothing_differs_where_only_what_is_kept_does(store):
    write_replay(store, ONE, [given(0)])
    write_replay(store, TWO, [given(0)], timeout_s=5.0, keep_gradients=True)
    assert "Both are configured alike" in compared(store, ONE, TWO).stdout
