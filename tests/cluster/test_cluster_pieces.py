"""What of the Ray engine needs no cluster: who fits where, how inputs are dealt, what is refused, and whose death it was."""

import importlib
import io
import json
import os
import signal
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from hypothesis import given, strategies as st
from roots import SUPPORT
from supervised import Bench, fake_launcher, make_spec, statuses

from actordbg.base.errors import EnvironmentProblem, LaunchProblem, StoreProblem, Unsupported, UsageError
from actordbg.campaign.runner import CellRunners
from actordbg.cli.replay_options import StopOptions
from actordbg.cluster import group_place, node_host, node_store, ray_engine
from actordbg.cluster.group_place import GroupPlace, RayRunning, starved_by
from actordbg.cluster.node_host import NodeHost, interface_of
from actordbg.cluster.node_store import DeskSide, NodeStore, StoreElsewhere
from actordbg.cluster.order import ClusterOrder, GroupShape, checkouts, runtime_env_of
from actordbg.cluster.ray_engine import OwnOutput, RayEngine, require_answer
from actordbg.config.choices import Facts, facts_elsewhere, gather_facts
from actordbg.config.replay_config import ReplayConfig
from actordbg.debug.replay_stops import StopOrder
from actordbg.formats.store_files import make_folder
from actordbg.records.journal import rank_journal, read_events
from actordbg.records.replay_record import ReplayInput
from actordbg.replay.group_engine import GroupEngine, Losses, engine_in_use
from actordbg.replay.launch import Launched, Loss
from actordbg.replay.plan import Dealer, dealt_slots
from actordbg.replay.rank_launcher import NodeShare, variables
from actordbg.replay.rank_view import RankView
from actordbg.replay.work_order import WorkOrder


def inputs_of(tokens):
    return [ReplayInput(f"d{n}", f"dumps/d{n}", 0, 1, count, count) for n, count in enumerate(tokens)]


@given(st.lists(st.integers(1, 9000), max_size=60), st.integers(1, 4), st.integers(1, 6), st.data())
def test_every_input_is_dealt_once_the_longest_first(tokens, lanes, groups, data):
    inputs = inputs_of(tokens)
    dealer, hands = Dealer(inputs, range(len(tokens)), lanes, groups), []
    lost = data.draw(st.integers(0, 5))
    while portion := dealer.deal():
        assert [tokens[one] for one in portion] == sorted((tokens[one] for one in portion), reverse=True)
        assert len(portion) % lanes == 0 or not dealer
        if lost:  # a group dies with the rest of its portion
            lost -= 1
            dealer.give_back(portion[1:])
            portion = portion[:1]
        hands += portion
    assert sorted(hands) == list(range(len(tokens)))
    inputs = inputs_of([10] * 40)  # a portion is half a fair share, and one group gets all
    assert len(Dealer(inputs, range(40), 1, 4).deal()) == 5
    assert len(Dealer(inputs, range(40), 1, 1).deal()) == 40
    assert dealt_slots([7, 3, 5], 2) == [(7, 3), (5, None)]


def test_a_group_fits_where_each_of_its_nodes_does():
    config = ReplayConfig(backend="fsdp2", nproc=16)
    shape = GroupShape.of(config, 8, gpu=True)
    assert shape.bundles == [{"CPU": 8.0, "GPU": 8.0}] * 2
    assert shape.words() == "2 nodes with 8 CPU and 8 GPU each"
    big = {"CPU": 64.0, "GPU": 16.0}
    assert shape.groups_on([big]) == 0  # its nodes are different ones
    assert shape.groups_on([big, big]) == 2
    assert shape.groups_on([big, {"CPU": 8.0, "GPU": 8.0}, {"CPU": 96.0}]) == 1
    assert GroupShape.of(config, 6, gpu=False).counts == (6, 6, 4)
    assert GroupShape.of(ReplayConfig(nproc=4), None, gpu=False).ranks == 1  # plain ranks are groups of their own


