"""Replays on a Ray cluster of several raylets, with scripted workers: who runs what, who is blamed, and what a death costs."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import brokenactor
import pytest
import ray
import stopcases
import torch
from clustercases import Machines, SharedCluster, fake_on, on_cluster, paused, scripted
from editorcases import Editor
from replaycases import publish
from roots import ROOT, run_program
from safetensors.torch import load_file
from supervised import Bench, make_spec, statuses

from actordbg.base.errors import EnvironmentProblem, StoreProblem, Unsupported
from actordbg.cluster.node_store import StoreElsewhere
from actordbg.cluster.order import ClusterOrder
from actordbg.cluster.ray_engine import RayEngine, require_same_versions
from actordbg.debug import meeting
from actordbg.debug.meeting import Relay, socket_of
from actordbg.debug.replay_stops import StopOrder
from actordbg.measure.watched import OfRay
from actordbg.measure.watching import rounds
from actordbg.records.journal import read_events
from actordbg.records.replay_record import ReplaySpec, warm_up_of
from actordbg.replay.group_engine import using
from actordbg.store.layout import Store
from actordbg.store.staging import Mirror

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    return Machines(tmp_path_factory.mktemp("machines"))


@pytest.fixture(scope="module")
def shared_cluster(machines):
    shared = SharedCluster(machines)
    yield shared
    shared.close()


@pytest.fixture
def cluster(shared_cluster):
    return shared_cluster.whole()


@pytest.fixture
def longest_s():
    """Nothing here takes a minute; a replay that waits for a place would wait for ever."""
    return 240.0


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def ends(folder):
    """How many results of each input stand in the workers' journals."""
    events = (event for path in folder.glob("rank*.jsonl") for event in read_events(path))
    return Counter(event["dump_id"] for event in events if event["event"] == "end")


def attempts(folder):
    """The attempts of a replay's groups, with the nodes where each ran."""
    return [event for event in read_events(folder / "supervisor.jsonl") if event["event"] == "attempt"]


def command(store, typed):
    return [sys.executable, "-m", "actordbg", "--store", str(store), *typed.split()]


def on_ray(cluster, template):
    """The options of a replay on the cluster, whose nodes fork their workers."""
    return f"--engine ray --address {cluster.address} --runtime-env TEMPLATE_OF_WORKERS={template}"


def test_inputs_are_shared_out_and_a_crash_costs_its_input(cluster, store):
    spec = make_spec(12)
    odd = {"d0": "unreadable", "d1": "unreadable", "d2": "unreadable", "d5": "fail"}  # the first three are a portion
    outcome = scripted(store, spec, odd | {"d3": "kill", "takes": 0.05}, cluster)
    assert statuses(outcome) == {f"d{n}": "passed" for n in range(12)} | dict.fromkeys(odd, "failed") | {"d3": "crashed"}
    assert "SIGKILL" in outcome.results["d3"].error
    assert {one.worker for one in outcome.results.values()} == {0, 1}
    assert set(ends(outcome.folder).values()) == {1}
    nodes = {tuple(attempt["nodes"]) for attempt in attempts(outcome.folder)}
    assert len(nodes) == 2  # each group has its node, and a crash moves none
    firsts = warm_up_of(outcome.results.values())[0]
    ran = {}  # by process: of each input that it ran, whether that is its warm-up
    pid = 0
    for rank in (0, 1):
        for event in read_events(outcome.folder / f"rank{rank}.jsonl"):
            pid = event["pid"] if event["event"] == "boot" else pid
            if event["event"] == "end" and event["status"] == "passed":
                ran.setdefault(pid, []).append(event["dump_id"] in firsts)
    assert all(inputs == [True] + [False] * (len(inputs) - 1) for inputs in ran.values()), ran


