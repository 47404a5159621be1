"""The catalog: indexing against unpickling, a refresh with nothing new, and `--where` over a million rows.

Everything is CPU time of the process, but the cold row, which is about waiting. What is compared: making a catalog
from nothing out of N dump files (headers read, rows in SQLite, schema included)
against `pickle.load` of as many pickles of the old kind with the same tensors. Warm: all files in the page cache, the best of
several runs in turn, so it is work against work. Cold: the page cache is told to forget the files first (posix_fadvise), as on
the first look at a run; it is a request, which tmpfs ignores.

Stores, pickles and catalogs are made once in a process, and measured by `bench_growth` too.

    python -m benchmarks.bench_index [N]        N dumps, 1025 unless said otherwise
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import re
import sqlite3
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, time

import torch

from actordbg.catalog import connections as engine, migrate
from actordbg.catalog.indexer import IndexSummary, refresh
from actordbg.catalog.query import ORDERS, Catalog, select_dumps
from actordbg.catalog.tables import to_micros
from actordbg.formats.dump_record import MAGIC, DumpRecord, format_timestamp, make_dump_id
from actordbg.store import payload
from actordbg.store.layout import Store
from benchmarks.rows import Row

START = datetime(2025, 6, 19, 5, 26, 8, tzinfo=timezone.utc)
MANY = 100_000
"""As many files are many: the goal is another one."""
_WARM = "CPU time, in the page cache"
PICKLES = 256
"""As many different pickles are made; time per pickle does not depend on their number."""
ROLES = ("policy", "reference")
CONDITIONS = (
    "seq_len>4096 and rank=0", "seq_len>4096", "rank=3", "rank=0 and seq_len>1800", "step=777", "rank=1 and step=777",
    "tokens>4052", "timestamp>'2025-06-19 15:40' and rank=1", "status='failed' and seq_len>1500", "role='policy'",
)  # fmt: skip


PLANS = ("", f"INDEXED BY {ORDERS['time'][0]}")
"""SQLite's own plan, and the one that reads dumps in their order. The quicker one counts."""