def test_ranks_of_a_second_node_have_the_variables_of_their_launcher():
    share = NodeShare(8, 8, node=1, nodes=2, address="10.0.0.1", port=29500)
    deepspeed = variables("deepspeed", 16, share, 2)
    assert (deepspeed["RANK"], deepspeed["LOCAL_RANK"], deepspeed["WORLD_SIZE"]) == ("10", "2", "16")
    assert (deepspeed["LOCAL_SIZE"], deepspeed["CROSS_RANK"], deepspeed["CROSS_SIZE"]) == ("8", "1", "2")
    assert deepspeed["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def test_a_runtime_environment_is_a_file_variables_and_checkouts(tmp_path):
    file = tmp_path / "env.yaml"
    file.write_text("env_vars: {A: 1, B: 2}\npip: [einops]\n")
    found = runtime_env_of(ClusterOrder(runtime_env=("FI_PROVIDER=efa", str(file), "B=x=y")))
    assert found["env_vars"] == {"A": "1", "B": "x=y", "FI_PROVIDER": "efa"} and found["pip"] == ["einops"]
    assert found["py_modules"] == checkouts(("actordbg", "openrlhf"))
    assert checkouts(("json", "zstandard", "no_such_package")) == [str(Path(json.__file__).resolve().parent)]
    for wrong in ("no-such-file", str(tmp_path)):
        with pytest.raises(UsageError, match="--runtime-env"):
            runtime_env_of(ClusterOrder(runtime_env=(wrong,)))
    for twice, said in ((("A=1", "A=2"), "gives A more than once"), ((str(file), str(file)), "gives a second file")):
        with pytest.raises(UsageError, match=said):
            runtime_env_of(ClusterOrder(runtime_env=twice))
    written = tmp_path / "env.json"
    written.write_text('{\n\t"env_vars": {"A": "\\ud83d\\ude00"}}')
    assert runtime_env_of(ClusterOrder(runtime_env=(str(written),)))["env_vars"] == {"A": "\U0001f600"}
    file.write_text("[1, 2]")
    with pytest.raises(UsageError, match="is not a runtime environment"):
        runtime_env_of(ClusterOrder(runtime_env=(str(file),)))


def test_a_host_tells_what_its_ranks_wrote_once_and_in_order_and_a_new_host_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "node"))
    monkeypatch.setattr(node_store, "MOST_AT_ONCE", 100)
    elsewhere = StoreElsewhere(f"memory://{tmp_path.name}", tmp_path / "desk")
    folder = tmp_path / "desk" / "replays" / "r"
    make_folder(folder)
    (folder / "spec.json").write_text(make_spec(1).to_json())

    def begin(attempt):
        work = folder / f"work-0-{attempt}.json"
        work.write_text(WorkOrder(attempt, [0], [[0]]).to_json())
        side, node = DeskSide(elsewhere, 1), NodeStore(elsewhere.url)
        return side, node, node.take(side.parcel(work, [0], 0)).parent

    def tell(side, node, here):
        """One turn; what the command has of the whole files then."""
        side.take(0, node.news(here, [0], here / "launcher.log", last=False))
        return sorted(path.name for path in folder.glob("tensors/*"))

    side, node, here = begin(1)
    (here / "rank0.log").write_bytes(b"first")
    (here / "rank0.jsonl").write_bytes(b'{"event":"end"}\n{"event":"sta')
    make_folder(here / "tensors")
    for name in ("d0", "d1"):
        (here / "tensors" / name).write_bytes(bytes(100))
    assert len(tell(side, node, here)) == 1 and not (folder / "rank0.jsonl").exists(), "results wait for what was kept of them"
    assert len(tell(side, node, here)) == 2 and (folder / "rank0.jsonl").read_bytes() == b'{"event":"end"}\n'
    tell(side, node, here)
    assert not list(here.glob("tensors/*")) and (folder / "rank0.log").read_bytes() == b"first"
    node.remove()  # with a line that was cut, and lost
    side, node, here = begin(2)
    with (here / "rank0.log").open("ab") as file:
        assert file.tell() == 5, "a place in a log means the same on both sides"
        file.write(b" second")
    (here / "rank0.jsonl").write_bytes(b'{"event":"boot"}\n')
    tell(side, node, here)
    tell(side, node, here)
    assert (folder / "rank0.jsonl").read_bytes() == b'{"event":"end"}\n{"event":"boot"}\n'
    assert (folder / "rank0.log").read_bytes() == b"first second"
    with pytest.raises(StoreProblem, match="outside of the store"):
        side.take(0, {"../x": b""})


