"""What somebody else, or an accident, put in the place of a file or a folder of the recorder; and arguments that no file can hold."""

import ast
import os

import pytest
import torch
from capturekit import Recording, SignatureA, ids
from commandline import invoke
from roots import read_json, run_program
from runkit import clean_environment, python

from actordbg.capture.control import Control
from actordbg.capture.switch_file import write_control
from actordbg.dumps.recover import find_rings, recover
from actordbg.formats import ringfile
from actordbg.formats.dump_record import now_timestamp
from actordbg.formats.store_files import TEMPORARY, processes, temporary_name
from actordbg.records.run_files import read_counters
from actordbg.store import payload
from actordbg.store.layout import Store

LOOKS = """
import sys
from typer.testing import CliRunner
from actordbg.cli.app import app
for store in sys.argv[1:]:
    for words in (["status", "--json"], ["recover"], ["recover", "--discard"]):
        answer = CliRunner().invoke(app, ["--store", store, "dump", *words])
        print(answer.exit_code, type(answer.exception).__name__)
"""


class Taking(torch.nn.Module):
    def forward(self, sequences, note=None, more=None):
        if note == "broken":
            raise ValueError("a file called \udce9")
        return sequences


@pytest.mark.slow
def test_a_fifo_in_the_place_of_a_file_stops_neither_a_job_nor_a_command(tmp_path):
    stores = [Store(tmp_path / name).create() for name in ("switch", "format", "others")]
    os.mkfifo(stores[0].control_path)
    stores[1].format_path.unlink()
    os.mkfifo(stores[1].format_path)
    rings = ringfile.place(stores[2])
    rings.mkdir(parents=True, mode=0o700)
    (stores[2].counters / "r").mkdir(parents=True)
    for path in (rings / f"{ringfile.host_name()}-1-x-1.ring", rings / "y.making", stores[2].counters / "r" / "0000-h-1-a.json"):
        os.mkfifo(path)
    (rings / "gone.ring").symlink_to("nowhere")
    (rings / "zero.ring").symlink_to("/dev/zero")
    answers = python(LOOKS, clean_environment(), *(str(store.root) for store in stores)).splitlines()
    assert set(answers) <= {"0 NoneType", "1 StoreProblem", "1 SystemExit"}
    recording = Recording(stores[2])
    recording.forward(Taking(), ids())
    assert recording.close(60) and len(list(stores[2].iter_dumps())) == 1


def test_half_of_a_surrogate_pair_costs_no_dump(store):
    recording, actor = Recording(store), Taking()
    actor.model = torch.nn.Linear(1, 1)
    actor.model.config = type("Config", (), {"_name_or_path": "/models/caf\udce9"})()
    recording.forward(actor, ids(), "x\ud800y", "whole: \U0001f600")
    recording.forward(actor, ids(seed=1), ["\udc80"], {"\ud800": 1})
    with pytest.raises(ValueError, match="a file called"):
        recording.forward(actor, ids(seed=2), "broken")
    first, second, third = recording.dumps()
    assert ast.literal_eval(first.record.extra["note"].partition(": ")[2]) == "x\ud800y"
    assert "half of a surrogate pair" in first.record.extra["note"] and not first.record.replayable
    assert first.record.arguments["more"] == "whole: \U0001f600" and first.record.model_name == "/models/caf\\udce9"
    assert second.record.extra.keys() == {"note", "more"}
    assert all(torch.equal(dump.inputs["sequences"], ids(seed=n)) for n, dump in enumerate((first, second, third)))
    assert [report.problem for report in recover(store, find_rings(store))] == [None]
    assert payload.load(store.dump_path(third.record)).record.trigger_facts["message"] == "ValueError: a file called \\udce9"


def test_a_tensor_that_a_transform_made_of_another_costs_its_call_and_not_the_process(store):
    recording, actor = Recording(store), Taking()
    x = torch.ones(2, 9)
    for transform in (torch.func.functionalize, torch.func.vmap):
        assert torch.equal(transform(lambda seen: recording.forward(actor, seen) * 2)(x), x * 2)
    recording.forward(actor, x)
    assert len(recording.dumps()) == 1 and recording.ledger.dropped == {"error": 2}


@pytest.mark.parametrize("how", ["of another user", "writable by others", "a link"])
def test_a_ring_is_never_made_in_a_folder_that_is_not_ours_alone(store, tmp_path, monkeypatch, caplog, how):
    monkeypatch.setenv("ACTORDBG_RING_DIR", str(tmp_path / "memory"))
    folder = ringfile.wanted_place(store)
    folder.parent.mkdir()
    if how == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o777 if how == "writable by others" else 0o700)
        if how == "of another user":
            monkeypatch.setattr(os, "geteuid", lambda: 4711)
    recording = Recording(store)
    recording.forward(SignatureA(), ids())
    ring = recording.ring
    assert ring.path.parent == store.root / "rings"
    assert not list(folder.iterdir()) and str(folder) in caplog.text and str(store.root / "rings") in caplog.text
    assert find_rings(store) == [ring.path]
    assert recording.close(60)


def test_unfinished_files_of_dead_processes_go_at_once_and_no_others(store):
    recording = Recording(store)
    recording.forward(SignatureA(), ids())
    assert recording.close(60)
    (dump,) = store.iter_dumps()
    (counters,) = store.counters.rglob("*.json")
    dead = run_program(["sh", "-c", "echo $$"], check=True).stdout.strip()
    mine, theirs = temporary_name("x"), f"{TEMPORARY}{processes()}-{dead}-aabbccdd-x"
    elsewhere = theirs.replace(processes(), "0" * 8)
    for folder in (dump.parent, counters.parent):
        for name in (mine, theirs, elsewhere, f"{TEMPORARY}{dead}-aabbccdd-old"):
            (folder / name).write_bytes(b"half")
    run = invoke(store, "store fsck --repair")
    assert run.exit_code == 0 and not (dump.parent / theirs).exists(), run.output
    assert invoke(store, "dump recover").exit_code == 0
    for folder in (dump.parent, counters.parent):
        left = {path.name for path in folder.glob(f"{TEMPORARY}*")}
        assert left == {mine, elsewhere, f"{TEMPORARY}{dead}-aabbccdd-old"}
    assert read_json(counters) and read_counters(counters)["captured"] == 1


def test_a_switch_that_cannot_be_read_is_named_and_the_others_are_told_of(store):
    write_control(store, Control(enabled=True, run="job", since=now_timestamp()), "job")
    os.mkfifo(store.control_of("odd"))
    store.control_of(None).write_text("{")
    run = invoke(store, "dump status")
    assert run.exit_code == 0 and "Recording is on for the job job" in run.output, run.output
    assert "odd.json: it is a FIFO" in run.output and "control.json" in run.output
