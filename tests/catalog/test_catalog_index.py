"""The index: the catalog says what the files say, cheaply, whoever else is at it, and whatever state the files are in."""

import json
import os
import shutil
import sqlite3
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import catalogcases as cases
import pytest
from catalogcases import contents

from actordbg.base.errors import CatalogProblem, StoreProblem
from actordbg.catalog import connections, dump_rows as headers, migrate, query
from actordbg.catalog.indexer import Dumps, refresh
from actordbg.catalog.lab_columns import Replay
from actordbg.catalog.tables import DUMP_COLUMNS
from actordbg.formats.dump_record import SUFFIX, TensorSpec
from actordbg.records import journal as journals
from actordbg.records.journal import read_results
from actordbg.store.layout import Store


def rows_of(store):
    with sqlite3.connect(store.catalog_path) as connection:
        return [row[0] for row in connection.execute("SELECT dump_id FROM dump ORDER BY dump_id")]


def test_every_dump_becomes_a_row_that_says_what_its_record_says(store):
    records = cases.fill(store, 12)
    summary = refresh(store)
    assert (summary.added, summary.removed, summary.dumps, summary.damaged) == (12, 0, 12, [])
    for described in records:
        row = query.get_dump(store, described.dump_id)
        for name in (name for name, column in DUMP_COLUMNS.items() if not column.of):
            if hasattr(row, name):
                assert getattr(row, name) == getattr(described, name), name
        assert row.padding == described.padding
        assert row.return_output is described.arguments["return_output"]
        assert row.with_outputs is False
        assert store.root / row.path == store.dump_path(described)
        assert row.bytes == store.dump_path(described).stat().st_size


def test_a_refresh_adds_what_is_new_and_removes_what_is_gone(store):
    records = cases.fill(store, 6)
    refresh(store)
    store.dump_path(records[2]).unlink()
    cases.publish(store, cases.record(6))
    summary = refresh(store)
    assert (summary.added, summary.removed, summary.dumps) == (1, 1, 6)
    shutil.rmtree(store.dumps / "ppo-1")
    summary = refresh(store)
    assert (summary.removed, summary.dumps) == (6, 0)
    assert contents(store)["caller"] == []


def test_a_settled_folder_is_not_listed_again(store, monkeypatch):
    cases.fill(store, 4)
    cases.settle(store)
    refresh(store)
    listed = []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(str(path)) or real(path))
    refresh(store)
    assert listed == []
    cases.publish(store, cases.record(4))
    assert refresh(store).added == 1
    assert [Path(path).name for path in listed] == ["rank0000"]


