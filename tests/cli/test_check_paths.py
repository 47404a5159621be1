"""`actordbg check PATH...`: a store, a folder of old pickles, files of a run or a dump, with nothing done before."""

import pytest
import typer
from commandline import invoke
from replaycases import old_pickle
from runfiles import written

from actordbg.api import checks as checking, run_files
from actordbg.base.errors import CorruptDump, Unsupported, UsageError
from actordbg.dumps.create import create_dumps
from actordbg.store.layout import Store


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """The store and the number of inputs of each check that would have run. There is no store but those that a test makes."""
    checks = []

    def stop(store, spec, **_):
        checks.append((store.root, len(spec.inputs)))
        raise typer.Exit

    monkeypatch.setattr(checking, "run_check", stop)
    monkeypatch.chdir(tmp_path)
    return checks


def test_whatever_one_has_is_checked_with_one_command(tmp_path, planned):
    ours = Store(tmp_path / "store")
    old_pickle(tmp_path / "input_dumps")
    invoke(ours, "check input_dumps")
    create_dumps(ours, 2, batch_size=1, seq_len=24, vocab_size=64, seed=1)
    invoke(ours, "check input_dumps")  # imported before, and alone among the others
    other = Store(tmp_path / "other")
    create_dumps(other, 3, batch_size=1, seq_len=24, vocab_size=64, seed=2)
    invoke(ours, "check other")
    invoke(ours, "check", str(next(iter(other.iter_dumps()))))
    written("prime-rl", tmp_path)
    invoke(ours, "check out")  # two forwards of eight rows; their losses are not replayed
    assert planned == [(ours.root, 1), (ours.root, 1), (other.root, 3), (ours.root, 1), (ours.root, 2)]


def test_more_dumps_than_a_condition_can_name_are_selected_by_their_time(tmp_path, planned, monkeypatch):
    monkeypatch.setattr(run_files, "MOST_NAMED", 1)
    ours = Store(tmp_path / "store")
    old_pickle(tmp_path / "input_dumps")
    invoke(ours, "check input_dumps")
    create_dumps(ours, 2, batch_size=1, seq_len=24, vocab_size=64, seed=1)
    written("prime-rl", tmp_path)
    invoke(ours, "check out")
    assert planned == [(ours.root, 1), (ours.root, 2)]


def test_a_file_brings_its_store_or_gets_a_new_one(tmp_path, planned):
    there = Store(tmp_path / "there")
    create_dumps(there, 2, batch_size=1, seq_len=24, vocab_size=64, seed=2)
    for name, path in {"absent": next(iter(there.iter_dumps())), "new": old_pickle(tmp_path, name="x.pkl")}.items():
        invoke(Store(tmp_path / name), "check", str(path))
    assert planned == [(there.root, 1), (tmp_path / "new", 1)] and not (tmp_path / "absent").exists()


def test_a_path_that_is_nothing_of_these_is_refused(tmp_path, planned):
    store, new = Store(tmp_path / "store").create(), Store(tmp_path / "new")
    for name in ("empty", "bad", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "bad" / "x.pkl").write_text("no pickle")
    (tmp_path / "notes.txt").write_text("hello")
    for words, error, message in (
        (["nowhere"], UsageError, "nowhere does not exist"),
        (["notes.txt"], Unsupported, "notes.txt: it is not a file that is read"),
        (["empty"], UsageError, "no file below empty that can be imported"),
        (["store", "bad"], UsageError, "store is a store: check it alone"),
        (["bad"], CorruptDump, "no file below bad could be imported"),
        (["model"], UsageError, "model is a model, not files"),
    ):
        with pytest.raises(error, match=message):
            invoke(new, "check", *words)
    with pytest.raises(UsageError, match="model is a model"):
        invoke(new, "lint", "model")
    assert not planned and not new.exists() and not list(store.iter_dumps())