def run(scale: int = 1025, rows: int = 1_000_000, many: int = MANY) -> list[Row]:
    """Rows for `scale` dumps, for `many` (none with 0), and a catalog of `rows` synthetic rows."""
    store, pickles = store_of(scale), pickles_of(min(scale, PICKLES))
    found = [_index_row(store, pickles, scale, cold) for cold in (False, True)]
    found += [_rebuild_row(store, pickles, scale), _refresh_row(store, scale)]
    if many:
        store, pickles = store_of(many), pickles_of(min(many, PICKLES))
        found += [_index_row(store, pickles, many, cold=False), _rebuild_row(store, pickles, many)]
    return found + _where_rows(catalog_of(rows), rows)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where everything that is measured lies until this process ends."""
    return tempfile.TemporaryDirectory(prefix="actordbg-bench-")


@functools.cache
def store_of(count: int) -> Store:
    """A store of so many dumps, made at the first call."""
    return make_store(Path(_folder().name) / f"store-{count}", count)


@functools.cache
def pickles_of(count: int) -> list[Path]:
    """So many pickles, made at the first call."""
    folder = Path(_folder().name) / f"pickles-{count}"
    folder.mkdir()
    return make_pickles(folder, count)


@functools.cache
def catalog_of(rows: int) -> Store:
    """A store with a catalog of so many synthetic rows and no dump, made at the first call."""
    store = Store(Path(_folder().name) / f"catalog-{rows}").create()
    fill_synthetic(store, rows)
    return store


def make_store(root: Path, count: int) -> Store:
    """A store of `count` dumps of 4 ranks, with real records; payloads are all the same bytes."""
    store = Store(root).create()
    tensors = _tensors()
    finished, blob = payload.encode(_record(0), tensors)
    frame = blob[8 + int.from_bytes(blob[4:8], "little") :]
    for index in range(count):
        record = replace(_record(index), tensors=finished.tensors, payload_sha256=finished.payload_sha256)
        line = record.to_json().encode()
        header = b"%b\n%08x" % (line, zlib.crc32(line))
        path = store.dump_path(record)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(MAGIC + len(header).to_bytes(4, "little") + header + frame)
    past = time() - 60
    for folder in store.dump_folders():
        os.utime(folder, (past, past))
    return store


def make_pickles(folder: Path, count: int) -> list[Path]:
    """Pickles as the old script wrote them: a dict of tensors and plain values."""
    paths = [folder / f"{index}.pkl" for index in range(count)]
    for path in paths:
        values = _tensors() | {"return_output": True, "timestamp": "20250619_052608_430740", "rank": 0, "batch_size": 4}
        path.write_bytes(pickle.dumps(values, protocol=4))
    return paths


def _record(index: int) -> DumpRecord:
    moment = format_timestamp(START + timedelta(milliseconds=37 * index))
    rank = index % 4
    return DumpRecord(
        dump_id=make_dump_id(moment, index, 4711 + rank, f"{index * 7919 % 2**32:08x}"),
        run="ppo", rank=rank, timestamp=moment, batch_size=4, seq_len=1861, tokens=7000 - index % 97, world_size=4,
        local_rank=rank, host="node-17", pid=4711 + rank, call_index=index, monotonic_ns=10**15 + index, action_len=930,
        role="policy", step=index // 8, training=True, grad_enabled=True, packing_samples=True, temperature=1.0,
        model_name="meta-llama/Llama-3.1-8B", model_dtype="bfloat16", arguments={"return_output": True, "packed_seq_lens": None},
        versions={"openrlhf": "0.11.2", "torch": "2.13.0", "transformers": "5.15.0", "deepspeed": "0.19.6"},
    )  # fmt: skip


def _tensors() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 128_256, (4, 1861))
    return {"sequences": ids, "attention_mask": torch.ones_like(ids), "action_mask": torch.ones(4, 930).bool()}


def _index_row(store: Store, pickles: list[Path], scale: int, cold: bool) -> Row:
    dumps = list(store.iter_dumps())

    def index() -> None:
        _forget_catalog(store)
        _drop_from_cache(dumps if cold else [])
        ours.append(_timed(lambda: refresh(store), clock) / scale)
        _drop_from_cache(pickles if cold else [])
        theirs.append(_timed(lambda: [_unpickle(path) for path in pickles], clock) / len(pickles))

    ours: list[float] = []
    theirs: list[float] = []
    clock = perf_counter if cold else process_time
    refresh(store)
    for _ in range(3):
        index()
    state, how = ("cold", "by the clock, page cache dropped first") if cold else ("warm", _WARM)
    name = f"index {scale:,} dumps end to end, {state}: unpickling / ours"
    return _against_pickles(name, scale, ours, theirs, how)


def _rebuild_row(store: Store, pickles: list[Path], scale: int) -> Row:
    ours = [_timed(lambda: refresh(store, rebuild=True)) / scale for _ in range(3)]
    theirs = [_timed(lambda: [_unpickle(path) for path in pickles]) / len(pickles) for _ in range(3)]
    return _against_pickles(f"index --rebuild, {scale:,} dumps: unpickling / ours", scale, ours, theirs, _WARM)


def _against_pickles(name: str, scale: int, ours: list[float], theirs: list[float], how: str) -> Row:
    """The best of several runs of both; what they scatter by is said."""
    best, other, target = min(ours), min(theirs), 15 if scale < MANY else 35
    worst = f"the slowest +{max(ours) / best - 1:.0%}, of pickles +{max(theirs) / other - 1:.0%}"
    note = f"4 x 1,861, 4 ranks; {how}, best of {len(ours)} ({worst})"
    return Row(
        name,
        best * 1e6,
        other * 1e6,
        "us per dump",
        ratio=other / best,
        budget=f">= {target}",
        note=note,
        within=other / best >= target,
    )


def _refresh_row(store: Store, scale: int) -> Row:
    refresh(store)
    seconds = median(_timed(lambda: refresh(store)) for _ in range(9))
    return Row(
        name=f"refresh with nothing new, {scale:,} dumps", ours=seconds * 1e3, theirs=None, unit="ms", ratio=seconds,
        budget="< 0.1 s", note="ratio is seconds; CPU time, median of 9", within=seconds < 0.1,
    )  # fmt: skip


def _where_rows(store: Store, rows: int) -> list[Row]:
    catalog = Catalog(store, IndexSummary())
    times, bare = {}, {}
    with contextlib.closing(sqlite3.connect(store.catalog_path)) as connection:
        for text in CONDITIONS:
            ours = functools.partial(select_dumps, catalog, text, limit=20)
            plans = [functools.partial(_by_sqlite, connection, text, plan) for plan in PLANS]
            assert all({row.dump_id for row in ours()} == {row[0] for row in plan()} for plan in plans), text
            taken = [[_timed(call) for call in (ours, *plans)] for _ in range(7)]
            times[text], *theirs = map(median, zip(*taken, strict=True))
            bare[text] = min(theirs)
    worst = max(times, key=lambda text: times[text] / bare[text])  # the slowest may be one that bare sqlite3 scans for
    ratio = times[worst] / bare[worst]
    size, most = store.catalog_path.stat().st_size / 1e6, 250 * rows / 1e6
    said = "against a prepared query on an open connection; parsing and rows included; CPU time, median of 7"
    note = f"median {median(times.values()) * 1e3:.2f} ms, slowest {max(times.values()) * 1e3:.2f}; worst {worst}; {said}"
    return [
        Row(f"--where over {rows:,} rows, 20 out, / bare sqlite3: worst of {len(times)}", times[worst] * 1e3,
            bare[worst] * 1e3, "ms", ratio=ratio, budget="<= 1.3", note=note, within=ratio <= 1.3),
        Row(f"catalog of {rows:,} rows", size, None, "MB",
            ratio=size, budget=f"<= {most:g} MB", note="ratio is megabytes", within=size <= most),
    ]  # fmt: skip


def _by_sqlite(connection: sqlite3.Connection, condition: str, plan: str) -> list[tuple[object, ...]]:
    """The first 20 dumps that a condition selects, by a statement that SQLite keeps prepared, with one of PLANS."""
    for text, place in re.findall(r"('(\d{4}-[^']+)')", condition):
        condition = condition.replace(text, str(to_micros(format_timestamp(datetime.fromisoformat(f"{place}+00:00")))))
    for name, table in {"rank": "c", "role": "c", "status": "r", "tokens": "d"}.items():
        condition = re.sub(rf"\b{name}\b", f"{table}.{name}", condition)
    sql = (
        f"SELECT d.*, c.*, r.status FROM dump AS d {plan} JOIN caller AS c ON c.id = d.caller "
        "LEFT JOIN result AS r ON r.id = d.last_result "
        f"WHERE {condition} ORDER BY d.timestamp, d.dump_id LIMIT 20"
    )
    return connection.execute(sql).fetchall()


def fill_synthetic(store: Store, rows: int) -> None:
    """Rows straight into a new catalog, made as an index makes it: 4 ranks, lengths 128 to 2027, twenty over 4096, a result for
    every hundredth."""

    def fill() -> None:
        with engine.plain_transaction(store.catalog_path) as connection:
            _synthetic_rows(connection, rows)

    migrate.make_anew(store, fill, rebuild=False)
    with engine.writing(store.catalog_path) as writer:
        writer.count_for_planner()


def _synthetic_rows(connection: sqlite3.Connection, rows: int) -> None:
    connection.execute("INSERT INTO replay (replay_id, created_at, status, inputs) VALUES ('p', '2025', 'complete', 1)")
    connection.executemany(
        "INSERT INTO caller (id, run, rank, source, point, role, host, training, replayable, with_outputs, with_rng, pinned) "
        "VALUES (?, 'r', ?, 'capture', 'forward', ?, 'node-1', ?, 1, 0, 0, 0)",
        [(_caller(*which), which[0], ROLES[which[1]], which[2]) for which in product(range(4), range(2), range(2))],
    )
    connection.executemany(
        "INSERT INTO dump (dump_id, timestamp, batch_size, seq_len, tokens, padding, caller, step, call_index, bytes) "
        "VALUES (?, ?, 2, ?, ?, ?, ?, ?, ?, 12000)",
        (_synthetic(number, rows) for number in range(rows)),
    )
    _synthetic_results(connection)


def _synthetic(number: int, rows: int) -> tuple[object, ...]:
    moment = format_timestamp(START + timedelta(milliseconds=37 * number))
    seq_len = 5000 + number % 7 if number % max(rows // 20, 1) == 0 else 128 + number * 37 % 1900
    dump_id = make_dump_id(moment, number, 4711, f"{number * 7919 % 2**32:08x}")
    short = min(seq_len, 2027)
    caller = _caller(number % 4, int(number % 3 == 0), number % 2)
    return dump_id, to_micros(moment), seq_len, 2 * short - number % 97, number % 97, caller, number // 8, number


def _caller(rank: int, role: int, training: int) -> int:
    return 4 * rank + 2 * role + training + 1


def _synthetic_results(connection: sqlite3.Connection) -> None:
    connection.execute(
        "INSERT INTO result (replay_id, dump_id, status, attempt, worker, slot, started_at, finished_at, forward_s) "
        "SELECT 'p', dump_id, CASE WHEN call_index % 20000 = 0 THEN 'failed' ELSE 'passed' END, 1, 0, 0, '2025', '2025', 0.1 "
        "FROM dump WHERE call_index % 100 = 0"
    )
    connection.execute(
        "UPDATE dump SET last_result = (SELECT id FROM result WHERE result.dump_id = dump.dump_id) WHERE call_index % 100 = 0"
    )


def _forget_catalog(store: Store) -> None:
    for path in store.root.glob("catalog.db*"):
        path.unlink()


def _drop_from_cache(paths: list[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _unpickle(path: Path) -> object:
    with path.open("rb") as file:
        return pickle.load(file)


def _timed(call: Callable[[], object], clock: Callable[[], float] = process_time) -> float:
    start = clock()
    call()
    return clock() - start


if __name__ == "__main__":
    for row in run(int(sys.argv[1]) if len(sys.argv) > 1 else 1025):
        print(f"{row.name}: {row.ratio:.3g} (budget {row.budget}); ours {row.ours:.4g} {row.unit}, {row.theirs}; {row.note}")
