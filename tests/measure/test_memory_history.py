"""`replay --memory-snapshot`: torch's history of allocations, beside the results. CUDA is a stand-in: there is none here."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from commandline import invoke
from supervised import make_spec

from actordbg.actor import session as sessions
from actordbg.base.errors import ActordbgError
from actordbg.formats.store_files import make_folder
from actordbg.replay.actor_engine import ActorEngine


@pytest.fixture
def told(monkeypatch):
    """What a stand-in for torch.cuda was told. Its snapshots hold how many there were before."""
    import torch

    said = []

    def record(enabled="all", **options):
        said.append((enabled, options.get("max_entries")))

    def dump(path):
        said.append(Path(path).name)
        Path(path).write_text(str(len(said)))

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return said


def test_a_history_is_written_after_each_input_and_a_failed_one_has_its_own(store, told, monkeypatch):
    spec = make_spec(3, memory_snapshot=True)
    folder = store.replays / spec.replay_id
    make_folder(folder)

    @contextlib.contextmanager
    def opened(*arguments, **options):
        yield SimpleNamespace(is_collective=False, resolved={"load_s": 0.0}, backward_for=lambda record: False, run=run)

    def run(item, **_):
        if item.dump_id == "d1":
            raise RuntimeError("CUDA out of memory")
        return SimpleNamespace(apply=lambda undo: None, tensors=None)

    monkeypatch.setattr(sessions, "open_actor", opened)
    monkeypatch.setattr("actordbg.replay.actor_engine.defaults_of", lambda *_: None)
    monkeypatch.setattr(ActorEngine, "_fields", lambda *_: {"status": "passed", "extra": {}})
    engine = ActorEngine(folder, spec, 1)
    engine.open()
    for item in spec.inputs:
        with contextlib.suppress(RuntimeError):
            engine.run(item, SimpleNamespace(record=None, dump_id=item.dump_id), recorded=True)  # type: ignore[arg-type]
    assert told[0] == ("all", 100_000) and len(told) == 4
    assert {path.name: path.read_text() for path in folder.glob("*.pickle")} == {
        "memory-rank1.pickle": "4", "memory-rank1-d1.pickle": "3",
    }  # fmt: skip
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.glob("*.pickle"))
    engine.spec = make_spec(1)
    engine.open()
    assert told[-1] == (None, None)  # a replay without it records nothing


def test_without_cuda_it_is_refused_with_what_to_do_instead(store):
    invoke(store, "dump create --quiet --seq-len 8")
    with pytest.raises(ActordbgError) as refused:
        invoke(store, "replay --memory-snapshot --quiet")
    assert "on CUDA only" in refused.value.message and "peak memory" in str(refused.value.hint or refused.value.message)
