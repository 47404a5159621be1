"""What survives each kind of death: dumps that were acknowledged, the input in flight, and exact books."""

import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from amounts import amount, first_or_all
from commandline import invoke
from deathcases import assert_exact, assert_nothing_is_lost, by_pid, counters, folder, mounted, recovered, switch
from victims import Job, Victims, is_of_seed, wait_for

from actordbg.capture.control import WRITERS
from actordbg.dumps.recover import find_rings, recover
from actordbg.formats.ringfile import BOOKS, DATA, KINDS_AT, SLOT, SLOT_SIZE, SLOTS, SLOTS_AT
from actordbg.store import payload
from actordbg.store.layout import Store

__all__ = ["folder"]
pytestmark = pytest.mark.slow


@pytest.fixture
def quick_store(folder):
    return Store(folder / "store").create()


@pytest.fixture(scope="module")
def victims(tmp_path_factory):
    with Victims(tmp_path_factory.mktemp("victims")) as server:
        yield server


@pytest.fixture(params=first_or_all(WRITERS))
def writer(request):
    """Returns who writes: the process; in `make whole` the thread too."""
    return str(request.param)


def in_flight(dumps):
    return [dump for dump in dumps if dump.record.recovered == "in_flight"]


def die(victims, jobs):
    """Run victims that die by themselves, some at a time."""
    pids = {}
    for job in jobs:
        pids[victims.start(job)] = job
    for pid in pids:
        victims.wait(pid)
    return pids


def writers_of(pids):
    """The writer processes that these processes started and that run still."""
    wanted, found = {str(pid).encode() for pid in pids}, []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            found += [path] * (any(b"writer_process" in word for word in words) and not wanted.isdisjoint(words))
    return found


@pytest.mark.parametrize("writer", WRITERS)
def test_kills_at_random_moments_lose_nothing_that_was_acknowledged_and_leave_no_writer(victims, folder, writer):
    """Twenty, and three with a writer process; in `make whole` five hundred of each."""
    dice, (size, waves) = random.Random(20261120), (10, amount(2, 50)) if writer == "thread" else (3, amount(1, 168))
    for wave in range(waves):
        store = Store(folder / f"wave{wave}").create()
        every = 3 if wave % 3 == 2 else 1
        switch(store, every=every, writer=writer)
        jobs = {}
        for n in range(size):
            job = Job("calls", str(store.root), pause=dice.choice((0.0005, 0.002)), seed=1000 * n, publish_seconds=0.02)
            jobs[victims.start(job)] = job
        if writer == "process":  # it takes its time to start
            wait_for(lambda jobs=jobs: all(len(job.acked) > 3 for job in jobs.values()))
        lives = sorted((dice.uniform(0, 0.25), pid) for pid in jobs)
        begin = time.monotonic()
        for life, pid in lives:
            time.sleep(max(0.0, begin + life - time.monotonic()))
            os.kill(pid, signal.SIGKILL)
        for pid in jobs:
            assert victims.wait(pid) == -signal.SIGKILL
        wait_for(lambda jobs=jobs: not writers_of(jobs))
        if wave == 0:
            result = invoke(store, "dump recover --json")
            assert result.exit_code == 0, result.output
            assert not any(ring["problem"] for ring in json.loads(result.stdout)["rings"])
        books = assert_nothing_is_lost(store, jobs, every)
        assert writer == "thread" or (books.keys() == jobs.keys() and all("process" in data["writer"] for data in books.values()))
        assert not list(store.root.rglob(".tmp-*"))
        shutil.rmtree(store.root)


# What records the call in flight: every call, one in five, only triggered ones, and what waits for its outputs.
SWITCHES = {
    "every call": {},
    "one in five": {"every": 5},
    "armed": {"every": 0, "triggers": ("nan", "exception")},
    "with outputs": {"with_outputs": True, "with_rng": True},
}


@pytest.mark.parametrize("limits", SWITCHES.values(), ids=SWITCHES)
def test_every_input_in_flight_survives_a_kill_and_a_segfault(victims, quick_store, writer, limits):
    """Thirty-six of thirty-six; in `make whole` a hundred with each writer."""
    switch(quick_store, writer=writer, **limits)
    calls = range(0, 25, amount(3, 1))
    ways = itertools.cycle(("kill", "segv", "segfault"))
    pids = die(victims, [Job("dies_inside", str(quick_store.root), calls=n % 21, way=next(ways)) for n in calls])
    reports = recovered(quick_store)
    assert len(reports) == len(calls) and all(report.removed for report in reports)
    found, books = by_pid(quick_store), counters(quick_store)
    for pid, job in pids.items():
        (last,) = in_flight(found[pid])
        assert last.record.call_index == job.calls and is_of_seed(last, job.calls)
        assert last.record.pinned
        assert all(is_of_seed(dump, dump.record.call_index or 0) for dump in found[pid])
        assert job.started == job.entered == books[pid]["calls"] == job.calls + 1
        assert_exact(books[pid], job)


