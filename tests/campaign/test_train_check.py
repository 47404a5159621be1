"""Optimizer steps for real: the five configurations of OpenRLHF's test suite agree with the plain Actor, and three faults are found."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from amounts import first_or_all
from matrixcases import training_check
from replaycases import publish
from roots import SUPPORT
from typer.testing import CliRunner

from actordbg.actor.backends.training import Training
from actordbg.base.processes import session_members
from actordbg.campaign.run_train_check import TrainRun
from actordbg.campaign.train_document import FIGURES, verdicts
from actordbg.campaign.train_plan import configurations, make_train_cells, sft_cells
from actordbg.cli.app import app
from actordbg.config.choices import gather_facts
from actordbg.config.replay_config import ReplayConfig
from actordbg.records.matrix_record import ASKED, SFT
from actordbg.replay.group_engine import WarmGroups
from actordbg.replay.launch import launch
from actordbg.store.layout import Store

FAULTS = {
    "fsdp2, ring 2": ["ring_without_reduction"],
    "fsdp2": ["state_of_one_shard_lost", "no_zero_grad"],
}
PARTS_AT = {
    "ring_without_reduction": (1, "grad_norm", "not reduced over all ranks"),
    "state_of_one_shard_lost": (4, "update_norm", "state was reset"),
    "no_zero_grad": (2, "grad_norm", "a missing zero_grad"),
}


def five_configurations_agree_over_six_steps_and_three_faults_are_found(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On four processes, in fp32: within 1e-5 of the plain Actor in every step and figure. Faults run beside sound cells."""
    inputs = publish(store, 6, length=40)
    base = ReplayConfig(nproc=4, dtype="fp32", timeout_s=600.0)
    cells = make_train_cells(configurations(base, {}), base, gather_facts(), None)
    planted = {}
    for sound in [cell for cell in cells if cell.name in FAULTS]:
        for fault in FAULTS[sound.name]:
            planted[str(len(cells))] = fault
            cells.append(replace(sound, index=len(cells), name=fault, log_name=f"{fault}.log"))
    monkeypatch.setenv("PLANTED", json.dumps(planted))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    sessions: list[int] = []
    record = training_check(cells, inputs, 6, tmp_path / "logs", batch=4)

    def started(*arguments: object) -> object:
        launched = launch(*arguments, module="planted_training")  # type: ignore[arg-type]
        sessions.append(launched.session)
        return launched

    done = TrainRun(store, record, inputs, warm=WarmGroups(started)).run()  # type: ignore[arg-type]
    assert [(cell.name, cell.reason) for cell in done.cells if cell.status != "trained"] == []
    judged = {cell.name: one for cell, one in zip(done.cells, verdicts(done), strict=True) if cell.role == ASKED}
    sound = {name: one for name, one in judged.items() if name not in PARTS_AT}
    assert list(sound) == ["plain", "ZeRO 2", "fsdp2", "fsdp2, tp 2", "fsdp2, ring 2", "fsdp2, tp 2, ring 2"]
    assert {one.word for one in sound.values()} == {"agrees"} and {one.falls for one in sound.values()} == {"yes"}
    assert max(one.largest[figure] for one in sound.values() for figure in FIGURES) < 1e-5
    for fault, (step, figure, words) in PARTS_AT.items():
        found = judged[fault].parting
        assert found is not None and (found.step, found.figure) == (step, figure), (fault, found)
        assert words in found.looks_like
    assert [pid for session in sessions for pid in session_members(session)] == [], "processes were left behind"
    _as_the_ancestor_reads_it(store, tmp_path / "logs")
    _printed_again(store, tmp_path)


def _as_the_ancestor_reads_it(store: Store, logs: Path) -> None:
    """The logs have the ancestor's names, and compare-logs reads them."""
    names = {"plain_test.log", "deepspeed_test.log", "fsdp2_test.log", "fsdp2_tp2_test.log", "fsdp2_ring2_test.log"}
    assert names | {"fsdp2_tp2_ring2_test.log"} <= {path.name for path in logs.iterdir()}
    pair = [str(logs / name) for name in ("deepspeed_test.log", "fsdp2_tp2_ring2_test.log")]
    compared = CliRunner().invoke(app, ["compare-logs", *pair, "--json"])
    answer = json.loads(compared.stdout)
    assert (answer["verdict"], answer["metric"], answer["common"]) == ("aligned", "gpt_loss", 6)


def _printed_again(store: Store, folder: Path) -> None:
    """--show: a table of 80 columns, a picture, exit code 1 for the faults; and --resume has nothing left to run."""
    picture = folder / "check.png"
    shown = CliRunner().invoke(app, ["--store", str(store.root), "train-check", "--show", "last", "--plot", str(picture)])
    assert shown.exit_code == 1 and picture.read_bytes().startswith(b"\x89PNG")
    assert max(map(len, shown.stdout.split("\nLogs\n")[0].splitlines())) <= 80
    assert "no_zero_grad: at step 2 the gradient norm is off by" in " ".join(shown.stdout.split())
    again = CliRunner().invoke(app, ["--store", str(store.root), "train-check", "--resume", "last", "--json"])
    assert json.loads(again.stdout)["check"]["status"] == "complete"


def the_trainers_own_sft_is_run_under_zero_2_and_on_one_process_and_agrees(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenRLHF's `train_sft`, its own data loader, optimizer and log; a step's rows are the same in both."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    base = ReplayConfig(nproc=2)
    cells = sft_cells([replace(base, backend="deepspeed", zero_stage=2), replace(base, backend="fsdp2")], base, 0)
    options = {SFT: {"data": None, "round": 3, "accumulation": 1, "max_len": None, "dtype": "bf16", "attn": "sdpa"}}
    training = asdict(Training(lr=1e-3, gradient_checkpointing=True))
    record = training_check(cells, [], 6, tmp_path / "logs", dtype="bf16", training=training, options=options)
    done = TrainRun(store, record, []).run()
    assert [(cell.status, len(cell.steps)) for cell in done.cells] == [("trained", 6), ("trained", 6), ("unavailable", 0)]
    alone, zero, _ = verdicts(done)
    assert (alone.word, zero.word, zero.falls) == ("baseline", "agrees", "yes") and zero.largest["loss"] < 0.01
    pair = [str(tmp_path / "logs/sft" / cell.log_name) for cell in done.cells[:2]]
    assert pair[1].endswith("sft/deepspeed_test.log")
    assert "gpt_loss" in CliRunner().invoke(app, ["compare-logs", *pair]).stdout


LONG_WAYS = [
    five_configurations_agree_over_six_steps_and_three_faults_are_found,
    the_trainers_own_sft_is_run_under_zero_2_and_on_one_process_and_agrees,
]


@pytest.mark.slow
@pytest.mark.parametrize("long_way", first_or_all(LONG_WAYS), ids=lambda one: one.__name__)
def test_a_training_is_checked_whole(
    long_way: Callable[..., None], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_way(store, tmp_path, monkeypatch)
