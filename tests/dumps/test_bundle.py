"""Bundles: what comes out is what went in, ids can be permuted, and an archive from somebody else is not trusted."""

import io
import json
import os
import tarfile
import tempfile
import tracemalloc
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import zstandard
from commandline import run_here, tried
from comparecases import write_replay
from ownercases import give_away
from replaycases import publish
from roots import json_of, read_json, write_json

from actordbg.base.errors import (
    ActordbgError,
    Conflict,
    CorruptDump,
    EnvironmentProblem,
    Refused,
    StoreProblem,
    UnsafeInput,
    Unsupported,
    UsageError,
)
from actordbg.base.owners import is_own, read_owned
from actordbg.dumps import bundle as bundles, redaction
from actordbg.dumps.bundle import MANIFEST, open_bundle, pack_bundle
from actordbg.dumps.create import create_dumps
from actordbg.formats.dump_record import DumpRecord, contiguous_strides
from actordbg.formats.encoding import PlainTensor, plain_safetensors
from actordbg.formats.store_files import atomic_write
from actordbg.records import stored_record
from actordbg.store.layout import Store
from actordbg.store.payload import encode_plain, load_plain


def files_of(store):
    folders = ("dumps", "replays", "comparisons")
    paths = [path for name in folders for path in (store.root / name).rglob("*") if path.is_file() and path.name[0] != "."]
    return {store.relative(path): path.read_bytes() for path in paths}


def run(store, *words, code=0):
    done = run_here("--store", store, *words, "--json")
    assert done.exit_code == code, done.output
    return json_of(done)


MINE, TRUTH = "20260101T000000-aaaaaa", "20260101T000001-bbbbbb"


def private_dump(tmp_path):
    """A dump of another store, which nobody asked to send."""
    private = Store(tmp_path / "private").create()
    publish(private, 1, length=16)
    write_replay(private, MINE, [])
    return next(private.iter_dumps())


@pytest.mark.parametrize("way", ["../", "/", "/, from a bundle", "link"])
def test_no_replay_leads_a_bundle_to_dumps_outside_of_the_store(way, store, tmp_path, monkeypatch):
    dump = private_dump(tmp_path)
    (item,) = publish(store, 1, length=16)
    path = {"../": f"../{dump.relative_to(tmp_path)}", "link": "dumps/led/rank0000/" + dump.name}.get(way, str(dump))
    (store.dumps / "led").symlink_to(dump.parent.parent)
    if way == "link":
        give_away(store.dumps / "led", monkeypatch)
    folder = store.replays / MINE
    write_replay(store, MINE, [item])
    spec = read_json(folder / "spec.json")
    spec["inputs"][0]["path"] = path
    atomic_write(folder / "spec.json", json.dumps(spec).encode())
    if "bundle" in way:
        (folder / ".spec.json.from").write_text("case.tar.zst")
    done = tried(store, "bundle", MINE, "-o", str(tmp_path / "out.tar.zst"))
    assert (done.exit_code == 0) == (way == "/") == (tmp_path / "out.tar.zst").exists(), "one's own --input-file may be anywhere"
    assert way == "/" or isinstance(done.exception, ActordbgError | OSError), done.output


@pytest.mark.parametrize("field, words", [("rounding_id", ["bundle"]), ("comparison_id", ["reduce"])])
def test_no_id_in_a_record_leads_out_of_the_store(field, words, store, tmp_path):
    inputs = publish(store, 1, length=16)
    write_replay(store, MINE, inputs)
    write_replay(store, TRUTH, inputs, truth="fp32")
    run(store.root, "compare", MINE, TRUTH)
    private_dump(tmp_path)
    (file,) = store.comparisons.glob("*.json")
    record = read_json(file) | {field: "../../private", "verdict": "mismatch"}
    write_json(file, record)
    before = sorted(tmp_path.rglob("*"))
    done = tried(store, *words, file.stem)
    assert isinstance(done.exception, CorruptDump) and f"its {field} is '../../private'" in done.exception.message
    assert sorted(path for path in tmp_path.rglob("*") if store.root not in path.parents) == [
        path for path in before if store.root not in path.parents
    ]