def test_the_memory_of_actors_is_read_on_their_own_nodes(cluster, monkeypatch):
    @ray.remote(num_cpus=1, scheduling_strategy="SPREAD")
    class Holder:
        def place(self):
            return ray.get_runtime_context().get_node_id(), os.getpid()

    holders = [Holder.remote() for _ in range(2)]
    places = ray.get([holder.place.remote() for holder in holders])
    actors = [SimpleNamespace(node_id=node, pid=pid, class_name="Holder") for node, pid in places]
    monkeypatch.setattr(OfRay, "_list_actors", lambda self: actors)  # no dashboard runs here
    found = [one for samples in rounds(OfRay(cluster.address), 0.2, 3.0) for one in samples]
    assert {one.pid for one in found} == {pid for _, pid in places}
    assert len({one.node for one in found}) == len({node for node, _ in places})
    assert all(one.name == "Holder" and one.rss > one.uss > 0 for one in found)


def test_a_group_over_two_nodes_meets_and_the_rank_that_dies_is_blamed(cluster, store, monkeypatch):
    """Also one that hangs, and one whose node runs out of memory; Ray kills its host and says so: no failure is left to be counted.

    The nodes are full of another configuration's groups before: their places make room.
    """
    monkeypatch.setattr(ray, "get", _as_the_memory_monitor_says)
    spec = make_spec(6, backend="fsdp2", nproc=2, timeout_s=4.0)
    order = ClusterOrder(cluster.address, per_node=1, max_failures=0)
    script = {"collective": True, "d3@1": "kill", "d1@1": "kill-host", "d4@1": "hang"}
    with on_cluster(order, "two in turn") as engine, using(engine):
        assert Bench(store).run(make_spec(2, nproc=2), {}, launcher=fake_on(engine)).all_passed
        outcome = Bench(store).run(spec, script, launcher=fake_on(engine))
    assert statuses(outcome) == {f"d{n}": "passed" for n in range(6)} | {"d1": "crashed", "d3": "crashed", "d4": "hung"}
    assert "rank 0 waits in barrier" in outcome.results["d4"].error
    starved = outcome.results["d1"]
    assert (starved.worker, starved.signature) == (1, "node-out-of-memory")
    assert "ran out of memory (22.4GB / 23.5GB)" in starved.error
    assert "rank 1" in outcome.results["d3"].error and "SIGKILL" in outcome.results["d3"].error
    boots = [event for rank in (0, 1) for event in read_events(outcome.folder / f"rank{rank}.jsonl") if event["event"] == "boot"]
    assert len({event["node"] for event in boots}) == 2


def _as_the_memory_monitor_says(references, *, timeout=None, get=ray.get):
    """A host that was killed, as Ray reports it where its memory monitor did that (2.55)."""
    try:
        return get(references, timeout=timeout)
    except ray.exceptions.ActorDiedError as error:
        host = next(one for one in ray._private.state.actors().values() if one["ActorID"] == error.actor_id)
        address, node = host["Address"]["IPAddress"], host["Address"]["NodeID"]
        said = f"Memory on the node (IP: {address}, ID: {node}) was 22.4GB / 23.5GB (0.953), which exceeds the memory usage threshold"
        raise ray.exceptions.OutOfMemoryError(said) from None


def test_a_node_with_other_versions_is_named_and_its_death_is_one_failure_however_many_groups_it_had(cluster, store, tmp_path):
    other = tmp_path / "transformers-9.9.9.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 9.9.9\n")
    path = os.pathsep.join((str(tmp_path), os.environ["PYTHONPATH"]))
    victim, told = cluster.add_node(num_cpus=2, env_vars={"PYTHONPATH": path}), []
    cluster.wait_for_nodes()
    with pytest.raises(Unsupported, match=r"transformers 9\.9\.9 \(here ") as refused:
        require_same_versions(ray)
    assert refused.value.message.count("  node ") == 1 and refused.value.exit_code == 3
    spec = make_spec(16)
    folder = store.replays / spec.replay_id

    def groups_on_victim():
        return {tuple(attempt["ranks"]) for attempt in attempts(folder) if victim.node_id in attempt["nodes"]}

    def kill(event):
        told.append(event.text)
        if victim in cluster.worker_nodes and len(groups_on_victim()) == 2 and len(list(folder.glob("ran-*"))) > 5:
            cluster.remove_node(victim, allow_graceful=False)

    order = ClusterOrder(cluster.address, max_failures=1)
    outcome = scripted(store, spec, {"takes": 1.0}, cluster, order, on_event=kill)
    assert len(groups_on_victim()) == 2 and sum("is lost" in text for text in told) >= 2, told
    assert outcome.all_passed and set(ends(folder).values()) == {1}, "an input ran to its end twice"
    assert {dump: result.output_digest for dump, result in outcome.results.items()} == {f"d{n}": f"d{n}" for n in range(16)}


