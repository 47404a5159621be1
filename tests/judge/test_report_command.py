"""`actordbg report` on a store: which replays it is about, where it writes, and how it ends."""

import csv
import io
import json
import os
import tempfile
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import pytest
import reportcases
from catalogcases import publish, record
from commandline import invoke
from reportcases import dump_id, given, replay, result
from roots import json_of, read_json

from actordbg.base.errors import EnvironmentProblem, NothingToDo, StoreProblem, UsageError
from actordbg.cli.output import Format
from actordbg.config.replay_config import ReplayConfig
from actordbg.judge.load_replays import load
from actordbg.store.layout import Store


def keep(store, data, created_at):
    reportcases.keep(store, replace(data, spec=replace(data.spec, created_at=created_at)))


@pytest.fixture
def replayed(store):
    """A store with two replays of the same three inputs: `r1` with sdpa, and, an hour later, `r2` with eager."""
    inputs = [given(i, 300) for i in range(3)]
    keep(store, replay(inputs, [result(i) for i in range(3)]), "2025-06-19T05:30:00.000000Z")
    results = [
        result(0, "r2"),
        result(1, "r2", status="failed", error="boom", error_class="ValueError", signature="ValueError: boom"),
    ]
    keep(store, replay(inputs, results, "r2", "interrupted", attn="eager"), "2025-06-19T06:30:00.000000Z")
    return store


def reported(store, line="", *words):
    return invoke(store, f"report {line}", *words)


@pytest.mark.parametrize(
    "names, chosen",
    [((), ["r1"]), (("last",), ["r1"]), (("r2", "r1", "last"), ["r2", "r1"]), (("all",), ["r1", "r2"])],
)
def test_names_choose_replays_in_their_order_each_once_and_the_last_is_one_that_ended(replayed, names, chosen):
    assert [data.spec.replay_id for data in load(replayed, names).replays] == chosen


@pytest.mark.parametrize("align, repeated", [("shuffle", False), ("rank", False), ("same", True)])
def test_a_failed_input_is_repeated_without_what_needs_the_others(store, align, repeated):
    failed = result(1, status="failed", error="boom", signature="ValueError: boom")
    made = replay([given(i, 300) for i in range(2)], [result(0), failed], backend="deepspeed")
    asked = replace(made.spec, config=ReplayConfig(backend="deepspeed", nproc=2, align=align))
    keep(store, replace(made, spec=asked), "2025-06-19T05:30:00.000000Z")
    following = json_of(reported(store, "--json"))["next"]
    assert dump_id(1)[-8:] in following and ("--align" in following) == repeated


def test_an_unknown_replay_is_a_usage_error_and_no_store_a_problem_of_the_store(replayed, tmp_path):
    with pytest.raises(UsageError):
        load(replayed, ["nothing"])
    with pytest.raises(StoreProblem):
        reported(Store(tmp_path / "none"))


def test_where_keeps_the_inputs_of_the_dumps_it_selects(replayed):
    for index in range(4):
        publish(replayed, record(index, dump_id=dump_id(index)))
    material = load(replayed, ["r1"], "rank>1")
    assert [given.dump_id for given in material.replays[0].spec.inputs] == [dump_id(2)]
    assert any("rank>1" in text for text in material.notes)
    with pytest.raises(NothingToDo, match="no dump matches rank=7; rank = 7 selects none of 4: rank is 0 to 3"):
        load(replayed, ["r1", "r2"], "rank=7")
    with pytest.raises(NothingToDo, match=r"none of the dumps that match rank=3 [(]1[)] has a result in these replays"):
        load(replayed, ["r1", "r2"], "rank=3")


def test_a_replay_whose_specification_is_gone_is_noted_and_the_others_are_reported(replayed):
    load(replayed)
    (replayed.replays / "r1" / "spec.json").write_text("{")
    material = load(replayed, ["all"])
    assert [data.spec.replay_id for data in material.replays] == ["r2"]
    (replayed.replays / "r2" / "spec.json").unlink()
    said = reported(replayed, "r2").stdout
    assert "r2 is left out: cannot read" in said and "nothing was replayed" not in said


def test_replays_stand_side_by_side_as_they_ran_and_a_report_of_failures_ends_well(replayed):
    done = reported(replayed, "r1 r2")
    assert done.exit_code == 0
    for fact in ("2 replays side by side", "A  r1: sdpa", "B  r2: eager", "ValueError: boom", "Time and memory",
                 "1 passed, 1 failed, 1 not run of 3 (the replay is interrupted)"):  # fmt: skip
        assert fact in done.stdout


def test_all_is_an_index_of_ones_own_replays_with_verdicts_and_a_command_for_each(replayed, tmp_path):
    for number in range(3, 8):
        keep(replayed, replay([given(0, 300)], [result(0, f"r{number}")], f"r{number}"), f"2025-06-19T0{number}:30:00.000000Z")
    truth = replay([given(0, 300)], [result(0, "truth")], "truth")
    truth = replace(truth, spec=replace(truth.spec, config=replace(truth.spec.config, truth="fp32")))
    keep(replayed, truth, "2025-06-19T09:30:00.000000Z")
    said = reported(replayed, "--all").stdout
    assert said.startswith("7 replays: 6 NOT CHECKED, 1 FAILED\n") and "1 other (truths," in said
    assert [line.split()[0] for line in said.splitlines() if line[:3] == "  @"] == [f"@{number}" for number in range(1, 8)]
    reported(replayed, "--all -o", str(tmp_path / "all.html"))
    page = (tmp_path / "all.html").read_text()
    assert all(f'data-copy="actordbg report r{number}"' in page for number in range(1, 8)) and len(page) < 40_000


