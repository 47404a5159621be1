"""The schema: equal to the models and to what alembic makes; a catalog of any other program is made anew."""

import contextlib
import errno
import shutil
import sqlite3
import sys

import catalogcases as cases
import docpages
import pytest
from commandline import invoke
from roots import ROOT, run_program
from sqlmodel import create_engine

from actordbg.base.errors import CatalogProblem
from actordbg.catalog import connections as engine, migrate, models, query
from actordbg.catalog.indexer import refresh
from actordbg.dumps import checking
from actordbg.formats.store_files import file_system


def schema(path):
    with sqlite3.connect(path) as connection:
        return [row[0] for row in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")]


def test_alembic_makes_the_schema_that_the_program_makes(store, tmp_path):
    """And `migrations/versions` has one head, which the program knows."""
    from alembic import command
    from alembic.config import Config

    config, path = Config(), tmp_path / "catalog.db"
    config.set_main_option("script_location", str(ROOT / "migrations"))
    with create_engine(f"sqlite:///{path}").begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    refresh(store)
    made, migrated = ({one for one in schema(place) if "alembic_version" not in one} for place in (store.catalog_path, path))
    assert made == migrated
    assert migrate.look(store.catalog_path) == migrate.look(path) == (migrate.HEAD, True)


def of_an_earlier_program(store, revision="0007"):
    """The catalog becomes one that an earlier program made, with other tables."""
    with contextlib.closing(sqlite3.connect(store.catalog_path)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
        connection.execute("DROP TABLE law_answer")


def of_a_later_program(store):
    """The catalog becomes one whose revision this program cannot know."""
    of_an_earlier_program(store, "ab12cd34ef56")


def without_a_setting(store):
    """The catalog becomes one of a program that had a setting less."""
    with contextlib.closing(sqlite3.connect(store.catalog_path)) as connection, connection:
        connection.execute("ALTER TABLE replay DROP COLUMN attn")


@pytest.mark.parametrize("made", [of_an_earlier_program, of_a_later_program, without_a_setting])
def test_another_programs_catalog_is_made_anew_from_the_files_and_that_is_said(store, made, caplog):
    records = cases.fill(store, 9)
    folder = cases.write_spec(store, cases.spec("r", records))
    cases.append(folder / "rank0.jsonl", *(cases.result("r", one.dump_id, "failed") for one in records[:4]))
    refresh(store)
    fresh, inode = cases.contents(store), store.catalog_path.stat().st_ino
    made(store)
    assert not migrate.look(store.catalog_path)[1]
    with contextlib.closing(sqlite3.connect(store.catalog_path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM dump").fetchone() == (9,)
        done = invoke(store, "dump ls")
        assert reader.execute("SELECT count(*) FROM dump").fetchone() == (9,), "a reader of the old one continues"
    assert done.exit_code == 0 and "rebuilt the catalog from the store's files: it was made by another actordbg" in caplog.text
    assert cases.contents(store) == fresh and store.catalog_path.stat().st_ino == inode
    assert len(query.select_dumps(store, "status='failed'")) == 4 and migrate.look(store.catalog_path)[1]
    assert list(checking.catalog(store, True)) == []


NEXT = """
import sqlalchemy
from alembic import op

revision, down_revision, branch_labels, depends_on = "next", "{head}", None, None


def upgrade():
    op.add_column("dump", sqlalchemy.Column("note", sqlalchemy.String))
    op.execute("UPDATE dump SET note = 'migrated'")
    op.create_index("ix_dump_note", "{table}", ["note"])
"""


@pytest.fixture
def next_release(store, tmp_path, monkeypatch):
    """Make this program one of a next revision, whose script alters a table; the revision of today has been released."""
    cases.fill(store, 5)
    refresh(store)
    released, folder = migrate.HEAD, shutil.copytree(ROOT / "migrations", tmp_path / "migrations")
    beginning = folder / "versions" / "beginning.py"
    beginning.write_text(beginning.read_text().replace("migrate.HEAD", repr(released)))

    def release(table):
        (folder / "versions" / "next.py").write_text(NEXT.format(head=released, table=table))
        monkeypatch.setattr(migrate, "MIGRATIONS", (folder,))
        monkeypatch.setattr(migrate, "HEAD", "next")

    return release


def test_a_catalog_of_a_released_revision_is_migrated_with_what_a_user_added(store, next_release, caplog):
    with contextlib.closing(sqlite3.connect(store.catalog_path)) as connection, connection:
        connection.execute("CREATE VIEW mine AS SELECT dump_id FROM dump")
    released = migrate.HEAD
    next_release("dump")
    assert refresh(store).dumps == len(query.select_dumps(store)) == 5
    assert f"migrated the catalog from revision {released} to next" in caplog.text and "rebuilt" not in caplog.text
    with contextlib.closing(sqlite3.connect(store.catalog_path)) as connection:
        assert connection.execute("SELECT DISTINCT note FROM dump").fetchall() == [("migrated",)]
        assert connection.execute("SELECT count(*) FROM mine").fetchone() == (5,)
    caplog.clear()
    assert migrate.look(store.catalog_path) == ("next", True) and refresh(store).dumps == 5 and not caplog.text


def test_a_migration_that_fails_changes_nothing(store, next_release):
    before, released = schema(store.catalog_path), migrate.HEAD
    next_release("no_such_table")
    assert not migrate.upgraded(store, released)
    assert schema(store.catalog_path) == before and migrate.look(store.catalog_path)[0] == released


def test_a_catalog_that_cannot_be_migrated_in_its_place_is_made_elsewhere(store, next_release, monkeypatch):
    """`index-earlier` of `make kills` found it: SQLite's own error passed when the disk failed before the migration's first
    statement."""
    own, whole = store.catalog_path, engine.connect_writable
    next_release("dump")

    def full(path):
        connection = whole(path)
        connection.execute(f"PRAGMA query_only = {int(path == own)}")
        return connection

    monkeypatch.setattr(engine, "connect_writable", full)
    assert refresh(store).dumps == 5 and migrate.is_private(store)


def test_the_pages_script_reads_dumps_and_their_ranks(store, monkeypatch, capsys):
    (record, short) = cases.fill(store, 2, seq_len=5000)[0], cases.record(7, seq_len=64)
    cases.publish(store, short)
    folder = cases.write_spec(store, cases.spec("r", [record]))
    cases.append(folder / "rank0.jsonl", cases.result("r", record.dump_id, "failed", error="out of memory"))
    refresh(store)
    page = docpages.blocks(ROOT / "docs" / "reference" / "catalog.md")
    (code,) = [block.text for block in page if block.name == "session"]
    monkeypatch.chdir(store.root.parent)
    exec(code, {})  # the page's own code
    printed = capsys.readouterr().out
    assert printed.count(" 5000\n") == 2 and f"{record.run} 0 out of memory" in printed and short.dump_id not in printed


def test_an_earlier_catalog_that_cannot_be_written_anew_is_left_as_it_is(store, monkeypatch):
    cases.fill(store, 3)
    refresh(store)
    of_an_earlier_program(store)
    before = schema(store.catalog_path)

    def full(*_):
        raise CatalogProblem("database or disk is full")

    with monkeypatch.context() as patched, pytest.raises(CatalogProblem, match="full"):
        patched.setattr(engine, "copy_into", full)
        refresh(store)
    assert schema(store.catalog_path) == before
    assert refresh(store).dumps == 3


def test_the_schema_is_that_of_the_models(store):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    refresh(store)
    with create_engine(f"sqlite:///{store.catalog_path}").connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, models.SQLModel.metadata) == []


def test_a_database_that_is_no_catalog_is_refused(store):
    with sqlite3.connect(store.catalog_path) as connection:
        connection.execute("CREATE TABLE recipes (name)")
    with pytest.raises(CatalogProblem, match="not a catalog"):
        refresh(store)


def test_an_up_to_date_catalog_is_opened_without_alembic_or_sqlalchemy(store):
    cases.fill(store, 2)
    cases.settle(store)
    refresh(store)
    code = (
        "import sys; from actordbg.catalog.query import select_dumps; from actordbg.store.layout import Store;"
        "print(len(select_dumps(Store(sys.argv[1]), 'rank=0'))); print(sorted({'alembic', 'sqlalchemy', 'torch'} & set(sys.modules)))"
    )
    done = run_program([sys.executable, "-c", code, store.root], check=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["1", "[]"]


@pytest.mark.parametrize(
    "kind, mode",
    [("ext4", "wal"), ("nfs4", "delete"), ("fuse.sshfs", "delete")],
)
def test_the_journal_suits_the_file_system(tmp_path, monkeypatch, kind, mode):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"root / ext4 rw 0 0\ndisk {tmp_path} {kind} rw 0 0\nother {tmp_path}x nfs rw 0 0\n")
    assert file_system(tmp_path, str(mounts)) == kind
    monkeypatch.setattr(engine, "file_system", lambda folder: kind)
    assert engine.journal_mode(tmp_path / "catalog.db") == mode


def test_writers_begin_immediately(store):
    """Two transactions that read and then write: with a deferred BEGIN the second fails at once, here it waits its turn."""
    refresh(store)
    with engine.plain_transaction(store.catalog_path) as first:
        first.execute("SELECT count(*) FROM dump")
        other = sqlite3.connect(store.catalog_path, timeout=0, isolation_level=None)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.close()


def test_a_file_system_without_locks_is_an_error_with_a_remedy(store, monkeypatch):
    def none(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(migrate.fcntl, "flock", none)
    with pytest.raises(CatalogProblem, match=r"cannot lock .*No locks available") as problem:
        migrate.make_anew(store, lambda: None, rebuild=False)
    assert "file system" in problem.value.hint
