"""What is started: command lines and environments."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actordbg.base.errors import Unsupported
from actordbg.config import consent
from actordbg.config.replay_config import ReplayConfig
from actordbg.replay.launch import child_environment, deepspeed_command, direct_command, groups_of, launch, surrounding_launcher

DEEPSPEED = ReplayConfig(backend="deepspeed", nproc=2)
CODED = ReplayConfig(backend="deepspeed", nproc=2, model="/models/mine")
WORK = Path("/store/replays/r/work-0-1.json")


def test_plain_workers_are_groups_of_one_and_deepspeed_ranks_are_one_group() -> None:
    assert [group.ranks for group in groups_of(ReplayConfig(nproc=2))] == [(0,), (1,)]
    assert [group.ranks for group in groups_of(DEEPSPEED)] == [(0, 1)]
    assert groups_of(DEEPSPEED)[0].collective and not groups_of(ReplayConfig(backend="deepspeed"))[0].collective


def test_deepspeed_is_this_interpreters_and_never_reads_a_hostfile() -> None:
    command = deepspeed_command(DEEPSPEED, {"DS_ACCELERATOR": "cpu"}, "some.module", WORK)
    assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert "--hostfile=/dev/null" in command and "--num_accelerators=2" in command
    assert command[-4:] == ["--module", "some.module", "--work", str(WORK)]


def test_visible_devices_are_named_because_deepspeed_would_take_the_first_ones() -> None:
    command = deepspeed_command(DEEPSPEED, {"CUDA_VISIBLE_DEVICES": "3, 5,6"}, "m", WORK)
    assert "--include=localhost:3,5" in command and not any("num_accelerators" in part for part in command)
    with pytest.raises(Unsupported, match="needs 2 GPUs"):
        deepspeed_command(DEEPSPEED, {"CUDA_VISIBLE_DEVICES": "3"}, "m", WORK)
    with pytest.raises(Unsupported, match="device numbers"):
        deepspeed_command(DEEPSPEED, {"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, "m", WORK)


def test_ranks_started_directly_are_given_the_same_devices() -> None:
    command = direct_command(DEEPSPEED, {"CUDA_VISIBLE_DEVICES": "3, 5,6"}, "m", WORK)
    assert command[1:3] == ["-m", "actordbg.replay.rank_launcher"] and "--devices=3,5" in command
    assert not any("--devices" in part for part in direct_command(DEEPSPEED, {"DS_ACCELERATOR": "cpu"}, "m", WORK))


SHOWN = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[sys.argv.index("--work") + 1]).parent
about = {"environ": dict(os.environ), "words": sys.argv[1:]}
(folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(about))
"""
BY_THE_REAL_ALONE = {
    "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_ERROR_FILE",
    "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR",
}  # fmt: skip
"""What serves the talk of torchrun's agent with its workers, and what importing deepspeed sets, which a worker does as well."""
DIFFERENT = {"MASTER_PORT", "ACTORDBG_GROUP", "TORCHELASTIC_RUN_ID", "KINETO_LOG_LEVEL"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["deepspeed", "fsdp2"])
def test_a_rank_that_is_started_directly_cannot_tell_it_from_the_real_launcher(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shows_itself.py").write_text(SHOWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    seen: dict[str, list[dict[str, Any]]] = {}
    for kind in ("direct", "real"):
        config = ReplayConfig(backend=backend, nproc=2, launcher=kind)
        (work := tmp_path / kind / "work.json").parent.mkdir()
        assert launch(config, groups_of(config)[0], work, "shows_itself").process.wait(600) == 0
        seen[kind] = [json.loads((work.parent / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for direct, real in zip(seen["direct"], seen["real"], strict=True):
        ours, theirs = (
            {name: value for name, value in one["environ"].items() if name not in DIFFERENT | BY_THE_REAL_ALONE}
            for one in (direct, real)
        )
        assert ours == theirs
        words = [[word for word in one["words"] if "work.json" not in word] for one in (direct, real)]
        assert words[0] == words[1]


@pytest.fixture
def consented() -> Iterator[list[str]]:
    """Consent to the code of the model of CODED, and what a worker has of it in its argument list."""
    consent.give(CODED.model)
    yield [consent.FLAG, CODED.model]
    consent.withhold()


@pytest.mark.slow
def test_the_workers_options_are_not_taken_for_the_launchers(consented: list[str]) -> None:
    from deepspeed.launcher.runner import parse_args

    command = deepspeed_command(CODED, {"DS_ACCELERATOR": "cpu"}, "some.module", WORK)
    parsed = parse_args(command[3:])
    assert parsed.user_script == "some.module" and parsed.user_args == ["--work", str(WORK), *consented]
    assert parsed.num_gpus == 2 and parsed.module


def test_a_surrounding_launchers_variables_do_not_reach_the_workers() -> None:
    base = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "x",
        "KEEP": "1",
    }
    made = child_environment(ReplayConfig(), base)
    assert made["KEEP"] == "1" and not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & made.keys()


def test_several_workers_share_the_cores_unless_the_user_decided() -> None:
    cores = len(os.sched_getaffinity(0))
    assert child_environment(ReplayConfig(nproc=2), {})["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    assert child_environment(ReplayConfig(nproc=2), {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in child_environment(ReplayConfig(nproc=1), {})


def test_actordbg_is_importable_in_the_workers_also_when_it_is_not_installed() -> None:
    made = child_environment(ReplayConfig(), {"PYTHONPATH": "/mine"})
    assert made["PYTHONPATH"].endswith("/mine") and "HF_HUB_OFFLINE" not in made


def test_a_surrounding_launcher_is_recognised_by_all_three_variables() -> None:
    assert surrounding_launcher({"RANK": "0", "WORLD_SIZE": "8"}) is None, "as in many containers' environments"
    around = surrounding_launcher({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_SIZE": "2"})
    assert around is not None
    assert (around.rank, around.world_size, around.local_size, around.deepspeed) == (1, 4, 2, True)
