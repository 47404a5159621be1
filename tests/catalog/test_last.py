"""Which replay `last` means in a store that others use too."""

import os
from pathlib import Path

import pytest
from commandline import invoke
from comparecases import given, write_replay

from actordbg.api import checks
from actordbg.catalog.query import newest_configuration
from actordbg.dumps.create import create_dumps
from actordbg.formats.store_files import make_folder
from actordbg.records.journal import SPEC, SUPERVISOR, Journal
from actordbg.replay.supervise import load_spec

INPUTS = [given(0)]


@pytest.fixture()
def shared(store, monkeypatch):
    """Two replays of this user, then a cell of this user's matrix, then somebody else's replay, the newest."""
    for name, command in (
        ("20250619T050000-000001", "actordbg replay"),
        ("20250619T050000-000002", "actordbg replay --packing"),
        ("20250619T050000-000003", "matrix 20250619T050000-00000m, cell 0: sdpa"),
        ("20250619T050000-000004", "actordbg replay --dtype bf16"),
    ):
        write_replay(store, name, INPUTS, command=command)
    theirs = store.replays / "20250619T050000-000004"
    owner = os.geteuid() + 1
    real = Path.stat

    def stat(self, **kwargs):
        found = real(self, **kwargs)
        return os.stat_result((*found[:4], owner, *found[5:])) if self == theirs else found

    monkeypatch.setattr(Path, "stat", stat)
    return store


def test_last_is_ones_own_replay_and_no_cell(shared):
    row = newest_configuration(shared)
    assert row is not None and row.replay_id == "20250619T050000-000002"
    assert load_spec(shared, "last").replay_id == "20250619T050000-000002", "a matrix continues its own cells"


def test_last_is_the_last_that_ended_and_an_interrupted_check_headlines_nothing(shared, monkeypatch):
    def actordbg(*words):
        return " ".join(invoke(shared, *words).output.split())

    def interrupted(store, spec, *_, **__):
        make_folder(store.replays / spec.replay_id)
        (store.replays / spec.replay_id / SPEC).write_text(spec.to_json())
        Journal(store.replays / spec.replay_id / SUPERVISOR).append("finished", status="interrupted")
        raise KeyboardInterrupt

    monkeypatch.setattr(checks, "run_check", interrupted)
    create_dumps(shared, 2, batch_size=1, seq_len=8, vocab_size=64, seed=1)
    said, left = actordbg("check", "--quiet"), load_spec(shared, "@last").replay_id
    assert left > "20250619T050000-000004", "what is resumed is what was interrupted"
    assert f"kept, `actordbg replay --resume {left}`, then `actordbg compare {left} truth` continues" in said
    assert "last is 20250619T050000-000002" in actordbg("compare", "last", "20250619T050000-000001")
    assert f"{left} is newer and interrupted: `actordbg replay --resume {left}` continues" in actordbg("report")
    assert "20250619T050000-000002" in actordbg("report", "@last")
    assert "3 replays: 3 NOT CHECKED" in actordbg("report", "--all")


def test_compare_says_which_one_it_took(shared):
    result = invoke(shared, "compare last 20250619T050000-000001")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "last is 20250619T050000-000002: TOY MODEL (tiny) fp32 sdpa" in said and "actordbg replay --packing" in said


def test_where_one_has_none_it_is_the_newest_of_anybody_and_named(shared, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    row = newest_configuration(shared)
    assert row is not None and row.replay_id == "20250619T050000-000004"
