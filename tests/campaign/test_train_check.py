"""Optimizer steps for real: configurations agree, planted faults are found, and a training continues after a death as if
undisturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from commandline import invoke
from matrixcases import training_check
from replaycases import publish
from roots import SUPPORT
from supervised import fake_launcher

from actordbg.base.errors import ActordbgError, GroupsLost, UnsafeInput, Unsupported
from actordbg.base.processes import session_members
from actordbg.campaign import checkpoints
from actordbg.campaign import run_train_check as running
from actordbg.campaign.run_train_check import CHECK, STORAGE, WENT_ON, TrainRun, folder_of
from actordbg.campaign.train_document import FIGURES, verdicts
from actordbg.campaign.train_plan import configurations, make_train_cells
from actordbg.config.choices import gather_facts, installed_versions
from actordbg.config.replay_config import ReplayConfig
from actordbg.formats.dump_record import now_timestamp
from actordbg.records.journal import SPEC, Journal
from actordbg.records.matrix_record import ASKED, TRAINED, TrainCheckRecord, TrainStep
from actordbg.records.replay_record import PASSED, ReplaySpec, ResultRecord
from actordbg.replay.group_engine import GroupEngine, Losses, WarmGroups, using
from actordbg.replay.supervise import Progress, ReplayOutcome
from actordbg.store.layout import Store

FAULTS = {
    "fsdp2, ring 2": ["ring_without_reduction"],
    "fsdp2": ["state_of_one_shard_lost", "no_zero_grad"],
}
DIVERGES_AT = {
    "ring_without_reduction": (1, "grad_norm", "not reduced over all ranks"),
    "state_of_one_shard_lost": (4, "update_norm", "state was reset"),
    "no_zero_grad": (2, "grad_norm", "missing zero_grad"),
}


@pytest.mark.slow
def test_five_configurations_agree_over_four_steps_and_three_faults_are_found(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """On four processes, in fp32: within 1e-5 of the plain Actor in every step and figure. Faults run beside sound cells."""
    inputs = publish(store, 4, length=40)
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
    sessions = []
    record = training_check(cells, inputs, 4, tmp_path / "logs", batch=4)

    done = TrainRun(store, record, inputs, warm=WarmGroups(fake_launcher(sessions, "planted_training"))).run()
    assert [(cell.name, cell.reason) for cell in done.cells if cell.status != "trained"] == []
    judged = {cell.name: one for cell, one in zip(done.cells, verdicts(done), strict=True) if cell.role == ASKED}
    sound = {name: one for name, one in judged.items() if name not in DIVERGES_AT}
    assert list(sound) == ["plain", "ZeRO 2", "fsdp2", "fsdp2, tp 2", "fsdp2, ring 2", "fsdp2, tp 2, ring 2"]
    assert {one.word for one in sound.values()} == {"agrees"} and {one.falls for one in sound.values()} == {"yes"}
    assert max(one.largest[figure] for one in sound.values() for figure in FIGURES) < 1e-5
    for fault, (step, figure, words) in DIVERGES_AT.items():
        found = judged[fault].parting
        assert found is not None and (found.step, found.figure) == (step, figure), (fault, found)
        assert words in found.looks_like
    assert [pid for session in sessions for pid in session_members(session)] == [], "processes were left behind"
    _as_the_ancestor_reads_it(store, tmp_path / "logs")
    _printed_again(store, tmp_path)


def _as_the_ancestor_reads_it(store: Store, logs: Path):
    """The logs have the ancestor's names, and compare-logs reads them."""
    names = {"plain_test.log", "deepspeed_test.log", "fsdp2_test.log", "fsdp2_tp2_test.log", "fsdp2_ring2_test.log"}
    assert names | {"fsdp2_tp2_ring2_test.log"} <= {path.name for path in logs.iterdir()}
    pair = [str(logs / name) for name in ("deepspeed_test.log", "fsdp2_tp2_ring2_test.log")]
    compared = invoke(store, "compare-logs", *pair, "--json")
    answer = json.loads(compared.stdout)
    assert (answer["verdict"], answer["metric"], answer["common"]) == ("aligned", "gpt_loss", 4)


def _printed_again(store: Store, folder: Path):
    """--show: a table of 80 columns, a picture, exit code 1 for the faults; and --resume has nothing left to run."""
    picture = folder / "check.png"
    shown = invoke(store, "train-check", "--show", "last", "--plot", str(picture))
    assert shown.exit_code == 1 and picture.read_bytes().startswith(b"\x89PNG")
    assert max(map(len, shown.stdout.split("\nLogs\n")[0].splitlines())) <= 80
    assert "no_zero_grad: at step 2 the gradient norm is " in " ".join(shown.stdout.split())
    again = invoke(store, "train-check", "--resume", "last", "--json")
    assert json.loads(again.stdout)["check"]["status"] == "complete"


