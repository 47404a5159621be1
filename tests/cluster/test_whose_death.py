"""Whose death it was: Ray ends a host of ranks with its node, and the host takes its ranks with it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from roots import SUPPORT
from supervised import Bench, make_spec, statuses

from actordbg.base.processes import start_ticks
from actordbg.cluster import node_host
from actordbg.cluster.node_host import NodeHost
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.store_files import make_folder
from actordbg.records.journal import rank_journal, read_events
from actordbg.replay.launch import Group, Launched, launch
from actordbg.replay.rank_launcher import NodeShare
from actordbg.replay.rank_view import RankView
from actordbg.replay.work_order import WorkOrder
from actordbg.replay.worker_logs import status_by_launcher
from actordbg.store.layout import Store


@pytest.fixture(autouse=True)
def fake_worker_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)


class Dying(Launched):
    """A group whose machine is about to be known as dead: its worker is gone already. `seen`: how often its life was asked for."""

    seen = 0

    @property
    def lost(self) -> str:
        return "its node died" if self.seen > 1 else ""

    def stands(self) -> bool:
        self.seen += 1
        return False


@pytest.mark.parametrize("action", ["kill", "hang"])
def test_what_ran_on_a_dying_node_is_blamed_on_no_input(store: Store, action: str) -> None:
    spec = make_spec(4, timeout_s=1.0)
    bench = Bench(store)
    folder = store.replays / spec.replay_id
    started: list[Launched] = []

    def start(config: ReplayConfig, group: Group, work: Path) -> Launched:
        launched = launch(config, group, work, "fake_worker")
        if not started:
            launched = Dying(**vars(launched))
        started.append(launched)
        return launched

    def mend(event: object) -> None:
        if len(started) == 1 and (folder / "ran-d1-0-True").exists():
            (folder / "script.json").write_text("{}")

    outcome = bench.run(spec, {"d1": action}, launcher=start, on_event=mend)
    assert statuses(outcome) == {f"d{n}": "passed" for n in range(4)}
    assert len(started) == 2
    assert "its node died" in json.dumps(read_events(folder / "supervisor.jsonl"))


def host_of_a_hanging_rank(tmp_path: Path) -> tuple[NodeHost, Path]:
    """A host whose only rank hangs in its first input, and the rank's journal."""
    spec, folder = make_spec(1), tmp_path / "store" / "replays" / "r"
    make_folder(folder)
    order = WorkOrder(1, [0], [[0]], (os.getpid(), start_ticks(os.getpid())))
    for name, text in {"spec.json": spec.to_json(), "script.json": '{"d0": "hang"}', "work-0-1.json": order.to_json()}.items():
        (folder / name).write_text(text)
    host, journal = NodeHost(), rank_journal(folder, 0)
    host.start(spec.config.to_dict(), NodeShare(0, 1), str(folder / "work-0-1.json"), "fake_worker", [], "a", "127.0.0.1")
    while not any(event["event"] == "start" for event in read_events(journal)):
        assert host.wait(longest_s=0.1) is None
    return host, journal


@pytest.mark.parametrize(("raylet", "told"), [("lives", 1), ("died", 0)])
def test_a_host_tells_of_a_dead_rank_only_while_its_raylet_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raylet: str, told: int
) -> None:
    monkeypatch.setattr(node_host, "SETTLE_S", 0.0)
    host, journal = host_of_a_hanging_rank(tmp_path)
    os.kill(read_events(journal)[0]["pid"], signal.SIGKILL)
    if raylet == "died":
        monkeypatch.setattr(os, "getppid", lambda: 1)
    assert host.wait() == -signal.SIGKILL
    gone = [event for event in read_events(journal) if event["event"] == "gone"]
    assert len(gone) == told and all(event["wait_status"] == 9 for event in gone)


def test_a_host_does_not_tell_again_of_a_rank_that_was_written_down_as_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_host, "SETTLE_S", 0.0)
    host, journal = host_of_a_hanging_rank(tmp_path)
    starved = RankView.of_peer(journal.parent, 0)
    list(starved.poll())
    starved.write_gone(9, why="its node ran out of memory")
    assert host.wait(longest_s=0.3) is None
    assert [event["why"] for event in read_events(journal) if event["event"] == "gone"] == ["its node ran out of memory"]
    host.end()


def test_a_rank_that_its_launcher_reaped_first_ended_as_the_launcher_says(tmp_path: Path) -> None:
    log = tmp_path / "launcher.log"
    log.write_text("rank 0 (pid 71) exits with return code = -9\nrank 1 (pid 7) exits with return code = 3\n")
    assert (status_by_launcher(log, 71), status_by_launcher(log, 7), status_by_launcher(log, 1)) == (9, 3 << 8, None)
