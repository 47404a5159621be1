"""A store with things in it that are not files of ours: every command continues with the good rest, and `index` names the odd
ones.

All commands run in a process of its own (`many_commands`) with a limit of memory, which is killed if it hangs.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import storecases
from many_commands import run_all

from actordbg.formats.dump_record import SUFFIX
from actordbg.store.layout import Store

pytestmark = pytest.mark.forked
PLACES = {
    "dumps": f"dumps/{storecases.LOOSE}/rank0000/{{}}{SUFFIX}",
    "packs": f"packs/{storecases.PACKED}/{{}}.pack",
    "journals": "replays/r-01/{}.jsonl",
    "comparisons": "comparisons/{}.json",
    "noise": "noise/{}.json",
    "matrices": "matrices/{}.json",
    "tensors": "replays/r-01/tensors/{}.safetensors",
    "counters": f"counters/{storecases.LOOSE}/{{}}.json",
    "switches": "controls/{}.json",
    "runs": "dumps/{}",
    "ranks": f"dumps/{storecases.LOOSE}/{{}}",
    "packs of a run": "packs/{}",
    "replays": "replays/{}",
}
FOLDERS = ("runs", "ranks", "packs of a run", "replays")
"""Places where a folder belongs, so that a folder there is not odd unless its name is."""
NAMED = PLACES.keys() - {"noise", "matrices", "tensors", "counters", "switches"}
"""Places that `index` reads; it names what is odd there, but for a file in the place of a folder that it need not open."""


def sparse(path):
    path.touch()
    os.truncate(path, 2**40)


def strange(name):
    """Makes a folder where folders belong, and a file where files do, with such a name."""

    def make(path):
        full = os.path.join(os.fsencode(path.parent), os.fsencode(path.name).replace(b"odd", name))
        if path.suffix in (".zst", ".pack", ".json", ".jsonl", ".safetensors"):
            os.close(os.open(full, os.O_CREAT | os.O_WRONLY))
        else:
            Path(os.fsdecode(full)).mkdir()
            os.close(os.open(full + b"/spec.json", os.O_CREAT | os.O_WRONLY))

    return make


ODD = {
    "a FIFO": os.mkfifo,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a sparse terabyte": sparse,
    "a folder": Path.mkdir,
    "no UTF-8": strange(b"\xff\xfe"),
    "a line and an escape": strange(b"a\nb\x1b[31m"),
}
COMMANDS = """index
index --rebuild
dump ls --limit 50
dump show last
dump verify
dump export DUMP --out OUT
dump prune --where rank=9 --yes --allow-empty
dump pack --where rank=1
dump unpack --where rank=1
replay --dry-run
report all
compare r-02 r-01
dump status
dump status --all
doctor --quick
store fsck""".splitlines()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A good store. Every command works on a copy of it."""
    folder = tmp_path_factory.mktemp("good")
    store = storecases.build(folder / "store")
    shutil.copytree(store.root, folder / "copy")
    codes = {line: code for line, (code, *_) in run_all(folder / "copy", COMMANDS).items()}
    assert codes.pop("doctor --quick") in (0, 4), "the machine's matter"
    assert set(codes.values()) == {0}, codes
    return store


def test_every_command_works_on_the_good_rest_and_index_names_the_odd(good, tmp_path):
    """Every odd kind lies in every place."""
    store = Store(tmp_path / "store")
    shutil.copytree(good.root, store.root)
    before, checked, damaged = storecases.contents(store), set(), {}
    (store.root / "controls").mkdir(mode=0o700)
    for number, (kind, make) in enumerate(ODD.items()):
        shown = {"no UTF-8": "\\xff\\xfe", "a line and an escape": "a\\nb\\x1b[31m"}.get(kind, "odd") + str(number)
        for name, place in PLACES.items():
            if kind == "a folder" and name in FOLDERS:
                continue
            make(store.root / place.format(f"odd{number}"))
            checked.add(place.format(shown))
            if name in NAMED and (name not in FOLDERS or kind != "a sparse terabyte"):
                damaged[place.format(shown)] = kind
    done = run_all(store.root, COMMANDS)
    exits = {line: done[line][0] for line in COMMANDS}
    assert exits.pop("doctor --quick") in (0, 4)
    assert {line for line, code in exits.items() if code != 0} == {"dump verify", "store fsck"}, done
    assert exits["dump verify"] == exits["store fsck"] == 1
    assert json.loads(done["contents"][1]) == before
    found = {item["path"] for item in json.loads(done["store fsck"][1])["findings"]}
    assert found >= checked, "fsck names all of them"
    for line in ("index", "index --rebuild"):
        answer = json.loads(done[line][1])
        assert answer["dumps"] == len(before)
        named = {item["path"]: item["code"] for item in answer["damaged"]}
        assert named.keys() == damaged.keys()
        assert {damaged[path] for path, code in named.items() if code != "odd-file"} <= {"a sparse terabyte"}, named


def test_an_odd_catalog_lock_or_format_is_named(good, tmp_path):
    for name in ("catalog.db-wal", "catalog.lock", "FORMAT"):
        store = Store(tmp_path / name)
        shutil.copytree(good.root, store.root)
        (store.root / name).unlink(missing_ok=True)
        if name == "catalog.lock":
            store.catalog_path.unlink()
        os.mkfifo(store.root / name)
        code, _, _ = run_all(store.root, ("dump ls",))["dump ls"]
        assert code == 1, "an error of ours, which the command line turns into its exit code"
