"""`actordbg dump enable`, `disable` and `status`."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from commandline import tried
from roots import ROOT, json_of, read_json, write_json

from actordbg.base.errors import NewerFormat, StoreProblem, UsageError
from actordbg.capture.control import Control
from actordbg.capture.ledger import Identity, Ledger
from actordbg.capture.ring import Ring
from actordbg.capture.switch_file import read_control, write_control
from actordbg.cli import output
from actordbg.cli.dump_status_work import process_rows, say_status
from actordbg.formats.ringfile import PLACE, place
from actordbg.store.layout import Store


def run(store, line, *words, fails=None):
    """A command's standard output, parsed if --json was requested."""
    result = tried(store, f"dump {line}", *words)
    if fails is not None:
        assert isinstance(result.exception, fails), result.output
        return result.exception
    assert result.exit_code == 0, result.output
    return json_of(result) if "--json" in " ".join([line, *words]) else result.stdout


def test_every_limit_gets_into_the_switch(store):
    answer = run(
        store, "enable --run ppo --every 10 --max-dumps 5 --max-bytes 10GB --ranks 0,1,4-7 --min-seq-len 8 --free-floor 1GiB --with-outputs --json --recorder-calls 12 --recorder-bytes 3MiB --recorder-dir store",
    )  # fmt: skip
    control = read_control(store)
    assert (control.run, control.every, control.max_dumps, control.max_bytes) == ("ppo", 10, 5, 10**10)
    assert (control.ranks, control.min_seq_len) == ((0, 1, 4, 5, 6, 7), 8)
    assert (control.free_floor_bytes, control.with_outputs) == (2**30, True)
    assert (control.ring, control.ring_bytes, control.ring_dir) == (12, 3 << 20, "store")
    assert answer["control"]["max_bytes"] == 10**10 and answer["enabled"] is True


def test_enabling_makes_the_store_and_again_keeps_the_run_and_replaces_the_limits(tmp_path):
    store = Store(tmp_path / "new")
    assert "Recording is on: run run-2" in run(store, "enable")
    assert read_control(store).free_floor_bytes == 5 * 2**30
    run(store, "enable --run a --every 7")
    run(store, "enable --max-dumps 3")
    control = read_control(store)
    assert (control.run, control.every, control.max_dumps, control.generation) == ("a", 1, 3, 3)
    run(store, "enable --every 7")
    assert "off" in run(store, "disable") and run(store, "disable --json")["changed"] is False
    control = read_control(store)
    assert not control.enabled and (control.run, control.every) == ("a", 7)
    run(store, "enable")
    control = read_control(store)
    assert control.run.startswith("run-") and control.generation == 6


def test_a_damaged_switch_is_replaced_and_a_newer_one_is_not(store):
    store.control_path.write_text("{")
    run(store, "enable --run a")
    store.control_path.write_text('{"format": 99}')
    run(store, "enable", fails=NewerFormat)
    assert store.control_path.read_text() == '{"format": 99}'


@pytest.mark.parametrize(
    "arguments",
    [("--run", "../x"), ("--ranks", "1-"), ("--max-bytes", "many"), ("--every", "0")],
)
def test_nonsense_is_a_usage_error_and_changes_nothing(store, arguments):
    run(store, "enable", *arguments, fails=UsageError)
    assert read_control(store) is None


def test_status_before_anything_was_recorded_and_without_a_store(store, tmp_path):
    assert "never on" in run(store, "status")
    run(store, "enable")
    assert (
        "No process has reported yet: start the job." in run(store, "status") and run(store, "status --json")["processes"] == []
    )
    for command in ("disable", "status"):
        run(Store(tmp_path / "none"), command, fails=StoreProblem)
    assert not (tmp_path / "none").exists()


def publish(store, run_name, rank, **counts):
    """Counters of a process that runs. counts: by name, `.` as `_of_`; anything else is an attribute of its ledger."""
    made = Ledger(Identity(run_name, rank, 2, "host", 100 + rank, f"actor0-{rank:08x}"))
    for name, value in counts.items():
        if (place := PLACE.get(name.replace("_of_", "."))) is not None:
            made.counts[place] = value
        else:
            setattr(made, name, value)
    made.publish(store, "on", {"queue_bytes": 0})
    return made


