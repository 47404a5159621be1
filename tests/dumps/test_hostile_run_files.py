"""Files of a run may be anybody's: nothing in them runs, no claim of a size takes memory, and each is refused with its reason."""

import copy
import io
import json
import os
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from commandline import in_json, invoke
from runfiles import Packed, data_proto, written

from actordbg.base.errors import CorruptDump, UnsafeInput, Unsupported
from actordbg.dumps import pickle_tree
from actordbg.dumps.archives import pickle_value
from actordbg.dumps.child_pool import LegacyReader
from actordbg.dumps.importer import import_paths
from actordbg.formats.dump_record import LOSS
from actordbg.measure.log_exports import _figures
from actordbg.store.layout import Store

MEMORY = 400 * 2**20


class Asks:
    """A pickle of this asks for a program to run."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def nested(levels, *, shared):
    value = [1]
    for _ in range(levels):
        value = [value, value] if shared else [value]
    return value


def saved(value, **options):
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def with_pickle(pickled, kind=zipfile.ZIP_STORED, **more):
    """An archive as torch.save makes it, around any pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as archive:
        for name, data in {"data.pkl": pickled, **more}.items():
            archive.writestr(f"x/{name}", data)
    return out.getvalue()


def packed_as(*leaves, size=64):
    """A TensorDict of some bytes, with leaves that are described so."""
    batch = Packed({"input_ids": torch.ones(size, dtype=torch.uint8)})
    batch.leaves = {f"x{at}": leaf for at, leaf in enumerate(leaves)}
    return batch


def sharing():
    """An archive of 2 MiB, whose tensors are all of it."""
    whole = torch.zeros(2**20, dtype=torch.bfloat16)
    return saved({"tokens": [1, 2], **{f"x{at}": whole[at:] for at in range(700)}})


def claiming(shape):
    """An npz with an array that claims a shape."""
    array, out = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"descr": "<i8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("input_ids.npy", array.getvalue() + bytes(2**20))
    return out.getvalue()


def huge_tensor(elements):
    """An archive whose tensor claims more than its storage has."""
    good = pickle.dumps({"tokens": [1, 2]}, 2)
    described = good[:-1] + b"X\x06\x00\x00\x00logits" + b"ctorch._utils\n_rebuild_tensor_v2\n("
    described += b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
    described += b"K\x00\x8a\x06" + elements.to_bytes(6, "little") + b"\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRs."
    return with_pickle(described, **{"data/0": bytes(16)})


