"""Importing old pickles: same tensors, same times and ranks, nothing twice, bad files skipped by name."""

import errno
import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from commandline import invoke
from replaycases import old_pickle

from actordbg.base.errors import LaunchProblem, StoreProblem, UsageError
from actordbg.dumps.importer import find_files, import_paths, run_name
from actordbg.formats.dumpfile import read_record
from actordbg.store import payload
from actordbg.store.layout import Store


@pytest.fixture
def pickles(tmp_path):
    """A folder with four old pickles of ranks 0 to 3."""
    for rank in range(4):
        old_pickle(tmp_path / "my run!", rank, f"20250619_05260{rank}_430740")
    return tmp_path / "my run!"


def records(store):
    return [read_record(path) for path in store.iter_dumps()]


def test_tensors_and_record_say_what_the_pickle_says_and_the_rest_stays_unknown(store, tmp_path):
    path = old_pickle(tmp_path / "ppo", rank=3)
    import_paths(store, [path])
    original = pickle.loads(path.read_bytes())
    dump = payload.load(next(store.iter_dumps()))
    for name, tensor in dump.tensors.items():
        assert tensor.dtype == original[name].dtype and torch.equal(tensor, original[name])
    record = dump.record
    assert (record.run, record.rank, record.timestamp) == ("ppo", 3, "2025-06-19T05:26:08.430740Z")
    assert (record.batch_size, record.seq_len, record.action_len, record.tokens) == (2, 12, 5, 18)
    assert record.arguments["return_output"] is True and record.arguments["packed_seq_lens"] is None
    assert (record.source, record.replayable, record.origin) == ("import", True, {"name": path.name})
    assert record.dump_id.endswith(hashlib.sha256(path.read_bytes()).hexdigest()[:16])
    assert (record.role, record.training, record.grad_enabled, record.model_name, record.step) == (None,) * 5


def test_nothing_is_imported_twice_however_it_is_called(store, pickles, tmp_path, monkeypatch):
    first = sorted(pickles.iterdir())[0]
    assert import_paths(store, [first, first, pickles]).runs == ["my-run-"]
    before = {path: path.stat().st_mtime_ns for path in store.iter_dumps()}
    assert {record.run for record in records(store)} == {"my-run-"}
    (tmp_path / "elsewhere").mkdir()
    copy = shutil.copy(first, tmp_path / "elsewhere" / "renamed.pkl")
    assert import_paths(store, [Path(copy)], run="another").present == 1
    monkeypatch.setattr("actordbg.dumps.child_pool.LegacyReader.tree", None)  # a known name is not even decoded
    summary = import_paths(store, [pickles])
    assert (summary.added, summary.present, summary.refused) == (0, 4, [])
    assert {path: path.stat().st_mtime_ns for path in store.iter_dumps()} == before


def test_folders_are_searched_and_each_is_a_run(store, tmp_path):
    old_pickle(tmp_path / "a" / "first", stamp="20250619_052608_430741")
    old_pickle(tmp_path / "a" / "second", stamp="20250619_052608_430742")
    assert import_paths(store, [tmp_path / "a"]).runs == ["first", "second"]


@pytest.mark.parametrize("folder, expected", [("ok-1", "ok-1"), ("..hidden", "hidden"), ("###", "import"), ("é" * 9, "import")])
def test_a_folder_name_that_no_run_can_have_is_changed(tmp_path, folder, expected):
    assert run_name(tmp_path / folder / "x.pkl") == expected


def test_bad_files_are_named_and_the_others_imported(store, pickles):
    (pickles / "empty.pkl").write_bytes(b"")
    (pickles / "text.pkl").write_text("hello")
    (pickles / "torch.pkl").write_bytes(pickle.dumps({"sequences": 1, "rank": 0, "timestamp": ""}))
    (pickles / "folder.pkl").mkdir()
    summary = import_paths(store, [pickles])
    assert summary.added == 4
    assert [Path(refusal.path).name for refusal in summary.refused] == ["empty.pkl", "text.pkl", "torch.pkl"]


def test_a_file_that_vanishes_is_refused_and_the_others_imported(store, pickles):
    last = sorted(pickles.iterdir())[-1]
    done = Mock(side_effect=lambda dump_id: last.unlink(missing_ok=True))
    summary = import_paths(store, [pickles], on_file=done)
    assert (summary.added, done.call_count) == (3, 4)
    assert [(refusal.path, refusal.code) for refusal in summary.refused] == [(str(last), "environment")]


def test_a_full_disk_ends_the_import_and_the_next_one_goes_on(store, pickles, monkeypatch):
    publish, calls = Store.publish_dump, []

    def full(self, record, blob):
        calls.append(record)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return publish(self, record, blob)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "publish_dump", full)
    with pytest.raises(StoreProblem, match="No space left") as caught:
        import_paths(store, [pickles])
    assert "continues where it stopped" in caught.value.hint
    summary = import_paths(store, [pickles])
    assert (summary.added, summary.present) == (2, 2)


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_without_a_decoding_process_nothing_is_blamed_on_the_files(store, pickles, monkeypatch, program):
    monkeypatch.setattr("actordbg.dumps.child_pool.sys.executable", program)
    with pytest.raises(LaunchProblem, match="decoding process"):
        import_paths(store, [pickles])


@pytest.mark.parametrize("run", ["", "../x"])
def test_an_impossible_run_name_is_a_usage_error(store, pickles, run):
    with pytest.raises(UsageError):
        import_paths(store, [pickles], run=run)


def test_no_pickles_is_a_usage_error(store, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no file below .* that can be imported"):
        import_paths(store, [tmp_path / "empty"])
    with pytest.raises(UsageError, match="does not exist"):
        find_files([tmp_path / "nowhere"])


def test_the_command_answers_in_json_and_in_words_and_names_what_it_refuses(pickles, tmp_path):
    importing = (Store(tmp_path / "s"), "dump", "import", pickles)
    done = invoke(*importing, "--run", "r1", "--json")
    answer = json.loads(done.stdout)
    assert (done.exit_code, answer["added"], answer["present"], answer["refused"], answer["runs"]) == (0, 4, 0, [], ["r1"])
    done = invoke(*importing, "--quiet")
    assert done.exit_code == 0 and "0 dumps added, 4 already there" in done.stdout
    (pickles / "bad.pkl").write_bytes(pickle.dumps({"a": os.system}))
    done = invoke(*importing, "--quiet")
    assert done.exit_code == 1 and "1 refused" in done.stdout
    assert "refused[unsafe-input]" in done.stderr and "bad.pkl" in done.stderr and "posix.system" in done.stderr