@pytest.mark.parametrize(
    "body, way, code, mark",
    [
        ("dies_inside", "_exit", 7, "in_flight"),
        ("dies_inside", "term", -signal.SIGTERM, "in_flight"),
        ("dies_inside", "raise", 1, "in_flight"),
        ("dies_after", "raise", 1, "recent"),
        ("dies_after", "kill", -signal.SIGKILL, "recent"),
        ("dies_after", "sys.exit", 0, None),
        ("calls", "", 0, None),
    ],
)
def test_what_is_left_after_each_kind_of_end(victims, quick_store, body, way, code, mark, writer):
    switch(quick_store, writer=writer)
    job = Job(body, str(quick_store.root), calls=5 if mark or way else 6, way=way)
    pid = victims.start(job)
    assert victims.wait(pid) == code
    assert len(find_rings(quick_store)) == (mark is not None)
    recovered(quick_store)
    assert not find_rings(quick_store)
    dumps = by_pid(quick_store)[pid]
    assert [dump.record.call_index for dump in dumps] == list(range(6))
    assert all(is_of_seed(dump, n) for n, dump in enumerate(dumps))
    assert dumps[-1].record.recovered == mark and len(in_flight(dumps)) == (mark == "in_flight")
    data = counters(quick_store)[pid]
    assert data["captured"] == data["calls"] == 6
    assert_exact(data, job)
    if way == "raise" and mark == "in_flight":
        assert dumps[-1].record.trigger_facts["error"] == "RuntimeError"


def test_a_hang_is_looked_into_while_it_lasts(victims, quick_store):
    switch(quick_store, every=0, triggers=("nan",))
    job = Job("hangs", str(quick_store.root), calls=4)
    pid = victims.start(job)
    wait_for(lambda: job.entered == 5)
    (ring,) = find_rings(quick_store)
    for _ in range(2):  # looking twice gives the same
        (report,) = recovered(quick_store, live=True)
        assert report.alive and not report.removed and ring.exists()
        (last,) = in_flight(by_pid(quick_store)[pid])
        assert is_of_seed(last, 4) and len(report.dumps) == 5
    (quick_store.root / "go").touch()
    assert victims.wait(pid) == 0
    assert job.entered == 8 and not find_rings(quick_store)
    assert counters(quick_store)[pid]["sampled_out"] == {"armed": 8}


def test_a_live_process_that_goes_on_never_gives_a_wrong_input(victims, quick_store):
    switch(quick_store, every=0, triggers=("nan",))
    job = Job("calls", str(quick_store.root))
    pid = victims.start(job)
    wait_for(lambda: job.entered > 20)
    for _ in range(15):
        recovered(quick_store, live=True)
    os.kill(pid, signal.SIGKILL)
    victims.wait(pid)
    recovered(quick_store)
    dumps = by_pid(quick_store)[pid]
    assert len(dumps) > 8
    assert all(is_of_seed(dump, dump.record.call_index or 0) for dump in dumps)
    assert_exact(counters(quick_store)[pid], job)


def test_a_stuck_disk_loses_neither_the_last_calls_nor_the_one_in_flight(victims, quick_store):
    switch(quick_store)
    job = Job("stuck", str(quick_store.root), calls=2200)
    pid = victims.start(job)
    wait_for(lambda: job.entered == 2201)
    (ring,) = find_rings(quick_store)
    backed = ring.stat().st_blocks * 512
    os.kill(pid, signal.SIGKILL)
    victims.wait(pid)
    recovered(quick_store)
    dumps, data = by_pid(quick_store)[pid], counters(quick_store)[pid]
    numbers = [dump.record.call_index for dump in dumps]
    (last,) = in_flight(dumps)
    assert last.record.call_index == 2200 and set(range(2192, 2201)) <= set(numbers)
    assert all(is_of_seed(dump, dump.record.call_index or 0) for dump in dumps)
    assert data["captured"] > 500 and data["dropped"]["queue_full"] > 1000
    assert backed < 16 * 2**20
    assert_exact(data, job)


def planted(folder, store, rings):
    """A copy of a store with copies of rings in it."""
    shutil.copytree(store.root, folder)
    (folder / "rings").mkdir()
    for ring in rings:
        with open(ring, "rb") as file:  # a ring is a sparse file of hundreds of megabytes
            (folder / "rings" / ring.name).write_bytes(file.read(DATA + 2**20))
    return Store(folder)


def result(store):
    """What a recovery comes to: dumps with their marks and tensors, and books."""
    dumps = {
        dump.record.dump_id: (dump.record.recovered, dump.record.payload_sha256)
        for mine in by_pid(store).values()
        for dump in mine
    }
    books = {pid: {k: d[k] for k in ("calls", "captured", "dropped", "state")} for pid, d in counters(store).items()}
    return {"dumps": dumps, "books": books, "rings": list((store.root / "rings").glob("*"))}


