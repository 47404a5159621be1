"""`actordbg compare` as typed: what it says and how it ends; once on real replays of the tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from comparecases import Tensors, given, tensors, write_replay
from typer.testing import CliRunner

from actordbg.base.errors import ActordbgError, UsageError
from actordbg.catalog import query
from actordbg.cli.app import app
from actordbg.formats.store_files import atomic_write
from actordbg.records.comparison_record import ComparisonRecord, NoiseRecord
from actordbg.store.layout import Store

INPUTS = [given(index) for index in range(12)]


def off(index: int, made: Tensors) -> Tensors:
    """The i-th input's first token is off by 0.02 i."""
    made["log_probs"][0, 0] += 0.02 * index
    return made


@pytest.fixture
def replayed(store: Store) -> Store:
    """`r-02` is `r-01` with one token of each input moved, and without the first input; `r-03` is equal to `r-01`."""
    kept = {"model.layers.0.self_attn.q_proj.weight": torch.ones(6), "lm_head.weight": torch.ones(4)}
    more = {name: tensor * 1.5 for name, tensor in kept.items()}
    write_replay(store, "r-01", INPUTS, gradients=lambda index: kept)
    write_replay(
        store, "r-02", INPUTS[1:], change=lambda index, _: off(index + 1, tensors(index + 1)), gradients=lambda index: more
    )
    write_replay(store, "r-03", INPUTS, gradients=lambda index: kept)
    return store


def invoke(store: Store, *arguments: str) -> Result:
    result = CliRunner().invoke(app, ["--store", str(store.root), "compare", *arguments])
    if isinstance(result.exception, ActordbgError):
        raise result.exception
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


def kept(store: Store) -> list[ComparisonRecord]:
    return [ComparisonRecord.from_json(path.read_bytes()) for path in sorted(store.comparisons.glob("*.json"))]


def test_a_mismatch_in_words_first_and_within_80_columns(replayed: Store) -> None:
    result = invoke(replayed, "r-02", "r-01", "--limit", "4")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "mismatch: A differs from B"
    text = " ".join(result.stdout.split())
    assert "11 dumps compared: 11 outside; 1 not compared." in text
    assert f"The largest difference of a log-prob is 0.22 nats (in {INPUTS[11].dump_id})" in text
    assert "thresholds: max_abs 0.0001," in text and "(defaults for fp32)" in text
    assert "The worst 4 of 11 dumps" in text
    assert "Worst tokens" in text and "Worst parameters" in text
    assert "1 dump: only B replayed it, A did not; " + INPUTS[0].dump_id in text
    assert f"{INPUTS[11].dump_id}: max_abs 0.22 is above 0.0001" in text
    assert max(map(len, lines)) <= 80


def test_it_is_kept_and_indexed_whatever_it_says(replayed: Store) -> None:
    assert invoke(replayed, "r-03", "r-01").exit_code == 0
    assert invoke(replayed, "r-02", "r-01").exit_code == 1
    assert invoke(replayed, "r-01", "golden").exit_code == 1
    assert sorted(one.verdict for one in kept(replayed)) == ["match", "mismatch", "not-compared"]
    assert {(one.replay_id, one.against, one.verdict) for one in query.comparisons(replayed)} == {
        ("r-03", "r-01", "match"), ("r-02", "r-01", "mismatch"), ("r-01", "golden", "not-compared"),
    }  # fmt: skip


def test_a_match_and_nothing_compared_say_so(replayed: Store) -> None:
    match = invoke(replayed, "last", "r-01")
    assert match.exit_code == 0 and match.stdout.startswith("match: A agrees with B within the thresholds\n")
    assert "Worst" not in match.stdout and "Not compared" not in match.stdout
    nothing = invoke(replayed, "r-01", "golden")
    assert nothing.exit_code == 1 and nothing.stdout.startswith("not-compared: nothing was compared\n")
    assert "tiny model is not the run's" in nothing.stdout
    selected = invoke(replayed, "r-02", "r-01", "--where", "rank = 7")
    assert selected.exit_code == 1 and "the selection has none of their dumps" in selected.stdout