def test_the_index_says_wrong_where_a_module_is_wrong(replayed):
    for number, wrong in ((3, 0), (4, 1)):
        located = replace(result(0, f"r{number}"), extra={"located": {"places": 49, "count": wrong}})
        keep(replayed, replay([given(0, 300)], [located], f"r{number}"), f"2025-06-19T0{number}:30:00.000000Z")
    listed = reported(replayed, "--all")
    assert listed.stdout.startswith("4 replays: 1 FAILED, 2 NOT CHECKED, 1 WRONG\n")
    assert "next: actordbg explain " in listed.output, "what is wrong comes before what is new"


def test_the_index_breaks_no_word_at_eighty_columns(replayed):
    for text in (reported(replayed, "--all").stdout, reported(replayed, "--all --format md").stdout):
        assert "configuration" in text and "TOY MODEL" in text
    lines = reported(replayed, "--all").stdout.splitlines()
    assert max(map(len, lines)) <= 80 and not any(".." in line for line in lines)


def test_quiet_is_the_first_line_of_the_verdict(replayed):
    whole = reported(replayed, "r2").stdout.splitlines()
    assert reported(replayed, "r2 --quiet").stdout.splitlines() == whole[:1] and whole[0].startswith("FAILED")
    assert len(reported(replayed, "r1 --quiet --format md").stdout.splitlines()) > 5, "what was asked for"


def test_nothing_replayed_yet_says_so_and_ends_well(store):
    assert reported(store, "--all").stdout.startswith("nothing was replayed yet\n")
    assert json_of(reported(store, "--json"))["replays"] == []


def test_the_format_comes_from_the_option_else_from_the_suffix_and_each_is_a_rendering_of_its_own(replayed, tmp_path):
    starts = {
        "r.md": "**NOT CHECKED (TOY MODEL):** 3 of 3",
        "r.json": "{",
        "r.csv": "replay_id,",
        "r.txt": "NOT CHECKED (TOY MODEL): ",
    }
    for name, start in starts.items():
        assert reported(replayed, "--output", str(tmp_path / name)).stdout.count("\n") == 1
        assert (tmp_path / name).read_text().startswith(start)
    reported(replayed, "--format json --output", str(tmp_path / "r.md"))
    assert read_json(tmp_path / "r.md")["selection"] == "the last replay"
    each = {name: reported(replayed, "--all --format", name).stdout for name in get_args(Format)}
    assert len(set(each.values()) - {""}) == len(each)
    assert [shown["replay_id"] for shown in json.loads(each["json"])["replays"]] == ["r2", "r1"], "the newest first"
    rows = list(csv.DictReader(io.StringIO(each["csv"])))
    assert [(row["replay_id"], row["dump_id"], row["attn"]) for row in rows][-1] == ("r2", dump_id(1), "eager")
    assert len(rows) == 5
    with pytest.raises(UsageError):
        reported(replayed, "--json --format csv")


def test_a_file_that_cannot_be_written_is_an_environment_problem(replayed, tmp_path):
    (tmp_path / "file").touch()
    for output in (str(tmp_path / "file" / "r.md"), str(tmp_path), ".", "/"):
        with pytest.raises(EnvironmentProblem):
            reported(replayed, "--output", output, "--format", "md")


def test_a_pipe_or_a_device_gets_the_report_and_stays_and_a_link_leads_to_its_file(replayed, tmp_path):
    pipe, link, target = tmp_path / "pipe", tmp_path / "link.md", tmp_path / "target.md"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    reported(replayed, "--output", str(pipe), "--format", "json")
    assert os.read(reader, 10).startswith(b"{") and pipe.is_fifo()
    os.close(reader)
    link.symlink_to(target)
    reported(replayed, "--output", str(link))
    assert link.is_symlink() and "# actordbg report" in target.read_text()


def test_open_shows_a_page_in_a_folder_that_nobody_else_can_look_into(replayed, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the page stays, for the browser
    shown = []
    monkeypatch.setattr(webbrowser, "open_new_tab", lambda address: bool(shown.append(address)))
    done = reported(replayed, "--open")
    path = Path(urlsplit(shown[0]).path)
    assert done.exit_code == 0 and done.stdout.count("\n") == 1 and "no browser here" in done.stderr
    assert path.read_text().startswith("<!doctype html>") and path.parent.stat().st_mode & 0o77 == 0


def test_text_of_tokens_comes_from_a_file_that_must_be_there(replayed, tmp_path):
    for message in ("has no tokenizer.json", None):
        with pytest.raises(UsageError, match=message):
            reported(replayed, "--format html --tokenizer", str(tmp_path))
        (tmp_path / "tokenizer.json").write_text("{}")