def safetensors(shape, last):
    header = json.dumps({"input_ids": {"dtype": "I64", "shape": shape, "data_offsets": [0, last]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(64)


def overlapping(members):
    """An archive whose table of contents has the same bytes many times."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({"tokens": [1, 2]}, 2))
        archive.writestr("x/data/0", bytes(2**16))
        for number in range(1, members):
            again = copy.copy(archive.filelist[1])
            again.filename = f"x/data/{number // 2}"
            archive.filelist.append(again)
    return out.getvalue()


def archive_of_many_names():
    """A directory that claims to be larger than any that torch.save writes."""
    data = bytearray(with_pickle(pickle.dumps({}, 2)))
    data[-10:-6] = (2**30).to_bytes(4, "little")
    return bytes(data)


HOSTILE = {
    "an archive that asks for os.system": (lambda: saved({"tokens": [1], "x": Asks()}), "unsafe-input", "asks for posix.system"),
    "an archive in an archive's pickle": (
        lambda: with_pickle(b"\x80\x02ctorch.storage\n_load_from_bytes\nB\x01\0\0\0x\x85R."), "unsafe-input", "_load_from_bytes",
    ),
    "a tensor without end": (lambda: huge_tensor(2**46), "unsafe-input", "more elements than its storage"),
    "nested lists": (lambda: saved({"tokens": [1], "x": nested(60, shared=False)}), "unsafe-input", "nested deeper"),
    "a compressed pickle": (lambda: with_pickle(bytes(2**25), zipfile.ZIP_DEFLATED), "unsafe-input", "is compressed"),
    "a large directory": (archive_of_many_names, "unsafe-input", "table of contents claims"),
    "an archive with another byte": (
        lambda: saved({"tokens": torch.arange(99)}).replace(bytes([98, *bytes(7)]), bytes([97, *bytes(7)])), "corrupt-dump", "checksum",
    ),
    "an archive in which members overlap": (lambda: overlapping(50_000), "unsafe-input", "members overlap"),
    "half an archive": (lambda: saved({"tokens": torch.arange(99)})[:900], "corrupt-dump", "truncated"),
    "SGLang's dumper": (lambda: saved({"value": torch.ones(2), "meta": {"name": "x"}}), "unsupported", "the output of one module"),
    "log-probs alone": (
        lambda: saved(dict.fromkeys(("log_probs", "old_log_probs", "advantages"), torch.ones(2))), "unsupported", "without token ids, as miles'",
    ),
    "Molt's log-probs": (lambda: b"pos\ttoken_id\tvllm_logp\tactor_logp\tmask\n0\t5\t-1\t-1\t1\n", "unsupported", "of one row"),
    "an archive of weights": (lambda: saved({"a.weight": torch.ones(2)}), "unsupported", "without token ids: a.weight"),
    "an old archive": (lambda: saved({"a": 1}, _use_new_zipfile_serialization=False), "corrupt-dump", "format before 2020"),
    "a storage of many tensors": (sharing, "unsafe-input", "share their storages too often"),
    "bytes of many leaves": (
        lambda: data_proto(packed_as(*[["torch.bfloat16", [2**20], 0, 2**21, 0]] * 300, size=2**21), {}), "unsafe-input", "share their storages too often",
    ),
    "an array without end": (lambda: claiming((2**40,)), "unsafe-input", "claims [1099511627776] values"),
    "an array of zeros": (lambda: claiming((2**20, 2)), "unsafe-input", "values of int64"),
    "tensors without end": (lambda: safetensors([2**40], 2**43), "unsafe-input", "more than 1073741824 bytes"),
    "tensors behind the end": (lambda: safetensors([2**20], 2**23), "unsafe-input", "more bytes than the file has"),
    "a line of 100 MB": (lambda: b'{"token_ids": [' + b"1," * 50_000_000 + b"1]}\n", "unsafe-input", "line 1 has more than"),
    "a nested line": (lambda: b'{"token_ids": ' + b"[" * 5000 + b"]" * 5000 + b"}\n", "corrupt-dump", "nested deeper"),
    "half a line": (lambda: b'{"token_ids": [1, 2, 3], "loss_m', "corrupt-dump", "is not JSON"),
    "text": (lambda: b"hello\n", "unsupported", "not a file that is read"),
    "nothing": (lambda: b"", "unsupported", "it is empty"),
    "an array of objects": (
        lambda: (np.savez(out := io.BytesIO(), input_ids=np.array([Asks()], object), allow_pickle=True), out.getvalue())[1],
        "unsupported", "no arrays of numbers",
    ),
    "verl's rollouts": (lambda: b'{"input": "a", "output": "b", "gts": 1, "score": 1.0, "step": 1}\n', "unsupported", "verl's"),
    "a trace": (lambda: b'{"traceEvents": [], "schemaVersion": 1}\n', "unsupported", "torch's profiler"),
    "preferences": (lambda: b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "unsupported", "preferences"),
    "answers without ids": (
        lambda: b'{"object": "chat.completion", "model": "m", "choices": [{"index": 0}]}\n', "unsupported", "without token ids",
    ),
    "an array": (lambda: (np.save(out := io.BytesIO(), np.ones(3)), out.getvalue())[1], "unsupported", "without a name"),
    "a CSV of rows": (lambda: b'reward,input_ids\n1,"[1, 2]"\n', "unsupported", "CSV of rows"),
    "a list of numbers": (lambda: b'[{"ids": [1]}, 2]', "corrupt-dump", "not a list of objects"),
    "half a parquet": (lambda: b"PAR1" + bytes(40) + b"\x20\0\0\0PAR1", "corrupt-dump", "damaged"),
    "an array of another machine": (
        lambda: saved([{"input_ids": np.array([1, 2], ">i4")}]), "corrupt-dump", "little-endian",
    ),
    "an array of texts": (lambda: pickle.dumps([{"input_ids": np.array(["a"])}]), "unsupported", "of a type that is not read"),
    "a pretty trainer state": (lambda: b'{\n "log_history": []\n}', "unsupported", "trainer_state.json"),
    "SQLite": (lambda: b"SQLite format 3\0" + bytes(99), "unsupported", "an SQLite database"),
    "a DataProto by torch.save": (
        lambda: with_pickle(b"\x80\x02cverl.protocol\nDataProto\n)\x81."), "corrupt-dump", "damaged",
    ),
    "a DataProto with a program": (lambda: data_proto(Packed({}), {"uid": [Asks()]}), "unsafe-input", "asks for posix.system"),
    "a DataProto with a program in its archive": (lambda: data_proto({"x": Asks()}, {}), "unsafe-input", "asks for posix.system"),
    "a leaf behind the end": (lambda: data_proto(packed_as(["torch.int64", [2**40], 0, 2**43, 0]), {}), "unsafe-input", "other bytes"),
    "a leaf before the start": (lambda: data_proto(packed_as(["torch.int64", [1], -8, 0, 0]), {}), "unsafe-input", "other bytes"),
    "a leaf of objects": (lambda: data_proto(packed_as(["object", [1], 0, 8, 0]), {}), "corrupt-dump", "damaged"),
    "a DataProto whose numbers claim a shape": (
        lambda: data_proto(((1,), None, {"input_ids": ("int64", (2**40,), np.zeros(8, np.uint8))}), {}), "corrupt-dump", "damaged",
    ),
    "a DataProto of numbers as texts": (
        lambda: data_proto(((1,), None, {"x": ("int64", (1,), np.zeros(8, np.uint8))}), {}, torch.save), "unsupported", "texts",
    ),
    "a call of a class": (lambda: with_pickle(b"\x80\x02cos\nsystem\n)\x81}b."), "unsafe-input", "asks for os.system"),
    "a list of rollouts": (lambda: saved([{"rollout_id": 1, "samples": []}]), "corrupt-dump", "after row 0"),
    "a leaf that is none": (lambda: data_proto(packed_as({"a": 1}), {}), "corrupt-dump", "damaged"),
}  # fmt: skip
"""Each file: its bytes, the code of its refusal, and a part of the reason."""


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_or_foreign_file_is_refused_with_its_reason_and_nothing_runs(name, store, tmp_path, monkeypatch):
    made, code, reason = HOSTILE[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_bytes(made())
    tracemalloc.start()
    try:
        summary = import_paths(store, [tmp_path / "file"])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (refused,) = summary.refused
    assert (refused.code, reason in refused.reason, summary.added) == (code, True, 0), refused
    assert not (tmp_path / "pwned").exists() and peak < MEMORY


def test_a_row_of_zeros_that_a_few_bytes_were_unpacked_to_is_left_out(store, tmp_path):
    np.savez_compressed(tmp_path / "x", input_ids=np.zeros(2**23 + 1, np.int64))
    summary = import_paths(store, [tmp_path / "x.npz"])
    assert not summary.added and "more than 8388608 tokens" in summary.notes[0]


def test_a_line_of_many_figures_takes_memory_by_their_number():
    wide = {f"c{at}": float(at) for at in range(4000)}
    tracemalloc.start()
    try:
        rows = list(_figures([wide, wide | dict.fromkeys(list(wide)[:2])]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [len(nulls) for _, nulls in rows] == [0, 2] and peak < 20 * 2**20


def test_a_file_that_ends_early_keeps_the_rows_before_and_is_named(store, tmp_path):
    path, _ = written("prime-rl", tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    summary = import_paths(store, [path])
    assert summary.added == 2 and summary.refused[0].reason == "truncated: line 16 has no end"


def test_lint_judges_files_in_a_store_of_its_own_and_names_file_and_row(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store, (path, _) = Store(tmp_path / "none"), written("nemo-rl", tmp_path, "NaN")
    done = invoke(store, "lint", str(path), "--json")
    answer = json.loads(done.stdout)
    assert done.exit_code == 1 and not store.exists()
    assert [(finding["rule"], finding["side"]) for finding in answer["findings"]] == [("finite", "rollout")]
    assert answer["findings"][0]["place"] == {"file": "train_data_step8.jsonl", "row": 5}
    assert answer["next"] == f"actordbg dump import {path}"
    for data, kind, why in (
        (b"hello", Unsupported, "not a file that is read"),
        (saved({"tokens": [1], "x": Asks()}), UnsafeInput, "asks for posix.system"),
        (b'{"token_ids": [1, 2', CorruptDump, "not JSON"),
    ):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(kind, match=why):
            invoke(store, "lint x")


def test_lint_of_a_stores_folder_is_that_of_the_store(store, tmp_path):
    import_paths(store, [written("prime-rl", tmp_path)[0]])
    done = invoke(Store(tmp_path / "none"), "lint", str(store.root), "--where", f"point = '{LOSS}'", "--quiet")
    assert "hold on 2 dumps" in done.stdout


def test_values_that_contain_each_other_a_billion_times_are_not_walked(monkeypatch):
    monkeypatch.setattr(pickle_tree, "MOST_VALUES", 10_000)
    with pytest.raises(UnsafeInput, match="more than 10000 values"):
        pickle_tree.tree(pickle.dumps(nested(15, shared=True), 2))
    shared = [1, 2]
    assert pickle_tree.tree(pickle.dumps({"a": shared, 5: shared}, 2)) == {"a": [1, 2], "5": [1, 2]}


def test_long_lists_of_numbers_arrive_as_they_are_and_places_are_checked(monkeypatch):
    values = {
        "ids": [*range(-9, 300), 70_000] * 5, "mask": [0, 1] * 900, "log_probs": [-0.5, float("nan"), 1e300] * 500,
        "late": [7] * 1000 + [2**20] * 40, "holes": [0.5] * 1000 + [None] + [2] * 20,
    }  # fmt: skip
    with LegacyReader() as trees:
        read = pickle_value(trees, pickle.dumps([values, values["ids"]], 2))
    np.testing.assert_equal([*read], [values, values["ids"]])
    beyond = (["small", 0, 3], ["floats", 0, 1], ["small", -1, 1], ["small", 1, -1])
    for runs in (*([run] for run in beyond), [["small", 0, 2]] * 17):  # the last takes many times as many bytes as there are
        monkeypatch.setattr(trees, "tree", lambda _, runs=runs: {pickle_tree.NUMBERS: runs})
        with pytest.raises(CorruptDump):
            pickle_value(trees, b"12")


def test_a_finding_names_its_row_although_rows_before_it_were_left_out(tmp_path):
    rows = [{"tokens": [5, 6, 7], "logprobs": [-1, -1, worst]} for worst in (-1, -1, 2)]
    rows[1] = {"tokens": [5]}
    (tmp_path / "x").write_text("\n".join(map(json.dumps, rows)))
    answer = in_json(Store(tmp_path / "none"), "lint", str(tmp_path / "x"))
    assert [finding["place"]["row"] for finding in answer["findings"]] == [2, 2]