def test_a_folder_that_has_just_changed_is_not_relied_on(store):
    """A coarse clock can give two changes one time: the file that arrives in the same tick must still be found."""
    first = cases.publish(store, cases.record(0))
    refresh(store)
    state = first.parent.stat()
    cases.publish(store, cases.record(4))
    os.utime(first.parent, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert refresh(store).added == 1


@pytest.mark.parametrize(
    "damage, reason",
    [
        (lambda blob: b"", "wrong magic"),
        (lambda blob: blob[:100], "ends inside its record"),
        (lambda blob: blob.replace(b'"seq_len":8', b'"seq_len":9'), "CRC-32"),
        (lambda blob: blob[:4] + b"\xff\xff\xff\x7f" + blob[8:], "over the limit"),
        (lambda blob: blob[: 8 + int.from_bytes(blob[4:8], "little")], "payload is missing"),
        (lambda blob: cases.with_record(blob, b'"format_version":1', b'"format_version":9'), "format version 9"),
        (lambda blob: cases.with_record(blob, b'"rank":0', b'"rank":3'), "belongs at"),
        (lambda blob: cases.with_record(blob, b'"tokens":13', b'"tokens":-3'), "tokens"),
        (lambda blob: cases.with_record(blob, b"2025-06-19T05", b"2025-16-19T05"), "timestamp"),
        (lambda blob: cases.with_record(blob, b'"node-0"', b'"\\udc00"'), "surrogates not allowed"),
        (lambda blob: cases.with_record(blob, b'"role":"reference"', b'"role":7          '), "role"),
    ],
)  # fmt: skip
def test_a_damaged_dump_is_a_warning_with_its_reason(store, damage, reason):
    bad, good = cases.fill(store, 1)[0], cases.record(4)
    path = store.dump_path(bad)
    blob = path.read_bytes()
    path.write_bytes(damage(blob))
    cases.publish(store, good)
    summary = refresh(store)
    assert summary.added == 1
    assert [item.path for item in summary.damaged] == [store.relative(path)]
    assert reason in summary.damaged[0].reason
    assert refresh(store).damaged == summary.damaged, "it is still known after the second look"
    path.write_bytes(blob)
    os.utime(path.parent)
    summary = refresh(store)
    assert (summary.added, summary.damaged) == (1, []), "a repaired file is good again"


def test_a_file_that_may_become_readable_is_read_again_though_its_folder_did_not_change(store, monkeypatch):
    newer, locked = cases.fill(store, 1)[0], cases.record(4)
    good = store.dump_path(newer).read_bytes()
    store.dump_path(newer).write_bytes(cases.with_record(good, b'"format_version":1', b'"format_version":9'))
    cases.publish(store, locked)
    really, path = headers.read_one, os.fspath(store.dump_path(locked))

    def refused(name, *place):
        if name == path:
            raise PermissionError(13, "Permission denied")
        return really(name, *place)  # type: ignore[arg-type]

    monkeypatch.setattr(headers, "read_one", refused)
    cases.settle(store)
    for _ in range(2):
        assert [(item.path, item.code) for item in refresh(store).damaged] == [
            (store.relative(store.dump_path(newer)), "newer-format"),
            (store.relative(store.dump_path(locked)), "store"),
        ]
    monkeypatch.undo()
    store.dump_path(newer).write_bytes(good)
    assert (refresh(store).dumps, refresh(store).damaged) == (2, [])


def test_a_damaged_file_that_goes_is_forgotten(store, monkeypatch):
    path = store.dump_path(cases.fill(store, 1)[0])
    path.write_bytes(b"junk")
    with monkeypatch.context() as patched:
        patched.setattr(os.path, "lexists", lambda _: False)  # as in a folder that may be listed, and not searched
        assert len(refresh(store).damaged) == 1
    path.unlink()
    assert refresh(store).damaged == []


def test_a_row_that_a_killed_refresh_wrote_after_the_file_went_does_not_stay(store):
    gone, stays = (store.dump_path(described) for described in cases.fill(store, 5)[::4])
    kept = gone.read_bytes()
    folder = store.relative(gone.parent)
    killed, ours = Dumps(store, folder), Dumps(store, folder)
    migrate.make_anew(store, lambda: None, rebuild=False)
    killed.look()
    gone.unlink()
    cases.settle(store)
    ours.look()
    gone.write_bytes(kept)  # as the other one had read it before
    killed.take_in(killed.changed, lambda count: None)
    gone.unlink()
    cases.settle(store)
    ours.take()
    assert rows_of(store) == [stays.name.removesuffix(SUFFIX)]


@pytest.mark.parametrize("name", ["a#b" + SUFFIX, f"a{SUFFIX}#b{SUFFIX}"])
def test_a_damaged_file_stays_noted_whatever_its_name(store, name):
    (described,) = cases.fill(store, 1)
    odd = store.dump_path(described).with_name(name)
    odd.write_bytes(b"junk")
    for _ in range(3):
        (damaged,) = refresh(store).damaged
        assert damaged.path == store.relative(odd)
        cases.settle(store)
    (store.dump_path(described).parent / "come").touch()  # the folder is listed again
    assert [damaged.path for damaged in refresh(store).damaged] == [store.relative(odd)]
    assert rows_of(store) == [described.dump_id]


def test_a_file_under_another_name_or_in_another_place_is_damaged_and_a_foreign_one_is_left_alone(store):
    path = store.dump_path(cases.fill(store, 1)[0])
    for foreign in (path.with_name(f".tmp-1-abc-x{SUFFIX}"), path.with_name("notes.txt"), store.dumps / "README"):
        foreign.write_bytes(b"half")
    for elsewhere in (path.with_name(f"renamed{SUFFIX}"), store.dumps / "other" / "rank0000" / path.name,
                      store.dumps / "ppo-1" / "spare" / path.name):  # fmt: skip
        elsewhere.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, elsewhere)
    summary = refresh(store)
    assert summary.dumps == 1
    assert len(summary.damaged) == 3
    assert all("belongs at" in item.reason and item.code == "store" for item in summary.damaged)


def make_replay(store, replay_id, records, **values):
    folder = cases.write_spec(store, cases.spec(replay_id, records, dtype="bf16"))
    ends = [cases.result(replay_id, r.dump_id, forward_s=0.5, **values) for r in records]
    cases.append(folder / "rank0.jsonl", {"event": "ready", "resolved": {"dtype": "fp32", "attn": "sdpa"}}, *ends)
    return folder