KILLED = """
import json, sys
from clustercases import *
from actordbg.cluster.node_store import StoreElsewhere
from actordbg.records.replay_record import ReplaySpec
from actordbg.store.layout import Store
from actordbg.store.staging import Mirror, Pusher
class Cluster: address = sys.argv[2]
store, spec, url = Store(sys.argv[1]), ReplaySpec.from_json(sys.argv[3]), sys.argv[4]
if url:
    Pusher(Mirror(url, store.root), print, 0.05)
order = ClusterOrder(Cluster.address, store=StoreElsewhere(url, store.root) if url else None)
scripted(store, spec, json.loads(sys.argv[5]), Cluster, order)
"""


def kill_in_the_middle(cluster, store, spec, folder, environment, script, url=""):
    """Kill a command after four results lie in this folder of its replay."""
    words = [sys.executable, "-c", KILLED, str(store.root), cluster.address, spec.to_json(), url, json.dumps(script)]
    killed = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE)
    try:
        while len(ends(folder)) < 4 and killed.poll() is None:
            time.sleep(0.1)
    finally:
        killed.kill()
        killed.wait()
    done = len(ends(folder))
    assert 4 <= done < len(spec.inputs), killed.stderr.read().decode() if killed.stderr else ""


def test_where_nothing_is_shared_a_killed_command_and_a_dead_node_cost_what_was_running(cluster, machines):
    """The first command is killed, one on another machine continues, and a node dies under it. What is read is in the bucket."""
    spec, url = make_spec(24, timeout_s=600.0), f"{machines.url}/killed"
    there = machines.folder / "bucket" / "killed" / "replays" / spec.replay_id
    first, second = (Store(machines.folder / name) for name in ("desk-first", "desk-second"))
    hangs = {"d4": "hang", "d8": "hang"}  # one in the first portion of either group
    kill_in_the_middle(cluster, first, spec, there, machines.desk("first"), hangs, url)
    mirror, told, dead = Mirror(url, second.root), [], []
    mirror.pull()

    def kill(event):
        told.append(event.text)
        if event.kind == "result" and not dead:
            last = attempts(second.replays / spec.replay_id)[-1]
            dead.extend(node for node in cluster.worker_nodes if node.node_id == last["nodes"][0])
            cluster.remove_node(dead[0], allow_graceful=False)

    order = ClusterOrder(cluster.address, groups=1, store=StoreElsewhere(url, second.root))
    script = {"takes": 0.1, "d23": "kill"}
    outcome = scripted(second, ReplaySpec.from_file(there / "spec.json"), script, cluster, order, on_event=kill)
    mirror.push()
    cluster.add_node(num_cpus=1, env_vars=machines.environment("node-2", "desk-"))
    cluster.wait_for_nodes()
    assert any("is lost" in text for text in told), told
    assert statuses(outcome) == {f"d{n}": "passed" for n in range(24)} | {"d23": "crashed"}
    assert set(ends(there).values()) == {1} and len(ends(there)) == 23
    assert len({node for attempt in attempts(there) for node in attempt["nodes"]}) == 2


