"""Damaged, forged and hostile dump files: no traceback, no wrong tensor, no memory beyond the cap.

What each may give is known by how it was made. `tests/fuzz/of_dump.py` has what nobody thought of.
"""

import json
from unittest.mock import patch

import dumpmutants as mutants
import pytest
from dumpmutants import A, Mutant
from fuzzing import CAP
from plainkit import all_same
from runkit import clean_environment, python

from actordbg.base.errors import ActordbgError
from actordbg.catalog import dump_rows as headers
from actordbg.catalog.tables import DUMP_COLUMNS
from actordbg.dumps import verify
from actordbg.formats import dumpfile
from actordbg.store import payload

CHILD_CAP = 16 * 2**20


@pytest.fixture
def path(store):
    """Where A lies in a store; the mutants take its place."""
    return store.publish_dump(A.record, A.blob)


def attempt(call):
    """What a reader returns, or None if it refused as it should; anything but a well-made ActordbgError comes through."""
    try:
        return call()
    except ActordbgError as error:
        assert error.message and error.hint
        assert len(error.message.encode()) < 600, error.message
        return None


@patch.object(dumpfile, "DEFAULT_CAP", CAP)
def judge(mutant, path, store):
    """Hand a mutant to every reader, and hold what they say against what it is. True where it loaded, where it verified."""
    path.write_bytes(mutant.blob)
    record = attempt(lambda: dumpfile.read_record(path))
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


def test_no_mutant_is_a_traceback_or_a_wrong_tensor(path, store):
    """Some do load, as does the file itself: readers that refuse everything would not pass."""
    assert judge(Mutant(A.blob, A.tensors), path, store) == (True, True)
    loaded = []
    for name, mutant in mutants.mutants().items():
        try:
            loaded += [name] * judge(mutant, path, store)[0]
        except Exception as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}"[:2000]) from error
    assert {"ids as another integer", "another step", "other values under their hash", "a text of 100,000 letters"} <= set(loaded)


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