def test_results_and_what_the_workers_resolved_come_from_the_journals(store):
    records = cases.fill(store, 3)
    own = {"golden_count": 5, "golden_max_abs": 0.25, "rng_match": False}
    own |= {"tokens": 13, "output_digest": "ab" * 32, "extra": {"a": [1]}, "folded_ids": True}
    folder = make_replay(store, "r1", records, **own)
    summary = refresh(store)
    assert (summary.results, summary.replays) == (3, 1)
    replay = query.get_replay(store, "last")
    assert (replay.status, replay.inputs) == ("unfinished", 3)
    (settings,) = query.table_rows(store, Replay, "1")
    assert (settings.dtype, settings.attn, settings.backend) == ("fp32", "sdpa", "plain")
    assert (replay.config["dtype"], replay.resolved) == ("bf16", {"dtype": "fp32", "attn": "sdpa"})
    assert replay.passed == 3
    cases.append(folder / "supervisor.jsonl", {"event": "finished", "status": "complete", "finished_at": "2025-07-01T02"})
    refresh(store)
    replay = query.get_replay(store, "r")
    assert (replay.status, replay.finished_at) == ("complete", "2025-07-01T02")
    cases.append(folder / "supervisor.jsonl", {"event": "supervisor", "pid": 1})
    resumed = query.get_replay(store, "r")
    assert (resumed.status, resumed.finished_at, resumed.resolved) == ("unfinished", None, replay.resolved), "it continues"
    assert query.results_for(store, "r1")[0] == cases.result("r1", records[0].dump_id, forward_s=0.5, **own)


def test_a_growing_journal_is_read_on_and_a_cut_line_waits(store, monkeypatch):
    records = cases.fill(store, 3)
    folder = make_replay(store, "r1", records[:1])
    line = json.dumps({"event": "end", **cases.result("r1", records[1].dump_id).to_dict()}) + "\n"
    journal = folder / "rank0.jsonl"
    with journal.open("a") as file:
        file.write(line[:40])
    assert refresh(store).results == 1
    with journal.open("a") as file:
        file.write(line[40:])
    assert refresh(store).results == 1
    assert refresh(store).replays == 0, "nothing new: nothing is read"
    assert len(query.results_for(store, "r1")) == 2
    cases.append(journal, cases.result("r1", records[2].dump_id, finished_at="2026"))
    with journal.open("a") as file:
        file.write('{"event": "end", "dump\nnot json at all\n[1]\n{"event": "end"}\n')
    summary = refresh(store)
    assert (summary.results, summary.skipped_lines) == (1, 4)
    cases.append(journal, cases.result("r1", records[2].dump_id, "hung"), cases.result("r1", records[1].dump_id, attempt=2))
    refresh(store)
    assert [(one.status, one.attempt) for one in query.results_for(store, "r1")] == [("passed", 1), ("passed", 2), ("passed", 1)]
    before = contents(store)
    monkeypatch.setattr(journals, "MOST_BYTES", 2000)
    assert refresh(store, rebuild=True).replays == 1 and contents(store) == before, "read in pieces"
    assert read_results(folder) == {one.dump_id: one for one in query.results_for(store, "r1")}
    for error in ("shorter", "longer" * 50):
        journal.unlink()
        cases.append(journal, cases.result("r1", records[1].dump_id, "failed", error=error))
        refresh(store)
        assert [(r.dump_id, r.error) for r in query.results_for(store, "r1")] == [(records[1].dump_id, error)], "another file"


def test_the_last_result_of_a_dump_is_that_of_the_newest_replay_that_is_left(store):
    dump = cases.fill(store, 1)[0]
    make_replay(store, "r1", [dump], finished_at="2025-07-01T01")
    folder = cases.write_spec(store, cases.spec("r2", [dump]))
    cases.append(folder / "rank0.jsonl", cases.result("r2", dump.dump_id, "failed", error_class="ValueError", finished_at="2025-07-01T02"))  # fmt: skip
    row = query.get_dump(store, dump.dump_id)
    assert (row.status, row.error, row.replay) == ("failed", "ValueError", "r2")
    shutil.rmtree(folder)
    row = query.get_dump(store, dump.dump_id)
    assert (row.status, row.replay) == ("passed", "r1")
    store.dump_path(dump).unlink()
    assert refresh(store).removed == len(query.results_for(store, "r1")) == 1, "results outlive their dumps"
    cases.publish(store, dump)
    assert query.get_dump(store, dump.dump_id) == row, "it finds its result when it comes back"


