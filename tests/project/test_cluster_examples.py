"""The examples for containers and Slurm: files that they name are there, and the Slurm script does what it says, with stand-ins."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from roots import ROOT, run_program

CONTAINERS, SLURM = ROOT / "examples" / "containers", ROOT / "examples" / "slurm" / "replay.sbatch"
STUB = """#!/usr/bin/env bash
echo "{name} $*" >> "$STUB_LOG"
{body}
"""
STUBS = {
    "scontrol": "printf 'n1\\nn2\\nn3\\n'",
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "hostname": "echo '127.0.1.1 10.0.0.7 fe80::1'",
    "ray": 'if [[ "$*" == *--block* ]]; then echo $$ >> "$STUB_LOG.pids"; exec sleep 600; fi',
    "python": "echo nodes 3",
}


def test_the_compose_file_names_files_that_are_there():
    services = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())["services"]
    build = services["head"]["build"]
    assert (CONTAINERS / build["context"]).resolve() == ROOT and (ROOT / build["dockerfile"]).is_file()
    assert (ROOT / f"{build['dockerfile']}.dockerignore").is_file()
    for one in services.values():
        assert one["networks"] == ["cluster"] and "shared:/shared" in one["volumes"]
        assert (CONTAINERS / one["command"][1].removeprefix("/")).is_file()


def stand_ins(folder, **bodies):
    """An environment in which these programs are stand-ins that write down how they were called."""
    for name, body in bodies.items():
        (folder / name).write_text(STUB.format(name=name, body=body))
        (folder / name).chmod(0o700)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "STUB_LOG": str(folder / "log"), "ACTORDBG_STORE": "/shared/store"}


def bash(script, environment, *words):
    return run_program(["bash", script, *words], env=environment)


def test_head_and_worker_on_two_hosts_meet_at_the_heads_address(tmp_path):
    """The file for two hosts: scripts that are in the image, one address for both, and a worker that joins there."""
    services = yaml.safe_load((CONTAINERS / "two-hosts.yaml").read_text())["services"]
    ignored = (CONTAINERS / "Dockerfile.dockerignore").read_text().split()
    own = stand_ins(tmp_path, hostname="echo 127.0.1.1", ray="", python="echo 2", actordbg="")
    for name in ("head", "worker"):
        one = services[name]
        assert (one["network_mode"], one["pull_policy"]) == ("host", "never") and one["volumes"][0].endswith(":/shared")
        script = Path(one["command"][1]).relative_to("/src")
        assert not {str(script), *map(str, script.parents)} & {*ignored}
        named = {key: re.sub(r"\$\{HEAD:.*?\}", "10.0.0.1", value) for key, value in one["environment"].items()}
        done = bash(ROOT / script, own | named | {"ACTORDBG_STORE": str(tmp_path)})
        assert done.returncode == 0, done.stderr
    said = (tmp_path / "log").read_text()
    assert "ray start --head --node-ip-address=10.0.0.1 --port=6379" in said and "ray start --address=10.0.0.1:6379" in said
    assert "actordbg replay --all --engine ray --address 10.0.0.1:6379 --groups 2" in said


@pytest.mark.parametrize("path", sorted([*CONTAINERS.glob("scripts/*.sh"), SLURM]), ids=lambda path: path.name)
def test_scripts_are_bash(path):
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


def slurm(folder, replay):
    """Slurm, Ray and actordbg as stand-ins; `replay`: what the replay does."""
    own = {"SLURM_JOB_ID": "1042", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_ON_NODE": "8", "SLURM_GPUS_ON_NODE": "2"}
    return stand_ins(folder, **STUBS, actordbg=replay) | own


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_slurm_job_starts_ray_on_every_node_and_ends_with_the_replays_exit_code(tmp_path):
    # the replay waits until all steps of Ray are there, as Ray's own driver waits for its nodes
    body = 'until [ "$(wc -l < "$STUB_LOG.pids")" = 2 ]; do sleep 0.02; done; exit 7'
    done = bash(SLURM, slurm(tmp_path, body), "replay", "--groups", "auto")
    assert done.returncode == 7, done.stderr
    said = (tmp_path / "log").read_text()
    assert "ray start --head --node-ip-address=10.0.0.7 --port=6421 --num-cpus=8 --num-gpus=2 --block" in said
    assert "srun --nodes=2 --ntasks-per-node=1 --exclude=n1 --overlap ray start --address=10.0.0.7:6421" in said
    assert "actordbg replay --groups auto --engine ray --address 10.0.0.7:6421" in said
    assert not any(is_alive(int(pid)) for pid in (tmp_path / "log.pids").read_text().split())


def test_slurms_signal_ends_the_replay_as_ctrl_c_would_and_waits_for_it(tmp_path):
    body = "trap 'touch $STUB_LOG.journals; exit 130' TERM; touch $STUB_LOG.began; while :; do sleep 0.05; done"
    own = slurm(tmp_path, body)
    job = subprocess.Popen(["bash", SLURM, "replay"], env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "log.began").exists():
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 130 and (tmp_path / "log.journals").exists()


def test_without_a_store_the_slurm_script_says_so(tmp_path):
    own = {name: value for name, value in slurm(tmp_path, "").items() if name != "ACTORDBG_STORE"}
    done = bash(SLURM, own, "replay")
    assert done.returncode != 0 and "name a store that all nodes see" in done.stderr