def test_losses_are_counted_over_the_whole_replay():
    losses = Losses(2, "--max-failures")
    losses.count("node a died", dead_nodes=frozenset("a"))
    losses.count("node a died, which had another group", dead_nodes=frozenset("a"))
    losses.count("node b died")
    with pytest.raises(LaunchProblem, match=r"lost 3 times, and --max-failures 2 .* node c died") as stopped:
        losses.count("node c died")
    assert stopped.value.exit_code == 4
    with pytest.raises(LaunchProblem, match="at most 0 are allowed") as here:
        Losses(0).count("rank 1 died")
    assert "--max-failures" not in f"{here.value} {here.value.hint}", "where nothing sets the limit no option is named"
    endless = Losses(-1)
    for _ in range(9):
        endless.count("again")
    assert endless.pause_s == 30.0


def test_who_is_blamed_where_a_node_ran_out_of_memory():
    """By the message of Ray 2.55; it took the memory from the host of ranks 0 and 1."""
    node = "ec82368a9b7ac73d8480cb53e0af4a6e5d80368d1d3a8d824aea777b"
    said = (
        f"1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.7, ID: {node}) was "
        "4.78GB / 23.54GB "
        "(0.203092), which exceeds the memory usage threshold of 0.199733; Ray killed 1 worker(s) based on the killing policy: "
        "[(Actor(8c): "
        "pid=77, actual memory used=0.05GB)]; Top 10 memory users: PID\tMEM(GB)\tCOMMAND, 13\t2.00\tpython -m a, 5, 9\t, "
        "11\t0.90\tb, 10\t0.4\tc, "
        "Refer to the documentation"
    )
    starved = starved_by(said)
    assert (starved.node, starved.held[13], starved.held[11], starved.held[10]) == (node, 2.0, 0.9, 0.4)

    def there_is(number, where, busy):
        return RankView(number, identity=(10 + number, 1), node=where, doing={"slot": 0} if busy else None)

    def culprits(*ranks):
        there = [there_is(number, where[:8], busy) for number, (where, busy) in enumerate(ranks)]
        return [view.rank for view in starved.culprits(there, (0, 1))]

    here, busy = (node, True), True
    assert culprits(here, here) == [1]  # it held more than rank 0
    assert culprits((node, busy), (node, not busy)) == [0]  # the only one in an input
    assert culprits(here, here, (node, not busy), here) == [3]  # of another group, and more than twice as much
    assert culprits(here, here, here, ("another", busy)) == [1]  # rank 3 is elsewhere
    assert culprits((node, not busy), (node, not busy), here, here) == [1]  # whoever only starts is not a victim of an input
    assert starved_by("new words").culprits([there_is(0, "", True), there_is(1, "", True)], (0, 1))[1:]

    for slot, in_one in ((0, True), (1, False)):
        view = RankView(3, doing={"slot": 1})
        view.take({"event": "end", "slot": slot})
        assert bool(view.doing) == in_one, "an input before, whose file was lost, ends no other"

    assert starved.why == (
        "node ec82368a (10.0.0.7) ran out of memory (4.78GB / 23.54GB), and Ray's memory monitor ended a host there"
    )


def test_the_desk_goes_by_the_nodes_facts():
    there = Facts(cuda=True, gpus=64, flash_attn=True)
    with facts_elsewhere(there):
        assert gather_facts() is there
        assert gather_facts(cuda=False, gpus=0).gpus == 0  # a worker says what it sees
    assert gather_facts() is not there


def test_rays_threads_cannot_print_into_an_answer():
    stream = io.StringIO()
    own = OwnOutput(stream)
    own.write("an answer")
    thread = threading.Thread(target=lambda: own.write("(raylet) is dead"), name="ray_listen_error_messages")
    thread.start()
    thread.join()
    assert stream.getvalue() == "an answer" and own.getvalue() == "an answer"


def test_the_interface_of_an_address_is_found():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.77") is None


