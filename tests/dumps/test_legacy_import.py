"""Importing old pickles: same tensors, same times and ranks, nothing twice, bad files skipped by name."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import torch
import typer
from commandline import function_of
from replaycases import old_pickle
from roots import ROOT
from typer.testing import CliRunner

from actordbg.base.errors import LaunchProblem, StoreProblem, UsageError
from actordbg.dumps.importer import find_pickles, import_paths, run_name
from actordbg.formats.dumpfile import read_record
from actordbg.store import payload
from actordbg.store.layout import Store


@pytest.fixture
def pickles(tmp_path: Path) -> Path:
    """A folder with four old pickles of ranks 0 to 3."""
    for rank in range(4):
        old_pickle(tmp_path / "my run!", rank, f"20250619_05260{rank}_430740")
    return tmp_path / "my run!"


def records(store: Store):
    return [read_record(path) for path in store.iter_dumps()]


def test_tensors_arrive_as_they_were(store: Store, tmp_path: Path):
    path = old_pickle(tmp_path)
    import_paths(store, [path])
    original = pickle.loads(path.read_bytes())
    dump = payload.load(next(store.iter_dumps()))
    for name, tensor in dump.tensors.items():
        assert tensor.dtype == original[name].dtype and torch.equal(tensor, original[name])


def test_the_record_says_what_the_pickle_says(store: Store, tmp_path: Path):
    path = old_pickle(tmp_path / "ppo", rank=3)
    import_paths(store, [path])
    record = records(store)[0]
    assert (record.run, record.rank, record.timestamp) == ("ppo", 3, "2025-06-19T05:26:08.430740Z")
    assert (record.batch_size, record.seq_len, record.action_len, record.tokens) == (2, 12, 5, 18)
    assert record.arguments["return_output"] is True and record.arguments["packed_seq_lens"] is None
    assert record.source == "import" and record.replayable
    assert record.origin == {"name": path.name}
    assert record.dump_id.endswith(hashlib.sha256(path.read_bytes()).hexdigest()[:16])


def test_what_the_pickle_does_not_say_stays_unknown(store: Store, tmp_path: Path):
    import_paths(store, [old_pickle(tmp_path)])
    record = records(store)[0]
    assert (record.role, record.training, record.grad_enabled, record.model_name, record.step) == (None,) * 5


def test_a_second_import_adds_nothing_and_changes_nothing(store: Store, pickles: Path):
    import_paths(store, [pickles])
    before = {path: path.stat().st_mtime_ns for path in store.iter_dumps()}
    summary = import_paths(store, [pickles])
    assert (summary.added, summary.present, summary.refused) == (0, 4, [])
    assert {path: path.stat().st_mtime_ns for path in store.iter_dumps()} == before


def test_a_second_import_does_not_even_decode(store: Store, pickles: Path, monkeypatch: pytest.MonkeyPatch):
    import_paths(store, [pickles])
    monkeypatch.setattr("actordbg.dumps.child_pool.LegacyReader.decode", None)
    assert import_paths(store, [pickles]).present == 4


def test_a_renamed_or_copied_file_is_recognised(store: Store, pickles: Path, tmp_path: Path):
    import_paths(store, [pickles])
    copy = tmp_path / "elsewhere" / "renamed.pkl"
    copy.parent.mkdir()
    shutil.copy(sorted(pickles.iterdir())[0], copy)
    assert import_paths(store, [copy], run="another").present == 1


def test_the_same_file_named_twice_is_imported_once(store: Store, tmp_path: Path):
    path = old_pickle(tmp_path)
    assert import_paths(store, [path, path, tmp_path]).added == 1


def test_ids_are_the_same_in_every_store(store: Store, pickles: Path, tmp_path: Path):
    other = Store(tmp_path / "other")
    import_paths(store, [pickles])
    import_paths(other, [pickles])
    assert [record.dump_id for record in records(store)] == [record.dump_id for record in records(other)]


def test_two_calls_in_the_same_microsecond_are_two_dumps(store: Store, tmp_path: Path):
    for rank in range(2):
        old_pickle(tmp_path, rank)
    assert import_paths(store, [tmp_path]).added == 2


def test_the_run_is_the_folder_unless_named(store: Store, pickles: Path):
    assert import_paths(store, [pickles]).runs == ["my-run-"]
    assert {record.run for record in records(store)} == {"my-run-"}


def test_folders_are_searched_and_each_is_a_run(store: Store, tmp_path: Path):
    old_pickle(tmp_path / "a" / "first", stamp="20250619_052608_430741")
    old_pickle(tmp_path / "a" / "second", stamp="20250619_052608_430742")
    assert import_paths(store, [tmp_path / "a"]).runs == ["first", "second"]


@pytest.mark.parametrize(
    ("folder", "expected"), [("ok-1", "ok-1"), ("..hidden", "hidden"), ("###", "import"), ("é" * 9, "import")]
)
def test_a_folder_name_that_no_run_can_have_is_changed(tmp_path: Path, folder: str, expected: str):
    assert run_name(tmp_path / folder / "x.pkl") == expected


def test_the_world_is_the_smallest_that_has_every_rank_seen(store: Store, pickles: Path):
    import_paths(store, [pickles])
    assert {record.world_size for record in records(store)} == {4}


def test_bad_files_are_named_and_the_others_imported(store: Store, pickles: Path):
    (pickles / "empty.pkl").write_bytes(b"")
    (pickles / "text.pkl").write_text("hello")
    (pickles / "torch.pkl").write_bytes(pickle.dumps({"sequences": 1, "rank": 0, "timestamp": ""}))
    (pickles / "folder.pkl").mkdir()
    summary = import_paths(store, [pickles])
    assert summary.added == 4
    assert [Path(refusal.path).name for refusal in summary.refused] == ["empty.pkl", "text.pkl", "torch.pkl"]


def test_a_file_that_vanishes_is_refused_and_the_others_imported(store: Store, pickles: Path):
    last = sorted(pickles.iterdir())[-1]
    summary = import_paths(store, [pickles], on_progress=lambda done, total, path: last.unlink(missing_ok=True))
    assert summary.added == 3
    assert [(refusal.path, refusal.code) for refusal in summary.refused] == [(str(last), "environment")]


def test_progress_counts_every_file(store: Store, pickles: Path):
    seen: list[tuple[int, int]] = []
    import_paths(store, [pickles], on_progress=lambda done, total, path: seen.append((done, total)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_full_disk_ends_the_import_and_the_next_one_goes_on(store: Store, pickles: Path, monkeypatch: pytest.MonkeyPatch):
    publish, calls = Store.publish_dump, []

    def full(self: Store, record: object, blob: bytes) -> Path:
        calls.append(record)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return publish(self, record, blob)  # type: ignore[arg-type]

    monkeypatch.setattr(Store, "publish_dump", full)
    with pytest.raises(StoreProblem, match="No space left") as caught:
        import_paths(store, [pickles])
    assert "goes on where it stopped" in caught.value.hint
    summary = import_paths(store, [pickles])
    assert (summary.added, summary.present) == (2, 2)


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_without_a_decoding_process_nothing_is_blamed_on_the_files(
    store: Store, pickles: Path, monkeypatch: pytest.MonkeyPatch, program: str
):
    monkeypatch.setattr("actordbg.dumps.child_pool.sys.executable", program)
    with pytest.raises(LaunchProblem, match="decoding process"):
        import_paths(store, [pickles])


@pytest.mark.parametrize("run", ["", "a/b", "../x", "a b"])
def test_an_impossible_run_name_is_a_usage_error(store: Store, pickles: Path, run: str):
    with pytest.raises(UsageError):
        import_paths(store, [pickles], run=run)


def test_no_pickles_is_a_usage_error(store: Store, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no \*\.pkl"):
        import_paths(store, [tmp_path / "empty"])
    with pytest.raises(UsageError, match="does not exist"):
        find_pickles([tmp_path / "nowhere"])


def test_the_desk_finds_out_that_nothing_is_new_without_torch(store: Store, pickles: Path):
    import_paths(store, [pickles])
    code = """if True:
        import sys
        from pathlib import Path
        from actordbg.dumps.importer import import_paths
        from actordbg.store.layout import Store
        assert import_paths(Store(sys.argv[1]), [Path(sys.argv[2])]).present == 4
        assert 'torch' not in sys.modules and 'pickle' not in sys.modules.get('actordbg.dumps.decode').__dict__
    """
    subprocess.run([sys.executable, "-c", code, str(store.root), str(pickles)], check=True, cwd=ROOT, timeout=60)


def test_the_real_dumps_import_and_a_random_twenty_are_equal(store: Store, shared_dumps: Path):
    count = len(list(shared_dumps.glob("*.pkl")))
    summary = import_paths(store, [shared_dumps])
    assert (summary.added, summary.refused) == (count, [])
    paths = list(store.iter_dumps())
    assert len(paths) == count >= 257
    for path in random.Random(20).sample(paths, 20):
        dump = payload.load(path)
        original = pickle.loads((shared_dumps / dump.record.origin["name"]).read_bytes())
        assert set(dump.tensors) == {"sequences", "attention_mask", "action_mask"}
        for name, tensor in dump.tensors.items():
            assert tensor.dtype == original[name].dtype and tensor.shape == original[name].shape
            assert torch.equal(tensor, original[name])
    assert {record.world_size for record in records(store)} == {4}
    assert import_paths(store, [shared_dumps]).present == count


def cli(*words: object):
    app = typer.Typer()
    app.command("import")(function_of("dump import"))

    @app.callback()
    def root(store: Annotated[Path | None, typer.Option()] = None) -> None: ...

    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_command_answers_in_json(pickles: Path, tmp_path: Path):
    done = cli("--store", tmp_path / "s", "import", pickles, "--run", "r1", "--json")
    answer = json.loads(done.stdout)
    assert done.exit_code == 0
    assert (answer["added"], answer["present"], answer["refused"], answer["runs"]) == (4, 0, [], ["r1"])


def test_the_command_names_refused_files_and_exits_1(pickles: Path, tmp_path: Path):
    (pickles / "bad.pkl").write_bytes(pickle.dumps({"a": os.system}))
    done = cli("--store", tmp_path / "s", "import", pickles, "--quiet")
    assert done.exit_code == 1
    assert "4 dumps added" in done.stdout and "1 refused" in done.stdout
    assert "refused[unsafe-input]" in done.stderr and "bad.pkl" in done.stderr and "posix.system" in done.stderr


def test_the_command_exits_0_when_everything_is_already_there(pickles: Path, tmp_path: Path):
    cli("--store", tmp_path / "s", "import", pickles, "--quiet")
    done = cli("--store", tmp_path / "s", "import", pickles, "--quiet")
    assert done.exit_code == 0 and "0 dumps added, 4 already there" in done.stdout