def test_a_damaged_replay_is_a_warning(store):
    records = cases.fill(store, 1)
    folder = make_replay(store, "r1", records)
    make_replay(store, "r2", records)
    (folder / "spec.json").write_text("{")
    summary = refresh(store)
    assert [item.path for item in summary.damaged] == ["replays/r1"]
    assert [replay.replay_id for replay in query.list_replays(store)] == ["r2"]


def test_rows_and_schema_are_the_same_however_the_catalog_was_made(store):
    """Bar: `rm store/catalog.db && actordbg index` gives back every row. In memory from nothing, in memory anew, and in its file
    dump by dump; texts that are equal in all rows stand in the SQL.
    """
    odd = [
        {},
        {"host": "it's ?1 -- \N{SNOWMAN}"},
        {"host": "a\0b", "temperature": 0.1 + 0.2},
        {"model_name": "m" * 300, "step": 2**62},
    ]
    records = [cases.record(index, **odd[index // 3 % 4]) for index in range(12)]

    def whole():
        with sqlite3.connect(store.catalog_path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
            lines = [one for one in connection.iterdump() if not one.startswith(('INSERT INTO "caller"', 'INSERT INTO "dump"'))]
        dumps = cases.dump_rows(store, [*DUMP_COLUMNS, "last_result"])  # callers are numbered as they come
        return sorted(lines), dumps

    refresh(store)
    for described in records:
        cases.publish(store, described)
        refresh(store)
    make_replay(store, "r1", records[:9], golden_count=2)
    make_replay(store, "r2", records[5:], finished_at="2025-07-02T00")
    cases.publish(store, cases.record(12)).write_bytes(b"junk")
    refresh(store)
    for folder in store.dump_folders():
        os.utime(folder, (1, 1))
    refresh(store)
    in_place = whole()
    refresh(store, rebuild=True)
    anew = whole()
    for path in store.root.glob("catalog.db*"):
        path.unlink()
    refresh(store)
    assert whole() == anew == in_place and len(query.select_dumps(store)) == 12
    read = [headers.read_one(os.fspath(store.dump_path(one)), one.dump_id, one.run, one.rank) for one in records]
    bound = zip(*(headers.joined(read)[name] for name in DUMP_COLUMNS), strict=True)
    assert cases.dump_rows(store, list(DUMP_COLUMNS)) == sorted(bound)


def test_dumps_that_are_read_together_have_the_rows_that_each_has_alone(store, monkeypatch):
    """From memory and from a slow disk, which is told of the files before they are read; one odd file is found among the others."""
    spec = TensorSpec("int64", (2, 30), (33, 1), "uint24")
    odd = [
        {"tensors": {"sequences": spec, "output.log_probs": spec}},
        {"tensors": {"sequences": spec, "rng.cpu": spec}, "step": 2**62},
        {"source": "create", "arguments": {}, "versions": {}},
        {"actor": {"trainer": "trl", "adapter": "grpo", "function": "trl:f", "more": [[1]]}, "host": "a\0b \N{SNOWMAN}"},
        {"arguments": {"return_output": None, "return_entropy": True, "packed_seq_lens": [*range(900)]}, "temperature": 3},
    ]
    plain = [cases.record(index, rank=0, **odd[index] if index < len(odd) else {}) for index in range(30)]
    for described in plain:
        path = store.dump_path(described)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cases.header_frame(described.to_json().encode()) + b"payload")
    folder, names = f"{path.parent}/", [one.dump_id for one in plain]
    alone = headers.joined([headers.read_one(f"{folder}{name}{SUFFIX}", name, "ppo-1", 0) for name in names])
    assert alone["with_outputs"][:2] == alone["with_rng"][1::-1] == [True, False]
    told = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *which: told.append(which[2]))
    columns = headers.read_columns(folder, names, "ppo-1", 0)
    assert columns is not None and {name: list(values) for name, values in columns.items()} == alone
    assert len(told) == 30
    bad = store.dump_path(plain[17])
    good, elsewhere = bad.read_bytes(), bad.with_name("elsewhere")
    said = json.loads(plain[17].to_json())
    untrue = [
        cases.header_frame(json.dumps(said | {field: value}).encode()) + b"payload"
        for field, value in (("seq_len", 2**63), ("batch_size", -1), ("timestamp", "2025-06-19 05:26:08.430740Z"), ("host", 5),
                             ("step", 2**63), ("format_version", 2), ("run", "a/b"), ("timestamp", "2025-W25-4T05:26:08.430740Z"))
    ]  # fmt: skip
    for blob in (good[:100], good[:-7], good[:60] + b"x" + good[61:], cases.with_record(good, b'"rank":0', b'"rank":1'),
                 cases.with_record(good, b"2025-06-19", b"2025-06-99"), cases.with_record(good, b'"pid"', b'"pid\xc3\xa4"'),
                 cases.with_record(good, b'"host"', b'"extra":{"x":' + b"[" * 70 + b"]" * 70 + b'},"host"'), b"", *untrue):  # fmt: skip
        bad.write_bytes(blob)
        assert headers.read_columns(folder, names, "ppo-1", 0) is None
        if blob in untrue:
            with pytest.raises(StoreProblem):
                headers.read_one(os.fspath(bad), names[17], "ppo-1", 0)
    bad.rename(elsewhere)
    bad.symlink_to(elsewhere)
    assert headers.read_columns(folder, names, "ppo-1", 0) is None
    bad.unlink()
    bad.write_bytes(good[:100])
    summary = refresh(store)
    assert (summary.added, [item.path for item in summary.damaged]) == (29, [store.relative(bad)])


def test_an_index_anew_that_fails_leaves_the_catalog_and_one_that_waits_makes_no_second(store, monkeypatch):
    cases.fill(store, 4)
    refresh(store)

    def fails(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("actordbg.catalog.indexer._refresh_replays", fails)
    with pytest.raises(KeyboardInterrupt):
        refresh(store, rebuild=True)
    monkeypatch.undo()
    assert len(rows_of(store)) == 4
    with sqlite3.connect(store.catalog_path) as writer, monkeypatch.context() as patched:
        writer.execute("BEGIN IMMEDIATE")
        patched.setattr("actordbg.catalog.connections.BUSY_TIMEOUT_S", 0.05)
        with pytest.raises(CatalogProblem, match="locked"):
            refresh(store, rebuild=True)
    assert len(rows_of(store)) == 4
    assert migrate.make_anew(store, lambda: pytest.fail("made twice"), rebuild=False) is False


def test_what_a_killed_writer_left_in_a_rollback_journal_is_undone(store):
    """As on a network file system, or in the copy of a new catalog; a connection that can only read is refused there."""
    cases.fill(store, 4)
    refresh(store)
    path, journal = store.catalog_path, Path(f"{store.catalog_path}-journal")
    killed = connections.connect_writable(path)
    for one in ("PRAGMA journal_mode = DELETE", "PRAGMA synchronous = OFF", "BEGIN IMMEDIATE", "DELETE FROM dump"):
        killed.execute(one)
    left = journal.read_bytes()
    killed.close()
    journal.write_bytes(left)
    assert refresh(store).dumps == 4
    assert store.catalog_path == path and not journal.exists(), "it is still the store's own"


@pytest.mark.parametrize("junk", [b"this is not a database" * 500, b"SQLite format 3\0" + b"\xff" * 8000, None])
def test_a_damaged_catalog_is_an_error_with_the_remedy_and_rebuild_is_it(store, junk):
    """None: one that lacks a table."""
    cases.fill(store, 3)
    if junk is None:
        refresh(store)
        with sqlite3.connect(store.catalog_path) as connection:
            connection.execute("DROP TABLE damaged_file")
    else:
        store.catalog_path.write_bytes(junk)
    with pytest.raises(CatalogProblem) as caught:
        refresh(store)
    assert "index --rebuild" in caught.value.hint
    assert refresh(store, rebuild=True).dumps == 3


def _refresh_often(root, worker):
    import catalogcases

    store = Store(root)
    for turn in range(3):
        described = catalogcases.record(1000 + worker * 10 + turn)
        catalogcases.publish(store, described)
        refresh(store)
        assert query.get_dump(store, described.dump_id).dump_id == described.dump_id
        if turn == 1:
            store.dump_path(described).unlink()
    return os.getpid()


@pytest.mark.slow
def test_sixteen_processes_may_publish_and_refresh_at_once(store):
    cases.fill(store, 8)
    with ProcessPoolExecutor(16) as pool:
        pids = list(pool.map(_refresh_often, [str(store.root)] * 16, range(16)))
    assert len(pids) == 16
    refresh(store)
    assert rows_of(store) == sorted(path.name.removesuffix(SUFFIX) for path in store.iter_dumps())
    assert len(rows_of(store)) == 8 + 16 * 2
    with sqlite3.connect(store.catalog_path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