def test_thresholds_by_flag_and_by_file(replayed: Store, tmp_path: Path) -> None:
    loose = ["--max-abs", "1", "--p99-abs", "1", "--mean-abs", "inf", "--gradient-distance", "1", "--parameter-distance", "1"]
    result = invoke(replayed, "r-02", "r-01", *loose)
    assert result.exit_code == 0, result.stdout
    assert "max_abs, p99_abs, mean_abs, gradient_distance" not in result.stdout
    assert "gradient_distance, max_abs, mean_abs, p99_abs, parameter_distance from flags" in " ".join(result.stdout.split())
    file = tmp_path / "mine.toml"
    file.write_text("max-abs = 1\np99-abs = 1\nmean-abs = 1\nparameter-distance = 1\n[fp32]\ngradient-distance = 0.25\n")
    result = invoke(replayed, "r-02", "r-01", "--thresholds", str(file))
    assert result.exit_code == 1
    assert "gradient_distance 0.5 is above 0.25" in " ".join(result.stdout.split())
    assert invoke(replayed, "r-02", "r-01", "--thresholds", str(file), "--gradient-distance", "0.5").exit_code == 0


def test_json_is_the_record_and_markdown_a_page(replayed: Store) -> None:
    result = invoke(replayed, "r-02", "r-01", "--json", "--quiet")
    assert result.exit_code == 1
    found: dict[str, Any] = json.loads(result.stdout)
    record = kept(replayed)[-1]
    assert found["verdict"] == "mismatch" and found["comparison_id"] == record.comparison_id
    assert found["dumps"][0]["log_probs"]["max_abs"] == record.dumps[0].log_probs.max_abs  # type: ignore[union-attr]
    assert len(found["dumps"]) == 12
    page = invoke(replayed, "r-02", "r-01", "--format", "md").stdout
    assert page.startswith("# mismatch: A differs from B\n")
    assert "| dump | S | verdict |" in page
    with pytest.raises(UsageError, match="exclude each other"):
        invoke(replayed, "r-02", "r-01", "--json", "--format", "md")


def test_the_noise_floor(replayed: Store) -> None:
    floor = dict.fromkeys(("max_abs", "p99_abs", "mean_abs", "gradient_distance", "parameter_distance", "clip_share"), 0.6)
    noise = NoiseRecord("n-01", "2025-06-20T00:00:00.000000Z", "r-02", {}, "tiny", "fp32", (), (), floor)
    with pytest.raises(UsageError, match="there is no noise floor yet"):
        invoke(replayed, "r-02", "r-01", "--noise", "n-01")
    atomic_write(replayed.noise / "n-01.json", noise.to_json().encode())
    result = invoke(replayed, "r-02", "r-01", "--noise", "n-01")
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "within-noise: A differs from B no more than the configuration moves by itself; not judged: 1 of 12 dumps"
    )
    assert "noise floor: n-01" in result.stdout
    assert kept(replayed)[-1].noise_id == "n-01"


@pytest.mark.parametrize(
    "arguments",
    [
        ("r-01", "r-01"),
        ("r-01", "nothing"),
        ("golden", "r-01"),
        ("r-02", "r-01", "--max-abs", "-1"),
        ("r-02", "r-01", "--thresholds", "/nonexistent/file.toml"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error_and_leaves_nothing(replayed: Store, arguments: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as raised:
        invoke(replayed, *arguments)
    assert raised.value.exit_code == 2 and raised.value.hint
    assert not list(replayed.comparisons.glob("*"))


def test_the_report_of_a_replay_shows_its_comparisons(replayed: Store) -> None:
    invoke(replayed, "r-02", "r-01")
    invoke(replayed, "r-02", "golden")

    def report(*arguments: str) -> str:
        return CliRunner().invoke(app, ["--store", str(replayed.root), "report", "r-02", *arguments]).stdout

    text = report()
    assert "Compared\n" in text and max(map(len, text.splitlines())) <= 80
    assert [line.split()[:4] for line in text.splitlines() if line.split()[1:2] in (["mismatch"], ["not-compared"])] == [
        ["golden", "not-compared", "0/11", "-"],
        ["r-01", "mismatch", "11/12", "0.22"],
    ]
    assert f"the worst is {INPUTS[11].dump_id}" in " ".join(text.split())
    assert "| r-01 | mismatch | 11/12 | 0.22 |" in report("--format", "md")
    found = json.loads(report("--format", "json"))["replays"][0]["comparisons"]
    assert [(one["against"], one["verdict"], one["worst_dump"]) for one in found] == [
        ("golden", "not-compared", None),
        ("r-01", "mismatch", INPUTS[11].dump_id),
    ]
    assert "Compared" not in CliRunner().invoke(app, ["--store", str(replayed.root), "report", "r-03"]).stdout
