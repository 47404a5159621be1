"""Two thousand damaged, forged and hostile dump files: no traceback, no wrong tensor, no memory beyond the cap.

What each may give is known by how it was made. `tests/fuzz/of_dump.py` has what nobody thought of.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import catalogcases as cases
import dumpmutants as mutants
import pytest
from dumpmutants import A, Mutant
from plainkit import all_same
from runkit import clean_environment, python
from typer.main import get_command

from actordbg.base.errors import ActordbgError
from actordbg.catalog import dump_rows as headers
from actordbg.catalog.tables import DUMP_COLUMNS
from actordbg.cli.app import app
from actordbg.dumps import verify
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import DumpRecord
from actordbg.store import payload
from actordbg.store.layout import Store

EACH = -(-2_000 // len(mutants.KINDS))
"""Mutants of every kind."""
CHILD_CAP = 16 * 2**20


@pytest.fixture
def path(store: Store) -> Path:
    """Where A lies in a store; the mutants take its place."""
    return store.publish_dump(A.record, A.blob)


def attempt(call: Callable[[], Any]) -> Any:
    """What a reader returns, or None if it refused as it should; anything but a well-made ActordbgError comes through."""
    try:
        return call()
    except ActordbgError as error:
        assert error.message and error.hint
        assert len(error.message.encode()) < 600, error.message
        return None


@patch.object(dumpfile, "DEFAULT_CAP", mutants.CAP)
def judge(mutant: Mutant, path: Path, store: Store) -> tuple[bool, bool]:
    """Hand a mutant to every reader, and hold what they say against what it is. True where it loaded, where it verified."""
    path.write_bytes(mutant.blob)
    record: DumpRecord | None = attempt(lambda: dumpfile.read_record(path))
    row = attempt(lambda: headers.read_one(str(path), A.record.dump_id, A.record.run, A.record.rank))
    many = headers.read_columns(f"{path.parent}/", [A.record.dump_id], A.record.run, A.record.rank)
    assert many is None or many == row, "another row among others"
    whole = attempt(lambda: dumpfile.read_payload(path))
    dump = attempt(lambda: payload.load(path))
    ((_, _, damaged),) = verify.verify_files(store, [store.relative(path)])
    if record is not None and row is not None:
        assert all((getattr(record, name),) == row[name] for name, column in DUMP_COLUMNS.items() if not column.of)
    if dump is not None:
        assert record is not None and dump.record == record
        assert mutant.loads is not None, "it loaded, and should not"
        assert all_same(dump.tensors, mutant.loads), "other tensors"
        json.loads(dump.record.to_json())
    if damaged is None:
        assert mutant.verifies, "it verified, and should not"
        assert whole is not None and dump is not None, "it verified, and does not load"
    else:
        assert damaged.reason and len(damaged.reason.encode()) < 600
    return dump is not None, damaged is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", mutants.KINDS)
def test_no_mutant_is_a_traceback_or_a_wrong_tensor(kind: str, path, store):
    assert any(mutants.mutant(kind, number).blob != A.blob for number in range(5))
    for number in range(EACH):
        try:
            judge(mutants.mutant(kind, number), path, store)
        except Exception as error:
            raise AssertionError(f"mutant({kind!r}, {number}): {type(error).__name__}: {error}"[:2000]) from error


@pytest.mark.parametrize("kind", ["another dtype", "other values", "renamed everywhere", "other value", "a text that is long"])
def test_what_is_consistent_in_itself_does_load(kind: str, path, store):
    """Otherwise readers that refuse everything would pass."""
    assert any(judge(mutants.mutant(kind, number), path, store)[0] for number in range(40))
    assert judge(Mutant(A.blob, A.tensors), path, store) == (True, True)


# ---- memory ----

CHILD = """
import json, resource, sys
from pathlib import Path
import torch
from actordbg.formats import dumpfile
from actordbg.formats.dump_record import SUFFIX
from actordbg.store import payload
from actordbg.catalog import dump_rows as headers
from actordbg.catalog.tables import DUMP_COLUMNS
from actordbg.dumps import verify
from actordbg.cli.app import app
from actordbg.base.errors import ActordbgError
from actordbg.store.layout import Store