@pytest.fixture
def dead(victims, folder):
    """A store with the rings of three processes that were killed inside of forward."""
    store = Store(folder / "dead").create()
    switch(store)
    pids = die(victims, [Job("dies_inside", str(store.root), calls=12 + n) for n in range(3)])
    return store, find_rings(store), pids


def test_two_recoveries_at_once_come_to_what_one_comes_to(victims, folder, dead):
    store, rings, pids = dead
    once = planted(folder / "once", store, rings)
    recovered(once)
    wanted = result(once)
    assert len(wanted["dumps"]) == sum(job.calls + 1 for job in pids.values()) and not wanted["rings"]
    for trial in range(5):
        copy = planted(folder / f"twice{trial}", store, rings)
        pids = [victims.start(Job("recovers", str(copy.root))) for _ in range(2)]
        assert [victims.wait(pid) for pid in pids] == [0, 0]
        assert result(copy) == wanted


def test_damaged_rings_are_problems_and_never_wrong_inputs(folder, dead):
    store, rings, _ = dead
    copy, dice = planted(folder / "damaged", store, rings[:1]), random.Random(6)
    whole = (copy.root / "rings" / rings[0].name).read_bytes()
    target = copy.root / "rings" / rings[0].name
    slots = [place for place in range(SLOTS) if whole[SLOTS_AT + place * SLOT_SIZE]]
    extents = [SLOT.unpack_from(whole, SLOTS_AT + place * SLOT_SIZE)[5:10:4] for place in slots]
    kinds = len(whole[KINDS_AT:DATA].rstrip(b"\0"))

    def spot(n):
        """A byte of the header, the books, a slot, the kinds, or the numbers of a call, in turn."""
        offset, count = dice.choice(extents)
        slot = SLOTS_AT + dice.choice(slots) * SLOT_SIZE
        return (
            dice.randrange(400), BOOKS + dice.randrange(300), slot + dice.randrange(SLOT.size), KINDS_AT + dice.randrange(kinds),
            offset + dice.randrange(8 * count),
        )[n % 5]  # fmt: skip

    problems = read = 0
    count = amount(60, 400)
    for n in range(count):
        damaged = bytearray(whole)
        if n % 10 == 9:
            del damaged[dice.randrange(len(damaged)) :]
        for _ in range(dice.choice((1, 1, 3))):
            place = spot(n)
            if place < len(damaged):
                damaged[place] ^= 1 << dice.randrange(8)
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(damaged)
        (report,) = recover(copy, [target])
        problems += report.problem is not None
        assert target.exists() == (report.problem is not None)
        for dump in report.dumps:
            loaded = payload.load(copy.root / dump.path)
            assert is_of_seed(loaded, loaded.record.call_index or 0)
            read += 1
        for path in copy.iter_dumps():
            path.unlink()
        target.unlink(missing_ok=True)
    print(f"{problems} of {count} damaged rings are problems, {read} whole inputs came out of them")
    assert problems > 0.6 * count and read > 2 * count


@pytest.mark.parametrize("options, named_by", [("size=300k", "environment"), ("size=8m,ro", "switch")])
def test_a_ring_in_a_full_or_a_read_only_folder_costs_a_warning(victims, quick_store, tmp_path, options, named_by):
    rings, log = tmp_path / "rings", tmp_path / "log"
    with mounted(rings, options):
        switch(quick_store, **({"ring_dir": str(rings)} if named_by == "switch" else {}))
        named = {"ACTORDBG_RING_DIR": str(rings)} if named_by == "environment" else {}
        job = Job("calls", str(quick_store.root), log=str(log), calls=40, environment=named)
        pid = victims.start(job)
        assert victims.wait(pid) == 0
        data = counters(quick_store)[pid]
        assert data["captured"] == data["calls"] == 40
        assert all(is_of_seed(dump, n) for n, dump in enumerate(by_pid(quick_store)[pid]))
        warnings = [line for line in log.read_text().splitlines() if line.startswith("actordbg:")]
        assert len(warnings) == 1 and "no ring in" in warnings[0]
        assert not [path for path in rings.rglob("*") if path.is_file()]


def test_rings_leave_a_quarter_of_the_shared_memory_to_others(victims, quick_store, tmp_path):
    with mounted(tmp_path / "small", "size=16m"):
        switch(quick_store, every=0, triggers=("nan",), ring_dir=str(tmp_path / "small"))
        jobs = {}
        for _ in range(3):  # one after another: two that look at the same moment may both take what is there
            job = Job("large", str(quick_store.root), calls=9)
            jobs[victims.start(job)] = job
            wait_for(lambda job=job: job.entered == 10)
        space = os.statvfs(tmp_path / "small")
        assert space.f_bavail >= space.f_blocks // 4
        for pid in jobs:
            os.kill(pid, signal.SIGKILL)
            victims.wait(pid)
        recovered(quick_store)
        for mine in by_pid(quick_store).values():
            (last,) = in_flight(mine)
            assert last.record.call_index == 9
