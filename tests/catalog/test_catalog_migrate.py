"""Migrations: one head, equal to the models; an upgrade happens whole or not at all; what is newer is not touched."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import catalogcases as cases
import pytest

from actordbg.base.errors import CatalogProblem
from actordbg.catalog import connections as engine
from actordbg.catalog import migrate, query
from actordbg.catalog import sqlmodels as models
from actordbg.catalog.indexer import refresh
from actordbg.config.replay_config import SETTINGS, ReplayConfig
from actordbg.fsck import catalog_check
from actordbg.store.layout import Store
from benchmarks.bench_index import fill_synthetic

NEXT = f"{int(migrate.HEAD) + 1:04d}"
SECOND = """
from alembic import op
revision, down_revision, branch_labels, depends_on = "{revision}", "{before}", None, None
def upgrade():
    connection = op.get_bind()
    connection.exec_driver_sql("CREATE TABLE extra (name VARCHAR)")
    connection.exec_driver_sql("ALTER TABLE run ADD COLUMN colour VARCHAR")
    connection.exec_driver_sql("UPDATE run SET colour = 'red'")
    {then}
"""


def second_revision(tmp_path: Path, then: str) -> Path:
    """A copy of the migrations with one more."""
    scripts = tmp_path / "migrations"
    shutil.copytree(migrate.scripts_folder(), scripts)
    (scripts / "versions" / f"{NEXT}_next.py").write_text(SECOND.format(then=then, revision=NEXT, before=migrate.HEAD))
    return scripts


def digest(store: Store) -> str:
    return hashlib.sha256(store.catalog_path.read_bytes()).hexdigest()


def schema(path: Path) -> list[str]:
    with sqlite3.connect(path) as connection:
        return [row[0] for row in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")]


def test_there_is_one_head_and_the_program_knows_it() -> None:
    from alembic.script import ScriptDirectory

    assert ScriptDirectory.from_config(migrate.alembic_config()).get_heads() == [migrate.HEAD]


def test_a_new_catalog_has_the_schema_that_the_migrations_make(store: Store, tmp_path: Path) -> None:
    """Statement by statement, the version too; where it differs, `make docs` writes migrations/head.sql anew."""
    migrate.ensure(store)
    migrate.upgrade(tmp_path / "catalog.db", scripts=migrate.scripts_folder())
    made, migrated = (sorted(one.strip() for one in schema(path)) for path in (store.catalog_path, tmp_path / "catalog.db"))
    assert made == migrated
    assert migrate.revision(store.catalog_path) == migrate.revision(tmp_path / "catalog.db") == migrate.HEAD


def test_the_migrated_schema_is_that_of_the_models(store: Store) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    migrate.ensure(store)
    with engine.make_engine(store.catalog_path).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, models.metadata) == []
        for table in models.metadata.tables.values():
            keys = {
                row[3]: (row[2], row[4], row[6]) for row in connection.exec_driver_sql(f"PRAGMA foreign_key_list({table.name})")
            }
            wanted = {
                key.parent.name: (key.column.table.name, key.column.name, key.ondelete or "NO ACTION")
                for key in table.foreign_keys
            }
            assert keys == wanted


def test_the_schema_says_what_each_column_holds(store: Store) -> None:
    """`sqlite3 store/catalog.db .schema` is documentation: a comment beside each column, the model's own.

    Only the column of a setting that is younger than its table has none: it is added without a migration.
    """
    added = {one.stored for one in SETTINGS.values()}
    migrate.ensure(store)
    with sqlite3.connect(store.catalog_path) as connection:
        for table in models.metadata.tables.values():
            sql = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (table.name,)).fetchone()[0]
            said = dict(re.findall(r'^\s*"?(\w+)"? [A-Z].*?  -- (.*)$', sql, re.MULTILINE))
            assert said == {
                column.name: column.comment for column in table.columns if column.name in said or column.name not in added
            }
            assert {"model", "dtype", "packing"} <= said.keys() or table.name != "replay"
            assert all(column.comment for column in table.columns)


def test_a_new_catalog_has_the_right_journal_mode_and_permissions(store: Store) -> None:
    migrate.ensure(store)
    assert store.catalog_path.stat().st_mode & 0o777 == 0o600
    with sqlite3.connect(store.catalog_path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone()[0] == engine.journal_mode(store.catalog_path)


def test_an_upgrade_keeps_the_rows_and_a_backup(store: Store, tmp_path: Path) -> None:
    cases.fill(store, 3)
    refresh(store)
    left = store.root / f"catalog.{migrate.HEAD}.bak.db.99.part-journal"
    left.write_bytes(b"of a process that was killed")
    migrate.ensure(store, head=NEXT, scripts=second_revision(tmp_path, "pass"))
    assert migrate.revision(store.catalog_path) == NEXT and not left.exists()
    with sqlite3.connect(store.catalog_path) as connection:
        assert connection.execute("SELECT name, colour FROM run").fetchall() == [("ppo-1", "red")]
    backup = store.root / f"catalog.{migrate.HEAD}.bak.db"
    assert migrate.revision(backup) == migrate.HEAD
    with sqlite3.connect(backup) as connection:
        assert connection.execute("SELECT count(*) FROM dump").fetchone() == (3,)


@pytest.mark.parametrize("revision", ["0007", "0008"])
def test_an_older_catalog_gets_the_rows_of_a_new_one_and_keeps_its_results(store: Store, revision: str) -> None:
    records = cases.fill(store, 9)
    folder = cases.write_spec(store, cases.spec("r", records))
    cases.append(folder / "rank0.jsonl", *(cases.result("r", one.dump_id, "failed") for one in records[:4]))
    refresh(store)
    fresh = cases.contents(store)
    cases.make_older(store, revision)
    shutil.rmtree(folder)  # with the folder gone a result that is not kept cannot come back
    migrate.ensure(store)
    with sqlite3.connect(store.catalog_path) as connection:
        assert connection.execute("SELECT count(*) FROM result").fetchone() == (4,)
        assert connection.execute("SELECT count(*) FROM dump").fetchone() == (0,)
    cases.append(
        cases.write_spec(store, cases.spec("r", records)) / "rank0.jsonl",
        *(cases.result("r", one.dump_id, "failed") for one in records[:4]),
    )
    refresh(store)
    assert cases.contents(store) == fresh and len(query.select_dumps(store, "status='failed'")) == 4
    assert list(catalog_check.catalog(store, True)) == []


def test_an_upgraded_catalog_is_as_small_as_what_it_holds(store: Store) -> None:
    """The rows of dumps are read again, and a reader of the old ones goes on."""
    store.create()
    fill_synthetic(store, 3000)
    cases.make_older(store, "0008")
    before = store.catalog_path.stat().st_size
    with contextlib.closing(sqlite3.connect(store.catalog_path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM dump").fetchone() == (3000,)
        migrate.ensure(store)
        assert reader.execute("SELECT count(*) FROM dump").fetchone() == (3000,)
    with contextlib.closing(sqlite3.connect(store.catalog_path)) as connection:
        assert connection.execute("PRAGMA freelist_count").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM result").fetchone() == (30,)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert store.catalog_path.stat().st_size < before / 4


def test_a_catalog_that_somebody_holds_keeps_its_empty_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "_SHRINK_WAIT_MS", 1)
    store.create()
    fill_synthetic(store, 3000)
    with contextlib.closing(sqlite3.connect(store.catalog_path, isolation_level=None)) as holder:
        holder.execute("DELETE FROM dump")
        holder.execute("BEGIN IMMEDIATE")
        before = holder.execute("PRAGMA page_count").fetchone()
        migrate.give_back_room(store.catalog_path)
        assert holder.execute("PRAGMA page_count").fetchone() == before
        holder.execute("ROLLBACK")
    migrate.give_back_room(store.catalog_path)
    with contextlib.closing(sqlite3.connect(store.catalog_path)) as connection:
        assert connection.execute("PRAGMA page_count").fetchone() < before


def test_a_disk_without_room_for_a_second_catalog_leaves_it_as_it_is(store: Store) -> None:
    store.create()
    fill_synthetic(store, 3000)
    with contextlib.closing(sqlite3.connect(store.catalog_path, isolation_level=None)) as connection:
        connection.execute("DELETE FROM dump WHERE rowid % 2")
    code = (
        "import resource, sys; from pathlib import Path; from actordbg.catalog import migrate;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); migrate.give_back_room(Path(sys.argv[1]))"
    )
    before = store.catalog_path.stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", code, store.catalog_path], check=False, timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "") and store.catalog_path.stat().st_size == before
    with contextlib.closing(sqlite3.connect(store.catalog_path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.mark.parametrize("revision", ["0007", "0008"])
def test_an_upgrade_keeps_what_is_damaged_and_forgets_what_is_gone(store: Store, revision: str) -> None:
    """A run without dumps, and a broken file that nothing would read again: no later refresh would mend either."""
    cases.fill(store, 3)
    gone = cases.publish(store, cases.record(3, run="gone")).parent.parent
    broken = store.comparisons / "broken.json"
    broken.parent.mkdir()
    broken.write_text("{")
    cases.settle(store)
    for path in (broken, store.comparisons):
        os.utime(path, (1, 1))
    refresh(store)
    cases.make_older(store, revision)
    shutil.rmtree(gone)
    assert [one.path for one in refresh(store).damaged] == ["comparisons/broken.json"]
    assert [run for (run,) in cases.contents(store)["run"]] == ["ppo-1"]
    assert list(catalog_check.catalog(store, True)) == []


@pytest.mark.parametrize("then", ["raise RuntimeError('no')", "connection.exec_driver_sql('CREATE TABLE run (x)')"])
def test_an_upgrade_that_fails_half_way_leaves_the_old_catalog(store: Store, tmp_path: Path, then: str) -> None:
    cases.fill(store, 3)
    refresh(store)
    before = schema(store.catalog_path)
    with pytest.raises((RuntimeError, CatalogProblem)):
        migrate.ensure(store, head=NEXT, scripts=second_revision(tmp_path, then))
    assert schema(store.catalog_path) == before
    assert migrate.revision(store.catalog_path) == migrate.HEAD
    assert refresh(store).dumps == 3


def test_a_setting_that_came_later_has_the_values_of_a_new_catalog(store: Store) -> None:
    """Also for replays that are older than the setting: their specification does not name it."""
    dumps = cases.fill(store, 1)
    cases.write_spec(store, cases.spec("20250701T000000-000001", dumps, attn="eager"))
    older = cases.write_spec(store, cases.spec("20250701T000000-000002", dumps)) / "spec.json"
    plain = json.loads(older.read_text())
    del plain["config"]["attn"]
    older.write_text(json.dumps(plain))
    refresh(store)
    with sqlite3.connect(store.catalog_path) as connection:  # as the program without the setting left it
        connection.execute("UPDATE replay SET config = json_remove(config, '$.attn')")
        connection.execute("ALTER TABLE replay DROP COLUMN attn")
    connection.close()
    refresh(store)
    with sqlite3.connect(store.catalog_path) as connection:
        found = connection.execute("SELECT attn FROM replay ORDER BY replay_id").fetchall()
    assert found == [("eager",), (ReplayConfig().attn,)]
    assert list(catalog_check.catalog(store, True)) == []


def test_an_upgrade_that_is_killed_half_way_leaves_the_old_catalog(store: Store, tmp_path: Path) -> None:
    cases.fill(store, 3)
    refresh(store)
    before = schema(store.catalog_path)
    scripts = second_revision(tmp_path, "import os; os.kill(os.getpid(), 9)")
    code = (
        "import sys; from pathlib import Path; from actordbg.catalog import migrate; from actordbg.store.layout import Store;"
        f"migrate.ensure(Store(sys.argv[1]), head='{NEXT}', scripts=Path(sys.argv[2]))"
    )
    done = subprocess.run([sys.executable, "-c", code, store.root, scripts], check=False, timeout=60)
    assert done.returncode == -9
    assert schema(store.catalog_path) == before
    assert refresh(store).dumps == 3


def test_a_newer_catalog_is_refused_untouched_also_by_rebuild(store: Store) -> None:
    cases.fill(store, 1)
    refresh(store)
    with sqlite3.connect(store.catalog_path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '0042'")
    connection.close()
    before = digest(store)
    for rebuild in (False, True):
        with pytest.raises(CatalogProblem) as caught:
            refresh(store, rebuild=rebuild)
        assert "newer" in caught.value.message
        assert caught.value.exit_code == 4
        assert caught.value.hint
    assert digest(store) == before


def test_a_database_that_is_no_catalog_is_refused(store: Store) -> None:
    with sqlite3.connect(store.catalog_path) as connection:
        connection.execute("CREATE TABLE recipes (name)")
    with pytest.raises(CatalogProblem, match="not a catalog"):
        refresh(store)


def test_an_empty_file_is_a_new_catalog(store: Store) -> None:
    store.catalog_path.touch()
    assert refresh(store).dumps == 0


def test_an_up_to_date_catalog_is_opened_without_alembic_or_sqlalchemy(store: Store) -> None:
    cases.fill(store, 2)
    cases.settle(store)
    refresh(store)
    code = (
        "import sys; from actordbg.catalog.query import select_dumps; from actordbg.store.layout import Store;"
        "print(len(select_dumps(Store(sys.argv[1]), 'rank=0'))); print(sorted({'alembic', 'sqlalchemy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, store.root], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["1", "[]"]


def _open(root: str) -> str:
    store = Store(root)
    migrate.ensure(store)
    return migrate.revision(store.catalog_path) or ""


def test_many_processes_may_open_a_store_that_has_no_catalog_yet(store: Store) -> None:
    with ProcessPoolExecutor(8) as pool:
        assert set(pool.map(_open, [str(store.root)] * 16)) == {migrate.HEAD}


@pytest.mark.parametrize("asked", [1, 2])
def test_a_catalog_that_is_made_between_two_questions_is_one(store: Store, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases.fill(store, 1)
    with contextlib.closing(engine.connect_writable(store.catalog_path)) as empty:
        empty.execute("PRAGMA journal_mode = WAL")
    connect, questions = engine.connect_readonly, 0

    class Slow:
        """Another process makes the catalog before question no. `asked` about its tables."""

        def __init__(self, connection: sqlite3.Connection) -> None:
            self.connection = connection

        def execute(self, sql: str) -> sqlite3.Cursor:
            nonlocal questions
            questions += "NOT IN" not in sql
            if questions == asked and "NOT IN" not in sql:
                with monkeypatch.context() as patched:
                    patched.setattr(engine, "connect_readonly", connect)
                    migrate.ensure(store)
            return self.connection.execute(sql)

    @contextlib.contextmanager
    def slowly(path: Path) -> Iterator[Slow]:
        with connect(path) as connection:
            yield Slow(connection)

    monkeypatch.setattr(engine, "connect_readonly", slowly)
    assert migrate.revision(store.catalog_path) == migrate.HEAD
    assert questions == 2


def test_a_catalog_that_cannot_be_written_is_an_error_with_a_remedy(store: Store) -> None:
    store.catalog_path.mkdir()
    with pytest.raises(CatalogProblem) as caught:
        refresh(store)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("ext4", "wal"), ("tmpfs", "wal"), ("nfs4", "delete"), ("fuse.sshfs", "delete"), ("lustre", "delete")],
)
def test_the_journal_suits_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, mode: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"root / ext4 rw 0 0\ndisk {tmp_path} {kind} rw 0 0\nother {tmp_path}x nfs rw 0 0\n")
    assert engine.file_system(tmp_path, str(mounts)) == kind
    monkeypatch.setattr(engine, "file_system", lambda folder: kind)
    assert engine.journal_mode(tmp_path / "catalog.db") == mode


def test_writers_begin_immediately(store: Store) -> None:
    """Two transactions that read and then write: with a deferred BEGIN the second fails at once, here it waits its turn."""
    migrate.ensure(store)
    with engine.transaction(store.catalog_path) as first:
        first.exec_driver_sql("SELECT count(*) FROM run")
        other = sqlite3.connect(store.catalog_path, timeout=0, isolation_level=None)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.close()
    with engine.transaction(store.catalog_path) as connection:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == int(engine.BUSY_TIMEOUT_S * 1000)


def test_a_file_system_without_locks_is_an_error_with_a_remedy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(migrate.fcntl, "flock", none)
    with pytest.raises(CatalogProblem, match=r"cannot lock .*No locks available") as problem:
        migrate.ensure(store)
    assert "file system" in problem.value.hint