torch.set_num_threads(1)
store, folder, cap = Store(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
dumpfile.DEFAULT_CAP = cap
target = next(store.iter_dumps())
original, parts = target.read_bytes(), target.relative_to(store.dumps).parts
readers = (
    lambda: dumpfile.read_record(target),
    lambda: headers.read_one(str(target), target.name.removesuffix(SUFFIX), parts[0], int(parts[1][4:])),
    lambda: dumpfile.read_payload(target),
    lambda: list(verify.verify_files(store, [store.relative(target)])),
    lambda: payload.load(target),
)

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def read_all():
    loaded = False
    for reader in readers:
        try:
            loaded = reader() is not None
        except ActordbgError:
            loaded = False
    return loaded

assert read_all()
resource.setrlimit(resource.RLIMIT_AS, (status("VmSize:") + 2 * cap + 2**23, resource.RLIM_INFINITY))
answer = {}
for path in sorted(folder.iterdir()):
    target.unlink()
    target.hardlink_to(path)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS:")
    answer[path.name] = [read_all(), status("VmHWM:") - before]
print(json.dumps(answer))
"""


@pytest.mark.slow
def test_no_file_takes_twice_the_cap(path, store, tmp_path):
    """In a process that may not have more, and that measures its peak for each file."""
    folder = tmp_path / "files"
    folder.mkdir()
    files = mutants.hungry(CHILD_CAP)
    for name, (blob, _) in files.items():
        (folder / name).write_bytes(blob)
    malloc = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment = clean_environment(OMP_NUM_THREADS="1", **malloc)
    answer = json.loads(python(CHILD, environment, str(store.root), str(folder), str(CHILD_CAP)))
    assert {name: loaded for name, (loaded, _) in answer.items()} == {name: loads for name, (_, loads) in files.items()}
    assert {name: peak for name, (_, peak) in answer.items() if peak >= 2 * CHILD_CAP} == {}


# ---- the commands, over a store of mutants ----

COMMAND = get_command(app)
MUTANTS = 120


def run(store: Store, *words: str) -> tuple[int, str]:
    """A command's exit code and standard output; anything that `main` would let through as a traceback is raised here."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            code = COMMAND.main(["--store", str(store.root), *words], prog_name="actordbg", standalone_mode=False)
        except ActordbgError as error:
            return error.exit_code, out.getvalue()
    return code or 0, out.getvalue()


@pytest.mark.slow
def test_commands_over_a_store_of_mutants(store, tmp_path, monkeypatch):
    """Mutants in the places of dumps: `ls`, `index`, `verify`, `show`, `export` and `replay` continue, and say which are
    damaged."""
    kinds = sorted(mutants.KINDS)
    good: dict[str, bool] = {}
    for number in range(MUTANTS):
        original = mutants.Original.make(1, number)
        monkeypatch.setattr(mutants, "A", original)
        path = store.dump_path(original.record)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(mutants.mutant(kinds[number % len(kinds)], number).blob)
        good[store.relative(path)] = attempt(lambda path=path: payload.load(path)) is not None
    cases.settle(store)

    code, text = run(store, "index", "--rebuild", "--json")
    summary = json.loads(text)
    assert (code, summary["dumps"] + len(summary["damaged"])) == (0, MUTANTS)
    code, text = run(store, "dump", "ls", "--limit", "0", "--json")
    listed = json.loads(text)
    assert (code, len(listed)) == (0, summary["dumps"]) and MUTANTS // 4 < len(listed) < MUTANTS

    code, text = run(store, "dump", "verify", "--json", "--quiet")
    damaged = {item["path"] for item in json.loads(text)["damaged"]}
    assert code == 1 and json.loads(text)["checked"] == MUTANTS and damaged >= {path for path, loads in good.items() if not loads}

    for row in listed:
        code, text = run(store, "dump", "show", row["dump_id"], "--values", "--json")
        assert code == 0 if good[row["path"]] else code in (0, 4)
        assert code or json.loads(text)["record"]["dump_id"] == row["dump_id"]

    out = tmp_path / "exported"
    code, text = run(store, "dump", "export", "--where", "rank>=0", "--out", str(out), "--json", "--quiet")
    answer = json.loads(text)
    assert (code, len(answer["exported"])) == (1, sum(good[row["path"]] for row in listed)) == (1, len(list(out.iterdir())))
    assert len(answer["exported"]) + len(answer["damaged"]) == len(listed)

    assert run(store, "replay", "--where", "rank>=0", "--dry-run", "--json")[0] == 0
    for path in sorted(good)[::3]:
        code, text = run(store, "replay", "--input-file", str(store.root / path), "--dry-run", "--json")
        assert code in ((0, 3) if good[path] else (0, 3, 4))