def test_a_node_that_cannot_read_the_url_is_named(cluster, machines):
    spec, store = make_spec(1), Store(machines.folder / "desk-refused")
    (machines.folder / "bucket" / "refused" / "dumps" / "d0").mkdir(parents=True)
    order = ClusterOrder(cluster.address, store=StoreElsewhere(f"{machines.url}/refused", store.root))
    with pytest.raises(StoreProblem, match=r"node \w+ \([\d.]+\): norename://.*IsADirectoryError") as refused:
        scripted(store, spec, {}, cluster, order)
    assert refused.value.exit_code == 4


@pytest.mark.parametrize("deal", [True, False])  # a training is not dealt, and waited for ever
def test_what_the_cluster_cannot_hold_is_refused(cluster, store, deal):
    spec = make_spec(2, backend="fsdp2", nproc=4)
    with pytest.raises(EnvironmentProblem, match="cannot fit a group of 4 CPU") as refused:
        scripted(store, spec, {}, cluster, deal=deal)
    assert refused.value.exit_code == 4


def test_a_sharded_group_over_two_nodes_gives_the_bits_of_one_machine(cluster, machines, template_of_workers):
    """From the command line, with real workers; three machines that share a bucket and nothing else."""

    def actordbg(desk, typed):
        environment = machines.desk(desk) | {"TEMPLATE_OF_WORKERS": str(template_of_workers)}
        done = run_program(command(machines.url, typed), env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    publish(Store(machines.folder / "bucket").create(), 3, length=48)
    how = "replay --max-inputs 2 --backend fsdp2 --nproc 2 --backward --keep-tensors --json"
    here = json.loads(actordbg("a", how))
    there = json.loads(actordbg("b", f"{how} --procs-per-node 1 {on_ray(cluster, template_of_workers)}"))
    assert (there["passed"], there["restarts"]) == (2, 0)
    folders = [machines.mirror(desk) / "replays" / one["replay_id"] for desk, one in (("a", here), ("b", there))]
    ours, theirs = map(stopcases.figures, folders)
    assert ours == theirs and len(ours) == 2
    for dump in ours:
        kept = [load_file(folder / "tensors" / f"{dump}.safetensors") for folder in folders]
        assert kept[0].keys() == kept[1].keys() and all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    assert [len(set(attempt["nodes"])) for attempt in attempts(folders[1])] == [2]
    stores = [list(node.glob("dumps/*/*/*")) for node in machines.folder.glob("node-*/actordbg/nodes/*")]
    brought = [{path.name.partition(".safetensors")[0] for path in dumps} for dumps in stores if dumps]
    assert brought == [set(ours)] * 2, "a node brings the dumps of the plan, and no other"


MEASURED = {"replay_id", "comparison_id", "log", "forward_s", "peak_memory_bytes", "load_s", "loads", "shared_with"}


def test_a_matrix_on_the_cluster_says_what_it_says_on_one_machine(cluster, store, template_of_workers):
    """From the command line: the same cells, words, verdicts and differences from the truth."""
    asked = "matrix --attn sdpa,flash_attention_2 --packing off --compile off --no-backward --laws 1 --json"
    environment = stopcases.environment({"TEMPLATE_OF_WORKERS": str(template_of_workers)})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running, answers = [], []
    for engine in ("", on_ray(cluster, template_of_workers)):  # at once, which halves the time
        own = Store(store.root / f"store-{len(engine)}").create()
        publish(own, 1, length=24)
        running.append(subprocess.Popen(command(own.root, f"{asked} {engine}"), env=environment, **pipes))
    for one in running:
        said, told = one.communicate()
        assert one.returncode == 0, said + told
        answers.append(json.loads(said))
    here, there = ([{key: cell[key] for key in cell.keys() - MEASURED} for cell in one["matrix"]["cells"]] for one in answers)
    assert here == there and [(cell["status"], cell["verdict"]) for cell in here] == [("passed", "match"), ("unavailable", None)]
    assert here[0]["reason"] == "", "also located, as `check` judges"
    assert answers[0]["good"] is answers[1]["good"] is True
    assert [(one["verdict"], one["sentence"]) for one in answers] == [("RIGHT", answers[0]["sentence"])] * 2


def test_rays_debugger_finds_an_input_that_failed_and_sees_its_frames(cluster, store, tmp_path):
    """From the command line: the user's own breakpoint(), and then a post mortem; an editor leaves and comes back."""
    store.create()
    publish(store, 1, length=40)
    publish(store, 1, length=33, first=1)
    faulty = brokenactor.environment(tmp_path / "fault", stopcases.FAULT)
    options = f"replay --engine ray --address {cluster.address} --groups 1 --ray-debug-error --yes --no-backward"
    options += (
        f" --runtime-env PYTHONPATH={faulty['PYTHONPATH']}{os.pathsep}{ROOT} --runtime-env BROKEN_ACTOR={faulty['BROKEN_ACTOR']}"
    )
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    seen = {}
    with subprocess.Popen(command(store.root, options), text=True, env=stopcases.environment(), **pipes) as replaying:
        try:
            for number in (1, 2):
                host, port = _look_into_what_is_paused(replaying, store, number, seen)
            said, told = replaying.communicate(timeout=stopcases.PATIENCE_S)
        finally:
            replaying.terminate()
    assert seen["marked"] == "40" and seen["exception"] == "ValueError" and seen["sequences"].startswith("tensor([["), seen
    assert replaying.returncode == 1 and "1 passed, 1 failed of 2" in said and "boom" in said, said + told
    assert told.count(f"an editor, at {host}:{port}") == 2 and not paused()


def _look_into_what_is_paused(replaying, store, number, seen):
    """As Ray's debugger does it: find the process that is paused, connect to its port, look at a frame, and let it continue.

    number: which stop it is. The next one may come at once, at the same port: nothing but the journal tells them apart.
    """

    def stops():
        return sum(one["event"] == "stop" for file in store.replays.glob("*/rank0.jsonl") for one in read_events(file))

    patience = time.monotonic() + stopcases.PATIENCE_S
    while stops() < number or not (found := paused()):
        assert replaying.poll() is None and time.monotonic() < patience, replaying.communicate(timeout=1)
        time.sleep(0.1)
    ((host, port),) = found
    editor = Editor(port, host)
    stopped = editor.event("stopped")
    if stopped["reason"] == "exception":
        seen |= {"exception": stopped["text"], **editor.variables(stopped["threadId"])}
    else:
        seen["marked"] = editor.evaluate("marked", stopped["threadId"], "forward")
    editor.ask("disconnect", terminateDebuggee=False)
    editor.close()
    return host, port


def test_a_prompt_says_on_which_node_it_is(cluster, store, monkeypatch):
    """A terminal goes to the prompt only where it can reach it (`Relay.call`); elsewhere the command names the node."""
    monkeypatch.setattr(RayEngine, "is_here", lambda self, address: False)
    spec, prompts = make_spec(2), Relay()
    told = []
    shown = []

    def answer(event):
        if event.kind == "stop":
            told.append(event.at)
            connection = meeting.connect(store.replays / spec.replay_id, socket_of(0))
            connection.sendall(b"p 'rank', rank\ncontinue\n")
            while data := connection.recv(65536):
                shown.append(data.decode())

    calls = []
    monkeypatch.setattr(prompts, "call", lambda folder, rank: calls.append(rank))
    order = ClusterOrder(cluster.address, groups=1)
    stops = StopOrder(wait_s=240.0)
    outcome = scripted(store, spec, {"d1": "break"}, cluster, order, stops=stops, prompts=prompts, on_event=answer)
    assert outcome.all_passed and "('rank', 0)" in "".join(shown)
    (stop,) = [one for one in read_events(outcome.folder / "rank0.jsonl") if one["event"] == "stop"]
    assert stop["node_address"] == ray.nodes()[0]["NodeManagerAddress"]
    assert (told, calls) == ([stop["node_address"]], [])
