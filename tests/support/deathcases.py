"""What tests of processes that die share: their switch, their counters, their dumps, and what has to hold of their books."""

import contextlib
import subprocess
import tempfile
from pathlib import Path

import pytest
from roots import MEMORY, run_program
from victims import is_of_seed

from actordbg.capture.control import Control
from actordbg.capture.switch_file import write_control
from actordbg.dumps.recover import find_rings, recover
from actordbg.records.run_files import read_counters
from actordbg.store import payload

SINCE = "2026-11-20T12:00:00.000000Z"


def switch(store, **limits):
    write_control(store, Control(True, "r", SINCE, free_floor_bytes=0, **limits))


def counters(store):
    """Counters by pid: a victim has one actor."""
    return {data["pid"]: data for data in map(read_counters, store.counters.rglob("[!.]*.json"))}


def recovered(store, **options):
    reports = list(recover(store, find_rings(store), **options))
    assert [report.problem for report in reports] == [None] * len(reports)
    return reports


def by_pid(store):
    """Every dump of a store, loaded, in order of its calls."""
    found = {}
    for path in store.iter_dumps():
        dump = payload.load(path)
        found.setdefault(dump.record.pid or 0, []).append(dump)
    return {pid: sorted(dumps, key=lambda d: d.record.call_index or 0) for pid, dumps in found.items()}


def closed(data):
    return int(data["captured"] + sum(data["dropped"].values()) + sum(data["sampled_out"].values()))


def assert_exact(data, job):
    """The books of a dead process hold, and they count the calls that it made: see `victims`."""
    if data is None:  # it died before it counted its first call
        assert job.entered == 0 and job.started <= 1
        return
    assert data["pending"] == 0 and data["calls"] == closed(data)
    assert job.entered <= data["calls"] <= job.started <= job.entered + 1


def assert_nothing_is_lost(store, jobs, every=1):
    """After kills: what was acknowledged is there, and what is recovered makes dumps and books exact; the books by pid."""
    before, found = counters(store), by_pid(store)
    for pid, job in jobs.items():
        numbers = {dump.record.call_index for dump in found.get(pid, [])}
        assert job.acked <= numbers and len(numbers) >= before.get(pid, {"captured": 0})["captured"]
    recovered(store)
    assert not find_rings(store)
    books, found = counters(store), by_pid(store)
    for pid, job in jobs.items():
        data, mine = books.get(pid), found.get(pid, [])
        assert_exact(data, job)
        assert all(is_of_seed(dump, job.seed + (dump.record.call_index or 0)) for dump in mine)
        wanted = [dump for dump in mine if (dump.record.call_index or 0) % every == 0]
        captured, full = (data["captured"], data["dropped"].get("queue_full", 0)) if data else (0, 0)
        # of calls that found the queue full (a writer process takes its time to start), the last are in the ring all the same
        assert captured <= len(wanted) <= captured + full, data
    return books


@pytest.fixture
def folder():
    """A folder in memory, where there is such a thing: thousands of small files are flushed here."""
    with tempfile.TemporaryDirectory(prefix="actordbg-deaths-", dir=MEMORY, ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextlib.contextmanager
def mounted(folder, options):
    """A tmpfs of its own on `folder`; the test is skipped where that is not allowed."""
    folder.mkdir(exist_ok=True)
    tried = run_program(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)])
    if tried.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {tried.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