DYING = {
    "1": {"step": 3, "where": "checkpoint", "rank": 0, "command": False},
    "3": {"step": 3, "where": "step", "rank": 1, "command": True},
}


@pytest.mark.slow
def test_trainings_that_were_killed_go_on_from_their_checkpoints_to_the_same_figures(store: Store, tmp_path: Path):
    """Plain killed in the middle of a checkpoint continues on its own; fsdp2 on two processes, killed with the command in the
    middle
    of a step, by --resume. Beside each is the same training undisturbed.
    """
    inputs = publish(store, 4, length=24)
    base = ReplayConfig(nproc=2, dtype="fp32", timeout_s=600.0)
    plain, fsdp2 = make_train_cells(
        [replace(base, backend="plain", nproc=1), replace(base, backend="fsdp2")], base, gather_facts(), None
    )[2:]
    cells = tuple(replace(cell, index=i, log_name=f"{i}.log") for i, cell in enumerate((plain, plain, fsdp2, fsdp2)))
    storage = tmp_path / "checkpoints"
    options = {
        "inputs": [asdict(one) for one in inputs],
        STORAGE: {"folder": str(storage), "every": 1, "versions": installed_versions()},
    }
    record = training_check(cells, inputs, 4, tmp_path / "logs", options=options)
    (tmp_path / "record.json").write_text(record.to_json())
    (tmp_path / "inputs.json").write_text(json.dumps([asdict(one) for one in inputs]))
    path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"DYING": json.dumps(DYING), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    arguments = [str(one) for one in (store.root, tmp_path / "record.json", tmp_path / "inputs.json")]
    ended = subprocess.run([sys.executable, "-m", "dying_training", *arguments], env=environment, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    left = TrainCheckRecord.from_file(folder_of(store, record.check_id) / CHECK)
    assert [cell.status for cell in left.cells] == [TRAINED, TRAINED, TRAINED, "not run"]
    assert [one.name for one in (storage / record.check_id).iterdir()] == ["cell-3"], "what is done has none any more"

    again = invoke(store, "train-check", "--resume", "last", "--json")
    done = TrainCheckRecord.from_file(folder_of(store, record.check_id) / CHECK)
    assert [(cell.status, cell.reason, len(cell.steps)) for cell in done.cells] == [(TRAINED, "", 4)] * 4, again.output
    assert done.options[WENT_ON] == {"1": [2], "3": [2]}
    assert done.cells[1].steps == done.cells[0].steps and done.cells[3].steps == done.cells[2].steps
    assert not list(storage.iterdir())


def made(folder: Path, step: int, attempt: int = 1, *, whole: bool = True) -> Path:
    one = checkpoints.generation(folder, step, attempt)
    begun = checkpoints.unfinished(one)
    checkpoints.open_folder(begun)
    (begun / "__0_0.distcp").write_bytes(b"half")
    return begun.rename(one) if whole else begun


def test_the_newest_complete_checkpoint_whose_steps_are_known_is_found_and_two_are_kept(tmp_path: Path):
    folder = tmp_path / "c" / "cell-3"
    assert checkpoints.newest(folder, 9) is None
    for step in (1, 2, 9, 10):
        made(folder, step)
    made(folder, 10, attempt=2)
    made(folder, 11, whole=False)
    found = [checkpoints.newest(folder, most) for most in (99, 9, 8, 0)]
    assert [one and (one.step, one.attempt) for one in found] == [(10, 2), (9, 1), (2, 1), None]
    checkpoints.prune(folder)
    assert sorted(one.name for one in folder.iterdir()) == [".step-0011.1", "step-0010.1", "step-0010.2"]
    checkpoints.clear(folder, checkpoints.newest(folder, 99))
    assert sorted(one.name for one in folder.iterdir()) == ["step-0010.1", "step-0010.2"]
    checkpoints.remove_all(folder)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_others_may_have_written_is_refused_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "cell-3"
    one = made(folder, 4)
    assert checkpoints.newest(folder, 4) is not None
    one.chmod(0o770)
    with pytest.raises(UnsafeInput, match="other users can write"):
        checkpoints.newest(folder, 4)
    one.chmod(0o700)
    (one / "__1_0.distcp").symlink_to(one / "__0_0.distcp")
    with pytest.raises(UnsafeInput, match="is a link"):
        checkpoints.newest(folder, 4)
    (one / "__1_0.distcp").unlink()
    monkeypatch.setattr(checkpoints, "is_own", lambda uid: False)
    with pytest.raises(UnsafeInput, match="was written by"):
        checkpoints.newest(folder, 4)


def test_a_checkpoint_of_other_versions_is_refused_with_the_list(store: Store, tmp_path: Path):
    base = ReplayConfig(dtype="fp32")
    cell = replace(make_train_cells([base], base, gather_facts(), None)[0], steps=(TrainStep(1, 1.0, 1.0, 1.0),))
    options = {STORAGE: {"folder": str(tmp_path), "every": 1, "versions": installed_versions() | {"torch": "2.12.0", "x": "1"}}}
    record = replace(training_check((cell,), [], 2, tmp_path / "logs", options=options), status="interrupted")
    made(tmp_path / record.check_id / "cell-0", 1)
    with pytest.raises(Unsupported, match=r"torch was 2.12.0, and is .*; x was 1, and is none") as refused:
        TrainRun(store, record, []).run()
    assert "remove" in refused.value.hint


def test_a_storage_that_cannot_be_is_refused_before_anything_is_written(store: Store, tmp_path: Path):
    publish(store, 1)
    (tmp_path / "file").write_text("")
    cases = {
        "is a URL": ["--storage", "s3://bucket/checkpoints"],
        "is not a folder": ["--storage", str(tmp_path / "file")],
        "is inside the store": ["--storage", str(store.root / "checkpoints")],
        "--checkpoint-every needs --storage": ["--checkpoint-every", "2"],
    }
    for told, options in cases.items():
        with pytest.raises(ActordbgError, match=told) as refused:
            invoke(store, "train-check", "--dry-run", *options)
        assert refused.value.exit_code == 2
    planned = invoke(store, *f"train-check --dry-run --json --steps 40 --storage {tmp_path / 'new'}".split())
    told = json.loads(planned.stdout)["options"][STORAGE]
    assert (told["folder"], told["every"]) == (str(tmp_path / "new"), 4) and not (tmp_path / "new").exists()


class OfACluster(GroupEngine):
    def losses(self) -> Losses:
        return Losses(3, "--max-failures")


@pytest.mark.parametrize(("deaths", "engine"), [([1], GroupEngine()), ([9], GroupEngine()), ([2, 2], OfACluster())])
def test_a_group_that_is_lost_starts_its_training_again_and_too_often_leaves_it_open(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: list[int], engine: GroupEngine
):
    """Without --storage: from step 1, in another folder. What one attempt left half done is never mixed into the next.

    deaths: of each cell's group. On a cluster those of all cells are counted together, each once.
    """
    inputs, base, left = publish(store, 2, length=24), ReplayConfig(dtype="fp32"), list(deaths)

    def replayed(
        _store: Store, spec: ReplaySpec, on_event: Callable[[Progress], None], *, folder: Path, losses: Losses | None, **_: object
    ) -> ReplayOutcome:
        (folder / SPEC).write_text(spec.to_json())
        journal, cell = Journal(folder / "rank0.jsonl"), int(folder.name[5])
        for item in spec.inputs[: 3 if left[cell] else None]:
            extra = {"step": {"grad_norm": 1.0, "update_norm": 1.0}} if "-m02-" in item.dump_id else {}
            times = {"started_at": now_timestamp(), "finished_at": now_timestamp()}
            result = ResultRecord(spec.replay_id, item.dump_id, PASSED, 1, 0, 0, loss=float(left[cell]), extra=extra, **times)
            journal.append("end", **result.to_dict())
            on_event(Progress("result", PASSED, result))
        if left[cell]:
            left[cell] -= 1
            if losses is not None and left[cell]:
                losses.count("node 1 is gone")  # a node; the supervisor does not count what died between two inputs
            on_event(Progress("attempt", "node 1 is gone"))
        return ReplayOutcome(spec.replay_id, folder, "complete", len(spec.inputs))

    monkeypatch.setattr(running, "run_replay", replayed)
    cells = tuple(make_train_cells([base], base, gather_facts(), None)[: len(deaths)])
    record = training_check(cells, inputs, 2, tmp_path / "logs")
    if deaths == [1]:
        (cell,) = running.TrainRun(store, record, inputs).run().cells
        assert (cell.status, cell.folder, [one.loss for one in cell.steps]) == (TRAINED, "cell-0.2", [0.0, 0.0])
        return
    with using(engine), pytest.raises(GroupsLost, match=r"groups were lost 4 times.*node 1 is gone") as stopped:
        running.TrainRun(store, record, inputs).run()
    assert "train-check --resume" in stopped.value.hint
    *others, cell = TrainCheckRecord.from_file(folder_of(store, record.check_id) / CHECK).cells
    assert (cell.status, cell.steps) == ("not run", ()) and all(one.status == TRAINED for one in others)
