"""`actordbg run` with real clusters: Ray's workers are recorded wherever they run, and the user's own hooks still run.

Each cluster has ports, a temporary folder and a session of its own, and ends with the tests that use it.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

import pytest
from amounts import first_or_all
from roots import run_program, script
from runkit import ROOT, clean_environment, fake_openrlhf, run_job
from victims import wait_for

from actordbg.base.processes import end_session
from actordbg.capture.switch_file import read_control
from actordbg.cli.dump_status_work import process_rows
from actordbg.dumps.recover import find_rings, recover
from actordbg.replay.launch import free_port
from actordbg.store import payload

pytestmark = pytest.mark.slow
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_AUTH_MODE": "disabled",  # Ray 2.60 would write a token into the home folder
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "200",  # on a loaded machine
}
DRIVER = """
import os, sys, time
import ray

def setup():
    os.environ["USERS_HOOK"] = "ran"

runtime_env = {"env_vars": {"NCCL_DEBUG": "WARN"}}
if "hook" in sys.argv:
    runtime_env["worker_process_setup_hook"] = setup
if "local" in sys.argv:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, _temp_dir=sys.argv[-1], runtime_env=runtime_env)
else:
    ray.init(runtime_env=runtime_env)

class Worker:
    def work(self, calls):
        import torch
        from openrlhf.models.actor import Actor
        actor = Actor()
        for number in range(calls):
            actor(torch.arange(16).reshape(2, 8))
        return os.environ.get("USERS_HOOK"), os.environ.get("NCCL_DEBUG")
    def end(self):
        ray.actor.exit_actor()
    def die(self):
        os.kill(os.getpid(), 9)

class PolicyModelActor(Worker): pass
class ReferenceModelActor(Worker): pass
class EmaModelActor(Worker): pass

own_path = {"env_vars": {"PYTHONPATH": os.environ["TREE"]}}
policy = ray.remote(num_cpus=0.1)(PolicyModelActor).remote()
reference = ray.remote(num_cpus=0.1)(ReferenceModelActor).options(runtime_env=own_path).remote()
print("answers", *ray.get([policy.work.remote(3), reference.work.remote(4)]), flush=True)
try:
    ray.get(policy.end.remote())
except ray.exceptions.RayActorError:
    pass
killed = ray.remote(num_cpus=0.1)(EmaModelActor).remote()
ray.get(killed.work.remote(2))
killed.die.remote()
time.sleep(2)
"""


@pytest.fixture
def tree(tmp_path):
    """What is to be trained: an OpenRLHF, and a driver with a policy and a reference worker; the second has its own PYTHONPATH."""
    folder = tmp_path / "tree"
    fake_openrlhf(folder)
    (folder / "driver.py").write_text(DRIVER)
    return folder


@pytest.fixture(scope="module")
def temporary():
    """A folder with a short name: Ray's socket paths must stay below 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="adbg-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def head(temporary):
    """The address of the job server of a Ray head on this host that knows nothing of actordbg, and is alone in its session."""
    port, dashboard, agent, client = (free_port() for _ in range(4))
    words = [
        "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}",
        "--num-cpus=4", f"--object-store-memory={100 * 2**20}", f"--temp-dir={temporary}/head", "--disable-usage-stats",
    ]  # fmt: skip
    log = (temporary / "head.log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *words], env=clean_environment(**QUIET), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
    )  # fmt: skip
    address = f"http://127.0.0.1:{dashboard}"
    try:
        assert process.wait(300) == 0, "the head node did not start"
        yield address
    finally:
        end_session(process.pid, grace_s=1.0)
        log.close()


def rows_of(store):
    """What the processes counted, once the rings of those that ended are recovered."""
    assert not any(report.problem for report in recover(store, find_rings(store)))
    return process_rows(store, datetime.now(timezone.utc))[0]


@pytest.mark.parametrize("how", first_or_all(["command", "script", "inside", "local"]))
def test_workers_of_a_cluster_are_recorded_and_whom_ray_ends_was_not_killed(store, tree, temporary, head, how):
    """One ends itself, one is ended by Ray with its driver, and one dies.

    `command`: a job is submitted below `run`; `script`: a script below `run` submits, with a YAML file; `inside`: the entrypoint
    is `run`; `local`: the driver has a cluster of its own.
    """
    ray = script(tree / "bin" / "ray", f'exec {sys.executable} -m ray.scripts.scripts "$@"')
    users = {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}", "TREE": f"{tree}{os.pathsep}{ROOT}"}
    (tree / "env.yaml").write_text("env_vars:\n" + "".join(f"  {name}: {value}\n" for name, value in users.items()))
    submit = f"{ray} job submit --address {head} --runtime-env {tree}/env.yaml --"
    run_inside = f"{sys.executable} -m actordbg --store {store.root} run --run a --"
    driver = f"{sys.executable} {tree}/driver.py hook"
    (tree / "job.sh").write_text(f"set -e\n{submit} {driver}\n")
    if how == "local":
        words = f"{driver} local {temporary}".split()
        done = run_job(store, "--run a --", *words, path=tree, TREE=users["TREE"], **QUIET)
    elif how == "inside":
        environment = clean_environment(**QUIET)
        words = f"{submit} {run_inside} {driver}".split()
        done = run_program(words, env=environment, timeout=300)
    else:
        words = f"{submit} {driver}".split() if how == "command" else ["bash", f"{tree}/job.sh"]
        done = run_job(store, "--run a --", *words, **QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answers ('ran', 'WARN') ('ran', 'WARN')" in done.stdout
    assert how == "inside" or "actordbg: recovered 2 inputs of processes that died\n" in done.stderr
    assert not read_control(store, "a").enabled
    wait_for(lambda: all(row.state in ("ended", "killed") for row in rows_of(store)))  # Ray ends workers after their driver
    assert [(row.role, row.state, row.captured, row.pending) for row in rows_of(store)] == [
        ("ema", "killed", 2, 0), ("policy", "ended", 3, 0), ("reference", "ended", 4, 0)
    ]  # fmt: skip
    marks = Counter((dump.record.run, dump.record.role, dump.record.recovered) for dump in map(payload.load, store.iter_dumps()))
    assert marks == {("a", "policy", None): 3, ("a", "reference", None): 4, ("a", "ema", "recent"): 2}