def test_a_colleague_gets_a_replay_with_its_dumps_and_comparisons(store, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))  # what is killed leaves nothing in /tmp
    inputs, case = publish(store, 2, length=16), Path(os.fsdecode(os.fsencode(tmp_path) + b"/case-\xff.tar.zst"))
    write_replay(store, MINE, inputs)
    write_replay(store, TRUTH, inputs, truth="fp32")
    (store.replays / MINE / "rank0.log").write_text("/home/me/secret")
    run(store.root, "compare", MINE, TRUTH)
    packed = run(store.root, "bundle", MINE, "-o", str(case))
    assert (packed["dumps"], packed["replays"], packed["comparisons"]) == (2, 2, 1)
    other = Store(tmp_path / "other")
    first = run(other.root, "dump", "import", str(case))
    expected = {name: data for name, data in files_of(store).items() if not name.endswith(".log")}
    assert files_of(other) == expected and first["present"] == 0
    again = run(other.root, "dump", "import", str(case))
    assert (again["dumps"], again["replays"], again["comparisons"], again["present"]) == (0, 0, 0, len(expected))
    spec = other.replays / MINE / "spec.json"
    owner = read_owned(spec)[1]
    assert not is_own(owner) and "case-" in str(owner), "what it runs has to be approved first"
    spec.write_bytes(spec.read_bytes() + b" ")
    with pytest.raises(Conflict):
        open_bundle(other, case)


def test_redaction_permutes_ids_and_keeps_what_is_special(store, tmp_path):
    places = create_dumps(store, 2, batch_size=3, seq_len=40, vocab_size=900)
    pack_bundle(store, tmp_path / "case.tar.zst", places, redact=True, keep=[7])
    other = Store(tmp_path / "other")
    open_bundle(other, tmp_path / "case.tar.zst")
    pairs = {}
    for ours, theirs in zip(sorted(places), sorted(other.iter_dumps()), strict=True):
        (before, a), (after, b) = load_plain(ours), load_plain(theirs)
        assert (a["attention_mask"].values == b["attention_mask"].values).all() and before.timestamp == after.timestamp
        assert after.replayable and after.arguments == before.arguments
        for old, new in zip(a["sequences"].values.flat, b["sequences"].values.flat, strict=True):
            assert pairs.setdefault(int(old), int(new)) == int(new)
    assert pairs[0] == 0 and pairs.get(7, 7) == 7 and len(set(pairs.values())) == len(pairs)
    assert sum(old != new for old, new in pairs.items()) > 0.9 * len(pairs)
    with pytest.raises(Refused):
        pack_bundle(store, tmp_path / "case.tar.zst", places, redact=True, replays=[MINE])


def test_redaction_leaves_out_all_that_is_not_listed(store, tmp_path, monkeypatch):
    """Each text is a secret; what was left out is said."""
    monkeypatch.setattr(redaction.secrets, "randbits", lambda _: 1)
    ids = np.array([[5, 6, 7, 8, 9], [0, 0, 11, 12, 13]])
    made = {
        "sequences": ids, "attention_mask": np.array([[0, 1, 1, 1, 1], [0, 0, 1, 1, 1]]), "action_mask": ids[:, 1:] > 6,
        "masked_ids": ids, "old_log_probs": ids / 7, "pixel_values": ids / 3, "response_length": ids[:1], "uid": ids + 2**33,
    }  # fmt: skip
    words = ("run", "host", "model_name", "role", "instance", "triggered", "recovered")
    facts = ("extra", "actor", "origin", "trigger_facts", "rng", "versions", "process_groups")
    record = DumpRecord(
        dump_id="SECRET-0123456789abcdef", rank=0, timestamp="2026-01-01T00:00:00.000000Z", batch_size=2, seq_len=5, tokens=7,
        pid=77777, arguments={"return_output": True, "prompt": "SECRET", "context.ids.0": 5, "packed_seq_lens": [5, 6]},
        **dict.fromkeys(words, "SECRET"), **{name: {"SECRET": "SECRET"} for name in facts},
    )  # fmt: skip
    plain = {name: PlainTensor(v.dtype.name, v, contiguous_strides(v.shape)) for name, v in made.items()}
    place = store.put_dump(*encode_plain(record, plain), hint="")
    pack_bundle(store, tmp_path / "case.tar.zst", [place], redact=True)
    other = Store(tmp_path / "other")
    open_bundle(other, tmp_path / "case.tar.zst")
    (path,) = other.iter_dumps()
    after, tensors = load_plain(path)
    assert "SECRET" not in after.to_json() + str(path) and "77777" not in after.to_json() and after.dump_id[-8:] != "89abcdef"
    assert set(tensors) == {"sequences", "attention_mask", "action_mask"} and after.arguments == {"return_output": True}
    assert not after.replayable and after.extra
    replaced = {int(a): int(b) for a, b in zip(ids.flat, tensors["sequences"].values.flat, strict=True)}
    assert replaced[0] == 0 and len({*replaced.values()}) == len(replaced)
    assert replaced[5] != 5, "under the mask, and no padding"


