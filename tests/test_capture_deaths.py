"""What survives each kind of death: dumps that were acknowledged, the input in flight, and exact books."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from victims import Job, Victims, is_of_seed

from actordbg import payload
from actordbg.capture.control import Control, write_control
from actordbg.capture.ledger import read_counters
from actordbg.recover import RingReport, find_rings, recover
from actordbg.store import Store

SINCE = "2026-11-20T12:00:00.000000Z"
MEMORY = Path("/dev/shm")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, where there is such a thing: thousands of small files are flushed here."""
    found = Path(tempfile.mkdtemp(prefix="actordbg-deaths-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
    yield found
    shutil.rmtree(found, ignore_errors=True)


@pytest.fixture
def quick_store(folder: Path) -> Store:
    return Store(folder / "store").create()


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    with Victims(tmp_path_factory.mktemp("victims")) as server:
        yield server


def switch(store: Store, **limits: Any) -> None:
    write_control(store, Control(True, "r", SINCE, free_floor_bytes=0, **limits))


def counters(store: Store) -> dict[int, dict[str, Any]]:
    """Counters by pid: a victim has one actor."""
    return {data["pid"]: data for data in map(read_counters, store.counters.rglob("[!.]*.json"))}


def recovered(store: Store, **options: Any) -> list[RingReport]:
    reports = list(recover(store, find_rings(store), **options))
    assert [report.problem for report in reports] == [None] * len(reports)
    return reports


def by_pid(store: Store) -> dict[int, list[payload.Dump]]:
    """Every dump of a store, loaded, in order of its calls."""
    found: dict[int, list[payload.Dump]] = {}
    for path in store.iter_dumps():
        dump = payload.load(path)
        found.setdefault(dump.record.pid or 0, []).append(dump)
    return {pid: sorted(dumps, key=lambda d: d.record.call_index or 0) for pid, dumps in found.items()}


def closed(data: dict[str, Any]) -> int:
    return int(data["captured"] + sum(data["dropped"].values()) + sum(data["sampled_out"].values()))


def assert_exact(data: dict[str, Any] | None, job: Job) -> None:
    """The books of a dead process hold, and they count the calls that it made: see `victims`."""
    if data is None:  # it died before it counted its first call
        assert job.entered == 0 and job.started <= 1
        return
    assert data["pending"] == 0 and data["calls"] == closed(data)
    assert job.entered <= data["calls"] <= job.started <= job.entered + 1


def in_flight(dumps: list[payload.Dump]) -> list[payload.Dump]:
    return [dump for dump in dumps if dump.record.recovered == "in_flight"]


def die(victims: Victims, jobs: list[Job]) -> dict[int, Job]:
    """Run victims that die by themselves, some at a time."""
    pids: dict[int, Job] = {}
    for job in jobs:
        pids[victims.start(job)] = job
    for pid in pids:
        victims.wait(pid)
    return pids


@pytest.mark.slow
def test_five_hundred_kills_at_random_moments_lose_nothing_that_was_acknowledged(victims: Victims, folder: Path):
    dice, killed, dumps, acked = random.Random(20261120), 0, 0, 0
    for wave in range(50):
        store = Store(folder / f"wave{wave}").create()
        every = 3 if wave % 5 == 4 else 1
        switch(store, every=every)
        jobs = {}
        for n in range(10):
            job = Job("calls", str(store.root), pause=dice.choice((0.0005, 0.002)), seed=1000 * n, publish_seconds=0.02)
            jobs[victims.start(job)] = job
        lives = sorted((dice.uniform(0, 0.25), pid) for pid in jobs)
        begin = time.monotonic()
        for life, pid in lives:
            time.sleep(max(0.0, begin + life - time.monotonic()))
            os.kill(pid, signal.SIGKILL)
        for pid in jobs:
            assert victims.wait(pid) == -signal.SIGKILL
            killed += 1
        before = counters(store)
        found = by_pid(store)
        for pid, job in jobs.items():
            numbers = {dump.record.call_index for dump in found.get(pid, [])}
            assert job.acked <= numbers
            assert len(numbers) >= before.get(pid, {"captured": 0})["captured"]
            acked += len(job.acked)
        if wave == 0:
            from actordbg.cli.app import app

            result = CliRunner().invoke(app, ["--store", str(store.root), "dump", "recover", "--json"])
            assert result.exit_code == 0, result.output
            assert not any(ring["problem"] for ring in json.loads(result.stdout)["rings"])
        else:
            recovered(store)
        assert not find_rings(store)
        books, found = counters(store), by_pid(store)
        for pid, job in jobs.items():
            data = books.get(pid)
            assert_exact(data, job)
            mine = found.get(pid, [])
            assert all(is_of_seed(dump, job.seed + (dump.record.call_index or 0)) for dump in mine)
            wanted = [dump for dump in mine if (dump.record.call_index or 0) % every == 0]
            assert len(wanted) == (data["captured"] if data else 0)
            dumps += len(mine)
        shutil.rmtree(store.root)
    print(f"{killed} killed, {acked} acknowledged, {dumps} dumps read")
