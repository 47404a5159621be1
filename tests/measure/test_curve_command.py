"""`actordbg curve memory|time` on a store: which replays, what it prints in 80 columns, its JSON and picture, how it ends."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from curvecases import gigabytes, keep, run, square
from typer.testing import CliRunner, Result

from actordbg.base.errors import CorruptDump, EnvironmentProblem, UsageError
from actordbg.cli.app import app
from actordbg.records.matrix_record import MatrixCell, MatrixRecord
from actordbg.store.layout import Store


def invoke(store: Store, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["--store", str(store.root), "curve", *arguments], catch_exceptions=False)


def shown(done: Result) -> str:
    """What was printed, after a look at its width."""
    assert max(map(len, done.stdout.splitlines())) <= 80, done.stdout
    return done.stdout


@pytest.fixture
def replayed(store: Store) -> Store:
    """Two replays: `r1` under sdpa, and `r2` under eager with a backward, which ran out of memory at 4096."""
    keep(store, run("r1"))
    keep(store, run("r2", backward=square, attn="eager", oom=[4096], memory=lambda n: gigabytes(n) + 500.0 * n * n))
    return store


def test_every_configuration_has_its_points_curve_and_longest_length(replayed: Store):
    done = invoke(replayed, "memory", "--budget", "8GB")
    text = shown(done)
    assert done.exit_code == 0
    assert "Longest seq_len in 8 GB (7.451 GiB)" in text
    assert re.search(r"\n  A +2,048 +- +7,000(?: \(\S+ to \S+\))? +extrapolated\n", text)
    assert re.search(r"\n  B +2,048 +4,096 +2,\d+(?: \(\S+ to \S+\))? +measured\n", text)
    assert "A: caution, that is 3.4 times the longest measured length" in text
    assert "out of memory at 4,096: never said to fit" in text
    assert re.search(r"\n +1,024 +2 +1\.885 GiB +1\.885 GiB +[+-]0\.0%\n", text)
    assert "How to read the figures: `actordbg curve memory --explain`." in text and "resident memory" not in text
    assert "the process's resident memory" in " ".join(invoke(replayed, "memory", "--explain").stdout.split())


def test_a_budget_that_a_small_model_reaches_far_beyond_what_ran_is_refused(replayed: Store):
    done = invoke(replayed, "memory", "r1", "--budget", "80GB", "--at", "1200000")
    text = " ".join(shown(done).split())
    assert done.exit_code == 1 and re.search(r" A +2,048 +- +- ", text) and "79," not in text
    refused = "times the longest measured length, 2,048, and at most 4 times is extrapolated: measure longer ones, "
    command = "actordbg curve memory r1 --measure 4096,8192 --model PATH"
    assert f"A: refused, 39 {refused}`{command}`" in text
    assert f"A: refused, 586 {refused}`{command}`" in text and "1,200,000 - - unknown, far unsure" in text


def test_times_show_each_pass(replayed: Store):
    text = shown(invoke(replayed, "time", "r2", "--budget", "1s", "--of", "backward"))
    assert "backward time by seq_len" in text and "Longest seq_len in 1.00 s" in text
    assert re.search(r"\n +512 +2 +0\.282 +0\.282 +0\.564 +0\.282 +[+-]0\.0%\n", text)
    assert "1 input left out: warming up or compiling" in text
    text = shown(invoke(replayed, "memory", "r1", "--limit", "3"))
    assert [n for n in (64, 128, 256, 512, 1024, 1536, 2048) if re.search(rf"\n +{n:,} +\d ", text)] == [64, 512, 2048]


def test_json_is_the_whole_answer(replayed: Store):
    answer = json.loads(invoke(replayed, "memory", "--budget", "8GB", "--at", "3000", "--json").stdout)
    first = answer["curves"][0]
    assert (answer["quantity"], answer["budget"], answer["replays"]) == ("memory", 8e9, 2)
    assert first["curve"]["b"] == pytest.approx(1e6, rel=1e-6) and first["at"][0]["how"] == "extrapolated"
    assert first["measurements"]["points"][1]["memory"] == gigabytes(128)
    text = invoke(replayed, "memory", "--format", "md").stdout
    assert "| seq\\_len | inputs | peak | curve | off |" in text or "| seq_len | inputs | peak | curve | off |" in text


def test_too_few_lengths_come_with_a_command_that_measures_more_and_exists(store: Store):
    from docpages import parse

    keep(store, run("r1", lengths=(128,), compile=True))
    done = invoke(store, "memory", "--budget", "80GB", "--limit", "1")
    text = " ".join(shown(done).split())
    assert done.exit_code == 0 and "no curve: 2 lengths measured, 3 are the fewest" in text
    (command,) = re.findall(r"More lengths: actordbg (curve memory r1 --measure \S+)", text)
    parse(command.split())


def test_a_matrix_names_its_cells_replays_and_those_that_are_gone_are_left_out(replayed: Store):
    cells = tuple(MatrixCell(i, f"cell {i}", {}, "passed", {}, replay_id=name) for i, name in enumerate(("r2", None, "gone")))
    record = MatrixRecord("20250619T060000-abcdef", "2025-06-19T06:00:00.000000Z", "complete", {}, cells, ())
    replayed.matrices.mkdir(exist_ok=True)
    path = replayed.matrices / f"{record.matrix_id}.json"
    path.write_text(record.to_json())
    done = invoke(replayed, "memory", "--matrix", "last")
    assert "gone from the store: gone" in done.stderr
    assert "1 replay," in shown(done) and "eager" in done.stdout and "sdpa" not in done.stdout
    with pytest.raises(UsageError, match="no matrix has the id 'x'"):
        invoke(replayed, "memory", "--matrix", "x")
    with pytest.raises(UsageError, match="exclude each other"):
        invoke(replayed, "memory", "r1", "--matrix", "last")
    path.write_text(replace(record, cells=cells[2:]).to_json())
    with pytest.raises(UsageError, match="all replays of the matrix last are gone"):
        invoke(replayed, "memory", "--matrix", "last")
    path.write_text('{"format": 1, "cel')
    with pytest.raises(CorruptDump, match=str(path)):
        invoke(replayed, "memory", "--matrix", "last")


def test_the_picture_is_written(tmp_path: Path, replayed: Store):
    picture = tmp_path / "b.svg"
    assert invoke(replayed, "time", "--budget", "2s", "--at", "9000", "--plot", str(picture)).exit_code == 1
    assert "budget" in picture.read_text()
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        invoke(replayed, "memory", "--plot", str(tmp_path / "no" / "x.png"))


@pytest.mark.parametrize(
    "arguments",
    [("memory", "--budget", "2s"), ("time", "--budget", "80GB"), ("memory", "nothing"), ("memory", "--measure", "512"),
     ("memory", "r1", "--measure", "512,x"), ("memory", "r1", "--measure", "1"), ("memory", "--plot", "x.gif"),
     ("memory", "--batch-size", "4"), ("memory", "--dtype", "bf16"), ("memory", "--budget", "0GB")],
)  # fmt: skip
def test_what_means_nothing_is_a_usage_error(replayed: Store, arguments: tuple[str, ...]):
    with pytest.raises(UsageError):
        invoke(replayed, *arguments)


@pytest.mark.slow
def test_measuring_replays_made_up_inputs_as_the_named_replay_was(store: Store):
    """For real: the tiny model, eager attention and a backward, which made-up inputs do not ask for by themselves."""
    pytest.importorskip("openrlhf")
    keep(store, run("r1", lengths=(), batch=1, backward=square, attn="eager"))
    journal = store.replays / "r1" / "rank0.jsonl"
    journal.write_text(journal.read_text().replace('"attn": "eager"', '"attn": "eager", "backward": true'))
    done = invoke(store, "memory", "r1", "--measure", "32,64,96", "--json")
    assert done.exit_code == 0, done.stdout
    (found,) = json.loads(done.stdout)["curves"]
    assert found["measurements"]["replays"][0] == "r1" and len(found["measurements"]["replays"]) == 2
    assert found["measurements"]["backward"] and found["measurements"]["settings"]["attn"] == "eager"
    assert [(point["n"], point["inputs"]) for point in found["measurements"]["points"]] == [(32, 2), (64, 3), (96, 2)]
    assert found["measurements"]["left_out"] == 2 and found["curve"] is not None