def test_status_shows_what_processes_counted_in_eighty_columns_and_earlier_runs_only_if_asked_for(store, monkeypatch):
    publish(store, "before", 0, closed=True)
    run(store, "enable --run a")
    publish(
        store, "a", 1023, role="reference", calls=1_234_567, captured=1_200_000, bytes=900 * 2**30, dropped_of_queue_full=4567,
        sampled_out_of_every=30_000, last_error="OSError: no space",
    )  # fmt: skip
    sound = next(store.counters.glob("a/*.json"))
    (store.counters / "a" / "0001-x.json").write_text("{")
    write_json(store.counters / "a" / "0002-x.json", read_json(sound) | {"calls": -1})
    answer = run(store, "status --json")
    (row,) = answer["processes"]
    counts = {"calls": 1_234_567, "captured": 1_200_000, "sampled_out": 30_000, "dropped": 4567}
    assert row["run"] == "a" and counts.items() <= row.items()
    assert (row["state"], row["role"], row["rank"], row["sampled_out_by"]) == ("on", "reference", 1023, {"every": 30_000})
    assert answer["total"]["calls"] == 1_234_567 and answer["enabled"] is True and answer["unreadable"] == 2
    assert [row["run"] for row in run(store, "status --all --json")["processes"]] == ["a", "before"]
    rows, _ = process_rows(store, datetime.now(timezone.utc) + timedelta(seconds=60))
    assert rows[0].state == "lost" and rows[0].age_s > 55
    monkeypatch.setattr("actordbg.cli.output.PIPE_WIDTH", 80)
    out = run(store, "status")
    heading, first, *_ = [line for line in out.splitlines() if line.startswith(("rank", "1023"))]
    assert max(map(len, (heading, first))) <= 80 and "1234567" in first
    words = " ".join(out.split())
    assert "1,234,567 calls = 1,200,000 captured + 4,567 dropped + 30,000 sampled out" in words
    assert "queue_full 4567; last: OSError: no space" in words


def test_status_shows_jobs_with_a_run_of_their_own_and_never_says_that_none_reported(store):
    """Two jobs under ACTORDBG_RUN had ended, and the status said that no process had reported yet."""
    publish(store, "long ago", 0, closed=True)
    run(store, "enable --run a")
    assert run(store, "status --json")["earlier"] == 1
    assert "reported yet" not in run(store, "status") and "--all" in run(store, "status")
    for name in ("first", "second"):
        publish(store, name, 0, closed=True)
    answer = run(store, "status --json")
    assert ([row["run"] for row in answer["processes"]], answer["earlier"]) == (["first", "second"], 1)


def test_status_names_the_rings_of_dead_processes_and_what_jobs_have_switches(store, tmp_path):
    run(store, "enable --run a")
    write_control(store, replace(Control(True, "night", "2026-11-20T12:00:00.000000Z"), every=7), "night")
    ring = Ring.create(place(store), "host-4711-x-1", {"pid": 4711}, 2**20, 2**20)
    assert [row["alive"] for row in run(store, "status --json")["rings"]] == [True]
    ring.let_go()
    answer = run(store, "status --json")
    assert [(row["pid"], row["alive"], row["inputs"]) for row in answer["rings"]] == [(4711, False, 0)]
    assert [job["run"] for job in answer["jobs"]] == ["night"]
    out = run(store, "status")
    assert "flight recorder of a dead process: 0 inputs" in out and "job night only" in out and "one call in 7" in out
    ring.remove()


def test_disable_reaches_every_job_or_one(store):
    for job in ("one", "two"):
        write_control(store, Control(True, job, "2026-11-20T12:00:00.000000Z"), job)
    run(store, "enable --run a")
    run(store, "disable --run one")
    assert not read_control(store, "one").enabled and read_control(store, "two").enabled
    run(store, "enable --run two --every 9")
    assert read_control(store, "two").every == 9 and read_control(store).run == "a"
    run(store, "disable")
    assert not read_control(store, "two").enabled and not read_control(store).enabled


def test_disable_of_another_run_leaves_the_recording_on_and_names_it(store):
    run(store, "enable --run a")
    assert "run a is" in run(store, "disable --run b", fails=UsageError).message
    assert read_control(store).enabled and "off" in run(store, "disable --run a")


def test_watch_shows_it_again_and_again_until_it_is_interrupted(store):
    run(store, "enable --run a")
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), "dump", "status", "--watch", "--interval", "0.1", "--json"]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    first = json.loads(process.stdout.readline())
    publish(store, "a", 3, calls=5, captured=5)
    while not (seen := json.loads(process.stdout.readline()))["processes"]:
        pass
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert first["processes"] == [] and seen["processes"][0]["calls"] == 5


@pytest.mark.parametrize("earlier, following", [(2, "actordbg lint"), (0, "actordbg dump enable")])
def test_the_status_of_a_job_that_ended_leads_to_what_it_recorded(capsys, monkeypatch, earlier, following):
    monkeypatch.setattr(output, "wanted", output.OutputOptions())  # another command's may have a store
    answer = {key: [] for key in ("processes", "jobs", "rings", "damaged_switches")} | {"control": None, "enabled": False}
    say_status(answer | {"earlier": earlier, "store": "S", "unreadable": 0})
    assert f"next: {following}" in "".join(capsys.readouterr())
