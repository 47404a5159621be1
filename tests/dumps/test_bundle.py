"""Bundles: what comes out is what went in, ids can be permuted, and an archive from somebody else is not trusted."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from comparecases import write_replay
from hubstandin import hub
from replaycases import publish
from typer.testing import CliRunner

from actordbg.base.errors import ActordbgError, Conflict, CorruptDump, Refused, UnsafeInput
from actordbg.base.owners import is_own, read_owned
from actordbg.cli.app import app
from actordbg.dumps import bundle as bundles
from actordbg.dumps.bundle import MANIFEST, open_bundle, pack_bundle
from actordbg.dumps.create import create_dumps
from actordbg.store.layout import Store
from actordbg.store.payload import load_plain


def files_of(store: Store) -> dict[str, bytes]:
    folders = ("dumps", "replays", "comparisons")
    paths = [path for name in folders for path in (store.root / name).rglob("*") if path.is_file() and path.name[0] != "."]
    return {store.relative(path): path.read_bytes() for path in paths}


def run(store: Path, *words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["--store", str(store), *words, "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_a_colleague_gets_a_replay_with_its_dumps_and_comparisons(store: Store, tmp_path: Path) -> None:
    inputs = publish(store, 2, length=16)
    write_replay(store, "20260101T000000-aaaaaa", inputs)
    write_replay(store, "20260101T000001-bbbbbb", inputs, truth="fp32")
    (store.replays / "20260101T000000-aaaaaa" / "rank0.log").write_text("/home/me/secret")
    run(store.root, "compare", "20260101T000000-aaaaaa", "20260101T000001-bbbbbb")
    packed = run(store.root, "bundle", "20260101T000000-aaaaaa", "-o", str(tmp_path / "case.tar.zst"))
    assert (packed["dumps"], packed["replays"], packed["comparisons"]) == (2, 2, 1)
    other = Store(tmp_path / "other")
    first = run(other.root, "dump", "import", str(tmp_path / "case.tar.zst"))
    expected = {name: data for name, data in files_of(store).items() if not name.endswith(".log")}
    assert files_of(other) == expected and first["present"] == 0
    assert run(other.root, "dump", "import", str(tmp_path / "case.tar.zst"))["present"] == len(expected)
    spec = other.replays / "20260101T000000-aaaaaa" / "spec.json"
    assert not is_own(read_owned(spec)[1]), "what it runs has to be approved first"
    spec.write_bytes(spec.read_bytes() + b" ")
    with pytest.raises(Conflict):
        open_bundle(other, tmp_path / "case.tar.zst")


def test_redaction_permutes_ids_and_keeps_what_is_special(store: Store, tmp_path: Path) -> None:
    places = create_dumps(store, 2, batch_size=3, seq_len=40, vocab_size=900)
    pack_bundle(store, tmp_path / "case.tar.zst", places, redact=True, keep=[7])
    other = Store(tmp_path / "other")
    open_bundle(other, tmp_path / "case.tar.zst")
    pairs: dict[int, int] = {}
    for ours, theirs in zip(sorted(places), sorted(other.iter_dumps()), strict=True):
        (before, a), (after, b) = load_plain(ours), load_plain(theirs)
        assert (a["attention_mask"].values == b["attention_mask"].values).all() and before.dump_id == after.dump_id
        assert not after.host and not after.origin
        for old, new in zip(a["sequences"].values.flat, b["sequences"].values.flat, strict=True):
            assert pairs.setdefault(int(old), int(new)) == int(new)
    assert pairs[0] == 0 and pairs.get(7, 7) == 7 and len(set(pairs.values())) == len(pairs)
    assert sum(old != new for old, new in pairs.items()) > 0.9 * len(pairs)
    with pytest.raises(Refused):
        pack_bundle(store, tmp_path / "case.tar.zst", places, redact=True, replays=["20260101T000000-aaaaaa"])


def archive(path: Path, files: dict[str, Any], *, listed: dict[str, Any] | None = None) -> Path:
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


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


REPLAY = "replays/r"
ATTACKS: list[tuple[Callable[[Path], Path], type[ActordbgError]]] = [
    (lambda path: archive(path, {"../../outside.json": b"{}"}), UnsafeInput),
    (lambda path: archive(path, {"replays/../../x/spec.json": b"{}"}), UnsafeInput),
    (lambda path: archive(path, {"/etc/passwd": b"x"}), UnsafeInput),
    (lambda path: archive(path, {"control.json": b"{}"}), UnsafeInput),
    (lambda path: archive(path, {"models/tiny/config.json": b"{}"}), UnsafeInput),
    (lambda path: archive(path, {f"{REPLAY}/rank0.jsonl": link(f"{REPLAY}/rank0.jsonl", "/etc/passwd", tarfile.SYMTYPE)}), UnsafeInput),
    (lambda path: archive(path, {f"{REPLAY}/rank0.jsonl": link(f"{REPLAY}/rank0.jsonl", MANIFEST, tarfile.LNKTYPE)}), UnsafeInput),
    (lambda path: archive(path, {f"{REPLAY}/a.jsonl": link(f"{REPLAY}/a.jsonl", "", tarfile.FIFOTYPE)}), UnsafeInput),
    (lambda path: archive(path, {f"{REPLAY}/a.jsonl": b"ab"}, listed={f"{REPLAY}/a.jsonl": {"size": 1, "sha256": "x"}}), UnsafeInput),
    (lambda path: archive(path, {f"{REPLAY}/a.jsonl": b"ab"}, listed={f"{REPLAY}/a.jsonl": {"size": 2, "sha256": "x"}}), CorruptDump),
    (lambda path: archive(path, {}, listed={f"{REPLAY}/a.jsonl": {"size": 2, "sha256": "x"}}), CorruptDump),
    (lambda path: archive(path, {f"{REPLAY}/spec.json": b"{}"}), CorruptDump),
    (lambda path: archive(path, {"comparisons/c.json": b'{"format": 1}'}), CorruptDump),
    (lambda path: archive(path, {"dumps/a/rank0000/x.safetensors.zst": os.urandom(400)}), CorruptDump),
    (lambda path: archive(path, {f"{REPLAY}/a.jsonl": bytes(2**21)}), UnsafeInput),
    (lambda path: (path.write_bytes(b"not zstd"), path)[1], CorruptDump),
    (lambda path: (path.write_bytes(zstandard.compress(b"not a tar" * 99)), path)[1], CorruptDump),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ATTACKS)))
def test_a_hostile_bundle_leaves_nothing(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "_FREE", 2**20)
    attack, error = ATTACKS[number]
    store = Store(tmp_path / "store")
    with pytest.raises(error):
        open_bundle(store, attack(tmp_path / "bad.tar.zst"))
    assert {path.name for path in tmp_path.iterdir()} == {"bad.tar.zst", "store"} and not files_of(store)


@pytest.mark.slow
def test_to_and_from_a_dataset_repository(store: Store, tmp_path: Path) -> None:
    """Private where it is new, refused where it is public. The hub is a stand-in on loopback (HF_ENDPOINT)."""
    create_dumps(store, 1, batch_size=1, seq_len=8)

    def actordbg(*words: str, at: Path = store.root, code: int = 0) -> str:
        command = [sys.executable, "-m", "actordbg", "--store", str(at), *words]
        env = os.environ | {
            "HF_ENDPOINT": server.url,
            "HF_TOKEN": "hf_x",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
        }
        ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert ran.returncode == code, ran.stdout + ran.stderr
        return ran.stdout + ran.stderr

    with hub() as server:
        words = ("bundle", "--where", "batch_size=1", "-o", "case.tar.zst", "--to")
        assert "hf://datasets/team/cases/case.tar.zst" in actordbg(*words, "hf://datasets/team/cases")
        assert server.repositories == {"team/cases": True} and list(server.files) == ["team/cases/case.tar.zst"]
        actordbg("dump", "import", "hf://datasets/team/cases/case.tar.zst", at=tmp_path / "other")
        server.repositories["team/open"] = False
        assert "is public" in actordbg(*words, "hf://datasets/team/open", code=3)
        assert "cannot download" in actordbg("dump", "import", "hf://datasets/team/cases/none.tar.zst", code=4)
    assert files_of(Store(tmp_path / "other")) == files_of(store)
    assert np.array_equal(*(load_plain(next(s.iter_dumps()))[1]["sequences"].values for s in (store, Store(tmp_path / "other"))))
