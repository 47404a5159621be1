"""Exported dumps open with ordinary tools and hold exactly what the actor received."""

import pytest
import safetensors
import torch
from commandline import invoke
from safetensors.torch import load_file

from actordbg.base.errors import Conflict, EnvironmentProblem, UsageError
from actordbg.dumps.create import create_dumps
from actordbg.dumps.export import export_dump
from actordbg.formats.dump_record import DumpRecord
from actordbg.formats.record_reading import parse_record
from actordbg.store import payload


@pytest.fixture
def place(store):
    """A dump with a strided tensor, every kind of plain argument, and an awkward dtype."""
    record = DumpRecord(
        dump_id="d1", run="r", rank=2, timestamp="2025-06-19T05:26:08.430740Z", batch_size=2, seq_len=5, tokens=10,
        arguments={"return_output": True, "packed_seq_lens": [3, 2], "ring_attn_group": None, "scale": 0.5, "name": "x"},
    )  # fmt: skip
    tensors = {
        "sequences": torch.arange(20).reshape(2, 10)[:, ::2],
        "action_mask": torch.ones(2, 3, dtype=torch.bfloat16),
        "output.log_probs": torch.randn(2, 3),
        "rng.cpu": torch.get_rng_state(),
    }
    finished, blob = payload.encode(record, tensors)
    return store.publish_dump(finished, blob)


@pytest.fixture
def dump(place):
    return payload.load(place)


def test_safetensors_holds_logical_dtypes_and_the_record(dump, place, tmp_path):
    path = export_dump(place, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "d1.safetensors"
    exported = load_file(path)
    assert exported.keys() == dump.tensors.keys() >= {"output.log_probs", "rng.cpu"}
    for name, tensor in exported.items():
        assert tensor.dtype == dump.tensors[name].dtype and torch.equal(tensor, dump.tensors[name])
    with safetensors.safe_open(path, "pt") as file:
        assert parse_record(file.metadata()["actordbg"]) == dump.record


def test_a_folder_that_cannot_be_written_is_refused(place, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem):
        export_dump(place, tmp_path / "file")


@pytest.fixture
def made(store):
    """Three dumps in the store."""
    return create_dumps(store, 3, seq_len=16)


def ids(paths):
    return [path.name.removesuffix(".safetensors.zst") for path in paths]


def test_the_command_exports_what_a_query_selects(store, made, tmp_path):
    longer = create_dumps(store, 2, seq_len=32)
    words = (store, "dump", "export", "--where", "seq_len>16", "--out", tmp_path, "--quiet")
    assert invoke(*words, "--limit", 1).exit_code == 0
    assert [path.stem for path in tmp_path.glob("*.safetensors")] == ids(longer)[:1]
    assert invoke(*words, "--force").exit_code == 0
    assert sorted(path.stem for path in tmp_path.glob("*.safetensors")) == sorted(ids(longer))


@pytest.mark.parametrize("words", [[], ["nonsense"], ["x", "--where", "rank=0"]], ids=str)
def test_the_command_refuses_what_it_cannot_know(store, made, tmp_path, words):
    with pytest.raises(UsageError):
        invoke(store, "dump export", *words, "--out", tmp_path / "out", "--quiet")
    assert not (tmp_path / "out").exists()


def test_the_command_writes_nothing_when_one_file_exists(store, made, tmp_path):
    export = (store, "dump", "export", "--out", tmp_path, "--quiet")
    invoke(*export, ids(made)[2])
    with pytest.raises(Conflict):
        invoke(*export, *ids(made))
    assert len(list(tmp_path.glob("*.safetensors"))) == 1
    assert invoke(*export, *ids(made), "--force").exit_code == 0


def test_damaged_dumps_are_named_take_no_name_and_the_others_are_exported(store, made, tmp_path):
    made[1].write_bytes(made[1].read_bytes()[:-7])
    made[2].write_bytes(made[0].read_bytes())
    done = invoke(store, "dump export", *ids(made), "--out", tmp_path, "--quiet")
    assert done.exit_code == 1 and [path.stem for path in tmp_path.glob("*.safetensors")] == ids(made)[:1]
    assert "1 dump exported" in done.stdout and "damaged[corrupt-dump]" in done.stderr and made[1].name in done.stderr
    assert "is of dump" in done.stderr