@pytest.mark.parametrize("dtype, model", [("int64", ""), ("float32", ""), ("int32", "tiny"), ("int32", "./no-model")])
def test_redaction_refuses_what_it_cannot_permute_or_keep(dtype, model, store, tmp_path):
    """Ids as large as hashes would need a table of that size; a model that is not there would keep no special token."""
    ids = np.array([[2**33 if dtype == "int64" else 3, 4]], dtype)
    record = DumpRecord(dump_id="d", run="r", rank=0, timestamp="2026-01-01T00:00:00.000000Z", batch_size=1, seq_len=2, tokens=2)
    place = store.put_dump(*encode_plain(record, {"sequences": PlainTensor(dtype, ids, (2, 1))}), hint="")
    with pytest.raises((Unsupported, UsageError, EnvironmentProblem)):
        pack_bundle(store, tmp_path / "case.tar.zst", [place], redact=True, model=model)
    assert not (tmp_path / "case.tar.zst").exists()


@pytest.mark.parametrize("name", ["rank99.jsonl", "tensors/x.safetensors"])
@pytest.mark.parametrize("with_spec", [False, True])
def test_a_replay_of_the_store_gets_no_file_of_a_bundle(name, with_spec, store, tmp_path):
    """Who wrote a replay is known by its specification, so a journal from elsewhere would count as this user's own."""
    write_replay(store, MINE, publish(store, 1, length=16))
    before, files = files_of(store), {f"replays/{MINE}/{name}": plain_safetensors({}, {}) if "tensors" in name else b"{}\n"}
    if with_spec:
        files[f"replays/{MINE}/spec.json"] = before[f"replays/{MINE}/spec.json"]
    with pytest.raises(Conflict if with_spec else UnsafeInput):
        open_bundle(store, archive(tmp_path / "bad.tar.zst", files))
    assert files_of(store) == before


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), ValueError(), OSError(28, "No space left on device")])
def test_whatever_stops_an_import_nothing_is_left(error, store, tmp_path, monkeypatch):
    write_replay(store, MINE, publish(store, 2, length=16))
    pack_bundle(store, tmp_path / "case.tar.zst", [*store.iter_dumps()], replays=[MINE])
    other = Store(tmp_path / "other").create()

    def write(path, data):
        atomic_write(path, data)
        if path.name == "spec.json":
            raise error

    monkeypatch.setattr(bundles, "atomic_write", write)
    with pytest.raises(StoreProblem if isinstance(error, OSError) else type(error)):
        open_bundle(other, tmp_path / "case.tar.zst")
    assert [path.name for path in other.root.rglob("*") if path.is_file()] == ["FORMAT"]


def test_a_damaged_comparison_stops_no_bundle_and_two_dots_name_a_run(store, tmp_path):
    create_dumps(store, 1, batch_size=1, seq_len=8, run="a..b")
    store.comparisons.mkdir(exist_ok=True)
    (store.comparisons / f"{MINE}.json").write_text("{")
    packed = run(store.root, "bundle", "--where", "batch_size=1", "-o", str(tmp_path / "case.tar.zst"))
    assert packed["dumps"] == 1
    assert run(tmp_path / "other", "dump", "import", str(tmp_path / "case.tar.zst"))["dumps"] == 1