def test_a_port_that_is_not_rays_is_told_from_ray_at_once():
    """Ray itself knocks for minutes at a dashboard's port."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(LaunchProblem, match="something other than Ray listens there"):
            require_answer(f"127.0.0.1:{server.server_port}")


@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_a_cluster_that_cannot_be_joined_may_ask_for_a_token(monkeypatch, mode):
    def refuses(**_):
        raise ConnectionError("Failed to connect to Ray cluster")  # all that Ray's Python says of a token that it did not send

    monkeypatch.setattr("ray.init", refuses)
    monkeypatch.setattr(ray_engine, "require_answer", lambda address: None)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    with pytest.raises(LaunchProblem, match="cannot join a Ray cluster at 10") as told:
        ray_engine.join_cluster("10.0.0.7:6379", "a test")
    assert ("set RAY_AUTH_MODE=token" in told.value.hint) == (mode == "disabled")


def test_rays_own_variable_asks_for_a_post_mortem_on_a_cluster_only(monkeypatch):
    monkeypatch.setenv("RAY_DEBUG_POST_MORTEM", "1")
    there = StopOptions().on("ray", several_nodes=False, yes=True)
    assert (there.break_at, there.debugpy) == ("error", 0)
    assert StopOptions().on("local", several_nodes=False) == StopOptions()
    assert StopOptions().on("ray", several_nodes=False, apart=True, yes=True).debugpy == 0, "an editor needs no folder"
    monkeypatch.delenv("RAY_DEBUG_POST_MORTEM")
    with pytest.raises(Unsupported, match="breakpoint prompts need a shared store folder"):
        StopOptions(break_at="before").on("ray", several_nodes=False, apart=True)


def test_a_node_without_debugpy_is_named_before_its_ranks_start(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    order = tmp_path / "work-0-1.json"
    order.write_text(WorkOrder(1, [0], [[0]], stops=StopOrder(debugpy=0)).to_json())
    with pytest.raises(EnvironmentProblem, match=r"node a1 \(10.0.0.2\) has no debugpy"):
        NodeHost().start({}, NodeShare(0, 1), str(order), ["worker"], node="a1", address="10.0.0.2")


def test_cells_side_by_side_keep_to_their_engines_and_tell_in_the_callers_thread():
    runners = CellRunners([GroupEngine(), GroupEngine()])
    met, told, seen = threading.Barrier(2), [], set()

    def work(job):
        seen.add(id(engine_in_use()))
        if job < 2:
            met.wait(60)  # only if both run at the same time
        runners.tell(lambda: told.append((job, threading.current_thread() is threading.main_thread())))

    runners.run(range(6), work)
    assert sorted(told) == [(job, True) for job in range(6)] and len(seen) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interruption_or_an_error_stops_the_other_cells(error):
    runners, begun, stopped = CellRunners([GroupEngine(), GroupEngine()]), threading.Event(), threading.Event()

    def work(job):
        if job == 0 and error is ValueError:
            begun.wait(60)
            raise ValueError("a fault")
        if not begun.is_set() and error is KeyboardInterrupt:
            runners.tell(interrupt)
        begun.set()
        try:
            while True:
                runners.tick()
                time.sleep(0.01)
        except KeyboardInterrupt:
            stopped.set()
            raise

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(error):
        runners.run(range(4), work)
    assert stopped.is_set()


@pytest.mark.parametrize("lost", ["before", "by the question"])
def test_ranks_of_a_lost_place_have_ended_before_others_get_what_they_had(tmp_path, monkeypatch, lost):
    """They look for their host four times a second, and may write a result until they find it gone."""
    monkeypatch.setattr(group_place, "FENCE_S", 0.2)

    def lose(references):
        place.lost, place.lost_at = "its node died", time.monotonic()

    place = MagicMock(
        shape=GroupShape((1,), False), starved=None, lost="", lost_at=0.0, side=None, answers=MagicMock(side_effect=lose)
    )
    place.nodes, place.hosts = [{"node": "a", "address": "127.0.0.1", "port": 1}], [MagicMock()]
    running = RayRunning(place, ReplayConfig(), range(1), tmp_path / "replay" / "work-1.json", "worker")
    if lost == "before":
        lose(None)
    running.end()
    assert running.ended() and running.lost == Loss("its node died", place.dead_nodes)
    assert place.answers.called == (lost != "before")


def test_places_that_wait_are_released_before_those_whose_room_they_would_get():
    """Ray lost a CPU for good: it was preparing a place that was released meanwhile."""
    engine, released = (
        RayEngine(SimpleNamespace(exceptions=SimpleNamespace(RayError=RuntimeError)), ClusterOrder(), "replay r"),
        [],
    )
    for number, holds in enumerate((True, False, True)):
        release = partial(released.append, number)
        engine._places[range(number, number + 1)] = SimpleNamespace(holds_nodes=holds, release=release)
    engine.close()
    assert released == [1, 0, 2] and not engine._places


@pytest.mark.parametrize("state, limit, lost", [("PENDING", -1, False), ("CREATED", 900, False), ("CREATED", -1, True)])
def test_a_place_waits_for_room_without_a_limit_and_for_its_hosts_with_one(monkeypatch, state, limit, lost):
    monkeypatch.setattr(group_place, "START_S", limit)
    groups = importlib.import_module("ray.util.placement_group")  # `ray.util` has a function of that name
    monkeypatch.setattr(groups, "placement_group_table", lambda group: {"state": state})
    place = MagicMock(_reserved_at=0.0)
    assert GroupPlace.is_reserved(place) == (state == "CREATED") and place._lose.called == lost


@pytest.fixture(autouse=True)
def fake_worker_is_importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)


class Dying(Launched):
    """A group whose machine is about to be known as dead: its worker is gone already. `seen`: how often its life was asked
    for."""

    seen = 0

    @property
    def lost(self):
        return Loss("its node died") if self.seen > 1 else None

    def stands(self):
        self.seen += 1
        return False


@pytest.mark.parametrize("action", ["kill", "hang"])
def test_what_ran_on_a_dying_node_is_blamed_on_no_input(store, action):
    spec = make_spec(4, timeout_s=1.0)
    bench = Bench(store)
    folder = store.replays / spec.replay_id
    start_fake = fake_launcher(bench.sessions)

    def start(config, group, work):
        launched = start_fake(config, group, work)
        return launched if len(bench.sessions) > 1 else Dying(**vars(launched))

    def mend(event):
        if len(bench.sessions) == 1 and (folder / "ran-d1-0-True").exists():
            (folder / "script.json").write_text("{}")

    outcome = bench.run(spec, {"d1": action}, launcher=start, on_event=mend)
    assert statuses(outcome) == {f"d{n}": "passed" for n in range(4)}
    assert len(bench.sessions) == 2
    assert "its node died" in json.dumps(read_events(folder / "supervisor.jsonl"))


def host_of_a_hanging_rank(tmp_path):
    """A host whose only rank hangs in its first input, and the rank's journal."""
    spec, folder = make_spec(1), tmp_path / "store" / "replays" / "r"
    make_folder(folder)
    order = WorkOrder(1, [0], [[0]])
    for name, text in {"spec.json": spec.to_json(), "script.json": '{"d0": "hang"}', "work-0-1.json": order.to_json()}.items():
        (folder / name).write_text(text)
    host, journal = NodeHost(), rank_journal(folder, 0)
    host.start(
        spec.config.to_dict(), NodeShare(0, 1), str(folder / "work-0-1.json"), ["fake_worker"], node="a", address="127.0.0.1"
    )
    while not any(event["event"] == "start" for event in read_events(journal)):
        assert host.wait(longest_s=0.1) is None
    return host, journal


@pytest.mark.parametrize("raylet, told", [("lives", 1), ("died", 0)])
def test_a_host_tells_of_a_dead_rank_only_while_its_raylet_lives(tmp_path, monkeypatch, raylet, told):
    monkeypatch.setattr(node_host, "SETTLE_S", 0.0)
    host, journal = host_of_a_hanging_rank(tmp_path)
    os.kill(read_events(journal)[0]["pid"], signal.SIGKILL)
    if raylet == "died":
        monkeypatch.setattr(os, "getppid", lambda: 1)
    assert host.wait() == -signal.SIGKILL
    gone = [event for event in read_events(journal) if event["event"] == "gone"]
    assert len(gone) == told and all(event["wait_status"] == 9 for event in gone)


def test_a_host_does_not_tell_again_of_a_rank_that_was_written_down_as_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(node_host, "SETTLE_S", 0.0)
    host, journal = host_of_a_hanging_rank(tmp_path)
    starved = RankView(0, journal.parent)
    list(starved.poll())
    starved.write_gone(9, why="its node ran out of memory")
    assert host.wait(longest_s=0.3) is None
    assert [event["why"] for event in read_events(journal) if event["event"] == "gone"] == ["its node ran out of memory"]
    host.end()
