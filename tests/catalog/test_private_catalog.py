"""A store that cannot be written can be read: by another user, on a read-only mount, on a full disk.

Three ways make a store unwritable here. Permission bits bind the user `nobody`, as whom the commands run where the tests run as root
(`readers`): always possible. Mounts are real where this process may mount; elsewhere the same test goes by permission bits. A
full disk is also SQLite's own SQLITE_FULL, from a limit on the file's pages: always possible.
"""

import contextlib
import os
import shutil
import sqlite3
import time

import catalogcases as cases
import comparecases
import pytest
from readers import Reader, another_user, mounted, public_folder

from actordbg.base.errors import CatalogProblem, StoreProblem
from actordbg.catalog import connections, migrate, query
from actordbg.catalog.indexer import IndexSummary, refresh
from actordbg.store.layout import Store


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """This process's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "actordbg" / "catalogs"


@pytest.fixture
def filled():
    """A store in a folder that others can reach, with dumps, two finished replays, and a catalog that agrees with them."""
    with public_folder() as folder:
        store = Store(folder / "store").create()
        cases.fill(store, 6)
        inputs = [comparecases.given(index) for index in range(3)]
        for replay_id in ("20250701T000000-aaaa11", "20250701T000000-aaaa12"):
            comparecases.write_replay(store, replay_id, inputs)
        age(store)
        yield store


def age(store, names="**/*"):
    """Make every file and folder of a store, or those of these names, look as if they had come a minute ago."""
    past = time.time() - 60
    for path in (*store.root.glob(names), *([store.root] if names == "**/*" else [])):
        os.utime(path, (past, past))


def rest(store):
    """Make the catalog look as if it had been written a minute ago; the folders keep the times that it knows."""
    age(store, "catalog.*")


def tree(root):
    """Every file below a folder with its time and bytes, without the memory that SQLite's readers share."""
    files = (path for path in root.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
    return {str(path.relative_to(root)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


READING = [
    line.split()
    for line in """dump ls --where seq_len>4
dump show last
dump verify -q
dump status
dump export --where rank=0 --out exported -q
index -q
report last
compare 20250701T000000-aaaa12 20250701T000000-aaaa11 -q
replay --dry-run
matrix --dry-run
dump prune --where rank=0
replay --laws --dry-run
store fsck""".splitlines()
]
WRITING = [
    line.split()
    for line in """replay
noise
matrix
dump pack
dump unpack --all
dump prune --where rank=0 --yes
dump create
dump recover
replay --laws
store fsck --repair
compare 20250701T000000-aaaa12 truth""".splitlines()
]


def check_reading(answers):
    for command, said in zip(READING, answers, strict=True):
        wanted = int(command[0] == "store")  # others can look into this store
        assert said.code == wanted and "Traceback" not in said.err, (command, said)
        if command[0] == "store":
            assert {line.split(":")[1] for line in said.out.splitlines()[:-1]} == {" open-mode"}, (
                "every file was checked, and is sound"
            )
        if command[:2] != ["dump", "status"] and command[0] != "store":
            assert said.err.count("this command uses") == 1, (command, said.err)
        if command[0] == "compare":
            assert "this comparison is not saved" in said.err and "within the thresholds" in said.out


@pytest.mark.slow
@pytest.mark.parametrize("catalog", ["none", "damaged"])
def test_another_users_store_is_read_by_every_reading_command_and_left_as_it_was(filled, catalog):
    if catalog == "damaged":
        filled.catalog_path.write_bytes(b"no database" * 1000)
    rest(filled)
    before = tree(filled.root)
    with another_user(filled.root) as reader:
        said, *others = reader.run(["dump", "ls", "--json"], *(READING if catalog == "none" else []))
        if others:
            check_reading(others)
        assert said.out.count('"dump_id"') == 6, said
        (own,) = reader.catalogs
        assert all(path.stat().st_mode & 0o077 == 0 for path in (own.parent, own.parent.parent))
    assert tree(filled.root) == before, "nothing in the store was touched"


@pytest.mark.slow
def test_what_would_be_written_there_is_refused_before_anything_is_begun(filled):
    refresh(filled)
    before = tree(filled.root)
    with another_user(filled.root) as reader:
        for command, said in zip(WRITING, reader.run(*WRITING), strict=True):
            assert said.code == 4 and "error[store]: cannot write into the store" in said.err, (command, said)
            assert f"hint: work in your own copy: `cp -r {filled.root} NEW`" in said.err
        shutil.copytree(filled.root, reader.home / "mine")  # the way out that is named
        mine = Reader(reader.home, None, reader.home / "mine")
        assert mine.run(["dump", "pack", "-q"], may_write=True)[0].code == 0
    assert tree(filled.root) == before


@contextlib.contextmanager
def harmed(store, harm):
    """Who reads an indexed store on a mount that was harmed by a command of the shell, and whether it is one: where this process
    may not mount, it is another user, who may not write there.
    """
    refresh(store)
    rest(store)
    with mounted(store.root, harm) as root, another_user(store.root) as other:
        reader = other if root is None else Reader(store.root.parent / "me", None, root)
        reader.home.mkdir(exist_ok=True)
        yield reader, root is not None


@pytest.mark.slow
def test_a_store_on_a_read_only_mount_is_read(filled):
    with harmed(filled, 'mount -o remount,ro "$MOUNT"') as (reader, _):
        said = reader.run(["dump", "ls", "--json"], ["dump", "ls", "--where", "rank=1", "--json"], ["dump", "pack"])
        assert [each.code for each in said] == [0, 0, 4], said
        assert [each.out.count('"dump_id"') for each in said[:2]] == [6, 2]
        assert "this command uses" in said[0].err and len(reader.catalogs) == 1


@pytest.mark.slow
def test_a_store_on_a_full_disk_is_read(filled):
    """SQLITE_FULL itself is tested below."""
    fill = 'rm -f "$MOUNT"/store/catalog.db-*; cp -p "$MOUNT"/store/FORMAT "$MOUNT"/store/dumps/; dd if=/dev/zero of="$MOUNT/fill" bs=4k; true'
    with harmed(filled, fill) as (reader, full):
        ls, replay = reader.run(["dump", "ls", "--json"], ["replay"], may_write=full)
        assert ls.code == 0 and ls.out.count('"dump_id"') == 6 and "this store's catalog cannot be written" in ls.err
        assert replay.code == 4 and (not full or "hint: make room on that disk" in replay.err), replay
        if full:
            assert reader.run(["dump", "prune", "--where", "rank=0", "--yes"], may_write=True)[0].code == 0, "which makes room"


def test_a_disk_that_fills_up_while_the_catalog_is_written(store, cache, monkeypatch, caplog):
    """SQLite itself says that the disk is full: the store's catalog may have no page more than it has."""
    refresh(store)
    cases.fill(store, 300)
    plain = connections.connect_writable

    def full(path):
        connection = plain(path)
        if path.parent == store.root:
            connection.execute("PRAGMA max_page_count = 1")
        return connection

    monkeypatch.setattr(connections, "connect_writable", full)
    rows = query.select_dumps(store)
    assert len(rows) == 300 and "is full" in caplog.text and str(cache) in caplog.text
    monkeypatch.setattr(connections, "connect_writable", plain)
    again = Store(store.root)
    assert refresh(again).private_catalog is None and query.count_dumps(again) == 300, (
        "with room there is no need of the other one"
    )


def _unwritable(monkeypatch, store, *more):
    """Say of the catalogs in these folders that they cannot be written, as a mount would (root has no permission bits)."""
    plain, writable = connections.connect_writable, connections.is_writable

    def refuse(path):
        if path.parent in (store.root, *more):
            raise sqlite3.OperationalError("attempt to write a readonly database")
        return plain(path)

    monkeypatch.setattr(connections, "is_writable", lambda path: path.parent not in (store.root, *more) and writable(path))
    monkeypatch.setattr(connections, "connect_writable", refuse)


def test_a_private_catalog_follows_the_files(store, cache, monkeypatch):
    cases.fill(store, 4)
    store.catalog_path.write_bytes(b"junk")
    _unwritable(monkeypatch, store)
    assert refresh(Store(store.root)).added == 4, "whatever the store's catalog is"
    cases.publish(store, cases.record(101))
    assert refresh(Store(store.root)).added == 1
    private = Store(store.root)
    refresh(private, rebuild=True)
    assert migrate.is_private(private) and query.count_dumps(private) == 5
    private.catalog_path.write_bytes(b"junk")
    assert query.count_dumps(Store(store.root)) == 5, "a private one that is damaged is made again"


def test_without_a_cache_folder_it_is_an_error(store, tmp_path, cache, monkeypatch):
    _unwritable(monkeypatch, store)
    (tmp_path / "cache").write_text("a file, where a folder should be")
    with pytest.raises(CatalogProblem, match=f"a private catalog in {cache}/.* cannot be written either") as caught:
        refresh(Store(store.root))
    assert "XDG_CACHE_HOME" in caught.value.hint


def test_no_catalog_is_kept_in_a_folder_of_another_user(store, cache, monkeypatch):
    _unwritable(monkeypatch, store)
    monkeypatch.setattr(migrate, "is_own", lambda owner: False)
    with pytest.raises(CatalogProblem, match="it belongs to another user"):
        refresh(Store(store.root))
    assert not list(cache.rglob("catalog.db"))


def test_a_new_private_catalog_removes_those_that_were_not_used_for_a_month(store, cache, monkeypatch):
    for name, used in (("old", 1), ("used", time.time())):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (used, used))
    _unwritable(monkeypatch, store)
    refresh(Store(store.root))
    own = migrate.private_folder(store)
    assert {path.name for path in cache.iterdir()} == {"used", own.name}
    os.utime(own, (1, 1))
    refresh(Store(store.root))
    assert own.stat().st_mtime > 1, "each use counts"


@pytest.mark.slow
def test_many_readers_of_one_unwritable_store_share_one_catalog(filled):
    """The store's own does not know its newest dump."""
    refresh(filled)
    rest(filled)
    cases.publish(filled, cases.record(100))
    with another_user(filled.root) as reader:
        running = [reader.start(["dump", "ls", "--json"]) for _ in range(3)]
        for process in running:
            out, _ = process.communicate(timeout=120)
            assert out.count('\\"dump_id\\"') == 7 and "Traceback" not in out and process.returncode == 0, out
        assert len(reader.catalogs) == 1
        with sqlite3.connect(shutil.copy(reader.catalogs[0], filled.root.parent / "copy.db")) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


HOSTILE = {
    "view": ("ALTER TABLE dump RENAME TO d2", "CREATE VIEW dump AS SELECT * FROM d2"),
    "trigger": ("CREATE TRIGGER t AFTER DELETE ON scanned_folder BEGIN DELETE FROM dump; END",),
    "virtual table": ("CREATE VIRTUAL TABLE extra USING rtree(a, b, c)",),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_catalog_whose_schema_does_something_is_refused(store, kind):
    cases.fill(store, 3)
    age(store)
    refresh(store)
    with sqlite3.connect(store.catalog_path) as connection:
        for statement in HOSTILE[kind]:
            connection.execute(statement)
    connection.close()
    with pytest.raises(CatalogProblem, match=f"it has a {kind.split()[-1]}") as caught:
        refresh(Store(store.root))
    assert "--rebuild" in caught.value.hint
    assert refresh(Store(store.root), rebuild=True).dumps == query.count_dumps(Store(store.root)) == 3
    with connections.connect_readonly(store.catalog_path) as connection:
        pragmas = [
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("trusted_schema", "query_only", "cell_size_check")
        ]
        assert pragmas == [0, 1, 1]


def test_a_view_of_the_users_own_stops_no_command(store):
    cases.fill(store, 3)
    refresh(store)
    with contextlib.closing(sqlite3.connect(store.catalog_path)) as connection, connection:
        connection.execute("CREATE VIEW long_dumps AS SELECT * FROM dump_and_caller WHERE seq_len > 8")
    cases.fill(store, 4)
    assert refresh(Store(store.root)).dumps == query.count_dumps(Store(store.root)) == 4
    with connections.connect_readonly(store.catalog_path) as connection:
        assert connection.execute("SELECT count(DISTINCT rank) > 0 FROM long_dumps").fetchone() == (1,)


def test_rows_that_lead_out_of_the_store_are_refused(store):
    cases.fill(store, 1)
    refresh(store)
    with sqlite3.connect(store.catalog_path) as connection:
        connection.execute("UPDATE caller SET rank = 'x'")
    with pytest.raises(CatalogProblem, match="outside the store"):
        query.select_dumps(query.Catalog(store, IndexSummary()))


@pytest.mark.parametrize("odd", ["link", "folder"])
def test_a_catalog_that_is_no_file_is_refused_at_once(store, cache, tmp_path, odd):
    cases.fill(store, 1)
    if odd == "link":
        store.catalog_path.symlink_to(tmp_path / "elsewhere.db")
    else:
        store.catalog_path.mkdir()
    with pytest.raises(CatalogProblem, match=r"is a folder|a FIFO or a device, not a file") as caught:
        refresh(Store(store.root))
    assert ("fsck --repair" if odd == "folder" else "index --rebuild") in caught.value.hint
    if odd == "link":
        assert refresh(Store(store.root), rebuild=True).dumps == 1
        assert store.catalog_path.is_file() and not store.catalog_path.is_symlink()
    assert not (tmp_path / "elsewhere.db").exists()


def test_a_store_says_whether_results_can_be_written(store, monkeypatch):
    before = os.listdir(store.root)
    assert store.require_writable() is store and os.listdir(store.root) == before
    monkeypatch.setattr("actordbg.store.layout._ROOM", 1 << 50)
    with pytest.raises((StoreProblem, MemoryError)):
        store.require_writable()
    assert os.listdir(store.root) == before