def archive(path, files, listed=None):
    """Write a bundle as somebody could: `files` may have tar members instead of bytes."""
    entries = {
        name: {"size": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items() if isinstance(data, bytes)
    }
    manifest = json.dumps({"format": 1, "files": entries if listed is None else listed}).encode()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, data in {MANIFEST: manifest, **files}.items():
            member = data if isinstance(data, tarfile.TarInfo) else tarfile.TarInfo(name)
            member.size = len(data) if isinstance(data, bytes) else member.size
            tar.addfile(member, io.BytesIO(data) if isinstance(data, bytes) else None)
    path.write_bytes(zstandard.compress(packed.getvalue()))
    return path


def link(name, target, kind):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def hole(spots):
    """A file of nothing but a hole, of a few bytes of archive, as arguments of `archive`; the manifest is right."""
    member, size = tarfile.TarInfo(JOURNAL), 2**21
    member.pax_headers = {"GNU.sparse.map": spots, "GNU.sparse.size": str(size)}
    return {member.name: member}, {member.name: {"size": size, "sha256": sha256(bytes(size)).hexdigest()}}


class Headed(tarfile.TarInfo):
    headers = b""

    def tobuf(self, *how):
        return self.headers + super().tobuf(*how)


def headed(text, chain=1):
    """A member behind extended headers, which `tarfile` reads whole and one inside the other, as arguments of `archive`."""
    member = Headed(JOURNAL)
    member.headers = chain * tarfile.TarInfo.create_pax_global_header({"comment": text})
    return {member.name: member}, {member.name: {"size": 0, "sha256": sha256(b"").hexdigest()}}


REPLAY, JOURNAL = "replays/r", "replays/r/a.jsonl"
NO_NAMES = ("../../outside.json", "replays/../../x/spec.json", "/etc/passwd", "control.json", "models/tiny/config.json")
ATTACKS = [
    *((UnsafeInput, {name: b"{}"}) for name in NO_NAMES),
    (UnsafeInput, {JOURNAL: link(JOURNAL, "/etc/passwd", tarfile.SYMTYPE)}),
    (UnsafeInput, {JOURNAL: link(JOURNAL, MANIFEST, tarfile.LNKTYPE)}),
    (UnsafeInput, {JOURNAL: link(JOURNAL, "", tarfile.FIFOTYPE)}),
    (UnsafeInput, {JOURNAL: b"ab"}, {JOURNAL: {"size": 1, "sha256": "x"}}),
    (CorruptDump, {JOURNAL: b"ab"}, {JOURNAL: {"size": 2, "sha256": "x"}}),
    (CorruptDump, {}, {JOURNAL: {"size": 2, "sha256": "x"}}),
    (CorruptDump, {f"{REPLAY}/spec.json": b"{}"}),
    (CorruptDump, {"comparisons/c.json": b'{"format": 1}'}),
    (CorruptDump, {"dumps/a/rank0000/x.safetensors.zst": os.urandom(400)}),
    (UnsafeInput, {JOURNAL: bytes(2**21)}),
    (UnsafeInput, {JOURNAL: b"ab"}),
    (CorruptDump, {f"{REPLAY}/spec.json": b"{}", f"{REPLAY}/tensors/a.safetensors": b"ab"}),
    (UnsafeInput, *hole(f"{2**21},0")),
    (CorruptDump, *hole("x")),
    (UnsafeInput, *headed("x" * 2**17)),
    (CorruptDump, *headed("x" * 99, chain=2000)),
    (CorruptDump, {}, {str(number): [] for number in range(30_000)}),
    (UnsafeInput, {f"{REPLAY}/spec.json": b'{"format":1,"x":[' + b"[]," * 200_000 + b"1]}"}),
    (UnsafeInput, {JOURNAL: (b'{"event":"x","x":[' + b"[]," * 9000 + b"1]}\n") * 20}),
    (CorruptDump, b"not zstd"),
    (CorruptDump, zstandard.compress(b"not a tar" * 99)),
]
"""The error, and what an `archive` has and lists, or the bytes of one."""


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_a_hostile_bundle_leaves_nothing(number, tmp_path, monkeypatch):
    """Nor does it take memory: what it may unpack to, and the values in that, are limited before they are objects."""
    monkeypatch.setattr(bundles, "_FREE", 2**20)
    for module in (bundles, stored_record):
        monkeypatch.setattr(module, "MOST_VALUES", 2**16)
    error, had, *listed = ATTACKS[number]
    store, path = Store(tmp_path / "store"), tmp_path / "bad.tar.zst"
    path.write_bytes(had) if isinstance(had, bytes) else archive(path, had, *listed)
    tracemalloc.start()
    with pytest.raises(error):
        open_bundle(store, path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * 2**20, "1 MiB of it is read"
    assert {path.name for path in tmp_path.iterdir()} == {"bad.tar.zst"}, "not even an empty store"
