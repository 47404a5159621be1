"""`actordbg replay` as typed: what it selects, refuses and answers. Nothing here starts a worker except the last test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from replaycases import publish
from typer.testing import CliRunner

from actordbg.cli.app import app
from actordbg.errors import ActordbgError, Unsupported, UsageError
from actordbg.replay.journal import read_events, read_results
from actordbg.replay.processes import session_members
from actordbg.store import Store


@pytest.fixture(autouse=True)
def no_surrounding_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def invoke(store: Store, *arguments: str) -> Result:
    result = CliRunner().invoke(app, ["--store", str(store.root), "replay", *arguments])
    if isinstance(result.exception, ActordbgError):
        raise result.exception
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


def planned(store: Store, *arguments: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(invoke(store, "--dry-run", "--json", *arguments).stdout)
    return answer


def test_a_condition_selects_and_max_inputs_cuts(store: Store) -> None:
    publish(store, 3, length=64)
    publish(store, 4, length=128, first=3)
    assert planned(store)["selected"] == 7
    assert planned(store, "--where", "seq_len>100 and rank=0", "--max-inputs", "3")["selected"] == 3


def test_nothing_selected_is_said_with_what_there_is_and_is_no_failure(store: Store) -> None:
    publish(store, 2, length=64)
    result = invoke(store, "--where", "seq_len>4096")
    assert result.exit_code == 0
    assert "no dump matches seq_len>4096; the store holds 2 dumps with seq_len 64 to 64" in result.stdout
    answer = json.loads(invoke(store, "--where", "seq_len>4096", "--json").stdout)
    assert (answer["replay_id"], answer["selected"]) == (None, 0)
    assert list(store.replays.glob("*")) == []


def test_an_empty_store_says_how_dumps_come_about(store: Store) -> None:
    assert "dump import" in invoke(store).stdout


def test_dumps_that_cannot_be_replayed_are_left_out_and_counted(store: Store) -> None:
    publish(store, 2, replayable=False, extra={"pixel_values": "not storable"})
    result = invoke(store, "--dry-run")
    assert "no dump can be replayed" in result.stdout


def test_an_input_file_is_replayed_wherever_it_lies(store: Store, tmp_path: Path) -> None:
    inputs = publish(store, 2)
    inside = store.root / inputs[0].path
    outside = tmp_path / "copied.safetensors.zst"
    outside.write_bytes((store.root / inputs[1].path).read_bytes())
    assert planned(store, "--input-file", str(inside), "--input-file", str(outside))["selected"] == 2
    assert planned(store, "--input-file", str(inside), "--input-file", str(inside))["selected"] == 1


def test_a_pickle_is_never_read(store: Store, tmp_path: Path) -> None:
    (tmp_path / "input.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(UsageError, match="pickle") as caught:
        invoke(store, "--input-file", "input.pkl")
    assert "actordbg dump import" in caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shuffle-inputs", "--order", "length"], "contradict"),
        (["--order", "alphabetical"], "not known"),
        (["--where", "rank=0", "--input-file", "x.safetensors.zst"], "exclude each other"),
        (["--input-file", "nowhere.safetensors.zst"], "not a file"),
        (["--resume", "last", "--dtype", "bf16"], "--dtype"),
        (["--zero-stage", "3"], "needs DeepSpeed"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(store: Store, arguments: list[str], words: str) -> None:
    publish(store, 1)
    with pytest.raises(UsageError, match=words):
        invoke(store, *arguments)


def test_a_configuration_that_cannot_work_here_is_refused_before_anything_starts(store: Store) -> None:
    publish(store, 1)
    with pytest.raises(Unsupported) as caught:
        invoke(store, "--backend", "deepspeed", "--zero-stage", "3", "--dtype", "fp16")
    assert caught.value.exit_code == 3 and caught.value.hint
    assert list(store.replays.glob("*")) == []


def test_defaults_come_from_actordbg_toml(store: Store, tmp_path: Path) -> None:
    publish(store, 1)
    (tmp_path / "actordbg.toml").write_text('[replay]\nbackend = "deepspeed"\nnproc = 2\n')
    assert "2 workers (deepspeed)" in planned(store)["note"]
    assert "1 worker (plain)" in planned(store, "--backend", "plain", "--nproc", "1")["note"]


class TestUnderALauncher:
    """`deepspeed --num_gpus 2 --module actordbg replay ...`: the command is run once for each rank."""

    def test_ranks_other_than_0_leave_it_to_rank_0(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        publish(store, 1)
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
            monkeypatch.setenv(name, value)
        result = CliRunner().invoke(app, ["--local_rank=1", "--store", str(store.root), "replay"])
        assert (result.exit_code, result.stdout) == (0, "")

    def test_rank_0_takes_over_the_launchers_size_and_backend(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publish(store, 1)
        for name, value in {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_SIZE": "2",
            "CROSS_SIZE": "1",
        }.items():
            monkeypatch.setenv(name, value)
        assert "2 workers (deepspeed)" in planned(store)["note"]

    def test_several_machines_are_refused(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(Unsupported, match="one machine"):
            invoke(store)


def test_the_command_is_in_the_application() -> None:
    assert "replay" in typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_failed_input_gives_exit_code_1_and_every_result_is_in_the_catalog(store: Store) -> None:
    from actordbg.catalog.query import get_replay, results_for

    damaged, good = publish(store, 2)
    path = store.root / damaged.path
    path.write_bytes(path.read_bytes()[:-20])
    arguments = ["--input-file", str(path), "--input-file", str(store.root / good.path)]
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), "replay", *arguments, "--json"]
    home = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": home, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["passed"], answer["failed"], answer["status"]) == (1, 1, "complete")
    assert answer["failures"][0]["signature"] == "damaged-dump" and answer["failures"][0]["ways_out"]
    rows = {record.dump_id: record.status for record in results_for(store, answer["replay_id"])}
    assert rows == {damaged.dump_id: "failed", good.dump_id: "passed"}
    kept = get_replay(store, "last")
    assert (kept.replay_id, kept.status, kept.model, kept.attn) == (answer["replay_id"], "complete", "tiny", "sdpa")


@pytest.mark.slow
def test_ctrl_c_exits_with_130_says_what_is_kept_and_leaves_no_process(store: Store) -> None:
    publish(store, 60, length=512)
    command = [sys.executable, "-m", "actordbg", "--store", str(store.root), "replay", "--backward"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 120
    while not any(read_results(folder) for folder in store.replays.glob("*")):
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=30)
    assert running.returncode == 130, stderr
    folder = next(store.replays.glob("*"))
    kept = read_results(folder)
    assert 0 < len(kept) < 60 and f"{len(kept)} passed, {60 - len(kept)} not run" in stdout
    assert f"actordbg replay --resume {folder.name}" in stderr
    worker = next(event for event in read_events(folder / "rank0.jsonl") if event["event"] == "boot")["pid"]
    assert session_members(worker) == []
